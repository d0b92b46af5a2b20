"""Time pieces of work so that the figure is the work: both sides synchronised, warmed up, no garbage collection.

An accelerator queues its work and returns at once; a host clock that is read without waiting measures the queueing.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from robotattn.statistics import percentile, samples_needed

T = TypeVar("T")
PERCENTILES = (0.5, 0.9, 0.99, 0.999)


class Clock:
    """Nanoseconds on the host's monotonic clock, read only when the device has done everything it was given."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.name = "time.perf_counter_ns"
        self._wait: Callable[[], None] | None = None
        if self.device.type == "cuda":
            self._wait = lambda: torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            self._wait = torch.mps.synchronize
        elif self.device.type != "cpu":
            raise ValueError(f"device: {self.device}, allowed are cpu, cuda, mps: others cannot be synchronised")
        if self._wait is not None:
            self.name += f", {self.device.type} synchronised before each reading"

    def now(self) -> int:
        """Nanoseconds since some instant, after the device has finished."""
        if self._wait is not None:
            self._wait()
        return time.perf_counter_ns()

    def time(self, work: Callable[[], T]) -> tuple[T, int]:
        """Return what `work` returns and the nanoseconds that it took."""
        start = self.now()
        result = work()
        return result, self.now() - start


class Spans:
    """Named durations (ns), a list for each name."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.samples = clock, dict[str, list[int]]()

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Time `work` under a name and return its result."""
        result, duration = self.clock.time(work)
        self.samples.setdefault(name, []).append(duration)
        return result


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector out of a timed window: what lives now is frozen, and nothing is collected."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class WarmUp:
    """What the first calls cost, kept apart from the steady figures."""

    calls: int
    steady: bool
    """Two windows of calls in a row had medians within the tolerance."""
    durations: tuple[int, ...] = field(repr=False)
    """(ns)"""


def warm_up(
    call: Callable[[], object], clock: Clock, window: int = 10, tolerance: float = 0.05, most: int = 200
) -> WarmUp:
    """Call until two consecutive windows have medians within `tolerance` of each other, or `most` calls are done.

    `call` must run exactly the shapes that will be measured: another length compiles, tunes and allocates again.
    """
    durations: list[int] = []
    while len(durations) + window <= most:
        durations += [clock.time(call)[1] for _ in range(window)]
        if len(durations) < 2 * window:
            continue
        before, after = np.median(durations[-2 * window : -window]), np.median(durations[-window:])
        if abs(after - before) <= tolerance * before:
            return WarmUp(len(durations), True, tuple(durations))
    return WarmUp(len(durations), False, tuple(durations))


def summary(durations: Sequence[int]) -> dict[str, object]:
    """Percentiles, extremes and mean (ms) of durations (ns); a percentile with too few samples is None, and why."""
    milliseconds = np.asarray(durations, np.float64) / 1e6
    result: dict[str, object] = {"n": len(milliseconds)}
    refused: dict[str, str] = {}
    for p in PERCENTILES:
        name, needed = f"p{100 * p:g}", samples_needed(p)
        enough = len(milliseconds) >= needed
        result[name] = percentile(milliseconds, p).value if enough else None
        if not enough:
            refused[name] = f"needs {needed} samples, has {len(milliseconds)}"
    extremes = {name: float(getattr(milliseconds, name)()) for name in ("min", "max", "mean")}
    return result | extremes | ({"refused": refused} if refused else {})
