"""The command that runs a checkpoint in real time; a table and JSON come out."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from robotattn.console import finish, table, warn
from robotattn.flags import parse, with_checkpoint

TITLES = ("", "n", "mean", "p50", "p99", "max")
TIMES = {
    "age_ms": "age of a command's observation (ms)",
    "latency_ms": "inference (ms)",
    "begin_ms": "a tick's begin after its time (ms)",
    "own_ms": "the loop itself in a tick (ms)",
    "cpu_ms": "  of the processor (ms)",
    "robot_ms": "the robot in a tick (ms)",
}


def live(arguments: list[str]) -> int:
    """Run a checkpoint in real time, at a robot's pace: robotattn live CHECKPOINT [--hz 50] [--seconds 60] [flags]."""
    from robotattn.live import LiveConfig
    from robotattn.live import live as run

    config = parse(LiveConfig, with_checkpoint(arguments), live)
    result = run(config, lambda message: print(message, file=sys.stderr, flush=True))
    table(f"{result['seconds']:g} s at {result['hz']:g} Hz", _times(result), TITLES)
    warn([result["stopped"]] if result["stopped"] else [])
    finish("live", result, list(_counts(result)))
    return 1 if result["failed"] else 130 if result["stopped"] else 0


def _times(result: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, title in TIMES.items():
        if (found := result[name]) is not None:
            yield title, *("" if found[key] is None else found[key] for key in ("n", "mean", "p50", "p99", "max"))


def _counts(result: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield "ticks", result["ticks"]
    yield "missed: their command came a period late, or never", result["missed"]
    yield "longest run of misses", result["longest_run"]
    yield f"late: they began over {result['tolerance_ms']:g} ms after their time", result["late"]
    if (woken := result["jitter"]) is not None:
        yield "woken late by (us)", f"{woken['min']:.1f} to {woken['max']:.0f}, mean {woken['mean']:.1f}"
    for phase, what in (("held", "no action left, the last command sent again"), ("cold", "before the first chunk")):
        yield what, result["phases"][phase]
    if "safety" in result:
        safety = result["safety"]
        yield "changed by the safety filter", f"{safety['changed']} of {safety['commands']} commands"
        for kind, one in safety["kinds"].items():
            yield (
                f"... {kind}",
                f"{one['count']}, by {one['mean']:.3g} {one['unit']} in the mean, {one['largest']:.3g} at most",
            )
    yield "stalls", result["stalls"]
    yield from (("", stall) for stall in result["longest_stalls"])
    if (success := result["episodes"]["success"]) is not None:
        yield "episodes that succeeded", f"{success['successes']} of {success['episodes']}"
