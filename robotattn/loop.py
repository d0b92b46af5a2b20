"""The one place where environment, agent, chunk queue and clock meet: recording and evaluation are both this loop.

The world moves on while the agent thinks. A control tick, and within it every physics step of 2 ms at which something
is due, goes in this order: the world's own events, captures of sensors with a rate of their own, chunks that have come,
observation and inference (one that takes no time comes at once), look-up of the command, physics. An episode depends on
its seed alone, never on the row it ran in.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from robotattn.control.chunks import ChunkOptions, ChunkQueue
from robotattn.control.clock import PHYSICS_STEP, Clock, Fixed
from robotattn.control.safety import Limits
from robotattn.control.sensors import AgeOfInformation, SensorRates
from robotattn.guard import Guard
from robotattn.sight import Sight
from robotattn.types import Agent, Command, Continuer, Episode, Observation, Running, Step, Watcher

Log = Callable[[int, int, str, tuple[int, ...]], None]
"""Told of every event: the episode's seed, its time (ns), and "observe" or "arrive" with the inference's number, or
"command" with the chunk's and the action's."""
NOTHING = Command(np.zeros(0), float("nan"))  # what is sent before the first chunk comes: the robot holds its pose


@dataclass(frozen=True)
class Timing:
    """What the loop knows of time: how long an inference takes, when sensors look, and how fast the arm may be sent.

    limits: of the safety filter, but for the workspace, which is the environment's; None: there is no filter.
    """

    clock: Clock = field(default_factory=Fixed)
    sensors: SensorRates = field(default_factory=SensorRates)
    limits: Limits | None = None
    log: Log | None = None


class _Row:
    """One slot of the batch: an environment, the episode that runs in it, and its chunk queue."""

    def __init__(self, env: gym.Env, options: ChunkOptions, timing: Timing) -> None:
        self.env: Any = env.unwrapped  # the four calls of a tick are no part of Gymnasium's
        self.sight, self.timing = Sight(self.env, timing.sensors), timing
        self.queue = ChunkQueue(options, finite=timing.limits is None)
        self.guard = None if timing.limits is None else Guard(self.env, timing.limits)

    def start(self, seed: int, options: dict[str, Any] | None, keep: bool) -> None:
        raw, _ = self.env.reset(seed=seed, options=options)
        self.seed, self.keep, self.now, self.ticks = seed, keep, 0, 0
        self.sight.reset(seed, raw)
        self.instruction, self.rows = raw["instruction"], list[Step]()
        self.command = NOTHING
        self.ages, self.latencies, self.phases = Counter[int](), list[int](), {"cold": 0, "running": 0, "held": 0}
        self.stamps, self.information = dict[int, dict[str, int]](), AgeOfInformation()
        self.queue.reset()
        if self.guard is not None:
            self.guard.reset()

    @property
    def observation(self) -> Observation:
        """What is known now; looked at once an instant, and only if somebody asks."""
        return self.sight.look(self.now)

    def arrive(self) -> None:
        """Let come what is due now: captures of sensors, and chunks."""
        self.sight.capture(self.now)
        for number in self.queue.arrive(self.now):
            self._tell("arrive", (number,))

    def send_off(self, plan: Any) -> None:
        """Start the flight of a plan made from what is seen now."""
        number = self.queue.inferences
        latency = self.timing.clock.latency(self.seed, number)
        self._tell("observe", (number,))
        self.queue.start(self.now, plan, latency)
        self.latencies.append(latency)
        self.stamps[number] = {name: round(stamp * 1e9) for name, stamp in self.observation.stamps.items()}
        self.arrive()

    def tick(self) -> Episode | None:
        """Live through one control period; return the episode if that ended it."""
        end = self.now + self.env.substeps * PHYSICS_STEP
        self._act(again=True)
        self.phases[self.queue.phase(self.now)] += 1
        if self.keep:
            self.rows.append(Step(self.observation, self.command, self.env.labels()))
        while (until := self._next(end)) < end:
            self._advance(until)
            self.arrive()
            self._act()
        self._advance(end)
        terminated, truncated, info = self.env.end_tick()
        self.ticks += 1
        return self._episode(terminated, truncated, info) if terminated or truncated else None

    def _next(self, end: int) -> int:
        """When something is due again, `end` at the latest."""
        return min(end, self.queue.next_event(self.now) or end, self.sight.next_after(self.now) or end)

    def _advance(self, until: int) -> None:
        seen = self.queue.seen()
        if seen is not None:
            self.ages.update(range(self.now - seen, until - seen, PHYSICS_STEP))
        self.env.advance((until - self.now) // PHYSICS_STEP)
        self.now = until

    def _act(self, again: bool = False) -> None:
        """Send the command whose time it is. again: let the filter go on toward one that it could not pass at once."""
        command = self.queue.look_up(self.now, self.env.tool_pose())
        if self.guard is not None:
            self.guard.act(self.now, command, again)
        elif command is not None:
            self.env.send(command.action)
        if command is not None:
            self.command = command
            self.information.add(self.now, self.stamps[self.queue.sent[0]])
            self._tell("command", self.queue.sent)

    def _tell(self, what: str, which: tuple[int, ...]) -> None:
        if self.timing.log is not None:
            self.timing.log(self.seed, self.now, what, which)

    def _episode(self, terminated: bool, truncated: bool, info: dict[str, Any]) -> Episode:
        success = bool(info["success"])  # at a tie of success and time limit, success wins
        reason = "success" if success else str(info["reason"])
        timing: dict[str, Any] = {"latencies": self.latencies, "ages": self.ages, "ticks": self.phases}
        timing["information"] = self.information.ages
        if self.guard is not None:
            timing["interventions"] = self.guard.filter.report
        return Episode(
            self.seed, success, reason, self.ticks, self.instruction, bool(terminated), bool(truncated),
            dict(info["episode"]), self.rows, timing | {"overtaken": self.queue.overtaken},
        )  # fmt: skip


def run_episodes(
    envs: Sequence[gym.Env],
    agent: Agent,
    seeds: Sequence[int],
    chunks: ChunkOptions | None = None,
    options: dict[str, Any] | None = None,
    keep: Callable[[int], bool] = lambda seed: False,
    timing: Timing | None = None,
) -> Iterator[Episode]:
    """Run one episode a seed, as many at a time as there are environments; yield each as it ends.

    An episode depends on its seed alone, never on the row it ran in or on what ran there before. `keep(seed)` says
    whether the episode's rows (observation, command, labels) are kept: recording and videos need them.
    """
    waiting = list(reversed(seeds))
    chunks = chunks or ChunkOptions()
    rows = [_Row(env, chunks, timing or Timing()) for env in envs[: len(waiting)]]
    running: dict[int, _Row] = {}
    for index, row in enumerate(rows):
        running[index] = _begin(row, index, waiting.pop(), agent, options, keep)
    while running:
        _think(running, agent, chunks.kind == "real-time")
        for index, row in list(running.items()):
            episode = row.tick()
            if episode is None:
                continue
            if waiting:
                running[index] = _begin(row, index, waiting.pop(), agent, options, keep)
            else:
                del running[index]
            yield episode


def _think(running: dict[int, _Row], agent: Agent, carry_on: bool) -> None:
    """Let chunks come, then plan for all rows that are due, together: they take their times apart."""
    for index, row in running.items():
        row.arrive()
        if isinstance(agent, Watcher) and agent.watches:
            agent.watch(index, row.observation)
    due = [index for index, row in running.items() if row.queue.due(row.now)]
    if not due:
        return
    seen = [running[index].observation for index in due]
    if carry_on:
        assert isinstance(agent, Continuer)
        ahead: list[Running | None] = [running[index].queue.running(running[index].now) for index in due]
        plans = agent.plan_from(due, seen, ahead)
    else:
        plans = agent.plan(due, seen)
    for index, plan in zip(due, plans, strict=True):
        running[index].send_off(plan)


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
