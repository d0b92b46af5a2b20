"""Observation → token sequence, shared by all policies, and the auxiliary losses that make pixels learnable.

Groups in order: one a camera (its name), ``objects``, ``instruction``, ``proprioception``, ``target``. The target
token fuses what the instruction refers to, where that is, and where the arm is. Found necessary with demonstrations
in the hundreds: the target's pose never sees proprioception; attention is supervised for *every* object in view, by
instructions that name the others; and one token holds target and arm together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from robotattn.attention import FeedForward
from robotattn.policies.base import Batch, masked_mean
from robotattn.tokens.grounding import POSE_SIZE, Candidates, Grounded, Grounding, cell_centres, pixel_loss
from robotattn.tokens.images import ImageTokens, View
from robotattn.tokens.instruction import InstructionEncoder, Sentence
from robotattn.tokens.normaliser import Normaliser
from robotattn.tokens.proprio import ObjectTokens, ProprioToken, pose_vector
from robotattn.tokens.sequence import TokenGroup, Tokens, concatenate
from robotattn.types import COLOURS, STATE, STATE_SIZE

STATE_LIMIT = 5.0  # normalised; further out than any demonstration, a state is held at the border
OBJECTS = "objects"
WAY_SIZE = 8
NEAR = 0.02  # (m): about half a cube, the scale on which the fingers are lined up


class Sight(Protocol):
    """The fields of a policy's config that say what it sees and how that becomes tokens."""

    @property
    def cameras(self) -> dict[str, tuple[int, int]]: ...
    @property
    def objects(self) -> bool: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def text_width(self) -> int: ...
    @property
    def stem(self) -> Literal["conv", "patch"]: ...
    @property
    def patch(self) -> int: ...
    @property
    def stem_channels(self) -> int: ...
    @property
    def colour_jitter(self) -> float: ...


