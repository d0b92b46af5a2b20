"""Agents for the loop: a policy, and the two baselines that must score nothing.

A plan depends on its own observation alone. A matrix product may round a row differently in a batch of another size,
so a policy never sees a batch whose size depends on how many episodes happen to run: it sees one row at a time, or
batches padded to one fixed size after a probe has shown that there no row moves when its neighbours change.
"""

import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from robotattn.control.chunks import relative
from robotattn.latency.inputs import Batcher
from robotattn.policies.base import CANNOT_CONTINUE
from robotattn.policies.guidance import soft_weights
from robotattn.types import Observation, Plan, Running, tool_pose

TEXT_STEP = 16  # in a padded batch, texts are padded to a multiple of this many tokens

Act = Callable[[dict[str, object]], torch.Tensor]
"""A batch → actions ``[B, H, A]`` in physical units (a policy's `act`)."""

ActOn = Callable[[dict[str, object], torch.Tensor, torch.Tensor], torch.Tensor]
"""A batch, what is running ``[B, M, A]`` and its weights ``[B, M]`` → actions ``[B, H, A]`` (a policy's `act_on`)."""

Overlap = tuple[np.ndarray, torch.Tensor]
"""What is running in one row, as actions from its observation ``[m, A]``, and how much each is to be met ``[m]``."""


