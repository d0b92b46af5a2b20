"""Attention kernels: softmax(q k^T / sqrt(d) + bias) v with one mask convention.

Masks are boolean and True means *attend*, as in ``scaled_dot_product_attention`` (and the reverse of
``nn.MultiheadAttention``). A float mask is refused: added to the scores, a 0/1 mask silently means nothing.
A query that may attend to nothing returns zeros. What lies behind a mask has no influence, not even NaN.
Grouped queries: with fewer key heads than query heads, query head i reads key head i // (heads / kv_heads).
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Kernel = Literal["sdpa", "reference", "flex"]
HUGE = 1e15  # scores of two such numbers still fit into float32; beyond, inf - inf would be NaN behind a mask


def attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    mask: Bool[Tensor, ...] | BlockMask | None = None,
    kernel: Kernel = "sdpa",
    *,
    scale: float | None = None,
    bias: Float[Tensor, ...] | None = None,
    causal: bool = False,
    clean: bool | None = None,
) -> Float[Tensor, "b h n e"]:
    """Attend with queries to keys and values. mask: ``[n, s]`` or ``[b|1, h|1, n|1, s]``, True = attend.

    scale: of the scores, default 1/sqrt(d). bias: added to the scores, of the mask's shapes. causal: the fused causal
    flag, for equally many queries and keys and no mask only. clean: True = keys and values behind the mask are
    promised to be finite; False = they may be anything; None = look (on CPUs; elsewhere that would wait, so: True).
    Raises TypeError for a mask that is not boolean and ValueError for a shape that does not fit.
    """
    _check_heads(q, k)
    if causal:
        _check_causal(q, k, mask)
        mask = None if kernel == "sdpa" and bias is None else _lower_triangle(q, k)
    if kernel == "flex":
        return _flex(q, k, v, mask, scale, bias)
    if isinstance(mask, BlockMask):
        raise ValueError(f"a BlockMask needs kernel 'flex', got {kernel!r}")
    mask = None if mask is None else _checked("mask", mask, q, k)
    bias = None if bias is None else _checked("bias", bias, q, k)
    if mask is not None and (clean is False or (clean is None and _suspicious(k, v))):
        return _careful(q, k, v, mask, scale, bias)
    if kernel == "sdpa":
        return _fused(q, k, v, mask, scale, bias, causal and mask is None)
    if kernel == "reference":
        return weights(q, k, mask, scale=scale, bias=bias) @ repeat_heads(v, q.shape[1])
    raise ValueError(f"kernel must be 'sdpa', 'reference' or 'flex', got {kernel!r}")


def weights(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    mask: Bool[Tensor, ...] | None = None,
    *,
    scale: float | None = None,
    bias: Float[Tensor, ...] | None = None,
) -> Float[Tensor, "b h n s"]:
    """Return the attention weights, written out; a fully masked row is all zeros."""
    scores = q @ repeat_heads(k, q.shape[1]).transpose(-2, -1) * (_default(q) if scale is None else scale)
    return masked_softmax(scores if bias is None else scores + bias, mask)


def masked_softmax(scores: Float[Tensor, "*b s"], mask: Bool[Tensor, ...] | None) -> Float[Tensor, "*b s"]:
    """Return the softmax over the last dimension where the mask is True, zeros elsewhere and in empty rows."""
    if mask is None:
        return scores.softmax(dim=-1)
    # The most negative finite number, not -inf: a fully masked row would be NaN, and so would its gradient.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) * mask


def repeat_heads(x: Float[Tensor, "b g s d"], heads: int) -> Float[Tensor, "b {heads} s d"]:
    """Give every query head its key head: each is repeated in place (0 0 1 1), never tiled (0 1 0 1)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _default(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, bias: Tensor | None, causal: bool
) -> Tensor:
    """Run the fused kernel; heads of one group become queries of one head, so that keys are never copied."""
    heads, groups = q.shape[1], k.shape[1]
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        mask = mask.to(q.dtype)
    if causal or heads == groups:
        return _dot_product(q, repeat_heads(k, heads), repeat_heads(v, heads), mask, scale, causal)
    grouped = q.unflatten(1, (groups, -1)).flatten(2, 3)  # [B, groups, heads / groups * N, d]
    mixed = _dot_product(grouped, k, v, _group_mask(mask, heads, groups, q.shape[2]), scale, False)
    return mixed.unflatten(2, (heads // groups, -1)).flatten(1, 2)


def _group_mask(mask: Tensor | None, heads: int, groups: int, queries: int) -> Tensor | None:
    if mask is None:
        return None
    mask = mask if mask.dim() == 4 else mask[None, None]
    if mask.shape[1] == 1:
        return mask.expand(-1, heads // groups, queries, -1).flatten(1, 2)[:, None]
    return mask.expand(-1, -1, queries, -1).unflatten(1, (groups, -1)).flatten(2, 3)


def _dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal)
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    with torch.autocast("cpu", enabled=False):  # the fused bf16 kernel of CPUs is six times slower than the float32 one
        half = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=mask, scale=scale, is_causal=causal
        )
        return half.bfloat16()


def _careful(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, bias: Tensor | None
) -> Float[Tensor, "b h n e"]:
    """Attend where keys and values may hold anything: who may read a NaN gets NaN, and nobody else."""
    heads = q.shape[1]
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    mask = mask.expand(*q.shape[:3], k.shape[2]) if mask.dim() == 4 else mask.expand(*q.shape[:2], *mask.shape)
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))  # [B, heads, S]
    unread = ~mask.any(dim=-2)
    k, v = (x.masked_fill((bad | unread)[..., None], 0.0) for x in (k, v))
    mixed = weights(q, k, mask, scale=scale, bias=bias) @ v
    poisoned = (mask & bad[:, :, None]).any(-1, keepdim=True)
    return mixed.masked_fill(poisoned, torch.nan)


