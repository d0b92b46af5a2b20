"""Other scores than the scaled dot product: a Gaussian kernel and Bahdanau's additive score.

Masks are boolean with True = attend, and a query that may attend to nothing gets zeros, as in `kernels.attend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from robotattn.attention.kernels import masked_softmax

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def gaussian_weights(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], width: float, mask: Bool[Tensor, ...] | None = None
) -> Float[Tensor, "*b n s"]:
    """Return the weights of Nadaraya-Watson regression: softmax of -|q - k|^2 / (2 width^2)."""
    if not width > 0.0:
        raise ValueError(f"the width of a Gaussian kernel must be positive, got {width}")
    far = (q[..., :, None, :] - k[..., None, :, :]).square().sum(dim=-1)
    return masked_softmax(far * (-0.5 / width**2), mask)


class AdditiveAttention(nn.Module):
    """Attention with the score v·tanh(W q + U k) (Bahdanau et al. 2015)."""

    def __init__(self, query_width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, hidden)
        self.key = nn.Linear(key_width, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def weights(
        self,
        queries: Float[Tensor, "b n q"],
        keys: Float[Tensor, "b s k"],
        mask: Bool[Tensor, "#b #n s"] | None = None,
    ) -> Float[Tensor, "b n s"]:
        """Return the weights with which each query reads the keys."""
        if mask is not None:
            keys = keys.masked_fill(~mask.any(dim=-2)[..., None], 0.0)
        hidden = torch.tanh(self.query(queries)[:, :, None] + self.key(keys)[:, None])
        return masked_softmax(self.score(hidden)[..., 0], mask)

    def forward(
        self,
        queries: Float[Tensor, "b n q"],
        keys: Float[Tensor, "b s k"],
        values: Float[Tensor, "b s e"] | None = None,
        mask: Bool[Tensor, "#b #n s"] | None = None,
    ) -> Float[Tensor, "b n e"]:
        """Return the weighted values (default: the keys themselves)."""
        values = keys if values is None else values
        if mask is not None:
            values = values.masked_fill(~mask.any(dim=-2)[..., None], 0.0)
        return self.weights(queries, keys, mask) @ values
