"""Limits between what a policy asks for and what is sent."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workspace:
    """The box the tool may be sent to (m, world frame). Its floor keeps the finger tips clear of the table."""

    low: tuple[float, float, float] = (0.25, -0.40, 0.014)
    high: tuple[float, float, float] = (0.72, 0.40, 0.50)

    def clip(self, position: np.ndarray) -> np.ndarray:
        """The nearest allowed position ``[3]``."""
        return np.clip(position, self.low, self.high)


def require_finite(action: np.ndarray, size: int) -> np.ndarray:
    """The action ``[size]`` as float64; ValueError if it has another shape or a value that is not finite.

    MuJoCo counts a NaN control as zero and goes on, so it must be stopped before the step.
    """
    action = np.asarray(action, dtype=np.float64)
    if action.shape != (size,):
        raise ValueError(f"action: shape {action.shape}, allowed is ({size},)")
    if not np.isfinite(action).all():
        raise ValueError(f"action: {action.tolist()} has a value that is not finite; refused before the physics step")
    return action
