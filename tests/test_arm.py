"""Kinematics of the arm."""

import numpy as np
import pytest

from robotattn.envs.arm import Arm
from robotattn.envs.scene import HOME


def denavit_hartenberg(joints: np.ndarray) -> np.ndarray:
    """Pose of the tool, 4 x 4, from the manufacturer's modified DH table: an independent reference."""
    a = [0, 0, 0, 0.0825, -0.0825, 0, 0.088]
    d = [0.333, 0, 0.316, 0, 0.384, 0, 0]
    alpha = np.deg2rad([0, -90, 90, 90, -90, 90, 90])
    pose = np.eye(4)
    for index in range(7):
        ca, sa = np.cos(alpha[index]), np.sin(alpha[index])
        ct, st = np.cos(joints[index]), np.sin(joints[index])
        pose = pose @ np.array(
            [
                [ct, -st, 0, a[index]],
                [st * ca, ct * ca, -sa, -sa * d[index]],
                [st * sa, ct * sa, ca, ca * d[index]],
                [0, 0, 0, 1],
            ]
        )
    half = np.sqrt(0.5)
    hand = np.array([[half, half, 0, 0], [-half, half, 0, 0], [0, 0, 1, 0.107 + 0.1034], [0, 0, 0, 1]])
    return pose @ hand


def test_tool_pose_equals_the_denavit_hartenberg_table():
    arm, rng = Arm(), np.random.default_rng(0)
    for _ in range(20):
        joints = rng.uniform(arm.low, arm.high)
        reference = denavit_hartenberg(joints)
        pose = arm.tool_pose(joints)
        np.testing.assert_allclose(pose[:3], reference[:3, 3], atol=1e-7)
        assert pose[3] == pytest.approx(np.arctan2(reference[1, 0], reference[0, 0]), abs=1e-6)


def test_inverse_kinematics_reaches_the_work_space_pointing_down():
    arm, rng = Arm(), np.random.default_rng(1)
    for _ in range(50):
        pose = np.array(
            [rng.uniform(0.33, 0.65), rng.uniform(-0.25, 0.25), rng.uniform(0.015, 0.33), rng.uniform(-0.7, 0.7)]
        )
        joints = arm.solve(pose, HOME, iterations=60)
        np.testing.assert_allclose(arm.tool_pose(joints), pose, atol=1e-3)
        assert denavit_hartenberg(joints)[2, 2] == pytest.approx(-1.0, abs=1e-5)
        assert (joints >= arm.low).all() and (joints <= arm.high).all()


def test_a_pose_out_of_reach_stays_within_the_joint_limits():
    arm = Arm()
    joints = arm.solve(np.array([2.0, 2.0, 0.5, 0.0]), HOME)
    assert (joints >= arm.low).all() and (joints <= arm.high).all()
