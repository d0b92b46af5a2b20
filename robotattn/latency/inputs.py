"""Observations in, a policy's batch out: the host's part of a control step, shared by evaluation and profiler."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from robotattn.types import Observation

Encode = Callable[[Sequence[str | None]], tuple[np.ndarray, np.ndarray]]
"""Texts → token ids int64 ``[B, L]`` and mask bool ``[B, L]``, True where real (a tokenizer's `encode`)."""


class Batcher:
    """Builds batches for one policy. The ids of an instruction are computed once and remembered."""

    def __init__(self, encode: Encode, cameras: Sequence[str], device: str | torch.device = "cpu") -> None:
        self.encode, self.cameras, self.device = encode, tuple(cameras), torch.device(device)
        self._ids: dict[str, np.ndarray] = {}

    def ids(self, instruction: str) -> np.ndarray:
        """The token ids of one instruction, int64 ``[L]``."""
        if instruction not in self._ids:
            self._ids[instruction] = self.encode([instruction])[0][0]
        return self._ids[instruction]

    def batch(self, observations: Sequence[Observation], length: int | None = None) -> dict[str, object]:
        """Stack observations; texts are padded on the right to the longest, or to `length` tokens if given.

        Raises ValueError naming a camera or the object tokens that an observation lacks.
        """
        texts = [self.ids(observation.instruction) for observation in observations]
        length = max(map(len, texts)) if length is None else length
        text, mask = np.zeros((len(texts), length), np.int64), np.zeros((len(texts), length), bool)
        for row, ids in enumerate(texts):
            text[row, : len(ids)], mask[row, : len(ids)] = ids, True
        batch: dict[str, object] = {
            "images": {camera: self._stack([_image(o, camera) for o in observations]) for camera in self.cameras},
            "state": self._stack([o.state for o in observations]),
            "text": self._tensor(text),
            "text_mask": self._tensor(mask),
        }
        objects = [o.objects for o in observations if o.objects is not None]
        if objects:
            batch["objects"] = self._stack(objects)
            batch["objects_mask"] = self._tensor(np.stack(objects) != 0).any(-1)
        return batch

    def _stack(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return self._tensor(np.stack(arrays))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _image(observation: Observation, camera: str) -> np.ndarray:
    if camera not in observation.images:
        have = ", ".join(observation.images) or "none"
        raise ValueError(f"images.{camera}: the policy needs this camera, the observation has {have}")
    return observation.images[camera]
