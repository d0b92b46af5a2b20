"""Traces: the recorded latencies of single inferences of a named device, policy and shape, to be replayed elsewhere.

One JSON file. ``sha256`` is the hash of everything else in its canonical form (sorted keys, no spaces, UTF-8), so a
trace that was cut, edited or merged by hand is refused instead of replayed.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from robotattn.config import UsageError

SCHEMA, KIND, UNIT = 1, "trace", "ns"
Rule = Literal["offset", "draw"]


@dataclass(frozen=True)
class Trace:
    """Service times of inferences in the order they happened, with what they depend on."""

    device: str
    """What it ran on, as the driver or the system names it."""
    policy: Mapping[str, Any]
    """The policy's configuration, as a training configuration writes it."""
    shape: Mapping[str, int]
    """What the time depends on: batch, cameras, prefix (tokens), actions (tokens the decoder works on), chunk."""
    mode: str
    """How it was run: eager, graph, ..."""
    service: tuple[int, ...] = field(repr=False)
    """Observation ready to action chunk ready (ns)."""
    hz: float | None = None
    """The rate at which it was paced; None: back to back."""
    inputs_seed: int | None = None
    """Of the random observations."""
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)
    synthetic: bool = False
    """True: nothing was run here, the times were made from a published figure; `source` names it."""
    source: str | None = None

    def __post_init__(self) -> None:
        texts = {"device": self.device, "mode": self.mode} | ({"source": self.source} if self.synthetic else {})
        for name, text in texts.items():
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name}: {text!r}, allowed is a text that is not empty")
        if not isinstance(self.synthetic, bool) or (self.source is not None) != self.synthetic:
            raise ValueError(f"source: {self.source!r}, allowed with synthetic={self.synthetic!r} is another")
        _check_numbers("shape", list(self.shape.values()), least=0)
        _check_numbers("service", self.service, least=1)
        if not self.service:
            raise ValueError("service: is empty, allowed is at least one time")
        if self.hz is not None and not (_is_number(self.hz) and 0 < self.hz < math.inf):
            raise ValueError(f"hz: {self.hz!r}, allowed is a positive rate, or null for back to back")
        if self.inputs_seed is not None:
            _check_numbers("inputs_seed", [self.inputs_seed], least=0)

    def sample(self, seed: int, index: int, rule: Rule = "offset") -> int:
        """Return the latency (ns) of inference `index` of the episode with this seed.

        It depends on (seed, index) alone, never on when it is asked for: every way of handling latency sees the same.
        rule: "offset": in recorded order from an offset drawn with the seed, around the end (keeps runs of slow calls
        together); "draw": each one drawn anew. Raises ValueError for another rule or a negative index.
        """
        if index < 0 or rule not in ("offset", "draw"):
            raise ValueError(f"index={index}, rule={rule!r}: allowed are index >= 0 and offset or draw")
        if rule == "offset":
            return self.service[(_hash(f"offset {seed}") + index) % len(self.service)]
        return self.service[_hash(f"draw {seed} {index}") % len(self.service)]

    def content(self) -> dict[str, Any]:
        """Everything that the file holds but its hash, in plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return {"schema": SCHEMA, "kind": KIND, "unit": UNIT} | plain | {"service": list(self.service)}

    @property
    def sha256(self) -> str:
        """The hash of the canonical content."""
        return _sha256(self.content())


def synthetic(
    source: str,
    device: str,
    p50_ms: float,
    p99_ms: float | None = None,
    n: int = 1000,
    seed: int = 0,
    policy: Mapping[str, Any] | None = None,
    shape: Mapping[str, int] | None = None,
    mode: str = "published",
) -> Trace:
    """Make a trace from a published figure: constant, or log-normal where a p99 was published too.

    The n times are the quantiles (i + 1/2) / n in an order shuffled with the seed, so that their median and p99 are
    those published and not a draw's. Raises ValueError for a p50 that is not positive or a p99 below it.
    """
    p99 = p50_ms if p99_ms is None else p99_ms
    if not (0 < p50_ms <= p99 < math.inf) or n < 1:
        raise ValueError(f"p50_ms={p50_ms}, p99_ms={p99_ms}, n={n}: allowed are 0 < p50_ms <= p99_ms and n >= 1")
    normal = NormalDist()
    sigma = math.log(p99 / p50_ms) / normal.inv_cdf(0.99)
    ranks = np.random.default_rng(seed).permutation(n)
    times = [1e6 * p50_ms * math.exp(sigma * normal.inv_cdf((int(rank) + 0.5) / n)) for rank in ranks]
    service = tuple(max(1, round(time)) for time in times)
    return Trace(device, policy or {}, shape or {}, mode, service, synthetic=True, source=source)


def write(path: str | Path, trace: Trace) -> None:
    """Write a trace in one piece, with its hash; the folder must exist."""
    from robotattn.checkpoint import replace_file  # brings torch, which reading a trace does not need

    text = json.dumps(trace.content() | {"sha256": trace.sha256}, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def read(path: str | Path) -> Trace:
    """Read a trace; raises UsageError naming the file and what is wrong with it, its hash included."""
    try:
        data = json.loads(Path(path).read_bytes().decode("utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; allowed is a trace (.json)") from None
    except ValueError as error:  # not UTF-8, not JSON, or a key twice
        raise UsageError(f"{path}: not JSON: {error}") from None
    try:
        return _trace(data)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _trace(data: object) -> Trace:
    names = {f.name for f in fields(Trace)}
    if not isinstance(data, dict) or data.get("kind") != KIND:
        found = data.get("kind") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"kind: {found!r}, allowed is {KIND!r}")
    for name, only in (("schema", SCHEMA), ("unit", UNIT)):
        if data.get(name) != only or isinstance(data[name], bool):
            raise ValueError(f"{name}: {data.get(name)!r}, allowed is {only!r}")
    expected = names | {"schema", "kind", "unit", "sha256"}
    if set(data) != expected:
        missing, unknown = sorted(expected - set(data)), sorted(set(data) - expected)
        raise ValueError(f"keys: missing {missing}, unknown {unknown}")
    for name, kind in (("policy", dict), ("shape", dict), ("environment", dict), ("service", list)):
        if not isinstance(data[name], kind):
            raise ValueError(f"{name}: {type(data[name]).__name__}, allowed is {kind.__name__}")
    stated, found = data["sha256"], _sha256({key: value for key, value in data.items() if key != "sha256"})
    if stated != found:
        raise ValueError(
            f"sha256: {stated!r} is written, the content has {found!r}: it was changed after the recording"
        )
    values: dict[str, Any] = {name: data[name] for name in names} | {"service": tuple(data["service"])}
    return Trace(**values)


def _sha256(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(text: str) -> int:
    """A number that is the same on every machine and for every version of every library."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def _check_numbers(name: str, numbers: Sequence[object], least: int) -> None:
    for index, number in enumerate(numbers):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name}: {number!r} at {index}, allowed are whole numbers from {least}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
    if twice is not None:
        raise ValueError(f"{twice} is there twice")
    return dict(pairs)
