"""Chunks in the units of each step: physical actions ↔ offsets from the arm ↔ standardised offsets, and their ranges.

The first action of a chunk is millimetres away and the last centimetres; with one scale for all, the first would
drown in a denoiser's noise and fall into one bin of 256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from robotattn.tokens.normaliser import Statistics
from robotattn.types import ACTION_SIZE, STATE, ActionMode

if TYPE_CHECKING:
    from jaxtyping import Float

REACH = 3.0  # without statistics of the steps: a range of so many standard deviations to each side


class ChunkUnits(nn.Module):
    """Mean, scale and range of each step and dimension ``[H, A]``; the gripper's are fixed: 0 ↔ -1 and 1 ↔ 1."""

    def __init__(self, chunk: int, action_mode: ActionMode) -> None:
        super().__init__()
        self.action_mode = action_mode
        for name in ("mean", "scale", "low", "high"):  # not persistent: statistics are not weights
            self.register_buffer(name, torch.zeros(chunk, ACTION_SIZE[action_mode]), persistent=False)

    def set_statistics(self, statistics: Statistics) -> None:
        """Take over the statistics of the steps, or, without them, the same for all steps from those of all actions.

        Raises ValueError if the dataset's chunks were shorter than this policy's.
        """
        found = self._of_steps(statistics) if statistics.steps is not None else self._of_all(statistics)
        for name, value, gripper in zip(("mean", "scale", "low", "high"), found, (0.5, 0.5, 0.0, 1.0), strict=True):
            buffer = self.get_buffer(name)
            buffer.copy_(value)
            buffer[:, -1] = gripper

    def _of_steps(self, statistics: Statistics) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steps, (chunk, size) = statistics.steps, self.shape
        assert steps is not None
        if len(steps.moments) < chunk or len(steps.low[0]) != size:
            have = [len(steps.moments), len(steps.low[0])]
            raise ValueError(f"statistics: steps are {have} (steps, dimensions), this policy needs {[chunk, size]}")
        rows = ([m.mean for m in steps.moments], [m.scale for m in steps.moments], steps.low, steps.high)
        mean, scale, low, high = (torch.tensor(row[:chunk], dtype=torch.float64) for row in rows)
        return mean, scale, low, high

    def _of_all(self, statistics: Statistics) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        moments = statistics.moments["action"]
        mean, scale = (torch.tensor(row, dtype=torch.float64) for row in (moments.mean, moments.scale))
        if self.action_mode == "joint":
            mean = torch.zeros_like(mean)  # of the offsets, about
        return mean, scale, mean - REACH * scale, mean + REACH * scale

    @property
    def shape(self) -> torch.Size:
        """Steps and dimensions (H, A)."""
        return self.get_buffer("mean").shape

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Return the low and the high ends ``[H, A]`` of the offsets' ranges."""
        return self.get_buffer("low"), self.get_buffer("high")

    def offsets(self, actions: Float[Tensor, "b h a"], state: Float[Tensor, "b s"]) -> Float[Tensor, "b h a"]:
        """Return actions as offsets from the arm now: in tool mode they are, in joint mode the joints go."""
        return actions - self._origin(state)

    def actions(self, offsets: Float[Tensor, "b h a"], state: Float[Tensor, "b s"]) -> Float[Tensor, "b h a"]:
        """Return what `offsets` came from, the gripper rounded to 0 or 1."""
        gripper = (offsets[..., -1:] > 0.5).to(offsets.dtype)
        return torch.cat([(offsets + self._origin(state))[..., :-1], gripper], dim=-1)

    def standardise(self, offsets: Float[Tensor, "b h a"]) -> Float[Tensor, "b h a"]:
        """Return offsets with mean 0 and scale 1 in each step and dimension; the gripper becomes -1 or 1."""
        return (offsets - self.get_buffer("mean")) / self.get_buffer("scale")

    def restore(self, values: Float[Tensor, "b h a"]) -> Float[Tensor, "b h a"]:
        """Return the offsets of standardised values."""
        return values * self.get_buffer("scale") + self.get_buffer("mean")

    def _origin(self, state: Tensor) -> Tensor:
        if self.action_mode == "tool":
            return state.new_zeros(())
        joints = state[:, STATE["joint_position"]]
        return torch.cat([joints, torch.zeros_like(joints[:, :1])], dim=-1)[:, None]