def _suspicious(k: Tensor, v: Tensor) -> bool:
    """Tell whether keys or values hold what would leak through a weight of zero; NaN compares as False."""
    if k.device.type != "cpu" or torch.compiler.is_compiling() or not k.numel():
        return False
    largest = [torch.linalg.vector_norm(x.detach(), ord=torch.inf) for x in (k, v)]
    return not all(bool(x < HUGE) for x in largest)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, scale: float | None, bias: Tensor | None
) -> Tensor:
    """Run FlexAttention, not compiled: the oracle for block masks. On a CPU torch gives it no gradient."""
    if isinstance(mask, Tensor):
        mask = _from_tensor(_checked("mask", mask, q, k), q, k)
    change = None
    if bias is not None:
        full = _checked("bias", bias, q, k).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

        def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + full[row, head, query, key]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        mixed = flex_attention(
            q, k, v, score_mod=change, block_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
    assert isinstance(mixed, Tensor)
    return mixed


def _from_tensor(mask: Tensor, q: Tensor, k: Tensor) -> BlockMask:
    full = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return full[row, head, query, key]

    return create_block_mask(rule, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=str(q.device))


def _lower_triangle(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def _check_causal(q: Tensor, k: Tensor, mask: object) -> None:
    if mask is not None or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"the causal flag is for equally many queries and keys and no mask, got {q.shape[2]} queries, "
            f"{k.shape[2]} keys{'' if mask is None else ' and a mask'}: with a cache, build the mask from slots"
        )


def _check_heads(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}")


def _checked(what: str, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if what == "mask" and mask.dtype != torch.bool:
        raise TypeError(f"an attention mask must be bool with True = attend, got {mask.dtype}")
    if what == "bias" and not mask.is_floating_point():
        raise TypeError(f"an attention bias must be floating point, got {mask.dtype}; booleans are masks")
    want = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    have = tuple(mask.shape) if mask.dim() == 4 else (1, 1, *mask.shape)
    fits = len(have) == 4 and have[3] == want[3] and all(h in (1, w) for h, w in zip(have, want, strict=True))
    if mask.dim() not in (2, 4) or not fits:
        raise ValueError(
            f"an attention {what} must be [{want[2]}, {want[3]}] or "
            f"[{want[0]}|1, {want[1]}|1, {want[2]}|1, {want[3]}], got {list(mask.shape)}"
        )
    return mask.expand(*have[:2], want[2], want[3]) if mask.dim() == 4 else mask
