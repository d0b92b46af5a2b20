"""Pick up the named cube: lift it by at least 10 cm and hold it for half a second."""

import numpy as np

from robotattn.envs.base import TabletopEnv
from robotattn.envs.scene import CUBE_HALF, FINGER_TRAVEL

LIFT = 0.10  # of the cube above its place on the table (m)
HOLD = 0.5  # (s)
REACHED, OPENED = 0.05, 0.05  # a try: told to close this near the cube's centre, opened this wide or wider (m)


class PickUpEnv(TabletopEnv):
    """`robotattn/PickUp-v0`. Success, strictly: the named cube is at least 10 cm up, between both pads and touching
    nothing but the hand, at every tick of half a second. Observation and action: see `robotattn.envs.base`.
    """

    def start_task(self) -> None:
        self.held_since: int | None = None
        self.touched = self.lifted = self.wrong = False
        self.tries, self.closing = 0, False

    def apply(self, controls: np.ndarray) -> None:
        super().apply(controls)
        closing = bool(self.data.ctrl[7] < FINGER_TRAVEL / 2)
        if closing and not self.closing:
            self.tries += self._can_grasp()
        self.closing = closing

    def _can_grasp(self) -> bool:
        """Whether the open fingers are about the named cube, so that closing them is a try."""
        gap = self.data.xpos[self.index.cube_bodies[self.target]] - self.data.site_xpos[self.index.tool]
        return bool(np.linalg.norm(gap) < REACHED and self.data.qpos[7] + self.data.qpos[8] > OPENED)

    def story(self) -> dict[str, float | int | bool]:
        return super().story() | {"tries": self.tries}

    def judge(self) -> bool:
        height = self.heights()
        touching = self.contacts(self.index.cube_geoms[self.target])
        pads = set(self.index.pads)
        held = height[self.target] >= LIFT and pads <= touching and not touching - self._hand
        self.touched |= bool(pads & touching)
        self.lifted |= height[self.target] >= LIFT / 2
        others = np.delete(height, self.target)
        self.wrong |= bool((others >= LIFT / 2).any())
        if not held:
            self.held_since = None
        elif self.held_since is None:
            self.held_since = self.tick
        return self.held_since is not None and (self.tick - self.held_since) / self.config.hz >= HOLD - 1e-9

    def failure(self) -> str:
        """'wrong_object', 'dropped' (was up once), 'not_lifted' (was touched) or 'not_touched'."""
        if self.wrong:
            return "wrong_object"
        return "dropped" if self.lifted else "not_lifted" if self.touched else "not_touched"

    def heights(self) -> np.ndarray:
        """How far each present cube is above its place on the table ``[n]`` (m)."""
        present = self.index.cube_bodies[: len(self.layout.colour)]
        return self.data.xpos[present, 2] - CUBE_HALF

    def contacts(self, geom: int) -> set[int]:
        """The geoms that touch this one."""
        pairs = self.data.contact.geom
        rows = pairs[(pairs == geom).any(axis=1)]
        return set(rows[rows != geom].tolist())

    @property
    def _hand(self) -> set[int]:
        return {*self.index.pads, *self.index.fingers}
