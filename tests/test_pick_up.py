"""The strict success predicate, on states made by hand, and the scripted expert."""

import mujoco
import numpy as np
import pytest

from robotattn.control.chunks import relative
from robotattn.envs import EnvConfig, make_env
from robotattn.envs.experts import PickUpExpert, pick_up
from robotattn.envs.sensors import object_poses
from robotattn.loop import run_episodes
from robotattn.seeds import stream

OPEN, CLOSED = 1.0, 0.0


@pytest.fixture
def env():
    env = make_env(EnvConfig(yaw=0.0, time_limit=20.0))
    env.reset(seed=0, options={"objects": 2})
    return env


def go(env, pose, gripper, ticks=25):
    """Send the tool to a pose ``[4]``; returns whether any tick was a success."""
    return any(
        env.step(np.append(np.clip(relative(np.append(pose, 0), env.tool_pose())[:4], -0.05, 0.05), gripper))[2]
        for _ in range(ticks)
    )


def grasp(env, slot):
    cube = object_poses(env)[slot]
    go(env, [*cube[:2], 0.12, 0], OPEN)
    go(env, [*cube[:2], cube[2], 0], OPEN)
    return go(env, [*cube[:2], cube[2], 0], CLOSED, 4)


def put_cube(env, position, velocity=(0, 0, 0)):
    address = env.index.cube_qpos[env.target]
    env.data.qpos[address : address + 3] = position
    dof = env.model.body_dofadr[env.index.cube_bodies[env.target]]
    env.data.qvel[dof : dof + 3] = velocity
    mujoco.mj_forward(env.model, env.data)


def test_touching_the_cube_on_the_table_is_no_success(env):
    """O13."""
    assert not grasp(env, env.target)
    assert not go(env, env.tool_pose(), CLOSED, 20)
    assert env.failure() == "not_lifted"


def test_a_cube_thrown_up_is_no_success(env):
    """O13: four metres a second is above 10 cm for 0.76 s, longer than it must be held, but in nobody's hand."""
    put_cube(env, [0.6, 0.3, 0.02], (0, 0, 4.0))
    up = 0
    for _ in range(20):
        assert not go(env, env.tool_pose(), OPEN, 1)
        up += env.heights()[env.target] > 0.10
    assert up >= 7


def test_a_cube_pressed_onto_the_table_is_no_success(env):
    """O13: wedged between finger and table."""
    cube = object_poses(env)[env.target]
    go(env, [cube[0], cube[1] + 0.02, 0.12, 0], CLOSED)
    assert not go(env, [cube[0], cube[1] + 0.02, 0.04, 0], CLOSED, 30)
    touching = env.contacts(env.index.cube_geoms[env.target])
    assert env.index.table in touching and touching & {*env.index.pads, *env.index.fingers}


def test_lifted_six_centimetres_is_no_success(env):
    """O13."""
    grasp(env, env.target)
    assert not go(env, [*env.tool_pose()[:2], 0.08, 0], CLOSED, 30)
    assert env.heights()[env.target] == pytest.approx(0.06, abs=0.01)
    assert set(env.index.pads) <= env.contacts(env.index.cube_geoms[env.target])  # held all the while
    assert not go(env, [*env.tool_pose()[:2], 0.08, 0], OPEN, 10)
    assert env.failure() == "dropped"


def test_lifted_and_dropped_at_once_is_no_success(env):
    """O13: high enough for two ticks, then let go."""
    grasp(env, env.target)
    pose = [*env.tool_pose()[:2], 0.30, 0]
    while env.heights()[env.target] < 0.10:
        assert not go(env, pose, CLOSED, 1)
    assert not go(env, pose, CLOSED, 1)
    assert not go(env, pose, OPEN, 15)
    assert env.failure() == "dropped"


def test_lifted_and_held_for_half_a_second_is_success_exactly_then(env):
    """O13: the only one of these states that is a success."""
    grasp(env, env.target)
    pose = [*env.tool_pose()[:2], 0.22, 0]
    while env.held_since is None:
        assert not go(env, pose, CLOSED, 1)
    assert [go(env, pose, CLOSED, 1) for _ in range(5)] == [False, False, False, False, True]


