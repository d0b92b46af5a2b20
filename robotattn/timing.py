"""What an evaluation is asked about time, and what it says of it: latencies, late chunks, misses, ages.

In go flags or a recorded trace; out come the loop's clock, and for the result how late things were. A deadline is the
control period: an inference that takes longer misses it. The age is how old the observation is that the command in
force was planned from, read at every physics step from the first chunk's arrival on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from robotattn.control.chunks import ChunkOptions, Handling
from robotattn.control.clock import Clock, Fixed, Replay, parse
from robotattn.control.safety import UNITS, Interventions, Limits, Tally
from robotattn.control.sensors import SensorRates
from robotattn.latency import trace
from robotattn.loop import Timing


@dataclass(frozen=True)
class TimingConfig:
    """What takes time in an evaluation, and how the loop deals with it."""

    latency: str | None = None
    """What each inference takes while the world moves on: fixed:80ms, or lognormal:80ms:200ms (median and 99th
    percentile). Default: nothing."""
    latency_trace: Path | None = None
    """Replay the latencies of a device: a trace that `robotattn profile` recorded."""
    rule: Literal["offset", "draw"] = "offset"
    """Replay in the recorded order from an offset of each seed, or draw each latency."""
    late: Handling = "hold"
    """What becomes of a chunk that comes late, see docs/control.md."""
    threshold: float = 0.5
    """late = queue: ask again when this share of the chunk is left."""
    in_flight: int = 1
    """Inferences that may run at the same time."""
    sensors: Annotated[SensorRates, tyro.conf.arg(name="")] = field(default_factory=SensorRates)
    """Sensors at rates of their own."""
    safety: bool = False
    """Limit what is sent: joint ranges, speeds, accelerations, workspace, clearance of the table, staleness."""

    def __post_init__(self) -> None:
        if self.latency is not None and self.latency_trace is not None:
            raise ValueError("latency, latency_trace: both are given, allowed is one")
        if self.latency is not None:
            parse(self.latency)

    def chunks(self, execute: int, ensemble: float | None) -> ChunkOptions:
        """How chunks are executed; ValueError for options that contradict each other."""
        return ChunkOptions(execute, ensemble, self.late, self.threshold, self.in_flight)

    def timing(self) -> Timing:
        """What the loop is to know of time; UsageError for a trace that cannot be read."""
        return Timing(self.clock(), self.sensors, Limits() if self.safety else None)

    def clock(self) -> Clock:
        if self.latency_trace is not None:
            return Replay(trace.read(self.latency_trace), self.rule)
        return Fixed() if self.latency is None else parse(self.latency)


def of_row(timing: Mapping[str, Any], period: int) -> dict[str, Any]:
    """What the loop noted of one episode, counted; times in ms. period: of control (ns)."""
    latencies = Counter(timing["latencies"])
    return {
        "inferences": len(timing["latencies"]),
        "missed": sum(count for latency, count in latencies.items() if latency > period),
        "latencies": {latency / 1e6: count for latency, count in sorted(latencies.items())},
        "ages": {age / 1e6: count for age, count in sorted(timing["ages"].items())},
        "information": {name: Counter(age / 1e6 for age in ages) for name, ages in timing["information"].items()},
        "overtaken": timing["overtaken"],
        **timing["ticks"],
        **({"safety": _interventions(timing["interventions"])} if "interventions" in timing else {}),
    }


def _interventions(report: Interventions) -> dict[str, Any]:
    return {"commands": report.commands, "changed": report.changed} | {
        "kinds": {kind: asdict(tally) for kind, tally in sorted(report.kinds.items())}
    }


def all_interventions(reports: Sequence[Interventions]) -> dict[str, Any]:
    """Several episodes' interventions: how many, and for each kind its count, unit, mean and largest."""
    return _safety([_interventions(report) for report in reports])


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All episodes' `of_row` in one: shares, and percentiles of what was counted."""
    latencies, ages, sensors = Counter[float](), Counter[float](), dict[str, Counter[float]]()
    for row in rows:
        latencies.update(row["latencies"])
        ages.update(row["ages"])
        for name, counted in row["information"].items():
            sensors.setdefault(name, Counter()).update(counted)
    ticks = {phase: sum(row[phase] for row in rows) for phase in ("cold", "running", "held")}
    inferences, every = sum(row["inferences"] for row in rows), sum(ticks.values())
    return {
        "inferences": inferences,
        "missed": sum(row["missed"] for row in rows),
        "miss_rate": sum(row["missed"] for row in rows) / max(1, inferences),
        "latency_ms": distribution(latencies),
        "age_ms": distribution(ages),
        "sensor_age_ms": {name: distribution(counted) for name, counted in sorted(sensors.items())},
        "ticks": every,
        "held": ticks["held"] / max(1, every),
        "cold": ticks["cold"] / max(1, every),
        "overtaken": sum(row["overtaken"] for row in rows),
        **({"safety": _safety([row["safety"] for row in rows])} if any("safety" in row for row in rows) else {}),
    }


def _safety(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All episodes' interventions: how many, and for each kind its count, unit, mean and largest."""
    kinds = dict[str, Tally]()
    for one in found:
        for kind, tally in one["kinds"].items():
            sum_ = kinds.setdefault(kind, Tally())
            sum_.count, sum_.total = sum_.count + tally["count"], sum_.total + tally["total"]
            sum_.largest = max(sum_.largest, tally["largest"])
    counted = {name: sum(one[name] for one in found) for name in ("commands", "changed")}
    said = {
        kind: {"count": tally.count, "mean": tally.mean, "largest": tally.largest, "unit": UNITS[kind]}
        for kind, tally in sorted(kinds.items())
    }
    return {**counted, "kinds": said}


def short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `of_row` for a result file: mean and largest instead of what was counted."""
    kept = {name: value for name, value in row.items() if name not in ("latencies", "ages", "information")}
    for name, key in (("latency_ms", "latencies"), ("age_ms", "ages")):
        if (found := distribution(row[key])) is not None:
            kept |= {f"{name}_mean": found["mean"], f"{name}_max": found["max"]}
    return kept


def distribution(counts: Mapping[float, int]) -> dict[str, float] | None:
    """n, mean, p50, p95, p99 and max of counted values; None of none."""
    if not counts:
        return None
    values, weights = (np.array(part) for part in zip(*sorted(counts.items()), strict=True))
    below, n = np.cumsum(weights), int(weights.sum())
    ranked = {f"p{p}": float(values[np.searchsorted(below, np.ceil(p / 100 * n))]) for p in (50, 95, 99)}
    return {"n": n, "mean": float(values @ weights / n), **ranked, "max": float(values[-1])}
