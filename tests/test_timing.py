"""The loop with a clock: what is ready when, by hand, and nothing else than the plain loop where no time is taken."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest

from robotattn.control.chunks import ChunkOptions, Handling
from robotattn.control.clock import Fixed
from robotattn.envs import EnvConfig, make_env
from robotattn.loop import Timing, run_episodes
from robotattn.sight import read_observation
from robotattn.types import Observation, Plan, Running, tool_pose

MS = 1_000_000


class Listed:
    """A clock that reads its latencies (ms) from a list, and goes on with the last."""

    def __init__(self, *milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def latency(self, seed: int, index: int) -> int:
        return round(self.milliseconds[min(index, len(self.milliseconds) - 1)] * MS)


class Still(gym.Env):
    """A world of 50 ms ticks in which nothing happens until its time is up."""

    substeps = 25

    def __init__(self, ticks: int) -> None:
        self.ticks, self.sent = ticks, list[float]()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.steps = 0
        return self.observe(), {}

    def observe(self, only: Sequence[str] | None = None) -> dict[str, Any]:
        return {"state": np.zeros(13, np.float32), "instruction": "", "time": np.array([self.steps * 0.002])}

    def tool_pose(self) -> np.ndarray:
        return np.zeros(4)

    def send(self, action: np.ndarray) -> None:
        self.sent.append(float(action[0]))

    def advance(self, steps: int) -> None:
        self.steps += steps

    def end_tick(self):
        over = self.steps >= self.ticks * self.substeps
        return False, over, {"success": False, "reason": "time_limit", "episode": {}}


class Counting:
    """Its n-th chunk is 10 n, 10 n + 1, ..., 50 ms apart."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.ahead: list[Running | None] = []

    def reset(self, row: int) -> None:
        self.plans = 0

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        self.plans += len(rows)
        actions = 10.0 * (self.plans - 1) + np.arange(self.length)
        return [Plan(actions[:, None], seen.time, 0.05) for seen in observations]

    def plan_from(
        self, rows: Sequence[int], observations: Sequence[Observation], running: Sequence[Running | None]
    ) -> list[Plan]:
        self.ahead += running
        return self.plan(rows, observations)


