"""Compare two result files, and say whether the second is significantly worse: an exit code for CI.

Evaluations: the difference of success (within the time limit, and where both tell, within 3 s and at the first try),
paired where both ran the same seeds (Newcombe's interval, McNemar's p), else from two Wilson intervals. Profiles and
traces: the ratio of p50 and of p99, with the interval of a bootstrap over blocks of consecutive steps, because
neighbouring latencies are alike. Files that were not made under the same conditions are refused, and what differs is
named.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from robotattn.config import UsageError
from robotattn.scores import outcomes
from robotattn.statistics import Estimate, paired_difference, samples_needed, wilson

KINDS = {"evaluation": (1,), "profile": (2,), "trace": (1,)}
PERCENTILES = (0.5, 0.99)
TOLERANCE = {"evaluation": 0.0, "profile": 0.05, "trace": 0.05}
CHUNK = 2_000_000  # numbers resampled at once: 16 MB

EVALUATION = ("env", "config.execute", "config.ensemble", "config.objects", "config.other", "config.phrases")
MACHINE = ("environment.device", "environment.cpu", "environment.torch_threads")
LATENCY = ("device", *MACHINE, "clock", "hz", "shape.batch", "config.device", "config.batch")
EVALUATION_FILE = "evaluation.json"
NOTED = (
    "config.timing",
    "environment.versions",
    "machine.versions",
    "machine.device",
    "machine.renderer",
    "mode",
    "policy",
    "shape",
)
BACK_TO_BACK = "back to back"
"""Conditions must be equal; what is noted may be the very thing that is compared."""


@dataclass(frozen=True)
class CompareConfig:
    """Compare two evaluations, two profiles or two traces; exit code 1 if B is significantly worse than A."""

    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A.json")]
    """The result to hold on to."""
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B.json")]
    """The result to judge."""
    tolerance: float | None = None
    """How much worse is still right: a share of A's latency (default 0.05), or of all episodes (default 0)."""
    paired: bool = False
    """The two latencies were measured in turn, A B A B, so that step i of both saw the same machine."""
    anyway: bool = False
    """Compare although the conditions differ."""
    resamples: int = 2000
    """Of the bootstrap."""
    seed: int = 0
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance: {self.tolerance} is not 0 or above")
        if self.resamples < 100 or self.seed < 0:
            raise ValueError(f"resamples: {self.resamples}, seed: {self.seed}: at least 100, and 0")


def compare(config: CompareConfig) -> dict[str, Any]:
    """Return the rows of the comparison, whether it is a regression, and what differs between the files.

    Raises UsageError for a file that is no result, and for two that are not comparable.
    """
    a, b = _read(config.a), _read(config.b)
    if a["kind"] != b["kind"]:
        raise UsageError(f"{config.b}: is a {b['kind']}, {config.a} a {a['kind']}; two of one kind can be compared")
    kind = str(a["kind"])
    differs = _differences(a, b, EVALUATION if kind == "evaluation" else LATENCY)
    if differs and not config.anyway:
        raise UsageError(f"{config.b}: not made under the conditions of {config.a}: {'; '.join(differs)}; see --anyway")
    tolerance = TOLERANCE[kind] if config.tolerance is None else config.tolerance
    if kind == "evaluation":
        rows = _successes(a, b, tolerance)
    else:
        rows = _latencies((config.a, a), (config.b, b), tolerance, config)
    regression = any(row["verdict"] == "worse" for row in rows)
    told = {"kind": kind, "tolerance": tolerance, "regression": regression, "rows": rows}
    return told | {"differs": differs, "notes": _differences(a, b, NOTED)}


def _read(path: Path) -> dict[str, Any]:
    if (path / EVALUATION_FILE).is_file():  # the folder of an evaluation
        path = path / EVALUATION_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; allowed is an evaluation, a profile or a trace") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{path}: kind {kind}, allowed: {', '.join(KINDS)}")
    if data.get("schema") not in KINDS[kind]:
        known = " or ".join(map(str, KINDS[kind]))
        raise UsageError(f"{path}: schema {data.get('schema')}, this program compares a {kind} of schema {known}")
    return data


