"""Observation → token sequence, shared by all policies, and the auxiliary losses that make pixels learnable.

Groups in order: one a camera (its name), ``objects``, then the same of older frames (``front@1``, one look
before), ``instruction``, ``proprioception``, ``target``. The target token fuses what the instruction refers to, where
that is, how it moved since each older frame, and where the arm is. Found necessary with demonstrations
in the hundreds: the target's pose never sees proprioception; attention is supervised for *every* object in view, by
instructions that name the others; and one token holds target and arm together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robotattn.attention import FeedForward
from robotattn.policies.base import Batch, masked_mean
from robotattn.policies.fields import OBJECTS, Fields
from robotattn.tokens.grounding import POSE_SIZE, Candidates, Grounded, Grounding, cell_centres, pixel_loss
from robotattn.tokens.history import LEAST_AGE, RATE_LIMIT, VELOCITY_SIZE, AgeStamp, Frames, Motion, rates
from robotattn.tokens.images import ImageTokens, View
from robotattn.tokens.instruction import InstructionEncoder, Sentence
from robotattn.tokens.normaliser import Normaliser
from robotattn.tokens.proprio import ObjectTokens, ProprioToken, pose_vector
from robotattn.tokens.sequence import TokenGroup, Tokens, concatenate
from robotattn.types import COLOURS, STATE, STATE_SIZE

STATE_LIMIT = 5.0  # normalised; further out than any demonstration, a state is held at the border
WAY_SIZE = 8
NEAR = 0.02  # (m): about half a cube, the scale on which the fingers are lined up


@dataclass(frozen=True)
class Seen:
    """A tokenised observation. Of its questions, 0 is the batch's instruction, others are the labels'.

    poses, grounded: with the frames folded into rows. velocity: ``[B, Q, 3]``, normalised, per second; ages: ``[B, F]``
    (s). Both are None for one frame.
    """

    tokens: Tokens
    poses: Tensor | None
    grounded: Grounded | None
    frames: Frames
    velocity: Tensor | None = None
    ages: Tensor | None = None

    @property
    def pose(self) -> Tensor | None:
        """The poses found in the newest frame, ``[B, Q, 5]``."""
        return None if self.poses is None else self.frames.newest(self.poses)


class Prefix(nn.Module):
    """Tokens of an observation, as a policy's config describes them.

    grounding: whether to look up the instruction's target and add the target token. pose: whether to predict the
    target's pose at all (grounding always does).
    """

    def __init__(self, config: Fields, normaliser: Normaliser, grounding: bool = True, pose: bool = True) -> None:
        super().__init__()
        width, cameras, objects, text = config.width, config.cameras, config.objects, config.text_width
        stem = (config.stem, config.patch, config.stem_channels, config.colour_jitter)
        self.normaliser = normaliser
        self.frames = Frames(config.frames)
        self.images = ImageTokens(cameras, width, *stem, config.frames) if cameras else None
        self.objects = ObjectTokens(POSE_SIZE + len(COLOURS), width) if objects else None
        self.text = InstructionEncoder(config.vocabulary, text)
        self.text_token = nn.Linear(text, width)
        self.proprio = ProprioToken(STATE_SIZE * config.frames, width)
        self.grounding: Grounding | None = None
        self.pose: FeedForward | None = None
        self.stamp: AgeStamp | None = None
        self.motion: Motion | None = None
        if grounding:
            self.grounding = Grounding(self._sources(width), text, 2 * width)
            moved = POSE_SIZE * (config.frames - 1) + VELOCITY_SIZE * (config.frames > 1)
            size = self.grounding.size + POSE_SIZE + WAY_SIZE + STATE_SIZE + moved
            self.target = FeedForward(size, 2 * width, width)
        elif pose:
            self.pose = FeedForward(width * (len(cameras) + objects) + text, 2 * width, POSE_SIZE)
        if config.frames > 1:
            self.stamp = AgeStamp(width)
            self.motion = Motion(config.frames, 2 * width) if grounding else None

    def _sources(self, width: int) -> dict[str, tuple[int, int]]:
        sources = dict.fromkeys(self.images.cameras, (self.images.stem.channels, 2)) if self.images else {}
        return sources | ({OBJECTS: (width, POSE_SIZE)} if self.objects else {})

    def forward(self, batch: Batch, labels: Mapping[str, Any] | None = None) -> Seen:
        """Tokenise a batch; with labels, ground the instructions naming the other objects as well.

        With F > 1 frames: ``images`` ``[B, F, h, w, 3]``, ``objects`` ``[B, F, 6, 10]`` and their mask, oldest first;
        ``history``: older states ``[B, F - 1, 13]``; ``ages`` ``[B, F]``: seconds before now, 0 for the newest.
        """
        views = self.images(batch["images"]) if self.images else {}
        text = self.text(batch["text"], batch["text_mask"])
        state = self.normaliser.normalise("state", batch["state"]).clamp(-STATE_LIMIT, STATE_LIMIT)
        groups: dict[str, TokenGroup] = {name: view.group for name, view in views.items()}
        candidates = {name: Candidates(view.features, _centres(view)) for name, view in views.items()}
        if self.objects:
            groups[OBJECTS], candidates[OBJECTS] = self._see_objects(batch)
        poses, grounded = self._pool_pose(groups, text), None
        groups = self._by_frame(groups, batch)
        groups["instruction"] = TokenGroup(self.text_token(text.tokens), text.mask)
        groups["proprioception"] = self.proprio(self._with_rates(state, batch))
        moved: tuple[Tensor, ...] = ()
        if self.grounding:
            grounded = self.grounding(candidates, self.frames.repeat(self._questions(text, labels)))
            poses = grounded.pose
            if self.motion:
                moved = self.motion(self.frames.split(poses), batch["ages"])
            groups["target"] = TokenGroup(self._fuse(grounded, moved, state, batch["state"])[:, None])
        velocity, ages = (moved[1], batch["ages"]) if moved else (None, None)
        return Seen(concatenate(groups, batch["state"]), poses, grounded, self.frames, velocity, ages)

    def _see_objects(self, batch: Batch) -> tuple[TokenGroup, Candidates]:
        objects = self.frames.fold("objects", batch["objects"], 3)
        mask = self.frames.fold("objects_mask", batch["objects_mask"], 2)
        objects = objects.masked_fill(~mask[..., None], 0.0)
        position = objects[..., :4]
        pose = pose_vector(position, self.normaliser.normalise("position", position))
        assert self.objects is not None
        group = self.objects(pose, objects[..., 4:], mask)
        return group, Candidates(group.tokens, pose, mask)

    def _by_frame(self, groups: Mapping[str, TokenGroup], batch: Batch) -> dict[str, TokenGroup]:
        """Give each frame groups of its own, the newest first, its age in every token."""
        if self.stamp is None:
            return dict(groups)
        stamps, found = self.stamp(batch["ages"])[:, :, None], {}
        for ticks in range(self.frames.count):
            frame = self.frames.count - 1 - ticks
            for name, group in groups.items():
                mask = None if group.mask is None else self.frames.split(group.mask)[:, frame]
                tokens = self.frames.split(group.tokens)[:, frame] + stamps[:, frame]
                found[f"{name}@{ticks}" if ticks else name] = TokenGroup(tokens, mask)
        return found

    def _with_rates(self, state: Tensor, batch: Batch) -> Tensor:
        """Append how the arm's state changed since each older frame, normalised, per second."""
        if self.frames.count == 1:
            return state
        history = self.normaliser.normalise("state", batch["history"]).clamp(-STATE_LIMIT, STATE_LIMIT)
        since = rates(state, history, batch.get("state_ages", batch["ages"])[:, :-1]).clamp(-RATE_LIMIT, RATE_LIMIT)
        return torch.cat([state, since.flatten(1)], dim=-1)

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
        return self.pose(torch.cat([*means, self.frames.repeat(text.pooled)], dim=-1))[:, None]

    def _fuse(self, grounded: Grounded, moved: tuple[Tensor, ...], state: Tensor, raw: Tensor) -> Tensor:
        """Fuse the target, how it moved, and the arm into one token."""
        pose, descriptor = (self.frames.newest(part[:, 0]) for part in (grounded.pose, grounded.descriptor))
        with torch.autocast(raw.device.type, enabled=False):  # millimetres matter here, as in `Grounding`
            parts = [descriptor, pose, self._way(pose, raw), state, *(part[:, 0] for part in moved)]
            return self.target(torch.cat(parts, dim=-1))

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
        """Return ``pose`` (normalised), ``attention`` if grounded, and the pose's error ``position_error`` (m).

        Of all frames together; with several, also ``velocity`` (normalised, per second). The error is the newest's.
        """
        if seen.poses is None:
            return {}
        labels = self._folded(labels)
        target, position = labels["target"], labels["position"]
        truth = pose_vector(position, self.normaliser.normalise("position", position))
        if seen.poses.shape[1] == 1:  # only the batch's own instruction was looked up
            slots, asked, mask = seen.poses, target[:, None], torch.ones_like(target[:, None], dtype=torch.bool)
        else:
            slots, mask = seen.poses[:, 1:], self._in_view(labels)
            asked = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        rows = torch.arange(len(target), device=target.device)[:, None]
        out = {"pose": masked_mean((slots.float() - truth[rows, asked]).abs(), mask)}
        if seen.grounded is not None:
            out["attention"] = self._attention_loss(seen.grounded, labels, asked, mask)
        if seen.velocity is not None:
            out["velocity"] = self._velocity_loss(seen, truth[rows, asked], mask)
        with torch.no_grad():
            scale = self.normaliser.get_buffer("position_scale")[:3]
            gap = (seen.poses[:, 0, :3].float() - truth[rows[:, 0], target, :3]) * scale
            out["position_error"] = self.frames.newest(gap).norm(dim=-1).mean()
        return out

    def _folded(self, labels: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the labels with the frames as rows."""
        if self.frames.count == 1:
            return labels
        fold = self.frames.fold
        return {
            "target": self.frames.repeat(labels["target"]),
            "present": self.frames.repeat(labels["present"]),
            "position": fold("labels.position", labels["position"], 3),
            "pixel": {name: fold(f"labels.pixel.{name}", part, 3) for name, part in labels["pixel"].items()},
            "visible": {name: fold(f"labels.visible.{name}", part, 2) for name, part in labels["visible"].items()},
        }

    def _velocity_loss(self, seen: Seen, truth: Tensor, mask: Tensor) -> Tensor:
        """Return the error of the velocity since the oldest frame, where the object was in view then and is now."""
        assert seen.velocity is not None and seen.ages is not None
        places, shown, age = self.frames.split(truth)[..., :VELOCITY_SIZE], self.frames.split(mask), seen.ages[:, :1]
        wanted = rates(places[:, -1], places[:, :1], age)[:, 0]
        found = seen.velocity[:, -wanted.shape[1] :].float()
        return masked_mean((found - wanted).abs(), shown[:, 0] & shown[:, -1] & (age >= LEAST_AGE))

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
            name: self.frames.newest(grounded.attention[name][:, 0])
            .exp()
            .unflatten(-1, (height // stride, width // stride))
            for name, (height, width) in self.images.cameras.items()
        }


def _centres(view: View) -> Tensor:
    return cell_centres(*view.grid, device=view.features.device)


def _mean(group: TokenGroup) -> Tensor:
    if group.mask is None:
        return group.tokens.mean(dim=1)
    weights = group.mask[..., None].to(group.tokens.dtype)
    return (group.tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
