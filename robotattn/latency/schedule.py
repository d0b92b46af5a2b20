"""A control loop's schedule: when each tick's action was ready, measured from the tick and not from the call.

A closed loop that times its own calls waits for a stall before it asks again, so the stall counts once. The robot's
schedule does not wait: every tick that passes meanwhile is late too ("coordinated omission"). In go service times, or
a step to run at a fixed rate; out come, for every tick, its response (scheduled tick to action ready) and whether it
missed. Times are int64 nanoseconds; tick k is scheduled at k * period. numpy and time only.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from robotattn.control.pacing import longest_run, wait_until
from robotattn.latency.percentiles import summary as percentiles
from robotattn.statistics import clopper_pearson

Backlog = Literal["queue", "skip"]
ONE_SIDED_99 = 0.98  # two-sided confidence whose upper end alone holds with 99 %
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Schedule:
    """What happened to every tick of a fixed-rate schedule; arrays are int64 (ns), one entry a tick unless said."""

    period_ns: int
    budget_ns: int
    """A tick misses when its response is longer than this; by default the period: the next tick has come."""
    service_ns: np.ndarray
    """One entry an inference: observation ready to action ready."""
    response_ns: np.ndarray
    """Scheduled tick to the first action that was computed from an observation at or after it."""
    start_lateness_ns: np.ndarray
    """Scheduled tick to the start of that inference."""
    served: np.ndarray
    """bool: the tick had an inference of its own; False: it passed while another one ran, and was dropped."""
    wake_ns: np.ndarray = field(default_factory=lambda: NONE)
    """Wake-up lateness of the ticks that were waited for (one entry each); empty for a replay."""

    @property
    def missed(self) -> np.ndarray:
        """bool ``[ticks]``: the action was not ready within the budget."""
        return self.response_ns > self.budget_ns

    @property
    def misses(self) -> int:
        """Ticks that missed."""
        return int(self.missed.sum())

    @property
    def miss_rate(self) -> float:
        """Share of ticks that missed."""
        return self.misses / len(self.response_ns)

    @property
    def miss_bound(self) -> float:
        """Upper bound of the miss rate, one-sided 99 % (Clopper-Pearson; takes the ticks as independent)."""
        return clopper_pearson(self.misses, len(self.response_ns), ONE_SIDED_99).high

    @property
    def longest_run(self) -> int:
        """The most ticks in a row that missed."""
        return longest_run(self.missed)

    @property
    def drift(self) -> float:
        """By how much the loop runs slow: growth of the start lateness per second of schedule (least squares; s/s)."""
        if len(self.start_lateness_ns) < 2:
            return 0.0
        ticks = np.arange(len(self.start_lateness_ns)) * float(self.period_ns)
        ticks -= ticks.mean()
        return float(ticks @ (self.start_lateness_ns - self.start_lateness_ns.mean()) / (ticks @ ticks))


def replay(
    service_ns: Sequence[int] | np.ndarray, period_ns: int, budget_ns: int | None = None, backlog: Backlog = "queue"
) -> Schedule:
    """Lay measured service times (ns, in order) onto a fixed-rate schedule with one server.

    backlog: what a loop does that comes late. "queue": every tick is served, in order, at once when it is overdue, so
    one stall makes the ticks after it late until the loop has caught up. "skip": ticks that passed meanwhile are
    dropped and the next inference starts on the next tick of the grid with the newest observation; a dropped tick's
    response ends with that inference. Raises ValueError for no samples, or a time that is not positive.
    """
    service = np.asarray(service_ns, np.int64).ravel()
    budget = period_ns if budget_ns is None else budget_ns
    if len(service) == 0 or service.min() <= 0 or period_ns <= 0 or budget <= 0:
        least = int(service.min()) if len(service) else None
        raise ValueError(
            f"{len(service)} service times (least {least} ns), period {period_ns} ns, budget {budget} ns: "
            "at least one service time, and all of them positive"
        )
    lay = _queue if backlog == "queue" else _skip
    start, end, served = lay(service, int(period_ns))
    ticks = np.arange(len(start)) * np.int64(period_ns)
    return Schedule(int(period_ns), int(budget), service, end - ticks, start - ticks, served)


def _queue(service: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every tick starts when it is due and the one before has ended (Lindley's recursion, unrolled)."""
    total = np.cumsum(service)
    before = total - service
    ticks = np.arange(len(service)) * np.int64(period)
    start = before + np.maximum.accumulate(ticks - before)
    return start, start + service, np.ones(len(service), bool)


