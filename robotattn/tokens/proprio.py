"""Proprioception and object tokens: in come normalised vectors, out go tokens of the model's width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from robotattn.tokens.sequence import TokenGroup

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class ProprioToken(nn.Module):
    """One token from the arm's state. size: number of state dimensions."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(size, width)

    def forward(self, state: Float[Tensor, "b s"]) -> TokenGroup:
        """Project normalised proprioception ``[B, size]`` into a group of one token."""
        return TokenGroup(self.project(state)[:, None])


class ObjectTokens(nn.Module):
    """One token from each object (`size` numbers); slots have no identity, so their order says nothing."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, width))

    def forward(
        self, pose: Float[Tensor, "b n 5"], rest: Float[Tensor, "b n c"], mask: Bool[Tensor, "b n"]
    ) -> TokenGroup:
        """Project poses (see `pose_vector`) and colours; mask: True = the slot holds an object."""
        return TokenGroup(self.project(torch.cat([pose, rest], dim=-1)), mask)


def pose_vector(position: Float[Tensor, "*b 4"], normalised: Float[Tensor, "*b 4"]) -> Float[Tensor, "*b 5"]:
    """Describe a cube's pose by its normalised x, y, z and the cosine and sine of 4 yaw.

    A cube looks the same after a quarter turn, so yaw itself would ask for a number that nothing in view decides.
    """
    yaw = 4.0 * position[..., 3:]
    return torch.cat([normalised[..., :3], yaw.cos(), yaw.sin()], dim=-1)
