"""Time pieces of work so that the figure is the work: both sides synchronised, warmed up, no garbage collection.

An accelerator queues its work and returns at once; a host clock that is read without waiting measures the queueing.
What else would spoil a window of samples is watched (`window`): garbage collections, and anything that compiles.
"""

import gc
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from robotattn.latency.percentiles import PERCENTILES, summary

__all__ = ["PERCENTILES", "Clock", "ColdStart", "Collections", "Recompiled", "Spans", "WarmUp", "Window"]
__all__ += ["import_time", "quiet", "summary", "warm_up", "window"]

T = TypeVar("T")
STORM_SHARE, STORM_PAUSE_NS = 0.01, 1_000_000
"""Collections are named in a result when they took 1 % of the window, or one of them paused it for 1 ms."""


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

    def time_device(self, work: Callable[[], T]) -> tuple[T, int, int]:
        """Return what `work` returns, its nanoseconds on the host's clock, and those between two events on the device.

        The difference is the host's: launching, waiting, copying to its own memory. Gaps between kernels count as the
        device's. Where no events exist (CPU, MPS) the two are the same.
        """
        if self.device.type != "cuda":
            result, wall = self.time(work)
            return result, wall, wall
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = self.now()
        first.record()
        result = work()
        last.record()
        wall = self.now() - start
        return result, wall, round(1e6 * first.elapsed_time(last))  # it is in milliseconds


class Spans:
    """Named durations (ns), a row of 64-bit integers for each name: 8 bytes a sample, and no object to collect.

    events: also fill `device` with the durations between events on the device (see `Clock.time_device`).
    """

    def __init__(self, clock: Clock, events: bool = False) -> None:
        self.clock, self.events = clock, events
        self.samples, self.device = dict[str, array](), dict[str, array]()

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Time `work` under a name and return its result."""
        if self.events:
            result, duration, on_device = self.clock.time_device(work)
            self.device.setdefault(name, array("q")).append(on_device)
        else:
            result, duration = self.clock.time(work)
        self.add(name, duration)
        return result

    def add(self, name: str, duration: int) -> None:
        """Add one duration (ns) that was measured otherwise."""
        self.samples.setdefault(name, array("q")).append(duration)

    def host_overhead(self, name: str) -> np.ndarray:
        """Wall minus device time of every sample of a name (ns); zeros on a CPU. Raises KeyError without events."""
        return np.asarray(self.samples[name]) - np.asarray(self.device[name])


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


class Collections:
    """Counts garbage collections and the time they take, between `start` and `stop`."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.pauses_ns, self.generations, self.freed = array("q"), Counter[int](), 0
        self._clock, self._since = clock, 0

    def start(self) -> None:
        """Begin to watch."""
        gc.callbacks.append(self._called)

    def stop(self) -> None:
        """Watch no longer."""
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._since = self._clock()
        elif self._since:
            self.pauses_ns.append(self._clock() - self._since)
            self.generations[info["generation"]] += 1
            self.freed += info["collected"]

    def report(self, window_ns: int) -> dict[str, object]:
        """Describe what was seen in a window of that length; ``storm`` is a sentence where it disturbed the figures."""
        total, longest = sum(self.pauses_ns), max(self.pauses_ns, default=0)
        share = total / max(1, window_ns)
        storm = None
        if share >= STORM_SHARE or longest >= STORM_PAUSE_NS:
            storm = (
                f"garbage collection: {len(self.pauses_ns)} collections took {total / 1e6:.3g} ms "
                f"({share:.1%} of the window), the longest {longest / 1e6:.3g} ms"
            )
        return {
            "collections": len(self.pauses_ns),
            "generations": {str(generation): count for generation, count in sorted(self.generations.items())},
            "total_ms": total / 1e6,
            "longest_ms": longest / 1e6,
            "freed": self.freed,
            "storm": storm,
        }


class Recompiled(RuntimeError):
    """Something compiled inside a timed window: its samples are not the steady state."""


class Window:
    """What happened around the samples of one timed window; complete when the window is closed."""

    def __init__(self) -> None:
        self.garbage, self.nanoseconds, self.recompiles = Collections(), 0, 0

    def report(self) -> dict[str, object]:
        """Describe it in plain values."""
        garbage = self.garbage.report(self.nanoseconds)
        return {"seconds": self.nanoseconds / 1e9, "garbage": garbage, "recompiles": self.recompiles}


@contextmanager
def window(strict: bool = True, collect: bool = False) -> Iterator[Window]:
    """Time a block's surroundings: collector off, collections and compilations counted.

    collect: leave the collector on, as a robot's loop that takes no care of it would. Raises `Recompiled` at the end of
    a strict window in which a graph was compiled; the `Window` then still holds the counts.
    """
    seen = Window()
    with nullcontext() if collect else quiet():
        before, start = compiled_graphs(), time.perf_counter_ns()
        seen.garbage.start()
        try:
            yield seen
        finally:
            seen.garbage.stop()
            seen.nanoseconds, seen.recompiles = time.perf_counter_ns() - start, compiled_graphs() - before
    if strict and seen.recompiles:
        raise Recompiled(
            f"{seen.recompiles} graphs were compiled in the timed window, allowed are 0: "
            "warm up with exactly the shapes that are measured"
        )


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process; 0 without importing the compiler where nothing has."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


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

    `call` must run exactly the shapes that will be measured: another length compiles, tunes and allocates again. A
    window in which a graph was compiled is not steady.
    """
    durations: list[int] = []
    while len(durations) + window <= most:
        before = compiled_graphs()
        durations += [clock.time(call)[1] for _ in range(window)]
        if len(durations) < 2 * window or compiled_graphs() > before:
            continue
        last, this = np.median(durations[-2 * window : -window]), np.median(durations[-window:])
        if abs(this - last) <= tolerance * last:
            return WarmUp(len(durations), True, tuple(durations))
    return WarmUp(len(durations), False, tuple(durations))


class ColdStart:
    """What happens once, before the steady state, in order: import, build, load, compile, and the first calls."""

    STAGES = ("import", "build", "load", "compile")

    def __init__(self) -> None:
        self.nanoseconds: dict[str, int | None] = dict.fromkeys(self.STAGES)
        self.warm: WarmUp | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one of the stages; raises ValueError for another name."""
        if name not in self.STAGES:
            raise ValueError(f"{name}: allowed are {', '.join(self.STAGES)}")
        start = time.perf_counter_ns()
        yield
        self.nanoseconds[name] = (self.nanoseconds[name] or 0) + time.perf_counter_ns() - start

    def to_dict(self) -> dict[str, object]:
        """Milliseconds of each stage (None: did not happen), the first three calls, and how warming up went."""
        result: dict[str, object] = {
            f"{name}_ms": None if duration is None else duration / 1e6 for name, duration in self.nanoseconds.items()
        }
        if self.warm is not None:
            result["first_calls_ms"] = [duration / 1e6 for duration in self.warm.durations[:3]]
            result |= {"warm_up_calls": self.warm.calls, "steady": self.warm.steady}
        return result


def import_time(module: str) -> int | None:
    """Nanoseconds that importing `module` takes in a fresh interpreter (files cached); None where none can start."""
    program = f"import time; t = time.perf_counter_ns(); import {module}; print(time.perf_counter_ns() - t)"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