class PolicyAgent:
    """Plans with a policy; a row remembers the last frames that its policy reads, until it is reset, and nothing else.

    act: the policy's `act`. period: seconds between two actions of a chunk. anchored: actions are offsets from the tool
    pose of the observation (tool mode). micro_batch: rows a call; 1 is always exact, see `exact_micro_batch`.
    act_on: the policy's `act_on`, if it has one.
    """

    def __init__(
        self,
        act: Act,
        batcher: Batcher,
        period: float,
        anchored: bool,
        micro_batch: int = 1,
        act_on: ActOn | None = None,
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch: {micro_batch} is not a positive number of rows")
        self.act, self.batcher, self.period, self.anchored = act, batcher, period, anchored
        self.micro_batch, self.act_on = micro_batch, act_on
        self._seen: dict[int, deque[Observation]] = {}

    @property
    def continues(self) -> bool:
        """Whether `plan_from` is possible."""
        return self.act_on is not None

    def reset(self, row: int) -> None:
        """Forget what was seen in the episode that ran in this row."""
        self._seen.pop(row, None)

    @property
    def watches(self) -> bool:
        """Whether the policy reads more frames than that of now."""
        return self.batcher.frames > 1

    def watch(self, row: int, observation: Observation) -> None:
        """Remember what a row sees at this tick; a policy trained on every tick must not be shown every fourth."""
        seen = self._seen.setdefault(row, deque(maxlen=self.batcher.memory))
        if not seen or seen[-1] is not observation:
            seen.append(observation)

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        """One chunk for each observation, and what its row saw before."""
        return self._plans(rows, observations, [None] * len(rows))

    def plan_from(
        self, rows: Sequence[int], observations: Sequence[Observation], running: Sequence[Running | None]
    ) -> list[Plan]:
        """One chunk for each observation, that goes on from what is running in its row (None: nothing is).

        Raises ValueError if the policy cannot, and naming the field for what cannot be gone on from.
        """
        if not self.continues:
            raise ValueError(f"plan_from: {CANNOT_CONTINUE}")
        overlaps = [self._overlap(o, now) for o, now in zip(observations, running, strict=True)]
        return self._plans(rows, observations, overlaps)

    def _plans(
        self, rows: Sequence[int], observations: Sequence[Observation], overlaps: Sequence[Overlap | None]
    ) -> list[Plan]:
        seen = []
        for row, observation in zip(rows, observations, strict=True):
            self.watch(row, observation)
            seen.append(tuple(self._seen[row]))
        actions = self._actions(seen, overlaps)
        return [self._plan(o, a) for o, a in zip(observations, actions, strict=True)]

    def _plan(self, observation: Observation, actions: np.ndarray) -> Plan:
        return Plan(actions, observation.time, self.period, self._anchor(observation))

    def _anchor(self, observation: Observation) -> np.ndarray | None:
        return tool_pose(observation.state.astype(np.float64)) if self.anchored else None

    def _overlap(self, observation: Observation, running: Running | None) -> Overlap | None:
        """What is running, seen from this observation; None if that is no action at all."""
        if running is None or not len(running.targets):
            return None
        if not math.isclose(running.period, self.period):
            raise ValueError(f"running.period: {running.period} s, the policy's actions are {self.period} s apart")
        if not np.isfinite(running.targets).all():
            raise ValueError("running.targets: a non-finite target")
        anchor = self._anchor(observation)
        actions = running.targets if anchor is None else relative(running.targets, anchor)
        return actions, soft_weights(len(actions), running.frozen)

    def _actions(
        self, seen: Sequence[Sequence[Observation]], overlaps: Sequence[Overlap | None] | None = None
    ) -> list[np.ndarray]:
        """One chunk for each row's last observations, oldest first."""
        overlaps = [None] * len(seen) if overlaps is None else overlaps
        if self.micro_batch == 1:
            return [self._call([row], [own], None)[0] for row, own in zip(seen, overlaps, strict=True)]
        result: dict[int, np.ndarray] = {}
        for (length, _), group in self._groups(seen, overlaps).items():
            for start in range(0, len(group), self.micro_batch):
                rows = group[start : start + self.micro_batch]
                fill = self.micro_batch - len(rows)
                given = [seen[row] for row in rows + rows[:1] * fill], [overlaps[row] for row in rows] + [None] * fill
                result |= zip(rows, self._call(*given, length), strict=False)
        return [result[row] for row in range(len(seen))]

    def _groups(
        self, seen: Sequence[Sequence[Observation]], overlaps: Sequence[Overlap | None]
    ) -> dict[tuple[int, bool], list[int]]:
        """Rows by padded text length, which must depend on the row's own text only, and by whether they go on."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for row, (observations, overlap) in enumerate(zip(seen, overlaps, strict=True)):
            length = -(-len(self.batcher.ids(observations[-1].instruction)) // TEXT_STEP) * TEXT_STEP
            groups.setdefault((length, overlap is not None), []).append(row)
        return groups

    def _call(
        self, seen: Sequence[Sequence[Observation]], overlaps: Sequence[Overlap | None], length: int | None
    ) -> np.ndarray:
        with torch.inference_mode():
            batch = self.batcher.batch(seen, length)
            if all(overlap is None for overlap in overlaps):
                actions = self.act(batch)
            else:
                assert self.act_on is not None
                actions = self.act_on(batch, *stack_overlaps(overlaps, self.batcher.device))
        return actions.detach().to("cpu", torch.float64).numpy()


def stack_overlaps(
    overlaps: Sequence[Overlap | None], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return actions ``[B, M, A]`` and weights ``[B, M]`` of rows of any length, zeros where a row has nothing."""
    longest = max((actions.shape for actions, _ in filter(None, overlaps)), default=(0, 0))
    actions, weights = torch.zeros(len(overlaps), *longest), torch.zeros(len(overlaps), longest[0])
    for row, overlap in enumerate(overlaps):
        if overlap is not None:
            actions[row, : len(overlap[0])] = torch.from_numpy(np.asarray(overlap[0]))
            weights[row, : len(overlap[1])] = overlap[1]
    return actions.to(device), weights.to(device)


def exact_micro_batch(agent: PolicyAgent, observation: Observation, size: int) -> int:
    """Return `size` if no row of a batch of that size changes by one bit with its neighbours or its place, else 1."""
    if size == 1:
        return 1
    probe = PolicyAgent(agent.act, agent.batcher, agent.period, agent.anchored, size, agent.act_on)
    others = [_history(observation, seed, agent.batcher.memory) for seed in range(2 * size + 1)]
    rows = [(*others.pop()[:-1], observation), *others]
    nothing: list[Overlap | None] = [None] * len(rows)
    overlaps = [nothing]
    if agent.continues:
        overlaps.append([_overlap(probe._actions(rows[:1])[0], seed) for seed in range(len(rows))])
    return size if all(_steady(probe, rows, own) for own in overlaps) else 1


def _steady(probe: PolicyAgent, rows: Sequence[Sequence[Observation]], overlaps: Sequence[Overlap | None]) -> bool:
    """Whether the first row's actions are the same alone, and among others in each place of a full batch."""
    alone, size = probe._actions(rows[:1], overlaps[:1])[0], probe.micro_batch
    for place in range(size):
        order = [*range(1, place + 1), 0, *range(size + place + 1, 2 * size)]
        among = probe._actions([rows[row] for row in order], [overlaps[row] for row in order])
        if not np.array_equal(among[place], alone):
            return False
    return True


def _overlap(actions: np.ndarray, seed: int) -> Overlap:
    """Some actions like these, as if they were running; how many, and how many of them are frozen, varies."""
    generator = np.random.default_rng(seed)
    running = actions[: 1 + seed % len(actions)]
    frozen = int(generator.integers(len(running) + 1))
    return running + generator.normal(0, 0.01, running.shape), soft_weights(len(running), frozen)


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
