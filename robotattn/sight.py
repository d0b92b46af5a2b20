"""What an episode's sensors have seen last: the whole of now, or, at rates of their own, each one's newest capture."""

from dataclasses import dataclass, replace
from typing import Any

from robotattn.control.sensors import STATE, Captures, SensorRates
from robotattn.types import Observation

SECOND = 1_000_000_000  # (ns)


def read_observation(raw: dict[str, Any]) -> Observation:
    """An environment's dictionary as an `Observation`."""
    return Observation(
        images=raw.get("images", {}),
        state=raw["state"],
        instruction=raw["instruction"],
        objects=raw.get("objects"),
        time=float(raw["time"][0]),
    )


@dataclass
class Sight:
    """The sensors of one row; times are ns since the episode's reset. world: an environment, for its `observe`."""

    world: Any
    rates: SensorRates

    def reset(self, seed: int, raw: dict[str, Any]) -> None:
        """Begin an episode with what its reset has shown."""
        self._now, self._seen = 0, read_observation(raw)
        self._captures = Captures(self.rates, seed)
        scene = [*self._seen.images, *([] if self._seen.objects is None else ["objects"])]
        self._own = [sensor for sensor in (STATE, *scene) if self.rates.hz(sensor) is not None]
        self._stamps = dict.fromkeys((STATE, *scene), 0)
        if self._own:
            self._seen = replace(self._seen, stamps=self.stamps)

    def next_after(self, now: int) -> int | None:
        """When the next sensor with a rate of its own looks."""
        times = (self._captures.next_after(sensor, now) for sensor in self._own)
        return min((time for time in times if time is not None), default=None)

    def capture(self, now: int) -> None:
        """Let those sensors look whose time is now."""
        due = [sensor for sensor in self._own if self._captures.latest(sensor, now) == now]
        if due and now > self._now:
            self._keep(read_observation(self.world.observe(due)), due, now)

    def look(self, now: int) -> Observation:
        """What is known now: the rest looks now, and only if somebody asks."""
        if now > self._now:
            self._now = now
            if not self._own:
                self._seen = read_observation(self.world.observe())
                return self._seen
            others = [sensor for sensor in self._stamps if sensor not in self._own]
            seen = read_observation(self.world.observe(others))
            self._keep(seen, others, now)
            self._seen = replace(self._seen, time=seen.time, stamps=self.stamps)
        return self._seen

    @property
    def stamps(self) -> dict[str, float]:
        """When each sensor looked last (s)."""
        return {sensor: stamp / SECOND for sensor, stamp in self._stamps.items()}

    def _keep(self, seen: Observation, sensors: list[str], now: int) -> None:
        fresh = {name: image for name, image in seen.images.items() if name in sensors}
        self._seen = replace(
            self._seen,
            images={**self._seen.images, **fresh},
            state=seen.state if STATE in sensors else self._seen.state,
            objects=seen.objects if "objects" in sensors else self._seen.objects,
        )
        self._stamps |= dict.fromkeys(sensors, now)
