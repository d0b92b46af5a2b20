"""What became of a run in real time: every tick, every inference. numpy only; times are int64 nanoseconds."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from robotattn.control.pacing import longest_run

NEVER = -1  # in the arrays of an account: a tick that was dropped, or an age before the first command


@dataclass
class Inference:
    """One plan in the making. Times of the run's clock; latency: observation seen to plan there, so far if not yet."""

    number: int
    asked_ns: int
    latency_ns: int = 0
    held: int = 0
    """Ticks that passed meanwhile with no action left to run: the last command was sent again."""
    done: bool = False

    def __str__(self) -> str:
        took = f"{self.latency_ns / 1e6:.0f} ms" + ("" if self.done else " and not there yet")
        held = f"; the last command was held for {self.held} ticks" if self.held else ""
        return f"policy inference {self.number}: {took}, at t = {self.asked_ns / 1e9:.1f} s{held}"


@dataclass(frozen=True, eq=False)
class Account:
    """What happened; arrays are int64 (ns), one entry a tick of the schedule unless said, `NEVER` where dropped."""

    period_ns: int
    tolerance_ns: int
    patience_ns: int
    begun_ns: np.ndarray
    """Scheduled tick to its begin."""
    sent_ns: np.ndarray
    """Scheduled tick to its command sent, or before the first chunk, to the end of the look for one."""
    own_ns: np.ndarray
    """What the loop itself took: begin to end of the tick, without the calls of the robot."""
    cpu_ns: np.ndarray
    """What the loop itself took of the processor: the same, without the time in which others had it."""
    robot_ns: np.ndarray
    """What the robot's calls took in the tick."""
    age_ns: np.ndarray
    """How old the observation was that the command sent was planned from; NEVER before the first."""
    wake_ns: np.ndarray
    """Wake-up lateness of the ticks that were waited for (one entry each)."""
    phases: Mapping[str, int]
    """Ticks with an action to run, with none left (held) and before the first chunk (cold)."""
    inferences: tuple[Inference, ...]
    stopped: str
    """Why it ended before its time, "" if it did not."""
    failed: bool
    """Whether that was a failure of the policy."""

    @property
    def ticks(self) -> int:
        return len(self.begun_ns)

    @property
    def dropped(self) -> int:
        """Ticks that passed without a command: the loop was still busy with an earlier one."""
        return int((self.begun_ns == NEVER).sum())

    @property
    def late(self) -> np.ndarray:
        """bool: the tick began later than the tolerance, or never."""
        return (self.begun_ns > self.tolerance_ns) | (self.begun_ns == NEVER)

    @property
    def missed(self) -> np.ndarray:
        """bool: the command was sent later than a period after its tick, or never."""
        return (self.sent_ns > self.period_ns) | (self.sent_ns == NEVER)

    @property
    def longest_run(self) -> int:
        """The most ticks in a row that missed."""
        return longest_run(self.missed)

    @property
    def stalls(self) -> list[Inference]:
        """The inferences that took longer than the patience, those that are not there yet included."""
        return [one for one in self.inferences if one.latency_ns > self.patience_ns]
