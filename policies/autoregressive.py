"""Autoregressive policy: decoder-only, every action dimension a token, after RT-1, RT-2 and OpenVLA.

One stack of layers over [scene, instruction | proprioception | target | action tokens]. The prefix is read in both
directions within its blocks; action tokens are causal, time-major (all dimensions of the first action, then of the
second), each one of 256 bins. Training: next-token cross-entropy on the action tokens alone, which are shifted right
by one. Acting: one prefill, then a token at a time with cached keys and values.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from robotattn.attention import Transformer
from robotattn.attention.masks import Mask
from robotattn.policies.base import Memory
from robotattn.policies.bin_head import BinHead
from robotattn.policies.blocks import BlockPolicy, causal, net, recall, remember
from robotattn.policies.fields import check_fields
from robotattn.policies.sampling import GREEDY, Sampling, choose
from robotattn.tokens.sequence import Tokens


@dataclass(frozen=True)
class AutoregressiveConfig:
    """What makes an autoregressive policy. A policy needs cameras or object tokens, or both."""

    action_mode: Literal["tool", "joint"] = "tool"
    """Offsets of the tool (dx, dy, dz, dyaw, gripper) or seven joint targets and the gripper."""
    cameras: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Camera name: height and width in pixels, in a fixed order."""
    objects: bool = False
    """Read object tokens (poses and colours) from the simulator."""
    frames: int = 1
    """Looks at the scene: now, and one at each of the control ticks before. From 2 on, motion is seen."""
    frame_gap: int = 1
    """Control ticks from one look to the next: slow motion is seen more exactly from looks farther apart."""
    vocabulary: int = 512
    """Number of token ids of the instruction."""
    chunk: int = 4
    """Actions in a chunk (horizon H); each has as many tokens as dimensions."""
    width: int = 128
    """Size of a token."""
    heads: int = 4
    """Attention heads; divide the width."""
    kv_heads: int | None = None
    """Key and value heads: null = as many as heads; fewer, which divide them, share (1 = multi-query)."""
    feedforward: int = 256
    """Hidden size of the feed-forward layers."""
    layers: int = 3
    """Layers of the decoder."""
    expected: bool = False
    """Act with the mean of the bins under their distribution, not with the likeliest bin."""
    stem: Literal["conv", "patch"] = "conv"
    """Image stem: convolutions with a stride-4 map, or the ViT's plain patches."""
    patch: int = 16
    """Patch size in pixels; the convolutional stem has 16."""
    stem_channels: int = 48
    """Channels of the convolutional stem's map."""
    text_width: int = 64
    """Size of a token inside the instruction encoder."""
    action_weight: float = 0.2
    """Weight of the cross-entropy; near 1 it starves the grounding."""
    pose_weight: float = 1.0
    """Weight of the target-pose auxiliary."""
    attention_weight: float = 0.2
    """Weight of the supervision of grounding's attention."""
    colour_jitter: float = 0.1
    """Strength of the random brightness, contrast and colour balance of training images."""

    def __post_init__(self) -> None:
        check_fields(self, sizes=("layers",), weights=("action_weight",))

    def build(self) -> "Autoregressive":
        """Return a freshly initialised policy."""
        return Autoregressive(self)


class Autoregressive(BlockPolicy):
    """One decoder over prefix and action tokens."""

    def __init__(self, config: AutoregressiveConfig) -> None:
        super().__init__(config)
        self.config: AutoregressiveConfig = config
        self.decoder = net(config)
        self.head = BinHead(self.bins.size, self.bins.bins, config.width)
        self.start = nn.Parameter(torch.randn(config.width))
        self.places = nn.Parameter(torch.randn(config.chunk * self.bins.size, config.width))

    @property
    def nets(self) -> tuple[Transformer, Transformer]:
        """The decoder, for the prefix and for the actions."""
        return self.decoder, self.decoder

    def prefill(self, tokens: Tokens) -> Memory:
        """Run the prefix through the decoder and keep its keys and values; nothing after it will change them."""
        _, kv = self.encode(tokens)
        return remember(kv, tokens, tokens.group("target")[:, 0])

    def decode(
        self,
        memory: Memory,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        horizon: int | None = None,
    ) -> Tensor:
        """Return actions ``[B, H, A]`` in physical units, the gripper 0 or 1.

        sampling: how to choose; all but greedy need a generator. horizon: only the first so many actions of the chunk,
        for a fraction of the time.
        """
        ids, offsets = self.choose(memory, sampling, generator, horizon)
        full = torch.zeros(len(ids), *self.units.shape, dtype=offsets.dtype, device=offsets.device)
        full[:, : offsets.shape[1]] = offsets
        return self.units.actions(full, memory.state)[:, : offsets.shape[1]]

    def errors(self, memory: Memory, offsets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cross-entropy of each token, and which were scored best and which clipped."""
        return self.bin_errors(memory, offsets)

    def greedy(self, memory: Memory) -> Tensor:
        """Return bins ``[B, H, A]``, each the best given the ones chosen before it."""
        return self.choose(memory)[0]

    def scores(self, memory: Memory, ids: Tensor) -> Tensor:
        """Return the scores of all bins ``[B, H, A, bins]`` given the true earlier tokens (teacher forcing).

        ids: bins of the whole chunk ``[B, H, A]``; the last token is not read by anything.
        """
        out = self.decoder(self.action_tokens(memory, ids), self.mask(memory.mask.shape[1]), cache=recall(memory))
        return self.head.scores(out.unflatten(1, ids.shape[1:]))

    def action_tokens(self, memory: Memory, ids: Tensor) -> Tensor:
        """Return what the decoder reads ``[B, H A, D]`` for bins ``[B, H, A]``: shifted right by one token."""
        tokens = self.head.embed(ids, torch.arange(self.bins.size, device=ids.device)).flatten(1, 2)
        return torch.cat([self.start.expand(len(ids), 1, -1), tokens[:, :-1]], dim=1) + self._inputs(memory)

    def choose(
        self,
        memory: Memory,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        horizon: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return bins ``[B, H, A]``, each chosen after, and given, the ones before it, and their offsets.

        With `expected`, the offsets are means over the bins, and the bins are those that hold them.
        """
        rows, (chunk, size) = len(memory.state), self.units.shape
        count = chunk if horizon is None else horizon
        if not 1 <= count <= chunk:
            raise ValueError(f"horizon: {horizon} is not in 1..{chunk}")
        cache, inputs, mask = recall(memory).grow(count * size), self._inputs(memory), self.mask(memory.mask.shape[1])
        x, chosen, values = self.start.expand(rows, -1), [], []
        for place in range(count * size):
            step, dimension = divmod(place, size)
            out = self.decoder(x[:, None] + inputs[:, place : place + 1], mask, cache=cache)[:, 0]
            scores = self.head.score(out, dimension)
            ids = choose(scores, sampling, generator)
            if self.config.expected:
                value = self.bins.mean(scores.float().softmax(dim=-1), step, dimension)
                ids = self.bins.nearest(value, step, dimension)
                values.append(value)
            chosen.append(ids)
            x = self.head.embed(ids, torch.tensor(dimension, device=ids.device))
        ids = torch.stack(chosen, dim=1).unflatten(1, (count, size))
        if self.config.expected:
            return ids, torch.stack(values, dim=1).unflatten(1, (count, size))
        return ids, self.bins.decode(ids)

    def mask(self, prefix: int) -> Mask:
        """Return who reads whom behind a prefix of so many tokens: an action token, it and all earlier tokens."""
        return causal(prefix, len(self.places))
