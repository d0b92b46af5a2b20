"""ACT as published and as LeRobot runs it: ResNet-18 maps of all cameras, post-norm layers, queries that start at zero.

After Zhao et al. 2023, "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware": L1 on the whole chunk,
gripper included, and a CVAE; positions are added to queries and keys in every layer (Carion et al. 2020). Added here,
and all off in `LEROBOT`: instruction tokens, object tokens, and a target-pose auxiliary. `act` is the project's own.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from robotattn.attention import FeedForward, Layer, TransformerConfig, alternating, grid_turns, masks
from robotattn.attention.caches import KeysValues
from robotattn.attention.masks import Blocks, Mask, Window
from robotattn.attention.masks import Prefix as Begin
from robotattn.attention.positions import Placed
from robotattn.policies.base import Batch, Memory, Policy, action_errors
from robotattn.policies.fields import OBJECTS, at_least
from robotattn.policies.prefix import STATE_LIMIT
from robotattn.tokens.grounding import POSE_SIZE
from robotattn.tokens.instruction import InstructionEncoder
from robotattn.tokens.proprio import ObjectTokens, pose_vector
from robotattn.tokens.resnet import STRIDE, TrunkTokens, grid
from robotattn.tokens.sequence import TokenGroup, Tokens, concatenate
from robotattn.types import ACTION_SIZE, COLOURS, STATE_SIZE

LATENT, PROPRIOCEPTION, INSTRUCTION = "latent", "proprioception", "instruction"


@dataclass(frozen=True)
class ACTResNetConfig:
    """What makes a published ACT. A policy needs cameras or object tokens, or both."""

    action_mode: Literal["tool", "joint"] = "tool"
    """Offsets of the tool (dx, dy, dz, dyaw, gripper) or seven joint targets and the gripper."""
    cameras: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Camera name: height and width in pixels, at least 32, in a fixed order."""
    objects: bool = False
    """Read object tokens (poses and colours) from the simulator."""
    frames: Literal[1] = 1
    """Looks at the scene: the published ACT has one, now."""
    frame_gap: Literal[1] = 1
    """Of no effect with one look."""
    instruction: bool = True
    """Read the instruction; the published ACT knows one task and has none."""
    vocabulary: int = 512
    """Number of token ids of the instruction."""
    chunk: int = 100
    """Actions in a chunk (horizon H)."""
    width: int = 512
    """Size of a token."""
    heads: int = 8
    """Attention heads; divide the width."""
    feedforward: int = 3200
    """Hidden size of the feed-forward layers."""
    encoder_layers: int = 4
    """Layers over the observation's tokens."""
    decoder_layers: int = 1
    """Layers of the action queries."""
    style_layers: int = 4
    """Layers of the CVAE's encoder."""
    dropout: float = 0.1
    """Dropout of each residual branch while training."""
    stem_channels: int = 64
    """Channels of the trunk's first stage: 64 is ResNet-18, less is a narrower one."""
    text_width: int = 64
    """Size of a token inside the instruction encoder."""
    latent: int = 32
    """Size of the CVAE latent; 0 = none."""
    kl_weight: float = 10.0
    """Weight of the latent's divergence from its prior."""
    pose_weight: float = 0.0
    """Weight of the target-pose auxiliary, read off the averaged vision tokens and the instruction; 0 = none."""
    colour_jitter: float = 0.1
    """Strength of the random brightness, contrast and colour balance of training images."""

    def __post_init__(self) -> None:
        at_least(self, 1, "vocabulary", "width", "heads", "stem_channels", "text_width", "chunk", "feedforward")
        at_least(self, 1, "encoder_layers", "decoder_layers", "style_layers")
        at_least(self, 0, "latent", "kl_weight", "pose_weight")
        for name, most in (("dropout", 1.0), ("colour_jitter", 0.9)):
            if not 0.0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: {getattr(self, name)} is not in [0, {most}]")
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"width: {self.width} is not a multiple of 4 and of heads ({self.heads})")
        if self.text_width % 4:
            raise ValueError(f"text_width: {self.text_width} is not a multiple of 4 (the text encoder has 4 heads)")
        if not self.cameras and not self.objects:
            raise ValueError("cameras: empty, and objects is false: such a policy would see nothing")
        for name, size in self.cameras.items():
            if name in (reserved := {OBJECTS, INSTRUCTION, PROPRIOCEPTION, LATENT}):
                raise ValueError(f"cameras: {name!r} is the name of another token group ({sorted(reserved)})")
            if min(size) < STRIDE:
                raise ValueError(f"cameras: {name}: height and width must be at least {STRIDE}, got {list(size)}")

    def layer(self, cross: bool = False) -> Layer:
        """Return one post-norm layer with ReLU."""
        sizes = (self.width, self.heads, self.feedforward)
        return Layer(TransformerConfig(1, *sizes, norm="post", activation="relu", cross=cross, dropout=self.dropout))

    def build(self) -> "ACTResNet":
        """Return a freshly initialised policy."""
        return ACTResNet(self)


