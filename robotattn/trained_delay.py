"""The latency a policy is trained for: read at the start, recorded in its checkpoint, held against an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from robotattn.config import UsageError
from robotattn.control.chunks import Handling
from robotattn.control.clock import Clock, Replay, parse
from robotattn.latency import trace

FITTING: Handling = "naive"
"""A chunk starts at its action 0 when it arrives, and the chunk before runs until then, as the teacher moved on."""
DRAWS = 1000  # of a clock, to say what its latencies are like


@dataclass(frozen=True)
class TrainedDelay:
    """A clock, and what a checkpoint says about it (plain values)."""

    clock: Clock
    about: dict[str, Any]

    @property
    def identity(self) -> str:
        """What must be the same when a run goes on, wherever the trace's file lies."""
        return str(self.about["sha256"] or self.about["latency"])


def read(path: Path | None, latency: str | None) -> TrainedDelay | None:
    """Read the trace at `path`, or the clock that `latency` names (``fixed:80ms``); None without either.

    Raises UsageError for a trace that is missing or damaged.
    """
    if path is not None:
        return _traced(path)
    if latency is None:
        return None
    clock = parse(latency)
    times = [clock.latency(seed, 0) for seed in range(DRAWS)]
    return TrainedDelay(clock, _about(latency, None, None, median(times)))


def _traced(path: Path) -> TrainedDelay:
    try:
        found = trace.read(path)
    except UsageError as error:
        moved = "" if path.exists() else "; if it was moved, --latency-trace names its new place"
        raise UsageError(f"latency_trace: {error}{moved}") from None
    about = _about(path.name, found.sha256, found.device, median(found.service))
    return TrainedDelay(Replay(found), about | {"mode": found.mode, "synthetic": found.synthetic})


def _about(latency: str, sha256: str | None, device: str | None, middle: float) -> dict[str, Any]:
    return {"latency": latency, "sha256": sha256, "device": device, "unit": trace.UNIT, "median": round(middle)}


def mismatches(fingerprint: Mapping[str, Any], handling: Handling, delayed: bool) -> list[str]:
    """Say where an evaluation is not what a checkpoint was trained for; empty if it is, or was trained without a delay.

    handling: `ChunkOptions.kind`. delayed: whether chunks arrive later than their observations.
    """
    about = fingerprint.get("training", {}).get("latency")
    if about is None:
        return []
    trained = f"trained for chunks that arrive {about['median'] / 1e6:.4g} ms late ({about['latency']}, median)"
    found = []
    if not delayed:
        found.append(f"{trained}, but evaluated without latency: its actions come too early; --latency-trace gives one")
    if handling == "hold":
        found.append(f"{trained} while the robot moves on, but hold stands still: what chunks leave out, nobody did")
    elif handling != FITTING:
        found.append(f"{trained} and start at their first action, but {handling} skips the time until then once more")
    return found
