"""Latencies that others have published, to stand beside ours: whose, on which device, of what, and where it says so."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published latency of one inference."""

    name: str
    device: str
    ms: float
    what: str
    source: str


PI0 = "Black et al. 2024, pi0 (arXiv 2410.24164)"
REAL_TIME = "Ma et al. 2025, Running VLAs at Real-time Speed (arXiv 2510.26742)"
MODEL = "Jiang et al. 2026, VLA-Perf (arXiv 2602.18397), table 3: an analytic model, not a measurement"

PUBLISHED = (
    Published("ACT", "RTX 2080 Ti", 10.0, "about; one chunk", "Zhao et al. 2023, ACT (arXiv 2304.13705)"),
    Published("ACT, eager PyTorch", "Jetson Orin", 63.7, "one chunk", "the project's specification, section 4"),
    Published("ACT, TensorRT fp16", "Jetson Orin", 3.2, "one chunk", "the project's specification, section 4"),
    Published(
        "Diffusion Policy", "RTX 3080", 100.0, "one chunk", "Chi et al. 2023, Diffusion Policy (arXiv 2303.04137)"
    ),
    Published("OpenVLA", "RTX 4090", 166.0, "7 action tokens, bf16", "Kim et al. 2024, OpenVLA (arXiv 2406.09246)"),
    Published("pi0", "RTX 4090", 73.0, "14 images + 32 prefix + 27 ten steps; 3 cameras", PI0),
    Published("pi0, naive PyTorch", "RTX 4090", 106.5, "2 cameras", REAL_TIME),
    Published("pi0, CUDA graph", "RTX 4090", 43.5, "2 cameras", REAL_TIME),
    Published("pi0, tuned by hand", "RTX 4090", 27.3, "2 cameras", REAL_TIME),
    Published("pi0, predicted by VLA-Perf", "RTX 4090", 31.06, "3 cameras, 50 actions, 10 steps", MODEL),
    Published("pi0, predicted by VLA-Perf", "A100-80G", 16.20, "3 cameras, 50 actions, 10 steps", MODEL),
    Published("pi0, predicted by VLA-Perf", "H100", 6.15, "3 cameras, 50 actions, 10 steps", MODEL),
    Published("pi0, predicted by VLA-Perf", "Jetson Thor", 52.57, "3 cameras, 50 actions, 10 steps", MODEL),
    Published("pi0-FAST", "RTX 4090", 750.0, "one chunk", "Pertsch et al. 2025, FAST (arXiv 2501.09747)"),
    Published("GR00T N1", "L40", 63.9, "16 actions", "Bjorck et al. 2025, GR00T N1 (arXiv 2503.14734)"),
    Published("SmolVLA", "RTX 4090", 207.0, "before optimisation", "the project's specification, section 4"),
    Published("SmolVLA", "RTX 4090", 49.0, "after optimisation", "the project's specification, section 4"),
    Published(
        "RT-2", "TPU in the cloud", 1000.0, "1 to 3 Hz; the slower end", "Zitkovich et al. 2023 (arXiv 2307.15818)"
    ),
)
