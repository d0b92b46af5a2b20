"""Real time and the simulator: the loop as in simulation, and a simulated robot that follows the clock."""

import sys
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from robotattn.control.chunks import ChunkOptions, ChunkQueue, Handling, relative
from robotattn.control.realtime import Pace, run_realtime
from robotattn.control.safety import Limits
from robotattn.envs import EnvConfig, make_env
from robotattn.guard import Guard
from robotattn.live import LiveConfig, SimulatedRobot, describe, stalling, switching
from robotattn.loop import Timing, run_episodes
from robotattn.types import Command, Observation, Plan

sys.path.insert(0, str(Path(__file__).parent))
from benches import MS, Counting, Hands, run, thinking

# ------------------------------------------------------------------------------------------ as in simulation


class Still(gym.Env):
    """A world of 50 ms ticks in which nothing happens until its time is up."""

    substeps = 25

    def __init__(self, ticks: int) -> None:
        self.ticks, self.sent = ticks, list[tuple[int, float]]()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.steps = 0
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        return {"state": np.zeros(13, np.float32), "instruction": "", "time": np.array([self.steps * 0.002])}

    def tool_pose(self) -> np.ndarray:
        return np.zeros(4)

    def send(self, action: np.ndarray) -> None:
        self.sent.append((self.steps * 2, float(action[0])))

    def advance(self, steps: int) -> None:
        self.steps += steps

    def end_tick(self):
        over = self.steps >= self.ticks * self.substeps
        return False, over, {"success": False, "reason": "time_limit", "episode": {}}


