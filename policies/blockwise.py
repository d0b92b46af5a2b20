"""Block-masked policy: scene | proprioception | target | actions, where nothing ever reads a later block.

After pi0 (Black et al. 2024): the prefix has its own weights, and the actions, a second and equally deep net, read the
prefix's keys and values of the same depth. So the prefix is encoded once per observation, whatever the actions are.
Two heads. ``flow``: the actions are one block, denoised together in K steps of an integration from noise to a chunk.
``autoregressive``: each action is a block of its own, 256 bins a dimension, and reads the prefix and earlier actions.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from robotattn.attention import FeedForward, PrefixKV, Scratch, Transformer, sinusoidal
from robotattn.attention.masks import Mask
from robotattn.policies.base import Batch, Memory
from robotattn.policies.bin_head import BinHead
from robotattn.policies.blocks import BlockPolicy, causal, joined, net, recall, remember
from robotattn.policies.fields import check_fields
from robotattn.policies.guidance import BETA, Field, Guide, guided
from robotattn.policies.sampling import GREEDY, Sampling, choose
from robotattn.tokens.sequence import Tokens

TIME_SCALE = 1000.0  # time runs from 0 to 1, the sines of its encoding from 1 to 10,000
EARLY = 2.0 / 3.0  # exponent of the noise level: more samples with much noise, a Beta(1.5, 1)


@dataclass(frozen=True)
class BlockwiseConfig:
    """What makes a block-masked policy. A policy needs cameras or object tokens, or both."""

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
    head: Literal["flow", "autoregressive"] = "flow"
    """Denoise all actions together, or choose one after the other."""
    chunk: int = 8
    """Actions in a chunk (horizon H)."""
    width: int = 128
    """Size of a token."""
    heads: int = 4
    """Attention heads; divide the width."""
    kv_heads: int | None = None
    """Key and value heads: null = as many as heads; fewer, which divide them, share (1 = multi-query)."""
    feedforward: int = 256
    """Hidden size of the feed-forward layers."""
    layers: int = 3
    """Layers of the prefix, and of the actions."""
    steps: int = 10
    """Flow: integration steps K."""
    method: Literal["euler", "midpoint"] = "euler"
    """Flow: one evaluation a step, or two and second order."""
    stem: Literal["conv", "patch"] = "conv"
    """Image stem: convolutions with a stride-4 map, or the ViT's plain patches."""
    patch: int = 16
    """Patch size in pixels; the convolutional stem has 16."""
    stem_channels: int = 48
    """Channels of the convolutional stem's map."""
    text_width: int = 64
    """Size of a token inside the instruction encoder."""
    action_weight: float = 1.0
    """Weight of the actions' loss (flow: squared error; autoregressive: cross-entropy, where 0.2 is better)."""
    pose_weight: float = 1.0
    """Weight of the target-pose auxiliary."""
    attention_weight: float = 0.2
    """Weight of the supervision of grounding's attention."""
    colour_jitter: float = 0.1
    """Strength of the random brightness, contrast and colour balance of training images."""

    def __post_init__(self) -> None:
        check_fields(self, sizes=("layers", "steps"), weights=("action_weight",))

    def build(self) -> "Blockwise":
        """Return a freshly initialised policy."""
        return Blockwise(self)


