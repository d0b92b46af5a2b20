"""Attention layers: multi-head attention and pre-norm transformer layers, built on `kernels.attend`.

Pre-norm leaves the sum of all branches unnormalised, so whoever stacks layers adds a final norm (`Encoder` does).
"""

from typing import cast

from jaxtyping import Bool, Float
from torch import Tensor, nn

from robotattn.attention import masks
from robotattn.attention.kernels import Kernel, attend

KeysValues = tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]


class Attention(nn.Module):
    """Multi-head attention of `heads` heads of ``width / heads``; keys and values can be computed ahead and reused.

    The key projection has no bias: it would add the same number to all scores of a query, which a softmax ignores.
    """

    def __init__(self, width: int, heads: int, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width {width}, heads {heads}")
        self.heads, self.kernel = heads, kernel
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def keys_values(self, context: Float[Tensor, "b s d"]) -> KeysValues:
        """Project a context into keys and values, each ``[B, heads, S, width / heads]``."""
        return self._split(self.key(context)), self._split(self.value(context))

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        context: KeysValues | None = None,
        mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Attend from x to itself, or to the keys and values of a context. mask: see `attend`."""
        keys, values = self.keys_values(x) if context is None else context
        mixed = attend(self._split(self.query(x)), keys, values, mask, self.kernel)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, N, d]


class FeedForward(nn.Sequential):
    """Two linear layers around a GELU."""

    def __init__(self, width: int, hidden: int, out: int | None = None) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width if out is None else out))


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        self.attention = Attention(width, heads, kernel)
        self.feedforward = FeedForward(width, hidden)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "b n d"]:
        """Let tokens read each other. mask: see `attend`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class DecoderLayer(nn.Module):
    """Self-attention of the queries, cross-attention to a context, and a feed-forward, all pre-norm."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        self.attention = Attention(width, heads, kernel)
        self.cross = Attention(width, heads, kernel)
        self.feedforward = FeedForward(width, hidden)
        self.attention_norm, self.cross_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        context: KeysValues,
        mask: Bool[Tensor, "..."] | None = None,
        self_mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Let queries read each other (`self_mask`) and the context (`mask`), whose keys come from `cross`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=self_mask))
        x = x + self.dropout(self.cross(self.cross_norm(x), context, mask))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class Encoder(nn.Module):
    """A stack of encoder layers and the final norm."""

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, dropout: float = 0.0, kernel: Kernel = "sdpa"
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, heads, hidden, dropout, kernel) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Float[Tensor, "b n d"], valid: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n d"]:
        """Encode tokens; those that are not valid are read by nobody."""
        mask = None if valid is None else masks.padding(valid)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Decoder(nn.Module):
    """A stack of decoder layers and the final norm; every layer has its own keys and values of the context."""

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, dropout: float = 0.0, kernel: Kernel = "sdpa"
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads, hidden, dropout, kernel) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def keys_values(self, context: Float[Tensor, "b s d"]) -> tuple[KeysValues, ...]:
        """Project a context for every layer, once however often it is read."""
        return tuple(cast(DecoderLayer, layer).cross.keys_values(context) for layer in self.layers)

    def forward(
        self, x: Float[Tensor, "b n d"], context: tuple[KeysValues, ...], valid: Bool[Tensor, "b s"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Decode queries against a context (see `keys_values`); tokens of it that are not valid are read by nobody."""
        mask = None if valid is None else masks.padding(valid)
        for layer, keys_values in zip(self.layers, context, strict=True):
            x = layer(x, keys_values, mask)
        return self.norm(x)