def events(ticks: int, clock: Listed, length: int = 8, **options: Any) -> list[tuple[int, str, tuple[int, ...]]]:
    """Run one episode; return its events as (ms, what, which)."""
    log: list[tuple[int, str, tuple[int, ...]]] = []
    timing = Timing(clock, log=lambda seed, now, what, which: log.append((now // MS, what, which)))
    list(run_episodes([Still(ticks)], Counting(length), [7], ChunkOptions(**options), timing=timing))
    return log


def commands(log: list[tuple[int, str, tuple[int, ...]]]) -> list[tuple[int, int, int]]:
    return [(time, which[0], which[1]) for time, what, which in log if what == "command"]


# ------------------------------------------------------------------------------------------ schedules by hand


def test_hold_executes_n_actions_from_arrival_and_asks_at_the_next_tick():
    """73 ms end between two physics steps: the chunk acts at 74. Two actions of 50 ms end at 174: asked at 200."""
    log = events(8, Listed(73), handling="hold", execute=2)
    assert log == [
        (0, "observe", (0,)),
        (74, "arrive", (0,)),
        (74, "command", (0, 0)),
        (124, "command", (0, 1)),
        (200, "observe", (1,)),
        (274, "arrive", (1,)),
        (274, "command", (1, 0)),
        (324, "command", (1, 1)),
    ]


def test_naive_begins_every_chunk_at_its_first_action_while_the_old_one_runs_on():
    log = events(6, Listed(73), handling="naive")
    assert commands(log) == [(74, 0, 0), (124, 0, 1), (174, 1, 0), (224, 1, 1), (274, 2, 0)]
    assert [time for time, what, _ in log if what == "observe"] == [0, 100, 200]


def test_skip_begins_at_the_action_whose_time_is_now_even_from_a_standstill():
    log = events(6, Listed(73), handling="skip")
    assert commands(log) == [(74, 0, 1), (100, 0, 2), (150, 0, 3), (174, 1, 1), (200, 1, 2), (250, 1, 3), (274, 2, 1)]


@pytest.mark.parametrize("handling", ["skip-executed", "real-time"])
def test_skip_executed_leaves_nothing_out_that_nobody_did(handling: Handling):
    log = events(6, Listed(73), handling=handling)
    assert commands(log) == [(74, 0, 0), (124, 0, 1), (174, 1, 1), (200, 1, 2), (250, 1, 3), (274, 2, 1)]


def test_continue_runs_the_old_tail_on_and_the_new_chunk_joins_in_time():
    """Two actions from 74 are over at 174, asked at 200, there at 274: the old chunk ran for 74 ms, so action 1."""
    log = events(7, Listed(73), handling="continue", execute=2)
    assert commands(log) == [(74, 0, 0), (124, 0, 1), (174, 0, 2), (224, 0, 3), (274, 1, 1), (300, 1, 2)]


def test_a_queue_asks_again_when_its_share_is_left():
    """Of 4 actions (200 ms) half is left at 174 from an arrival at 74: asked at the tick of 200, and at 300."""
    log = events(7, Listed(73), length=4, handling="queue", threshold=0.5)
    assert [time for time, what, _ in log if what == "observe"] == [0, 200, 300]
    assert commands(log) == [(74, 0, 0), (124, 0, 1), (174, 0, 2), (224, 0, 3), (274, 1, 1), (300, 1, 2)]


def test_of_two_chunks_in_flight_the_one_that_saw_less_is_dropped_when_it_comes_last():
    log = events(4, Listed(120, 30, 500), handling="naive", in_flight=2)
    assert log == [
        (0, "observe", (0,)),
        (50, "observe", (1,)),
        (80, "arrive", (1,)),
        (80, "command", (1, 0)),
        (100, "observe", (2,)),
        (120, "arrive", (0,)),
        (130, "command", (1, 1)),
        (150, "observe", (3,)),
        (180, "command", (1, 2)),
    ]


def test_a_stall_longer_than_the_chunk_holds_the_last_command_and_goes_on_with_what_was_not_done():
    """Three actions, the second inference takes 390 ms from 50: 100 ms of them were filled, so action 2 is next."""
    clock, log = Listed(0, 390, 0), []
    timing = Timing(clock, log=lambda seed, now, what, which: log.append((now // MS, what, which)))
    (episode,) = run_episodes([Still(11)], Counting(3), [0], ChunkOptions(handling="skip-executed"), timing=timing)
    assert commands(log) == [(0, 0, 0), (50, 0, 1), (100, 0, 2), (440, 1, 2), (450, 2, 0), (500, 3, 0)]
    assert episode.timing["ticks"] == {"cold": 0, "running": 5, "held": 6}
    assert [latency // MS for latency in episode.timing["latencies"]] == [0, 390, 0, 0]
    ages = sorted(episode.timing["ages"].elements())
    by_hand = [*range(0, 440, 2), *range(390, 400, 2), *range(0, 50, 2), *range(0, 50, 2)]  # chunks 0, 1, 2, 3
    assert [age // MS for age in ages] == sorted(by_hand)


def test_before_the_first_chunk_nothing_is_sent_and_the_ticks_are_counted_as_cold():
    world = Still(4)
    (episode,) = run_episodes([world], Counting(), [0], ChunkOptions(), timing=Timing(Listed(130)))
    assert episode.timing["ticks"] == {"cold": 3, "running": 1, "held": 0}
    assert world.sent == [0.0]
    assert sorted(episode.timing["ages"].elements()) == [MS * age for age in range(130, 200, 2)]


def test_an_ensemble_averages_what_all_chunks_that_have_come_say_of_now():
    """73 ms, no decay. At 174 chunk 0 (from 74) is at its action 2, chunk 1 (of 100) at its action 1: (2 + 11) / 2."""
    world = Still(5)
    list(run_episodes([world], Counting(), [0], ChunkOptions(ensemble=0.0), timing=Timing(Listed(73))))
    assert world.sent == [0.0, 1.0, (2 + 11) / 2, (2 + 12) / 2, (3 + 12) / 2]


def test_real_time_chunking_is_told_what_runs_and_how_much_of_it_before_the_next_chunk_is_there():
    """At 100 chunk 0 (8 actions from 74) is at its action 0; a latency of 73 ms was seen, which is two actions."""
    agent = Counting()
    list(run_episodes([Still(5)], agent, [0], ChunkOptions(handling="real-time"), timing=Timing(Listed(73))))
    cold, first, second = agent.ahead
    assert cold is None and first is not None and second is not None
    np.testing.assert_array_equal(first.targets[:, 0], np.arange(8.0))
    np.testing.assert_array_equal(second.targets[:, 0], 10 + np.arange(2.0, 8.0))
    assert (first.frozen, second.frozen, first.period) == (2, 2, 0.05)


def test_a_chunk_for_another_rate_keeps_its_own_period():
    """Actions 100 ms apart at ticks of 50 ms: each lasts two ticks."""

    class Slow(Counting):
        def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
            return [Plan(plan.actions, plan.start, 0.1) for plan in super().plan(rows, observations)]

    world = Still(6)
    list(run_episodes([world], Slow(), [0], ChunkOptions(execute=3)))
    assert world.sent == [0.0, 1.0, 2.0]


# ------------------------------------------------------------------------------------------ the real world


class Reaching:
    """Plans chunks of five actions, 1 / hz apart, that are a function of the observation alone."""

    def __init__(self, hz: int) -> None:
        self.period = 1 / hz

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        return [self._plan(seen) for seen in observations]

    def plan_from(
        self, rows: Sequence[int], observations: Sequence[Observation], running: Sequence[Running | None]
    ) -> list[Plan]:
        return self.plan(rows, observations)

    def _plan(self, seen: Observation) -> Plan:
        draw = np.random.default_rng(list(seen.state.tobytes()))
        actions = draw.uniform([-0.03] * 3 + [-0.2, 0], [0.03] * 3 + [0.2, 1], (5, 5)).cumsum(axis=0)
        return Plan(np.clip(actions, -0.1, 1), seen.time, self.period, tool_pose(seen.state.astype(np.float64)))


def world(task: str, hz: int, states: list[tuple[np.ndarray, ...]]) -> gym.Env:
    """An environment that writes down positions, velocities and controls at the end of every tick."""
    env = make_env(EnvConfig(task=task, hz=hz, time_limit=1.0))  # type: ignore[arg-type]
    inner: Any = env.unwrapped
    end_tick = inner.end_tick

    def noted():
        states.append(tuple(part.copy() for part in (inner.data.qpos, inner.data.qvel, inner.data.ctrl)))
        return end_tick()

    inner.end_tick = noted
    return env


def plain(task: str, hz: int, seed: int) -> list[tuple[np.ndarray, ...]]:
    """Observe, act, step: the loop as it stands in a book."""
    states: list[tuple[np.ndarray, ...]] = []
    env, agent = world(task, hz, states), Reaching(hz)
    raw, _ = env.reset(seed=seed)
    over = False
    while not over:
        (plan,) = agent.plan([0], [read_observation(raw)])
        raw, _, terminated, truncated, _ = env.step(plan.actions[0])
        over = terminated or truncated
    env.close()
    return states


def timed(task: str, hz: int, seed: int, timing: Timing, options: ChunkOptions) -> list[tuple[np.ndarray, ...]]:
    states: list[tuple[np.ndarray, ...]] = []
    env = world(task, hz, states)
    list(run_episodes([env], Reaching(hz), [seed], options, timing=timing))
    env.close()
    return states


def assert_same(found: list[tuple[np.ndarray, ...]], expected: list[tuple[np.ndarray, ...]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for part, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(part, same)


def one_action(handling: Handling) -> ChunkOptions:
    """The options under which, where no time is taken, one action is executed of each chunk."""
    return ChunkOptions(handling=handling, threshold=1.0)


@pytest.mark.parametrize("hz", [10, 20, 50])
@pytest.mark.parametrize("handling", [kind for kind in get_args(Handling) if kind != "ensemble"])
def test_at_zero_latency_every_handling_is_the_plain_loop_bit_for_bit(handling: Handling, hz: int):
    assert_same(timed("pick_reversing", hz, 3, Timing(), one_action(handling)), plain("pick_reversing", hz, 3))


@pytest.mark.parametrize("handling", get_args(Handling))
def test_a_repeat_with_a_fresh_model_is_bit_equal_at_137_ms(handling: Handling):
    options = ChunkOptions(handling=handling, execute=2 if handling in ("hold", "continue") else 1)
    logs: list[list[Any]] = [[], []]
    first, again = (
        timed("pick_moving", 20, 5, Timing(Fixed(137 * MS), log=lambda *event, log=log: log.append(event)), options)
        for log in logs
    )
    assert_same(first, again)
    assert logs[0] == logs[1] and any(what == "command" for _, _, what, _ in logs[0])
    times = [now for _, now, _, _ in logs[0]]
    assert all(earlier <= later for earlier, later in pairwise(times))


def test_the_handlings_differ_once_time_is_taken():
    """The test above would pass for a loop that ignored its handling."""
    ends = {}
    for handling in get_args(Handling):
        options = ChunkOptions(handling=handling, execute=2 if handling in ("hold", "continue") else 1)
        ends[handling] = timed("pick_up", 20, 5, Timing(Fixed(137 * MS)), options)[-1][0].tobytes()
    same = {"real-time", "skip-executed"}  # this agent does not plan on from what runs
    assert len({ends[handling] for handling in ends if handling != "real-time"}) == len(ends) - 1
    assert len({ends[handling] for handling in same}) == 1
