"""How latency grows with tokens, and the largest budget of tokens and cameras that a control rate leaves.

Measured points go in; out come the coefficients of ms = a + b N_prefix + c N_action + e KV bytes for each kind of
policy and mode of execution, their error on points that were held out, and the budgets. The fit is a line through what
was measured: beyond the largest measured prefix a budget is marked as extrapolated.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RATES = (10.0, 20.0, 30.0, 50.0, 100.0)  # (Hz)
FOLDS = 4
TERMS = ("a", "b", "c", "e")


@dataclass(frozen=True)
class Point:
    """One measured configuration. milliseconds: statistic (p50, p99, max) → ms, where it has enough samples."""

    kind: str
    mode: str
    prefix: int
    actions: int
    kv_bytes: int
    milliseconds: Mapping[str, float]

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """What the four coefficients are multiplied by."""
        return 1.0, float(self.prefix), float(self.actions), float(self.kv_bytes)


@dataclass(frozen=True)
class Fit:
    """ms = a + b N_prefix + c N_action + e KV bytes; r2_held_out, error, worst: of points left out of the fit.

    error: median, worst: largest absolute relative error. untold: terms that these points cannot tell from the others.
    """

    a: float
    b: float
    c: float
    e: float
    n: int
    r2: float
    r2_held_out: float
    error: float
    worst: float
    untold: tuple[str, ...]
    largest_prefix: int
    held_out: tuple[float, ...] = ()
    """The prediction for each point by a fit that did not see it (ms), in the points' order."""

    def predict(self, prefix: float, actions: float, kv_bytes: float) -> float:
        """Return the milliseconds of a configuration."""
        return self.a + self.b * prefix + self.c * actions + self.e * kv_bytes


@dataclass(frozen=True)
class Shape:
    """What a policy's tokens are made of. other: prefix tokens that are no camera's; kv_per_token (bytes)."""

    per_camera: int
    other: int
    actions: int
    kv_per_token: int


@dataclass(frozen=True)
class Budget:
    """The largest prefix, and the most cameras, within one control period; None: no limit in this fit."""

    hz: float
    statistic: str
    tokens: int | None
    cameras: int | None
    extrapolated: bool


def fit(points: Sequence[Point], statistic: str = "p50") -> Fit:
    """Fit the non-negative least squares line of points of one kind and mode, with its error on held-out points.

    Raises ValueError for points of several kinds or modes, a statistic that a point lacks, or too few points.
    """
    if len({(point.kind, point.mode) for point in points}) != 1:
        raise ValueError("points: a fit is of one kind of policy in one mode")
    if lacking := sum(statistic not in point.milliseconds for point in points):
        raise ValueError(f"{statistic}: {lacking} of {len(points)} points have too few samples for it")
    groups = [(point.prefix, point.actions, point.kv_bytes) for point in points]
    if len(set(groups)) < FOLDS:
        raise ValueError(f"points: {len(set(groups))} different ones, a fit with held-out points needs {FOLDS}")
    design = np.array([point.terms for point in points])
    target = np.array([point.milliseconds[statistic] for point in points])
    told = independent(design)
    coefficients = nonnegative(design, target, told)
    held_out = cross_validate(design, target, groups)
    relative = np.abs(held_out / target - 1.0)
    a, b, c, e = (float(value) for value in coefficients)
    return Fit(
        a,
        b,
        c,
        e,
        n=len(points),
        r2=r_squared(target, design @ coefficients),
        r2_held_out=r_squared(target, held_out),
        error=float(np.median(relative)),
        worst=float(relative.max()),
        untold=tuple(name for index, name in enumerate(TERMS) if index not in told),
        largest_prefix=max(point.prefix for point in points),
        held_out=tuple(map(float, held_out)),
    )


def fits(points: Sequence[Point], statistic: str = "p50") -> tuple[dict[tuple[str, str], Fit], dict[str, str]]:
    """Fit every (kind, mode) that has enough points; the second result says of the others why not."""
    found, refused = {}, {}
    for group in dict.fromkeys((point.kind, point.mode) for point in points):
        try:
            found[group] = fit([point for point in points if (point.kind, point.mode) == group], statistic)
        except ValueError as error:
            refused[f"{' '.join(group)} {statistic}"] = str(error)
    return found, refused


def pooled(points: Sequence[Point], found: Mapping[tuple[str, str], Fit], statistic: str = "p50") -> dict[str, float]:
    """R^2, median and largest error over all held-out points, each predicted by its own kind's fit."""
    measured, predicted = list[float](), list[float]()
    for group, one in found.items():
        mine = [point for point in points if (point.kind, point.mode) == group]
        measured += [point.milliseconds[statistic] for point in mine]
        predicted += one.held_out
    return agreement(np.array(measured), np.array(predicted))


