"""Attention layers built on `kernels.attend`: projections, feed-forwards, and one transformer layer for all stacks.

Pre-norm leaves the sum of all branches unnormalised, so whoever stacks layers adds a final norm (`Transformer` does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from robotattn.attention import kernels
from robotattn.attention.caches import KeysValues
from robotattn.attention.kernels import Kernel, attend
from robotattn.attention.positions import Placed, PositionKind

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Activation = Literal["gelu", "relu", "swiglu"]
NormKind = Literal["layer", "rms"]
Store = Callable[[Tensor, Tensor], KeysValues]
NOWHERE = Placed()


@dataclass(frozen=True)
class TransformerConfig:
    """What makes a stack of layers."""

    layers: int
    """Number of layers."""
    width: int
    """Size of a token."""
    heads: int
    """Query heads."""
    hidden: int
    """Hidden size of the feed-forward; 0 = attention only."""
    kv_heads: int | None = None
    """Key and value heads: None = as many as queries (MHA), fewer = grouped (GQA), 1 = shared (MQA)."""
    head_width: int | None = None
    """Size of a head; None = width / heads."""
    norm: Literal["pre", "post", "none"] = "pre"
    """Normalise what a branch reads, or the sum behind it, or nothing. Pre-norm has a final norm."""
    norm_kind: NormKind = "layer"
    """LayerNorm or RMSNorm."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    activation: Activation = "gelu"
    """Of the feed-forward; SwiGLU has three matrices and no biases."""
    bias: bool = True
    """Biases of the projections; the key projection never has one."""
    qk_norm: bool = False
    """RMSNorm of queries and keys, by head."""
    residual: bool = True
    """Add each branch to the stream; without, a branch replaces it."""
    position: PositionKind = "none"
    """How tokens know where they are."""
    limit: int = 2048
    """Number of learned positions, or the longest distance that relative ones tell apart."""
    base: float = 10_000.0
    """Base of rotary wavelengths."""
    cross: bool = False
    """Also attend to a context."""
    context_width: int | None = None
    """Size of a context's token; None = width."""
    dropout: float = 0.0
    """Dropout of each branch while training."""
    kernel: Kernel = "sdpa"
    """Which implementation attends."""

    @property
    def kv(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention; keys and values can be computed ahead and reused.

    kv_heads: of keys and values, default all. head_width: of queries and keys, default ``width / heads``; value_width:
    of values, default the same. context_width, out_width: default width. qk_norm: RMSNorm of queries and keys.
    The key projection has no bias: it would add the same number to all scores of a query, which a softmax ignores.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kernel: Kernel = "sdpa",
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        value_width: int | None = None,
        context_width: int | None = None,
        out_width: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        if head_width is None and width % heads:
            raise ValueError(f"width must be a multiple of heads, got width {width}, heads {heads}")
        self.heads, self.kernel = heads, kernel
        self.kv_heads = heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads {heads}, kv_heads {kv_heads}")
        head = width // heads if head_width is None else head_width
        value = head if value_width is None else value_width
        context = width if context_width is None else context_width
        self.query = nn.Linear(width, heads * head, bias=bias)
        self.key = nn.Linear(context, self.kv_heads * head, bias=False)
        self.value = nn.Linear(context, self.kv_heads * value, bias=bias)
        out = width if out_width is None else out_width
        self.out = nn.Linear(heads * value, out, bias=bias if out_bias is None else out_bias)
        self.scale = head**-0.5
        self.query_norm = nn.RMSNorm(head, eps=1e-6) if qk_norm else None
        self.key_norm = nn.RMSNorm(head, eps=1e-6) if qk_norm else None

    def keys_values(self, context: Float[Tensor, "b s c"], placed: Placed = NOWHERE) -> KeysValues:
        """Project a context into keys and values, each ``[B, kv_heads, S, head]``."""
        keys = _split(self.key(placed.add(context)), self.kv_heads)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        return placed.turn(keys), _split(self.value(context), self.kv_heads)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        context: KeysValues | None = None,
        mask: Bool[Tensor, ...] | None = None,
        *,
        placed: Placed = NOWHERE,
        store: Store | None = None,
    ) -> Float[Tensor, "b n e"]:
        """Attend from x to itself, or to the keys and values of a context. mask: see `attend`.

        placed: positions, see `Position.place`. store: takes the new keys and values and gives back all to be read.
        """
        if context is None:
            context = self.keys_values(x, placed)
            context = context if store is None else store(*context)
        q = self._queries(x, placed)
        one = q.shape[2] == 1 and store is not None  # one query, and a cache is clean where it is masked
        bias, clean = placed.scores(q, self.scale), True if one else None
        mixed = attend(q, *context, mask, self.kernel, bias=bias, clean=clean)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def weights(
        self,
        x: Float[Tensor, "b n d"],
        context: KeysValues | None = None,
        mask: Bool[Tensor, ...] | None = None,
        placed: Placed = NOWHERE,
    ) -> Float[Tensor, "b h n s"]:
        """Return the weights with which x reads itself, or the keys and values of a context."""
        keys, _ = self.keys_values(x, placed) if context is None else context
        q = self._queries(x, placed)
        return kernels.weights(q, keys, mask, bias=placed.scores(q, self.scale))

    def _queries(self, x: Tensor, placed: Placed) -> Tensor:
        q = _split(self.query(placed.add(x)), self.heads)
        return placed.turn(q if self.query_norm is None else self.query_norm(q))


