"""Which policies fit a control rate on a device, and what to change first: predicted, and labelled so.

Two bases. ``analytic``: the closed-form bound of every stage on the device's constants, divided by the share of the
measured time that such a bound explains (0.57 to 0.83, VLA-Perf). ``calibrated``: the fit of a sweep on that machine,
with the error it had on points held out of the fit. A configuration fits if its worst prediction does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from robotattn.config import UsageError, name_of
from robotattn.latency import bounds, devices
from robotattn.latency.calibrate import Calibration, calibrate
from robotattn.latency.changes import changes
from robotattn.latency.grid import Candidate, described, grid
from robotattn.latency.successes import successes
from robotattn.latency.sweep import base_of, facts
from robotattn.latency.sweep_file import Rows, merge, read
from robotattn.latency.sweep_result import result
from robotattn.policies import PolicyConfig

EXPLAINED = (0.57, 0.83)
"""Share of measured latency that a roofline explains, over the models of VLA-Perf (arXiv 2602.18397)."""
USUAL = math.sqrt(math.prod(EXPLAINED))
AXES = ("policy=act,autoregressive,blockwise", "cameras=1:4", "patch=8,16,32")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
HERE = "here"


@dataclass(frozen=True)
class PlanConfig:
    """Predict which policies fit a control rate, and what to change first."""

    hz: float = 50.0
    """Control rate (Hz): one inference in every period."""
    device: str | None = None
    """A known device, or `here` to measure this machine's constants; default: here, or the sweep's machine."""
    sweep: tuple[str, ...] = AXES
    """The configurations to consider, as axes of `robotattn profile --sweep`."""
    base: str | None = None
    """A checkpoint or a training configuration: its policy is what the axes change. Default: one made for sweeps."""
    calibrate: Path | None = None
    """A sweep (sweep.jsonl) of the machine: predict from it."""
    success: Path | None = None
    """Plan these configurations, whose success is known: evaluations, or a list of policy and success."""
    share: float = 1.0
    """Share of the control period that is the policy's: what capture and I/O leave."""
    dtype: str | None = None
    """Number format of an analytic prediction; default: bfloat16, here float32."""
    graph: bool = False
    """Analytic: launched as one CUDA graph."""
    instruction: int = 16
    """Tokens of the instruction."""

    def __post_init__(self) -> None:
        if not 0 < self.hz < math.inf:
            raise ValueError(f"hz: {self.hz} is not above 0")
        if not 0 < self.share <= 1:
            raise ValueError(f"share: {self.share} is not in (0, 1]")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype}, allowed: {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of one control step. p50 between low and high; worst: what has to fit (p99 where it is known)."""

    p50: float
    low: float
    high: float
    p99: float | None
    beyond: bool = False
    """Larger or smaller than anything that the model was fitted to: its error is not that of the label."""

    @property
    def worst(self) -> float:
        """The most that the step is predicted to take: the upper end of p99, or of p50 where no tail is known."""
        return self.high if self.p99 is None else self.high * self.p99 / self.p50


class Model(Protocol):
    """What predicts."""

    label: str
    """Says that the figure is predicted, how, and with which error."""

    def __call__(self, policy: PolicyConfig) -> Prediction: ...

    def stages(self, policy: PolicyConfig) -> dict[str, float]:
        """The expected milliseconds of each stage; they add up to p50."""
        ...


class Analytic:
    """Predict from closed forms and a device's constants."""

    def __init__(self, device: devices.Device, dtype: str, graph: bool, instruction: int) -> None:
        self.device, self.dtype, self.graph, self.instruction = device, dtype, graph, instruction
        below, above = (100 * share for share in EXPLAINED)
        self.label = f"predicted (analytic, {device.name} {dtype}; a bound explains {below:.0f}-{above:.0f} % of time)"

    def __call__(self, policy: PolicyConfig) -> Prediction:
        p50 = sum(self.stages(policy).values())
        floor = p50 * USUAL
        return Prediction(p50, floor / EXPLAINED[1], floor / EXPLAINED[0], None)

    def stages(self, policy: PolicyConfig) -> dict[str, float]:
        """The bound of each stage over the share that a bound usually explains."""
        works = bounds.work(policy, self.instruction, DTYPES[self.dtype])
        found = bounds.bounds(works, self.device, self.dtype, self.graph)
        scale = found["step"].floor_ms / sum(found[stage].floor_ms for stage in works) / USUAL
        return {stage: scale * found[stage].floor_ms for stage in works}


class Calibrated:
    """Predict from a sweep of the machine."""

    def __init__(self, calibration: Calibration, instruction: int) -> None:
        self.calibration, self.instruction = calibration, instruction
        held_out = calibration.held_out
        median, worst = 100 * held_out["error"], 100 * held_out["worst"]
        self.label = f"predicted (calibrated; held-out error {median:.1f} % median, {worst:.1f} % largest)"

    def __call__(self, policy: PolicyConfig) -> Prediction:
        kind, known = name_of(type(policy)), facts(policy, self.instruction)
        p50 = self.calibration.predict(kind, known["work"], known["image_bytes"])
        error, tail = self.calibration.held_out["worst"], self.calibration.tail.get("p99")
        p99 = None if tail is None else p50 * tail
        beyond = not self.calibration.covers(kind, known["work"])
        return Prediction(p50, p50 * max(0.0, 1 - error), p50 * (1 + error), p99, beyond)

    def stages(self, policy: PolicyConfig) -> dict[str, float]:
        """The fitted time of each stage and of what surrounds them."""
        known = facts(policy, self.instruction)
        return self.calibration.stages(name_of(type(policy)), known["work"], known["image_bytes"])


def plan(config: PlanConfig) -> dict[str, Any]:
    """Return a row for every configuration, the Pareto front, what to change first, and the budgets of a sweep.

    Raises UsageError for a device that is not known, or a sweep or file of successes that cannot be used.
    """
    rows = read(config.calibrate) if config.calibrate else None
    model, device = _model(config, rows)
    known = successes(config.success) if config.success else []
    base = described(base_of(config.base), config.base)
    candidates, left_out = ([one for one, _ in known], []) if known else grid(config.sweep, base)
    budget_ms = 1000.0 * config.share / config.hz
    planned = [_row(candidate, model, budget_ms, config) for candidate in candidates]
    for row, (_, rate) in zip(planned, known, strict=False):  # without success rates, none
        row["success"] = rate
    mark_front(planned, "success" if known else "tokens")
    return {
        "hz": config.hz,
        "budget_ms": budget_ms,
        "device": device,
        "predicted": model.label,
        "rows": planned,
        "changes": [what for one in hardest(planned, candidates) for what in first_changes(one, model)],
        "budgets": result(merge(rows.points), config.share)["budgets"] if rows else [],
        "left_out": left_out,
    }


def _model(config: PlanConfig, rows: Rows | None) -> tuple[Analytic | Calibrated, str]:
    if rows is None:
        device = known_device(config.device or HERE)
        dtype = config.dtype or ("float32" if device.measured else "bfloat16")
        return Analytic(device, dtype, config.graph, config.instruction), device.name
    name = " ".join(str(rows.environment.get(part)) for part in ("device", "cpu"))
    if config.device is not None and config.device.lower() not in name.lower():
        raise UsageError(f"device: {config.device}, but {rows.path} is of {name}; leave --device or --calibrate out")
    try:
        return Calibrated(calibrate(merge(rows.points)), config.instruction), name
    except ValueError as error:
        raise UsageError(f"{rows.path}: {error}") from None


def known_device(name: str) -> devices.Device:
    """A device's constants: from the table, or measured here; raises UsageError naming those in the table."""
    if name == HERE:
        return devices.probe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if name not in devices.DEVICES:
        raise UsageError(f"device: {name}, allowed: {', '.join(devices.DEVICES)}, or {HERE}")
    return devices.DEVICES[name]


def _row(candidate: Candidate, model: Model, budget_ms: float, config: PlanConfig) -> dict[str, Any]:
    policy, predicted = candidate.policy, model(candidate.policy)
    return {
        "label": candidate.label,
        "kind": candidate.kind,
        "tokens": bounds.tokens(policy, config.instruction)["prefix"],
        "kv_bytes": bounds.kv_bytes(policy, config.instruction)["total"],
        **{name: getattr(predicted, name) for name in ("p50", "low", "high", "p99", "beyond")},
        "fits": verdict(predicted, budget_ms),
        "ticks": math.ceil(predicted.worst * config.hz / 1000.0),
    }


def verdict(predicted: Prediction, budget_ms: float) -> str:
    """yes: even the worst prediction fits; no: not even the best does; perhaps: what lies between."""
    if predicted.worst <= budget_ms:
        return "yes"
    return "no" if predicted.low > budget_ms else "perhaps"


def mark_front(rows: Sequence[dict[str, Any]], worth: str, cost: str = "p50") -> None:
    """Mark the rows that no other beats: more (or equal) `worth` in less time. Tokens count within one kind only."""
    for row in rows:
        rivals = [r for r in rows if worth == "success" or r["kind"] == row["kind"]]
        row["front"] = not any(
            r[worth] >= row[worth] and r[cost] <= row[cost] and (r[worth], r[cost]) != (row[worth], row[cost])
            for r in rivals
        )


def hardest(rows: Sequence[Mapping[str, Any]], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of each kind, the configuration to work on: the cheapest that does not fit for sure, or else the largest."""
    chosen = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [(row, one) for row, one in zip(rows, candidates, strict=True) if row["kind"] == kind]
        failing = [pair for pair in mine if pair[0]["fits"] != "yes"]
        chosen.append(min(failing, key=_cost)[1] if failing else max(mine, key=_cost)[1])
    return chosen


def _cost(pair: tuple[Mapping[str, Any], Candidate]) -> float:
    return float(pair[0]["p50"])


def first_changes(candidate: Candidate, model: Model) -> list[dict[str, Any]]:
    """Every single change of a configuration with the time it is predicted to save, the largest saving first."""
    policy, before = candidate.policy, model(candidate.policy).p50
    found = [(name, model(changed).p50, model(changed).beyond) for name, changed in changes(policy)]
    if again := uncached(policy, model):
        found.append(("without the KV cache, which it has", before + again, False))
    rows: list[dict[str, Any]] = [
        {"of": candidate.label, "change": name, "p50": after, "saves": before - after, "beyond": beyond}
        for name, after, beyond in found
    ]
    return sorted((row | {"share": row["saves"] / before} for row in rows), key=lambda row: -row["saves"])


def uncached(policy: PolicyConfig, model: Model) -> float:
    """What running the prefix again for every action token or integration step would add (ms)."""
    work, stages = bounds.work(policy, 1), model.stages(policy)
    repeats = max(one.repeats for one in work.values())
    return (repeats - 1) * sum(stages.get(stage, 0.0) for stage in ("prefix", "cross_kv"))
