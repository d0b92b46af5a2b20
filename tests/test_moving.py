"""Tasks where lateness matters: what moves goes where it should, and a tick can be cut anywhere."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from robotattn.envs import CameraConfig, EnvConfig, make_env
from robotattn.envs.base import PHYSICS_HZ
from robotattn.envs.experts import EXPERTS
from robotattn.envs.pick_moving import REACH_X, REACH_Y, Motion
from robotattn.envs.randomise import SPACING, X_RANGE, Y_RANGE
from robotattn.envs.scene import BELT_RESPONSE
from robotattn.envs.sensors import object_poses
from robotattn.sight import read_observation

MOVING = ("pick_moving", "pick_reversing", "pick_disturbed")
TASKS = ("pick_up", *MOVING)


def present(env):
    """Poses of the cubes that are there, ``[n, 4]``."""
    return object_poses(env)[: len(env.layout.colour)]


def expert_steps(env, seed):
    """Reset to a seed; then yield each action of the expert. The caller must send it and call `end_tick`."""
    env.reset(seed=seed)
    expert = EXPERTS[env.config.task]([env])
    expert.reset(0)
    while True:
        yield expert.plan([0], [read_observation(env.observe())])[0].actions[0]


def state(env):
    """Everything that physics goes on from, as one array."""
    return np.concatenate([env.data.qpos, env.data.qvel, env.data.ctrl, env.data.qacc_warmstart, [env.time]])


# ------------------------------------------------------------------------------------------- what moves


@pytest.mark.parametrize("hz", [10, 50])
def test_every_cube_goes_as_far_as_the_belt_would_at_its_speed(hz):
    """Displacement = v t within 0.1 %, at every tick of 2 s; it neither drifts aside nor turns."""
    env = make_env(EnvConfig(task="pick_moving", hz=hz, max_objects=6))
    for seed in (0, 1, 2):
        env.reset(seed=seed)
        start, speed = present(env), env.motion.speed
        assert 0 < abs(speed) <= 0.15
        for tick in range(1, 2 * hz + 1):
            env.step(np.array([0, 0, 0, 0, 1.0]))
            moved = present(env) - start
            np.testing.assert_allclose(moved[:, 1], speed * tick / hz, rtol=1e-3)
            np.testing.assert_allclose(moved[:, [0, 3]], 0.0, atol=1e-5)
            np.testing.assert_allclose(env.labels()["velocity"][: len(start), 1], speed, rtol=1e-3)
    assert not env.labels()["velocity"][len(start) :].any()


def test_cubes_at_rest_are_labelled_with_no_velocity():
    env = make_env(EnvConfig())
    env.reset(seed=0)
    env.advance(250)
    np.testing.assert_allclose(env.labels()["velocity"], 0.0, atol=1e-5)


def test_the_way_of_a_belt_by_hand():
    motion = Motion(0.1, (1.0, 2.0))
    assert [motion.travel(time) for time in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)] == pytest.approx(
        [0.0, 0.05, 0.1, 0.05, 0.0, 0.1]
    )
    assert Motion(-0.1).travel(3.0) == pytest.approx(-0.3)
    assert Motion(0.0).start_range() == (-0.2, 0.2)  # at rest: the usual strip
    assert Motion(0.15).start_range() == pytest.approx((-0.55, -0.35))  # 90 cm to go: from one end to the other
    assert Motion(-0.15).start_range() == pytest.approx((0.35, 0.55))
    assert Motion(0.08).start_range() == pytest.approx((-0.2, 0.07))


@pytest.mark.parametrize("task", ["pick_moving", "pick_reversing"])
def test_every_cube_stays_within_reach_for_six_seconds(task):
    env = make_env(EnvConfig(task=task, max_objects=6))
    times, speeds = np.arange(0, 6.01, 0.1), []
    for seed in range(60):
        env.reset(seed=seed)
        gone = [env.motion.travel(time) for time in times]
        y = present(env)[:, 1, None] + gone
        assert np.abs(y).max() <= REACH_Y + 1e-9
        assert (present(env)[:, 0] >= REACH_X[0]).all() and (present(env)[:, 0] <= REACH_X[1]).all()
        speeds.append(env.motion.speed)
    least = 0.0 if task == "pick_moving" else 0.03
    assert least <= np.abs(speeds).min() < least + 0.02 and 0.13 < np.abs(speeds).max() <= 0.15
    assert 15 < np.sum(np.array(speeds) > 0) < 45  # either way


def test_the_arm_gets_to_the_ends_of_the_belt():
    """The corners of the reach, at the height of a cube and of the lift, one stride after the other from home."""
    arm = make_env(EnvConfig(task="pick_moving")).arm
    for x in REACH_X:
        for y in (-REACH_Y, REACH_Y):
            joints = np.array([0.0, -0.353, 0.0, -2.521, 0.0, 2.168, 0.785])
            for height in (0.12, 0.02, 0.22):
                for _ in range(30):
                    gap = np.array([x, y, height, 0.5]) - arm.tool_pose(joints)
                    gap[:3] *= min(1.0, 0.05 / max(np.linalg.norm(gap[:3]), 1e-9))
                    joints = arm.solve(arm.tool_pose(joints) + gap, joints)
                np.testing.assert_allclose(arm.tool_pose(joints), [x, y, height, 0.5], atol=2e-3)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_belt_turns_back_at_its_instants_and_takes_up_speed_as_a_first_order_system(seed):
    env = make_env(EnvConfig(task="pick_reversing"))
    env.reset(seed=seed)
    speed, (first, second) = env.motion.speed, env.motion.reversals
    assert 0.4 <= first <= 1.6 and 0.4 <= second - first <= 1.6
    _, dof, control = env.index.belt
    wanted = []
    while env.time < 4.0:
        env.advance(1)
        wanted.append((env.time, env.data.ctrl[control]))
        since = env.time - first
        if 0 < since < min(0.3, second - first):
            expected = speed * (2 * np.exp(-since / BELT_RESPONSE) - 1)
            assert env.data.qvel[dof] == pytest.approx(expected, abs=0.05 * abs(speed))
    turned = [time for (time, sent), (_, before) in zip(wanted[1:], wanted[:-1], strict=True) if sent != before]
    assert turned == [first, second]
    assert [sent for _, sent in wanted[:1] + wanted[-1:]] == [speed, speed]


def test_cubes_stay_where_they_are_on_a_belt_that_reverses():
    env = make_env(EnvConfig(task="pick_reversing"))
    env.reset(seed=1)
    start = present(env)
    env.advance(2000)
    moved = present(env) - start
    np.testing.assert_allclose(moved[:, 1], env.data.qpos[env.index.belt[0]], atol=1e-5)
    np.testing.assert_allclose(moved[:, 1], env.motion.travel(4.0), atol=1e-4)  # the two lags cancel


@pytest.mark.parametrize("hz", [10, 50])
def test_the_named_cube_jumps_once_by_the_drawn_distance_to_a_free_place(hz):
    env = make_env(EnvConfig(task="pick_disturbed", hz=hz, max_objects=6))
    for seed in range(5):
        before, jumps = None, []
        for action in expert_steps(env, seed):
            env.send(action)
            for _ in range(env.substeps):
                before = present(env)
                env.advance(1)
                after = present(env)
                if np.hypot(*(after - before)[env.target, :2]) > 0.01:
                    jumps.append((env.time, after - before, after))
            if any(env.end_tick()[:2]):
                break
        ((time, moved, after),) = jumps
        size = np.hypot(*moved[env.target, :2])
        assert 0.03 <= env.distance <= 0.08 and size == pytest.approx(env.distance, abs=1e-4)
        np.testing.assert_allclose(np.delete(moved, env.target, axis=0), 0.0, atol=1e-4)
        info = env._info("running")["episode"]
        assert (info["disturbed"], info["jumped_at"], info["jump"]) == (True, time, env.distance)
        others = np.delete(after, env.target, axis=0)
        assert np.hypot(*(others - after[env.target])[:, :2].T).min(initial=1.0) > SPACING - 1e-3
        assert X_RANGE[0] - 1e-3 <= after[env.target, 0] <= X_RANGE[1] + 1e-3
        assert Y_RANGE[0] - 1e-3 <= after[env.target, 1] <= Y_RANGE[1] + 1e-3


def test_a_cube_that_nobody_reaches_for_does_not_jump():
    env = make_env(EnvConfig(task="pick_disturbed"))
    env.reset(seed=0)
    start = present(env)
    for _ in range(20):
        *_, info = env.step(np.zeros(5))
    np.testing.assert_allclose(present(env), start, atol=2e-4)
    assert info["episode"]["disturbed"] is False and "jumped_at" not in info["episode"]


# ------------------------------------------------------------------------------------- ticks and their parts


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("hz", [10, 20, 50])
def test_a_step_is_send_advance_end_tick_observe_however_physics_is_cut(task, hz):
    """Bit for bit over a whole episode: one cut at random against `step`, with looks in between."""
    whole, parts = (make_env(EnvConfig(task=task, hz=hz, object_tokens=True)) for _ in range(2))
    parts.reset(seed=5)
    rng, ended = np.random.default_rng(hz), False
    for action in expert_steps(whole, 5):
        seen, reward, *flags, info = whole.step(action)
        parts.send(action)
        left = parts.substeps
        while left:
            run = int(rng.integers(1, left + 1))
            parts.advance(run)
            parts.observe(), parts.labels()
            left -= run
        *ended, told = parts.end_tick()
        again = parts.observe()
        np.testing.assert_array_equal(state(parts), state(whole))
        assert (flags, info) == (ended, told) and reward == float(ended[0])
        for name in ("state", "velocity", "time", "objects"):
            np.testing.assert_array_equal(again[name], seen[name])
        if any(flags):
            break
    assert info["success"]


@pytest.mark.parametrize("task", ["pick_up", "pick_moving"])
def test_an_observation_in_mid_tick_is_of_that_instant(task):
    env = make_env(EnvConfig(task=task, object_tokens=True))
    env.reset(seed=2)
    env.send(np.array([0.05, 0.05, -0.1, 0.2, 1.0]))
    for steps in range(1, 51):
        env.advance(1)
        seen = env.observe()
        assert seen["time"][0] == steps / PHYSICS_HZ  # exact, not a running sum
        np.testing.assert_allclose(seen["state"][8:11], env.arm.tool_pose(env.data.qpos[:7])[:3], atol=1e-6)
        slots = env.index.cube_qpos[: len(env.layout.colour)]
        np.testing.assert_array_equal(seen["objects"][: len(slots), 1], env.data.qpos[slots + 1].astype(np.float32))


def test_a_late_action_acts_from_the_step_at_which_it_is_sent():
    """In tool mode it is relative to the tool pose then, so the same action sent later goes somewhere else."""
    env = make_env(EnvConfig())
    env.reset(seed=0)
    env.send(np.array([0.05, 0.0, -0.05, 0.0, 1.0]))
    env.advance(25)
    pose, action = env.tool_pose(), np.array([0.0, 0.05, 0.0, 0.0, 0.0])
    env.send(action)
    np.testing.assert_array_equal(env.data.ctrl[:7], env.joints_for(pose + action[:4]))
    assert env.data.ctrl[7] == 0.0 and pose[2] < 0.295  # it had set out


@pytest.mark.parametrize("task", MOVING)
def test_same_seed_gives_the_same_bits_in_a_used_and_a_fresh_environment(task):
    used, fresh = make_env(EnvConfig(task=task)), make_env(EnvConfig(task=task))
    for tick, action in enumerate(expert_steps(used, 3)):  # and is interrupted after its event
        used.step(action)
        if tick == 20:
            break
    runs = []
    for env in (used, fresh):
        states = []
        for action in expert_steps(env, 7):
            _, _, terminated, truncated, info = env.step(action)
            states.append(state(env))
            if terminated or truncated:
                break
        runs.append((np.array(states), info))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("task", MOVING)
def test_naming_another_cube_leaves_the_scene_and_its_motion_as_they_were(task):
    env = make_env(EnvConfig(task=task))
    env.reset(seed=4)
    before, target, scene = state(env), env.target, env.layout.position.copy()
    env.reset(seed=4, options={"other": True})
    assert env.target != target
    np.testing.assert_array_equal(state(env), before)
    np.testing.assert_array_equal(env.layout.position, scene)


@pytest.mark.parametrize("task", MOVING)
def test_gymnasium_check_finds_nothing(task):
    config = EnvConfig(task=task, cameras=(CameraConfig("front", 32, 24, segmentation=True),), object_tokens=True)
    check_env(make_env(config), skip_render_check=True)


@pytest.mark.parametrize("name", ["PickMoving", "PickReversing", "PickDisturbed"])
def test_gym_make_needs_no_import(name):
    env = gym.make(f"robotattn.envs:robotattn/{name}-v0")
    env.close()
    assert env.spec is not None and env.spec.id == f"robotattn/{name}-v0"
