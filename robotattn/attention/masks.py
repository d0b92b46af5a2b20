"""Attention masks as predicates on (row, query slot, key slot), composed with & and |; True = attend.

A *slot* is an index into the padded sequence, the same for all rows of a batch; a cache continues the count, so one
predicate serves a full pass and every cached step. A predicate becomes a bool tensor, nothing at all where nothing is
hidden, a FlexAttention block mask, or a picture of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

Slots = int | Tensor


class Mask:
    """Who may read whom. `rows`: the batch size it was made for, None where all rows are alike."""

    rows: int | None = None

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell for integer tensors that broadcast whether a query slot may read a key slot."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Either(self, other)

    def __invert__(self) -> Mask:
        return Opposite(self)

    def tensor(self, queries: Slots, keys: Slots, device: torch.device | str | None = None) -> Bool[Tensor, ...]:
        """Return ``[n, s]``, or ``[rows, 1, n, s]`` where rows differ. queries, keys: a count or a vector of slots."""
        query, key = _slots(queries, device)[:, None], _slots(keys, device)[None, :]
        if self.rows is None:
            return self.allows(query.new_zeros(()), query, key).expand(len(query), key.shape[1])
        row = torch.arange(self.rows, device=query.device)[:, None, None]
        return self.allows(row, query, key).expand(self.rows, len(query), key.shape[1])[:, None]

    def build(self, queries: Slots, keys: Slots, device: torch.device | str | None = None) -> Tensor | None:
        """Return what `attend` takes: None if nothing is hidden. Looked up on CPUs only: elsewhere it would wait."""
        mask = self.tensor(queries, keys, device)
        return None if mask.device.type == "cpu" and bool(mask.all()) else mask

    def block_mask(
        self, queries: int, keys: int, device: torch.device | str = "cpu", first_query: int = 0
    ) -> BlockMask:
        """Return the mask for FlexAttention; query i is slot `first_query` + i."""

        def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.allows(row, query + first_query, key)

        return create_block_mask(rule, self.rows, None, queries, keys, device=str(device))

    def settled(self, old: int, new: int) -> bool:
        """Tell whether no slot before `old` reads one of the `new` slots from there on: then caching is right."""
        return not bool(self.tensor(old, torch.arange(old, old + new)).any())

    def hides_nothing(self, old: int, new: int) -> bool:
        """Tell, without looking at pairs, whether the `new` slots behind `old` ones read all of them and each other.

        False where that would need a look: it saves the time of building a mask for each token of a cached decoding.
        """
        return False

    def picture(self, queries: int, keys: int, row: int = 0) -> Int[Tensor, "n s"]:
        """Return 1 where a query (down) reads a key (across), 0 elsewhere, as uint8."""
        mask = self.tensor(queries, keys)
        return (mask if mask.dim() == 2 else mask[row, 0]).to(torch.uint8)

    def text(self, queries: int, keys: int, row: int = 0) -> str:
        """Draw the mask with one character a pair: # is read, . is hidden."""
        return "\n".join("".join(".#"[cell] for cell in line) for line in self.picture(queries, keys, row).tolist())


@dataclass(frozen=True)
class Everything(Mask):
    """Everybody reads everybody."""

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return (query == query) & (key == key)

    def settled(self, old: int, new: int) -> bool:
        """Tell whether there is nobody who should have read the new slots."""
        return old == 0 or new == 0

    def hides_nothing(self, old: int, new: int) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class Causal(Mask):
    """A slot reads itself and what came before."""

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return key <= query

    def settled(self, old: int, new: int) -> bool:
        """Return True: nobody reads what comes later."""
        return True

    def hides_nothing(self, old: int, new: int) -> bool:
        """Tell whether there is one new slot, the last of all."""
        return new == 1


@dataclass(frozen=True)
class Window(Mask):
    """A slot reads those nearer than `size`, on both sides; with `Causal`, the last `size` slots including itself."""

    size: int

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return (query - key).abs() < self.size

    def hides_nothing(self, old: int, new: int) -> bool:
        """Tell whether the first slot is near enough to the last."""
        return old + new <= self.size


@dataclass(frozen=True)
class Prefix(Mask):
    """Everybody reads the first `length` slots; `Prefix(P) | Causal()` is the prefix language model's mask."""

    length: int

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return (query == query) & (key < self.length)

    def settled(self, old: int, new: int) -> bool:
        """Tell whether the new slots lie behind the prefix."""
        return old == 0 or new == 0 or old >= self.length


