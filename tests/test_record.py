"""Recording: rows line up, only successes are kept, and neither workers nor kills change a byte."""

import importlib
import multiprocessing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from robotattn.control.chunks import absolute
from robotattn.data import record as recorder
from robotattn.data import store
from robotattn.data.record import RecordConfig, attempt_seed, opened, record
from robotattn.data.windows import Windows
from robotattn.data.workers import WorkerError
from robotattn.envs import CameraConfig, EnvConfig, make_env
from robotattn.tokens.text import default_tokenizer
from robotattn.types import COLOURS, Plan, tool_pose


class Counter(gym.Env):
    """Counts its steps; joint targets; an episode ends after 5 steps, with success if its seed is among the good."""

    def __init__(self, good):
        self.good, self.seeds = good, []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.seed, self.count = seed, 0
        return self._see(), self._info()

    substeps = 50  # a control period of 100 ms

    def tool_pose(self):
        return np.zeros(4)

    def send(self, action):
        """Any action counts."""

    def advance(self, steps):
        """It counts ticks, not steps."""

    def end_tick(self):
        self.count += 1
        return self.count == 5 and self.good(self.seed), self.count == 5, self._info()

    def observe(self):
        return self._see()

    def labels(self):
        return {
            "position": np.zeros((6, 4), np.float32),
            "present": np.ones(6, bool),
            "colour": np.arange(6),
            "target": 2,
        }

    def _see(self):
        return {
            "state": np.full(13, self.count, np.float32),
            "instruction": "count",
            "time": np.array([self.count / 10]),
        }

    def _info(self):
        success = self.count == 5 and self.good(self.seed)
        return {"success": success, "reason": "time_limit", "episode": {}}


class TenTimes:
    """Answers an observation with ten times what it sees."""

    def reset(self, row):
        pass

    def plan(self, rows, observations):
        return [Plan(np.full((1, 8), 10.0 * seen.state[0]), seen.time, 0.1) for seen in observations]


def counting(tmp_path, good=lambda seed: True):
    config = RecordConfig(out=tmp_path, env=EnvConfig(action_mode="joint"))
    return config, lambda _: (Counter(good), TenTimes())


# ------------------------------------------------------------------------------------------- one episode


