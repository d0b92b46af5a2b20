"""Pick up the named cube, which jumps aside once, while the hand comes down on it."""

import mujoco
import numpy as np

from robotattn.envs.base import PHYSICS_HZ
from robotattn.envs.pick_up import PickUpEnv
from robotattn.envs.randomise import SPACING, X_RANGE, Y_RANGE, generator

JUMP = (0.03, 0.08)  # how far (m)
TRIGGER = (0.065, 0.10)  # tool height at which it jumps (m)
CLEAR = 0.055  # below this the finger tips reach beside the cube and would be in its way (m)
ABOVE = 0.03  # the tool is above the cube: lateral distance (m)
DIRECTIONS = 72  # tried, evenly spread, until one leads to a free place


class PickDisturbedEnv(PickUpEnv):
    """`robotattn/PickDisturbed-v0`. As PickUp, but the named cube jumps 3 to 8 cm along the table, once, at the first
    physics step at which the tool is above it and lower than a height drawn from 6.5 to 10 cm.
    """

    def start_task(self) -> None:
        super().start_task()
        rng = generator(self.episode_seed, "motion")
        self.distance, self.height = float(rng.uniform(*JUMP)), float(rng.uniform(*TRIGGER))
        self.heading = float(rng.uniform(-np.pi, np.pi))
        self.jumped_at: float | None = None

    def event_within(self) -> int:
        return 1 if self.jumped_at is None else PHYSICS_HZ

    def world_event(self) -> None:
        if self.jumped_at is None and self._reached_for():
            self._jump()
            self.jumped_at = self.time

    def _reached_for(self) -> bool:
        mujoco.mj_kinematics(self.model, self.data)
        gap = self.data.site_xpos[self.index.tool] - self.data.xpos[self.index.cube_bodies[self.target]]
        height = self.data.site_xpos[self.index.tool][2]
        return bool(np.hypot(*gap[:2]) < ABOVE and CLEAR < height < self.height and self.heights()[self.target] < 0.005)

    def _jump(self) -> None:
        """Move the cube by the drawn distance: along the drawn heading, or the nearest one that leads to a free place.

        Where no place is free, the one farthest from the other cubes is taken.
        """
        address = self.index.cube_qpos[self.target]
        here = self.data.qpos[address : address + 2].copy()
        turns = np.arange(DIRECTIONS) // 2 * np.where(np.arange(DIRECTIONS) % 2, -1, 1) * (2 * np.pi / DIRECTIONS)
        heading = self.heading + turns
        places = here + self.distance * np.column_stack([np.cos(heading), np.sin(heading)])
        room = self._room(places)
        self.data.qpos[address : address + 2] = places[int(np.argmax(np.minimum(room, SPACING)))]

    def _room(self, places: np.ndarray) -> np.ndarray:
        """The distance from places ``[n, 2]`` to the nearest other cube ``[n]`` (m); negative off the usual area."""
        others = np.delete(self.index.cube_bodies[: len(self.layout.colour)], self.target)
        gaps = places[:, None] - self.data.xpos[others, :2]
        room = np.hypot(gaps[..., 0], gaps[..., 1]).min(axis=1, initial=1.0)
        low, high = np.array([X_RANGE, Y_RANGE]).T
        return np.where(((places >= low) & (places <= high)).all(axis=1), room, room - 2.0)

    def story(self) -> dict[str, float | int | bool]:
        jumped = self.jumped_at is not None
        told: dict[str, float | int | bool] = {"disturbed": jumped}
        if self.jumped_at is not None:
            told |= {"jump": self.distance, "jumped_at": self.jumped_at}
        return super().story() | told
