"""Normalisation: in come statistics of a dataset, out go values of mean 0 and scale 1, and back to physical units.

`Statistics` is plain data and travels as ``normalisation.json`` inside a checkpoint, never as tensors among the
weights: weights that meet foreign or missing statistics must fail, not hand z-scores to a robot.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float

VERSION = 2  # 1 knew no `steps`; statistics without them are still written as 1


@dataclass(frozen=True)
class Moments:
    """Mean and scale of one vector, in its own units.

    names: one a dimension. scale: the standard deviation, never under `floor`, so a dimension that is constant in
    the dataset divides by the floor and not by zero.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    floor: float

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.mean) == len(self.scale) or not self.names:
            raise ValueError(
                f"moments need as many names as means and scales, got {len(self.names)}, {len(self.mean)}, "
                f"{len(self.scale)} (names {list(self.names)})"
            )
        if not self.floor > 0:
            raise ValueError(f"the floor of a scale must be above 0, got {self.floor}")
        for name, mean, scale in zip(self.names, self.mean, self.scale, strict=True):
            if not (math.isfinite(mean) and math.isfinite(scale) and scale >= self.floor):
                raise ValueError(
                    f"{name}: mean and scale must be finite and the scale at least the floor {self.floor}, "
                    f"got mean {mean}, scale {scale}"
                )

    def under_floor(self) -> tuple[str, ...]:
        """Name the dimensions whose scale is the floor: (nearly) constant ones."""
        return tuple(name for name, scale in zip(self.names, self.scale, strict=True) if scale == self.floor)


@dataclass(frozen=True)
class Steps:
    """What the actions of each step of a chunk are like, as offsets from the arm at the chunk's start.

    step k: moments of the action k periods ahead. low, high: its 1st and 99th percentile, one a dimension.
    """

    moments: tuple[Moments, ...]
    low: tuple[tuple[float, ...], ...]
    high: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.moments) == len(self.low) == len(self.high) or not self.moments:
            raise ValueError(
                f"steps need as many moments as ranges, got {len(self.moments)}, {len(self.low)}, {len(self.high)}"
            )
        for step, (moments, low, high) in enumerate(zip(self.moments, self.low, self.high, strict=True)):
            if not len(moments.names) == len(low) == len(high):
                raise ValueError(f"step {step}: {len(moments.names)} dimensions, {len(low)} and {len(high)} ends")
            for name, a, b in zip(moments.names, low, high, strict=True):
                if not (math.isfinite(a) and math.isfinite(b) and a < b):
                    raise ValueError(f"step {step}: {name}: the range must be finite and not empty, got {a} to {b}")


@dataclass(frozen=True)
class Statistics:
    """Moments of a dataset by key: ``state`` [13], ``action`` [A] and ``position`` [4] (x, y, z, yaw).

    steps: the actions by their place in the chunk, for policies that need it; None where nobody measured it.
    """

    moments: Mapping[str, Moments]
    steps: Steps | None = None

    @property
    def hash(self) -> str:
        """Return the sha256 of the content, the same for equal numbers wherever they are stored."""
        content = _canonical(self.moments)
        if self.steps is not None:
            content += json.dumps(asdict(self.steps), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def to_json(self) -> str:
        """Write version, hash, moments and steps as JSON text; floats keep all their digits."""
        body: dict[str, object] = {"version": 1 if self.steps is None else VERSION, "hash": self.hash}
        body["moments"] = {key: asdict(moments) for key, moments in self.moments.items()}
        if self.steps is not None:
            body["steps"] = asdict(self.steps)
        return json.dumps(body, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Statistics:
        """Read what `to_json` wrote; raise ValueError for another version, unknown fields or an edited file."""
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"statistics are not JSON: {error}") from None
        version = body.get("version") if isinstance(body, dict) else None
        _expect(body, {"version", "hash", "moments", *(["steps"] if version == VERSION else [])}, "statistics")
        if version not in (1, VERSION):
            raise ValueError(f"statistics have version {version!r}, this program reads 1 to {VERSION}")
        moments = {key: _moments(key, entry) for key, entry in body["moments"].items()}
        statistics = cls(moments, _steps(body["steps"]) if version == VERSION else None)
        if statistics.hash != body["hash"]:
            raise ValueError(f"statistics do not match their hash {body['hash']!r}: the file was changed")
        return statistics


def _canonical(moments: Mapping[str, Moments]) -> str:
    return json.dumps({key: asdict(m) for key, m in moments.items()}, sort_keys=True)


def _expect(body: object, fields: set[str], what: str) -> None:
    if not isinstance(body, dict) or set(body) != fields:
        found = sorted(body) if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"{what}: expected exactly the fields {sorted(fields)}, got {found}")


def _moments(key: str, entry: object) -> Moments:
    _expect(entry, {"names", "mean", "scale", "floor"}, f"statistics of {key!r}")
    assert isinstance(entry, dict)
    return Moments(tuple(entry["names"]), tuple(entry["mean"]), tuple(entry["scale"]), entry["floor"])


def _steps(entry: object) -> Steps:
    _expect(entry, {"moments", "low", "high"}, "statistics of the steps")
    assert isinstance(entry, dict)
    moments = tuple(_moments(f"step {step}", part) for step, part in enumerate(entry["moments"]))
    return Steps(moments, tuple(map(tuple, entry["low"])), tuple(map(tuple, entry["high"])))


class Normaliser(nn.Module):
    """Map vectors to mean 0 and scale 1 by key, and back; without statistics every call raises.

    sizes: key → number of dimensions that the statistics must have.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        self.statistics: Statistics | None = None
        for key, size in self.sizes.items():  # not persistent: statistics are not weights
            self.register_buffer(f"{key}_mean", torch.zeros(size), persistent=False)
            self.register_buffer(f"{key}_scale", torch.ones(size), persistent=False)

    def set_statistics(self, statistics: Statistics) -> None:
        """Take over statistics; raise ValueError if a key is missing or has another size."""
        for key, size in self.sizes.items():
            if key not in statistics.moments:
                raise ValueError(f"statistics: key {key!r} is missing, found {sorted(statistics.moments)}")
            found = len(statistics.moments[key].mean)
            if found != size:
                raise ValueError(f"statistics: {key!r} has {found} dimensions, this policy needs {size}")
        for key in self.sizes:
            moments = statistics.moments[key]
            self._buffer(key, "mean").copy_(torch.tensor(moments.mean, dtype=torch.float64))
            self._buffer(key, "scale").copy_(torch.tensor(moments.scale, dtype=torch.float64))
        self.statistics = statistics

    def normalise(self, key: str, value: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return (value - mean) / scale."""
        mean, scale = self._entry(key, value)
        return (value - mean) / scale

    def denormalise(self, key: str, value: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return value * scale + mean, in physical units."""
        mean, scale = self._entry(key, value)
        return value * scale + mean

    def _entry(self, key: str, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.statistics is None:
            raise RuntimeError("this policy has no statistics: call set_statistics before it acts or learns")
        if key not in self.sizes:
            raise KeyError(f"no statistics for {key!r}, there are {sorted(self.sizes)}")
        if value.shape[-1] != self.sizes[key]:
            raise ValueError(f"{key}: expected {self.sizes[key]} dimensions, got shape {tuple(value.shape)}")
        return self._buffer(key, "mean"), self._buffer(key, "scale")

    def _buffer(self, key: str, kind: str) -> Tensor:
        return self.get_buffer(f"{key}_{kind}")
