"""Layers rearranged for acting: the same mathematics in fewer, longer products, laid out for one token at a time.

A decoder that chooses a token at a time reads all its weights for each of them, so memory bandwidth is what a token
costs, and after that every call, since the weights that stream by leave nothing else in the processor's caches. So:
projections that read the same input are one product; weights are stored by columns, in which order one row times a
matrix is fastest, and on huge pages; gains of RMSNorm go into the matrix behind them; residuals are added by the
product. Sums are taken in another order, so results agree to rounding and not to the bit.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robotattn.attention.caches import KeysValues
from robotattn.attention.kernels import attend
from robotattn.attention.layers import NOWHERE, Layer, Store, SwiGLU
from robotattn.attention.positions import Placed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Module = TypeVar("Module", bound=nn.Module)
PAGE = 2**21  # a huge page of x86-64 and of most ARM kernels (bytes)
LINE = 64  # bytes: where weights may begin


def fuse(module: Module) -> Module:
    """Return a copy for inference, whose pre-norm layers are `FusedLayer`s; other modules stay as they are.

    The copy takes no gradients and its parameters have other names: train and save the original.
    """
    fused = _replace(copy.deepcopy(module).requires_grad_(False).eval())
    move([part.weight for part in fused.modules() if isinstance(part, Projection)])
    shorten(fused)
    return fused


class Projection(nn.Module):
    """A linear layer of matrices ``[M, in]``, which can add a residual on the way; its weight is ``[in, out]``."""

    def __init__(self, weight: Float[Tensor, "d e"], bias: Float[Tensor, " e"] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m e"]:
        """Return x W + bias."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    raw = forward  # of whatever type is at hand: bfloat16 where weights are int8

    def added(self, residual: Float[Tensor, "m e"], x: Float[Tensor, "m d"]) -> Float[Tensor, "m e"]:
        """Return residual + x W + bias."""
        out = torch.addmm(residual, x, self.weight)
        return out if self.bias is None else out.add_(self.bias)


class FusedLayer(nn.Module):
    """What a pre-norm `Layer` computes: one product for query, key and value, and one for gate and up."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        attention = layer.attention
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.kernel, self.scale = attention.kernel, attention.scale
        self.head = attention.query.out_features // self.heads
        self.plain = self.kernel == "sdpa" and self.heads == self.kv_heads
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.attention_norm, gain = _norm(layer.attention_norm)
        self.joint = _join(gain, attention.query, attention.key, attention.value)
        self.out = _join(None, attention.out)
        if hasattr(layer, "cross"):
            self.cross, self.cross_norm = layer.cross, layer.cross_norm
        self.gated = isinstance(layer.feedforward, SwiGLU)
        self.up = None
        if layer.feedforward is not None:
            self.feedforward_norm, gain = _norm(layer.feedforward_norm)
            *first, last = (part for part in layer.feedforward.children() if isinstance(part, nn.Linear))
            self.activation = nn.SiLU() if self.gated else cast(nn.Sequential, layer.feedforward)[1]
            self.up, self.down = _join(gain, *first), _join(None, last)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        mask: Bool[Tensor, ...] | None = None,
        context: KeysValues | None = None,
        context_mask: Bool[Tensor, ...] | None = None,
        *,
        placed: Placed = NOWHERE,
        store: Store | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Let tokens read each other (`mask`) and the context (`context_mask`), as `Layer` does."""
        rows, count, width = x.shape
        x = x.reshape(rows * count, width)  # products of matrices need no views around them
        joint = self.joint.forward(self.attention_norm.forward(x))
        if count == 1:  # nothing to be transposed
            mixed = self._attend(joint.view(rows, -1, 1, self.head), mask, placed, store).view(rows, -1)
        else:
            joint = joint.view(rows, count, -1, self.head).transpose(1, 2)
            mixed = self._attend(joint, mask, placed, store).transpose(1, 2).reshape(rows * count, -1)
        x = self.out.added(x, mixed)
        if context is not None:
            queries = self.cross_norm(x).view(rows, count, width)
            x = x + self.cross(queries, context, context_mask).flatten(0, 1)
        if self.up is not None:
            hidden = self.up.raw(self.feedforward_norm.forward(x))
            if self.gated:
                gate, up = hidden.chunk(2, dim=-1)
                hidden = F.silu(gate).mul_(up)
            else:
                hidden = self.activation(hidden)
            x = self.down.added(x, hidden)
        return x.view(rows, count, width)

    def _attend(self, joint: Tensor, mask: Tensor | None, placed: Placed, store: Store | None) -> Tensor:
        """Attend with the first heads of ``[B, heads + 2 kv, N, d]`` to the others and what `store` gives back."""
        both, v = joint.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            both = torch.cat([self.query_norm(both[:, : self.heads]), self.key_norm(both[:, self.heads :])], dim=1)
        q, k = placed.turn(both).split((self.heads, self.kv_heads), dim=1)
        if store is not None:
            k, v = store(k, v)
        bias = placed.scores(q, self.scale)
        if mask is None and bias is None and self.plain and q.dtype == torch.float32:
            return F.scaled_dot_product_attention(q, k, v)  # nothing that `attend` would have to look at
        one = q.shape[2] == 1 and store is not None  # one query, and a cache is clean where it is masked
        return attend(q, k, v, mask, self.kernel, bias=bias, clean=True if one else None)


