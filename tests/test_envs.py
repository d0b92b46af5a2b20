"""The environment as users meet it through Gymnasium."""

import copy

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from robotattn.envs import CameraConfig, EnvConfig, PickUpEnv, make_env
from robotattn.envs.experts import PickUpExpert
from robotattn.seeds import stream
from robotattn.sight import read_observation

SMALL = (CameraConfig("front", 32, 32), CameraConfig("wrist", 48, 24))


def act(env, ticks: int, seed: int = 0) -> list[np.ndarray]:
    """Joint positions, velocities, rewards and images over some ticks of seeded random actions, to be compared."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(ticks):
        action = rng.uniform(env.action_space.low, env.action_space.high)
        observation, reward, *_ = env.step(action)
        state = np.concatenate([env.unwrapped.data.qpos, env.unwrapped.data.qvel, [reward]])
        images = [image.ravel() for image in observation.get("images", {}).values()]
        seen.append(np.concatenate([state, *images]))
    return seen


@pytest.mark.filterwarnings("ignore:.*symmetric and normalized space")  # joint targets are in radians by design
@pytest.mark.parametrize("action_mode", ["tool", "joint"])
def test_gymnasium_check_finds_nothing(action_mode):
    cameras = (CameraConfig("front", 32, 24, depth=True, segmentation=True), *SMALL[1:])
    check_env(make_env(EnvConfig(action_mode=action_mode, cameras=cameras, object_tokens=True)), skip_render_check=True)


def test_gym_make_needs_no_import():
    env = gym.make("robotattn.envs:robotattn/PickUp-v0")
    observation, info = env.reset(seed=1)
    assert observation["state"].shape == (13,) and info["reason"] == "running"
    env.close()


def test_same_seed_gives_the_same_bits_in_a_used_and_a_fresh_environment():
    """O06: warm start, controls and every other leftover of an interrupted episode are gone after reset."""
    used, fresh = make_env(EnvConfig(cameras=SMALL)), make_env(EnvConfig(cameras=SMALL))
    fresh.reset(seed=7)
    expected = act(fresh, 15)
    raw, _ = used.reset(seed=3)
    expert = PickUpExpert([used])
    expert.reset(0)
    while not used.lifted:
        raw, *_ = used.step(expert.plan([0], [read_observation(raw)])[0].actions[0])  # and is interrupted in mid-grasp
    for left in (used.data.qacc_warmstart, used.data.xfrc_applied, used.data.qfrc_applied, used.data.ctrl):
        left += 0.1
    for env in (used, fresh):
        env.reset(seed=7)
        for one, two in zip(act(env, 15), expected, strict=True):
            np.testing.assert_array_equal(one, two)


def test_two_environments_in_one_process_do_not_touch_each_other():
    alone, left, right = (make_env(EnvConfig(cameras=SMALL, colour_jitter=1.0)) for _ in range(3))
    alone.reset(seed=5)
    expected = act(alone, 6)
    left.reset(seed=5)
    right.reset(seed=6)
    rng, seen = np.random.default_rng(0), []
    for _ in range(6):
        action = rng.uniform(left.action_space.low, left.action_space.high)
        observation, *_ = left.step(action)
        right.step(-action)
        state = np.concatenate([left.data.qpos, left.data.qvel, [0.0]])
        seen.append(np.concatenate([state, *(image.ravel() for image in observation["images"].values())]))
    for one, two in zip(expected, seen, strict=True):
        np.testing.assert_array_equal(one, two)


def test_observation_labels_and_positions_describe_the_same_instant():
    """O05: body poses lag the joint positions by a step unless they are refreshed."""
    env = make_env(EnvConfig(object_tokens=True))
    observation, _ = env.reset(seed=2)
    for _ in range(12):
        address = env.index.cube_qpos[env.target]
        np.testing.assert_array_equal(
            env.labels()["position"][env.target, :3], env.data.qpos[address : address + 3].astype(np.float32)
        )
        np.testing.assert_array_equal(observation["objects"][:, :4], env.labels()["position"])
        expected = env.arm.tool_pose(env.data.qpos[:7])
        np.testing.assert_allclose(observation["state"][8:11], expected[:3], atol=1e-6)
        action = np.array([0.05, 0.02, -0.05, 0.1, 0.0])
        observation, *_ = env.step(action)


def test_the_image_after_reset_shows_the_new_scene():
    """O05: the first image after a reset must not be the last scene's."""
    env = make_env(EnvConfig(cameras=SMALL))
    first = env.reset(seed=1)[0]["images"]["front"]
    second = env.reset(seed=2)[0]["images"]["front"]
    assert (first != second).any()
    np.testing.assert_array_equal(env.reset(seed=1)[0]["images"]["front"], first)