def test_a_row_holds_what_was_seen_before_its_action(tmp_path):
    with opened(*counting(tmp_path)) as work:
        line = work(3)
    episode = store.read_episode(tmp_path / line["file"], line["sha256"])
    seen = episode.columns["observations/state"]
    np.testing.assert_array_equal(seen[:, 0], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(episode.columns["action"], 10.0 * seen[:, :8])
    np.testing.assert_array_equal(episode.columns["final/state"], np.full(13, 5.0))
    np.testing.assert_allclose(episode.columns["time/observation"], [0.0, 0.1, 0.2, 0.3, 0.4])
    assert line["length"] == 5 and line["index"] == 3 and episode.attributes["target"] == 2


def test_training_pairs_what_was_seen_with_the_actions_that_followed_it(tmp_path):
    """O11: seen k, sent 10 k, through recorder and loader: the window at k holds 10 k, 10 (k + 1), ..."""
    config, world = counting(tmp_path)
    store.open_dataset(tmp_path, recorder.describe(replace(config, episodes=2)))
    with opened(config, world) as work:
        store.write_manifest(tmp_path, {index: work(index) for index in range(2)})
    windows = Windows(tmp_path, 3, (), "joint", tokenizer=default_tokenizer())
    batch = windows.batch(np.arange(10), np.random.default_rng(0))
    seen = batch["state"][:, 0].numpy()
    np.testing.assert_array_equal(seen, [0, 1, 2, 3, 4] * 2)
    mask = batch["actions_mask"].numpy()
    np.testing.assert_array_equal(mask, seen[:, None] + np.arange(3) < 5)
    expected = 10 * (seen[:, None] + np.arange(3))
    np.testing.assert_array_equal(batch["actions"][:, :, 0].numpy()[mask], expected[mask])


def test_the_summary_tells_attempts_and_the_experts_rate(tmp_path):
    """O13: five attempts for two kept episodes are 40 %."""
    good = {attempt_seed(0, 0, 0), attempt_seed(0, 1, 3)}
    config, world = counting(tmp_path, good.__contains__)
    with opened(config, world) as work:
        lines = {index: work(index) for index in range(2)}
    summary = recorder._summary(config, lines, 2, [], 1.0)
    assert (summary["episodes"], summary["attempts"], summary["expert_rate"]) == (2, 5, 0.4)


def test_failed_attempts_are_counted_and_never_kept(tmp_path):
    third = attempt_seed(0, 4, 2)
    with opened(*counting(tmp_path, lambda seed: seed == third)) as work:
        line = work(4)
    assert (line["attempt"], line["seed"], line["outcome"]) == (3, third, "success")
    assert [path.name for path in tmp_path.iterdir()] == ["episode_000004.hdf5"]


def test_an_expert_that_keeps_failing_ends_the_recording(tmp_path):
    with (
        opened(*counting(tmp_path, lambda seed: False)) as work,
        pytest.raises(
            WorkerError, match=r"the expert failed 20 times in a row .*time_limit.* none of the attempts was kept"
        ),
    ):
        work(0)
    assert not list(tmp_path.iterdir())


def test_no_two_attempts_share_a_seed():
    seeds = [attempt_seed(base, index, attempt) for base in (0, 1) for index in range(20) for attempt in range(20)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"episodes": 0},
        {"workers": 0},
        {"noise": -1.0},
        {"noise": np.nan},
        {"fumble": 1.5},
        {"fumble": np.nan},
        {"seed": -1},
        {"deadline": 0.0},
    ],
)
def test_a_configuration_out_of_range_is_refused_naming_the_field(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: "):
        RecordConfig(out=Path("x"), **wrong)


# -------------------------------------------------------------------------------------- the real thing


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """One episode with camera and disturbances, recorded in this process."""
    env = EnvConfig(cameras=(CameraConfig("front", 32, 32),), object_tokens=True, min_objects=5)
    config = RecordConfig(out=tmp_path_factory.mktemp("seen"), env=env, noise=1.0)
    with opened(config, recorder.expert_world) as work:
        return config, store.read_episode(config.out / work(1)["file"])


def test_everything_for_training_is_recorded(seen):
    _, episode = seen
    length = episode.length
    shapes = {name: column.shape for name, column in episode.columns.items()}
    assert shapes == {
        "observations/state": (length, 13),
        "observations/objects": (length, 6, 10),
        "observations/images/front": (length, 32, 32, 3),
        "action": (length, 5),
        "expert_action": (length, 5),
        "expert_joint": (length, 8),
        "time/observation": (length,),
        "labels/position": (length, 6, 4),
        "labels/present": (6,),
        "labels/colour": (6,),
        "labels/pixel/front": (length, 6, 2),
        "labels/visible/front": (length, 6),
        "final/state": (13,),
    }


def test_the_stored_frames_are_those_that_were_seen_and_rgb(seen):
    config, episode = seen
    stored = episode.columns["observations/images/front"]
    env = make_env(config.env)
    raw, _ = env.reset(seed=episode.attributes["seed"])
    np.testing.assert_array_equal(stored[0], raw["images"]["front"])
    for row, action in enumerate(episode.columns["action"][:-1], 1):
        raw = env.step(action)[0]
        np.testing.assert_array_equal(stored[row], raw["images"]["front"])
    env.close()
    assert all((before != after).any() for before, after in pairwise(stored[:5]))  # the arm moves: no shared buffer
    for slot, name in enumerate(COLOURS[index] for index in episode.columns["labels/colour"]):
        if episode.columns["labels/visible/front"][0, slot] and name in ("red", "blue"):
            u, v = episode.columns["labels/pixel/front"][0, slot]
            red, _, blue = stored[0, int(v * 32), int(u * 32)].astype(int)
            assert red > blue + 20 if name == "red" else blue > red + 20


def test_the_label_of_a_disturbed_command_is_the_clean_one(tmp_path):
    for noise in (0.0, 1.0):
        gaps = []
        config = RecordConfig(out=tmp_path / str(noise), noise=noise)
        config.out.mkdir()
        with opened(config, recorder.expert_world) as work:
            for index in range(4):
                columns = store.read_episode(config.out / work(index)["file"]).columns
                pose = tool_pose(columns["observations/state"].astype(np.float64))
                gaps += list(np.abs(absolute(columns["action"], pose) - columns["expert_action"])[:, :3].max(axis=1))
        assert max(gaps) < 1e-6 if noise == 0 else max(gaps) > 0.005
        assert np.median(gaps) < 1e-6  # most commands are not disturbed


STALLING = """
import time
from robotattn.data.record import expert_world

def world(config):
    env, expert = expert_world(config)
    env.renderer.draw = lambda *arguments: time.sleep(1000)
    return env, expert
"""


def test_a_worker_that_hangs_in_its_first_image_ends_the_recording_with_its_name(tmp_path, monkeypatch):
    """O01: the deadline counts for start and episode alike, so that it makes no difference how fast this machine is."""
    (tmp_path / "stalling.py").write_text(STALLING)
    monkeypatch.syspath_prepend(tmp_path)
    world = importlib.import_module("stalling").world
    env = EnvConfig(cameras=(CameraConfig("front", 32, 32), CameraConfig("wrist", 32, 32)))
    config = RecordConfig(out=tmp_path / "demos", env=env, episodes=2, workers=2, deadline=5.0)
    with pytest.raises(WorkerError, match=r"worker \d \(pid \d+\) .*: silent for 5 s .*MUJOCO_GL is \w+"):
        record(config, world=world)
    assert not multiprocessing.active_children()
    assert not list(config.out.glob("*.hdf5"))


def test_the_recorder_draws_nothing_itself(tmp_path, monkeypatch):
    """O01: even the name of the renderer is asked of a worker, which has a deadline."""
    from robotattn.envs import cameras

    def drawn(*arguments):
        raise AssertionError("drawn in the parent")

    monkeypatch.setattr(cameras.Renderer, "draw", drawn)
    config = RecordConfig(out=tmp_path, env=EnvConfig(cameras=(CameraConfig("front", 32, 32),)))
    assert recorder.describe(config)["versions"]["renderer"] not in ("", "not used")


def test_eight_workers_with_two_cameras_each_render_together(tmp_path):
    """O01: spawned at once, each with a renderer of its own; the number is a setting."""
    env = EnvConfig(cameras=(CameraConfig("front", 32, 32), CameraConfig("wrist", 48, 24)))
    summary = record(RecordConfig(out=tmp_path / "demos", env=env, episodes=8, workers=8))
    assert summary["episodes"] == summary["recorded"] == 8
    for index in range(8):
        columns = store.read_episode(store.episode_path(tmp_path / "demos", index)).columns
        for camera in ("front", "wrist"):
            assert all(10 < image.mean() < 245 for image in columns[f"observations/images/{camera}"])
