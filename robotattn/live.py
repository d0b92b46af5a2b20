"""A checkpoint in real time: the simulated arm's physics follows the wall clock, and the loop is a robot's.

In goes a checkpoint; out comes what became of every tick and every inference, and how many episodes succeeded, which
follow one another for the whole time.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from robotattn import checkpoint
from robotattn.agents import PolicyAgent
from robotattn.config import UsageError, from_dict
from robotattn.control.account import NEVER, Account
from robotattn.control.chunks import ChunkOptions, Handling, relative
from robotattn.control.clock import PHYSICS_STEP, nanoseconds
from robotattn.control.realtime import Pace, run_realtime
from robotattn.control.safety import Interventions, Limits
from robotattn.envs import EnvConfig, TabletopEnv, make_env
from robotattn.evaluate import success_rate
from robotattn.guard import Guard
from robotattn.latency.measure import quiet
from robotattn.latency.percentiles import summary as percentiles
from robotattn.latency.schedule import jitter
from robotattn.rollouts import Job, machine, make_agent
from robotattn.seeds import stream
from robotattn.sight import read_observation
from robotattn.timing import all_interventions
from robotattn.types import Command, Continuer, Observation, Plan, Running, Watcher

SWITCH = 0.0005  # the longest that the thinking thread keeps the interpreter from a tick that is due (s)
SHOWN = 10  # stalls that are named
WARM = 5  # inferences before the clock runs: the first ones are slow


@dataclass(frozen=True)
class LiveConfig:
    """Run a checkpoint in real time. None keeps what the checkpoint was trained on."""

    checkpoint: Path
    """Checkpoint folder."""
    hz: int = 50
    """Control rate (Hz): commands a second. The actions of a chunk keep the period that the policy was trained at."""
    seconds: float = 60.0
    """How long to run."""
    task: Literal["pick_up", "pick_moving", "pick_reversing", "pick_disturbed"] | None = None
    """Which task."""
    late: Handling = "hold"
    """What becomes of a chunk that comes late, as in evaluate."""
    execute: int = 1
    """hold, continue: actions executed of each chunk before planning again."""
    threshold: float = 0.5
    """queue: ask again when this share of the chunk is left."""
    patience: float = 0.1
    """An inference that takes longer is a stall, and named (s)."""
    safety: bool = False
    """Send every command through the safety filter."""
    stall: str | None = None
    """Let one inference stall, to see what happens: 500ms@10s, for how long and when."""
    seed: int = 1000
    """Base seed of the stream of episode seeds."""
    device: str = "cpu"
    """Where the policy runs: cpu, cuda or cuda:1."""
    threads: int = 1
    """Of the policy's computations."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads: {self.threads}, allowed is 1 or more")
        self.chunks()
        self.pace()
        if self.stall is not None:
            stalling(self.stall)

    def chunks(self) -> ChunkOptions:
        return ChunkOptions(self.execute, handling=self.late, threshold=self.threshold)

    def pace(self, every: int = 1) -> Pace:
        return Pace(self.hz, self.seconds, patience=self.patience * self.hz, every=every)


def stalling(text: str) -> tuple[int, int]:
    """Read ``500ms@10s``: for how long, and when (ns); ValueError for another word."""
    duration, _, at = text.partition("@")
    try:
        return nanoseconds(duration), nanoseconds(at)
    except ValueError as error:
        raise ValueError(f"stall: {text!r}: {error}; allowed is DURATION@TIME such as 500ms@10s") from None


def live(config: LiveConfig, tell: Callable[[str], object] = lambda message: None) -> dict[str, Any]:
    """Run for the time asked, or until interrupted; return what became of it.

    tell: is told of a stall while it lasts. Raises UsageError for what cannot be run.
    """
    torch.set_num_threads(config.threads)
    env, period = _environment(config)
    robot = SimulatedRobot(env, _seeds(config.seed), limits=Limits() if config.safety else None)
    agent = _agent(config, env)
    if config.late == "real-time" and not isinstance(agent, Continuer):
        raise UsageError("late: real-time, but this policy cannot plan on from what is running")
    robot.restart()
    for _ in range(WARM):
        agent.plan([0], [robot.observe()])
    every = max(1, round(period * config.hz)) if agent.watches else 1
    act = agent if config.stall is None else Stalling(agent, *stalling(config.stall))
    with quiet(), switching(SWITCH):
        robot.restart()
        account = run_realtime(robot, act, config.chunks(), config.pace(every), tell)
    found = describe(account) | {"episodes": _episodes(robot.ended), "machine": _machine(config)}
    return found if robot.guard is None else found | {"safety": all_interventions(robot.interventions)}


def _environment(config: LiveConfig) -> tuple[TabletopEnv, float]:
    """The checkpoint's environment at this rate, and the period of its policy's actions (s)."""
    loaded = checkpoint.load(config.checkpoint)
    trained = from_dict(EnvConfig, loaded.env, f"{config.checkpoint}: env")
    task = config.task or trained.task
    try:
        changed = replace(trained, hz=config.hz, task=task, action_mode=loaded.config.action_mode)
    except ValueError as error:
        raise UsageError(f"live: {error}") from None
    if config.execute > loaded.config.chunk:
        raise UsageError(f"execute: {config.execute} actions, the policy's chunk has {loaded.config.chunk}")
    return make_env(changed), 1 / trained.hz


def _seeds(base: int) -> Iterator[int]:
    return (stream("evaluate", base, 1, index)[0] for index in count())


def _agent(config: LiveConfig, env: TabletopEnv) -> PolicyAgent:
    job = Job(tuple(stream("evaluate", config.seed, 1)), env.config, "policy", config.checkpoint, config.device)
    agent = make_agent(job, [env])
    assert isinstance(agent, PolicyAgent)
    agent.micro_batch = 1  # a robot is one row
    return agent


