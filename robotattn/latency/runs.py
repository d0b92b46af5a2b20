"""One policy run in several ways: each got ready and held to the eager actions, timed in turn, paced, and judged."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from robotattn.latency import schedule
from robotattn.latency.measure import Clock, Spans, quiet, warm_up, window
from robotattn.latency.modes import EXACT, Mode, Parity, Unavailable, parity, prepare
from robotattn.latency.stages import ControlStep

MISS_LIMIT = 0.01
"""A rate is kept if, with 99 % confidence, at most this share of the ticks is missed (459 ticks without a miss)."""
PARITY_BATCHES = 8
POOL = 64
"""Different observations of the paced run: they are made before it, and come round again."""
SHOWN_SECONDS = 0.5
COMPILED = ("compile", "reduce-overhead")

Progress = Callable[[str, int, int], None]


@dataclass
class Run:
    """One way to run the policy: its control step, or why it has none. samples: of the step, in ns."""

    mode: Mode
    step: ControlStep | None = None
    refused: str | None = None
    parity: dict[str, Any] | None = None
    first_call_ms: float | None = None
    samples: Sequence[int] = ()


def ready(
    mode: Mode, step: ControlStep, fresh: Callable[[], Any], clock: Clock, show: Progress, most: int = 200
) -> Run:
    """Get a mode ready and compare its actions with those of the eager policy; without parity there is no speed."""
    show(f"preparing {mode}", 0, 1)
    run, batches = Run(mode), [step.batch(fresh()) for _ in range(PARITY_BATCHES)]
    try:
        act, duration = clock.time(lambda: prepare(step.policy, mode, batches[0]))
        found = parity(step.policy, act, batches, exact=mode in EXACT)
    except Unavailable as error:
        run.refused = str(error)
        return run
    run.parity, run.first_call_ms = asdict(found), duration / 1e6
    if found.ok:
        run.step = ControlStep(step.policy, step.batcher, step.length, act)
        warm_up(lambda: run.step and run.step.whole(fresh()), clock, most=most)
    else:
        run.refused = _difference(found)
    show(f"preparing {mode}", 1, 1)
    return run


def _difference(found: Parity) -> str:
    """Say why a mode failed."""
    same = f"{found.gripper:.1%} of the gripper commands are the same"
    if found.bins is not None:
        return f"no parity with eager float32: {found.bins:.1%} of the bins and {same}"
    return f"no parity with eager float32: actions differ by {found.relative:.3g} standard deviations, and {same}"


def timed(
    step: ControlStep, runs: Sequence[Run], fresh: Callable[[], Any], samples: int, clock: Clock, show: Progress
) -> tuple[Spans, dict[str, Any]]:
    """Time the staged step and every mode's step in turn (A B A B), so that all see the same machine.

    Returns the spans (stages, and steps under the modes' names) and what happened around them: collections of garbage,
    graphs that were compiled, after which no compiled mode keeps its figures.
    """
    spans, able = Spans(clock, events=True), [run for run in runs if run.step]
    shown = time.monotonic()
    with window(strict=False) as seen:
        for done in range(samples):
            step.staged(fresh(), spans)
            for run in able:
                assert run.step is not None
                spans.run(run.mode, partial(run.step.whole, fresh()))  # the inputs are made before the clock starts
            if time.monotonic() - shown > SHOWN_SECONDS:
                show("timing steps", done, samples)
                shown = time.monotonic()
    show("timing steps", samples, samples)
    for run in able:
        run.samples = spans.samples[run.mode]
        if seen.recompiles and run.mode in COMPILED:
            run.samples, run.refused = (), f"{seen.recompiles} graphs were compiled while it was timed"
    return spans, seen.report()


def paced_run(
    hz: float, io_ms: float, ticks: int, step: ControlStep, fresh: Callable[[], Any], clock: Clock, show: Progress
) -> schedule.Schedule:
    """Run the step at the control rate; clocks fall and caches cool between ticks, as they do on a robot."""
    period = round(1e9 / hz)
    pool = [fresh() for _ in range(min(POOL, ticks))]
    show(f"running at {hz:g} Hz", 0, ticks)
    with quiet():
        found = schedule.run_paced(
            lambda tick: step.whole(pool[tick % len(pool)]),
            period,
            ticks,
            period - round(io_ms * 1e6),
            clock.now,
        )
    show(f"running at {hz:g} Hz", ticks, ticks)
    return found


def verdict(hz: float | None, io_ms: float, run: Run, paced: schedule.Schedule | None) -> dict[str, Any] | None:
    """Say whether the asked rate is kept: PASS if the bound of the miss rate is under the limit, FAIL if it is not.

    pass is None (undecided) where not a tick was missed but the ticks are too few to show it; None without a rate.
    """
    if hz is None:
        return None
    asked: dict[str, Any] = {"hz": hz, "budget_ms": 1000 / hz - io_ms, "mode": run.mode, "limit": MISS_LIMIT}
    if paced is None:
        return asked | {"pass": None, "why": run.refused, "misses": None, "ticks": 0, "miss_bound": None}
    kept = paced.miss_bound <= MISS_LIMIT
    too_few = not kept and paced.misses == 0
    return asked | {
        "pass": None if too_few else kept,
        "why": f"no tick was missed, but {len(paced.missed)} are too few" if too_few else None,
        "misses": paced.misses,
        "ticks": len(paced.missed),
        "miss_bound": paced.miss_bound,
        "longest_run": paced.longest_run,
    }
