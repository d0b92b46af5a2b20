"""Frames: in come several looks of the same sensors and how old each is, out goes what moved between them.

A policy of one frame sees where things are and not where they go. With more, every older look is tokenised like the
newest, stamped with its age in seconds, and the target's pose is looked up in each; differences over ages are given
outright, so that a velocity need not be found between hundreds of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from robotattn.attention import FeedForward
from robotattn.attention.positions import Timestamps
from robotattn.tokens.grounding import POSE_SIZE

if TYPE_CHECKING:
    from jaxtyping import Float

LEAST_AGE = 0.01  # (s): nearer looks differ by noise alone; a look repeated at an episode's start has age 0
RATE_LIMIT = 20.0  # normalised, per second
VELOCITY_SIZE = 3


@dataclass(frozen=True)
class Frames:
    """Folds the frames of a batch into its rows and back: row b, frame f (oldest first) ↔ row b * count + f.

    With a count of 1 tensors have no axis for frames, and nothing is changed.
    """

    count: int

    def fold(self, name: str, x: Tensor, dims: int) -> Tensor:
        """Turn ``[B, F, ...]`` into ``[B * F, ...]``. dims: axes of x without frames; raises ValueError for others."""
        if self.count == 1:
            return x
        if x.dim() != dims + 1 or x.shape[1] != self.count:
            raise ValueError(f"{name}: expected {self.count} frames, [B, {self.count}, ...], got {list(x.shape)}")
        return x.flatten(0, 1)

    def repeat(self, x: Tensor) -> Tensor:
        """Give each row of ``[B, ...]`` to all of its frames."""
        return x if self.count == 1 else x.repeat_interleave(self.count, dim=0)

    def split(self, x: Tensor) -> Tensor:
        """Turn ``[B * F, ...]`` back into ``[B, F, ...]``."""
        return x.unflatten(0, (-1, self.count))

    def newest(self, x: Tensor) -> Tensor:
        """Return of ``[B * F, ...]`` the newest frame's rows ``[B, ...]``."""
        return x if self.count == 1 else self.split(x)[:, -1]


class AgeStamp(nn.Module):
    """A learned map of sines of the age: zero for a frame of now, so that age is all that tells frames apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stamp = Timestamps(width, shortest=0.1, longest=10.0)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, ages: Float[Tensor, "b f"]) -> Float[Tensor, "b f d"]:
        """Return what is added to every token of a frame."""
        zero = ages.new_zeros(*ages.shape, self.stamp.width)
        return self.project(self.stamp.embed(zero, ages) - self.stamp.embed(zero, torch.zeros_like(ages)))


class Motion(nn.Module):
    """The velocity of what an instruction means, from where it was found in each frame."""

    def __init__(self, frames: int, hidden: int) -> None:
        super().__init__()
        self.correction = FeedForward(frames * POSE_SIZE + (frames - 1) * (POSE_SIZE + 1), hidden, VELOCITY_SIZE)

    def forward(self, poses: Float[Tensor, "b f q 5"], ages: Float[Tensor, "b f"]) -> tuple[Tensor, Tensor]:
        """Return the rates of the pose since each older frame ``[B, Q, (F - 1) * 5]`` and the velocity ``[B, Q, 3]``.

        Both in normalised units per second. The velocity is the rate since the oldest frame, and a learned correction.
        """
        with torch.autocast(poses.device.type, enabled=False):  # differences of nearly equal numbers
            poses, ages = poses.float(), ages.float()
            apart = ages[:, :-1] - ages[:, -1:]  # the newest look is older than now where cameras have their own rate
            since = rates(poses[:, -1], poses[:, :-1], apart).clamp(-RATE_LIMIT, RATE_LIMIT)
            flat = since.transpose(1, 2).flatten(2)
            seconds = ages[:, None, :-1].expand(-1, poses.shape[2], -1)
            seen = torch.cat([poses.transpose(1, 2).flatten(2), flat, seconds], dim=-1)
            return flat, since[:, 0, :, :VELOCITY_SIZE] + self.correction(seen)


def rates(
    now: Float[Tensor, "b *n d"], older: Float[Tensor, "b f *n d"], ages: Float[Tensor, "b f"]
) -> Float[Tensor, "b f *n d"]:
    """Return the change since each older frame per second of its age (s), which counts as at least `LEAST_AGE`."""
    seconds = ages.clamp(min=LEAST_AGE).reshape(*ages.shape, *[1] * (older.dim() - 2))
    return (now[:, None] - older) / seconds
