"""The safety filter in the loop: between what a command asks for and what is set."""

from dataclasses import replace
from typing import Any

import numpy as np

from robotattn.control.clock import PHYSICS_STEP
from robotattn.control.safety import Limits, SafetyFilter
from robotattn.types import Command

CONTROLS = 8  # seven joint targets and the gripper


class Guard:
    """One row's filter. A command that cannot be passed at once is gone on with at every control tick."""

    def __init__(self, env: Any, limits: Limits) -> None:
        self.env = env
        self.filter = SafetyFilter(replace(limits, workspace=env.workspace), env.arm.reach)

    def reset(self) -> None:
        """Begin an episode where the arm stands."""
        self.filter.reset(self.env.joints())
        self.wanted: np.ndarray | None = None
        self.seen, self.sent = 0, -self.env.substeps * PHYSICS_STEP  # as if a tick ago the pose had been sent

    def act(self, now: int, command: Command | None, again: bool) -> None:
        """Send what is safe of a command, or, if there is none and `again`, of the last one. now: ns since reset."""
        if command is not None:
            finite = bool(np.isfinite(command.action).all())
            self.wanted = self.env.controls(command.action) if finite else np.full(CONTROLS, np.nan)
            self.seen = now - round(command.age * 1e9)
        if self.wanted is None or not (again or command is not None):
            return
        safe = self.filter(self.wanted, self.env.joints(), (now - self.sent) / 1e9, (now - self.seen) / 1e9)
        self.env.apply(safe)
        self.sent = now
