"""The rows of study_cpu_wins.py: ways in turn, their times, how far the actions are apart, and whether a win holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic, thread_time_ns
from typing import Any

from bench_decoders import summary, written

from robotattn.latency.measure import Clock, quiet
from robotattn.latency.modes import Parity

CLOCK = Clock("cpu")
WAYS = ("float32", "int8")
TITLES = (
    "policy (weights)",
    "from",
    "to",
    "of",
    "ms",
    "times as fast",
    "by the wall's clock",
    "largest, mean action error",
    "success, float32 and int8",
    "int8 - float32",
    "verdict",
)


@dataclass(frozen=True)
class Spent:
    """Time (ms) on the wall's clock, and the processor's on this thread: what one core to itself would take."""

    wall: float
    cpu: float

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.cpu + other.cpu)


Times = dict[str, dict[str, list[Spent]]]
"""Way → part of a step → its time in each round."""
Timed = Callable[[dict[str, object]], dict[str, Spent]]
"""Runs one observation and says how long its parts took."""


def alternate(rounds: int, seconds: float, ways: Mapping[str, Timed], batches: Sequence[dict[str, object]]) -> Times:
    """Run the ways in turn, on the same observation in each round; return the times of each way and part."""
    times: Times = {name: {} for name in ways}
    end = monotonic() + seconds
    with quiet():
        for turn in range(-1, rounds):
            if turn >= 5 and monotonic() > end:
                break
            for name, work in ways.items():
                for part, spent in work(batches[turn % len(batches)]).items():
                    if turn >= 0:  # the first round warms up
                        times[name].setdefault(part, []).append(spent)
    return times


def clock(work: Callable[[], Any]) -> tuple[Any, Spent]:
    """Return what work returns, and its time."""
    began = thread_time_ns()
    result, wall = CLOCK.time(work)
    return result, Spent(wall / 1e6, (thread_time_ns() - began) / 1e6)


def compared(
    win: str, policy: tuple[str, str], ways: tuple[str, str], part: str, times: Times, same: Parity, alone: bool = True
) -> dict[str, Any]:
    """Return one row: a part of the step, timed in two ways, and how far the actions are from eager float32.

    policy: its name, and whether its weights are trained or random. alone: one thread did it all, so that its processor
    time is compared, which others on the machine disturb less; else the wall's. Both are in the row.
    """
    slow, fast = (times[way][part] for way in ways)
    kinds = {"cpu": [(a.cpu, b.cpu) for a, b in zip(slow, fast, strict=True)]} if alone else {}
    kinds["wall"] = [(a.wall, b.wall) for a, b in zip(slow, fast, strict=True)]
    found = {kind: {"before": [a for a, _ in pairs], "after": [b for _, b in pairs]} for kind, pairs in kinds.items()}
    ratios = {f"{kind}_ratio": summary([a / b for a, b in pairs]) for kind, pairs in kinds.items()}
    clocked = "cpu" if alone else "wall"
    return {
        "win": win,
        "policy": policy[0],
        "weights": policy[1],
        "before": ways[0],
        "after": ways[1],
        "measured": part,
        "clock": clocked,
        **{f"{when}_ms": summary(values) for when, values in found[clocked].items()},
        "ratio": ratios[f"{clocked}_ratio"],
        **ratios,
        "actions": asdict(same),
        "success": None,
    }


def verdict(row: dict[str, Any]) -> str:
    """Say whether a win holds: surely faster, actions within tolerance, and no drop of success that can be seen."""
    if row["before"] == row["after"]:
        return "the defaults stay"
    if row["ratio"]["low"] <= 1.0:
        return "no: slower" if row["ratio"]["high"] < 1.0 else "no: not surely faster"
    if not row["actions"]["ok"]:
        return "faster, but other actions"
    if row["success"] is not None and row["success"]["difference"]["high"] < 0.0:
        return "faster, but fewer successes"
    return "holds"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return one line of the table; errors in standard deviations of the actions."""
    actions, found, difference = row["actions"], row["success"], "-"
    errors = f"{actions['relative']:.1e}, {actions['mean']:.1e}"
    if actions["bins"] is not None:
        errors += f" ({actions['bins']:.1%} of bins equal)"
    rates = "-"
    if found is not None:
        rates = "; ".join(_rate(found[way]) for way in WAYS)
        gap = found["difference"]
        difference = f"{100 * gap['difference']:+.1f} ({100 * gap['low']:+.1f} to {100 * gap['high']:+.1f}) points"
    times = f"{row['before_ms']['median']:.2f} to {row['after_ms']['median']:.2f}"
    head = (f"{row['policy']} ({row['weights']})", row["before"], row["after"], row["measured"])
    return (*head, times, written(row["ratio"]), written(row["wall_ratio"]), errors, rates, difference, row["verdict"])


def _rate(found: dict[str, Any]) -> str:
    return f"{found['successes']} of {found['episodes']} ({found['low']:.1%} to {found['high']:.1%})"
