"""The nouns of the control loop: what is seen, what is planned, what is sent, and what came of it.

Frames: the world frame has its origin at the robot base on the table top, x away from the robot, y to its left,
z up (m). A *tool pose* is ``[x, y, z, yaw]`` (m, rad) of the point between the finger tips; the hand always points
down, so yaw about the vertical is its only free rotation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

ActionMode = Literal["tool", "joint"]

STATE = {  # slices of the proprioception vector, float32[13]
    "joint_position": slice(0, 7),  # (rad)
    "finger_width": slice(7, 8),  # opening between the finger pads (m)
    "tool_position": slice(8, 11),  # (m), world frame
    "tool_yaw": slice(11, 13),  # sin, cos
}
STATE_SIZE = 13
ACTION_SIZE = {"tool": 5, "joint": 8}  # dx dy dz dyaw gripper | 7 joint targets, gripper; gripper 0 closed, 1 open
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
MAX_OBJECTS = 6
OBJECT_SIZE = 4 + len(COLOURS)  # x, y, z (m), yaw (rad), colour one-hot


def tool_pose(state: np.ndarray) -> np.ndarray:
    """Read the tool pose ``[..., 4]`` (x, y, z, yaw) out of proprioception ``[..., 13]``."""
    yaw = np.arctan2(state[..., 11], state[..., 12])
    return np.concatenate([state[..., 8:11], yaw[..., None]], axis=-1)


def wrap_angle(angle: np.ndarray | float) -> np.ndarray:
    """Wrap an angle (rad) into [-pi, pi)."""
    return (np.asarray(angle) + np.pi) % (2 * np.pi) - np.pi


@dataclass(frozen=True)
class Observation:
    """What the sensors saw at one instant.

    images: camera name → uint8 ``[height, width, 3]``, RGB. state: float32 ``[13]``, see `STATE`. instruction: text,
    may be empty. objects: float32 ``[6, 10]`` (x, y, z, yaw, colour one-hot; absent slots all zero) or None when object
    tokens were not asked for. time: seconds since reset. stamps: when each sensor looked (s), where sensors have rates
    of their own: "state", "objects" and the cameras' names; empty where all look at `time`.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    instruction: str
    objects: np.ndarray | None
    time: float
    stamps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A chunk of actions: row k is meant for time ``start + k * period`` (s).

    actions: ``[H, A]``. In tool mode (A = 5) they are offsets from `anchor`, the tool pose of the observation they were
    planned from; in joint mode (A = 8) they are absolute and anchor is None. expert: the actions the teacher would have
    sent where that differs from `actions` (noise was injected), same shape and frame.
    """

    actions: np.ndarray
    start: float
    period: float
    anchor: np.ndarray | None = None
    expert: np.ndarray | None = None


@dataclass(frozen=True)
class Running:
    """What the robot will do while a new plan is computed.

    targets: absolute ``[m, A]``, m from 0 to H (tool mode: x, y, z, yaw, gripper in the world frame); row k belongs to
    the observation's time + k * period (s). frozen: rows that will have run before the plan is there, an estimate.
    """

    targets: np.ndarray
    period: float
    frozen: int


@dataclass(frozen=True)
class Command:
    """What is sent to the environment at one instant.

    action: ``[A]`` in the environment's action space (tool mode: relative to the tool pose *now*). age: seconds since
    the observation it was planned from. expert: the teacher's absolute target ``[A]`` for this tick, or None.
    """

    action: np.ndarray
    age: float
    expert: np.ndarray | None = None


@dataclass(frozen=True)
class Step:
    """One row of an episode: what was seen *before* the command, the command sent, and the privileged labels."""

    observation: Observation
    command: Command
    labels: Mapping[str, Any]


@dataclass(frozen=True)
class Episode:
    """What came of one episode. reason: 'success', 'time_limit', or why it was cut short.

    terminated: the task ended it; truncated: the clock did. info: what the environment says of the episode. timing:
    what the control loop says of it: ``latencies`` (ns, one an inference), ``ages`` (ns → physics steps at which the
    command in force was planned from an observation so old), ``ticks`` with an action to run, with none left (held) and
    before the first chunk (cold), ``overtaken`` chunks that came after one that had seen more, ``information``: of each
    sensor, where they have rates of their own, how old what it saw was at each command (ns), ``interventions`` of the
    safety filter, where there is one.
    """

    seed: int
    success: bool
    reason: str
    steps: int
    instruction: str
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Step] = ()
    timing: Mapping[str, Any] = field(default_factory=dict)


class Agent(Protocol):
    """Something that plans: the expert, a policy, a constant. Rows are slots of the batch, each with an episode."""

    def reset(self, row: int) -> None:
        """Forget everything about the episode that ran in this row."""

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        """Return one plan for each row."""


@runtime_checkable
class Watcher(Protocol):
    """An agent that is to see every control tick and not only those that it plans from: it has a history of frames."""

    @property
    def watches(self) -> bool:
        """Whether it does: what nobody looks at is not rendered."""

    def watch(self, row: int, observation: Observation) -> None:
        """Take note of what a row sees at this tick; called before `plan`, which may be given the same observation."""


@runtime_checkable
class Continuer(Protocol):
    """An agent that can plan on from what is running."""

    def plan_from(
        self, rows: Sequence[int], observations: Sequence[Observation], running: Sequence[Running | None]
    ) -> list[Plan]:
        """Return one plan for each row, which goes on from what runs there; None: nothing does."""
