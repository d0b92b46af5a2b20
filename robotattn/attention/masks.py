"""Boolean attention masks, True = attend; decided from validity and positions, combined with *and*."""

from functools import reduce

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def padding(valid: Bool[Tensor, "b s"]) -> Bool[Tensor, "b 1 1 s"]:
    """Let every query attend to the real keys only. valid: True = real."""
    if valid.dtype != torch.bool or valid.dim() != 2:
        raise TypeError(f"validity must be bool [batch, keys] with True = real, got {valid.dtype} {list(valid.shape)}")
    return valid[:, None, None, :]


def causal(queries: Int[Tensor, " n"], keys: Int[Tensor, " s"]) -> Bool[Tensor, "n s"]:
    """Let a query attend to keys at its own position and before. Positions are absolute, so a cache needs no offset."""
    return keys[None, :] <= queries[:, None]


def combine(*masks: Bool[Tensor, "..."] | None) -> Bool[Tensor, "..."] | None:
    """Return the mask that all masks allow; None stands for 'everything'."""
    given = [mask for mask in masks if mask is not None]
    return reduce(torch.logical_and, given) if given else None
