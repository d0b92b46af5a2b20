"""One sequence of token groups: in come groups (a camera, the instruction, ...), out goes what an encoder reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class TokenGroup:
    """Tokens of one source. mask: True = real, False = padding; None = all real."""

    tokens: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"] | None = None


@dataclass(frozen=True)
class Tokens:
    """All groups one after the other. slices: where each group lies, by name. state: raw proprioception [B, 13]."""

    values: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"]
    slices: Mapping[str, slice]
    state: Float[Tensor, "b s"]

    def group(self, name: str) -> Float[Tensor, "b n d"]:
        """Return the tokens of one group."""
        if name not in self.slices:
            raise KeyError(f"no token group {name!r}, there are {list(self.slices)}")
        return self.values[:, self.slices[name]]


def concatenate(groups: Mapping[str, TokenGroup], state: Float[Tensor, "b s"]) -> Tokens:
    """Join groups in their order; padding becomes zeros, so that nothing in it can leak or overflow."""
    slices, values, masks, start = {}, [], [], 0
    for name, group in groups.items():
        batch, size, _ = group.tokens.shape
        mask = group.mask
        if mask is None:
            mask = torch.ones(batch, size, dtype=torch.bool, device=group.tokens.device)
            values.append(group.tokens)
        else:
            _check_mask(name, mask, batch, size)
            values.append(group.tokens.masked_fill(~mask[..., None], 0.0))
        slices[name] = slice(start, start + size)
        masks.append(mask)
        start += size
    return Tokens(torch.cat(values, dim=1), torch.cat(masks, dim=1), slices, state)


def _check_mask(name: str, mask: Tensor, batch: int, size: int) -> None:
    if mask.dtype != torch.bool or mask.shape != (batch, size):
        raise ValueError(
            f"mask of group {name!r} must be bool [{batch}, {size}] with True = real, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
