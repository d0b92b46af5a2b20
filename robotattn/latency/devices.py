"""What a device can do at best: memory bandwidth, arithmetic, launches. Constants with their sources, and a probe.

A bound from a datasheet is a floor that no program reaches; on the machine itself, `probe` measures what one gets.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat

import numpy as np
import torch
from torch import Tensor

from robotattn.latency.measure import Clock

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EAGER, GRAPH = 5e-6, 1.25e-6  # (s a launch): eager PyTorch, and a node of a CUDA graph; the project's specification
WINDOW = 0.15  # (s) for each quantity that a probe measures
SIDE = {"cpu": 512, "mps": 4096, "cuda": 8192}  # of the matrices of a probe; large enough to keep the device busy
STREAM = {"cpu": 2**28, "mps": 2**29, "cuda": 2**31}  # (bytes) that a probe walks through; more than the caches hold
PART = {"cpu": 2**22, "mps": 2**26, "cuda": 2**28}  # (bytes) of it at a time: on a CPU shorter than a turn of a program
CHAIN = 200  # launches timed together


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


def probe(device: torch.device | str, dtype: torch.dtype | None = None, threads: int | None = None) -> Device:
    """Measure a device: bandwidth, the rate of matrix products, the time of a launch; under 3 s on one CPU thread.

    dtype: the number format of the products, None = float32, bfloat16, float16 and int8, those that the device has.
    threads: of the CPU, None = as they are. Each figure is the best of many tries: other programs only slow them down.
    Raises ValueError for a device that cannot be synchronised.
    """
    clock = Clock(device)
    with _threads(threads), torch.inference_mode():
        used = torch.get_num_threads()
        flops = {name: rate for name in _formats(dtype) if (rate := _products(clock, name))}
        bandwidth, launch = _bandwidth(clock), _launch(clock)
        graph = _graph_launch(clock) if clock.device.type == "cuda" else launch
    name = torch.cuda.get_device_name(clock.device) if clock.device.type == "cuda" else platform.machine()
    name = name if clock.device.type == "cuda" else f"{name} {clock.device.type}, {used} thread{'s' * (used > 1)}"
    return Device(name, bandwidth, flops, launch, graph, f"probed here, torch {torch.__version__}", measured=True)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _formats(dtype: torch.dtype | None) -> list[str]:
    if dtype is None:
        return [*DTYPES, "int8"]
    return [str(dtype).removeprefix("torch.")]


def _times(clock: Clock, work: Iterator[Callable[[], object]], share: float = 1.0) -> list[int]:
    """Return the times (ns) of pieces of work, for a share of `WINDOW` and at least three; the first is not counted."""
    next(work)()
    times, end = list[int](), clock.now() + int(share * WINDOW * 1e9)
    while len(times) < 3 or clock.now() < end:
        times.append(clock.time(next(work))[1])
    return times


def _best(clock: Clock, work: Callable[[], object], share: float = 1.0) -> float:
    """Return the shortest time (s) of work that is done again and again."""
    return min(_times(clock, repeat(work), share)) * 1e-9


def _bandwidth(clock: Clock) -> float:
    """Return bytes/s of a copy (read and written) or of a sum (read), whichever is more.

    Part after part of a large memory, so that every part has left the caches when its turn comes again. Of all parts
    the fastest tenth: the very fastest may have been in a cache after all.
    """
    size = PART[clock.device.type]
    parts = torch.ones(STREAM[clock.device.type] // 4, device=clock.device).view(-1, size // 4)
    half = len(parts) // 2
    copies = cycle([partial(parts[half + i].copy_, parts[i]) for i in range(half)])
    sums = cycle([partial(torch.sum, part) for part in parts])
    rates = (moved / float(np.quantile(_times(clock, work), 0.1)) for moved, work in ((2 * size, copies), (size, sums)))
    return 1e9 * max(rates)


def _products(clock: Clock, name: str) -> float:
    """Return the FLOP/s of square matrix products, 0 where the device or this build of torch has none."""
    side = SIDE[clock.device.type]
    try:
        work = _integer_product(clock, side) if name == "int8" else _float_product(clock, side, DTYPES[name])
        work()  # also tells how long the first one takes
    except (RuntimeError, NotImplementedError, TypeError):
        return 0.0
    return 2.0 * side**3 / _best(clock, work)


def _float_product(clock: Clock, side: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    first, second, out = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(3))
    return partial(torch.mm, first, second, out=out)


def _integer_product(clock: Clock, side: int) -> Callable[[], Tensor]:
    first, second = (torch.randint(-99, 99, (side, side), dtype=torch.int8, device=clock.device) for _ in range(2))
    return partial(torch._int_mm, first, second.t())


def _launch(clock: Clock) -> float:
    """Return the seconds that one of many small operators takes, launched from Python."""
    x = torch.zeros(1, device=clock.device)

    def chain() -> None:
        for _ in range(CHAIN):
            x.add_(1.0)

    return _best(clock, chain, 0.5) / CHAIN


def _graph_launch(clock: Clock) -> float:
    """Return the seconds that a node of a CUDA graph takes."""
    x, graph = torch.zeros(1, device=clock.device), torch.cuda.CUDAGraph()
    x.add_(1.0)
    torch.cuda.synchronize(clock.device)
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            x.add_(1.0)
    return _best(clock, graph.replay, 0.5) / CHAIN
