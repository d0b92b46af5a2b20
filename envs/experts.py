"""Scripted experts: feedback controllers that look at the true state and say where the tool should go next.

They are Markov: the command depends on the state alone, so that a demonstration can be disturbed (DART, Laskey et al.
2017) and the label at every state is still what the expert would do there.
"""

from collections.abc import Sequence
from typing import ClassVar, cast

import gymnasium as gym
import numpy as np

from robotattn.envs.base import TabletopEnv
from robotattn.envs.randomise import generator
from robotattn.envs.scene import BELT_HALF, BELT_X, CUBE_HALF
from robotattn.envs.sensors import object_poses
from robotattn.types import Observation, Plan, wrap_angle

STRIDE = 0.05  # the most a command lies ahead of the tool (m)
TURN = 0.25  # (rad)
HOVER, CARRY = 0.12, 0.22  # tool heights (m)
NEAR, ALIGNED = 0.012, 0.12  # when it may descend (m, rad)
OPEN, CLOSED = 1.0, 0.0
ARM_RESPONSE = 0.06  # time constant of the arm's answer to a step of 5 cm (s)
NOISY_EPISODES, NOISE_RATE, NOISE_SECONDS = 0.8, 1.2, 0.25  # share, disturbances a second, length (s)
NOISE = np.array([0.025, 0.025, 0.015, 0.15])  # standard deviations (m, m, m, rad)


class PickUpExpert:
    """Picks up the named cube. With noise > 0 commands are disturbed as in DART; plans carry the clean command too.

    fumble: share of the disturbances in which the gripper also does the opposite. Grasps that fail, which an expert in
    time never has, are then among its states, and what to do after one among its labels.
    """

    held: ClassVar[float] = NEAR  # how far aside a cube between the fingers may have slipped and still be held (m)

    def __init__(self, envs: Sequence[gym.Env], noise: float = 0.0, fumble: float = 0.0) -> None:
        self.envs = [cast(TabletopEnv, env.unwrapped) for env in envs]
        self.noise, self.fumble = noise, fumble
        self._disturbances = [_Disturbance(0.0, 0.0, None, 1) for _ in envs]

    def reset(self, row: int) -> None:
        env = self.envs[row]
        rng = generator(env.episode_seed, "noise")
        self._disturbances[row] = _Disturbance(self.noise, self.fumble, rng, env.config.hz)

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        return [self._plan(row, observation.time) for row, observation in zip(rows, observations, strict=True)]

    def _plan(self, row: int, time: float) -> Plan:
        env = self.envs[row]
        tool = env.tool_pose()
        clean = self.command(env, tool)
        sent = clean.copy()
        offset, turned = self._disturbances[row].next()
        sent[:4] += offset
        if turned:
            sent[4] = OPEN + CLOSED - sent[4]
        period = 1.0 / env.config.hz
        env.expert_joint = np.append(env.joints_for(tool + clean[:4]), clean[4])
        if env.config.action_mode == "tool":
            return Plan(sent[None], time, period, anchor=tool, expert=clean[None])
        joints = np.append(env.joints_for(tool + sent[:4]), sent[4])
        return Plan(joints[None], time, period, expert=env.expert_joint[None])

    def command(self, env: TabletopEnv, tool: np.ndarray) -> np.ndarray:
        """The undisturbed command ``[5]`` at a tool pose ``[4]``."""
        return pick_up(tool, object_poses(env)[env.target], env.data.qpos[7] + env.data.qpos[8], self.held)


class PickMovingExpert(PickUpExpert):
    """Picks the named cube from a moving belt: the same rules, and every command but lifting runs ahead with it.

    It is told the belt's true velocity now, and stays Markov; a reversal to come it cannot know. A cube that was pushed
    off the belt lies still.
    """

    held: ClassVar[float] = 0.020  # a quick lift can pull a cube a centimetre along the pads: no reason to let go

    def command(self, env: TabletopEnv, tool: np.ndarray) -> np.ndarray:
        clean = super().command(env, tool)
        lifting = clean[4] == CLOSED and clean[2] > 0.02  # what is held need not follow the belt
        on_belt = abs(env.data.xpos[env.index.cube_bodies[env.target], 0] - BELT_X) < BELT_HALF[0]
        if on_belt and not lifting:
            clean[1] += env.data.qvel[env.index.belt[1]] * lead(env.config.hz)
        return clean


def lead(hz: int) -> float:
    """Seconds by which a command must run ahead of a target at constant speed to be on it at every control tick.

    The arm answers a command c as a first-order system: after a period T it has gone the share 1 - exp(-T / tau) of the
    way. To go v T in it, c must be v T / (1 - exp(-T / tau)) away; tau alone is its limit for short periods.
    """
    period = 1.0 / hz
    return float(period / -np.expm1(-period / ARM_RESPONSE))


def pick_up(tool: np.ndarray, cube: np.ndarray, width: float, held: float = NEAR) -> np.ndarray:
    """The command ``[5]`` (tool offset, gripper) at a tool pose ``[4]``, a cube pose ``[4]`` and finger opening (m)."""
    offset = cube - tool
    offset[3] = wrap_angle(4 * offset[3]) / 4  # the nearest pair of faces
    lateral, drop = np.hypot(*offset[:2]), -offset[2]
    near, level = lateral < NEAR, abs(drop) < 0.01
    if lateral < held and level and abs(width - 2 * CUBE_HALF) < 0.004:  # holding: lift
        return _toward(np.array([0.0, 0.0, CARRY - tool[2], 0.0]), CLOSED)
    if near and level and abs(offset[3]) < 2 * ALIGNED:
        return _toward(offset, CLOSED)
    if near and abs(offset[3]) < ALIGNED:
        return _toward(offset, OPEN)
    if drop < 0.05 and lateral > 2 * NEAR:  # low and off centre: rise first
        return _toward(np.array([0.0, 0.0, HOVER - tool[2], offset[3]]), OPEN)
    return _toward(np.array([offset[0], offset[1], HOVER - tool[2], offset[3]]), OPEN)


def _toward(offset: np.ndarray, gripper: float) -> np.ndarray:
    distance = float(np.linalg.norm(offset[:3]))
    step = offset[:3] * min(1.0, STRIDE / max(distance, 1e-9))
    return np.array([*step, np.clip(offset[3], -TURN, TURN), gripper])


class _Disturbance:
    """What is done to the commands of one episode: now and then, for a quarter of a second."""

    def __init__(self, strength: float, fumble: float, rng: np.random.Generator | None, hz: int) -> None:
        self.rng, self.hz, self.strength, self.fumble = rng, hz, strength, fumble
        self.active = rng is not None and strength > 0 and rng.random() < NOISY_EPISODES
        self.left, self.offset, self.turned = 0, np.zeros(4), False

    def next(self) -> tuple[np.ndarray, bool]:
        """An offset to the tool's command ``[4]``, and whether the gripper is to do the opposite."""
        if not self.active or self.rng is None:
            return np.zeros(4), False
        if self.left == 0 and self.rng.random() < NOISE_RATE / self.hz:
            self.left = max(1, round(NOISE_SECONDS * self.hz))
            self.offset = self.strength * self.rng.normal(0, NOISE)
            self.turned = self.fumble > 0 and bool(self.rng.random() < self.fumble)
        elif self.left == 0:
            return np.zeros(4), False
        self.left -= 1
        return self.offset, self.turned


EXPERTS: dict[str, type[PickUpExpert]] = {
    "pick_up": PickUpExpert,
    "pick_moving": PickMovingExpert,
    "pick_reversing": PickMovingExpert,
    "pick_disturbed": PickUpExpert,
}
