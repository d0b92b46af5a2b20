"""Kinematics of the arm: tool pose and damped least squares inverse kinematics on an arm-only model.

A hand-written solver rather than mink: on the same targets it takes about a tenth of the time (see docs/decisions.md),
and recording speed is bound by it.
"""

import mujoco
import numpy as np

from robotattn.assets import path
from robotattn.envs.scene import HOME

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

    def tool_pose(self, joints: np.ndarray) -> np.ndarray:
        """Tool pose ``[4]`` at joint positions ``[7]`` (rad)."""
        self._place(joints)
        return np.array([*self.data.site_xpos[self.site], yaw_of(self.data.site_xmat[self.site])])

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