class FeedForward(nn.Sequential):
    """Two linear layers around a GELU or a ReLU."""

    def __init__(
        self,
        width: int,
        hidden: int,
        out: int | None = None,
        activation: Literal["gelu", "relu"] = "gelu",
        bias: bool = True,
    ) -> None:
        between = nn.GELU() if activation == "gelu" else nn.ReLU()
        last = nn.Linear(hidden, width if out is None else out, bias=bias)
        super().__init__(nn.Linear(width, hidden, bias=bias), between, last)


class SwiGLU(nn.Module):
    """Gated feed-forward, down(silu(gate x) * up x), without biases (Shazeer 2020); hidden is often 8/3 width."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return the gated combination."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Self-attention, cross-attention if configured, and a feed-forward, each with its norm and residual."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm, self.residual = config.norm, config.residual
        self.attention = _attention(config, None)
        if config.cross:
            self.cross = _attention(config, config.context_width)
        self.feedforward = _feedforward(config) if config.hidden else None
        self.attention_norm = make_norm(config)
        if config.cross:
            self.cross_norm = make_norm(config)
        if config.hidden:
            self.feedforward_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

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
        """Let tokens read each other (`mask`) and the context (`context_mask`), whose keys come from `cross`."""
        x = self._branch(x, self.attention_norm, lambda y: self.attention(y, None, mask, placed=placed, store=store))
        if context is not None:
            added = Placed(added=placed.added)
            x = self._branch(x, self.cross_norm, lambda y: self.cross(y, context, context_mask, placed=added))
        if self.feedforward is None:
            return x
        return self._branch(x, self.feedforward_norm, self.feedforward)

    def _branch(self, x: Tensor, norm: nn.Module, function: Callable[[Tensor], Tensor]) -> Tensor:
        change = self.dropout(function(norm(x) if self.norm == "pre" else x))
        x = x + change if self.residual else change
        return norm(x) if self.norm == "post" else x


class EncoderLayer(Layer):
    """A pre-norm layer of self-attention and a feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0, kernel: Kernel = "sdpa") -> None:
        super().__init__(TransformerConfig(1, width, heads, hidden, dropout=dropout, kernel=kernel))


class DecoderLayer(Layer):
    """A pre-norm layer of self-attention, cross-attention to a context and a feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0, kernel: Kernel = "sdpa") -> None:
        super().__init__(TransformerConfig(1, width, heads, hidden, cross=True, dropout=dropout, kernel=kernel))


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return the norm of one branch: LayerNorm, RMSNorm or nothing."""
    if config.norm == "none":
        return nn.Identity()
    kind = nn.LayerNorm if config.norm_kind == "layer" else nn.RMSNorm
    return kind(config.width, eps=config.norm_eps)


def _attention(config: TransformerConfig, context_width: int | None) -> Attention:
    return Attention(
        config.width,
        config.heads,
        config.kernel,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        context_width=context_width,
        bias=config.bias,
        qk_norm=config.qk_norm,
    )


def _feedforward(config: TransformerConfig) -> nn.Module:
    if config.activation == "swiglu":
        return SwiGLU(config.width, config.hidden)
    return FeedForward(config.width, config.hidden, activation=config.activation, bias=config.bias)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, heads, N, d]
