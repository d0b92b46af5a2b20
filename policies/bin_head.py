"""Tokens of binned actions: a table of embeddings and a linear head for every dimension of an action."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robotattn.policies.base import Batch, Memory
from robotattn.policies.chunk_units import ChunkUnits
from robotattn.tokens.actions import ActionBins

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class BinHead(nn.Module):
    """Embeddings and scores of the bins of `size` dimensions: bin 7 of dx has nothing to do with bin 7 of dz."""

    def __init__(self, size: int, bins: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(size, bins, width))
        self.weight = nn.Parameter(torch.randn(size, width, bins) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(size, bins))

    def embed(self, ids: Int[Tensor, "*b"], dimension: Int[Tensor, "*d"]) -> Float[Tensor, "*b w"]:
        """Return the embedding of each id in its dimension (broadcast against the ids)."""
        return self.table[dimension, ids]

    def scores(self, x: Float[Tensor, "b h a w"]) -> Float[Tensor, "b h a n"]:
        """Score the bins of all dimensions, each from its own vector."""
        return torch.einsum("bhaw,awn->bhan", x, self.weight) + self.bias

    def score(self, x: Float[Tensor, "b w"], dimension: int) -> Float[Tensor, "b n"]:
        """Score the bins of one dimension."""
        return x @ self.weight[dimension] + self.bias[dimension]


def cross_entropy(logits: Tensor, ids: Tensor) -> Float[Tensor, "b h a"]:
    """Return the cross-entropy of each bin, in float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), ids.flatten(), reduction="none").view(ids.shape)


def share_right(ids: Int[Tensor, "b h a"], truth: Int[Tensor, "b h a"], mask: Tensor) -> Float[Tensor, "h a"]:
    """Return the share of equal bins by step and dimension, over the actions inside the episodes; NaN without any."""
    valid = mask[..., None]
    return ((ids == truth) & valid).sum(dim=0) / valid.sum(dim=0)


def forced_and_free(
    bins: ActionBins,
    units: ChunkUnits,
    memory: Memory,
    batch: Batch,
    scores: Callable[[Memory, Tensor], Tensor],
    choose: Callable[[Memory], Tensor],
) -> dict[str, Tensor]:
    """Return the share of right bins ``[H, A]``: ``forced`` given the true earlier ones, ``free`` given its own."""
    mask = batch["actions_mask"]
    truth, _ = bins.encode(units.offsets(batch["actions"].masked_fill(~mask[..., None], 0.0), batch["state"]))
    forced = scores(memory, truth).argmax(dim=-1)
    return {"forced": share_right(forced, truth, mask), "free": share_right(choose(memory), truth, mask)}