class FusedRMSNorm(nn.Module):
    """RMSNorm in three or four kernels: torch's own takes nine on a CPU. Without a gain if a matrix took it over."""

    def __init__(self, norm: nn.RMSNorm, gain: bool) -> None:
        super().__init__()
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        self.eps = nn.Parameter(norm.weight.detach().new_full((1, 1, 1), eps), requires_grad=False)
        self.weight = norm.weight if gain else None

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Divide by the root of the mean square."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        alpha = 1.0 / x.shape[-1]
        if len(rows) == 1:
            square = torch.addmm(self.eps[0], rows, rows.t(), alpha=alpha)
        else:
            square = torch.baddbmm(self.eps, rows[:, None], rows[:, :, None], alpha=alpha)[:, :, 0]
        rows = rows * square.rsqrt_()
        rows = rows if self.weight is None else rows * self.weight
        return rows if x.dim() == 2 else rows.view(x.shape)


def _norm(norm: nn.Module) -> tuple[nn.Module, Tensor | None]:
    """Return what is left of a norm, and the gain that the matrix behind it has to take over."""
    return (FusedRMSNorm(norm, False), norm.weight) if isinstance(norm, nn.RMSNorm) else (norm, None)


def _join(gain: Tensor | None, *layers: nn.Linear) -> Projection:
    """Return one layer whose output is that of the given ones behind each other; gain: of its input."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    weight = weight if gain is None else weight * gain.detach()
    if all(layer.bias is None for layer in layers):
        return Projection(weight.t().contiguous(), None)
    parts = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    return Projection(weight.t().contiguous(), torch.cat(parts))


def _replace(module: Module) -> Module:
    for name, part in module.named_children():
        if isinstance(part, Layer) and part.norm == "pre" and part.residual:
            setattr(module, name, FusedLayer(part))
        elif isinstance(part, nn.RMSNorm):
            setattr(module, name, FusedRMSNorm(part, True))
        else:
            _replace(part)
    return module


def shorten(module: nn.Module) -> None:
    """Let fused layers find their parts at once and not by way of the look-up that nn.Module has in Python."""
    for part in module.modules():
        if isinstance(part, FusedLayer | FusedRMSNorm | Projection):
            part.__dict__.update({**part._modules, **part._parameters})


def move(weights: Sequence[Tensor]) -> None:
    """Put weights one behind the other on huge pages, where the system has them."""
    sizes = [weight.numel() * weight.element_size() for weight in weights]
    steps = [-(-size // LINE) * LINE for size in sizes]
    room = _huge_pages(sum(steps)) if all(weight.device.type == "cpu" for weight in weights) else None
    if room is not None:
        for weight, part, size in zip(weights, room.split(steps), sizes, strict=True):
            weight.data = part[:size].view(weight.dtype).view(weight.shape).copy_(weight)


def _huge_pages(size: int) -> Tensor | None:
    """Return `size` bytes on huge pages, None where there are none (another system than Linux) or it is too little."""
    if size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel that was built without them
        return None
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    return whole[-whole.data_ptr() % PAGE :][:size]
