"""The rows of study_cpu_wins.py: two ways, their times, how far the actions are apart, and whether the win holds."""

from dataclasses import asdict
from typing import Any

from bench_decoders import summary, written

from robotattn.latency.modes import Parity

WAYS = ("float32", "int8")
Times = dict[str, dict[str, list[float]]]
"""Way → part of a step → times (ms), one a round."""
TITLES = (
    "policy (weights)",
    "from",
    "to",
    "of",
    "ms",
    "times as fast",
    "largest, mean action error",
    "success, float32 and int8",
    "int8 - float32",
    "verdict",
)


def compared(
    win: str, policy: tuple[str, str], ways: tuple[str, str], part: str, times: Times, same: Parity
) -> dict[str, Any]:
    """Return one row: a part of the step, timed in two ways, and how far the actions are from eager float32.

    policy: its name, and whether its weights are trained or random.
    """
    slow, fast = (times[way][part] for way in ways)
    return {
        "win": win,
        "policy": policy[0],
        "weights": policy[1],
        "before": ways[0],
        "after": ways[1],
        "measured": part,
        "before_ms": summary(slow),
        "after_ms": summary(fast),
        "ratio": summary([a / b for a, b in zip(slow, fast, strict=True)]),
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
    return (*head, times, written(row["ratio"]), errors, rates, difference, row["verdict"])


def _rate(found: dict[str, Any]) -> str:
    return f"{found['successes']} of {found['episodes']} ({found['low']:.1%} to {found['high']:.1%})"
