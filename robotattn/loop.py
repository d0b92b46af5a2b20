"""The one place where environment, agent, chunk queue and clock meet: recording and evaluation are both this loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from robotattn.control.chunks import ChunkOptions, ChunkQueue
from robotattn.types import Agent, Episode, Observation, Step, Watcher, tool_pose


def read_observation(raw: dict[str, Any]) -> Observation:
    """An environment's dictionary as an `Observation`."""
    return Observation(
        images=raw.get("images", {}),
        state=raw["state"],
        instruction=raw["instruction"],
        objects=raw.get("objects"),
        time=float(raw["time"][0]),
    )


class _Row:
    """One slot of the batch: an environment, the episode that runs in it, and its chunk queue."""

    def __init__(self, env: gym.Env, options: ChunkOptions) -> None:
        self.env, self.queue, self.seed = env, ChunkQueue(options), -1

    def start(self, seed: int, options: dict[str, Any] | None, keep: bool) -> None:
        raw, self.info = self.env.reset(seed=seed, options=options)
        self.observation, self.seed, self.keep = read_observation(raw), seed, keep
        self.instruction, self.steps, self.rows = self.observation.instruction, 0, list[Step]()
        self.queue.reset()

    def tick(self) -> Episode | None:
        """Send one command; return the episode if that ended it."""
        command = self.queue.next(tool_pose(self.observation.state.astype(np.float64)))
        if self.keep:
            self.rows.append(Step(self.observation, command, self.env.unwrapped.labels()))  # type: ignore[attr-defined]
        raw, _, terminated, truncated, self.info = self.env.step(command.action)
        self.observation, self.steps = read_observation(raw), self.steps + 1
        if not (terminated or truncated):
            return None
        success = bool(self.info["success"])  # at a tie of success and time limit, success wins
        reason = "success" if success else str(self.info["reason"])
        return Episode(
            self.seed, success, reason, self.steps, self.instruction, bool(terminated), bool(truncated),
            dict(self.info["episode"]), self.rows,
        )  # fmt: skip


def run_episodes(
    envs: Sequence[gym.Env],
    agent: Agent,
    seeds: Sequence[int],
    chunks: ChunkOptions | None = None,
    options: dict[str, Any] | None = None,
    keep: Callable[[int], bool] = lambda seed: False,
) -> Iterator[Episode]:
    """Run one episode a seed, as many at a time as there are environments; yield each as it ends.

    An episode depends on its seed alone, never on the row it ran in or on what ran there before. `keep(seed)` says
    whether the episode's rows (observation, command, labels) are kept: recording and videos need them.
    """
    waiting = list(reversed(seeds))
    rows = [_Row(env, chunks or ChunkOptions()) for env in envs[: len(waiting)]]
    running: dict[int, _Row] = {}
    for index, row in enumerate(rows):
        running[index] = _begin(row, index, waiting.pop(), agent, options, keep)
    while running:
        if isinstance(agent, Watcher):
            for index, row in running.items():
                agent.watch(index, row.observation)
        due = [index for index, row in running.items() if row.queue.needs_plan]
        if due:
            plans = agent.plan(due, [running[index].observation for index in due])
            for index, plan in zip(due, plans, strict=True):
                running[index].queue.put(plan)
        for index, row in list(running.items()):
            episode = row.tick()
            if episode is None:
                continue
            if waiting:
                running[index] = _begin(row, index, waiting.pop(), agent, options, keep)
            else:
                del running[index]
            yield episode


def _begin(
    row: _Row,
    index: int,
    seed: int,
    agent: Agent,
    options: dict[str, Any] | None,
    keep: Callable[[int], bool],
) -> _Row:
    row.start(seed, options, keep(seed))
    agent.reset(index)
    return row
