"""Attention kernels: softmax(q k^T / sqrt(d)) v with one mask convention.

Masks are boolean and True means *attend*, as in ``scaled_dot_product_attention`` (and the reverse of
``nn.MultiheadAttention``). A float mask is refused: added to the scores, a 0/1 mask silently means nothing.
A query that may attend to nothing returns zeros. Masked keys and values must be finite: zero the padding.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

Kernel = Literal["sdpa", "reference"]


def attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    mask: Bool[Tensor, "..."] | None = None,
    kernel: Kernel = "sdpa",
) -> Float[Tensor, "b h n e"]:
    """Attend with queries to keys and values. mask: ``[n, s]`` or ``[b|1, h|1, n|1, s]``, True = attend.

    Raises TypeError for a mask that is not boolean and ValueError for one of another shape.
    """
    if mask is not None:
        mask = _checked(mask, q, k)
    if kernel == "sdpa":
        return _fused(q, k, v, mask)
    if kernel == "reference":
        return weights(q, k, mask) @ v
    raise ValueError(f"kernel must be 'sdpa' or 'reference', got {kernel!r}")


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with torch.autocast("cpu", enabled=False):  # the fused bf16 kernel of CPUs is six times slower than the float32 one
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask).bfloat16()


def weights(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h s d"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "b h n s"]:
    """Return the attention weights, written out; a fully masked row is all zeros."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is None:
        return scores.softmax(dim=-1)
    # The most negative finite number, not -inf: a fully masked row would be NaN, and so would its gradient.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) * mask


def _checked(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"an attention mask must be bool with True = attend, got {mask.dtype}")
    want = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    have = tuple(mask.shape) if mask.dim() == 4 else (1, 1, *mask.shape)
    fits = len(have) == 4 and have[3] == want[3] and all(h in (1, w) for h, w in zip(have, want, strict=True))
    if mask.dim() not in (2, 4) or not fits:
        raise ValueError(
            f"an attention mask must be [{want[2]}, {want[3]}] or [{want[0]}|1, {want[1]}|1, {want[2]}|1, {want[3]}], "
            f"got {list(mask.shape)}"
        )
    return mask.expand(*have[:2], want[2], want[3]) if mask.dim() == 4 else mask
