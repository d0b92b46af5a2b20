"""What a sweep says: the lines through its points, the model calibrated on them, and the budgets of tokens and cameras.

Rows of a sweep go in; plain values for JSON come out, every error of points that were held out of the fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from robotattn.latency.budget import RATES, Fit, Shape, fits, largest, pooled
from robotattn.latency.calibrate import calibrate
from robotattn.latency.sweep_file import Sample

STATISTICS = ("p50", "p99", "max")
BUDGETED = ("p99", "max")


def result(samples: Sequence[Sample], share: float = 1.0) -> dict[str, Any]:
    """Return fits, calibration, budgets, and what was refused and why. share: of the control period, the policy's."""
    points = [sample.point() for sample in samples]
    lines, together = {}, {}
    refused: dict[str, str] = {}
    for statistic in STATISTICS:
        found, why = fits(points, statistic)
        lines[statistic] = found
        refused |= why
        if found:
            together[statistic] = pooled(points, found, statistic)
    return {
        "fits": {statistic: _short(found) for statistic, found in lines.items()},
        "pooled": together,
        "calibration": _calibration(samples, refused),
        "budgets": budgets(samples, lines, share),
        "refused": refused,
    }


def _short(found: Mapping[tuple[str, str], Fit]) -> dict[str, Any]:
    """The fits as plain values, under "kind mode", without the single predictions."""
    plain = {" ".join(group): asdict(fit) for group, fit in found.items()}
    return {name: {field: value for field, value in fit.items() if field != "held_out"} for name, fit in plain.items()}


def _calibration(samples: Sequence[Sample], refused: dict[str, str]) -> dict[str, Any]:
    """The errors of the model of kernels, FLOPs and bytes, for each mode."""
    found = {}
    for mode in dict.fromkeys(sample.mode for sample in samples):
        try:
            one = calibrate([sample for sample in samples if sample.mode == mode])
        except ValueError as error:
            refused[f"calibration {mode}"] = str(error)
        else:
            found[mode] = {"held_out": one.held_out, "by_kind": one.by_kind, "tail": one.tail}
    return found


def budgets(
    samples: Sequence[Sample], lines: Mapping[str, Mapping[tuple[str, str], Fit]], share: float = 1.0
) -> list[dict[str, Any]]:
    """The headline table: for each kind, mode, statistic and rate the most tokens, and cameras of so many tokens."""
    rows = []
    for statistic in BUDGETED:
        for (kind, mode), fit in lines.get(statistic, {}).items():
            shapes = {s.per_camera: s for s in map(shape, samples_of(samples, kind, mode)) if s.per_camera}
            for hz in RATES:
                found = [largest(fit, one, hz, statistic, share) for _, one in sorted(shapes.items())]
                cameras = {str(size): one.cameras for size, one in zip(sorted(shapes), found, strict=True)}
                row = {"kind": kind, "mode": mode, "statistic": statistic, "hz": hz, "cameras": cameras}
                best = min(found, key=lambda one: (one.tokens is None, one.tokens)) if found else None
                row |= {"tokens": best.tokens if best else None, "extrapolated": bool(best and best.extrapolated)}
                rows.append(row | {"r2_held_out": fit.r2_held_out, "error": fit.error})
    return rows


def samples_of(samples: Sequence[Sample], kind: str, mode: str) -> list[Sample]:
    """The samples of one kind in one mode."""
    return [sample for sample in samples if (sample.kind, sample.mode) == (kind, mode)]


def shape(sample: Sample) -> Shape:
    """What a sample's tokens are made of; frames of a camera count as the camera's."""
    cameras = sample.config["cameras"]
    names = [group for group in sample.tokens if group.partition("@")[0] in cameras]
    seen = sum(sample.tokens[name] for name in names)
    per_camera = seen // len(cameras) if cameras else 0
    actions = sample.tokens["actions"]
    return Shape(per_camera, sample.tokens["prefix"] - seen, actions, int(sample.kv["per_token"]))