# ------------------------------------------------------------------------------------------ conditions


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Name every leaf below the dotted names that is not the same in both, with the two values."""
    found = []
    for name in names:
        ours, theirs = dict(_leaves(name, _at(a, name))), dict(_leaves(name, _at(b, name)))
        for leaf in dict.fromkeys((*ours, *theirs)):
            if ours.get(leaf) != theirs.get(leaf):
                found.append(f"{leaf}: {ours.get(leaf)}, then {theirs.get(leaf)}")
    return found


def _at(data: Any, name: str) -> Any:
    for part in name.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(name, value)]
    return [leaf for key, item in value.items() for leaf in _leaves(f"{name}.{key}", item)]


# ------------------------------------------------------------------------------------------ success


def _successes(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> list[dict[str, Any]]:
    for data in (a, b):
        if not data["rows"]:
            raise UsageError(f"{data['config'].get('out')}: an evaluation without episodes")
    seeds = [[row["seed"] for row in data["rows"]] for data in (a, b)]
    scores = [outcomes(data["rows"]) for data in (a, b)]
    both = [name for name in scores[0] if name in scores[1]]
    rows = []
    for name in both:
        ours, theirs = (dict(zip(one, score[name], strict=True)) for one, score in zip(seeds, scores, strict=True))
        rows.append(_success(name.replace("_", " "), ours, theirs, tolerance))
    return rows


def _success(name: str, ours: Mapping[int, bool], theirs: Mapping[int, bool], tolerance: float) -> dict[str, Any]:
    """The row of one score, from what each seed came to in both."""
    row: dict[str, Any] = {"quantity": name, "n": [len(ours), len(theirs)], "paired": ours.keys() == theirs.keys()}
    row |= {"a": sum(ours.values()) / len(ours), "b": sum(theirs.values()) / len(theirs)}
    if row["paired"]:
        pairs = paired_difference(list(ours.values()), [theirs[seed] for seed in ours])
        change = Estimate(pairs.difference, pairs.low, pairs.high)
        row |= {"only_a": pairs.only_a, "only_b": pairs.only_b, "p": pairs.p}
    else:
        change = difference(list(ours.values()), list(theirs.values()))
    verdict = _verdict(change, -tolerance, worse_is_high=False, none=0.0)
    return row | {"change": change.value, "low": change.low, "high": change.high, "verdict": verdict}


def difference(a: Sequence[bool], b: Sequence[bool], confidence: float = 0.95) -> Estimate:
    """Return rate(b) - rate(a) of two independent runs, with the interval made of two Wilson intervals.

    Source: Newcombe (1998), Statistics in Medicine 17:873, method 10.
    """
    ours, theirs = (wilson(sum(one), len(one), confidence) for one in (a, b))
    down = math.hypot(theirs.value - theirs.low, ours.high - ours.value)
    up = math.hypot(theirs.high - theirs.value, ours.value - ours.low)
    change = theirs.value - ours.value
    return Estimate(change, change - down, change + up)


def _verdict(change: Estimate, limit: float, worse_is_high: bool, none: float) -> str:
    """Worse: the whole interval lies beyond the limit. Better: the whole interval lies on the good side of `none`."""
    worse = change.low > limit if worse_is_high else change.high < limit
    better = change.high < none if worse_is_high else change.low > none
    return "worse" if worse else "better" if better else "no significant change"


# ------------------------------------------------------------------------------------------ latency


def _latencies(
    a: tuple[Path, dict[str, Any]], b: tuple[Path, dict[str, Any]], tolerance: float, config: CompareConfig
) -> list[dict[str, Any]]:
    ours, theirs = samples(*a), samples(*b)
    if config.paired and len(ours) != len(theirs):
        raise UsageError(f"{config.b}: {len(theirs)} steps, {config.a} {len(ours)}: --paired needs as many of both")
    rng = np.random.default_rng(config.seed)
    rows = []
    for p in PERCENTILES:
        row: dict[str, Any] = {"quantity": f"p{100 * p:g} (ms)", "n": [len(ours), len(theirs)], "paired": config.paired}
        row |= {"a": float(np.quantile(ours, p)), "b": float(np.quantile(theirs, p))}
        if min(len(ours), len(theirs)) < samples_needed(p):
            row["verdict"] = f"refused: needs {samples_needed(p)} samples"
            rows.append(row | {"a": None, "b": None})
            continue
        change = ratio(ours, theirs, p, rng, config.paired, config.resamples)
        verdict = _verdict(change, 1.0 + tolerance, worse_is_high=True, none=1.0)
        rows.append(row | {"change": change.value, "low": change.low, "high": change.high, "verdict": verdict})
    return rows


def samples(path: Path, data: Mapping[str, Any]) -> np.ndarray:
    """The latencies of a trace, or of the trace that a profile names (ms); raises UsageError where there is none."""
    if data["kind"] == "profile":
        if BACK_TO_BACK not in data.get("traces", {}):
            raise UsageError(f"{path}: names no trace, and without its samples a profile cannot be compared")
        path = path.parent / data["traces"][BACK_TO_BACK]
    from robotattn.latency import trace  # brings torch, which evaluations are compared without

    return np.asarray(trace.read(path).service, np.float64) / 1e6


def ratio(
    a: np.ndarray,
    b: np.ndarray,
    p: float,
    rng: np.random.Generator,
    paired: bool = False,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Estimate:
    """Return percentile p of b over that of a, with the interval of a circular block bootstrap (Politis & Romano 1992).

    Blocks are about sqrt(n) consecutive samples. paired: both are resampled at the same places.
    """
    state = rng.bit_generator.state
    below = resampled(a, p, rng, resamples)
    if paired:
        rng.bit_generator.state = state
    quotients = resampled(b, p, rng, resamples) / below
    low, high = np.quantile(quotients, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(np.quantile(b, p) / np.quantile(a, p)), float(low), float(high))


def resampled(values: np.ndarray, p: float, rng: np.random.Generator, resamples: int) -> np.ndarray:
    """Percentile p of so many resamples, each made of blocks of consecutive values."""
    n = len(values)
    block = math.isqrt(n)
    count, at_once = -(-n // block), max(1, CHUNK // n)
    found = []
    for done in range(0, resamples, at_once):
        starts = rng.integers(n, size=(min(at_once, resamples - done), count, 1))
        places = (starts + np.arange(block)).reshape(len(starts), -1)[:, :n] % n
        found.append(np.quantile(values[places], p, axis=1))
    return np.concatenate(found)
