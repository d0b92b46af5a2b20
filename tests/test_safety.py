"""The safety filter: what it lets pass, what it makes of the rest, and what the simulated arm does then."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robotattn.control.safety import JOINTS, PANDA_SPEED, UNITS, Interventions, Limits, SafetyFilter, Workspace
from robotattn.envs import EnvConfig, make_env
from robotattn.envs.arm import Arm
from robotattn.envs.scene import HOME

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import check_safety

PERIOD = 0.05  # (s)
FREE = (1e9,) * JOINTS
ORIGIN = np.zeros(JOINTS)
PLAIN = Limits(  # round numbers: 1 rad/s and 0.1 s, so a target may lie 0.1 rad ahead
    low=(-1.0,) * JOINTS, high=(1.0,) * JOINTS, speed=(1.0,) * JOINTS, acceleration=FREE, headroom=1.0, response=0.1,
    workspace=Workspace((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)), slack=0.0, clearance=0.0, overshoot=0.0,
)  # fmt: skip


def high_up(joints: np.ndarray) -> np.ndarray:
    """A place that is allowed whatever the joints are."""
    return np.array([0.0, 0.0, 0.0, 1.0])


def straight(joints: np.ndarray) -> np.ndarray:
    """A tool whose x is joint 1 and whose z is joint 2 (m for rad), and is the lowest part of the arm."""
    return np.array([joints[0], 0.0, joints[1], joints[1]])


def ready(limits: Limits = PLAIN, forward=high_up, joints: np.ndarray = ORIGIN) -> SafetyFilter:
    safety = SafetyFilter(limits, forward)
    safety.reset(joints)
    return safety


def controls(*joints: float, gripper: float = 1.0) -> np.ndarray:
    return np.array([*joints, *[0.0] * (JOINTS - len(joints)), gripper])


def copied(safety: SafetyFilter) -> SafetyFilter:
    """A filter in the same state with a report of its own."""
    other = copy.copy(safety)
    other.report = copy.deepcopy(safety.report)
    return other


def kinds(safety: SafetyFilter) -> dict[str, float]:
    return {kind: tally.largest for kind, tally in safety.report.kinds.items()}


# ------------------------------------------------------------------------------------------------ what passes


def test_a_safe_command_passes_as_the_same_bits():
    safety, rng = ready(), np.random.default_rng(0)
    for _ in range(100):
        asked = np.append(rng.uniform(-0.09, 0.09, JOINTS), rng.uniform())
        assert safety(asked, ORIGIN, PERIOD).tobytes() == asked.tobytes()
    assert (safety.report.commands, safety.report.changed, safety.report.kinds) == (100, 0, {})


def test_a_command_at_every_limit_passes():
    safety = ready(replace(PLAIN, acceleration=(20.0,) * JOINTS), straight)
    asked = controls(0.1, 0.0, -0.1, gripper=0.0)  # 1 rad/s after 0.05 s at 20 rad/s^2, on the table
    np.testing.assert_array_equal(safety(asked, ORIGIN, PERIOD), asked)
    assert safety.report.changed == 0


def test_what_is_sent_can_be_changed_by_the_caller_without_harm():
    safety = ready()
    sent = safety(controls(0.05), ORIGIN, PERIOD)
    sent[:] = 9.0
    np.testing.assert_array_equal(safety(controls(np.nan), ORIGIN, PERIOD), controls(0.05))


# ------------------------------------------------------------------------------------------------ what is held


@pytest.mark.parametrize(
    ("asked", "joints", "age", "kind", "excess"),
    [
        (controls(np.nan, np.inf), ORIGIN, 0.0, "not_finite", 2.0),
        (controls(-np.inf), ORIGIN, 0.0, "not_finite", 1.0),
        (controls(), np.full(JOINTS, np.nan), 0.0, "not_finite", 7.0),
        (np.zeros(5), ORIGIN, 0.0, "malformed", 5.0),
        (np.zeros((2, 8)), ORIGIN, 0.0, "malformed", 16.0),
        (np.array(0.0), ORIGIN, 0.0, "malformed", 1.0),
        (controls(), ORIGIN, 2.5, "stale", 0.5),
        (controls(), ORIGIN, np.nan, "stale", 0.0),
        (controls(), ORIGIN, np.inf, "stale", 0.0),
    ],
)
def test_what_nothing_can_be_made_of_holds_the_last_safe_command(asked, joints, age, kind, excess):
    safety, before = ready(), controls(0.05, gripper=0.25)
    safety(before, ORIGIN, PERIOD)
    assert safety(asked, joints, PERIOD, age).tobytes() == before.tobytes()
    assert kinds(safety) == {kind: excess} and safety.report.changed == 1


def test_after_a_hold_speed_rises_from_what_the_held_command_still_asks_for():
    """The arm has come within 0.02 rad of the held target, so 0.2 rad/s: 0.2 rad/s more is 0.04 rad ahead; by hand."""
    safety = ready(replace(PLAIN, acceleration=(4.0,) * JOINTS))
    for _ in range(5):
        safety(controls(0.1), ORIGIN, PERIOD)
    near = controls(0.08)[:JOINTS]
    np.testing.assert_allclose(safety(controls(np.nan), near, PERIOD), controls(0.1))
    np.testing.assert_allclose(safety(controls(0.5), near, PERIOD), controls(0.08 + 0.04))


def test_before_the_first_command_the_start_is_held():
    safety = ready(joints=np.full(JOINTS, 0.3))
    at = np.full(JOINTS, 0.3)
    np.testing.assert_array_equal(safety(controls(np.nan), at, PERIOD), [*at, 1.0])


def test_a_held_command_asks_for_no_more_when_the_arm_is_dragged_away_from_it():
    """By 0.3 rad from where it stood at rest: a speed of 0.1 rad / 0.1 s may be asked for at most; by hand."""
    safety = ready(joints=np.full(JOINTS, 0.3))
    np.testing.assert_allclose(safety(controls(np.nan), ORIGIN, PERIOD), [*[0.1] * JOINTS, 1.0])
    assert kinds(safety) == {"not_finite": 1.0}


def test_an_observation_may_be_as_old_as_the_limit():
    safety = ready(replace(PLAIN, staleness=0.4))
    np.testing.assert_array_equal(safety(controls(0.01), ORIGIN, PERIOD, age=0.4), controls(0.01))


# ------------------------------------------------------------------------------------------------ what is changed


def test_targets_beyond_the_joints_and_the_gripper_are_clipped():
    at = np.full(JOINTS, 0.95)
    safety = ready(joints=at)
    sent = safety(np.array([1.25, *[0.95] * 6, 1.5]), at, PERIOD)
    np.testing.assert_array_equal(sent, [1.0, *[0.95] * 6, 1.0])
    assert kinds(safety) == {"position": 0.25, "gripper": 0.5}


def test_a_target_too_far_ahead_is_shortened_in_its_direction():
    """0.3 rad ahead asks for 3 rad/s where 1 is allowed: a third of the way is left, of every joint; by hand."""
    safety = ready()
    np.testing.assert_allclose(
        safety(controls(0.3, -0.15, gripper=0.5), ORIGIN, PERIOD), controls(0.1, -0.05, gripper=0.5)
    )
    assert kinds(safety) == {"speed": pytest.approx(2.0)}


def test_headroom_leaves_a_share_of_the_speed():
    safety = ready(replace(PLAIN, headroom=0.7))
    np.testing.assert_allclose(safety(controls(0.3), ORIGIN, PERIOD), controls(0.07))


def test_speed_rises_by_no_more_than_acceleration_allows_and_falls_at_once():
    """4 rad/s^2 for 0.05 s is 0.2 rad/s more a command, 0.02 rad of target; by hand."""
    safety = ready(replace(PLAIN, acceleration=(4.0,) * JOINTS))
    for expected in (0.02, 0.04, 0.06, 0.08, 0.1, 0.1):
        np.testing.assert_allclose(safety(controls(0.1), ORIGIN, PERIOD), controls(expected), atol=1e-12)
    assert safety.report.kinds["acceleration"].count == 4
    assert kinds(safety)["acceleration"] == pytest.approx((1.0 - 0.2) / PERIOD)
    np.testing.assert_array_equal(safety(controls(0.0), ORIGIN, PERIOD), controls(0.0))  # to a stop at once
    np.testing.assert_allclose(safety(controls(-0.1), ORIGIN, PERIOD), controls(-0.02), atol=1e-12)


def test_a_reversal_is_no_more_than_a_start_the_other_way():
    safety = ready(replace(PLAIN, acceleration=(4.0,) * JOINTS))
    for _ in range(5):
        safety(controls(0.1), ORIGIN, PERIOD)
    np.testing.assert_allclose(safety(controls(-0.1), ORIGIN, PERIOD), controls(-0.02), atol=1e-12)


def test_a_target_outside_stops_short_of_the_border():
    """The border is at x = 0.05, the target at 0.1: by linear interpolation, 95 % of the way to the border is left."""
    box = Workspace((-1.0, -1.0, -1.0), (0.05, 1.0, 1.0))
    safety = ready(replace(PLAIN, workspace=box), straight, np.array([0.0, 0.5, 0, 0, 0, 0, 0]))
    sent = safety(controls(0.1, 0.5), controls(0.0, 0.5)[:JOINTS], PERIOD)
    np.testing.assert_allclose(sent, controls(0.95 * 0.05, 0.5))
    assert kinds(safety) == {"workspace": pytest.approx(0.05)}


def test_a_target_below_the_clearance_stops_short_of_it():
    start = np.array([0.0, 0.08, 0, 0, 0, 0, 0])
    safety = ready(replace(PLAIN, clearance=0.02), straight, start)
    np.testing.assert_allclose(safety(controls(0.0, 0.0), start, PERIOD), controls(0.0, 0.08 - 0.95 * 0.06))
    assert kinds(safety) == {"clearance": pytest.approx(0.02)}


def test_a_target_near_a_border_must_leave_room_for_running_past_it():
    """From 0.08 m above the table to 0.01 m: a quarter of the 0.07 m is more than what is left there."""
    start = np.array([0.0, 0.08, 0, 0, 0, 0, 0])
    safety = ready(replace(PLAIN, overshoot=0.25), straight, start)
    sent = safety(controls(0.0, 0.01), start, PERIOD)
    assert sent[1] >= 0.25 * (start[1] - sent[1]) and sent[1] == pytest.approx(0.25 / 1.25 * 0.08, rel=0.25)
    assert kinds(safety) == {"clearance": pytest.approx(0.25 * 0.07 - 0.01)}
    np.testing.assert_array_equal(safety(controls(0.05, 0.08), start, PERIOD), controls(0.05, 0.08))  # along it: none


def test_an_arm_that_is_outside_may_come_back_but_go_no_farther():
    box = Workspace((-1.0, -1.0, -1.0), (0.0, 1.0, 1.0))
    start = np.array([0.5, 0.5, 0, 0, 0, 0, 0])
    safety = ready(replace(PLAIN, workspace=box), straight, start)
    np.testing.assert_array_equal(safety(controls(0.55, 0.5), start, PERIOD), controls(0.5, 0.5))
    np.testing.assert_array_equal(safety(controls(0.45, 0.5), start, PERIOD), controls(0.45, 0.5))
    assert safety.report.changed == 1


def test_every_kind_has_a_unit_and_a_mean():
    found = Interventions()
    for excess in (1.0, 3.0):
        found.add({"speed": excess})
    found.add({})
    tally = found.kinds["speed"]
    assert (found.commands, found.changed, tally.count, tally.largest, tally.mean) == (3, 2, 2, 3.0, 2.0)
    assert UNITS["speed"] == "rad/s"


# ------------------------------------------------------------------------------------------------ on the arm


@pytest.fixture(scope="module")
def arm() -> Arm:
    return Arm()


def wild(rng: np.random.Generator) -> np.ndarray:
    size = rng.choice([1e-3, 0.05, 0.5, 5.0, 1e6, 1e300])
    return np.append(HOME, 0.5) + size * rng.uniform(-1, 1, JOINTS + 1)


def test_filtering_twice_is_filtering_once_bit_for_bit(arm):
    """In the state before and in the state after, from any command."""
    rng, safety = np.random.default_rng(0), ready(Limits(), arm.reach, HOME)
    joints = HOME.copy()
    for _ in range(1000):
        asked, before = wild(rng), copied(safety)
        sent = safety(asked, joints, PERIOD)
        assert before(sent, joints, PERIOD).tobytes() == sent.tobytes()
        assert copied(safety)(sent, joints, PERIOD).tobytes() == sent.tobytes()
        joints = joints + rng.uniform(0, 0.8) * (sent[:JOINTS] - joints)
    assert 0 < safety.report.changed < safety.report.commands
    assert set(kinds(safety)) <= set(UNITS)


def test_two_filters_and_a_used_one_give_the_same_bits(arm):
    used, fresh = ready(Limits(), arm.reach, HOME), ready(Limits(), arm.reach, HOME)
    rng = np.random.default_rng(1)
    for _ in range(20):
        used(wild(rng), HOME, PERIOD)
    used.reset(HOME)
    for _ in range(20):
        asked = wild(rng)
        assert used(asked, HOME, PERIOD).tobytes() == fresh(asked, HOME, PERIOD).tobytes()
    assert used.report == fresh.report


def test_the_lowest_part_of_the_arm_is_that_of_every_corner_of_its_shapes():
    """Against the corners of every box and points all around both ends of every capsule, in the whole scene."""
    import mujoco

    env, rng = make_env(EnvConfig()), np.random.default_rng(2)
    env.reset(seed=0)
    around = rng.normal(size=(4000, 3))
    around /= np.linalg.norm(around, axis=1, keepdims=True)
    corners = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T
    parts = [i for i in range(env.model.ngeom) if env.model.geom_contype[i] == 2]
    for _ in range(20):
        env.data.qpos[:7] = rng.uniform(env.arm.low, env.arm.high)
        env.refresh()
        lowest = np.inf
        for part in parts:
            size, turn = env.model.geom_size[part], env.data.geom_xmat[part].reshape(3, 3)
            if env.model.geom_type[part] == mujoco.mjtGeom.mjGEOM_BOX:
                points = corners * size
            else:
                points = np.vstack([size[0] * around + [0, 0, end * size[1]] for end in (-1, 1)])
            lowest = min(lowest, (env.data.geom_xpos[part] + points @ turn.T)[:, 2].min())
        *tool, height = env.arm.reach(env.data.qpos[:7])
        np.testing.assert_allclose(tool, env.tool_pose()[:3], atol=1e-9)
        assert height == pytest.approx(lowest, abs=2e-4)


@pytest.mark.parametrize("mode", ["tool", "joint"])
def test_send_is_controls_then_apply(mode):
    one, two = (make_env(EnvConfig(action_mode=mode)) for _ in range(2))
    rng = np.random.default_rng(3)
    one.reset(seed=0), two.reset(seed=0)
    for _ in range(5):
        action = rng.uniform(one.action_space.low - 0.1, one.action_space.high + 0.1)
        one.step(action)
        before = two.data.ctrl.copy()
        asked = two.controls(action)
        np.testing.assert_array_equal(two.data.ctrl, before)  # asking sets nothing
        two.apply(asked)
        two.advance(two.substeps), two.end_tick()
        np.testing.assert_array_equal(np.concatenate([one.data.qpos, one.data.ctrl]), [*two.data.qpos, *two.data.ctrl])


def test_slow_commands_of_the_expert_pass_unchanged():
    """Its strides are shortened, but what it does at the cube is not touched."""
    env = make_env(EnvConfig(hz=20))
    env.reset(seed=0)
    safety = ready(Limits(), env.arm.reach, env.data.qpos[:JOINTS].copy())
    for _ in range(10):
        asked = env.controls(np.array([0.003, 0.002, -0.003, 0.01, 1.0]))
        sent = safety(asked, env.data.qpos[:JOINTS].copy(), PERIOD)
        assert sent.tobytes() == asked.tobytes()
        env.apply(sent)
        env.advance(env.substeps)


def test_no_limit_is_exceeded_at_any_physics_step_of_adversarial_sequences():
    """A small one of scripts/check_safety.py; 10,000 sequences are its default."""
    worst, costs = check_safety.sequences(96, 7, lambda *_: None)
    assert len(worst) == 16 and len(costs) > 96 * 6
    for kind, seen in worst.items():
        assert seen.kept, (kind, seen)
    assert sum(seen.changed for seen in worst.values()) > 500


def test_without_a_filter_the_same_check_finds_limits_exceeded(monkeypatch):
    monkeypatch.setattr(SafetyFilter, "__call__", lambda self, asked, *_: np.nan_to_num(asked))
    worst, _ = check_safety.sequences(8, 7, lambda *_: None)
    assert not any(seen.kept for seen in worst.values())


def test_the_limits_are_those_of_the_datasheet_and_of_the_model(arm):
    limits = Limits()
    np.testing.assert_array_equal(limits.low, arm.low)
    np.testing.assert_array_equal(limits.high, arm.high)
    assert limits.speed == PANDA_SPEED == (2.175,) * 4 + (2.61,) * 3