class Listed:
    """A clock that reads its latencies (ms) from a list, and goes on with the last."""

    def __init__(self, *milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def latency(self, seed: int, index: int) -> int:
        return round(self.milliseconds[min(index, len(self.milliseconds) - 1)] * MS)


@pytest.mark.parametrize("period", [0.05, 0.1])
@pytest.mark.parametrize("latencies", [(0,), (50,), (150, 50, 600, 0, 100), (100, 900, 50)])
@pytest.mark.parametrize(
    "options",
    [
        {"handling": "hold", "execute": 3},
        {"handling": "naive"},
        {"handling": "skip"},
        {"handling": "skip-executed"},
        {"handling": "continue", "execute": 3},
        {"handling": "queue", "threshold": 0.5},
        {"handling": "ensemble", "ensemble": 0.1},
        {"handling": "real-time"},
    ],
    ids=lambda options: options["handling"],
)
def test_commands_are_those_of_the_simulated_loop_at_the_same_latencies(
    options: dict[str, Any], latencies: tuple[float, ...], period: float
):
    """Latencies of whole ticks, since in real time a chunk acts at a tick: then every tick has the same command."""
    ticks = 60
    world = Still(ticks)
    list(run_episodes([world], Counting(period), [3], ChunkOptions(**options), timing=Timing(Listed(*latencies))))
    expected = np.full(ticks, np.nan)
    for time_, value in world.sent:
        assert time_ % 50 == 0
        expected[time_ // 50 :] = value
    account, robot = run(ticks / 20, hz=20, latencies=latencies, agent=Counting(period), **options)
    found = np.full(ticks, np.nan)
    for time_, target in robot.sent:
        found[time_ // 50] = target[0]
    np.testing.assert_array_equal(found, expected)
    assert account.phases["cold"] == int(np.isnan(expected).sum())


@pytest.mark.parametrize("handling", ["hold", "skip-executed"])
def test_a_plan_launched_now_and_landed_later_is_one_that_was_started_with_its_latency(handling: Handling):
    started, launched = ChunkQueue(ChunkOptions(handling=handling)), ChunkQueue(ChunkOptions(handling=handling))
    plan = Plan(np.arange(8.0)[:, None], 0.0, 0.05)
    started.start(0, plan, 73 * MS)
    number = launched.launch(0)
    assert number == 0 and not launched.due(50 * MS) and launched.arrive(50 * MS) == []
    launched.land(number, plan, 73 * MS)
    for now in range(50 * MS, 200 * MS, 10 * MS):
        assert started.arrive(now) == launched.arrive(now)
        commands = [queue.look_up(now, np.zeros(4)) for queue in (started, launched)]
        assert (commands[0] is None) == (commands[1] is None)
        assert commands[0] is None or commands[0].action == commands[1].action
        assert started.due(now) == launched.due(now)


# ------------------------------------------------------------------------------------------ the simulated robot


@pytest.fixture
def env() -> Iterator[Any]:
    made = make_env(EnvConfig(hz=50, time_limit=0.2))
    yield made
    made.close()


def test_the_physics_follows_the_clock_and_episodes_end_in_its_own_time(env: Any):
    clock = Hands()
    robot = SimulatedRobot(env, iter(count(3)), clock)
    robot.restart()
    clock.now += 31 * MS
    assert not robot.over() and env.physics_steps == 15 and env.tick == 1
    assert robot.observe().time == 0.03
    clock.now += 500 * MS
    assert robot.over() and (env.physics_steps, env.tick) == (100, 10), (
        "it ends at its time limit, not when it is asked"
    )
    assert [(one["seed"], one["success"], one["reason"]) for one in robot.ended] == [(3, False, "time_limit")]
    robot.restart()
    assert not robot.over() and env.episode_seed == 4 and env.physics_steps == 0


def test_a_target_sent_again_leaves_the_actuators_as_they_are(env: Any):
    clock = Hands()
    robot = SimulatedRobot(env, iter(repeat(3)), clock)
    robot.restart()
    target = np.append(robot.tool_pose() + np.array([0.05, 0, 0, 0]), 1.0)
    robot.send(target, 0.1)
    held = env.data.ctrl.copy()
    clock.now += 60 * MS
    robot.over()
    robot.send(target.copy(), 0.16)
    assert np.array_equal(env.data.ctrl, held)
    robot.send(target + np.array([0, 0.01, 0, 0, 0]), 0.1)
    assert not np.array_equal(env.data.ctrl, held)


def test_a_guarded_robot_is_sent_what_is_safe_at_once_and_more_at_every_tick(env: Any):
    """As the simulated loop's guard does it with the same commands at the same times; the interventions are kept."""
    clock, limits = Hands(), Limits()
    robot = SimulatedRobot(env, iter(repeat(3)), clock, limits)
    robot.restart()
    other = make_env(env.config)
    other.reset(seed=3)
    guard = Guard(other, limits)
    guard.reset()
    target = np.append(robot.tool_pose() + np.array([0.08, 0.05, -0.05, 0.3]), 0.0)
    for tick in range(5):
        robot.send(target, 0.1)
        command = Command(relative(target, other.tool_pose()), 0.1) if tick == 0 else None
        guard.act(tick * 20 * MS, command, again=tick > 0)
        np.testing.assert_array_equal(env.data.ctrl, other.data.ctrl)
        clock.now += 20 * MS
        robot.over()
        other.advance(10)
    (report,) = robot.interventions
    assert report == guard.filter.report and report.commands == 5 and 0 < report.changed <= 5
    other.close()


def test_a_guarded_robot_holds_what_is_too_old(env: Any):
    robot = SimulatedRobot(env, iter(repeat(3)), Hands(), Limits(staleness=0.4))
    robot.restart()
    before = env.data.ctrl.copy()
    robot.send(np.append(robot.tool_pose() + np.array([0.01, 0, 0, 0]), 1.0), 0.5)
    np.testing.assert_allclose(env.data.ctrl, before)
    assert robot.interventions[0].kinds["stale"].largest == pytest.approx(0.1)


def test_the_loop_runs_the_simulated_robot_through_its_episodes(env: Any):
    """0.2 s an episode, each begun at a tick: within 1 s of the clock's time five end or are about to."""
    clock = Hands()
    robot = SimulatedRobot(env, iter(count(0)), clock)
    robot.restart()

    class Staying(Counting):
        def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
            pose = np.array([*observations[0].state[8:11], 0.0])
            return [Plan(np.array([[0, 0, 0, 0, 1.0]]), 0.0, 0.1, pose)]

    account = run_realtime(
        robot, Staying(), ChunkOptions(), Pace(50, 1.0), think=thinking(5), clock=clock, sleep=clock.sleep
    )
    assert account.missed.sum() == 0 and len(robot.ended) == 5
    found = describe(account)
    assert found["ticks"] == 50 and found["latency_ms"]["max"] == 5.0 and found["jitter"]["n"] == 50


def test_stalls_are_read_strictly_and_mistakes_are_named(tmp_path: Any):
    assert stalling("500ms@10s") == (500 * MS, 10_000 * MS)
    for wrong in ("500ms", "500@10s", "@10s", "ms@s"):
        with pytest.raises(ValueError, match="500ms@10s"):
            LiveConfig(tmp_path, stall=wrong)
    with pytest.raises(ValueError, match="threads: 0"):
        LiveConfig(tmp_path, threads=0)
    with pytest.raises(ValueError, match="execute: 4"):
        LiveConfig(tmp_path, late="naive", execute=4)


def test_the_interpreters_switch_interval_is_put_back():
    before = sys.getswitchinterval()
    with switching(0.001):
        assert sys.getswitchinterval() == pytest.approx(0.001)
    assert sys.getswitchinterval() == before