def agreement(measured: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """How well predictions (ms) meet measurements (ms): r2, median and largest absolute relative error, n."""
    relative = np.abs(predicted / measured - 1.0)
    found = {"r2": r_squared(measured, predicted), "error": float(np.median(relative)), "worst": float(relative.max())}
    return found | {"n": len(measured)}


def largest(fit: Fit, shape: Shape, hz: float, statistic: str, periods: float = 1.0) -> Budget:
    """Return the largest prefix and the most cameras whose predicted latency is within the control period.

    shape: of the configuration to grow. periods: share of the period that capture and I/O leave to the policy.
    """
    left = 1000.0 * periods / hz - fit.predict(0, shape.actions, shape.kv_per_token * shape.actions)
    slope = fit.b + fit.e * shape.kv_per_token
    if slope <= 0.0:
        room = None if left >= 0.0 else 0
        return Budget(hz, statistic, room, room, extrapolated=room is None)
    tokens = max(0, math.floor(left / slope + 1e-9))
    cameras = max(0, tokens - shape.other) // shape.per_camera if shape.per_camera else None
    return Budget(hz, statistic, tokens, cameras, tokens > fit.largest_prefix)


def table(found: Mapping[str, Fit], shape: Shape, rates: Iterable[float] = RATES, periods: float = 1.0) -> list[Budget]:
    """The headline table of one configuration: a budget for each statistic (its fit) and control rate."""
    return [largest(one, shape, hz, statistic, periods) for statistic, one in found.items() for hz in rates]


# ------------------------------------------------------------------------------------------ least squares


def independent(design: np.ndarray, tolerance: float = 1e-6) -> list[int]:
    """The columns of ``[n, k]``, from the left, that are no linear combination of the ones before them."""
    kept: list[int] = []
    for index in range(design.shape[1]):
        column = design[:, index] / max(np.linalg.norm(design[:, index]), 1e-300)
        basis = _unit(design[:, kept])
        rest = column - basis @ np.linalg.lstsq(basis, column, rcond=None)[0] if kept else column
        if np.linalg.norm(rest) > tolerance:
            kept.append(index)
    return kept


def nonnegative(design: np.ndarray, target: np.ndarray, columns: Sequence[int] | None = None) -> np.ndarray:
    """Return the non-negative coefficients ``[k]`` of least squares; columns that are not named get 0.

    Exact for the few columns here: the solution is the best of all subsets whose unconstrained fit is non-negative.
    """
    allowed = independent(design) if columns is None else list(columns)
    best, least = np.zeros(design.shape[1]), float(target @ target)
    for size in range(1, len(allowed) + 1):
        for subset in itertools.combinations(allowed, size):
            part = design[:, subset]
            scale = np.linalg.norm(part, axis=0)
            solved = np.linalg.lstsq(part / scale, target, rcond=None)[0]
            residual = float(np.square(target - part / scale @ solved).sum())
            if (solved >= 0).all() and residual < least:
                least, best = residual, np.zeros(design.shape[1])
                best[list(subset)] = solved / scale
    return best


def cross_validate(
    design: np.ndarray, target: np.ndarray, groups: Sequence[object], relative: bool = False, folds: int = FOLDS
) -> np.ndarray:
    """Predict every row by a fit of the other folds. groups: rows of one group (repeats of a point) stay together.

    relative: weigh each row by 1 / target, for a small relative error instead of a small absolute one.
    """
    fold = assign(groups, folds)
    weight = 1.0 / target if relative else np.ones(len(target))
    predicted = np.empty(len(target))
    for index in range(folds):
        rest = fold != index
        solved = nonnegative(design[rest] * weight[rest, None], target[rest] * weight[rest])
        predicted[~rest] = design[~rest] @ solved
    return predicted


def assign(groups: Sequence[object], folds: int = FOLDS) -> np.ndarray:
    """The fold of every row, the same each time: groups in sorted order are dealt out in turn."""
    order = {group: index % folds for index, group in enumerate(sorted(set(groups)))}  # type: ignore[type-var]
    return np.array([order[group] for group in groups])


def r_squared(measured: np.ndarray, predicted: np.ndarray) -> float:
    """1 - residual / total sum of squares: negative for predictions worse than the mean."""
    total = float(np.square(measured - measured.mean()).sum())
    return 1.0 - float(np.square(measured - predicted).sum()) / total if total else math.nan


def _unit(columns: np.ndarray) -> np.ndarray:
    return columns / np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
