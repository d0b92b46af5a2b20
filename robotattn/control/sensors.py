"""Sensors at rates of their own: when each one looks, and how old what it saw is when the robot acts on it.

A schedule is a function of (episode seed, sensor, number of the sample), as a latency is: the same on every machine,
whoever asks, in whatever order. Times are ns since reset. Sample k is due at k / rate, give or take the jitter, and is
taken at the first physics step at or after that; sample 0 is what is seen at reset. A lost frame was never there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from robotattn.control.clock import PHYSICS_STEP, on_grid, uniform

SECOND, MS = 1_000_000_000, 1_000_000  # (ns)
FASTEST = SECOND / PHYSICS_STEP  # (Hz): between two physics steps there is nothing new to see
STATE = "state"


@dataclass(frozen=True)
class SensorRates:
    """How often sensors look. Without a rate of its own, a sensor looks whenever it is asked."""

    camera_hz: float | None = None
    """Of the cameras, and of object tokens, which stand for what a camera would find (Hz)."""
    state_hz: float | None = None
    """Of the joints (Hz)."""
    jitter_ms: float = 0.0
    """Each look is up to this much early or late, evenly; but less than half a period, so that the order is kept."""
    drop: float = 0.0
    """Probability that a camera's frame is lost."""

    def __post_init__(self) -> None:
        for name in ("camera_hz", "state_hz"):
            hz = getattr(self, name)
            if hz is not None and not 0 < hz <= FASTEST:
                raise ValueError(
                    f"{name}: {hz} Hz, allowed is above 0 and up to {FASTEST:g} (that of the physics), or null"
                )
        if not 0 <= self.jitter_ms < math.inf:
            raise ValueError(f"jitter_ms: {self.jitter_ms} ms, allowed is 0 or more")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop: {self.drop}, allowed is 0 to below 1")

    def hz(self, sensor: str) -> float | None:
        """The rate of "state", of "objects" or of a camera by its name."""
        return self.state_hz if sensor == STATE else self.camera_hz

    @property
    def own(self) -> bool:
        """Whether any sensor has a rate of its own."""
        return self.camera_hz is not None or self.state_hz is not None


@dataclass(frozen=True)
class Captures:
    """The instants at which the sensors look in the episode of a seed."""

    rates: SensorRates
    seed: int

    def latest(self, sensor: str, now: int) -> int:
        """The newest capture at or before `now`, which it is without a rate; raises ValueError below 0."""
        hz = self._checked(sensor, now)
        if hz is None:
            return now
        number = self._last_due(hz, now)
        while self.instant(sensor, number) > now or self.lost(sensor, number):
            number -= 1
        return self.instant(sensor, number)

    def next_after(self, sensor: str, now: int) -> int | None:
        """The first capture after `now`; None for a sensor without a rate. Raises ValueError below 0."""
        hz = self._checked(sensor, now)
        if hz is None:
            return None
        number = self._last_due(hz, now)
        while number > 0 and self.instant(sensor, number - 1) > now:
            number -= 1
        while self.instant(sensor, number) <= now or self.lost(sensor, number):
            number += 1
        return self.instant(sensor, number)

    def instant(self, sensor: str, number: int) -> int:
        """When sample `number` of a sensor with a rate is taken, lost or not."""
        hz = self.rates.hz(sensor)
        assert hz is not None
        if number == 0:
            return 0
        return on_grid(_nominal(hz, number) + self._jitter(sensor, number, hz))

    def lost(self, sensor: str, number: int) -> bool:
        """Whether sample `number` is lost: only frames are, and never the one at reset."""
        if self.rates.drop == 0 or sensor == STATE or number == 0:
            return False
        return uniform(f"drop {self.seed} {sensor} {number}") < self.rates.drop

    def _jitter(self, sensor: str, number: int, hz: float) -> int:
        """Within half of what a period leaves beside one physics step: two samples never share one."""
        most = min(self.rates.jitter_ms * MS, (SECOND / hz - PHYSICS_STEP) / 2)
        return int((2 * uniform(f"jitter {self.seed} {sensor} {number}") - 1) * most) if most > 0 else 0

    def _last_due(self, hz: float, now: int) -> int:
        """A sample that is not before the newest one at `now`: half a period is the most that jitter shifts."""
        return math.floor(now * hz / SECOND) + 1

    def _checked(self, sensor: str, now: int) -> float | None:
        if now < 0:
            raise ValueError(f"now: {now} ns, allowed is 0 (the reset) or later")
        return self.rates.hz(sensor)


def _nominal(hz: float, number: int) -> int:
    """k / rate in ns, rounded up, without the rounding of floats: a third sample at 30 Hz is due at 100 ms sharp."""
    numerator, denominator = float(hz).as_integer_ratio()
    return -(-number * SECOND * denominator // numerator)


def ages(now: int, stamps: Mapping[str, int]) -> dict[str, int]:
    """How old what each sensor saw is at `now` (ns); raises ValueError for a stamp that lies ahead."""
    if ahead := [name for name, stamp in stamps.items() if stamp > now]:
        raise ValueError(f"{', '.join(ahead)}: captured after {now} ns: {[stamps[name] for name in ahead]}")
    return {name: now - stamp for name, stamp in stamps.items()}


@dataclass
class AgeOfInformation:
    """Ages of what each sensor saw, collected at every actuation (ns)."""

    ages: dict[str, list[int]] = field(default_factory=dict)

    def add(self, now: int, stamps: Mapping[str, int]) -> None:
        """Take note of an actuation at `now` that rests on captures at `stamps`."""
        for name, age in ages(now, stamps).items():
            self.ages.setdefault(name, []).append(age)

    def extend(self, other: "AgeOfInformation") -> None:
        """Take over what another episode or worker has collected."""
        for name, collected in other.ages.items():
            self.ages.setdefault(name, []).extend(collected)

    def summary(self) -> dict[str, dict[str, float]]:
        """By sensor: n, and mean, p95 and max (ms)."""
        return {name: _summary(np.array(collected) / MS) for name, collected in sorted(self.ages.items())}


def _summary(milliseconds: np.ndarray) -> dict[str, float]:
    values = {"mean": milliseconds.mean(), "p95": np.quantile(milliseconds, 0.95), "max": milliseconds.max()}
    return {"n": len(milliseconds), **{name: float(value) for name, value in values.items()}}
