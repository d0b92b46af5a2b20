"""The instruction encoder: in come token ids, out come one vector a token and one for the whole sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from robotattn.attention import EncoderLayer, attend, masks

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

MAX_TOKENS = 96


@dataclass(frozen=True)
class Sentence:
    """Encoded instructions: a vector for each token (padding is zero) and one for the whole."""

    tokens: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"]
    pooled: Float[Tensor, "b d"]


class InstructionEncoder(nn.Module):
    """Embedding and learned positions, one transformer layer, then a learned query that pools the real tokens.

    vocabulary: number of token ids. Positions count from the row's first token, so padding at the end moves nothing.
    """

    def __init__(self, vocabulary: int, width: int, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(MAX_TOKENS, width) * 0.02)
        self.layer = EncoderLayer(width, heads, 2 * width)
        self.token_norm, self.pool_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.pool = nn.Parameter(torch.randn(width) * width**-0.5)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, ids: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"]) -> Sentence:
        """Encode ids; mask: True = real token. A sentence without any real token has the pooled vector of zeros."""
        self._check(ids, mask)
        length = ids.shape[1]
        x = self.layer(self.embedding(ids) + self.positions[:length], masks.padding(mask))
        x = self.token_norm(x).masked_fill(~mask[..., None], 0.0)
        query = self.pool.expand(ids.shape[0], 1, 1, -1)
        pooled = attend(query, x[:, None], x[:, None], masks.padding(mask))  # [B, 1, 1, D]
        return Sentence(x, mask, self.pool_norm(pooled[:, 0, 0]))

    def _check(self, ids: Tensor, mask: Tensor) -> None:
        if mask.dtype != torch.bool or mask.shape != ids.shape:
            raise ValueError(f"text mask must be bool {list(ids.shape)}, got {mask.dtype} {list(mask.shape)}")
        if ids.shape[1] > MAX_TOKENS:
            raise ValueError(f"an instruction has at most {MAX_TOKENS} tokens, got {ids.shape[1]}")
