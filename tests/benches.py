"""A clock that a test moves, and a robot, an agent and thinkers that go by it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from robotattn.control.account import Account
from robotattn.control.chunks import ChunkOptions
from robotattn.control.pacing import SPIN_NS
from robotattn.control.realtime import Pace, run_realtime
from robotattn.control.thinking import Answer, Question, think
from robotattn.types import Agent, Observation, Plan, Running

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