def _machine(config: LiveConfig) -> dict[str, Any]:
    return machine(config.device) | {"load": list(os.getloadavg())}


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Let a thread that waits for the interpreter wait no longer than this before the running one is asked for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class SimulatedRobot:
    """A tabletop environment whose physics follows the wall clock; a `Robot`, and `Episodic`.

    A control tick of the environment, at which it judges, is one of its own time: it comes when its physics steps have
    been run, however late the loop looks.
    """

    def __init__(
        self,
        env: TabletopEnv,
        seeds: Iterator[int],
        clock: Callable[[], int] = time.perf_counter_ns,
        limits: Limits | None = None,
    ) -> None:
        self.env, self.seeds, self.clock = env, seeds, clock
        self.guard = None if limits is None else Guard(env, limits)
        self.interventions: list[Interventions] = []  # of the guard, one an episode
        self.ended: list[dict[str, Any]] = []  # episodes: seed, success, reason, and what the world tells of them
        self._over, self._sent, self._origin = True, np.zeros(0), 0

    def restart(self) -> None:
        """Begin the episode of the next seed; its time begins when it is set up."""
        self.env.reset(seed=next(self.seeds))
        if self.guard is not None:
            self.guard.reset()
            self.interventions.append(self.guard.filter.report)
        self._over, self._sent, self._origin = False, np.zeros(0), self.clock()

    def over(self) -> bool:
        """Let the world catch up with the clock; whether the episode ended on the way."""
        due = (self.clock() - self._origin) // PHYSICS_STEP
        while not self._over and self.env.physics_steps < due:
            to_border = self.env.substeps - self.env.physics_steps % self.env.substeps
            self.env.advance(min(due - self.env.physics_steps, to_border))
            if self.env.physics_steps % self.env.substeps == 0:
                self._judge()
        return self._over

    def _judge(self) -> None:
        terminated, truncated, info = self.env.end_tick()
        if terminated or truncated:
            self._over = True
            kept = {"seed": self.env.episode_seed, "success": bool(info["success"]), "reason": info["reason"]}
            self.ended.append(kept | info["episode"])

    def observe(self) -> Observation:
        return read_observation(self.env.observe())

    def tool_pose(self) -> np.ndarray:
        return self.env.tool_pose()

    def send(self, target: np.ndarray, age: float) -> None:
        """Head for a target; the same one again leaves the actuators as they are, or goes on toward what is not safe.

        A guard sends what is safe of a target, and with every tick more of it.
        """
        again, self._sent = np.array_equal(target, self._sent), target
        in_tool = self.env.config.action_mode == "tool"
        action = relative(target, self.env.tool_pose()) if in_tool and not again else target
        if self.guard is not None:
            now = self.env.physics_steps * PHYSICS_STEP
            self.guard.act(now, None if again else Command(action, age), again)
        elif not again:
            self.env.send(action)

    def close(self) -> None:
        self.env.close()


class Stalling:
    """An agent of which one inference stalls, the first one asked for after some time; ns."""

    def __init__(self, agent: PolicyAgent, duration: int, at: int) -> None:
        self.agent, self.duration, self.at = agent, duration, at
        self.began: int | None = None
        self.stalled = False

    @property
    def watches(self) -> bool:
        return isinstance(self.agent, Watcher) and self.agent.watches

    def watch(self, row: int, observation: Observation) -> None:
        self.agent.watch(row, observation)

    def reset(self, row: int) -> None:
        self.agent.reset(row)

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        self._stall()
        return self.agent.plan(rows, observations)

    def plan_from(
        self, rows: Sequence[int], observations: Sequence[Observation], running: Sequence[Running | None]
    ) -> list[Plan]:
        self._stall()
        assert isinstance(self.agent, Continuer)
        return self.agent.plan_from(rows, observations, running)

    def _stall(self) -> None:
        now = time.perf_counter_ns()
        self.began = now if self.began is None else self.began
        if not self.stalled and now - self.began >= self.at:
            self.stalled = True
            time.sleep(self.duration / 1e9)


def describe(account: Account) -> dict[str, Any]:
    """An account in plain values: shares, percentiles (ms), the jitter's histogram (us), the stalls by name."""
    begun, ran = account.begun_ns[account.begun_ns != NEVER], account.own_ns != NEVER
    done = [one.latency_ns for one in account.inferences if one.done]
    ages, stalls = account.age_ns[account.age_ns != NEVER], account.stalls
    return {
        "hz": 1e9 / account.period_ns,
        "ticks": account.ticks,
        "seconds": account.ticks * account.period_ns / 1e9,
        "missed": int(account.missed.sum()),
        "dropped": account.dropped,
        "longest_run": account.longest_run,
        "late": int(account.late.sum()),
        "tolerance_ms": account.tolerance_ns / 1e6,
        "begin_ms": percentiles(begun) if len(begun) else None,
        "jitter": jitter(account.wake_ns),
        "own_ms": percentiles(account.own_ns[ran]) if ran.any() else None,
        "cpu_ms": percentiles(account.cpu_ns[ran]) if ran.any() else None,
        "robot_ms": percentiles(account.robot_ns[ran]) if ran.any() else None,
        "inferences": len(account.inferences),
        "latency_ms": percentiles(done) if done else None,
        "age_ms": percentiles(ages) if len(ages) else None,
        "phases": dict(account.phases),
        "stalls": len(stalls),
        "longest_stalls": [str(one) for one in sorted(stalls, key=lambda one: -one.latency_ns)[:SHOWN]],
        "stopped": account.stopped,
        "failed": account.failed,
    }


def _episodes(ended: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"rows": list(ended), "success": success_rate(ended) if ended else None}
