"""Limits between what a policy asks for and what is sent.

The arm is a position servo: a target that lies a lead ahead of a joint is answered at a speed that is soon near
lead / response and falls off as the joint gets there. That is the speed a command *asks for*, and what the limits of
speed and acceleration are about: a command may ask for no more than the one, and, from one command to the next, for no
more *additional* speed than the other allows in the time between them. To ask for less is always allowed.

The limits of the Panda's datasheet are the default. The scripted expert asks for more (of joint 7 for 5.3 rad/s, of
joint 2 for 3.1 rad/s, either from standstill in one command): most of its commands are shortened, it picks up as often
and takes 0.3 to 0.5 s longer. Limits that let all of it pass do not keep the simulated arm in its place: at 4 rad/s,
without `headroom` and `overshoot`, random commands took the tool 47 mm out of its workspace and the fingers into the
table. See scripts/check_safety.py.
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

BORDERS = np.vstack([np.eye(3, 4), -np.eye(3, 4), np.eye(1, 4, 3)])  # which of what `Forward` gives each is about

Forward = Callable[[np.ndarray], np.ndarray]
"""Joint positions ``[7]`` (rad) to the tool's x, y, z and the height of the arm's lowest point ``[4]`` (m)."""


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
    headroom: float = 0.7
    """Share of `speed` that a command may ask for: joints that start together drag each other up to 1.4 times beyond
    what they were asked for."""
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
    overshoot: float = 0.6
    """Share of its way to a target that must be left beyond it, up to a border of the workspace or the clearance: it
    makes the approach slow enough for the arm's inertia (30 ms when stretched, half of `response`) not to carry it
    past."""


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
        self._speed, self._acceleration = limits.headroom * np.array(limits.speed), np.array(limits.acceleration)
        box = limits.workspace
        self._border = np.array([*box.low, *(-side for side in box.high), limits.clearance])
        self._border[: 2 * len(box.low)] -= limits.slack
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
        known = _every(np.isfinite(joints), axis=None)  # where they are not, the arm may as well be at rest
        self._asked = (safe[:JOINTS] - joints) / self.limits.response if known else np.zeros(JOINTS)
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
        possible = self._into_range(controls, found)
        if possible[:JOINTS].tobytes() == self._last[:JOINTS].tobytes():  # safe before, and the arm is nearer to it now
            return possible
        room = self._room(joints, max(SHORTEST, elapsed))
        return self._inside(self._slow(possible, room, found), room, found)

    def _room(self, joints: np.ndarray, elapsed: float) -> "_Room":
        joints = np.minimum(np.maximum(joints, self._low[:JOINTS]), self._high[:JOINTS])  # as if not past a stop
        more = self._acceleration * elapsed
        return _Room(joints, elapsed, np.minimum(self._asked, 0.0) - more, np.maximum(self._asked, 0.0) + more)

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
        return slower

    def _inside(self, controls: np.ndarray, room: "_Room", found: dict[str, float]) -> np.ndarray:
        """Stop short, on the way from the last safe target, of where the arm would leave its workspace or clearance.

        Where that one would leave it already, any target that is no worse will do.
        """
        now = self._margins(room.joints)
        margins = self._margins(controls[:JOINTS])
        end = self._worst(margins, now)
        if end >= 0.0:
            return controls
        start = self._worst(self._margins(self._last[:JOINTS]), now)
        if end >= start:
            return controls
        excess = self._overshot(now, margins)
        if excess[:-1].min() < 0.0:
            found["workspace"] = -float(excess[:-1].min())
        if excess[-1] < 0.0:
            found["clearance"] = -float(excess[-1])
        return self._between(controls, room, now, start, end)

    def _between(self, controls: np.ndarray, room: "_Room", now: np.ndarray, start: float, end: float) -> np.ndarray:
        """A target that is inside, on the way to `controls`, by false position on the margins (m); or the last one."""
        last, trial, share = self._last[:JOINTS], controls.copy(), 1.0
        for _ in range(TRIES):
            share *= SHORT * max(start, 0.0) / (start - end)
            trial[:JOINTS] = last + share * (controls[:JOINTS] - last)
            end = self._worst(self._margins(trial[:JOINTS]), now)
            if end >= min(start, 0.0):
                break
        if end < min(start, 0.0) or self._slow(trial, room, {}) is not trial:
            trial[:JOINTS] = last
        return trial

    def _margins(self, joints: np.ndarray) -> np.ndarray:
        """How far inside each border the arm is ``[7]`` (m): low x y z, high x y z, and the table's clearance."""
        return BORDERS @ self.forward(joints) - self._border

    def _overshot(self, now: np.ndarray, margins: np.ndarray) -> np.ndarray:
        """Margins ``[7]`` of a target, less what the arm may run past it on its way from the margins it has now (m)."""
        return margins - self.limits.overshoot * np.maximum(now - margins, 0.0)

    def _worst(self, margins: np.ndarray, now: np.ndarray) -> float:
        return float(_least(self._overshot(now, margins)))


class _Room(NamedTuple):
    """What is left to a command: joint positions now ``[7]`` (rad), seconds since the last one, speeds ``[7]`` (rad/s)
    that it may ask for as far as acceleration goes."""

    joints: np.ndarray
    elapsed: float
    low: np.ndarray
    high: np.ndarray
