"""Key/value caches: one that grows, an immutable prefix with a scratch tail, and cross-attention memories.

A model's forward asks a cache for room (`reserve`, which refuses before anything is written), registers the new tokens
(`admit`), writes keys and values layer by layer (`write`) and moves the position once after the last layer (`commit`),
so that all layers of a step see the same offset. Slots that hold nothing are zero and not valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

KeysValues = tuple[Tensor, Tensor]  # [B, heads, S, d], [B, heads, S, e]


class CacheOverflow(ValueError):
    """More tokens than a cache has room for; nothing was written."""


def kv_bytes(
    layers: int, kv_heads: int, head_width: int, slots: int, dtype: torch.dtype = torch.float32, batch: int = 1
) -> int:
    """Return the bytes of keys and values: 2 L B heads slots d bytes(dtype)."""
    return 2 * layers * batch * kv_heads * slots * head_width * dtype.itemsize


class KVCache:
    """Keys and values of the tokens so far, in `capacity` preallocated slots.

    length: slots in use, known to the host; position: the same on the device, int64 ``[1]``. valid ``[B, capacity]``:
    which slots hold a real token; positions ``[B, capacity]``: what position encodings count.
    allow_stale: let a model prefill in parts under a mask by which old tokens should have read the new ones (wrong,
    and refused otherwise). whole: read all slots always, so that a compiled graph sees one shape.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_width: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        allow_stale: bool = False,
        whole: bool = False,
    ) -> None:
        shape = (batch, kv_heads, capacity, head_width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.valid = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.positions = torch.zeros(batch, capacity, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.capacity, self.length, self.allow_stale, self.whole = capacity, 0, allow_stale, whole
        self.padded = False
        self._fresh: Tensor | None = None

    def reserve(self, count: int) -> None:
        """Raise CacheOverflow if `count` more tokens do not fit."""
        if self.length + count > self.capacity:
            raise CacheOverflow(f"the cache holds {self.length} of {self.capacity} tokens, so {count} more do not fit")

    def slots(self, count: int) -> Tensor:
        """Return the slots of the next `count` tokens, ``[count]``."""
        if count == 1:
            return self.position.clone()
        return self.position + torch.arange(count, device=self.position.device)

    def next_positions(self) -> Float[Tensor, " b"]:
        """Return for each row the position of its next real token: one more than its last, 0 if it has none."""
        if self.length and self._plain:
            return self.positions[:, : self.length].amax(dim=1) + 1.0
        return torch.where(self._written(), self.positions + 1.0, 0.0).amax(dim=1)

    def admit(self, valid: Tensor | None, positions: Tensor, count: int) -> tuple[Tensor | None, Tensor]:
        """Register new tokens; return of all slots to be read the validity (None: all are) and the positions [B, S]."""
        self._fresh, rows = self.slots(count), len(self.valid)
        self.padded = self.padded or valid is not None
        self.positions.index_copy_(1, self._fresh, positions.float().expand(rows, -1))
        if self._plain:
            return None, self.positions[:, : self.length + count]
        self.valid.copy_(self._written())  # forgets a pass that failed before its commit
        self.valid.index_copy_(1, self._fresh, self.valid.new_ones(rows, count) if valid is None else valid)
        end = self.capacity if self.whole else self.length + count
        return self.valid[:, :end], self.positions[:, :end]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Store the keys and values of the new tokens, without gradients; return those of all slots that are read."""
        assert self._fresh is not None, "admit comes before write"
        stored_keys, stored_values = self.keys[layer], self.values[layer]
        if keys.requires_grad or values.requires_grad or keys.dtype != stored_keys.dtype:
            keys, values = (fresh.detach().to(stored_keys.dtype) for fresh in (keys, values))
        stored_keys.index_copy_(2, self._fresh, keys)
        stored_values.index_copy_(2, self._fresh, values)
        if self.whole:
            return stored_keys, stored_values
        end = self.length + keys.shape[2]
        return stored_keys.narrow(2, 0, end), stored_values.narrow(2, 0, end)

    def commit(self, count: int) -> None:
        """Move on by `count` tokens, after the last layer wrote."""
        if self._plain:
            self.valid[:, self.length : self.length + count] = True
        self.position += count
        self.length += count

    def rewind(self, length: int) -> None:
        """Go back to `length` tokens; what is dropped becomes zero."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be rewound to {length}")
        for store in (*self.keys, *self.values):
            store[:, :, length:] = 0.0
        self.valid[:, length:] = False
        self.positions[:, length:] = 0.0
        self.position.fill_(length)
        self.length = length

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Forget everything, or the given rows alone: their slots become zero and not valid, positions restart at 0."""
        if rows is None:
            self.padded = False
            return self.rewind(0)
        self.padded = True
        for store in (*self.keys, *self.values, self.positions):
            store[rows] = 0.0
        self.valid[rows] = False
        return None

    def freeze(self) -> PrefixKV:
        """Return an immutable copy of what is stored."""
        end = self.length
        return PrefixKV(
            tuple(store[:, :, :end].clone() for store in self.keys),
            tuple(store[:, :, :end].clone() for store in self.values),
            self.valid[:, :end].clone(),
            self.positions[:, :end].clone(),
            self.padded,
            self.allow_stale,
        )

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values allocated."""
        return _bytes([*self.keys, *self.values])

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        return self.bytes * self.length // self.capacity

    @property
    def _plain(self) -> bool:
        """Whether all slots before `length` hold real tokens and no other is read: then nothing need be looked up."""
        return not self.padded and not self.whole

    def _written(self) -> Tensor:
        return self.valid & (torch.arange(self.capacity, device=self.valid.device) < self.position)


@dataclass(frozen=True)
class PrefixKV:
    """Keys and values of a prefix for each layer ``[B, kv_heads, P, d]``; never changed.

    Given to a model as its cache, it is read and the new tokens are forgotten afterwards (concatenation, so gradients
    flow). `scratch` does the same in place and without copying the prefix again; `grow` makes a cache that keeps them.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Bool[Tensor, "b p"]
    positions: Float[Tensor, "b p"]
    padded: bool = True
    allow_stale: bool = False
    whole = False

    @property
    def length(self) -> int:
        """Tokens in the prefix, padding included."""
        return self.valid.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        return _bytes([*self.keys, *self.values])

    def reserve(self, count: int) -> None:
        """Accept any number of tokens: they are not kept."""

    def slots(self, count: int) -> Tensor:
        """Return the slots of the tokens behind the prefix, ``[count]``."""
        return torch.arange(self.length, self.length + count, device=self.valid.device)

    def next_positions(self) -> Float[Tensor, " b"]:
        """Return for each row the position of the token behind the prefix."""
        return torch.where(self.valid, self.positions + 1.0, 0.0).amax(dim=1)

    def admit(self, valid: Tensor | None, positions: Tensor, count: int) -> tuple[Tensor | None, Tensor]:
        """Return validity (None: all) and positions of the prefix and the new tokens, ``[B, P + count]``."""
        places = torch.cat([self.positions, positions.float().expand(len(self.valid), -1)], dim=1)
        if valid is None and not self.padded:
            return None, places
        fresh = self.valid.new_ones(len(self.valid), count) if valid is None else valid
        return torch.cat([self.valid, fresh], dim=1), places

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Return the prefix's keys and values, and behind them the new ones."""
        return torch.cat([self.keys[layer], keys], dim=2), torch.cat([self.values[layer], values], dim=2)

    def commit(self, count: int) -> None:
        """Keep nothing."""

    def scratch(self, size: int) -> Scratch:
        """Return room for `size` tokens behind a copy of the prefix."""
        return Scratch(self, size)

    def grow(self, extra: int, whole: bool = False) -> KVCache:
        """Return a cache that holds a copy of the prefix and has room for `extra` tokens more."""
        batch, heads, length, width = self.keys[0].shape
        like = self.keys[0]
        cache = KVCache(
            len(self.keys), batch, heads, width, length + extra, like.dtype, like.device, self.allow_stale, whole
        )
        for ours, theirs in zip((*cache.keys, *cache.values), (*self.keys, *self.values), strict=True):
            ours[:, :, :length] = theirs
        cache.valid[:, :length], cache.positions[:, :length] = self.valid, self.positions
        cache.padded = self.padded
        cache.commit(length)
        return cache


class Scratch:
    """A prefix and `size` slots behind it that every forward pass overwrites: for solvers that take many steps."""

    def __init__(self, prefix: PrefixKV, size: int) -> None:
        self.cache, self.size = prefix.grow(size), size
        self.allow_stale = prefix.allow_stale

    @property
    def length(self) -> int:
        """Tokens in the prefix: the tail never counts."""
        return self.cache.length

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values, tail included."""
        return self.cache.bytes

    def reserve(self, count: int) -> None:
        """Raise CacheOverflow if the tail has not room for `count` tokens."""
        self.cache.reserve(count)

    def slots(self, count: int) -> Tensor:
        """Return the slots of the tail, ``[count]``."""
        return self.cache.slots(count)

    def next_positions(self) -> Float[Tensor, " b"]:
        """Return for each row the position of the token behind the prefix."""
        return self.cache.next_positions()

    def admit(self, valid: Tensor | None, positions: Tensor, count: int) -> tuple[Tensor | None, Tensor]:
        """Register the tail; return validity and positions of prefix and tail."""
        return self.cache.admit(valid, positions, count)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Overwrite the tail; return the keys and values of prefix and tail."""
        return self.cache.write(layer, keys, values)

    def commit(self, count: int) -> None:
        """Stay: the next pass overwrites the tail."""


class Recording:
    """A first pass that keeps its keys and values, gradients included: what makes a `PrefixKV`."""

    length, allow_stale = 0, False

    def __init__(self, batch: int, device: torch.device | str) -> None:
        self.pairs: list[KeysValues] = []
        self.padded = False
        self.valid = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        self.positions = torch.zeros(batch, 0, device=device)

    def reserve(self, count: int) -> None:
        """Accept any number of tokens."""

    def slots(self, count: int) -> Tensor:
        """Return 0 to count - 1."""
        return torch.arange(count, device=self.valid.device)

    def next_positions(self) -> Float[Tensor, " b"]:
        """Return zeros: nothing came before."""
        return self.positions.new_zeros(len(self.positions))

    def admit(self, valid: Tensor | None, positions: Tensor, count: int) -> tuple[Tensor | None, Tensor]:
        """Keep validity and positions, and return them."""
        self.padded = valid is not None
        self.valid = self.valid.new_ones(len(self.valid), count) if valid is None else valid
        self.positions = positions.float().expand(len(self.valid), -1)
        return valid, self.positions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Keep the keys and values of one layer, and return them."""
        self.pairs.append((keys, values))
        return keys, values

    def commit(self, count: int) -> None:
        """Nothing moves: see `prefix`."""

    def prefix(self) -> PrefixKV:
        """Return what was kept."""
        keys, values = zip(*self.pairs, strict=True)
        return PrefixKV(tuple(keys), tuple(values), self.valid, self.positions, self.padded)


@dataclass(frozen=True)
class CrossKV:
    """Keys and values of a context for each layer, computed once per observation. valid: ``[B, S]``, None = all."""

    keys_values: tuple[KeysValues, ...]
    valid: Bool[Tensor, "b s"] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        return _bytes([part for pair in self.keys_values for part in pair])


Cache = KVCache | PrefixKV | Scratch | Recording


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
