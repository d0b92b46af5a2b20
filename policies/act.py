"""ACT, action chunking with transformers: one learned query per future step reads the encoded observation.

After Zhao et al. 2023, "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware": an encoder over all
tokens, a cross-attention decoder, L1 on the whole chunk in one pass, and optionally a CVAE latent. Added here: the
grounded target token (see `prefix`), which goes into the encoder and onto every action query.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robotattn.attention import Decoder, Encoder, sinusoidal
from robotattn.attention.masks import Blocks, Mask
from robotattn.policies.base import Batch, Memory, Policy, action_errors, masked_mean
from robotattn.policies.fields import auxiliary_weights, check_fields, total
from robotattn.policies.prefix import Prefix
from robotattn.tokens.sequence import TokenGroup, Tokens, concatenate
from robotattn.types import ACTION_SIZE, STATE, STATE_SIZE


@dataclass(frozen=True)
class ACTConfig:
    """What makes an ACT policy. A policy needs cameras or object tokens, or both."""

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
    chunk: int = 8
    """Actions in a chunk (horizon H)."""
    width: int = 128
    """Size of a token."""
    heads: int = 4
    """Attention heads; divide the width."""
    kv_heads: int | None = None
    """Key and value heads of the decoder: null = as many as heads; fewer, which divide them, share."""
    feedforward: int = 256
    """Hidden size of the feed-forward layers."""
    encoder_layers: int = 1
    """Layers over the observation's tokens."""
    decoder_layers: int = 1
    """Layers of the action queries."""
    dropout: float = 0.0
    """Dropout of each residual branch while training."""
    stem: Literal["conv", "patch"] = "conv"
    """Image stem: convolutions with a stride-4 map, or the ViT's plain patches."""
    patch: int = 16
    """Patch size in pixels; the convolutional stem has 16."""
    stem_channels: int = 48
    """Channels of the convolutional stem's map."""
    text_width: int = 64
    """Size of a token inside the instruction encoder."""
    grounding: bool = True
    """Look the instruction's target up in the images, and fuse it with the arm's state into one token."""
    attention_labels: bool = True
    """Supervise where grounding looks with the objects' projected positions."""
    joints_from: Literal["current", "absolute"] = "current"
    """Joint mode: regress targets as offsets from the joints now, or as they are."""
    latent: int = 0
    """Size of the CVAE latent; 0 = none."""
    kl_weight: float = 10.0
    """Weight of the latent's divergence from its prior."""
    gripper_weight: float = 0.2
    """Weight of the gripper's cross-entropy beside the L1 of the motion."""
    pose_weight: float = 1.0
    """Weight of the target-pose auxiliary; 0 = none."""
    attention_weight: float = 0.2
    """Weight of the supervision of attention."""
    colour_jitter: float = 0.1
    """Strength of the random brightness, contrast and colour balance of training images."""

    def __post_init__(self) -> None:
        check_fields(
            self, sizes=("decoder_layers",), weights=("encoder_layers", "latent", "kl_weight", "gripper_weight")
        )
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout: {self.dropout} is not in [0, 1.0]")

    def build(self) -> "ACT":
        """Return a freshly initialised policy."""
        return ACT(self)