def test_the_image_after_a_step_shows_the_positions_of_that_instant():
    """O05: against a drawing of a fresh simulation that holds these positions and nothing else."""
    cameras = (CameraConfig("front", 240, 240), CameraConfig("wrist", 240, 240))
    env = make_env(EnvConfig(cameras=cameras))
    env.reset(seed=2)
    for _ in range(4):
        observation, *_ = env.step(np.array([0.08, 0.03, -0.08, 0.3, 0.0]))
        again = mujoco.MjData(env.model)
        again.qpos[:] = env.data.qpos
        mujoco.mj_forward(env.model, again)
        for camera in cameras:
            expected = env.renderer.draw(again, env.index.camera(camera.name), camera)["rgb"]
            np.testing.assert_array_equal(observation["images"][camera.name], expected)


def test_sync_and_spawned_async_vectors_give_the_same_observations():
    """O02: workers are spawned; a vector of environments is the environments side by side.

    shared_memory=False: with it, Gymnasium reads text observations once, at construction, and never again.
    """
    config, seeds = EnvConfig(cameras=SMALL[:1]), stream("evaluate", 0, 2)
    makers = [lambda: make_env(EnvConfig(cameras=SMALL[:1]))] * 2
    vectors = [
        gym.vector.SyncVectorEnv(makers),
        gym.vector.AsyncVectorEnv(makers, context="spawn", shared_memory=False),
    ]
    action = np.array([[0.05, 0.0, -0.05, 0.1, 1.0]] * 2, np.float32)
    results = []
    for vector in vectors:
        vector.reset(seed=seeds)
        results.append(copy.deepcopy(vector.step(action)[0]))
        vector.close()
    np.testing.assert_array_equal(results[0]["state"], results[1]["state"])
    np.testing.assert_array_equal(results[0]["images"]["front"], results[1]["images"]["front"])
    assert results[0]["instruction"] == results[1]["instruction"]
    single = make_env(config)
    single.reset(seed=seeds[1])
    np.testing.assert_array_equal(single.step(action[1])[0]["state"], results[0]["state"][1])


def test_initial_states_of_an_evaluation_are_all_different():
    """O09: seeds of one evaluation, and of evaluations with neighbouring base seeds, share no initial state."""
    env = make_env(EnvConfig(min_objects=2, max_objects=2))
    layouts = set()
    for base in (0, 1, 2):
        for seed in stream("evaluate", base, 8):
            env.reset(seed=seed)
            layouts.add(env.layout.position.tobytes())
    assert len(layouts) == 24


def test_naming_another_cube_leaves_the_scene_as_it_was():
    env = make_env(EnvConfig(cameras=SMALL, light=1.0, texture=True))
    first, _ = env.reset(seed=4)
    target, instruction = env.target, env.instruction
    second, _ = env.reset(seed=4, options={"other": True})
    assert env.target != target and second["instruction"] != instruction
    np.testing.assert_array_equal(first["images"]["front"], second["images"]["front"])


def test_six_cubes_on_request_all_of_different_colours():
    env = make_env(EnvConfig())
    env.reset(seed=0, options={"objects": 6})
    assert sorted(env.layout.colour) == [0, 1, 2, 3, 4, 5]
    distance = np.linalg.norm(env.layout.position[:, None] - env.layout.position[None], axis=-1) + np.eye(6)
    assert distance.min() >= 0.085


def test_absent_cubes_stay_where_they_are_parked():
    env = make_env(EnvConfig(min_objects=2, max_objects=2))
    env.reset(seed=0)
    before = env.data.xpos[env.index.cube_bodies[2:]].copy()
    act(env, 20)
    np.testing.assert_allclose(env.data.xpos[env.index.cube_bodies[2:]], before, atol=1e-9)