def test_lifting_the_wrong_cube_is_no_success_and_is_named(env):
    """O13: the right object."""
    grasp(env, 1 - env.target)
    assert not go(env, [*env.tool_pose()[:2], 0.22, 0], CLOSED, 20)
    assert env.failure() == "wrong_object"


def test_the_grasp_does_not_creep():
    """Elliptic cone, impratio 10, condim 4: a held cube moves less than half a millimetre in the hand over 2 s."""
    env = make_env(EnvConfig(yaw=0.0, time_limit=20.0))
    env.reset(seed=1)
    grasp(env, env.target)
    go(env, [*env.tool_pose()[:2], 0.22, 0], CLOSED, 20)
    offset = object_poses(env)[env.target][:3] - env.tool_pose()[:3]
    go(env, env.tool_pose(), CLOSED, 20)
    assert np.abs(object_poses(env)[env.target][:3] - env.tool_pose()[:3] - offset).max() < 5e-4


@pytest.mark.parametrize("hz", [10, 20, 50])
def test_the_expert_succeeds_at_every_control_rate(hz):
    env = make_env(EnvConfig(hz=hz))
    episodes = list(run_episodes([env], PickUpExpert([env]), stream("validate", hz, 12)))
    assert [episode.reason for episode in episodes] == ["success"] * 12


def test_the_expert_commands_joints_as_well():
    env = make_env(EnvConfig(action_mode="joint"))
    episodes = list(run_episodes([env], PickUpExpert([env]), stream("validate", 1, 5)))
    assert all(episode.success for episode in episodes)


def test_noise_disturbs_the_command_and_keeps_the_clean_label():
    """DART: what is sent differs from what the expert would do, and the expert still succeeds."""
    env = make_env(EnvConfig())
    episodes = list(
        run_episodes([env], PickUpExpert([env], noise=1.0), stream("validate", 2, 10), keep=lambda seed: True)
    )
    assert sum(episode.success for episode in episodes) >= 9
    differs = [
        not np.allclose(row.command.expert[:3], row.command.action[:3] + row.observation.state[8:11], atol=1e-5)
        for episode in episodes
        for row in episode.rows
    ]
    assert 0.05 < np.mean(differs) < 0.6


def test_a_fumbling_hand_does_the_opposite_in_that_share_of_disturbances_and_the_label_stays():
    env = make_env(EnvConfig(hz=20))
    turned, disturbed = [], []
    for fumble in (0.0, 1.0):
        expert = PickUpExpert([env], noise=1.0, fumble=fumble)
        episodes = list(run_episodes([env], expert, stream("validate", 2, 12), keep=lambda seed: True))
        rows = [row for episode in episodes for row in episode.rows]
        off = [abs(row.command.expert[:3] - row.command.action[:3] - row.observation.state[8:11]).max() for row in rows]
        disturbed.append([gap > 1e-5 for gap in off])
        turned.append([row.command.expert[4] != row.command.action[4] for row in rows])
        assert {row.command.expert[4] for row in rows} == {0.0, 1.0}
        assert sum(episode.success for episode in episodes) >= 10
    assert not any(turned[0]) and turned[1] == disturbed[1] and any(turned[1])


def test_the_expert_is_markov_and_never_runs_ahead_of_the_tool_by_more_than_its_stride():
    rng = np.random.default_rng(0)
    for _ in range(200):
        tool = np.array([rng.uniform(0.3, 0.7), rng.uniform(-0.3, 0.3), rng.uniform(0.02, 0.3), rng.uniform(-1, 1)])
        cube = np.array([rng.uniform(0.38, 0.62), rng.uniform(-0.2, 0.2), 0.02, rng.uniform(-0.7, 0.7)])
        command = pick_up(tool, cube, 0.08)
        assert np.linalg.norm(command[:3]) <= 0.05 + 1e-9
        np.testing.assert_array_equal(command, pick_up(tool, cube, 0.08))