@dataclass(frozen=True)
class Blocks(Mask):
    """Consecutive blocks of the given sizes, the last one open-ended: a slot reads its own block and earlier ones."""

    sizes: tuple[int, ...]

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return self._block(key) <= self._block(query)

    def settled(self, old: int, new: int) -> bool:
        """Tell whether the new slots begin a block."""
        return old in (0, *self._edges()) or new == 0

    def hides_nothing(self, old: int, new: int) -> bool:
        """Tell whether all new slots are of one block: nothing is behind them."""
        return not any(old < edge < old + new for edge in self._edges())

    def _edges(self) -> list[int]:
        return list(accumulate(self.sizes[:-1]))

    def _block(self, slot: Tensor) -> Tensor:
        return sum(((slot >= edge).int() for edge in self._edges()), start=torch.zeros_like(slot, dtype=torch.int32))


class Padding(Mask):
    """Everybody reads the real keys of the own row. valid: bool ``[rows, keys]``, True = real; no key beyond it."""

    def __init__(self, valid: Bool[Tensor, "b s"]) -> None:
        self.valid = _checked(valid)
        self.rows = len(valid)

    def __repr__(self) -> str:
        return f"Padding({list(self.valid.shape)})"

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        last = self.valid.shape[1] - 1
        return self.valid[row, key.clamp(max=last)] & (key <= last) & (query == query)


@dataclass(frozen=True)
class Written(Mask):
    """Everybody reads the slots of a cache that hold something: those before `length`."""

    length: int | Tensor

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return (query == query) & (key < self.length)


@dataclass(frozen=True)
class Rule(Mask):
    """A predicate of your own: function(row, query, key) → bool tensor."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    name: str = "rule"

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return self.function(row, query, key)


class _Pair(Mask):
    sign = ""

    def __init__(self, first: Mask, second: Mask) -> None:
        sizes = {mask.rows for mask in (first, second)} - {None}
        if len(sizes) > 1:
            raise ValueError(f"masks for batches of {first.rows} and {second.rows} rows cannot be combined")
        self.first, self.second, self.rows = first, second, next(iter(sizes), None)

    def __repr__(self) -> str:
        return f"({self.first!r} {self.sign} {self.second!r})"


class Both(_Pair):
    """What two masks both allow."""

    sign = "&"

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return self.first.allows(row, query, key) & self.second.allows(row, query, key)

    def settled(self, old: int, new: int) -> bool:
        """Tell whether no old slot reads a new one."""
        return self.first.settled(old, new) or self.second.settled(old, new) or super().settled(old, new)

    def hides_nothing(self, old: int, new: int) -> bool:
        """Tell whether neither mask hides anything."""
        return self.first.hides_nothing(old, new) and self.second.hides_nothing(old, new)


class Either(_Pair):
    """What one of two masks allows."""

    sign = "|"

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return self.first.allows(row, query, key) | self.second.allows(row, query, key)

    def settled(self, old: int, new: int) -> bool:
        """Tell whether no old slot reads a new one."""
        return self.first.settled(old, new) and self.second.settled(old, new)

    def hides_nothing(self, old: int, new: int) -> bool:
        """Tell whether one of the masks hides nothing."""
        return self.first.hides_nothing(old, new) or self.second.hides_nothing(old, new)


class Opposite(Mask):
    """What a mask forbids."""

    def __init__(self, mask: Mask) -> None:
        self.mask, self.rows = mask, mask.rows

    def __repr__(self) -> str:
        return f"~{self.mask!r}"

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether a query slot may read a key slot."""
        return ~self.mask.allows(row, query, key)


def padding(valid: Bool[Tensor, "b s"]) -> Bool[Tensor, "b 1 1 s"]:
    """Let every query attend to the real keys only. valid: True = real."""
    return _checked(valid)[:, None, None, :]


def causal(queries: Int[Tensor, " n"], keys: Int[Tensor, " s"]) -> Bool[Tensor, "n s"]:
    """Let a query attend to keys of its own slot and before. Slots are absolute, so a cache needs no offset."""
    return Causal().tensor(queries, keys)


def combine(*masks: Bool[Tensor, ...] | None) -> Bool[Tensor, ...] | None:
    """Return the mask that all masks allow; None stands for 'everything'."""
    given = [mask for mask in masks if mask is not None]
    return reduce(torch.logical_and, given) if given else None


def _slots(slots: Slots, device: torch.device | str | None) -> Tensor:
    return torch.arange(slots, device=device) if isinstance(slots, int) else slots.to(device)


def _checked(valid: Tensor) -> Tensor:
    if valid.dtype != torch.bool or valid.dim() != 2:
        raise TypeError(f"validity must be bool [batch, keys] with True = real, got {valid.dtype} {list(valid.shape)}")
    return valid
