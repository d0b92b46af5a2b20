"""The stack of layers: encoder, causal or block-masked decoder, with or without a cache or a context.

In come token vectors and a mask predicate; positions, padding and cached slots are settled here, once for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from robotattn.attention import masks
from robotattn.attention.caches import Cache, CrossKV, KeysValues, KVCache, PrefixKV, Recording
from robotattn.attention.kernels import Kernel
from robotattn.attention.layers import Layer, TransformerConfig, make_norm
from robotattn.attention.masks import Mask
from robotattn.attention.positions import Position, make_position, row_positions

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class Transformer(nn.Module):
    """Layers, positions, and behind pre-norm layers a final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = make_norm(config) if config.norm == "pre" else nn.Identity()
        self.position: Position = make_position(
            config.position, config.width, config.heads, config.head, config.limit, config.base
        )

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        mask: Mask | Tensor | None = None,
        *,
        valid: Bool[Tensor, "b n"] | None = None,
        positions: Float[Tensor, "#b n"] | None = None,
        cache: Cache | None = None,
        context: CrossKV | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Let tokens read each other, what is cached, and a context; tokens that are not valid are zero, in and out.

        mask: who reads whom by slot, None = everybody; a cache needs a predicate, since its slots come before x.
        positions: what position encodings count, default the real tokens of each row. The cache is checked before and
        committed after all layers. Raises CacheOverflow, and ValueError for a mask by which cached tokens are stale.
        """
        count = x.shape[1]
        if cache is not None:
            _check(mask, cache, count)
        if valid is not None:
            x = x.masked_fill(~valid[..., None], 0.0)
        if positions is None:
            positions = _numbers(x, valid, cache)
        x = self.position.embed(x, positions)
        known, places = (valid, positions) if cache is None else cache.admit(valid, positions, count)
        allowed = _allowed(mask, known, cache, count, places.shape[1], x.device)
        placed = self.position.place(positions, places, x.dtype)
        pairs = (None,) * len(self.layers) if context is None else context.keys_values
        context_mask = None if context is None or context.valid is None else masks.padding(context.valid)
        for index, (layer, pair) in enumerate(zip(self.layers, pairs, strict=True)):
            store = None if cache is None else partial(cache.write, index)
            x = layer(x, allowed, pair, context_mask, placed=placed, store=store)
        if cache is not None:
            cache.commit(count)
        x = self.norm(x)
        return x if valid is None else x.masked_fill(~valid[..., None], 0.0)

    def cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        allow_stale: bool = False,
        whole: bool = False,
    ) -> KVCache:
        """Return an empty cache for this stack, of the weights' type and device unless told otherwise."""
        config, like = self.config, next(self.parameters())
        return KVCache(
            config.layers,
            batch,
            config.kv,
            config.head,
            capacity,
            like.dtype if dtype is None else dtype,
            like.device if device is None else device,
            allow_stale,
            whole,
        )

    def prefix(
        self,
        x: Float[Tensor, "b n d"],
        mask: Mask | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
        positions: Float[Tensor, "#b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], PrefixKV]:
        """Return the output for a prefix and its keys and values, gradients included."""
        recording = Recording(len(x), x.device)
        out = self(x, mask, valid=valid, positions=positions, cache=recording)
        return out, recording.prefix()

    def remember(self, context: Float[Tensor, "b s c"], valid: Bool[Tensor, "b s"] | None = None) -> CrossKV:
        """Project a context for every layer, once however often it is read."""
        if valid is not None:
            context = context.masked_fill(~valid[..., None], 0.0)
        return CrossKV(tuple(layer.cross.keys_values(context) for layer in self._layers()), valid)

    def _layers(self) -> Iterator[Layer]:
        return (cast(Layer, layer) for layer in self.layers)


class Encoder(Transformer):
    """A stack of pre-norm encoder layers and the final norm."""

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, dropout: float = 0.0, kernel: Kernel = "sdpa"
    ) -> None:
        super().__init__(TransformerConfig(layers, width, heads, hidden, dropout=dropout, kernel=kernel))

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b n d"], valid: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Encode tokens; those that are not valid are read by nobody."""
        return super().forward(x, valid=valid)


class Decoder(Transformer):
    """A stack of pre-norm decoder layers and the final norm; every layer has its own keys and values of the context."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        hidden: int,
        dropout: float = 0.0,
        kernel: Kernel = "sdpa",
        kv_heads: int | None = None,
    ) -> None:
        config = TransformerConfig(layers, width, heads, hidden, kv_heads, cross=True, dropout=dropout, kernel=kernel)
        super().__init__(config)

    def keys_values(self, context: Float[Tensor, "b s d"]) -> tuple[KeysValues, ...]:
        """Project a context for every layer, once however often it is read."""
        return self.remember(context).keys_values

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b n d"], context: tuple[KeysValues, ...], valid: Bool[Tensor, "b s"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Decode queries against a context (see `keys_values`); tokens of it that are not valid are read by nobody."""
        return super().forward(x, context=CrossKV(context, valid))


def _check(mask: Mask | Tensor | None, cache: Cache, count: int) -> None:
    """Refuse before anything is written: too many tokens, or a mask by which what is cached would have to change."""
    cache.reserve(count)
    if isinstance(mask, Tensor):
        raise ValueError("with a cache, the mask must be a predicate (masks.Causal(), ...), not a tensor")
    mask = masks.Everything() if mask is None else mask
    if not cache.allow_stale and not mask.settled(cache.length, count):
        raise ValueError(
            f"by the mask {mask!r}, some of the {cache.length} cached tokens read the {count} new ones and would have "
            "to be computed again; a block must be prefilled in one call"
        )


def _numbers(x: Tensor, valid: Tensor | None, cache: Cache | None) -> Tensor:
    """Number the new tokens row by row: real ones only, going on where the cache stopped."""
    if cache is None and valid is None:
        return torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[None]
    start = None if cache is None else cache.next_positions()
    if valid is not None:
        return row_positions(valid, start)
    assert start is not None
    return start[:, None] if x.shape[1] == 1 else start[:, None] + torch.arange(x.shape[1], device=x.device)


def _allowed(
    mask: Mask | Tensor | None, known: Tensor | None, cache: Cache | None, count: int, keys: int, device: torch.device
) -> Tensor | None:
    if isinstance(mask, Mask) and cache is not None and keys == cache.length + count:
        mask = None if mask.hides_nothing(cache.length, count) else mask
    if isinstance(mask, Mask):
        mask = mask.build(count if cache is None else cache.slots(count), keys, device)
    return masks.combine(mask, None if known is None else masks.padding(known))
