"""Observations in, a policy's batch out: the host's part of a control step, shared by evaluation and profiler."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from robotattn.types import Observation

Encode = Callable[[Sequence[str | None]], tuple[np.ndarray, np.ndarray]]
"""Texts → token ids int64 ``[B, L]`` and mask bool ``[B, L]``, True where real (a tokenizer's `encode`)."""


class Batcher:
    """Builds batches for one policy. The ids of an instruction are computed once and remembered.

    frames: F, the policy's. For F > 1 a batch has what `Windows` has with so many frames: ``images`` and ``objects``
    with an axis for them behind the batch's, oldest first, ``history`` (older states) and ``ages`` (s).
    """

    def __init__(
        self, encode: Encode, cameras: Sequence[str], device: str | torch.device = "cpu", frames: int = 1
    ) -> None:
        self.encode, self.cameras, self.device, self.frames = encode, tuple(cameras), torch.device(device), frames
        self._ids: dict[str, np.ndarray] = {}

    def ids(self, instruction: str) -> np.ndarray:
        """The token ids of one instruction, int64 ``[L]``."""
        if instruction not in self._ids:
            self._ids[instruction] = self.encode([instruction])[0][0]
        return self._ids[instruction]

    def batch(
        self, rows: Sequence[Observation | Sequence[Observation]], length: int | None = None
    ) -> dict[str, object]:
        """Stack observations; texts are padded on the right to the longest, or to `length` tokens if given.

        rows: for each row of the batch what was seen at its last F control ticks, oldest first; if that is less, or a
        bare observation, the first one is repeated, as at the start of an episode. The newest one's instruction counts.
        Raises ValueError naming a camera or the object tokens that an observation lacks, or frames in the wrong order.
        """
        seen = [self._last(row) for row in rows]
        newest = [row[-1] for row in seen]
        batch: dict[str, object] = {
            "images": {camera: self._frames(seen, partial(_image, camera=camera)) for camera in self.cameras},
            "state": self._tensor(np.stack([o.state for o in newest])),
            **self._texts([self.ids(o.instruction) for o in newest], length),
        }
        if any(o.objects is not None for o in newest):
            objects = self._frames(seen, _objects)
            batch["objects"], batch["objects_mask"] = objects, (objects != 0).any(-1)
        if self.frames > 1:
            batch["history"] = self._tensor(np.stack([[o.state for o in row[:-1]] for row in seen]))
            batch["ages"] = self._tensor(_ages(seen))
        return batch

    def _last(self, row: Observation | Sequence[Observation]) -> list[Observation]:
        """The last F observations of a row, the first one repeated if there are fewer."""
        if isinstance(row, Observation):
            return [row] * self.frames
        return [row[0]] * (self.frames - len(row)) + list(row[-self.frames :])

    def _texts(self, ids: Sequence[np.ndarray], length: int | None) -> dict[str, torch.Tensor]:
        length = max(map(len, ids)) if length is None else length
        text, mask = np.zeros((len(ids), length), np.int64), np.zeros((len(ids), length), bool)
        for row, own in enumerate(ids):
            text[row, : len(own)], mask[row, : len(own)] = own, True
        return {"text": self._tensor(text), "text_mask": self._tensor(mask)}

    def _frames(self, seen: Sequence[Sequence[Observation]], pick: Callable[[Observation], np.ndarray]) -> torch.Tensor:
        """Stack one sensor ``[B, F, ...]``; ``[B, ...]`` for one frame."""
        stacked = np.stack([pick(observation) for row in seen for observation in row])
        return self._tensor(
            stacked if self.frames == 1 else stacked.reshape(len(seen), self.frames, *stacked.shape[1:])
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _image(observation: Observation, camera: str) -> np.ndarray:
    if camera not in observation.images:
        have = ", ".join(observation.images) or "none"
        raise ValueError(f"images.{camera}: the policy needs this camera, the observation has {have}")
    return observation.images[camera]


def _objects(observation: Observation) -> np.ndarray:
    if observation.objects is None:
        raise ValueError("objects: one observation of the batch has no object tokens, others do")
    return observation.objects


def _ages(seen: Sequence[Sequence[Observation]]) -> np.ndarray:
    """How long before the newest each frame was seen (s), float32 ``[B, F]``."""
    ages = np.array([[row[-1].time - observation.time for observation in row] for row in seen])
    if (np.diff(ages, axis=1) > 0).any():
        raise ValueError(f"frames: must come oldest first, got ages of {ages[(np.diff(ages) > 0).any(axis=1)][0]} s")
    return ages.astype(np.float32)