@pytest.mark.parametrize("action", [np.full(5, np.nan), np.array([0, 0, np.inf, 0, 0]), np.zeros(8), np.zeros((1, 5))])
def test_an_unusable_action_is_refused_before_the_physics_step(action):
    env = make_env(EnvConfig())
    env.reset(seed=0)
    before = env.data.qpos.copy()
    with pytest.raises(ValueError, match="action:"):
        env.step(action)
    np.testing.assert_array_equal(env.data.qpos, before)
    assert env.data.time == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hz", 30),
        ("hz", 0),
        ("time_limit", 0.0),
        ("yaw", -1.0),
        ("light", 3.0),
        ("min_objects", 7),
        ("cameras", (CameraConfig("side"),)),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        EnvConfig(**{field: value})


def test_control_rates_share_the_same_physics():
    """Half a second of standing still at 10, 20 and 50 Hz is 250 physics steps each."""
    for hz in (10, 20, 50):
        env = make_env(EnvConfig(hz=hz))
        env.reset(seed=0)
        for _ in range(hz // 2):
            observation, *_ = env.step(np.array([0, 0, 0, 0, 1.0]))
        assert env.data.time == pytest.approx(0.5, abs=1e-9)
        assert observation["time"][0] == 0.5
        np.testing.assert_allclose(env.tool_pose()[:3], [0.42, 0, 0.30], atol=1e-3)


def test_step_never_resets():
    """O07: a step after the end goes on in the same episode; only reset draws a new one."""
    env = make_env(EnvConfig(time_limit=0.2))
    env.reset(seed=0)
    zero = np.array([0, 0, 0, 0, 1.0])
    assert [env.step(zero)[3] for _ in range(2)] == [False, True]
    layout = env.layout
    env.step(zero)
    assert env.layout is layout and env.tick == 3


def test_a_vector_of_environments_resets_once_an_episode_and_skips_no_initial_state():
    """O07: three episodes are 3 + 1 resets, and their scenes are the first four of this seed."""

    class Noted(PickUpEnv):
        def reset(self, **more):
            result = super().reset(**more)
            scenes.append(self.layout.position.tobytes())
            return result

    scenes: list[bytes] = []
    vector = gym.vector.SyncVectorEnv([lambda: Noted(EnvConfig(time_limit=0.2))])
    vector.reset(seed=5)
    ended = [bool(vector.step(np.zeros((1, 5), np.float32))[3][0]) for _ in range(9)]
    vector.close()
    assert ended == [False, True, False] * 3  # the third step of each is the wrapper's reset
    found, alone = list(scenes), Noted(EnvConfig())
    scenes.clear()
    alone.reset(seed=5)
    for _ in range(3):
        alone.reset()
    assert found == scenes and len(set(found)) == 4


def test_a_zero_policy_ends_by_the_time_limit_and_never_succeeds():
    """O08: running out of time is not success."""
    env = make_env(EnvConfig(time_limit=1.0))
    env.reset(seed=0)
    for _ in range(10):
        _, reward, terminated, truncated, info = env.step(np.zeros(5))
    assert (terminated, truncated, reward) == (False, True, 0.0)
    assert info["reason"] == "time_limit" and info["success"] is False


def test_success_at_the_last_allowed_tick_counts_as_success():
    """O08: at a tie success wins, and the episode is not also truncated."""
    env = make_env(EnvConfig())
    expert = PickUpExpert([env])
    ticks = run(env, expert, limit=60)
    env.max_ticks = ticks
    assert run(env, expert, limit=ticks) == ticks


def run(env, expert, limit: int) -> int:
    """Ticks until the expert succeeds in the episode with seed 11; asserts the flags of the last one."""
    raw, _ = env.reset(seed=11)
    expert.reset(0)
    for tick in range(1, limit + 1):
        plan = expert.plan([0], [read_observation(raw)])[0]
        raw, _, terminated, truncated, info = env.step(plan.actions[0])
        if terminated:
            assert info["reason"] == "success" and not truncated
            return tick
    raise AssertionError("the expert did not succeed")
