"""Action tokens: in come offsets in physical units, out go 256 bins a dimension, and back.

Each step of a chunk has its own range in each dimension: the first action of a chunk is a small step and the last a
large one, and a range shared by all would make the first as coarse as the last. 257 edges bound the 256 bins. A value
on an edge belongs to the bin on its right, and the last edge to the last bin. Where the range holds zero, a bin is
centred on it, so "stay" is exactly that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

BINS = 256


class ActionBins(nn.Module):
    """Bins of a chunk of actions. chunk: steps H. size: dimensions A. `set_ranges` comes before everything else."""

    def __init__(self, chunk: int, size: int, bins: int = BINS) -> None:
        super().__init__()
        if bins < 2:
            raise ValueError(f"bins: {bins} is less than 2")
        self.bins, self.size = bins, size
        self.ready = False
        # zero: where 0 lies, counted in bins from the first edge; not persistent, like all statistics
        self.register_buffer("zero", torch.zeros(chunk, size), persistent=False)
        self.register_buffer("width", torch.ones(chunk, size), persistent=False)

    def set_ranges(self, low: Float[Tensor, "h a"], high: Float[Tensor, "h a"]) -> None:
        """Take over ranges ``[H, A]``; the grid covers them. Raises ValueError for a wrong shape or an empty range."""
        zero, width = self.get_buffer("zero"), self.get_buffer("width")
        low, high = low.double().to(zero.device), high.double().to(zero.device)
        if low.shape != zero.shape or high.shape != zero.shape:
            raise ValueError(
                f"ranges must be {list(zero.shape)} (steps, dimensions), got {list(low.shape)} and {list(high.shape)}"
            )
        if not (low.isfinite().all() and high.isfinite().all() and (low < high).all()):
            raise ValueError(f"every range must be finite, its low end below its high end, got {low} to {high}")
        step = (high - low) / (self.bins - 1)  # one bin is spare: the grid may shift until a bin is centred on zero
        origin, inside = -low / step, (low <= 0) & (high >= 0)
        zero.copy_(torch.where(inside, (origin - 0.5).ceil(), origin) + 0.5)
        width.copy_(step)
        self.ready = True

    def edges(self) -> Float[Tensor, "h a e"]:
        """Return the bins + 1 edges of every step and dimension."""
        zero, width = self._grid()
        count = torch.arange(self.bins + 1, device=zero.device, dtype=zero.dtype)
        return (count - zero[..., None]) * width[..., None]

    def encode(self, actions: Float[Tensor, "b h a"]) -> tuple[Int[Tensor, "b h a"], Bool[Tensor, "b h a"]]:
        """Return the bin of every value and which values lay outside the grid and were clipped to its end.

        Raises ValueError for NaN.
        """
        zero, width = self._grid()
        if actions.isnan().any():
            raise ValueError("actions: NaN has no bin; mask or drop it first")
        place = actions / width + zero
        clipped = (place < 0) | (place > self.bins)
        return place.clamp(0, self.bins - 1).floor().long(), clipped

    def decode(self, ids: Int[Tensor, "b h a"]) -> Float[Tensor, "b h a"]:
        """Return the centre of each bin, for the first h steps; raises ValueError for an id that is no bin."""
        if ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise TypeError(f"action ids must be integers, got {ids.dtype}")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.bins:
            raise ValueError(f"action ids must be 0 to {self.bins - 1}, got {int(ids.min())} to {int(ids.max())}")
        zero, width = self._grid()
        return (ids + 0.5 - zero[: ids.shape[1]]) * width[: ids.shape[1]]

    def mean(self, probabilities: Float[Tensor, "b n"], step: int, dimension: int) -> Float[Tensor, " b"]:
        """Return the mean of the bins' centres in one step and dimension under a distribution over the bins."""
        zero, width = self._grid()
        place = probabilities @ torch.arange(self.bins, device=zero.device, dtype=probabilities.dtype)
        return (place + 0.5 - zero[step, dimension]) * width[step, dimension]

    def nearest(self, value: Float[Tensor, " b"], step: int, dimension: int) -> Int[Tensor, " b"]:
        """Return the bins that hold values of one step and dimension."""
        zero, width = self._grid()
        place = value / width[step, dimension] + zero[step, dimension]
        return place.clamp(0, self.bins - 1).floor().long()

    def _grid(self) -> tuple[Tensor, Tensor]:
        if not self.ready:
            raise RuntimeError("action bins have no ranges: this policy has no statistics: call set_statistics first")
        return self.get_buffer("zero"), self.get_buffer("width")
