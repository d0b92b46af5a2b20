"""Kinematics of the arm: tool pose and damped least squares inverse kinematics on an arm-only model.

A hand-written solver rather than mink: on the same targets it takes about a tenth of the time (see docs/decisions.md),
and recording speed is bound by it.
"""

from collections.abc import Sequence

import mujoco
import numpy as np

from robotattn.assets import path
from robotattn.envs.scene import FINGER_TRAVEL, HOME

DAMPING = 0.02
ITERATIONS = 20
TOLERANCE = 2e-4  # (m) and, for the rotation, (rad) times five
POSTURE_GAIN = 0.1  # pull of the redundant degree of freedom toward the home posture


def yaw_of(rotation: np.ndarray) -> float:
    """Yaw (rad) of a hand whose rotation matrix ``[9]`` is given row by row: the heading of its x axis."""
    return float(np.arctan2(rotation[3], rotation[0]))


class Arm:
    """A scratch copy of the arm for kinematics; holds no simulation state."""

    def __init__(self) -> None:
        self.model = mujoco.MjModel.from_xml_path(str(path("panda/panda.xml")))
        self.data = mujoco.MjData(self.model)
        self.site = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, "tool")
        self.low, self.high = self.model.jnt_range[:7].T.copy()
        self._jacobian = np.zeros((6, self.model.nv))
        self._hull = _Hull(self.model, self.site)

    def tool_pose(self, joints: np.ndarray) -> np.ndarray:
        """Tool pose ``[4]`` at joint positions ``[7]`` (rad)."""
        self._place(joints)
        return np.array([*self.data.site_xpos[self.site], yaw_of(self.data.site_xmat[self.site])])

    def reach(self, joints: np.ndarray | Sequence[float]) -> tuple[float, ...]:
        """Tool x, y, z and height of the arm's lowest point, fingers open (m), at joint positions ``[7]``."""
        return self._hull.reach(joints)

    def solve(self, pose: np.ndarray, start: np.ndarray, iterations: int = ITERATIONS) -> np.ndarray:
        """Joint positions ``[7]`` (rad, within limits) that bring the tool to `pose` ``[4]``, searched from `start`."""
        joints = np.clip(start, self.low, self.high)
        for _ in range(iterations):
            self._place(joints)
            error = self._error(pose)
            if np.abs(error[:3]).max() < TOLERANCE and np.abs(error[3:]).max() < 5 * TOLERANCE:
                break
            joints = np.clip(joints + self._step(error, joints), self.low, self.high)
        return joints

    def _place(self, joints: np.ndarray) -> None:
        self.data.qpos[:7] = joints
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)

    def _error(self, pose: np.ndarray) -> np.ndarray:
        """Position error (m) and rotation error (rad, world frame) to a tool that points straight down at a yaw."""
        rotation = self.data.site_xmat[self.site].reshape(3, 3)
        cos, sin = np.cos(pose[3]), np.sin(pose[3])
        wanted = np.array([[cos, sin, 0.0], [sin, -cos, 0.0], [0.0, 0.0, -1.0]])  # Rz(yaw) Rx(pi)
        twist = wanted @ rotation.T
        turn = [twist[2, 1] - twist[1, 2], twist[0, 2] - twist[2, 0], twist[1, 0] - twist[0, 1]]
        return np.array([*(pose[:3] - self.data.site_xpos[self.site]), *(0.5 * value for value in turn)])

    def _step(self, error: np.ndarray, joints: np.ndarray) -> np.ndarray:
        mujoco.mj_jacSite(self.model, self.data, self._jacobian[:3], self._jacobian[3:], self.site)
        jacobian = self._jacobian[:, :7]
        damped = np.linalg.inv(jacobian @ jacobian.T + DAMPING**2 * np.eye(6))
        inverse = jacobian.T @ damped
        posture = POSTURE_GAIN * (HOME - joints)
        return inverse @ (error - jacobian @ posture) + posture


class _Hull:
    """The parts of the arm that can touch something, with the fingers open: then those of a tilted hand reach lowest.

    A box goes as far as its half sides from its centre; a capsule as far as half its axis, and its radius around that.
    Only views of MuJoCo's arrays and space to work in are kept: the safety filter asks several times a tick.
    """

    def __init__(self, model: mujoco.MjModel, site: int) -> None:
        self.model, self.data = model, mujoco.MjData(model)
        self.data.qpos[7:9] = FINGER_TRAVEL
        self._joints, self._tool = self.data.qpos[:7], self.data.site_xpos[site]
        parts = np.flatnonzero(model.geom_contype)
        run = slice(parts[0], parts[-1] + 1)  # a slice gives views: these parts follow one another
        self._heights, self._axes = self.data.geom_xpos[run, 2], self.data.geom_xmat[run, 6:9]
        size, capsule = model.geom_size[run], model.geom_type[run] == mujoco.mjtGeom.mjGEOM_CAPSULE
        along = np.column_stack([np.zeros((len(size), 2)), size[:, 1]])  # a capsule's axis is z, its half length second
        halves = np.where(capsule[:, None], along, size)
        own = np.repeat(np.eye(len(halves)), 3, axis=0) * halves.reshape(-1, 1)  # each part's sides in its column
        self._below = np.vstack([own, np.where(capsule, size[:, 0], 0.0)])
        self._slopes = np.ones(len(self._below))  # how much of a side goes down, of each part; and 1 for the radii
        self._sides = self._slopes[:-1].reshape(halves.shape)

    def reach(self, joints: np.ndarray | Sequence[float]) -> tuple[float, ...]:
        """Tool x, y, z and the height of the lowest point (m)."""
        self._joints[:] = joints
        mujoco.mj_kinematics(self.model, self.data)
        np.abs(self._axes, out=self._sides)
        return *self._tool.tolist(), float(np.minimum.reduce(self._heights - self._slopes @ self._below))
