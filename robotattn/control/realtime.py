"""The control loop in real time, for a robot or a demonstration: commands go out on schedule, whatever a policy does.

Tick k is due at start + k * period (absolute, so no lateness adds up). It picks up what the policy, which thinks in a
thread of its own, has ready; looks, if the policy is to be asked; and sends a command. What is sent, and when is asked
again, the same `ChunkQueue` decides as in simulation, where an inference has the latency that it really took; only
that a chunk acts at a tick and never between two. With no action left the last command is sent again, so commands never
stop; before the first chunk nothing is sent and the robot stays where it is. A tick that comes too late to be of use is
dropped, not made up for, and counted. A policy that fails stops the loop after that tick, and is named.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from robotattn.control.account import NEVER, Account, Inference
from robotattn.control.chunks import ChunkOptions, ChunkQueue, absolute
from robotattn.control.pacing import wait_until
from robotattn.control.thinking import Answer, Memory, Thinker, ThinkingThread
from robotattn.types import Agent, Continuer, Observation, Watcher

T = TypeVar("T")
Think = Callable[[Agent, bool, Callable[[], int]], Thinker]
SECOND = 1_000_000_000  # (ns)


class Robot(Protocol):
    """What the loop needs of a robot. Calls come from one thread, and should take a small part of a period."""

    def observe(self) -> Observation:
        """What is seen now; called only at ticks at which the policy looks."""

    def tool_pose(self) -> np.ndarray:
        """Tool pose now ``[4]``."""

    def send(self, target: np.ndarray, age: float) -> None:
        """Head for a target ``[A]``: tool pose and gripper in the world frame, or joints and gripper.

        It is absolute, so that the same one sent again means the same, however far the arm has come. age: of the
        observation it was planned from (s).
        """

    def close(self) -> None:
        """Let go of the robot; called however the loop ends."""


@runtime_checkable
class Episodic(Protocol):
    """A robot whose task begins anew now and then, as a simulated one's does."""

    def over(self) -> bool:
        """Whether the episode has ended; asked at the beginning of every tick."""

    def restart(self) -> None:
        """Begin the next one."""


@dataclass(frozen=True)
class Pace:
    """When ticks are due, and what counts as late."""

    hz: float
    """Control rate (Hz)."""
    seconds: float
    """How long to run (s)."""
    tolerance: float = 0.1
    """A tick that begins later than this share of a period is counted as late."""
    patience: float = 5
    """An inference that takes longer than this many periods is a stall, and named."""
    every: int = 1
    """The policy looks at every n-th tick: one with a history of frames must see them as far apart as it was taught."""

    def __post_init__(self) -> None:
        for name in ("hz", "seconds", "tolerance", "patience", "every"):
            value = getattr(self, name)
            if not 0 < value < np.inf:
                raise ValueError(f"{name}: {value}, allowed is above 0")
        if self.ticks < 1:
            raise ValueError(f"seconds: {self.seconds}, allowed is at least one period of {1 / self.hz:g} s")

    @property
    def period(self) -> int:
        """Of control (ns)."""
        return round(SECOND / self.hz)

    @property
    def ticks(self) -> int:
        return round(self.seconds * self.hz)


def run_realtime(
    robot: Robot,
    agent: Agent,
    options: ChunkOptions,
    pace: Pace,
    tell: Callable[[str], object] = lambda message: None,
    think: Think = ThinkingThread,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], object] = time.sleep,
    processor: Callable[[], int] = time.thread_time_ns,
) -> Account:
    """Control a robot for a while; return what became of every tick.

    An interruption by the keyboard, or a failure of the policy, ends the run early and is named in the account; one of
    the robot is raised. tell: is told of a stall while it lasts. think: makes what asks the agent. clock: monotonic ns;
    processor: what the calling thread has used of it (ns).
    Raises ValueError for options that cannot be had in real time.
    """
    carry_on = options.kind == "real-time"
    if carry_on and not isinstance(agent, Continuer):
        raise ValueError(f"handling: real-time, but {type(agent).__name__} cannot plan on from what is running")
    if options.in_flight > 1:
        raise ValueError(f"in_flight: {options.in_flight}, allowed in real time is 1: a policy thinks one at a time")
    watches = isinstance(agent, Watcher) and agent.watches
    loop = _Loop(robot, think(agent, carry_on, clock), ChunkQueue(options), pace, watches, tell, clock, processor)
    return loop.run(sleep)


