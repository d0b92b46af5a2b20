"""Pick up the named cube from a belt that carries all cubes along y, at constant speed or reversing twice."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from robotattn.control.safety import Workspace
from robotattn.envs.base import PHYSICS_HZ, EnvConfig
from robotattn.envs.pick_up import PickUpEnv
from robotattn.envs.randomise import Y_RANGE, Range, generator

SECONDS = 6.0  # for so long every cube that nobody touches stays within reach
REACH_X, REACH_Y = (0.38, 0.54), 0.55  # where the hand, pointing down, can pick: x, and y to either side (m)
LEAST_WIDTH = 0.20  # of the strip along y in which the cubes start: room for six of them (m)
WORKSPACE = Workspace(low=(0.25, -0.60, 0.014), high=(0.72, 0.60, 0.50))  # the usual one, wider along the belt


@dataclass(frozen=True)
class Motion:
    """How the belt goes: speed (m/s, negative toward -y), and the instants (s, rising) at which it turns back."""

    speed: float
    reversals: tuple[float, ...] = ()

    def travel(self, time: float) -> float:
        """How far the belt has gone after `time` (s), were every reversal instantaneous (m)."""
        turns = [0.0, *(turn for turn in self.reversals if turn < time), time]
        return self.speed * sum((-1) ** leg * (end - start) for leg, (start, end) in enumerate(pairwise(turns)))

    def start_range(self) -> Range:
        """Where along y cubes may start to stay within reach for `SECONDS`: near the middle as far as that goes (m)."""
        gone = [self.travel(time) for time in (0.0, *self.reversals, SECONDS)]
        low, high = -REACH_Y - min(gone), REACH_Y - max(gone)
        bottom, top = max(Y_RANGE[0], low), min(Y_RANGE[1], high)
        if bottom == low:
            return bottom, max(top, bottom + LEAST_WIDTH)
        return min(bottom, top - LEAST_WIDTH), top


class PickMovingEnv(PickUpEnv):
    """`robotattn/PickMoving-v0`. The cubes ride on a belt along y at a speed drawn from ±(0 to 15) cm/s for each
    episode. Success is that of PickUp. Every cube stays within reach for 6 s.
    """

    belt: ClassVar[bool] = True

    def __init__(self, config: EnvConfig | None = None, render_mode: str | None = None) -> None:
        super().__init__(config, render_mode)
        self.workspace = WORKSPACE

    def draw_motion(self, rng: np.random.Generator) -> Motion:
        return Motion(float(rng.uniform(0.0, 0.15) * rng.choice([-1, 1])))

    def start_area(self) -> tuple[Range, Range]:
        self.motion = self.draw_motion(generator(self.episode_seed, "motion"))
        return REACH_X, self.motion.start_range()

    def start_motion(self) -> None:
        _, dof, control = self.index.belt
        present = self.index.cube_dof[: len(self.layout.colour)]
        self.data.qvel[dof] = self.data.qvel[present + 1] = self.data.ctrl[control] = self.motion.speed

    def story(self) -> dict[str, float | int | bool]:
        return super().story() | {"speed": abs(self.motion.speed), "direction": int(np.sign(self.motion.speed))}


class PickReversingEnv(PickMovingEnv):
    """`robotattn/PickReversing-v0`. As PickMoving at ±(3 to 15) cm/s, and the belt turns back twice: first 0.4 to 1.6 s
    after the start, then 0.4 to 1.6 s later. It takes up its new velocity with a time constant of 50 ms.
    """

    def draw_motion(self, rng: np.random.Generator) -> Motion:
        speed = float(rng.uniform(0.03, 0.15) * rng.choice([-1, 1]))
        first, second = np.round(rng.uniform(0.4, 1.6, 2).cumsum() * PHYSICS_HZ) / PHYSICS_HZ
        return Motion(speed, (float(first), float(second)))

    def event_within(self) -> int:
        return next((step - self.physics_steps for step in self._turns() if step > self.physics_steps), PHYSICS_HZ)

    def world_event(self) -> None:
        done = sum(step <= self.physics_steps for step in self._turns())
        self.data.ctrl[self.index.belt[2]] = self.motion.speed * (-1) ** done

    def _turns(self) -> list[int]:
        """The physics steps at which the belt turns back."""
        return [round(turn * PHYSICS_HZ) for turn in self.motion.reversals]

    def story(self) -> dict[str, float | int | bool]:
        first, second = self.motion.reversals
        return super().story() | {"first_reversal": first, "second_reversal": second}
