"""Limits between what a policy asks for and what is sent.

The arm is a position servo: a target that lies a lead ahead of a joint is answered at a speed that is soon near
lead / response and falls off as the joint gets there. That is the speed a command *asks for*, and what the limits of
speed and acceleration are about: a command may ask for no more than the one, and, from one command to the next, for no
more *additional* speed than the other allows in the time between them. To ask for less is always allowed.

The limits of the Panda's datasheet are the default. The scripted expert asks for more (of joint 7 for 5.3 rad/s, of
joint 2 for 3.1 rad/s, and for either from standstill at once): a third to a half of its commands are changed. It
succeeds as often, and takes 0.2 to 0.3 s longer. Limits that let all of it pass do not keep the arm in its workspace:
beyond 2.2 rad/s it runs centimetres past a target that turns back (scripts/check_safety.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

JOINT_LOW = (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973)  # (rad) Franka Emika Panda, datasheet
JOINT_HIGH = (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973)
PANDA_SPEED = (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61)  # (rad/s) the same
PANDA_ACCELERATION = (15.0, 7.5, 10.0, 12.5, 15.0, 20.0, 20.0)  # (rad/s^2) the same
JOINTS = 7
ROUNDING = 1e-6  # what exceeds a limit by no more is within it: rounding, not intent (rad, or a share of a speed)
SHORTEST = 1e-4  # two commands are never taken to be closer in time (s)
TRIES = 3  # points tried between the last safe command and one that leaves the workspace
SHORT = 0.95  # of the way to where the workspace is guessed to end

UNITS = {
    "malformed": "values",
    "not_finite": "values",
    "stale": "s",
    "position": "rad",
    "gripper": "share",
    "speed": "rad/s",
    "acceleration": "rad/s^2",
    "workspace": "m",
    "clearance": "m",
}
"""Kinds of interventions, and the unit of how far the limit was exceeded."""

# The methods of arrays do the same in three times the time, which counts here.
_most, _least, _every = np.maximum.reduce, np.minimum.reduce, np.logical_and.reduce

Forward = Callable[[np.ndarray], tuple[np.ndarray, float]]
"""Joint positions ``[7]`` to the tool's position ``[3]`` and the height of the arm's lowest point (m)."""


@dataclass(frozen=True)
class Workspace:
    """The box the tool may be sent to (m, world frame). Its floor keeps the finger tips clear of the table."""

    low: tuple[float, float, float] = (0.25, -0.40, 0.014)
    high: tuple[float, float, float] = (0.72, 0.40, 0.50)

    def clip(self, position: np.ndarray) -> np.ndarray:
        """The nearest allowed position ``[3]``."""
        return np.clip(position, self.low, self.high)


def require_finite(action: np.ndarray, size: int) -> np.ndarray:
    """The action ``[size]`` as float64; ValueError if it has another shape or a value that is not finite.

    MuJoCo counts a NaN control as zero and goes on, so it must be stopped before the step.
    """
    action = np.asarray(action, dtype=np.float64)
    if action.shape != (size,):
        raise ValueError(f"action: shape {action.shape}, allowed is ({size},)")
    if not np.isfinite(action).all():
        raise ValueError(f"action: {action.tolist()} has a value that is not finite; refused before the physics step")
    return action


@dataclass(frozen=True)
class Limits:
    """What a command may ask for."""

    low: tuple[float, ...] = JOINT_LOW
    """Lowest joint positions (rad)."""
    high: tuple[float, ...] = JOINT_HIGH
    """Highest joint positions (rad)."""
    speed: tuple[float, ...] = PANDA_SPEED
    """Highest joint speeds that a command may ask for (rad/s)."""
    acceleration: tuple[float, ...] = PANDA_ACCELERATION
    """How fast the speed that is asked for may rise (rad/s^2); to brake is always allowed."""
    response: float = 0.06
    """Time constant of the arm's answer to a step (s)."""
    staleness: float = 2.0
    """Oldest observation a command may come from (s): a chunk of 16 actions at 10 Hz that took 400 ms is that old."""
    workspace: Workspace = field(default_factory=Workspace)
    """Where the tool may be sent."""
    slack: float = 3e-4
    """How far outside the workspace a command may end (m): the error of the inverse kinematics."""
    clearance: float = 0.002
    """How close to the table any part of the arm may be sent (m)."""


