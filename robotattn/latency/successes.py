"""Success rates of configurations, for the front of success against latency.

Read from evaluations (``robotattn evaluate``; the policy's configuration is in the checkpoint they name), or from any
list of ``{"policy": {"act": {...}}, "success": 0.93}``, where the success may also be a mapping with a ``rate``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from robotattn import checkpoint
from robotattn.config import ONE_OF, UsageError, from_dict
from robotattn.latency.grid import Candidate, described
from robotattn.latency.subject import read_policy
from robotattn.policies import PolicyConfig


@dataclass(frozen=True)
class _Part:
    policy: Annotated[PolicyConfig, ONE_OF]


def successes(path: Path) -> list[tuple[Candidate, float]]:
    """Return configurations and their success rates; path: a file, or a folder of evaluations.

    Raises UsageError for a file without any, naming it.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = [one for file in files for one in _of_file(file, skip=path.is_dir())]
    if not found:
        raise UsageError(f"{path}: has no success rates; allowed are evaluations, or a list of policy and success")
    return found


def _of_file(path: Path, skip: bool) -> list[tuple[Candidate, float]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    if isinstance(data, Mapping) and data.get("kind") == "evaluation":
        return _of_evaluation(path, data)
    rows = data.get("rows") if isinstance(data, Mapping) else data
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and "policy" in row for row in rows):
        if skip:
            return []
        raise UsageError(f"{path}: is neither an evaluation nor a list of policy and success")
    return [_row(f"{path}: {index}", row) for index, row in enumerate(rows)]


def _of_evaluation(path: Path, data: Mapping[str, Any]) -> list[tuple[Candidate, float]]:
    folder = data["config"].get("checkpoint")
    if folder is None:
        return []  # a baseline has no policy
    policy = described(read_policy(checkpoint.locate(folder) / checkpoint.CONFIG), path)
    return [(Candidate(policy, (("evaluation", path.stem),)), float(data["success"]["rate"]))]


def _row(source: str, row: Mapping[str, Any]) -> tuple[Candidate, float]:
    policy = described(from_dict(_Part, {"policy": row["policy"]}, source).policy, source)
    rate = row.get("success")
    rate = rate.get("rate") if isinstance(rate, Mapping) else rate
    if not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise UsageError(f"{source}: success: {rate}, allowed is a rate from 0 to 1")
    return Candidate(policy, (("name", row.get("name", source.rpartition("/")[2])),)), float(rate)
