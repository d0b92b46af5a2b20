"""A policy that thinks beside the loop: questions go to a thread of its own, answers are picked up at a later tick.

A thread and not a process: nothing is copied, and a policy that computes in kernels lets go of the interpreter there. A
process was no more punctual (measured, see docs/decisions.md). But code that keeps the interpreter's lock keeps the
loop's ticks waiting too.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from robotattn.types import Agent, Continuer, Observation, Plan, Running, Watcher

ROW = 0  # of the agent's batch: a robot is one row
YIELDS = 5  # steps of niceness by which thinking stands back behind the loop
WATCHED = 64  # ticks that an agent with a history can still be shown when it comes back from thinking


@dataclass(frozen=True)
class Question:
    """What a plan is made of. fresh: an episode begins. seen: what was watched since the last one, oldest first."""

    number: int
    observation: Observation
    running: Running | None = None
    fresh: bool = False
    seen: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A plan, or why there is none, and when it was there (ns of the loop's clock)."""

    number: int
    plan: Plan | None
    error: Exception | None
    ended: int


class Thinker(Protocol):
    """Answers one question after another, while the loop goes on."""

    def ask(self, question: Question) -> None:
        """Take a question; returns at once."""

    def answer(self) -> Answer | None:
        """The next answer that is there, if any."""

    def close(self) -> None:
        """Stop; a question that is being thought about is given up."""


def think(agent: Agent, question: Question, carry_on: bool) -> Plan:
    """Answer a question. carry_on: plan on from what is running."""
    if question.fresh:
        agent.reset(ROW)
    if isinstance(agent, Watcher) and agent.watches:
        for observation in question.seen:
            agent.watch(ROW, observation)
    if carry_on:
        assert isinstance(agent, Continuer)
        return agent.plan_from([ROW], [question.observation], [question.running])[0]
    return agent.plan([ROW], [question.observation])[0]


class ThinkingThread:
    """A thread that asks the agent. It is a daemon: one that never comes back does not keep the program alive."""

    PATIENCE = 1.0  # how long `close` waits for it (s)

    def __init__(self, agent: Agent, carry_on: bool, clock: Callable[[], int]) -> None:
        self._agent, self._carry_on, self._clock = agent, carry_on, clock
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="policy", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        self._questions.put(question)

    def answer(self) -> Answer | None:
        return None if self._answers.empty() else self._answers.get()

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(self.PATIENCE)

    def _work(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: a tick that is due goes before
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + YIELDS)
        while (question := self._questions.get()) is not None:
            plan, why = None, None
            try:
                plan = think(self._agent, question, self._carry_on)
            except Exception as error:  # whatever it is, the loop is told, and stops by itself
                why = error
            self._answers.put(Answer(question.number, plan, why, self._clock()))


class Memory:
    """What a watching agent is to be shown with the next question; of a longer silence the newest ticks."""

    def __init__(self) -> None:
        self._seen: deque[Observation] = deque(maxlen=WATCHED)
        self._fresh = True

    def restart(self) -> None:
        """An episode begins: what was seen before it is not its past."""
        self._seen.clear()
        self._fresh = True

    def watch(self, observation: Observation) -> None:
        self._seen.append(observation)

    def question(self, number: int, observation: Observation, running: Running | None) -> Question:
        """A question with everything that was seen since the last one."""
        question = Question(number, observation, running, self._fresh, tuple(self._seen))
        self._seen.clear()
        self._fresh = False
        return question