@dataclass
class Tally:
    """Interventions of one kind: how many, and by how much the limit was exceeded at most and in sum."""

    count: int = 0
    largest: float = 0.0
    total: float = 0.0

    def add(self, excess: float) -> None:
        self.count, self.total, self.largest = self.count + 1, self.total + excess, max(self.largest, excess)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class Interventions:
    """What a filter did since its last reset: commands seen, commands changed, and a tally a kind."""

    commands: int = 0
    changed: int = 0
    kinds: dict[str, Tally] = field(default_factory=dict)

    def add(self, found: dict[str, float]) -> None:
        self.commands, self.changed = self.commands + 1, self.changed + bool(found)
        for kind, excess in found.items():
            self.kinds.setdefault(kind, Tally()).add(excess)


class SafetyFilter:
    """Pass a safe command on as it is, make any other safe, and hold the last safe one where none can be made of it.

    Between commands it remembers the last safe one and the speed that one asked for, nothing else. `reset` between
    episodes.
    """

    def __init__(self, limits: Limits, forward: Forward) -> None:
        self.limits, self.forward = limits, forward
        self._low, self._high = np.append(limits.low, 0.0), np.append(limits.high, 1.0)
        self._speed, self._acceleration = np.array(limits.speed), np.array(limits.acceleration)
        self._box_low = np.array(limits.workspace.low) - limits.slack
        self._box_high = np.array(limits.workspace.high) + limits.slack
        self.reset(np.zeros(JOINTS))

    def reset(self, joints: np.ndarray, gripper: float = 1.0) -> None:
        """Begin at rest at joint positions ``[7]`` (rad): what is held until there is a safe command."""
        self._last, self._asked = np.append(joints, gripper).astype(np.float64), np.zeros(JOINTS)
        self.report = Interventions()

    def __call__(self, controls: np.ndarray, joints: np.ndarray, elapsed: float, age: float = 0.0) -> np.ndarray:
        """The controls ``[8]`` to send: seven joint targets (rad) and the gripper (0 closed, 1 open).

        joints: positions now ``[7]`` (rad). elapsed: since the last command (s). age: of the observation behind this
        command (s). Controls of any other shape and values that are not finite are no error: the last ones are held.
        """
        controls, joints = np.asarray(controls, np.float64), np.asarray(joints, np.float64)
        found = self._unusable(controls, joints, age)
        safe = self._last.copy() if found else self._limit(controls, joints, elapsed, found)
        self.report.add(found)
        if "not_finite" not in found:
            self._asked = (safe[:JOINTS] - joints) / self.limits.response
        self._last = safe.copy()
        return safe

    def _unusable(self, controls: np.ndarray, joints: np.ndarray, age: float) -> dict[str, float]:
        """Why nothing can be made of a command, and by how much."""
        if not (_every(np.isfinite(controls), axis=None) and _every(np.isfinite(joints), axis=None)):
            return {"not_finite": float((~np.isfinite(controls)).sum() + (~np.isfinite(joints)).sum())}
        if controls.shape != self._last.shape:
            return {"malformed": float(controls.size)}
        if not age <= self.limits.staleness:  # so that an age of NaN is too old, too
            excess = age - self.limits.staleness
            return {"stale": excess if math.isfinite(excess) else 0.0}
        return {}

    def _limit(self, controls: np.ndarray, joints: np.ndarray, elapsed: float, found: dict[str, float]) -> np.ndarray:
        """The controls themselves if they are safe; otherwise safe ones, with what was exceeded noted in `found`."""
        if controls.tobytes() == self._last.tobytes():  # it was safe, and the arm has only come nearer since
            return controls
        room = self._room(joints, max(SHORTEST, elapsed))
        safe = self._pass(controls, room, found)
        if not found:
            return safe
        again: dict[str, float] = {}
        self._pass(safe, room, again)  # a safe command is one that this would not change
        return self._last.copy() if again else safe

    def _room(self, joints: np.ndarray, elapsed: float) -> "_Room":
        more = self._acceleration * elapsed
        return _Room(joints, elapsed, np.minimum(self._asked, 0.0) - more, np.maximum(self._asked, 0.0) + more)

    def _pass(self, controls: np.ndarray, room: "_Room", found: dict[str, float]) -> np.ndarray:
        return self._inside(self._slow(self._into_range(controls, found), room, found), found)

    def _into_range(self, controls: np.ndarray, found: dict[str, float]) -> np.ndarray:
        beyond = np.maximum(self._low - controls, controls - self._high)
        if _most(beyond) <= ROUNDING:
            return controls
        excess = {"position": float(_most(beyond[:JOINTS])), "gripper": float(beyond[JOINTS])}
        found.update({kind: value for kind, value in excess.items() if value > ROUNDING})
        return np.minimum(np.maximum(controls, self._low), self._high)

    def _slow(self, controls: np.ndarray, room: "_Room", found: dict[str, float]) -> np.ndarray:
        """Shorten the way to the target, in the same direction, until it asks for no more speed than is allowed."""
        asked = (controls[:JOINTS] - room.joints) / self.limits.response
        fast = float(_most(np.abs(asked) / self._speed))
        sudden = float(_most(np.maximum(asked / room.high, asked / room.low)))
        over = max(fast, sudden)
        if over <= 1.0 + ROUNDING:
            return controls
        if fast > 1.0 + ROUNDING:
            found["speed"] = float(_most(np.abs(asked) - self._speed))
        if sudden > max(1.0, fast) + ROUNDING:
            slowed = asked / max(1.0, fast)
            found["acceleration"] = float(_most(np.maximum(slowed - room.high, room.low - slowed))) / room.elapsed
        slower = controls.copy()
        slower[:JOINTS] = room.joints + asked * (self.limits.response / over)
        return np.minimum(np.maximum(slower, self._low), self._high)

    def _inside(self, controls: np.ndarray, found: dict[str, float]) -> np.ndarray:
        """Stop short, on the way from the last safe target, of where the arm leaves its workspace or its clearance.

        Where that one was outside already, any target that is no farther outside will do.
        """
        tool, lowest = self.forward(controls[:JOINTS])
        end = self._margin(tool, lowest)
        if end >= 0.0:
            return controls
        start = self._margin(*self.forward(self._last[:JOINTS]))
        if end >= start:
            return controls
        outside = _most(np.maximum(self._box_low - tool, tool - self._box_high))
        excess = {"workspace": float(outside), "clearance": self.limits.clearance - lowest}
        found.update({kind: value for kind, value in excess.items() if value > 0.0})
        return self._between(controls, start, end)

    def _between(self, controls: np.ndarray, start: float, end: float) -> np.ndarray:
        """A target that is inside, on the way to `controls`, by false position on the margins (m); or the last one."""
        trial, share = controls.copy(), 1.0
        for _ in range(TRIES):
            share *= SHORT * max(start, 0.0) / (start - end)
            trial[:JOINTS] = self._last[:JOINTS] + share * (controls[:JOINTS] - self._last[:JOINTS])
            end = self._margin(*self.forward(trial[:JOINTS]))
            if end >= min(start, 0.0):
                return trial
        trial[:JOINTS] = self._last[:JOINTS]
        return trial

    def _margin(self, tool: np.ndarray, lowest: float) -> float:
        """How far inside the workspace and its clearance the arm is (m); negative outside."""
        box = _least(np.minimum(tool - self._box_low, self._box_high - tool))
        return min(float(box), lowest - self.limits.clearance)


class _Room(NamedTuple):
    """What is left to a command: joint positions now ``[7]`` (rad), seconds since the last one, speeds ``[7]`` (rad/s)
    that it may ask for as far as acceleration goes."""

    joints: np.ndarray
    elapsed: float
    low: np.ndarray
    high: np.ndarray