def _skip(service: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An inference starts on the first tick at or after the end of the one before."""
    length = np.maximum(1, -(-service // period))  # ticks from one start to the next
    index = np.cumsum(length) - length
    served = np.zeros(int(length.sum()), bool)
    served[index] = True
    own = np.cumsum(served) - 1  # of each tick: the inference that serves it, or that ran while it passed
    answer = np.where(served, own, own + 1)
    start = np.append(index, len(served)) * np.int64(period)
    end = start + np.append(service, 1)  # the inference after the last is unknown: it takes at least a nanosecond
    return start[answer], end[answer], served


def run_paced(
    step: Callable[[int], object],
    period_ns: int,
    ticks: int,
    budget_ns: int | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], object] = time.sleep,
) -> Schedule:
    """Run ``step(tick)`` at a fixed rate and return what became of every tick.

    Deadlines are absolute (start + k * period), so that no lateness adds up; a tick that is overdue starts at once.
    Waiting sleeps until 2 ms before the tick and spins from there. clock: monotonic nanoseconds, waiting for the
    device where there is one (`measure.Clock.now`); sleep: takes seconds.
    """
    if period_ns <= 0 or ticks < 1:
        raise ValueError(f"period_ns={period_ns}, ticks={ticks}: both are positive")
    start, end = np.zeros(ticks, np.int64), np.zeros(ticks, np.int64)
    waited = np.zeros(ticks, bool)
    origin = clock() + period_ns  # the first tick is waited for like the others
    for tick in range(ticks):
        due = origin + tick * period_ns
        waited[tick] = wait_until(due, clock, sleep)
        start[tick] = clock()
        step(tick)
        end[tick] = clock()
    due_all = origin + np.arange(ticks) * np.int64(period_ns)
    late, budget = start - due_all, period_ns if budget_ns is None else budget_ns
    served = np.ones(ticks, bool)
    return Schedule(period_ns, budget, end - start, end - due_all, late, served, late[waited])


def summary(schedule: Schedule) -> dict[str, object]:
    """Describe a schedule in plain values: percentiles (ms), misses and their bound, jitter, drift."""
    over = int((schedule.service_ns > schedule.budget_ns).sum())
    return {
        "hz": 1e9 / schedule.period_ns,
        "budget_ms": schedule.budget_ns / 1e6,
        "ticks": len(schedule.response_ns),
        "service": percentiles(schedule.service_ns),
        "response": percentiles(schedule.response_ns),
        "misses": schedule.misses,
        "miss_rate": schedule.miss_rate,
        "miss_bound": schedule.miss_bound,
        "longest_run": schedule.longest_run,
        "dropped": int((~schedule.served).sum()),
        "service_over_budget": over / len(schedule.service_ns),
        "drift": schedule.drift,
        "jitter": jitter(schedule.wake_ns),
    }


def jitter(wake_ns: np.ndarray) -> dict[str, object] | None:
    """Wake-up lateness (us): least, mean, largest, and a histogram with two bins an octave from 1 us to 65 ms.

    None where no tick was waited for (a replay, or a loop that never caught up).
    """
    if len(wake_ns) == 0:
        return None
    microseconds = np.asarray(wake_ns, np.float64) / 1e3
    edges = np.concatenate(([0.0], 2.0 ** (np.arange(33) / 2)))
    counts, _ = np.histogram(np.minimum(microseconds, edges[-1]), edges)
    extremes = {name: float(getattr(microseconds, name)()) for name in ("min", "mean", "max")}
    return {"n": len(microseconds), **extremes, "edges": edges.tolist(), "counts": counts.tolist()}
