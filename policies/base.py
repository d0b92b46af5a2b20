"""The policy contract: observation batch → tokens → memory → actions, so that each stage can be timed on its own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robotattn.attention.layers import KeysValues
from robotattn.attention.masks import Mask
from robotattn.tokens.normaliser import Normaliser, Statistics
from robotattn.tokens.sequence import Tokens
from robotattn.types import ACTION_SIZE, STATE_SIZE, ActionMode

Batch = Mapping[str, Any]
CANNOT_CONTINUE = "this policy cannot go on from running actions; blockwise with head: flow can"


@dataclass(frozen=True)
class Memory:
    """What the prefix leaves behind, one per observation and never changed: decoding may be repeated from it.

    context: keys and values of each decoder layer, ``[B, kv_heads, N, d]``. mask: ``[B, N]``, True = real.
    condition: ``[B, D]``, added to every action query (None: nothing is). state: raw proprioception ``[B, 13]``.
    """

    context: tuple[KeysValues, ...]
    mask: Tensor
    condition: Tensor | None
    state: Tensor


class Policy(nn.Module, ABC):
    """A policy: instruction, images and proprioception in, a chunk of actions in physical units out.

    Batches are dicts of tensors on the policy's device (see `move`); sample i of the output depends on sample i of
    the batch alone. A policy without statistics refuses to act and to learn.
    """

    def __init__(self, action_mode: ActionMode) -> None:
        super().__init__()
        self.action_mode: ActionMode = action_mode
        sizes = {"state": STATE_SIZE, "action": ACTION_SIZE[action_mode], "position": 4}
        self.normaliser = Normaliser(sizes)

    @abstractmethod
    def tokenize(self, batch: Batch) -> Tokens:
        """Turn observations into one sequence of tokens; converts uint8 images on the device."""

    @abstractmethod
    def prefill(self, tokens: Tokens) -> Memory:
        """Encode the tokens, once per observation."""

    @abstractmethod
    def decode(self, memory: Memory) -> Tensor:
        """Return actions ``[B, H, A]`` in physical units, the gripper as 0 (closed) or 1 (open)."""

    @abstractmethod
    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``loss``, to be minimised, and its parts and errors, detached, for the log."""

    @property
    @abstractmethod
    def chunk_tokens(self) -> int:
        """Number of tokens that a chunk is decoded from."""

    @abstractmethod
    def mask(self, prefix: int) -> Mask:
        """Return who may depend on whom, over all layers: `prefix` tokens of an observation, then the chunk's."""

    @abstractmethod
    def sequence(self, tokens: Tokens, actions: Tensor) -> Tensor:
        """Return what becomes of all tokens ``[B, N + M, D]``: an observation's, and M of a chunk ``[B, M, D]``.

        This is the pass of `prefill` and `decode`, caches included, from given vectors: what an audit perturbs.
        """

    @torch.no_grad()
    def act(self, batch: Batch) -> Tensor:
        """Return actions ``[B, H, A]`` for a batch of observations, without gradients."""
        return self.decode(self.prefill(self.tokenize(batch)))

    @property
    def continues(self) -> bool:
        """Whether this policy can go on from actions that are running (`act_on`)."""
        return False

    def act_on(self, batch: Batch, running: Tensor, weights: Tensor) -> Tensor:
        """Return actions ``[B, H, A]`` as `act` does, whose first M go on from those that are running.

        running: ``[B, M, A]``, as this policy's own actions from the batch's observations. weights: how much each is
        to be met, ``[B, M]``, 0 to 1. Raises ValueError if M is more than a chunk, or if the policy cannot.
        """
        raise ValueError(CANNOT_CONTINUE)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def statistics(self) -> Statistics | None:
        """What values are normalised with, None before `set_statistics`."""
        return self.normaliser.statistics

    def set_statistics(self, statistics: Statistics) -> None:
        """Take over a dataset's statistics; raise ValueError if a key is missing or has another size."""
        self.normaliser.set_statistics(statistics)

    def move(self, batch: Batch) -> dict[str, Any]:
        """Copy a batch to the policy's device; images stay uint8 on the way."""
        return _move(batch, self.device)


def _move(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {
        key: _move(value, device) if isinstance(value, Mapping) else value.to(device, non_blocking=True)
        for key, value in batch.items()
    }


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average over the valid scalars: sum / count, and 0 if there is none. mask: bool, leading dimensions of values.

    What lies in the padding has no influence, not even NaN and not on the gradient.
    """
    mask = mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim())).expand_as(values)
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def action_errors(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return the mean absolute error over the valid scalars of ``[B, H, A]``; mask ``[B, H]``, False = padding."""
    target = target.masked_fill(~mask[..., None], 0.0)  # the gradient of |p - NaN| is NaN even where it is not counted
    return masked_mean((predicted - target).abs(), mask)
