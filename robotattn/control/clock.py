"""How long a policy thinks, while the world moves on: clocks that give each inference its latency.

Time is int64 nanoseconds since reset. A latency belongs to (episode seed, number of the inference), never to the time
at which it is asked for: every way of handling late chunks sees the same draws, and a repeat sees them again.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

PHYSICS_STEP = 2_000_000
"""One step of the physics (ns): nothing acts, and nothing is seen, between two of them."""
UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
ALLOWED = "fixed:80ms, or lognormal:80ms:200ms (median and 99th percentile), in ns, us, ms or s"


class Clock(Protocol):
    """Says how long each inference takes."""

    def latency(self, seed: int, index: int) -> int:
        """Nanoseconds from the observation to the chunk, for inference `index` of the episode with this seed."""


class Recorded(Protocol):
    """Recorded latencies (`robotattn.latency.trace.Trace` is one)."""

    def sample(self, seed: int, index: int, rule: Literal["offset", "draw"] = "offset") -> int: ...


@dataclass(frozen=True)
class Fixed:
    """Every inference takes equally long; with 0 the world waits for the policy."""

    nanoseconds: int = 0

    def __post_init__(self) -> None:
        if self.nanoseconds < 0:
            raise ValueError(f"latency: {self.nanoseconds} ns, allowed is 0 or more")

    def latency(self, seed: int, index: int) -> int:
        return self.nanoseconds


@dataclass(frozen=True)
class LogNormal:
    """Latencies of a log-normal distribution with this median and this 99th percentile (ns)."""

    median: int
    p99: int

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.p99:
            raise ValueError(
                f"latency: median {self.median} ns, 99th percentile {self.p99} ns; allowed 0 < median <= it"
            )

    def latency(self, seed: int, index: int) -> int:
        sigma = math.log(self.p99 / self.median) / NormalDist().inv_cdf(0.99)
        return round(self.median * math.exp(sigma * NormalDist().inv_cdf(uniform(f"latency {seed} {index}"))))


@dataclass(frozen=True)
class Replay:
    """The recorded latencies of a device. rule: in order from an offset of the seed, or each one drawn."""

    trace: Recorded
    rule: Literal["offset", "draw"] = "offset"

    def latency(self, seed: int, index: int) -> int:
        return self.trace.sample(seed, index, self.rule)


def parse(text: str) -> Fixed | LogNormal:
    """The clock that a word like ``fixed:80ms`` or ``lognormal:80ms:200ms`` names; ValueError for another word."""
    kind, *numbers = text.split(":")
    try:
        match kind, [nanoseconds(number) for number in numbers]:
            case "fixed", [one]:
                return Fixed(one)
            case "lognormal", [median, p99]:
                return LogNormal(median, p99)
    except ValueError as error:
        raise ValueError(f"latency: {text!r}: {error}; allowed is {ALLOWED}") from None
    raise ValueError(f"latency: {text!r}, allowed is {ALLOWED}")


def nanoseconds(text: str) -> int:
    """A time such as ``80ms`` or ``1.5s``; ValueError for another word."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", text)
    if found is None:
        raise ValueError(f"{text!r} is not a time")
    return round(float(found[1]) * UNITS[found[2]])


def uniform(name: str) -> float:
    """A number strictly between 0 and 1 that is a function of the name alone, on every machine."""
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return (draw + 0.5) / 2**48


def on_grid(time: int, step: int = PHYSICS_STEP) -> int:
    """The first multiple of `step` at or after a time (ns): what comes between two steps acts at the next."""
    return -(-time // step) * step
