"""The machine, as far as a latency depends on it; read before and after a run, so that a throttled one is seen."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from robotattn import checkpoint
from robotattn.config import UsageError
from robotattn.latency.measure import Clock

GPU_FACTS = (
    "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks_throttle_reasons.active",
    "power.draw", "power.limit", "temperature.gpu",
)  # fmt: skip
SECONDS = 10.0  # for a tool that answers at once unless something is broken


def environment(device: torch.device, seed: int | None = None) -> dict[str, Any]:
    """Return device, versions, threads, load and clocks."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": name,
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "load": load(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": checkpoint.versions(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "gpu": gpu(device),
        "governor": _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "git": git_hash(),
        "seed": seed,
    }


def usable_clock(device: str) -> Clock:
    """The clock of a device by its name; raises UsageError for one that this machine has not."""
    try:
        clock = Clock(device)
        torch.zeros(1, device=clock.device)
    except (RuntimeError, ValueError, AssertionError) as error:  # torch raises each of them for a missing device
        raise UsageError(f"device: {device} cannot be used: {str(error).splitlines()[0]}") from None
    return clock


def load() -> list[float] | None:
    """The load average of the last 1, 5 and 15 minutes, where the system has one."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def gpu(device: torch.device) -> dict[str, str] | None:
    """Driver, clocks, throttling and power of a CUDA device as nvidia-smi says them; None without either."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    query = [f"--id={index}", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
    said = _said(["nvidia-smi", *query])
    return None if said is None else dict(zip(GPU_FACTS, map(str.strip, said.split(",")), strict=False))


def git_hash() -> str | None:
    """The commit of this program, with "+" if files differ from it; None where it was installed without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    commit = _said(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _said(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return None if commit is None else commit + ("+" if changed else "")


def peak_memory(device: torch.device) -> dict[str, int]:
    """Most bytes in use so far: of the process, and on a CUDA device those allocated by torch."""
    found: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS and in KiB elsewhere
        found["process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated(device)
    return found


def cpu_name() -> str:
    """The processor's name."""
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = ()
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def _said(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
