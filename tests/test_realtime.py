"""The loop in real time, on a clock that the test moves: deadlines, misses, stalls, and commands that never stop."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from robotattn.control.account import NEVER, Account
from robotattn.control.chunks import ChunkOptions, ChunkQueue, Handling, relative
from robotattn.control.pacing import SPIN_NS, longest_run
from robotattn.control.realtime import Pace, run_realtime
from robotattn.control.safety import Limits
from robotattn.control.thinking import Answer, Question, ThinkingThread, think
from robotattn.envs import EnvConfig, make_env
from robotattn.guard import Guard
from robotattn.live import LiveConfig, SimulatedRobot, describe, stalling, switching
from robotattn.loop import Timing, run_episodes
from robotattn.types import Agent, Command, Observation, Plan, Running

MS = 1_000_000


class Hands:
    """A clock that the test moves. It stands still but for those who sleep: they wake when the spinning would end."""

    def __init__(self) -> None:
        self.now = 7 * MS  # a monotonic clock begins anywhere

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9) + SPIN_NS

    def work(self) -> int:
        """Half of the time is somebody else's."""
        return self.now // 2


class Bench:
    """A robot that notes what it is sent, and whose calls at some ticks take long (ms)."""

    def __init__(self, clock: Hands, slow: dict[int, int] | None = None, pose: np.ndarray | None = None) -> None:
        self.clock, self.slow, self.pose = clock, slow or {}, np.zeros(4) if pose is None else pose
        self.began, self.ticks, self.observed, self.closed = clock.now, 0, 0, False
        self.sent: list[tuple[int, np.ndarray]] = []  # (ms since the first tick, target)
        self.ages: list[float] = []  # of the observation behind each (s)

    def observe(self) -> Observation:
        self.observed += 1
        return Observation({}, np.zeros(13, np.float32), "", None, self.clock.now / 1e9)

    def tool_pose(self) -> np.ndarray:
        """Called once a tick: this is where one takes long."""
        self.clock.now += self.slow.get(self.ticks, 0) * MS
        self.ticks += 1
        return self.pose

    def send(self, target: np.ndarray, age: float) -> None:
        self.ages.append(age)
        self.sent.append(((self.clock.now - self.began) // MS, target))

    def close(self) -> None:
        self.closed = True


class Counting:
    """Its n-th chunk is 10 n, 10 n + 1, ..., and so far apart (s)."""

    def __init__(self, period: float = 0.05, length: int = 8) -> None:
        self.period, self.length, self.plans = period, length, 0

    def reset(self, row: int) -> None:
        self.plans = 0

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        self.plans += 1
        return [Plan((10.0 * (self.plans - 1) + np.arange(self.length))[:, None], 0.0, self.period)]

    def plan_from(
        self, rows: Sequence[int], observations: Sequence[Observation], running: Sequence[Running | None]
    ) -> list[Plan]:
        return self.plan(rows, observations)


def thinking(*milliseconds: float) -> Callable[..., Any]:
    """Thinkers whose answers come after these times, and on with the last; what an agent raises is an answer too."""

    class Timed:
        def __init__(self, agent: Agent, carry_on: bool, clock: Callable[[], int]) -> None:
            self.agent, self.carry_on, self.clock, self.index = agent, carry_on, clock, 0
            self.ready: Answer | None = None

        def ask(self, question: Question) -> None:
            assert self.ready is None
            ended = self.clock() + round(milliseconds[min(self.index, len(milliseconds) - 1)] * MS)
            self.index += 1
            try:
                self.ready = Answer(question.number, think(self.agent, question, self.carry_on), None, ended)
            except ValueError as error:
                self.ready = Answer(question.number, None, error, ended)

        def answer(self) -> Answer | None:
            if self.ready is None or self.ready.ended > self.clock():
                return None
            answer, self.ready = self.ready, None
            return answer

        def close(self) -> None:
            pass

    return Timed


def run(
    seconds: float = 1.0,
    hz: float = 50,
    latencies: Sequence[float] = (0,),
    slow: dict[int, int] | None = None,
    agent: Agent | None = None,
    robot: Callable[..., Any] = Bench,
    tell: Callable[[str], object] = lambda message: None,
    pace: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Account, Any]:
    """Run on a clock of its own; times of what is sent count from the first tick."""
    clock = Hands()
    made = robot(clock, slow)
    made.began += round(1e9 / hz)
    account = run_realtime(
        made, agent or Counting(), ChunkOptions(**options), Pace(hz, seconds, **(pace or {})), tell,
        think=thinking(*latencies), clock=clock, sleep=clock.sleep, processor=clock.work,
    )  # fmt: skip
    return account, made


def values(robot: Any) -> list[float]:
    return [float(target[0]) for _, target in robot.sent]


# ------------------------------------------------------------------------------------------ the schedule


def test_deadlines_are_absolute_so_a_late_tick_delays_no_other():
    """50 Hz; tick 3 takes 30 ms: tick 4 begins 10 ms late, at once, and tick 5 is due where it always was."""
    account, robot = run(0.16, slow={3: 30})
    assert (account.begun_ns / MS).tolist() == [0, 0, 0, 0, 10, 0, 0, 0]
    assert [time for time, _ in robot.sent] == [0, 20, 40, 90, 90, 100, 120, 140]
    assert account.missed.tolist() == [False] * 3 + [True] + [False] * 4
    assert account.late.tolist() == [False] * 4 + [True] + [False] * 3
    assert (account.longest_run, account.dropped) == (1, 0)
    assert account.wake_ns.tolist() == [0] * 7  # tick 4 was not waited for


def test_a_stall_of_500_ms_at_50_hz_is_25_misses_in_a_row_and_is_not_made_up_for():
    """Tick 10 sends 500 ms late, ticks 11 to 34 never; tick 35 is due that very moment."""
    account, robot = run(1.0, slow={10: 500})
    assert account.ticks == 50
    assert (int(account.missed.sum()), account.longest_run, account.dropped) == (25, 25, 24)
    assert account.begun_ns[9:37].tolist() == [0, 0] + [NEVER] * 24 + [0, 0]
    assert [time for time, _ in robot.sent] == [*range(0, 200, 20), 700, *range(700, 1000, 20)]


def test_a_stall_beyond_the_end_of_the_run_drops_what_is_left():
    account, _ = run(0.2, slow={6: 300})
    assert account.missed.tolist() == [False] * 6 + [True] * 4
    assert account.longest_run == 4


def test_the_longest_run_by_hand():
    assert longest_run(np.array([1, 1, 0, 1, 1, 1, 0, 1], bool)) == 3
    assert longest_run(np.zeros(5, bool)) == 0
    assert longest_run(np.ones(4, bool)) == 4


def test_what_the_robot_takes_is_not_the_loops_own_time():
    account, _ = run(0.1, slow=dict.fromkeys(range(5), 6))
    assert account.own_ns.tolist() == account.cpu_ns.tolist() == [0] * 5
    assert account.robot_ns.tolist() == [6 * MS] * 5


def test_what_the_loop_takes_is_told_by_the_clock_and_by_the_processor():
    """A message about a stall, within the loop's own time, takes 4 ms, of which the thread had the processor for 2."""
    clocks: list[Hands] = []

    class Slow(Bench):
        def __init__(self, clock: Hands, slow: dict[int, int] | None) -> None:
            super().__init__(clock, slow)
            clocks.append(clock)

    def tell(message: str) -> None:
        clocks[0].now += 4 * MS

    account, _ = run(0.2, latencies=(10_000,), robot=Slow, tell=tell, pace={"patience": 5})
    assert account.own_ns.tolist() == [0] * 6 + [4 * MS] + [0] * 3
    assert account.cpu_ns.tolist() == [0] * 6 + [2 * MS] + [0] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hz": 0, "seconds": 1}, "hz: 0"),
        ({"hz": 50, "seconds": -1}, "seconds: -1"),
        ({"hz": 50, "seconds": 0.001}, "at least one period of 0.02 s"),
        ({"hz": 50, "seconds": 1, "every": 0}, "every: 0"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused_by_name(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Pace(**given)


# ------------------------------------------------------------------------------------------ commands never stop


def test_a_stalled_policy_stops_no_command_and_is_named():
    """Two actions of 100 ms; the second inference, from 80 ms on, takes 812 ms: its chunk acts at the tick of 900."""
    told: list[str] = []
    account, robot = run(
        1.2, latencies=(0, 812, 50), agent=Counting(0.1, 2), tell=told.append,
        handling="queue", threshold=0.6, pace={"patience": 5},
    )  # fmt: skip
    assert [time for time, _ in robot.sent] == list(range(0, 1200, 20)), "one command a tick, whatever happens"
    assert values(robot)[:46] == [0.0] * 5 + [1.0] * 40 + [11.0], "the last command is sent again"
    assert [str(one) for one in account.stalls] == [
        "policy inference 1: 812 ms, at t = 0.1 s; the last command was held for 35 ticks"
    ]
    assert told == ["policy inference 1: 120 ms and not there yet, at t = 0.1 s"]
    assert account.phases["held"] >= 35 and not account.failed
    assert account.missed.sum() == 0, "a slow policy makes no tick late"


def test_a_policy_that_never_comes_back_is_named_and_the_command_is_held_to_the_end():
    account, robot = run(1.0, latencies=(0, 10_000), agent=Counting(0.1, 2))
    assert values(robot)[5:] == [0.0] * 45
    (stall,) = account.stalls
    assert (
        str(stall)
        == "policy inference 1: 880 ms and not there yet, at t = 0.1 s; the last command was held for 45 ticks"
    )


def test_a_held_target_is_the_same_array_of_world_coordinates_however_far_the_arm_has_come():
    class Offsets(Counting):
        def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
            return [Plan(np.array([[0.1, 0, 0, 0, 1.0]]), 0.0, 0.1, np.array([0.4, 0, 0.2, 0]))]

    class Moving(Bench):
        def tool_pose(self) -> np.ndarray:
            return np.array([0.4 + 0.01 * len(self.sent), 0, 0.2, 0])

    _, robot = run(0.4, latencies=(20, 10_000), agent=Offsets(), robot=Moving)
    assert all(np.allclose(target, [0.5, 0, 0.2, 0, 1], atol=1e-15) for _, target in robot.sent)
    assert len({id(target) for _, target in robot.sent}) == 1 and len(robot.sent) == 19
    assert robot.ages == pytest.approx([0.02 * tick for tick in range(1, 20)])  # all planned from what tick 0 saw


def test_before_the_first_chunk_nothing_is_sent_and_the_ticks_are_counted_as_cold():
    account, robot = run(0.2, latencies=(70,), handling="naive")
    assert robot.sent[0][0] == 80 and account.phases == {"cold": 4, "running": 6, "held": 0}
    assert account.age_ns[:5].tolist() == [NEVER] * 4 + [80 * MS]


class Failing(Counting):
    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        if self.plans == 2:
            raise ValueError("no cube in sight")
        return super().plan(rows, observations)


def test_a_policy_that_raises_holds_the_command_for_the_tick_and_ends_the_run_by_name():
    """Asked at 0, 60 and 120 ms (60 ms each); the third answer, an exception, is there at 180 ms."""
    account, robot = run(1.0, latencies=(60,), agent=Failing(0.02), handling="naive")
    assert account.failed
    assert account.stopped == "policy inference 2, at t = 0.1 s, failed: ValueError: no cube in sight"
    assert robot.sent[-1][0] == 180 and account.ticks == 10
    assert robot.closed and values(robot) == [0, 1, 2, 10, 11, 12, 13]


def test_a_plan_that_cannot_be_used_ends_the_run_by_name():
    class Broken(Counting):
        def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
            return [Plan(np.array([[np.nan]]), 0.0, 0.05)]

    account, robot = run(agent=Broken())
    assert "policy inference 0, at t = 0.0 s, failed: ValueError: plan: a non-finite action" in account.stopped
    assert robot.sent == [] and account.ticks == 1 and robot.closed


class Interrupted(Bench):
    def send(self, target: np.ndarray, age: float) -> None:
        super().send(target, age)
        if len(self.sent) == 6:
            raise KeyboardInterrupt


def test_an_interruption_ends_the_run_with_the_account_so_far():
    account, robot = run(1.0, robot=Interrupted)
    assert (account.stopped, account.failed, account.ticks) == ("interrupted", False, 5)
    assert robot.closed and describe(account)["ticks"] == 5


def test_a_failure_of_the_robot_is_raised_and_it_is_closed():
    class Broken(Bench):
        def send(self, target: np.ndarray, age: float) -> None:
            raise OSError("bus off")

    robots: list[Broken] = []
    with pytest.raises(OSError, match="bus off"):
        run(robot=lambda *given: robots.append(Broken(*given)) or robots[0])
    assert robots[0].closed


def test_what_cannot_be_had_in_real_time_is_refused():
    class Plain:
        reset, plan = Counting.reset, Counting.plan

    with pytest.raises(ValueError, match="real-time, but Plain cannot plan on"):
        run(agent=Plain(), handling="real-time")
    with pytest.raises(ValueError, match="in_flight: 2"):
        run(handling="naive", in_flight=2)


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


# ------------------------------------------------------------------------------------------ episodes and histories


class Episodes(Bench):
    """Its episodes last 10 ticks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.restarts: list[int] = []

    def over(self) -> bool:
        return self.ticks > 0 and self.ticks % 10 == 0

    def restart(self) -> None:
        self.restarts.append(self.ticks)


def test_an_episode_that_begins_forgets_the_chunks_and_an_answer_for_the_last_one_is_not_taken():
    """Asked at 0 (there at 50) and, naive, at 60 ms (there at 260 ms: in the next episode, which begins at 200)."""
    account, robot = run(0.6, latencies=(50, 200, 20), robot=Episodes, handling="naive")
    assert robot.restarts == [10, 20]
    assert [time for time, _ in robot.sent] == [*range(60, 200, 20), *range(280, 400, 20), *range(420, 600, 20)]
    at = dict(zip([time for time, _ in robot.sent], values(robot), strict=True))
    assert at[280] == 0.0, "the agent was reset: its first chunk again, and at its first action"
    assert account.phases["cold"] == 3 + 4 + 1


class Watching(Counting):
    watches = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def watch(self, row: int, observation: Observation) -> None:
        self.seen.append(f"{observation.time:.2f}")


def test_a_policy_with_a_history_sees_every_nth_tick_in_order_and_is_asked_at_those_alone():
    """Every 5th tick of 20 ms; it thinks for 250 ms, in which two more looks are kept for it."""
    agent = Watching()
    account, robot = run(1.0, latencies=(250,), agent=agent, handling="naive", pace={"every": 5})
    begin = (7 + 20) / 1000
    assert robot.observed == 10
    assert [one.asked_ns // MS for one in account.inferences] == [0, 300, 600, 900]
    assert agent.seen == [f"{begin + tick / 10:.2f}" for tick in range(10)]


def test_a_policy_without_a_history_costs_no_observation_that_is_not_planned_from():
    account, robot = run(1.0, latencies=(250,), handling="naive")
    assert robot.observed == len(account.inferences) == 4


# ------------------------------------------------------------------------------------------ the thread


def wait(thinker: ThinkingThread) -> Answer:
    end = time.monotonic() + 10
    while (answer := thinker.answer()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return answer


def test_a_thread_answers_in_order_and_hands_over_what_is_raised():
    observation = Observation({}, np.zeros(13, np.float32), "", None, 0.0)
    thinker = ThinkingThread(Failing(), False, lambda: 5)
    try:
        assert thinker.answer() is None
        for number in range(2):
            thinker.ask(Question(number, observation))
            answer = wait(thinker)
            assert answer.plan is not None and (answer.number, answer.ended) == (number, 5)
            assert answer.plan.actions[0, 0] == 10.0 * number
        thinker.ask(Question(2, observation))
        assert str(wait(thinker).error) == "no cube in sight"
        thinker.ask(Question(3, observation, fresh=True))  # reset: it plans again
        assert wait(thinker).plan is not None
    finally:
        thinker.close()
    assert not thinker._thread.is_alive()


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
