"""Limits between what a policy asks for and what is sent.

The arm is a position servo: a target that lies a lead ahead of a joint is answered at a speed that is soon near
lead / response and falls off as the joint gets there. That is the speed a command *asks for*, and what the limits of
speed and acceleration are about: a command may ask for no more than the one, and, from one command to the next, for no
more *additional* speed than the other allows in the time between them. To ask for less is always allowed.

The limits of the Panda's datasheet are the default. The scripted expert asks for more (of joint 7 for 5.3 rad/s, of
joint 2 for 3.1 rad/s, either from standstill in one command): most of its commands are shortened, it picks up as often
(599 of 600 episodes) and takes 0.4 to 0.7 s longer. Limits that let all of it pass do not keep the simulated arm in its
place: at 4 rad/s, without `headroom` and `overshoot`, random commands took the tool 47 mm out of its workspace and the
fingers into the table. See scripts/check_safety.py, and what it measured in results/safety.
"""

import math
from collections.abc import Callable, Sequence
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

# Below, seven values are a list: a loop over them takes a third of the time that arrays of that size take.
Joints = list[float]

Margins = tuple[float, ...]
"""How far inside each border the arm is (m): low x y z, high x y z, and the table's clearance."""

Forward = Callable[[Sequence[float]], Sequence[float]]
"""Seven joint positions (rad) to the tool's x, y, z and the height of the arm's lowest point (m)."""


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
        self._low, self._high = [*limits.low, 0.0], [*limits.high, 1.0]
        self._speed = [limits.headroom * speed for speed in limits.speed]
        box, slack = limits.workspace, limits.slack
        self._box = tuple(side - slack for side in box.low), tuple(side + slack for side in box.high)
        self.reset(np.zeros(JOINTS))

    def reset(self, joints: np.ndarray, gripper: float = 1.0) -> None:
        """Begin at rest at joint positions ``[7]`` (rad): what is held until there is a safe command."""
        self._last, self._asked = [*map(float, joints), gripper], [0.0] * JOINTS
        self.report = Interventions()

    def __call__(self, controls: np.ndarray, joints: np.ndarray, elapsed: float, age: float = 0.0) -> np.ndarray:
        """The controls ``[8]`` to send: seven joint targets (rad) and the gripper (0 closed, 1 open).

        joints: positions now ``[7]`` (rad). elapsed: since the last command (s). age: of the observation behind this
        command (s). Controls of any other shape and values that are not finite are no error: the last ones are held.
        """
        controls, where = np.asarray(controls, np.float64), np.asarray(joints, np.float64).tolist()
        found = self._unusable(controls, where, age)
        if math.isfinite(sum(where)):
            wanted, note = (self._last, {}) if found else (controls.tolist(), found)
            safe = self._limit(wanted, where, max(SHORTEST, elapsed), note)
            self._asked = self._ask(safe, where)
        else:  # then the arm may as well be at rest where it was sent
            safe, self._asked = self._last, [0.0] * JOINTS
        self.report.add(found)
        self._last = safe
        return np.array(safe)

    def _ask(self, controls: Joints, joints: Joints) -> Joints:
        """The speeds that controls ask for (rad/s), without the gripper."""
        response = self.limits.response
        return [(target - joint) / response for target, joint in zip(controls, joints, strict=False)]

    def _unusable(self, controls: np.ndarray, joints: Joints, age: float) -> dict[str, float]:
        """Why nothing can be made of a command, and by how much."""
        shaped = controls.shape == (len(self._last),)
        if not (shaped and math.isfinite(sum(controls.tolist()) + sum(joints))):
            given = [*controls.ravel().tolist(), *joints]
            if broken := len(given) - sum(map(math.isfinite, given)):
                return {"not_finite": float(broken)}
        if not shaped:
            return {"malformed": float(controls.size)}
        if not age <= self.limits.staleness:  # so that an age of NaN is too old, too
            excess = age - self.limits.staleness
            return {"stale": excess if math.isfinite(excess) else 0.0}
        return {}

    def _limit(self, controls: Joints, joints: Joints, elapsed: float, found: dict[str, float]) -> Joints:
        """The controls themselves if they are safe; otherwise safe ones, with what was exceeded noted in `found`.

        Those sent last are safe as long as the arm is nearer to them now, and not dragged away by its other joints.
        """
        possible = self._into_range(controls, found)
        room = _Room(joints, elapsed)
        slower = self._slow(possible, room, found)
        if slower is possible and possible[:JOINTS] == self._last[:JOINTS]:
            return possible
        return self._inside(slower, room, found)

    def _into_range(self, controls: Joints, found: dict[str, float]) -> Joints:
        limited = self._clip(controls)
        if limited == controls:
            return controls
        beyond = [abs(it - near) for it, near in zip(controls, limited, strict=True)]
        if max(beyond) <= ROUNDING:
            return controls
        excess = {"position": max(beyond[:JOINTS]), "gripper": beyond[JOINTS]}
        found.update({kind: value for kind, value in excess.items() if value > ROUNDING})
        return limited

    def _clip(self, controls: Joints) -> Joints:
        ranges = zip(self._low, controls, self._high, strict=True)
        return [low if it < low else high if it > high else it for low, it, high in ranges]

    def _slow(self, controls: Joints, room: "_Room", found: dict[str, float]) -> Joints:
        """Shorten the way to the target, in the same direction, until it asks for no more speed than is allowed."""
        fast, sudden = self._shares(controls, room)
        over = max(fast, sudden)
        if over <= 1.0 + ROUNDING:
            return controls
        asked = self._ask(controls, room.joints)
        if fast > 1.0 + ROUNDING:
            found["speed"] = max([abs(one) - speed for one, speed in zip(asked, self._speed, strict=True)])
        if sudden > max(1.0, fast) + ROUNDING:
            found["acceleration"] = self._rise(asked, max(1.0, fast), room.elapsed)
        share = self.limits.response / over
        slower = [joint + one * share for joint, one in zip(room.joints, asked, strict=True)]
        return self._clip([*slower, controls[JOINTS]])  # an arm past a stop is sent back to it, no farther

    def _shares(self, controls: Joints, room: "_Room") -> tuple[float, float]:
        """How much of the speed, and of its rise, that it may ask for a command asks for, by the worst joint."""
        response, (joints, elapsed), fast, sudden = self.limits.response, room, 0.0, 0.0
        each = zip(controls, joints, self._asked, self._speed, self.limits.acceleration, strict=False)
        for target, joint, before, speed, acceleration in each:
            asked = (target - joint) / response
            if asked < 0.0:  # as if mirrored: of the same sign in all that follows
                asked, before = -asked, -before
            share, rise = asked / speed, asked / ((before if before > 0.0 else 0.0) + acceleration * elapsed)
            fast, sudden = share if share > fast else fast, rise if rise > sudden else sudden
        return fast, sudden

    def _rise(self, asked: Joints, slowed: float, elapsed: float) -> float:
        """By how much what is left of the speed asked for rises faster than it may (rad/s^2)."""
        each = zip(asked, self._asked, self.limits.acceleration, strict=True)
        signed = [(one, was, limit) if one > 0.0 else (-one, -was, limit) for one, was, limit in each]
        return max([(one / slowed - (was if was > 0.0 else 0.0)) / elapsed - limit for one, was, limit in signed])

    def _inside(self, controls: Joints, room: "_Room", found: dict[str, float]) -> Joints:
        """Stop short, on the way from the last safe target, of where the arm would leave its workspace or clearance.

        Where that one would leave it already, any target that is no worse will do.
        """
        now = self._margins(room.joints)
        margins = self._margins(controls)
        end = self._worst(margins, now)
        if end >= 0.0:
            return controls
        start = self._worst(self._margins(self._last), now)
        if end >= start:
            return controls
        *box, table = self._overshot(margins, now)
        found |= {kind: -least for kind, least in (("workspace", min(box)), ("clearance", table)) if least < 0.0}
        return self._between(controls, room, now, start, end)

    def _between(self, controls: Joints, room: "_Room", now: Margins, start: float, end: float) -> Joints:
        """A target that is inside, on the way to `controls`, by false position on the margins (m); or the last one."""
        gripper, share = controls[JOINTS], 1.0
        for _ in range(TRIES):
            share *= SHORT * max(start, 0.0) / (start - end)
            trial = [last + share * (it - last) for last, it in zip(self._last, controls, strict=True)]
            trial[JOINTS] = gripper
            end = self._worst(self._margins(trial), now)
            if end >= min(start, 0.0):
                break
        if end < min(start, 0.0) or self._slow(trial, room, {}) is not trial:
            return self._slow([*self._last[:JOINTS], gripper], room, {})
        return trial

    def _margins(self, joints: Joints) -> Margins:
        x, y, z, lowest = self.forward(joints[:JOINTS])
        (left, near, floor), (right, far, ceiling) = self._box
        return x - left, y - near, z - floor, right - x, far - y, ceiling - z, lowest - self.limits.clearance

    def _overshot(self, margins: Margins, now: Margins) -> list[float]:
        """Margins of a target, less what the arm may run past it on its way from the margins it has now (m)."""
        share = self.limits.overshoot
        pairs = zip(margins, now, strict=True)
        return [there if there >= here else there - share * (here - there) for there, here in pairs]

    def _worst(self, margins: Margins, now: Margins) -> float:
        return min(self._overshot(margins, now))


class _Room(NamedTuple):
    """Where the joints are ``[7]`` (rad), and the seconds since the last command."""

    joints: Joints
    elapsed: float