class ACT(Policy):
    """Encoder over the observation's tokens, decoder of `chunk` action queries, one linear head."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__(config.action_mode)
        self.config = config
        self.prefix = Prefix(config, self.normaliser, config.grounding, config.pose_weight > 0)
        layer = (config.width, config.heads, config.feedforward, config.dropout)
        self.encoder = Encoder(config.encoder_layers, *layer)
        self.decoder = Decoder(config.decoder_layers, *layer, kv_heads=config.kv_heads)
        # of size 1, not 0.02: steps of a chunk that start out alike take hundreds of updates to come apart
        self.queries = nn.Parameter(torch.randn(config.chunk, config.width))
        self.head = nn.Linear(config.width, ACTION_SIZE[config.action_mode])
        self.style = Style(config) if config.latent else None
        self.style_token = nn.Linear(config.latent, config.width) if config.latent else None

    def tokenize(self, batch: Batch) -> Tokens:
        """Turn observations into tokens; the latent, if any, is the prior's mean."""
        return self._with_latent(self.prefix(batch).tokens, None)

    def prefill(self, tokens: Tokens) -> Memory:
        """Encode the tokens and project them into each decoder layer's keys and values."""
        encoded = self.encoder(tokens.values, tokens.mask)
        condition = tokens.group("target")[:, 0] if self.config.grounding else None
        return Memory(self.decoder.keys_values(encoded), tokens.mask, condition, tokens.state)

    def decode(self, memory: Memory) -> Tensor:
        """Return actions ``[B, H, A]``: (m, rad) in tool mode, joint targets (rad) in joint mode, gripper 0 or 1."""
        motion, gripper = self._predict(memory)
        joined = torch.cat([self._shift(motion, memory.state, 1.0), torch.zeros_like(gripper)[..., None]], dim=-1)
        actions = self.normaliser.denormalise("action", joined)
        return torch.cat([actions[..., :-1], (gripper > 0.0).to(actions.dtype)[..., None]], dim=-1)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted sum and its parts; in the batch, ``labels`` feed the auxiliary losses."""
        config, labels = self.config, batch["labels"]
        actions, mask = batch["actions"], batch["actions_mask"]
        target = self._shift(self.normaliser.normalise("action", actions)[..., :-1], batch["state"], -1.0)
        target, closed = target.masked_fill(~mask[..., None], 0.0), actions[..., -1].masked_fill(~mask, 0.0)
        seen = self.prefix(batch, labels)
        divergence, latent = None, None
        if self.style is not None:
            state = self.normaliser.normalise("state", batch["state"])
            latent, divergence = self.style(target, closed, mask, state)
        motion, gripper = self._predict(self.prefill(self._with_latent(seen.tokens, latent)))
        parts = {
            "action": action_errors(motion.float(), target, mask),
            "gripper": masked_mean(F.binary_cross_entropy_with_logits(gripper.float(), closed, reduction="none"), mask),
            **self.prefix.losses(seen, labels),
        }
        if divergence is not None:
            parts["kl"] = divergence
        weights = {"gripper": config.gripper_weight, **auxiliary_weights(config), "kl": config.kl_weight}
        if not config.attention_labels:
            del weights["attention"]
        return total(parts["action"], parts, weights)

    @torch.no_grad()
    def attention_map(self, batch: Batch) -> dict[str, Tensor]:
        """Return where grounding looks: camera → ``[B, rows, columns]``, each map summing to 1; empty without it."""
        return self.prefix.maps(batch)

    @property
    def chunk_tokens(self) -> int:
        """Number of action queries."""
        return len(self.queries)

    def mask(self, prefix: int) -> Mask:
        """Return who may depend on whom: tokens on tokens, queries on tokens and queries."""
        return Blocks((prefix, self.chunk_tokens))

    def sequence(self, tokens: Tokens, actions: Tensor) -> Tensor:
        """Return what becomes of the encoded tokens and of action queries that read them."""
        encoded = self.encoder(tokens.values, tokens.mask)
        return torch.cat([encoded, self.decoder(actions, self.decoder.keys_values(encoded), tokens.mask)], dim=1)

    def _predict(self, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return the motion ``[B, H, A - 1]``, normalised, and the logit of an open gripper ``[B, H]``."""
        x = self.queries.expand(len(memory.state), -1, -1)
        if memory.condition is not None:
            x = x + memory.condition[:, None]
        out = self.head(self.decoder(x, memory.context, memory.mask))
        return out[..., :-1], out[..., -1]

    def _shift(self, motion: Tensor, state: Tensor, sign: float) -> Tensor:
        """Add (sign 1) or take away (-1) the joints now, in normalised units; the identity unless asked for."""
        if self.action_mode == "tool" or self.config.joints_from == "absolute":
            return motion
        joints = state[:, STATE["joint_position"]]
        joined = torch.cat([joints, torch.zeros_like(joints[:, :1])], dim=-1)
        return motion + sign * self.normaliser.normalise("action", joined)[:, None, :-1]

    def _with_latent(self, tokens: Tokens, latent: Tensor | None) -> Tokens:
        if self.style_token is None:
            return tokens
        if latent is None:
            latent = tokens.values.new_zeros(len(tokens.values), self.config.latent)
        groups = {name: TokenGroup(tokens.values[:, s], tokens.mask[:, s]) for name, s in tokens.slices.items()}
        return concatenate({**groups, "latent": TokenGroup(self.style_token(latent)[:, None])}, tokens.state)


class Style(nn.Module):
    """The CVAE's encoder: the demonstrated chunk and the arm's state → a sample of the latent, while training."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.summary = nn.Parameter(torch.randn(config.width) * 0.02)
        self.action = nn.Linear(ACTION_SIZE[config.action_mode], config.width)
        self.state = nn.Linear(STATE_SIZE, config.width)
        self.encoder = Encoder(max(config.encoder_layers, 1), config.width, config.heads, config.feedforward)
        self.head = nn.Linear(config.width, 2 * config.latent)
        self.register_buffer("steps", sinusoidal(torch.arange(config.chunk).float(), config.width), persistent=False)

    def forward(self, motion: Tensor, gripper: Tensor, mask: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample ``[B, latent]`` and the divergence from N(0, 1). Padded actions (mask False) are not read."""
        batch = len(motion)
        actions = self.action(torch.cat([motion, gripper[..., None]], dim=-1)) + self.get_buffer("steps")
        tokens = torch.cat([self.summary.expand(batch, 1, -1), self.state(state)[:, None], actions], dim=1)
        valid = torch.cat([mask.new_ones(batch, 2), mask], dim=1)
        mean, log_variance = self.head(self.encoder(tokens, valid)[:, 0]).chunk(2, dim=-1)
        divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return mean + torch.randn_like(mean) * (0.5 * log_variance).exp(), divergence