class ACTResNet(Policy):
    """Encoder over latent, arm, and one token a cell of each camera's map; decoder of `chunk` queries; linear head."""

    def __init__(self, config: ACTResNetConfig) -> None:
        super().__init__(config.action_mode)
        self.config, width = config, config.width
        trunk = (config.cameras, width, config.stem_channels, config.colour_jitter)
        self.images = TrunkTokens(*trunk) if config.cameras else None
        self.state = nn.Linear(STATE_SIZE, width)
        self.objects = ObjectTokens(POSE_SIZE + len(COLOURS), width) if config.objects else None
        self.text = InstructionEncoder(config.vocabulary, config.text_width) if config.instruction else None
        self.text_token = nn.Linear(config.text_width, width) if config.instruction else None
        self.style = Style(config) if config.latent else None
        self.style_token = nn.Linear(config.latent, width) if config.latent else None
        sources = len(config.cameras) + config.objects
        text = config.text_width if config.instruction else 0
        posed = config.pose_weight > 0
        self.pose = FeedForward(width * sources + text, 2 * width, POSE_SIZE) if posed else None
        singles = (LATENT if config.latent else "", PROPRIOCEPTION, OBJECTS if config.objects else "")
        self.singles = [name for name in (*singles, INSTRUCTION if config.instruction else "") if name]
        self.places = nn.Parameter(torch.randn(len(self.singles), width))
        for name, size in config.cameras.items():
            self.register_buffer(f"grid_{name}", grid_turns(*grid(size), width), persistent=False)
        self.encoder = nn.ModuleList(config.layer() for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(config.layer(cross=True) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(config.chunk, width))
        self.head = nn.Linear(width, ACTION_SIZE[config.action_mode])
        _initialise(self.encoder, self.decoder)

    def tokenize(self, batch: Batch) -> Tokens:
        """Turn observations into tokens; the latent, if any, is the prior's mean."""
        return self._see(batch, None)[0]

    def prefill(self, tokens: Tokens) -> Memory:
        """Encode the tokens and project them into each decoder layer's keys and values."""
        x, placed = self._encode(tokens)
        pairs = tuple(layer.cross.keys_values(x, placed) for layer in self._decoders())
        return Memory(pairs, tokens.mask, None, tokens.state)

    def _encode(self, tokens: Tokens) -> tuple[Tensor, Placed]:
        """Return the encoded tokens and their positions."""
        placed = Placed(added=self._positions(tokens).to(tokens.values.dtype))
        mask, x, padding = self._mask(tokens.mask), tokens.values, ~tokens.mask[..., None]
        x = x if mask is None else x.masked_fill(padding, 0.0)
        for layer in self.encoder:
            x = layer(x, mask, placed=placed)
        return x if mask is None else x.masked_fill(padding, 0.0), placed

    def decode(self, memory: Memory) -> Tensor:
        """Return actions ``[B, H, A]``: (m, rad) in tool mode, joint targets (rad) in joint mode, gripper 0 or 1."""
        predicted = self.predict(memory)
        actions = self.normaliser.denormalise("action", predicted)
        return torch.cat([actions[..., :-1], (predicted[..., -1:] > 0.0).to(actions.dtype)], dim=-1)

    def predict(self, memory: Memory) -> Tensor:
        """Return what the head gives, normalised actions ``[B, H, A]``; the gripper is -1 (closed) to 1 (open)."""
        return self.head(self._decoded(memory, self.queries[None]).to(self.head.weight.dtype))

    def _decoded(self, memory: Memory, queries: Tensor) -> Tensor:
        """Return what the decoder makes of queries ``[B|1, H, D]``, which are positions: their content is zero."""
        placed, mask = Placed(added=queries), self._mask(memory.mask)
        first, *rest = self._decoders()
        x = _from_zeros(first, len(memory.state), memory.context[0], mask, placed)
        for layer, pair in zip(rest, memory.context[1:], strict=True):
            x = layer(x, None, pair, mask, placed=placed)
        return self.norm(x)

    @property
    def chunk_tokens(self) -> int:
        """Number of action queries."""
        return len(self.queries)

    def mask(self, prefix: int) -> Mask:
        """Return who may depend on whom; queries see one another from the second layer on: in the first all are 0."""
        whole = Blocks((prefix, self.chunk_tokens))
        return whole if len(self.decoder) > 1 else whole & (Begin(prefix) | Window(1))

    def sequence(self, tokens: Tokens, actions: Tensor) -> Tensor:
        """Return what becomes of the encoded tokens and of action queries that read them."""
        return torch.cat([self._encode(tokens)[0], self._decoded(self.prefill(tokens), actions)], dim=1)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted sum and its parts: L1 of motion and of gripper, divergence, and of the pose."""
        config, labels, mask = self.config, batch["labels"], batch["actions_mask"]
        motion, gripper = self.normaliser.normalise("action", batch["actions"])[..., :-1], batch["actions"][..., -1:]
        target = torch.cat([motion, 2.0 * gripper - 1.0], dim=-1).masked_fill(~mask[..., None], 0.0)
        divergence, latent = None, None
        if self.style is not None:
            state = self.normaliser.normalise("state", batch["state"])
            latent, divergence = self.style(target, mask, state)
        tokens, pose = self._see(batch, latent)
        predicted = self.predict(self.prefill(tokens)).float()
        loss = action_errors(predicted, target, mask)
        parts = {
            "action": action_errors(predicted[..., :-1], target[..., :-1], mask),
            "gripper": action_errors(predicted[..., -1:], target[..., -1:], mask),
        }
        if divergence is not None:
            parts["kl"] = divergence
            loss = loss + config.kl_weight * divergence
        if pose is not None:
            parts |= self._pose_losses(pose.float(), labels)
            loss = loss + config.pose_weight * parts["pose"]
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}

    def optimised(self, dtype: torch.dtype = torch.float32) -> "ACTResNet":
        """Return a copy for inference: norms folded into convolutions, channels last, the network in a type.

        Observations stay what they are, actions come out in float32. The copy cannot be trained any more.
        """
        fast = copy.deepcopy(self).eval().requires_grad_(False)
        head, normaliser = fast.head, fast.normaliser
        if self.images is not None and fast.images is not None:
            fast.images.trunk = self.images.trunk.folded(dtype)
        fast.style = None
        for module in fast.children():
            if module not in (head, normaliser):
                module.to(dtype)
        fast.queries.data, fast.places.data = fast.queries.to(dtype), fast.places.to(dtype)
        return fast

    def _see(self, batch: Batch, latent: Tensor | None) -> tuple[Tokens, Tensor | None]:
        """Return tokens and, if it is asked for, the predicted pose of the target ``[B, POSE_SIZE]``."""
        state = self.normaliser.normalise("state", batch["state"]).clamp(-STATE_LIMIT, STATE_LIMIT)
        groups: dict[str, TokenGroup] = {}
        if self.style_token is not None:
            latent = state.new_zeros(len(state), self.config.latent) if latent is None else latent
            groups[LATENT] = TokenGroup(self.style_token(latent.to(self.queries.dtype))[:, None])
        groups[PROPRIOCEPTION] = TokenGroup(self.state(state.to(self.queries.dtype))[:, None])
        maps = {} if self.images is None else self.images(batch["images"])
        seen = {name: TokenGroup(tokens) for name, tokens in maps.items()}
        if self.objects is not None:
            seen[OBJECTS] = self._see_objects(batch)
        groups |= seen
        means = [_mean(group) for group in seen.values()] if self.pose is not None else []
        if self.text is not None and self.text_token is not None:
            text = self.text(batch["text"], batch["text_mask"])
            groups[INSTRUCTION] = TokenGroup(self.text_token(text.tokens), text.mask)
            means.append(text.pooled)
        pose = None if self.pose is None else self.pose(torch.cat(means, dim=-1))
        return concatenate(groups, batch["state"]), pose

    def _see_objects(self, batch: Batch) -> TokenGroup:
        assert self.objects is not None
        objects, mask = batch["objects"], batch["objects_mask"]
        objects = objects.masked_fill(~mask[..., None], 0.0)
        position = objects[..., :4]
        pose = pose_vector(position, self.normaliser.normalise("position", position))
        dtype = self.queries.dtype
        return self.objects(pose.to(dtype), objects[..., 4:].to(dtype), mask)

    def _positions(self, tokens: Tokens) -> Tensor:
        """Return what is added to queries and keys ``[1, N, D]``: grids of cells, one learned vector a group else."""
        parts = []
        for name, part in tokens.slices.items():
            if name in self.config.cameras:
                parts.append(self.get_buffer(f"grid_{name}"))
            else:
                parts.append(self.places[self.singles.index(name)].expand(part.stop - part.start, -1))
        return torch.cat(parts)[None]

    def _mask(self, valid: Tensor) -> Tensor | None:
        """Return the mask of keys, None where a policy's tokens are always real: kernels are faster without one."""
        return masks.padding(valid) if self.config.objects or self.config.instruction else None

    def _decoders(self) -> list[Layer]:
        return [layer for layer in self.decoder if isinstance(layer, Layer)]

    def _pose_losses(self, pose: Tensor, labels: dict[str, Any]) -> dict[str, Tensor]:
        """Return ``pose``, the error in normalised units, and ``position_error`` (m)."""
        rows = torch.arange(len(pose), device=pose.device)
        position = labels["position"][rows, labels["target"]]
        truth = pose_vector(position, self.normaliser.normalise("position", position))
        scale = self.normaliser.get_buffer("position_scale")[:3]
        gap = ((pose - truth)[:, :3].detach() * scale).norm(dim=-1)
        return {"pose": (pose - truth).abs().mean(), "position_error": gap.mean()}


class Style(nn.Module):
    """The CVAE's encoder: the demonstrated chunk and the arm's state → a sample of the latent, while training."""

    def __init__(self, config: ACTResNetConfig) -> None:
        super().__init__()
        self.summary = nn.Parameter(torch.randn(config.width))
        self.state = nn.Linear(STATE_SIZE, config.width)
        self.action = nn.Linear(ACTION_SIZE[config.action_mode], config.width)
        self.encoder = nn.ModuleList(config.layer() for _ in range(config.style_layers))
        self.head = nn.Linear(config.width, 2 * config.latent)
        places = alternating(torch.arange(config.chunk + 2).float(), config.width)
        self.register_buffer("places", places[None], persistent=False)

    def forward(self, actions: Tensor, mask: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample ``[B, latent]`` and the divergence from N(0, 1). Padded actions (mask False) are not read."""
        batch = len(actions)
        x = torch.cat([self.summary.expand(batch, 1, -1), self.state(state)[:, None], self.action(actions)], dim=1)
        valid = masks.padding(torch.cat([mask.new_ones(batch, 2), mask], dim=1))
        places = self.get_buffer("places").to(x.dtype)
        *layers, last = [layer for layer in self.encoder if isinstance(layer, Layer)]
        for layer in layers:
            x = layer(x, valid, placed=Placed(added=places))
        x = _first(last, x, valid, places)
        mean, log_variance = self.head(x[:, 0]).float().chunk(2, dim=-1)
        divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return mean + torch.randn_like(mean) * (0.5 * log_variance).exp(), divergence


def _mean(group: TokenGroup) -> Tensor:
    """Return the mean of a group's real tokens ``[B, D]``."""
    if group.mask is None:
        return group.tokens.mean(dim=1)
    weights = group.mask[..., None].to(group.tokens.dtype)
    return (group.tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def _from_zeros(layer: Layer, batch: int, pair: KeysValues, mask: Tensor | None, placed: Placed) -> Tensor:
    """Return what a post-norm layer makes of queries that are zero: of each other they read the values' bias alone."""
    assert placed.added is not None and layer.feedforward is not None
    x = layer.attention.out(layer.attention.value.bias).expand(batch, placed.added.shape[1], -1)
    x = layer.attention_norm(layer.dropout(x))
    x = layer.cross_norm(x + layer.dropout(layer.cross(x, pair, mask, placed=placed)))
    return layer.feedforward_norm(x + layer.dropout(layer.feedforward(x)))


def _first(layer: Layer, x: Tensor, valid: Tensor, places: Tensor) -> Tensor:
    """Return what a post-norm layer makes of the first token ``[B, 1, D]``: nobody reads the others any more."""
    pair, one = layer.attention.keys_values(x, Placed(added=places)), Placed(added=places[:, :1])
    x = layer.attention_norm(x[:, :1] + layer.dropout(layer.attention(x[:, :1], pair, valid, placed=one)))
    assert layer.feedforward is not None
    return layer.feedforward_norm(x + layer.dropout(layer.feedforward(x)))


def _initialise(*modules: nn.Module) -> None:
    """Draw every matrix of the layers as the published code does (Glorot)."""
    for parameter in (p for module in modules for p in module.parameters() if p.dim() > 1):
        nn.init.xavier_uniform_(parameter)
