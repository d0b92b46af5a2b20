"""Mask blocks of a policy's sequence: each block reads itself and the blocks before it.

Scene and instruction are one block, proprioception the next, the fused target token the last of the prefix; actions
come after. Were proprioception in the first block, the net would read the target off the arm's motion (late in a
demonstration the arm stands at it), and at the start, where that tells nothing, it would fail (the order is that of
pi0, Black et al. 2024). `BlockPolicy` is what the policies have in common whose actions follow such a prefix.
"""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn

from robotattn.attention import PrefixKV, Transformer, TransformerConfig, row_positions
from robotattn.attention.masks import Blocks, Causal, Mask
from robotattn.attention.masks import Prefix as Begin
from robotattn.policies.base import Batch, Memory, Policy, masked_mean
from robotattn.policies.bin_head import cross_entropy, forced_and_free
from robotattn.policies.chunk_units import ChunkUnits
from robotattn.policies.fields import Fields, auxiliary_weights, total
from robotattn.policies.prefix import Prefix
from robotattn.tokens.actions import ActionBins
from robotattn.tokens.normaliser import Statistics
from robotattn.tokens.sequence import Tokens
from robotattn.types import ACTION_SIZE, ActionMode

OWN = ("proprioception", "target")  # one token each, at the end of a grounded prefix


def joined(prefix: int, actions: int) -> Mask:
    """Return the mask of a prefix and one block of actions after it, which read one another."""
    return Blocks((prefix - len(OWN), *(1 for _ in OWN), actions))


def causal(prefix: int, actions: int) -> Mask:
    """Return the mask of a prefix and of actions after it, each a block of its own."""
    return joined(prefix, actions) & (Begin(prefix) | Causal())


def check_order(tokens: Tokens) -> None:
    """Raise ValueError if the prefix does not end in the tokens that have blocks of their own."""
    end = tokens.values.shape[1]
    for place, name in enumerate(OWN, start=end - len(OWN)):
        if tokens.slices.get(name) != slice(place, place + 1):
            raise ValueError(f"the prefix must end in {list(OWN)}, one token each, got {dict(tokens.slices)}")


def remember(kv: PrefixKV, tokens: Tokens, condition: Tensor) -> Memory:
    """Keep the keys and values of an encoded prefix."""
    return Memory(tuple(zip(kv.keys, kv.values, strict=True)), tokens.mask, condition, tokens.state)


def recall(memory: Memory) -> PrefixKV:
    """Return the prefix that `remember` kept, as the cache that action tokens read."""
    keys, values = zip(*memory.context, strict=True)
    padded = memory.mask.device.type != "cpu" or not bool(memory.mask.all())  # elsewhere a look would have to wait
    return PrefixKV(keys, values, memory.mask, row_positions(memory.mask), padded)


class BlockFields(Fields, Protocol):
    """The fields of the configs of policies whose actions follow a prefix."""

    @property
    def action_mode(self) -> ActionMode: ...
    @property
    def layers(self) -> int: ...
    @property
    def action_weight(self) -> float: ...


def net(config: BlockFields) -> Transformer:
    """Return a stack of a policy's layers."""
    return Transformer(
        TransformerConfig(config.layers, config.width, config.heads, config.feedforward, kv_heads=config.kv_heads)
    )


class BlockPolicy(Policy):
    """A policy whose actions follow a grounded prefix, with units and bins of their own for each step of the chunk.

    places: a learned vector for each action token, made by the policy itself.
    """

    config: BlockFields
    places: nn.Parameter

    def __init__(self, config: BlockFields) -> None:
        super().__init__(config.action_mode)
        self.config = config
        self.prefix = Prefix(config, self.normaliser)
        self.units = ChunkUnits(config.chunk, config.action_mode)
        self.bins = ActionBins(config.chunk, ACTION_SIZE[config.action_mode])

    @property
    @abstractmethod
    def nets(self) -> tuple[Transformer, Transformer]:
        """The net of the prefix, and that of the actions: two, or one for both."""

    @property
    def chunk_tokens(self) -> int:
        """Number of action tokens."""
        return len(self.places)

    @abstractmethod
    def errors(self, memory: Memory, offsets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the error of each number of a chunk ``[B, H, A]``, and further numbers of that shape to be logged."""

    @abstractmethod
    def scores(self, memory: Memory, ids: Tensor) -> Tensor:
        """Return the scores of all bins ``[B, H, A, bins]`` given the true earlier tokens (teacher forcing)."""

    @abstractmethod
    def greedy(self, memory: Memory) -> Tensor:
        """Return bins ``[B, H, A]``, each the best given the ones chosen before it."""

    def set_statistics(self, statistics: Statistics) -> None:
        """Take over a dataset's statistics; raises ValueError if they do not fit."""
        super().set_statistics(statistics)
        self.units.set_statistics(statistics)
        self.bins.set_ranges(*self.units.ranges())

    def tokenize(self, batch: Batch) -> Tokens:
        """Turn observations into tokens."""
        return self.prefix(batch).tokens

    def encode(self, tokens: Tokens) -> tuple[Tensor, PrefixKV]:
        """Return what becomes of a prefix ``[B, N, D]``, and its keys and values: nothing after it changes them."""
        check_order(tokens)
        return self.nets[0].prefix(tokens.values, joined(tokens.values.shape[1], 0), valid=tokens.mask)

    def sequence(self, tokens: Tokens, actions: Tensor) -> Tensor:
        """Return what becomes of a prefix and of action tokens behind it, which read the kept prefix."""
        seen, kv = self.encode(tokens)
        return torch.cat([seen, self.nets[1](actions, self.mask(seen.shape[1]), cache=kv)], dim=1)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted sum and its parts; in the batch, ``labels`` feed the auxiliary losses."""
        labels, mask = batch["labels"], batch["actions_mask"]
        seen = self.prefix(batch, labels)
        memory = self.prefill(seen.tokens)
        offsets = self.units.offsets(batch["actions"].masked_fill(~mask[..., None], 0.0), batch["state"])
        errors, more = self.errors(memory, offsets)
        parts = {
            "action": masked_mean(errors[..., :-1], mask),
            "gripper": masked_mean(errors[..., -1], mask),
            **self.prefix.losses(seen, labels),
            **{name: masked_mean(values, mask) for name, values in more.items()},
        }
        actions = self.config.action_weight * masked_mean(errors, mask)
        return total(actions, parts, auxiliary_weights(self.config))

    @torch.no_grad()
    def attention_map(self, batch: Batch) -> dict[str, Tensor]:
        """Return where grounding looks: camera → ``[B, rows, columns]``, each map summing to 1."""
        return self.prefix.maps(batch)

    @torch.no_grad()
    def accuracy(self, batch: Batch) -> dict[str, Tensor]:
        """Return the share of right bins ``[H, A]``, ``forced`` given the true earlier ones, ``free`` its own."""
        memory = self.prefill(self.tokenize(batch))
        return forced_and_free(self.bins, self.units, memory, batch, self.scores, self.greedy)

    def bin_errors(self, memory: Memory, offsets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cross-entropy of each bin, which bins are the likeliest, and which numbers had none."""
        ids, clipped = self.bins.encode(offsets)
        logits = self.scores(memory, ids)
        right = logits.argmax(dim=-1) == ids
        return cross_entropy(logits, ids), {"accuracy": right.float(), "clipped": clipped.float()}

    def _inputs(self, memory: Memory) -> Tensor:
        """Return what every action token starts with ``[B, n, D]``: its place, and what the prefix found."""
        assert memory.condition is not None
        return self.places + memory.condition[:, None]
