"""What a device can do at best: memory bandwidth, arithmetic, launches. Constants with their sources, and a probe.

A bound from a datasheet is a floor that no program reaches; on the machine itself, `probe` measures what one gets.
"""

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EAGER, GRAPH = (
    5e-6,
    1.25e-6,
)  # (s a launch): eager PyTorch, and a node of a CUDA graph; shared/spec/latency.md section 4


@dataclass(frozen=True)
class Device:
    """Rates of one device. source: where each figure is from; measured: on the machine itself."""

    name: str
    bandwidth: float
    """(bytes/s)"""
    flops: dict[str, float]
    """(FLOP/s) of dense matrix products by number format; int8 in operations/s."""
    launch: float
    """(s) A kernel takes at least, launched one by one."""
    graph_launch: float
    """(s) The same inside a CUDA graph."""
    source: str
    measured: bool = False

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s of a number format; raises ValueError naming those that are known."""
        if dtype not in self.flops:
            raise ValueError(f"dtype: {dtype} is not known for {self.name}, allowed: {', '.join(self.flops)}")
        return self.flops[dtype]


def _gpu(name: str, terabytes: float, tera: tuple[float, float, float], source: str) -> Device:
    single, half, integer = (value * 1e12 for value in tera)
    flops = {"float32": single, "bfloat16": half, "float16": half, "int8": integer}
    return Device(name, terabytes * 1e12, flops, EAGER, GRAPH, source)


DEVICES = {
    "h200": _gpu(
        "NVIDIA H200",
        4.3,
        (67.0, 790.0, 1979.0),
        "bandwidth and bf16 measured (project's specification; the datasheet says 4.8 TB/s and 989 TFLOP/s dense); "
        "fp32 without tensor cores and int8 dense from NVIDIA's H200 datasheet",
    ),
    "h100": _gpu("NVIDIA H100 SXM", 3.35, (67.0, 989.0, 1979.0), "NVIDIA H100 datasheet, SXM5, dense"),
    "a100": _gpu(
        "NVIDIA A100-80G SXM", 2.04, (19.5, 312.0, 624.0), "NVIDIA A100 datasheet, 80 GB SXM (2,039 GB/s), dense"
    ),
    "rtx4090": _gpu(
        "NVIDIA RTX 4090",
        1.008,
        (82.6, 165.0, 660.0),
        "NVIDIA Ada architecture whitepaper, appendix A: 384-bit GDDR6X at 21 Gb/s; fp16 with fp32 accumulation, dense",
    ),
    "orin": _gpu(
        "NVIDIA Jetson AGX Orin 64G",
        0.205,
        (5.3, 42.5, 85.0),
        "NVIDIA Jetson AGX Orin technical brief: 204.8 GB/s LPDDR5, 5.3 TFLOP/s fp32, 170 sparse int8 TOPS on the GPU, "
        "so 85 dense, and half of that in fp16/bf16; without the two deep-learning accelerators",
    ),
    "thor": _gpu(
        "NVIDIA Jetson Thor T5000",
        0.273,
        (8.06, 258.5, 517.0),
        "NVIDIA Jetson Thor datasheet: 273 GB/s LPDDR5X and 2,070 sparse fp4 TFLOP/s, so 258.5 dense bf16 and 517 in 8 "
        "bits; fp32 = 2,560 cores x 2 x 1.575 GHz. VLA-Perf (arXiv 2602.18397, table 10) takes 270 GB/s, 400 and 800",
    ),
}
