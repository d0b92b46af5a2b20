"""Observations in, a policy's batch out: the host's part of a control step, shared by evaluation and profiler."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from robotattn.policies import PolicyConfig
from robotattn.types import COLOURS, MAX_OBJECTS, OBJECT_SIZE, STATE_SIZE, Observation

Encode = Callable[[Sequence[str | None]], tuple[np.ndarray, np.ndarray]]
"""Texts → token ids int64 ``[B, L]`` and mask bool ``[B, L]``, True where real (a tokenizer's `encode`)."""

FIRST_ID = 2  # 0 pads, 1 says "no instruction"
TEXTS = 16  # different random instructions


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
        """Stack observations and copy them to the device; see `stack`."""
        return self.move(self.stack(observations, length))

    def stack(self, observations: Sequence[Observation], length: int | None = None) -> dict[str, object]:
        """Stack observations on the host; texts are padded on the right to the longest, or to `length` tokens.

        Raises ValueError naming a camera or the object tokens that an observation lacks.
        """
        texts = [self.ids(observation.instruction) for observation in observations]
        length = max(map(len, texts)) if length is None else length
        text, mask = np.zeros((len(texts), length), np.int64), np.zeros((len(texts), length), bool)
        for row, ids in enumerate(texts):
            text[row, : len(ids)], mask[row, : len(ids)] = ids, True
        batch: dict[str, object] = {
            "images": {camera: _stack([_image(o, camera) for o in observations]) for camera in self.cameras},
            "state": _stack([o.state for o in observations]),
            "text": torch.from_numpy(text),
            "text_mask": torch.from_numpy(mask),
        }
        objects = [o.objects for o in observations if o.objects is not None]
        if objects:
            batch["objects"] = _stack(objects)
            batch["objects_mask"] = torch.from_numpy(np.stack(objects) != 0).any(-1)
        return batch

    def move(self, batch: Mapping[str, object]) -> dict[str, object]:
        """Copy a stacked batch to the device; images stay uint8 on the way."""
        return {key: self.move(v) if isinstance(v, Mapping) else self._moved(v) for key, v in batch.items()}

    def _moved(self, value: object) -> torch.Tensor:
        assert isinstance(value, torch.Tensor)
        return value.to(self.device)


def _stack(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


def _image(observation: Observation, camera: str) -> np.ndarray:
    if camera not in observation.images:
        have = ", ".join(observation.images) or "none"
        raise ValueError(f"images.{camera}: the policy needs this camera, the observation has {have}")
    return observation.images[camera]


class RandomInputs:
    """Observations of a policy's shapes with fresh values, the same for the same seed."""

    def __init__(self, config: PolicyConfig, texts: Sequence[str], batch: int = 1, seed: int = 0) -> None:
        self.config, self.texts, self.size = config, tuple(texts), batch
        self.generator = np.random.default_rng(seed)

    def __call__(self) -> list[Observation]:
        """Return the observations of one step."""
        return [random_observation(self.config, self.generator, self.texts) for _ in range(self.size)]


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


def random_observation(config: PolicyConfig, generator: np.random.Generator, texts: Sequence[str]) -> Observation:
    """An observation of the policy's shapes with fresh values: zeros would be faster than anything a camera sees."""
    images = {name: generator.integers(0, 256, (*size, 3), np.uint8) for name, size in _views(config).items()}
    state = generator.normal(0, 0.5, STATE_SIZE).astype(np.float32)
    objects = _objects(generator) if config.objects else None
    return Observation(images, state, texts[int(generator.integers(len(texts)))], objects, 0.0)


def views(config: PolicyConfig) -> list[str]:
    """The images a policy reads: its cameras, and behind them what they saw one tick ago (``front@1``), two, ..."""
    return list(_views(config))


def _views(config: PolicyConfig) -> dict[str, tuple[int, int]]:
    sizes = dict(config.cameras)
    for age in range(1, getattr(config, "frames", 1)):
        sizes |= {f"{name}@{age}": size for name, size in config.cameras.items()}
    return sizes


def _objects(generator: np.random.Generator) -> np.ndarray:
    """Six objects in random places, every colour once."""
    objects = np.zeros((MAX_OBJECTS, OBJECT_SIZE), np.float32)
    objects[:, :4] = generator.normal(0, 0.3, (MAX_OBJECTS, 4))
    objects[np.arange(MAX_OBJECTS), 4 + generator.permutation(len(COLOURS))] = 1.0
    return objects
