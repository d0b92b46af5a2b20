"""Agents for the loop: a policy, and the two baselines that must score nothing.

A plan depends on its own observation alone. A matrix product may round a row differently in a batch of another size,
so a policy never sees a batch whose size depends on how many episodes happen to run: it sees one row at a time, or
batches padded to one fixed size after a probe has shown that there no row moves when its neighbours change.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from robotattn.latency.inputs import Batcher
from robotattn.types import Observation, Plan, tool_pose

TEXT_STEP = 16  # in a padded batch, texts are padded to a multiple of this many tokens

Act = Callable[[dict[str, object]], torch.Tensor]
"""A batch → actions ``[B, H, A]`` in physical units (a policy's `act`)."""


class PolicyAgent:
    """Plans with a policy; a row remembers the last frames that its policy reads, until it is reset, and nothing else.

    act: the policy's `act`. period: seconds between two actions of a chunk. anchored: actions are offsets from the tool
    pose of the observation (tool mode). micro_batch: rows a call; 1 is always exact, see `exact_micro_batch`.
    """

    def __init__(self, act: Act, batcher: Batcher, period: float, anchored: bool, micro_batch: int = 1) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch: {micro_batch} is not a positive number of rows")
        self.act, self.batcher, self.period, self.anchored = act, batcher, period, anchored
        self.micro_batch = micro_batch
        self._seen: dict[int, deque[Observation]] = {}

    def reset(self, row: int) -> None:
        """Forget what was seen in the episode that ran in this row."""
        self._seen.pop(row, None)

    @property
    def watches(self) -> bool:
        """Whether the policy reads more frames than that of now."""
        return self.batcher.frames > 1

    def watch(self, row: int, observation: Observation) -> None:
        """Remember what a row sees at this tick; a policy trained on every tick must not be shown every fourth."""
        seen = self._seen.setdefault(row, deque(maxlen=self.batcher.frames))
        if not seen or seen[-1] is not observation:
            seen.append(observation)

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        """One chunk for each observation, and what its row saw before."""
        seen = []
        for row, observation in zip(rows, observations, strict=True):
            self.watch(row, observation)
            seen.append(tuple(self._seen[row]))
        actions = self._actions(seen)
        return [self._plan(o, a) for o, a in zip(observations, actions, strict=True)]

    def _plan(self, observation: Observation, actions: np.ndarray) -> Plan:
        anchor = tool_pose(observation.state.astype(np.float64)) if self.anchored else None
        return Plan(actions, observation.time, self.period, anchor)

    def _actions(self, seen: Sequence[Sequence[Observation]]) -> list[np.ndarray]:
        """One chunk for each row's last observations, oldest first."""
        if self.micro_batch == 1:
            return [self._call([row], None)[0] for row in seen]
        result: dict[int, np.ndarray] = {}
        for length, group in self._groups(seen).items():
            for start in range(0, len(group), self.micro_batch):
                rows = group[start : start + self.micro_batch]
                padded = rows + rows[:1] * (self.micro_batch - len(rows))
                result |= zip(rows, self._call([seen[row] for row in padded], length), strict=False)
        return [result[row] for row in range(len(seen))]

    def _groups(self, seen: Sequence[Sequence[Observation]]) -> dict[int, list[int]]:
        """Rows by padded text length, which must depend on the row's own text only."""
        groups: dict[int, list[int]] = {}
        for row, observations in enumerate(seen):
            length = -(-len(self.batcher.ids(observations[-1].instruction)) // TEXT_STEP) * TEXT_STEP
            groups.setdefault(length, []).append(row)
        return groups

    def _call(self, seen: Sequence[Sequence[Observation]], length: int | None) -> np.ndarray:
        with torch.inference_mode():
            actions = self.act(self.batcher.batch(seen, length))
        return actions.detach().to("cpu", torch.float64).numpy()


def exact_micro_batch(agent: PolicyAgent, observation: Observation, size: int) -> int:
    """Return `size` if no row of a batch of that size changes by one bit with its neighbours or its place, else 1."""
    if size == 1:
        return 1
    probe = PolicyAgent(agent.act, agent.batcher, agent.period, agent.anchored, size)
    others = [_history(observation, seed, agent.batcher.frames) for seed in range(2 * size + 1)]
    own = (*others.pop()[:-1], observation)
    alone = probe._actions([own])[0]
    for place in range(size):
        rows = [*others[:place], own, *others[size + place : 2 * size - 1]]
        if not np.array_equal(probe._actions(rows)[place], alone):
            return 1
    return size


def _history(observation: Observation, seed: int, frames: int) -> tuple[Observation, ...]:
    """As many disturbed observations, a tenth of a second apart, the newest at the time of the given one."""
    return tuple(
        replace(_disturbed(observation, seed * frames + back), time=observation.time - back / 10)
        for back in range(frames - 1, -1, -1)
    )


def _disturbed(observation: Observation, seed: int) -> Observation:
    """An observation of the same shapes and the same text with other values."""
    generator = np.random.default_rng(seed)
    images = {
        name: generator.integers(0, 256, image.shape).astype(image.dtype) for name, image in observation.images.items()
    }
    objects = observation.objects
    if objects is not None:
        objects = generator.permutation(objects) + generator.normal(0, 0.1, objects.shape).astype(objects.dtype)
    state = observation.state + generator.normal(0, 0.1, observation.state.shape).astype(observation.state.dtype)
    return replace(observation, images=images, objects=objects, state=state)


class ConstantAgent:
    """Sends the same action at every tick; of zeros, it is the zero policy."""

    def __init__(self, action: np.ndarray, period: float) -> None:
        self.action, self.period = np.asarray(action, np.float64), period

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        """The action, relative to the tool pose now where that matters."""
        return [_one_step(self.action, observation, self.period) for observation in observations]


class RandomAgent:
    """Sends uniformly random actions from a box; the draw is a function of the observation, so it repeats exactly."""

    def __init__(self, low: np.ndarray, high: np.ndarray, period: float, seed: int = 0) -> None:
        self.low, self.high, self.period, self.seed = low, high, period, seed

    def reset(self, row: int) -> None:
        """Nothing to forget: the generator is made anew for each observation."""

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        """One random action for each observation."""
        return [_one_step(self._draw(observation), observation, self.period) for observation in observations]

    def _draw(self, observation: Observation) -> np.ndarray:
        seen = observation.state.tobytes() + observation.instruction.encode() + str(observation.time).encode()
        return np.random.default_rng((self.seed, zlib.crc32(seen))).uniform(self.low, self.high)


def _one_step(action: np.ndarray, observation: Observation, period: float) -> Plan:
    anchor = tool_pose(observation.state.astype(np.float64)) if len(action) == 5 else None
    return Plan(action[None], observation.time, period, anchor)
