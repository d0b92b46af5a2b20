"""Predict latencies of configurations that were never run, from a sweep of others on the same machine.

Each stage of each kind of policy is ms = kernels * launch + FLOPs / F + bytes / B, with the three fitted non-negatively
to the measured stages over the closed forms of their work; what surrounds the policy is ms = h + image bytes / B'. The
whole step is their sum, times what the unsplit step took of it. The error that goes with every prediction is that of
points that were held out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from robotattn.latency.budget import agreement, assign, cross_validate, nonnegative
from robotattn.latency.sweep_file import Sample

AROUND = "around"
"""The host's part: everything that is timed and not the policy's."""
Work = Mapping[str, Mapping[str, float]]
"""Stage → the closed form of its work, as `dataclasses.asdict` gives it."""
ROOM = 1.25  # beyond the smallest and the largest point of a sweep by so much still counts as covered
LEAST = 6  # points of a kind


@dataclass(frozen=True)
class Calibration:
    """What a sweep says of a machine. terms: (kind, stage) → milliseconds per kernel, FLOP and byte.

    tail: of a statistic, its median ratio to p50. held_out: r2, error (median), worst, n over points left out.
    ranges: the least and the most of each column that the sweep had.
    """

    terms: Mapping[tuple[str, str], tuple[float, ...]]
    whole: Mapping[str, float]
    tail: Mapping[str, float]
    held_out: Mapping[str, float]
    by_kind: Mapping[str, Mapping[str, float]]
    ranges: Mapping[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]]

    def covers(self, kind: str, work: Work) -> bool:
        """Tell whether every stage's work is about within what the sweep had: else the held-out error says little."""
        for stage, one in work.items():
            least, most = self.ranges[kind, stage]
            if any(not low / ROOM <= x <= ROOM * high for low, x, high in zip(least, columns(one), most, strict=True)):
                return False
        return True

    def predict(self, kind: str, work: Work, image_bytes: float) -> float:
        """Return the p50 of a whole step (ms); raises ValueError for a kind or stage that was not measured."""
        return sum(self.stages(kind, work, image_bytes).values())

    def stages(self, kind: str, work: Work, image_bytes: float) -> dict[str, float]:
        """Return what each stage, and what surrounds them, adds to it (ms)."""
        around = {AROUND: _dot(self._terms(kind, AROUND), (1.0, image_bytes))}
        parts = around | {stage: _dot(self._terms(kind, stage), columns(one)) for stage, one in work.items()}
        return {stage: self.whole[kind] * part for stage, part in parts.items()}

    def _terms(self, kind: str, stage: str) -> tuple[float, ...]:
        if (kind, stage) not in self.terms:
            raise ValueError(f"{kind}: {stage} is not in the calibration, which has {sorted(self.terms)}")
        return self.terms[kind, stage]


def columns(work: Mapping[str, float]) -> tuple[float, float, float]:
    """What the coefficients are multiplied by: kernels, FLOPs and bytes of a stage, all repeats and what comes once."""
    moved = sum(work[name] for name in ("weight_bytes", "read_bytes", "written_bytes", "passed_bytes"))
    repeats = work["repeats"]
    kernels = repeats * work["kernels"] + work["once_kernels"]
    return kernels, repeats * work["flops"], repeats * moved + work["once_bytes"]


def calibrate(samples: Sequence[Sample]) -> Calibration:
    """Fit every stage of every kind; raises ValueError if a kind has too few points, or the modes are several."""
    if len({sample.mode for sample in samples}) != 1:
        raise ValueError("samples: a calibration is of one mode of execution")
    terms = dict[tuple[str, str], tuple[float, ...]]()
    ranges = dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]]()
    whole, measured, predicted = dict[str, float](), list[np.ndarray](), list[np.ndarray]()
    by_kind = dict[str, dict[str, float]]()
    for kind in dict.fromkeys(sample.kind for sample in samples):
        mine = [sample for sample in samples if sample.kind == kind]
        if len(mine) < LEAST:
            raise ValueError(f"samples: {kind} has {len(mine)} points, a calibration needs {LEAST}")
        terms |= {(kind, stage): _fit(*of_stage(mine, stage)) for stage in (*mine[0].work, AROUND)}
        ranges |= {(kind, stage): _range(of_stage(mine, stage)[0]) for stage in mine[0].work}
        whole[kind] = _whole(mine)
        truth, guess = np.array([sample.milliseconds["p50"] for sample in mine]), _held_out(mine)
        by_kind[kind] = agreement(truth, guess)
        measured.append(truth)
        predicted.append(guess)
    held_out = agreement(np.concatenate(measured), np.concatenate(predicted))
    return Calibration(terms, whole, _tails(samples), held_out, by_kind, ranges)


def of_stage(samples: Sequence[Sample], stage: str) -> tuple[np.ndarray, np.ndarray]:
    """What a stage's time is fitted to ``[n, k]``, and the time ``[n]`` (ms)."""
    if stage == AROUND:
        design = [(1.0, sample.image_bytes) for sample in samples]
        return np.array(design), np.array([_around(sample) for sample in samples])
    return np.array([columns(s.work[stage]) for s in samples]), np.array([s.stages[stage] for s in samples])


def _around(sample: Sample) -> float:
    return sample.stages["staged"] - sum(sample.stages.get(stage, 0.0) for stage in sample.work)


def _fit(design: np.ndarray, target: np.ndarray) -> tuple[float, ...]:
    """Fit with equal weight for equal relative errors: small configurations count as much as large ones."""
    target = np.maximum(target, 1e-6)
    return tuple(map(float, nonnegative(design / target[:, None], np.ones(len(target)))))


def _range(design: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(map(float, design.min(axis=0))), tuple(map(float, design.max(axis=0)))


def _whole(samples: Sequence[Sample]) -> float:
    """The unsplit step over the staged one: what splitting costs is taken out of a prediction."""
    return float(np.median([sample.milliseconds["p50"] / sample.stages["staged"] for sample in samples]))


def _held_out(samples: Sequence[Sample]) -> np.ndarray:
    """Predict each sample by a fit of the other folds, stage by stage."""
    groups = [sample.key for sample in samples]
    total = np.zeros(len(samples))
    for stage in (*samples[0].work, AROUND):
        design, target = of_stage(samples, stage)
        total += cross_validate(design, np.maximum(target, 1e-6), groups, relative=True)
    factor, fold = np.empty(len(samples)), assign(groups)
    for index in set(fold):
        factor[fold == index] = _whole([s for s, where in zip(samples, fold, strict=True) if where != index])
    return total * factor


def _tails(samples: Sequence[Sample]) -> dict[str, float]:
    """How much larger than p50 the other statistics are, in the median of the points that have them."""
    found = {}
    for statistic in ("p99", "max"):
        ratios = [s.milliseconds[statistic] / s.milliseconds["p50"] for s in samples if statistic in s.milliseconds]
        if ratios:
            found[statistic] = float(np.median(ratios))
    return found


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return float(sum(x * y for x, y in zip(a, b, strict=True)))
