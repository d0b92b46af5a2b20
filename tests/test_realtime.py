"""The loop in real time, on a clock that the test moves: deadlines, misses, stalls, and commands that never stop."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robotattn.control.account import NEVER
from robotattn.control.pacing import longest_run
from robotattn.control.realtime import Pace
from robotattn.control.thinking import Answer, Question, ThinkingThread
from robotattn.live import describe
from robotattn.types import Observation, Plan

sys.path.insert(0, str(Path(__file__).parent))
from benches import MS, Bench, Counting, Hands, run, values

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
