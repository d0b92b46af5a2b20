"""Attention for long sequences: a sliding window in chunks, Linformer and Performer.

All three pay late: at 600 tokens of width 512, attention is a sixth of a layer's arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robotattn.attention.kernels import attend, repeat_heads

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def window_attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g n d"],
    v: Float[Tensor, "b g n e"],
    size: int,
    causal: bool = False,
    valid: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n e"]:
    """Attend to the tokens nearer than `size` (`masks.Window`) in O(n size): chunks that read their neighbours."""
    if size < 1:
        raise ValueError(f"a window must hold at least its own token, got size {size}")
    length, behind = q.shape[2], 0 if causal else size - 1
    chunk = max(size, 1)
    count = math.ceil(length / chunk)
    rest = count * chunk - length
    span = chunk + size - 1 + behind
    k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
    keys, values = (F.pad(x, (0, 0, size - 1, rest + behind)).unfold(2, span, chunk) for x in (k, v))
    queries = F.pad(q, (0, 0, 0, rest)).unflatten(2, (count, chunk))  # [B, h, C, chunk, d]
    query = torch.arange(chunk, device=q.device)[:, None] + size - 1
    key = torch.arange(span, device=q.device)
    near = (key <= query if causal else key < query + size) & (key > query - size)
    real = torch.ones(1, length, dtype=torch.bool, device=q.device) if valid is None else valid
    there = F.pad(real, (size - 1, rest + behind)).unfold(1, span, chunk)  # [B, C, span]
    mask = near & there[:, :, None]  # [B|1, C, chunk, span]
    mask = mask.expand(q.shape[0], -1, -1, -1).flatten(0, 1)[:, None]
    parts = [x.transpose(1, 2).flatten(0, 1) for x in (queries, keys.transpose(-1, -2), values.transpose(-1, -2))]
    mixed = attend(parts[0], parts[1], parts[2], mask)  # [B C, h, chunk, e]
    return mixed.unflatten(0, (q.shape[0], count)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def linformer_attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    projection_k: Float[Tensor, "r s"],
    projection_v: Float[Tensor, "r s"],
) -> Float[Tensor, "b h n e"]:
    """Attend to r mixtures of the s keys (Wang et al. 2020): O(n r). With identity projections, plain attention."""
    return attend(q, projection_k @ k, projection_v @ v)


def performer_attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    features: Float[Tensor, "m d"],
    valid: Bool[Tensor, "b s"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "b h n e"]:
    """Attend in O(s m) with positive random features whose products estimate exp(q·k / sqrt(d)) (Choromanski 2021).

    features: see `random_features`; more of them, less error. valid: True = real key. A row without any is zeros.
    """
    scale = q.shape[-1] ** -0.25
    if valid is not None:
        k, v = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (k, v))
    # a common factor of all keys cancels in the ratio, as does one of each query: both keep exp() in range
    queries, keys = _logits(q * scale, features), _logits(k * scale, features)
    queries = (queries - queries.amax(dim=-1, keepdim=True)).exp()
    if valid is not None:
        keys = keys.masked_fill(~valid[:, None, :, None], -torch.inf)
    largest = keys.amax(dim=(-2, -1), keepdim=True)
    keys = (keys - largest.masked_fill(largest.isinf(), 0.0)).exp()
    if causal:
        sums, totals = (keys[..., None] * v[..., None, :]).cumsum(dim=2), keys.cumsum(dim=2)
        upper = torch.einsum("bhnm,bhnme->bhne", queries, sums)
        lower = (queries * totals).sum(dim=-1, keepdim=True)
    else:
        upper = queries @ (keys.transpose(-2, -1) @ v)
        lower = queries @ keys.sum(dim=-2)[..., None]
    return upper / lower.clamp(min=torch.finfo(lower.dtype).tiny)


def random_features(count: int, width: int, generator: torch.Generator | None = None) -> Float[Tensor, "{count} d"]:
    """Draw random directions, orthogonal within each block of `width`, with the lengths of normal vectors."""
    blocks = [_rotation(width, generator) for _ in range(math.ceil(count / width))]
    lengths = torch.randn(count, width, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:count] * lengths


class Linformer(nn.Module):
    """Self-attention over `rank` learned mixtures of a sequence of at most `length` tokens; heads share them."""

    def __init__(self, width: int, heads: int, length: int, rank: int) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mix_keys = nn.Parameter(torch.randn(rank, length) * length**-0.5)
        self.mix_values = nn.Parameter(torch.randn(rank, length) * length**-0.5)

    def forward(self, x: Float[Tensor, "b n d"], valid: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n d"]:
        """Let tokens read the mixtures of real tokens."""
        count = x.shape[1]
        if count > self.length:
            raise ValueError(f"{count} tokens are more than the {self.length} that are mixed")
        q, k, v = _heads(self.projections(_real(x, valid)), self.heads)
        if valid is not None:
            k, v = (part.masked_fill(~valid[:, None, :, None], 0.0) for part in (k, v))
        return _merge(self.out, linformer_attend(q, k, v, self.mix_keys[:, :count], self.mix_values[:, :count]))


class Performer(nn.Module):
    """Self-attention with fixed random features."""

    def __init__(self, width: int, heads: int, features: int, seed: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        drawn = random_features(features, width // heads, torch.Generator().manual_seed(seed))
        self.register_buffer("features", drawn)

    def forward(self, x: Float[Tensor, "b n d"], valid: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n d"]:
        """Let tokens read the real tokens."""
        q, k, v = _heads(self.projections(_real(x, valid)), self.heads)
        return _merge(self.out, performer_attend(q, k, v, self.get_buffer("features").to(x.dtype), valid))


def _rotation(width: int, generator: torch.Generator | None) -> Tensor:
    """Draw orthogonal directions, all alike; a bare QR prefers some, and the estimate would be biased."""
    directions, upper = torch.linalg.qr(torch.randn(width, width, generator=generator))
    return directions * upper.diagonal().sign()


def _logits(x: Tensor, features: Tensor) -> Tensor:
    return x @ features.transpose(0, 1) - 0.5 * x.square().sum(dim=-1, keepdim=True)


def _real(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else x.masked_fill(~valid[..., None], 0.0)


def _heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _merge(out: nn.Linear, mixed: Tensor) -> Tensor:
    return out(mixed.transpose(1, 2).flatten(2))
