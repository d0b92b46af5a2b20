"""Tasks where lateness matters: their experts, and what is recorded, verified and evaluated of them."""

import numpy as np
import pytest

from robotattn.agents import ConstantAgent
from robotattn.data import store
from robotattn.data.record import RecordConfig, expert_world, opened, record
from robotattn.data.verify import verify
from robotattn.envs import EnvConfig, make_env
from robotattn.envs.experts import EXPERTS, PickUpExpert, lead
from robotattn.envs.pick_moving import Motion
from robotattn.envs.sensors import object_poses
from robotattn.evaluate import EvaluateConfig, evaluate
from robotattn.loop import run_episodes
from robotattn.seeds import stream

MOVING = ("pick_moving", "pick_reversing", "pick_disturbed")


# --------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("task", MOVING)
@pytest.mark.parametrize("hz", [10, 20, 50])
def test_the_expert_succeeds_at_every_control_rate(task, hz):
    env = make_env(EnvConfig(task=task, hz=hz))
    episodes = list(run_episodes([env], EXPERTS[task]([env]), stream("validate", hz, 5)))
    assert [episode.reason for episode in episodes] == ["success"] * 5
    for episode in episodes:
        assert episode.info["time"] == episode.steps / hz and 1 <= episode.info["tries"] <= 5
        assert all(isinstance(value, str | int | float | bool) for value in episode.info.values())


@pytest.mark.parametrize("task", MOVING)
def test_the_expert_recovers_from_disturbances_and_moves_joints_as_well(task):
    env = make_env(EnvConfig(task=task, action_mode="joint"))
    episodes = list(run_episodes([env], EXPERTS[task]([env], noise=1.0), stream("validate", 3, 5)))
    assert sum(episode.success for episode in episodes) >= 4


def test_a_command_with_lead_keeps_a_first_order_arm_on_a_moving_target():
    """By simulation of x' = (c - x) / tau with the command held for a period."""
    for hz in (10, 20, 50):
        speed, x, steps = 0.15, 0.0, 1000
        for tick in range(20):
            command = x + speed * lead(hz)
            for _ in range(steps):
                x += (command - x) / 0.06 / hz / steps
            assert x == pytest.approx(speed * (tick + 1) / hz, rel=2e-3)


def test_an_expert_that_does_not_know_the_speed_succeeds_only_on_slow_belts():
    """The world tells the two apart: without the velocity, a fast belt cannot be picked from."""
    env = make_env(EnvConfig(task="pick_moving", hz=20, time_limit=4.0))
    rates = {}
    for speed in (0.03, 0.15):
        env.draw_motion = lambda rng, speed=speed: Motion(speed)
        for expert in (PickUpExpert, EXPERTS["pick_moving"]):
            episodes = list(run_episodes([env], expert([env]), stream("validate", 9, 4)))
            rates[speed, expert.__name__] = sum(episode.success for episode in episodes)
    assert rates == {
        (0.03, "PickUpExpert"): 4, (0.03, "PickMovingExpert"): 4,
        (0.15, "PickUpExpert"): 0, (0.15, "PickMovingExpert"): 4,
    }  # fmt: skip


@pytest.mark.parametrize("task", MOVING)
def test_a_zero_policy_never_succeeds(task):
    env = make_env(EnvConfig(task=task, time_limit=1.0))
    episodes = list(run_episodes([env], ConstantAgent(np.zeros(5), 0.1), stream("validate", 0, 3)))
    assert [(one.reason, one.info["tries"], one.info["time"]) for one in episodes] == [("time_limit", 0, 1.0)] * 3


def test_tries_are_closings_of_open_fingers_about_the_named_cube():
    env = make_env(EnvConfig(yaw=0.0, time_limit=20.0))
    env.reset(seed=0, options={"objects": 2})

    def go(offset, gripper, ticks=25):
        for _ in range(ticks):
            gap = object_poses(env)[env.target] + [*offset, 0] - env.tool_pose()
            *_, info = env.step(np.append(np.clip(gap, -0.05, 0.05), gripper))
        return info["episode"]["tries"]

    assert go((0, 0, 0.1), 1.0) == 0
    assert go((0, 0, 0.1), 0.0, 5) == 0  # closed far above it
    assert go((0, 0, 0.1), 1.0, 5) == 0
    assert go((0, 0, 0.0), 1.0) == 0
    assert go((0, 0, 0.0), 0.0, 5) == 1  # the first try
    assert go((0, 0, 0.0), 0.0, 5) == 1  # still the same
    assert go((0, 0, 0.0), 1.0, 5) == 1
    assert go((0, 0, 0.0), 0.0, 5) == 2  # let go, and again


# --------------------------------------------------------------------------------- recording, verifying, evaluating


def test_a_recording_of_what_moves_replays_bit_for_bit_and_holds_the_velocities(tmp_path):
    world = EnvConfig(task="pick_reversing", hz=20)
    record(RecordConfig(out=tmp_path, env=world, episodes=2, workers=1))
    report = verify(tmp_path)
    assert report["bad"] == [] and report["replayed"] == 2 and report["largest_difference"] == 0.0
    episode = store.read_episode(store.episode_path(tmp_path, 0))
    velocity, position = (episode.columns[f"labels/{name}"] for name in ("velocity", "position"))
    assert velocity.shape == (episode.length, 6, 3) and velocity.dtype == np.float32
    other = 1 - episode.attributes["target"] if episode.attributes["target"] < 2 else 0  # rides on all the time
    moved = np.diff(position[:, other, 1])
    np.testing.assert_allclose((velocity[:-1, other, 1] + velocity[1:, other, 1]) / 2 / 20, moved, atol=2e-3)


def test_a_recording_of_pick_up_holds_what_it_always_held(tmp_path):
    config = RecordConfig(out=tmp_path, env=EnvConfig(), episodes=1, workers=1)
    with opened(config, expert_world) as work:
        work(0)
    episode = store.read_episode(store.episode_path(tmp_path, 0))
    assert sorted(name for name in episode.columns if name.startswith("labels/")) == [
        "labels/colour", "labels/position", "labels/present",
    ]  # fmt: skip
    assert '"failure"' in episode.attributes["episode"] and "tries" not in episode.attributes["episode"]


def test_the_model_of_pick_up_has_no_belt():
    plain, belt = make_env(EnvConfig()).model, make_env(EnvConfig(task="pick_moving")).model
    assert (plain.nq, plain.nv, plain.nu) == (9 + 42, 9 + 36, 8)
    assert (belt.nq, belt.nv, belt.nu) == (9 + 43, 9 + 37, 9)
    np.testing.assert_array_equal(belt.jnt_qposadr[: plain.njnt], plain.jnt_qposadr)


def test_evaluation_of_the_expert_reports_the_deadline_and_the_first_try(tmp_path, monkeypatch):
    def here(opening, tasks, *limits):
        with opening() as work:
            yield from map(work, tasks)

    monkeypatch.setattr("robotattn.evaluate.run_tasks", here)
    config = EvaluateConfig(agent="expert", task="pick_moving", hz=20, episodes=4, batch=4, workers=1, out=tmp_path)
    result = evaluate(config)
    assert result["env"]["task"] == "pick_moving" and result["success"]["successes"] == 4
    rows = result["rows"]
    assert all(0 <= row["speed"] <= 0.15 and row["time"] == row["steps"] / 20 for row in rows)
    assert result["success_within_3_s"]["successes"] == sum(row["time"] <= 3 for row in rows)
    assert result["success_at_first_try"]["successes"] == sum(row["tries"] == 1 for row in rows)