class _Loop:
    """The state of a run. `now` is the scheduled time of the tick since the episode began, `t` since the run did."""

    def __init__(
        self,
        robot: Robot,
        thinker: Thinker,
        queue: ChunkQueue,
        pace: Pace,
        watches: bool,
        tell: Callable[[str], object],
        clock: Callable[[], int],
        processor: Callable[[], int],
    ) -> None:
        self.robot, self.thinker, self.queue, self.pace = robot, thinker, queue, pace
        self.watches, self.tell, self.clock, self.processor = watches, tell, clock, processor
        self.episodic = robot if isinstance(robot, Episodic) else None
        self.period, self.patience, self.memory = pace.period, round(pace.patience * pace.period), Memory()
        self.carry_on = queue.options.kind == "real-time"
        arrays = np.full((6, pace.ticks), NEVER, np.int64)
        self.begun, self.sent, self.own, self.cpu, self.robots, self.ages = arrays
        self.wake, self.inferences = list[int](), list[Inference]()
        self.phases = {"cold": 0, "running": 0, "held": 0}
        self.origin = self.since = 0  # of the run (ns of the clock), and of the episode (ns since that)
        self.seen: dict[int, int] = {}  # when an observation of this episode was taken, by its inference (ns)
        self.asked: Inference | None = None  # that is being thought about
        self.number: int | None = None  # of this one in the queue; None if it belongs to an episode that is over
        self.target: np.ndarray | None = None
        self.anchored = self.told = self.failed = False
        self.stopped = ""
        self.with_robot = self.cpu_robot = 0  # what its calls have taken so far (ns), and of the processor

    # ------------------------------------------------------------------------------------------ schedule

    def run(self, sleep: Callable[[float], object]) -> Account:
        reached, self.origin = 0, self.clock() + self.period
        try:
            while not self.stopped and (tick := self._next(reached, sleep)) < self.pace.ticks:
                self._tick(tick)
                reached = tick + 1
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        finally:
            self.robot.close()
            self.thinker.close()
        return self._account(reached if self.stopped else self.pace.ticks)

    def _next(self, tick: int, sleep: Callable[[float], object]) -> int:
        """Wait for a tick, or if it is overdue by a period or more, go on with the newest one that is due."""
        if tick >= self.pace.ticks:
            return tick
        due = self.origin + tick * self.period
        if wait_until(due, self.clock, sleep):
            self.wake.append(self.clock() - due)
        return max(tick, (self.clock() - self.origin) // self.period)

    def _tick(self, tick: int) -> None:
        due, begin, before = self.origin + tick * self.period, self.clock(), self.with_robot
        cpu = self.processor() - self.cpu_robot
        if self.episodic is not None and self._ask_robot(self.episodic.over):
            self._ask_robot(self.episodic.restart)
            self._restart(tick)
        now = tick * self.period - self.since
        self._hear(now)
        if not self.stopped:
            self._look(tick, now)
        self._command(tick, now)
        self.begun[tick], self.sent[tick] = begin - due, self.clock() - due
        self.robots[tick] = self.with_robot - before
        self.own[tick] = self.clock() - begin - self.robots[tick]
        self.cpu[tick] = self.processor() - self.cpu_robot - cpu

    def _restart(self, tick: int) -> None:
        self.since = tick * self.period
        self.queue.reset()
        self.memory.restart()
        self.seen.clear()
        self.number = self.target = None

    def _ask_robot(self, call: Callable[..., T], *arguments: Any) -> T:
        """A call of the robot, whose time is not the loop's."""
        began, cpu = self.clock(), self.processor()
        result = call(*arguments)
        self.with_robot += self.clock() - began
        self.cpu_robot += self.processor() - cpu
        return result

    # ------------------------------------------------------------------------------------------ the policy

    def _hear(self, now: int) -> None:
        """Pick up what the policy has ready; notice if it takes long."""
        answer = self.thinker.answer()
        if answer is not None and self.asked is not None:
            self._take(self.asked, answer, now)
        self.queue.arrive(now)
        if self.asked is not None:
            self._overdue(self.asked)

    def _take(self, one: Inference, answer: Answer, now: int) -> None:
        one.latency_ns, one.done = answer.ended - self.origin - one.asked_ns, True
        number, self.asked, self.number = self.number, None, None
        error = answer.error
        if answer.plan is not None and number is not None:
            self.anchored = answer.plan.anchor is not None
            try:  # on a tick that began late it may have come after the tick was due: it is here all the same
                self.queue.land(number, answer.plan, min(now, answer.ended - self.origin - self.since))
            except ValueError as unusable:
                error = unusable
        if error is not None:
            self.failed = True
            what = f"{type(error).__name__}: {error}"
            self.stopped = f"policy inference {one.number}, at t = {one.asked_ns / 1e9:.1f} s, failed: {what}"

    def _overdue(self, one: Inference) -> None:
        one.latency_ns = self.clock() - self.origin - one.asked_ns
        if one.latency_ns > self.patience and not self.told:
            self.told = True
            self.tell(str(one))

    def _look(self, tick: int, now: int) -> None:
        """Observe and ask the policy if it is its time, and show a watching one what there is to see."""
        if tick % self.pace.every:
            return
        asks = self.asked is None and self.queue.due(now)
        if not asks and not self.watches:
            return
        observation = self._ask_robot(self.robot.observe)
        if self.watches:
            self.memory.watch(observation)
        if not asks:
            return
        running = self.queue.running(now) if self.carry_on else None
        t = self.clock() - self.origin
        self.number, self.told = self.queue.launch(now), False
        self.asked, self.seen[self.number] = Inference(len(self.inferences), t), t
        self.inferences.append(self.asked)
        self.thinker.ask(self.memory.question(self.asked.number, observation, running))
        self._hear(now)  # one that takes no time is there at once

    # ------------------------------------------------------------------------------------------ commands

    def _command(self, tick: int, now: int) -> None:
        """Send what is to be done now, or the last command again."""
        pose = self._ask_robot(self.robot.tool_pose)
        command = self.queue.look_up(now, pose)
        if command is not None:
            self.target = absolute(command.action, pose if self.anchored else None)
        phase = self.queue.phase(now)
        self.phases[phase] += 1
        if self.asked is not None and phase == "held":
            self.asked.held += 1
        if self.target is not None:
            seen = self.origin + self.seen[self.queue.sent[0]]
            self._ask_robot(self.robot.send, self.target, (self.clock() - seen) / SECOND)
            self.ages[tick] = self.clock() - seen

    def _account(self, ticks: int) -> Account:
        if self.asked is not None:
            self.asked.latency_ns = max(self.asked.latency_ns, self.clock() - self.origin - self.asked.asked_ns)
        tolerance, wake = round(self.pace.tolerance * self.period), np.array(self.wake, np.int64)
        kept = [part[:ticks].copy() for part in (self.begun, self.sent, self.own, self.cpu, self.robots, self.ages)]
        begun, sent, own, cpu, robots, ages = kept
        return Account(
            self.period, tolerance, self.patience, begun, sent, own, cpu, robots, ages, wake, self.phases,
            tuple(self.inferences), self.stopped, self.failed,
        )  # fmt: skip