class Blockwise(BlockPolicy):
    """Prefix and actions, each with weights of its own, joined by the prefix's keys and values at every depth."""

    def __init__(self, config: BlockwiseConfig) -> None:
        super().__init__(config)
        self.config: BlockwiseConfig = config
        self.encoder, self.expert = net(config), net(config)
        self.places = nn.Parameter(torch.randn(config.chunk, config.width))
        self.flow = FlowHead(self.bins.size, config.width) if config.head == "flow" else None
        self.choice = None if self.flow else BinHead(self.bins.size, self.bins.bins, config.width)
        self.start = None if self.flow else nn.Parameter(torch.randn(config.width))

    @property
    def nets(self) -> tuple[Transformer, Transformer]:
        """The encoder of the prefix, and the actions' own net."""
        return self.encoder, self.expert

    def prefill(self, tokens: Tokens) -> Memory:
        """Encode the prefix and keep its keys and values at every depth; nothing after it will change them."""
        seen, kv = self.encode(tokens)
        return remember(kv, tokens, tokens.group("target")[:, 0] + seen[:, -1])

    def decode(
        self,
        memory: Memory,
        generator: torch.Generator | None = None,
        sampling: Sampling = GREEDY,
        guide: Guide | None = None,
    ) -> Tensor:
        """Return actions ``[B, H, A]`` in physical units, the gripper 0 or 1.

        generator: for what is drawn. Flow starts from noise drawn with it, and without one from zero: deterministic,
        but it gives up on demonstrations with several modes. The autoregressive head draws as `sampling` says.
        guide: of the flow head, what its chunks are pulled to.
        """
        if self.flow is not None:
            offsets = self.units.restore(self.denoise(memory, generator, guide))
        else:
            offsets = self.bins.decode(self.choose(memory, sampling, generator))
        return self.units.actions(offsets, memory.state)

    def errors(self, memory: Memory, offsets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the error of each number: of the velocity squared, or the cross-entropy of its bin."""
        return (self._flow_errors(memory, offsets), {}) if self.flow else self.bin_errors(memory, offsets)

    # ------------------------------------------------------------------------------------------ flow matching

    @property
    def continues(self) -> bool:
        """Whether this policy can go on from actions that are running: the flow head can."""
        return self.flow is not None

    @torch.inference_mode(False)  # whose tensors take no gradients, and guidance needs some
    @torch.no_grad()
    def act_on(self, batch: Batch, running: Tensor, weights: Tensor, beta: float = BETA) -> Tensor:
        """Return actions as `act` does, pulled to those that are running; see `Policy.act_on`. Flow only."""
        if not self.continues:
            return super().act_on(batch, running, weights)
        memory = self.prefill(self.tokenize(batch))
        guide = Guide.of(running.to(memory.state), weights.to(memory.state), self.config.chunk, beta)
        target = self.units.standardise(self.units.offsets(guide.target, memory.state))
        return self.decode(memory, guide=replace(guide, target=target))

    def velocity(
        self, memory: Memory, noisy: Tensor, time: Tensor, scratch: Scratch | PrefixKV | None = None
    ) -> Tensor:
        """Return where noisy chunks ``[B, H, A]`` move at times ``[B]`` (0 = noise, 1 = chunk), per unit of time.

        scratch: the prefix, with room for the actions unless gradients are to flow, if several calls read it.
        """
        assert self.flow is not None
        x = self.flow.embed(noisy, time) + self._inputs(memory)
        return self.flow.out(
            self.expert(x, self.mask(memory.mask.shape[1]), cache=recall(memory) if scratch is None else scratch)
        )

    def denoise(self, memory: Memory, generator: torch.Generator | None = None, guide: Guide | None = None) -> Tensor:
        """Integrate from noise, or without a generator from zero, to standardised chunks ``[B, H, A]``.

        guide: what they are pulled to on the way. Then no gradients flow through the result.
        """
        x = memory.state.new_zeros(len(memory.state), *self.units.shape)
        if generator is not None:
            x = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
        field, steps = self._field(memory, guide), self.config.steps
        for step in range(steps):
            x = x + self._slope(field, x, step / steps, 1 / steps) / steps
        return x

    def _field(self, memory: Memory, guide: Guide | None) -> Field:
        prefix = recall(memory)
        cache = prefix.scratch(self.config.chunk) if guide is None else prefix  # a scratch stops gradients

        def velocity(x: Tensor, time: float) -> Tensor:
            return self.velocity(memory, x, x.new_full((len(x),), time), cache)

        if guide is None:
            return velocity
        most = float(self.config.steps)  # a pull of more than 1 over a step would overshoot, of 2 diverge
        return guided(velocity, replace(guide, beta=min(guide.beta, most)))

    def _slope(self, field: Field, x: Tensor, time: float, step: float) -> Tensor:
        """Return the velocity that carries x over one step: that of its start, or of its middle."""
        slope = field(x, time)
        return slope if self.config.method == "euler" else field(x + slope * (step / 2), time + step / 2)

    def _flow_errors(self, memory: Memory, offsets: Tensor) -> Tensor:
        """Return squared errors ``[B, H, A]`` of the velocity at a random time between noise and the chunk."""
        chunk = self.units.standardise(offsets)
        noise = torch.randn_like(chunk)
        time = 1.0 - torch.rand(len(chunk), device=chunk.device) ** EARLY
        noisy = torch.lerp(noise, chunk, time[:, None, None])
        return (self.velocity(memory, noisy, time).float() - (chunk - noise)).square()

    # ------------------------------------------------------------------------------------------ one after the other

    def scores(self, memory: Memory, ids: Tensor) -> Tensor:
        """Return the scores of all bins ``[B, H, A, bins]`` given the true earlier actions (teacher forcing).

        ids: bins of the whole chunk ``[B, H, A]``; the last action is not read by anything.
        """
        assert self.choice is not None
        out = self.expert(self.action_tokens(memory, ids), self.mask(memory.mask.shape[1]), cache=recall(memory))
        return self.choice.scores(out[:, :, None].expand(ids.shape + out.shape[-1:]))

    def action_tokens(self, memory: Memory, ids: Tensor) -> Tensor:
        """Return what the actions' net reads ``[B, H, D]`` for bins ``[B, H, A]``: shifted right by one action."""
        assert self.start is not None
        start = self.start.expand(len(ids), 1, -1)
        return torch.cat([start, self._embed(ids[:, :-1])], dim=1) + self._inputs(memory)

    def choose(self, memory: Memory, sampling: Sampling = GREEDY, generator: torch.Generator | None = None) -> Tensor:
        """Return bins ``[B, H, A]``, each action chosen after, and given, the ones before it."""
        assert self.choice is not None and self.start is not None
        cache, inputs, mask = (
            recall(memory).grow(self.config.chunk),
            self._inputs(memory),
            self.mask(memory.mask.shape[1]),
        )
        x, chosen = self.start.expand(len(memory.state), 1, -1), []
        for step in range(self.config.chunk):
            out = self.expert(x + inputs[:, step : step + 1], mask, cache=cache)
            scores = self.choice.scores(out[:, :, None].expand(-1, -1, self.bins.size, -1))
            chosen.append(choose(scores, sampling, generator))
            x = self._embed(chosen[-1])
        return torch.cat(chosen, dim=1)

    def greedy(self, memory: Memory) -> Tensor:
        """Return bins ``[B, H, A]``, each action the best given the ones chosen before it."""
        return self.choose(memory)

    def _embed(self, ids: Tensor) -> Tensor:
        """Return one token an action ``[B, n, D]``: the sum over its dimensions."""
        assert self.choice is not None
        return self.choice.embed(ids, torch.arange(ids.shape[-1], device=ids.device)).sum(dim=-2)

    # ------------------------------------------------------------------------------------------ both

    def mask(self, prefix: int) -> Mask:
        """Return who reads whom behind a prefix of so many tokens: flow's actions all actions, others earlier ones."""
        return (joined if self.flow else causal)(prefix, self.config.chunk)


class FlowHead(nn.Module):
    """Noisy actions and time → tokens, tokens → velocity."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.action = nn.Linear(size, width)
        self.join = FeedForward(2 * width, 2 * width, width)
        self.out = nn.Linear(width, size)

    def embed(self, noisy: Tensor, time: Tensor) -> Tensor:
        """Return tokens ``[B, H, D]`` of chunks ``[B, H, A]`` at times ``[B]``."""
        action = self.action(noisy)
        clock = sinusoidal(time * TIME_SCALE, action.shape[-1]).to(action.dtype)
        return self.join(torch.cat([action, clock[:, None].expand_as(action)], dim=-1))
