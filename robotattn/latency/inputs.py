"""Observations in, a policy's batch out: the host's part of a control step, shared by evaluation and profiler."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from robotattn.policies import PolicyConfig
from robotattn.types import COLOURS, MAX_OBJECTS, OBJECT_SIZE, STATE_SIZE, Observation

Encode = Callable[[Sequence[str | None]], tuple[np.ndarray, np.ndarray]]
"""Texts → token ids int64 ``[B, L]`` and mask bool ``[B, L]``, True where real (a tokenizer's `encode`)."""

FIRST_ID = 2  # 0 pads, 1 says "no instruction"
TEXTS = 16  # different random instructions
PERIOD = 0.05  # (s) between made-up frames


Row = Observation | Sequence[Observation]
"""What one row of a batch saw: at its last control ticks, oldest first, or only now."""


class Batcher:
    """Builds batches for one policy. The ids of an instruction are computed once and remembered.

    frames: F, the policy's, `frame_gap` control ticks apart. For F > 1 a batch has what `Windows` has with so many
    frames: ``images`` and ``objects`` with an axis for them behind the batch's, oldest first, ``history`` (older
    states) and ``ages`` (s).
    """

    def __init__(
        self,
        encode: Encode,
        cameras: Sequence[str],
        device: str | torch.device = "cpu",
        frames: int = 1,
        frame_gap: int = 1,
    ) -> None:
        self.encode, self.cameras, self.device = encode, tuple(cameras), torch.device(device)
        self.frames, self.frame_gap = frames, frame_gap
        self._ids: dict[str, np.ndarray] = {}

    @property
    def memory(self) -> int:
        """How many control ticks the looks of a row span."""
        return 1 + (self.frames - 1) * self.frame_gap

    def ids(self, instruction: str) -> np.ndarray:
        """The token ids of one instruction, int64 ``[L]``."""
        if instruction not in self._ids:
            self._ids[instruction] = self.encode([instruction])[0][0]
        return self._ids[instruction]

    def batch(self, rows: Sequence[Row], length: int | None = None) -> dict[str, object]:
        """Stack observations and copy them to the device; see `stack`."""
        return self.move(self.stack(rows, length))

    def stack(self, rows: Sequence[Row], length: int | None = None) -> dict[str, object]:
        """Stack observations on the host; texts are padded on the right to the longest, or to `length` tokens.

        rows: for each row of the batch what was seen at its last control ticks, oldest first; before the first of them,
        or of a bare observation, that one is repeated, as at the start of an episode. The newest's instruction counts.
        Raises ValueError naming a camera or the object tokens that an observation lacks, or frames in the wrong order.
        """
        seen = [self._last(row) for row in rows]
        newest = [row[-1] for row in seen]
        batch: dict[str, object] = {
            "images": {camera: self._frames(seen, partial(_image, camera)) for camera in self.cameras},
            "state": _stack([observation.state for observation in newest]),
            **self._texts([self.ids(observation.instruction) for observation in newest], length),
        }
        if any(observation.objects is not None for observation in newest):
            objects = self._frames(seen, _seen_objects)
            batch["objects"], batch["objects_mask"] = objects, (objects != 0).any(-1)
        if self.frames > 1:
            batch["history"] = torch.from_numpy(np.stack([[o.state for o in row[:-1]] for row in seen]))
            batch["ages"] = torch.from_numpy(_ages(seen, _looked))
            if any(observation.stamps for observation in newest):  # joints and cameras have rates of their own
                since = _ages(seen, lambda observation: observation.stamps.get("state", observation.time))
                batch["state_ages"] = torch.from_numpy(since - since[:, -1:])
        return batch

    def move(self, batch: Mapping[str, object]) -> dict[str, object]:
        """Copy a stacked batch to the device; images stay uint8 on the way."""
        return {key: self.move(v) if isinstance(v, Mapping) else self._moved(v) for key, v in batch.items()}

    def _moved(self, value: object) -> torch.Tensor:
        assert isinstance(value, torch.Tensor)
        return value.to(self.device)

    def _last(self, row: Row) -> list[Observation]:
        """The F looks of a row, the last one newest, the first observation where a look would lie before it."""
        if isinstance(row, Observation):
            return [row] * self.frames
        now = len(row) - 1
        return [row[max(0, now - back * self.frame_gap)] for back in range(self.frames - 1, -1, -1)]

    def _texts(self, ids: Sequence[np.ndarray], length: int | None) -> dict[str, torch.Tensor]:
        length = max(map(len, ids)) if length is None else length
        text, mask = np.zeros((len(ids), length), np.int64), np.zeros((len(ids), length), bool)
        for row, own in enumerate(ids):
            text[row, : len(own)], mask[row, : len(own)] = own, True
        return {"text": torch.from_numpy(text), "text_mask": torch.from_numpy(mask)}

    def _frames(self, seen: Sequence[Sequence[Observation]], pick: Callable[[Observation], np.ndarray]) -> torch.Tensor:
        """Stack one sensor ``[B, F, ...]``; ``[B, ...]`` for one frame."""
        stacked = _stack([pick(observation) for row in seen for observation in row])
        return stacked if self.frames == 1 else stacked.unflatten(0, (len(seen), self.frames))


def _stack(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


def _image(camera: str, observation: Observation) -> np.ndarray:
    if camera not in observation.images:
        have = ", ".join(observation.images) or "none"
        raise ValueError(f"images.{camera}: the policy needs this camera, the observation has {have}")
    return observation.images[camera]


def _seen_objects(observation: Observation) -> np.ndarray:
    if observation.objects is None:
        raise ValueError("objects: one observation of the batch has no object tokens, others do")
    return observation.objects


def _ages(seen: Sequence[Sequence[Observation]], looked: Callable[[Observation], float]) -> np.ndarray:
    """How long before the newest observation each frame was looked at (s), float32 ``[B, F]``."""
    ages = np.array([[row[-1].time - looked(observation) for observation in row] for row in seen])
    if (np.diff(ages, axis=1) > 0).any():
        raise ValueError(f"frames: must come oldest first, got ages of {ages[(np.diff(ages) > 0).any(axis=1)][0]} s")
    return ages.astype(np.float32)


def _looked(observation: Observation) -> float:
    """When the scene of an observation was captured: by its oldest camera, where cameras have a rate of their own."""
    scene = [stamp for sensor, stamp in observation.stamps.items() if sensor != "state"]
    return min(scene, default=observation.time)


class RandomInputs:
    """What a policy sees at one step, of its shapes and with fresh values; the same for the same seed."""

    def __init__(self, config: PolicyConfig, texts: Sequence[str], batch: int = 1, seed: int = 0) -> None:
        self.config, self.texts, self.size = config, tuple(texts), batch
        count, gap = frames(config)
        self.ticks = 1 + (count - 1) * gap
        self.generator = np.random.default_rng(seed)

    def __call__(self) -> list[Row]:
        """Return the rows of one step: observations, or for a policy with frames those of its last ticks."""
        return [self._row() for _ in range(self.size)]

    def _row(self) -> Row:
        times = [PERIOD * tick for tick in range(self.ticks)]
        seen = [random_observation(self.config, self.generator, self.texts, time) for time in times]
        return seen[0] if self.ticks == 1 else seen


def frames(config: PolicyConfig) -> tuple[int, int]:
    """How many looks a policy sees at once, and how many control ticks lie between them."""
    return getattr(config, "frames", 1), getattr(config, "frame_gap", 1)


def newest(row: Row) -> Observation:
    """What a row sees now."""
    return row if isinstance(row, Observation) else row[-1]


def random_instructions(vocabulary: int, tokens: int, seed: int = 0) -> tuple[Encode, list[str]]:
    """Return an encoder of made-up texts into random ids, `tokens` of them each, and the texts.

    A policy with random weights has no tokenizer, and needs none: its time depends on the number of ids alone.
    """
    generator = np.random.default_rng(seed)
    table = {f"random {k}": generator.integers(min(FIRST_ID, vocabulary - 1), vocabulary, tokens) for k in range(TEXTS)}

    def encode(texts: Sequence[str | None]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.stack([table[str(text)] for text in texts]).astype(np.int64)
        return ids, np.ones(ids.shape, bool)

    return encode, list(table)


def random_observation(
    config: PolicyConfig, generator: np.random.Generator, texts: Sequence[str], time: float = 0.0
) -> Observation:
    """An observation of the policy's shapes with fresh values: zeros would be faster than anything a camera sees."""
    images = {name: generator.integers(0, 256, (*size, 3), np.uint8) for name, size in config.cameras.items()}
    state = generator.normal(0, 0.5, STATE_SIZE).astype(np.float32)
    objects = _objects(generator) if config.objects else None
    return Observation(images, state, texts[int(generator.integers(len(texts)))], objects, time)


def _objects(generator: np.random.Generator) -> np.ndarray:
    """Six objects in random places, every colour once."""
    objects = np.zeros((MAX_OBJECTS, OBJECT_SIZE), np.float32)
    objects[:, :4] = generator.normal(0, 0.3, (MAX_OBJECTS, 4))
    objects[np.arange(MAX_OBJECTS), 4 + generator.permutation(len(COLOURS))] = 1.0
    return objects