def at_least(config: object, least: float, *names: str) -> None:
    """Raise ValueError for the first of the named fields that is below `least`, or NaN."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name}: {getattr(config, name)} is less than {least}")


def check_sight(config: Sight) -> None:
    """Raise ValueError, naming field and value, for sizes that do not fit together or an empty sight."""
    at_least(config, 1, "vocabulary", "width", "heads", "patch", "stem_channels", "text_width")
    if not config.cameras and not config.objects:
        raise ValueError("cameras: empty, and objects is false: such a policy would see nothing")
    if config.width % config.heads or config.width % 2:
        raise ValueError(f"width: {config.width} is not an even multiple of heads ({config.heads})")
    if config.text_width % 4:
        raise ValueError(f"text_width: {config.text_width} is not a multiple of 4 (the text encoder has 4 heads)")
    if not 0.0 <= config.colour_jitter <= 0.9:
        raise ValueError(f"colour_jitter: {config.colour_jitter} is not in [0, 0.9]")
    if config.stem == "conv" and config.patch != 16:
        raise ValueError(f"patch: the conv stem has patches of 16, not {config.patch}; use stem: patch")
    reserved = {OBJECTS, "instruction", "proprioception", "target", "latent"}
    for name, size in config.cameras.items():
        if name in reserved:
            raise ValueError(f"cameras: {name!r} is the name of another token group ({sorted(reserved)})")
        if any(pixels < config.patch or pixels % config.patch for pixels in size):
            raise ValueError(f"cameras: {name}: height and width must be multiples of {config.patch}, got {list(size)}")


@dataclass(frozen=True)
class Seen:
    """A tokenised observation. grounded: row 0 of its queries is the batch's instruction, others are the labels'."""

    tokens: Tokens
    pose: Tensor | None
    grounded: Grounded | None


class Prefix(nn.Module):
    """Tokens of an observation.

    grounding: whether to look up the instruction's target and add the target token. pose: whether to predict the
    target's pose at all (grounding always does). The other arguments are those of `ACTConfig`.
    """

    def __init__(
        self,
        normaliser: Normaliser,
        cameras: Mapping[str, tuple[int, int]],
        objects: bool,
        vocabulary: int,
        width: int,
        text_width: int,
        grounding: bool,
        pose: bool,
        stem: Literal["conv", "patch"],
        patch: int,
        stem_channels: int,
        colour_jitter: float,
    ) -> None:
        super().__init__()
        self.normaliser = normaliser
        self.images = ImageTokens(cameras, width, stem, patch, stem_channels, colour_jitter) if cameras else None
        self.objects = ObjectTokens(POSE_SIZE + len(COLOURS), width) if objects else None
        self.text = InstructionEncoder(vocabulary, text_width)
        self.text_token = nn.Linear(text_width, width)
        self.proprio = ProprioToken(STATE_SIZE, width)
        self.grounding: Grounding | None = None
        self.pose: FeedForward | None = None
        if grounding:
            self.grounding = Grounding(self._sources(width), text_width, 2 * width)
            self.target = FeedForward(self.grounding.size + POSE_SIZE + WAY_SIZE + STATE_SIZE, 2 * width, width)
        elif pose:
            self.pose = FeedForward(width * (len(cameras) + objects) + text_width, 2 * width, POSE_SIZE)

    @classmethod
    def of(cls, config: Sight, normaliser: Normaliser) -> "Prefix":
        """Return the grounded prefix that a policy's config describes."""
        return cls(
            normaliser,
            config.cameras,
            config.objects,
            config.vocabulary,
            config.width,
            config.text_width,
            True,
            True,
            config.stem,
            config.patch,
            config.stem_channels,
            config.colour_jitter,
        )

    def _sources(self, width: int) -> dict[str, tuple[int, int]]:
        sources = dict.fromkeys(self.images.cameras, (self.images.stem.channels, 2)) if self.images else {}
        return sources | ({OBJECTS: (width, POSE_SIZE)} if self.objects else {})

    def forward(self, batch: Batch, labels: Mapping[str, Any] | None = None) -> Seen:
        """Tokenise a batch; with labels, ground the instructions naming the other objects as well."""
        views = self.images(batch["images"]) if self.images else {}
        text = self.text(batch["text"], batch["text_mask"])
        state = self.normaliser.normalise("state", batch["state"]).clamp(-STATE_LIMIT, STATE_LIMIT)
        groups: dict[str, TokenGroup] = {name: view.group for name, view in views.items()}
        candidates = {name: Candidates(view.features, _centres(view)) for name, view in views.items()}
        if self.objects:
            groups[OBJECTS], candidates[OBJECTS] = self._see_objects(batch)
        pose, grounded = self._pool_pose(groups, text), None
        groups["instruction"] = TokenGroup(self.text_token(text.tokens), text.mask)
        groups["proprioception"] = self.proprio(state)
        if self.grounding:
            grounded = self.grounding(candidates, self._questions(text, labels))
            pose = grounded.pose
            groups["target"] = TokenGroup(self._fuse(grounded, state, batch["state"])[:, None])
        return Seen(concatenate(groups, batch["state"]), pose, grounded)

    def _see_objects(self, batch: Batch) -> tuple[TokenGroup, Candidates]:
        objects, mask = batch["objects"], batch["objects_mask"]
        objects = objects.masked_fill(~mask[..., None], 0.0)
        position = objects[..., :4]
        pose = pose_vector(position, self.normaliser.normalise("position", position))
        assert self.objects is not None
        group = self.objects(pose, objects[..., 4:], mask)
        return group, Candidates(group.tokens, pose, mask)

    def _questions(self, text: Sentence, labels: Mapping[str, Any] | None) -> Tensor:
        """Return instruction vectors ``[B, Q, T]``: the batch's own, then one for each slot's object."""
        own = text.pooled[:, None]
        if labels is None or "sentences" not in labels:
            return own
        sentences = self.text(labels["sentences"], labels["sentences_mask"]).pooled
        return torch.cat([own, sentences[labels["names"]]], dim=1)

    def _pool_pose(self, groups: Mapping[str, TokenGroup], text: Sentence) -> Tensor | None:
        """Predict the target's pose from averaged vision tokens and the instruction, before any token is mixed."""
        if self.pose is None:
            return None
        means = [_mean(group) for group in groups.values()]
        return self.pose(torch.cat([*means, text.pooled], dim=-1))[:, None]

    def _fuse(self, grounded: Grounded, state: Tensor, raw: Tensor) -> Tensor:
        """Fuse target and arm into one token."""
        pose = grounded.pose[:, 0]
        with torch.autocast(raw.device.type, enabled=False):  # millimetres matter here, as in `Grounding`
            return self.target(torch.cat([grounded.descriptor[:, 0], pose, self._way(pose, raw), state], dim=-1))

    def _way(self, pose: Tensor, raw: Tensor) -> Tensor:
        """Return the way from the tool to a predicted pose ``[B, 8]``: given outright, not left to be learned.

        Metres at the scale of the table and, squashed, at that of a cube; cosine and sine of four times the turn.
        """
        sin, cos = raw[:, STATE["tool_yaw"]].unbind(-1)
        yaw = torch.atan2(sin, cos)
        tool = torch.cat([raw[:, STATE["tool_position"]], yaw[:, None]], dim=-1)
        here = pose_vector(tool, self.normaliser.normalise("position", tool))
        way = pose[:, :3] - here[:, :3]
        near = (way * self.normaliser.get_buffer("position_scale")[:3] / NEAR).tanh()
        (a, b), (c, d) = pose[:, 3:].unbind(-1), here[:, 3:].unbind(-1)
        turn = torch.stack([a * c + b * d, b * c - a * d], dim=-1)
        return torch.cat([way.clamp(-10.0, 10.0), near, turn], dim=-1)

    def losses(self, seen: Seen, labels: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return ``pose`` (normalised), ``attention`` if grounded, and the pose's error ``position_error`` (m)."""
        if seen.pose is None:
            return {}
        target = labels["target"]
        position = labels["position"]
        truth = pose_vector(position, self.normaliser.normalise("position", position))
        if seen.pose.shape[1] == 1:  # only the batch's own instruction was looked up
            slots, asked, mask = seen.pose, target[:, None], torch.ones_like(target[:, None], dtype=torch.bool)
        else:
            slots, mask = seen.pose[:, 1:], self._in_view(labels)
            asked = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        rows = torch.arange(len(target), device=target.device)[:, None]
        out = {"pose": masked_mean((slots.float() - truth[rows, asked]).abs(), mask)}
        if seen.grounded is not None:
            out["attention"] = self._attention_loss(seen.grounded, labels, asked, mask)
        with torch.no_grad():
            scale = self.normaliser.get_buffer("position_scale")[:3]
            gap = (seen.pose[:, 0, :3].float() - truth[rows[:, 0], target, :3]) * scale
            out["position_error"] = gap.norm(dim=-1).mean()
        return out

    def _in_view(self, labels: Mapping[str, Any]) -> Tensor:
        """Return ``[B, slots]``: present, and shown by a camera unless object tokens tell of it anyway."""
        if self.objects or self.images is None:
            return labels["present"]
        visible = torch.stack([labels["visible"][name] for name in self.images.cameras]).any(dim=0)
        return labels["present"] & visible

    def _attention_loss(self, grounded: Grounded, labels: Mapping[str, Any], asked: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over sources of the cross-entropy to where the asked objects are, where they are seen."""
        rows = torch.arange(len(asked), device=asked.device)[:, None]
        losses = []
        for name, log_weights in grounded.attention.items():
            log_weights = log_weights[:, -asked.shape[1] :]
            if name == OBJECTS:
                losses.append(masked_mean(-log_weights.gather(-1, asked[..., None])[..., 0], mask))
                continue
            assert self.images is not None
            size, stride = self.images.cameras[name], self.images.stem.map_stride
            error = pixel_loss(log_weights, labels["pixel"][name][rows, asked], size[0] // stride, size[1] // stride)
            losses.append(masked_mean(error, labels["visible"][name][rows, asked] & labels["present"][rows, asked]))
        return torch.stack(losses).mean()

    def maps(self, batch: Batch) -> dict[str, Tensor]:
        """Return where each camera's pixels answer the instruction: name → ``[B, rows, columns]``, summing to 1."""
        grounded = self(batch).grounded
        if grounded is None or self.images is None:
            return {}
        stride = self.images.stem.map_stride
        return {
            name: grounded.attention[name][:, 0].exp().unflatten(-1, (height // stride, width // stride))
            for name, (height, width) in self.images.cameras.items()
        }


def _centres(view: View) -> Tensor:
    return cell_centres(*view.grid, device=view.features.device)


def _mean(group: TokenGroup) -> Tensor:
    if group.mask is None:
        return group.tokens.mean(dim=1)
    weights = group.mask[..., None].to(group.tokens.dtype)
    return (group.tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
