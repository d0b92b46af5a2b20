"""History: training windows and the live agent agree, frame by frame, on what was seen when (no train/serve skew)."""

import dataclasses
import sys
from collections import deque
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from robotattn.agents import PolicyAgent, exact_micro_batch
from robotattn.control.chunks import ChunkOptions
from robotattn.latency.inputs import Batcher, random_observation
from robotattn.loop import run_episodes
from robotattn.policies import ACTConfig
from robotattn.types import Observation

sys.path.insert(0, str(Path(__file__).parent))
from decoders import make
from examples import EVERY, small
from test_windows import LENGTHS, TOKENIZER, windows, write_dataset

FRAMES = 3
SENSORS = ("state", "objects", "objects_mask", "history", "ages")
HISTORIES = {name: config for name, config in EVERY.items() if name.endswith(" history")}
each = pytest.mark.parametrize("config", HISTORIES.values(), ids=HISTORIES)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "demos"
    return folder, write_dataset(folder)


# ------------------------------------------------------------------------------------------ windows


@pytest.mark.parametrize("gap", [1, 2])
def test_a_window_holds_the_recorded_frames_up_to_t_and_repeats_the_first_at_the_start(dataset, gap):
    folder, written = dataset
    loaded = windows(folder, objects=True, frames=FRAMES, frame_gap=gap)
    got = loaded.batch(np.arange(len(loaded)), np.random.default_rng(0))
    labels, row = got["labels"], 0
    for content, _ in written:
        for t in range(len(content["observations/state"])):
            seen = [max(t - back * gap, 0) for back in (2, 1, 0)]
            np.testing.assert_array_equal(got["state"][row], content["observations/state"][t])
            np.testing.assert_array_equal(got["history"][row], content["observations/state"][seen[:-1]])
            np.testing.assert_array_equal(got["objects"][row], content["observations/objects"][seen])
            np.testing.assert_array_equal(got["ages"][row], np.float32([(t - s) / 10 for s in seen]))
            np.testing.assert_array_equal(labels["position"][row], content["labels/position"][seen])
            for camera in ("front", "wrist"):
                images = content[f"observations/images/{camera}"]
                np.testing.assert_array_equal(got["images"][camera][row], images[seen])
                np.testing.assert_array_equal(labels["pixel"][camera][row], content[f"labels/pixel/{camera}"][seen])
                np.testing.assert_array_equal(labels["visible"][camera][row], content[f"labels/visible/{camera}"][seen])
            row += 1
    assert row == len(loaded) == sum(LENGTHS)
    assert torch.equal(got["objects_mask"], labels["present"][:, None].expand(-1, FRAMES, -1))


def test_one_frame_is_the_batch_of_always_and_more_frames_end_in_it(dataset):
    one, three = (windows(dataset[0], objects=True, frames=count) for count in (1, FRAMES))
    indices = np.arange(len(one))
    now, then = (loaded.batch(indices, np.random.default_rng(0)) for loaded in (one, three))
    assert set(then) - set(now) == {"history", "ages"}
    for name in ("state", "text", "actions", "actions_mask"):
        assert torch.equal(now[name], then[name])
    assert torch.equal(now["objects"], then["objects"][:, -1]) and torch.equal(
        now["images"]["front"], then["images"]["front"][:, -1]
    )
    assert torch.equal(now["labels"]["position"], then["labels"]["position"][:, -1])


def test_colours_are_renamed_alike_in_all_frames(dataset):
    loaded = windows(dataset[0], cameras=(), objects=True, permute_colours=True, frames=2)
    hot = loaded.batch(np.arange(len(loaded)), np.random.default_rng(0))["objects"][..., 4:]
    assert torch.equal(hot[:, 0], hot[:, 1])


def test_no_frame_at_all_is_refused(dataset):
    with pytest.raises(ValueError, match="frames: 0"):
        windows(dataset[0], frames=0)
    with pytest.raises(ValueError, match="frame_gap: 0"):
        windows(dataset[0], frames=2, frame_gap=0)


# ------------------------------------------------------------------------------------------ the live agent


class Replay(gym.Env):
    """Shows a recorded episode, whatever is done."""

    def __init__(self, written):
        self.written = written

    def reset(self, *, seed=None, options=None):
        self.content, self.t = self.written[seed][0], 0
        return self._see(), self._info()

    substeps = 50  # a control period of 100 ms

    def tool_pose(self):
        return np.zeros(4)

    def send(self, action):
        """Nothing that is done changes what was recorded."""

    def advance(self, steps):
        """Time goes by ticks here."""

    def end_tick(self):
        self.t += 1
        return False, self.t == len(self.content["observations/state"]) - 1, self._info()

    def observe(self):
        return self._see()

    def labels(self):
        return {}

    def _see(self):
        cameras = ("front", "wrist")
        return {
            "images": {name: self.content[f"observations/images/{name}"][self.t] for name in cameras},
            "state": self.content["observations/state"][self.t],
            "objects": self.content["observations/objects"][self.t],
            "instruction": "pick up the red cube",
            "time": np.array([self.content["time/observation"][self.t]]),
        }

    def _info(self):
        return {"success": False, "reason": "time_limit", "episode": {}}


def live_batches(written, seeds, envs, execute=1, micro_batch=1, agent_class=PolicyAgent, gap=1):
    """Run the loop over replayed episodes; return every row that the policy was given, by its state's bytes."""
    given = {}

    def act(seen):
        for row in range(len(seen["state"])):
            sample = {name: seen[name][row] for name in SENSORS}
            given[seen["state"][row].numpy().tobytes()] = sample | {c: i[row] for c, i in seen["images"].items()}
        return torch.zeros(len(seen["state"]), 4, 5)

    batcher = Batcher(TOKENIZER.encode, ("front", "wrist"), frames=FRAMES, frame_gap=gap)
    agent = agent_class(act, batcher, 0.1, True, micro_batch)
    worlds = [Replay(written) for _ in range(envs)]
    assert len(list(run_episodes(worlds, agent, seeds, ChunkOptions(execute)))) == len(seeds)
    return given


def recorded_batches(folder, gap=1):
    """Every row of the training windows, by its state's bytes."""
    loaded = windows(folder, objects=True, frames=FRAMES, frame_gap=gap)
    seen = loaded.batch(np.arange(len(loaded)), np.random.default_rng(0))
    rows = range(len(loaded))
    return {
        seen["state"][row].numpy().tobytes(): {name: seen[name][row] for name in SENSORS}
        | {name: images[row] for name, images in seen["images"].items()}
        for row in rows
    }


def check_equal(live, recorded):
    for key, sample in live.items():
        for name, value in sample.items():
            assert value.dtype == recorded[key][name].dtype and torch.equal(value, recorded[key][name]), name


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("execute", [1, 3])
@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("gap", [1, 2])
def test_live_history_is_that_of_the_training_windows(dataset, gap, envs, execute, micro_batch):
    """Also where the agent plans from every third tick only: it is shown the others as well."""
    folder, written = dataset
    live = live_batches(written, [0, 1, 2], envs, execute, micro_batch, gap=gap)
    assert len(live) == sum(-(-(length - 1) // execute) for length in LENGTHS)
    check_equal(live, recorded_batches(folder, gap))


class Forgetful(PolicyAgent):
    """A planted bug: what the row saw in the last episode stays."""

    def reset(self, row):
        pass


class Blind(PolicyAgent):
    """A planted bug: only the ticks that are planned from are remembered."""

    def plan(self, rows, observations):
        for row, observation in zip(rows, observations, strict=True):
            self._seen.setdefault(row, deque(maxlen=FRAMES)).append(observation)
        actions = self._actions([tuple(self._seen[row]) for row in rows])
        return [self._plan(o, a) for o, a in zip(observations, actions, strict=True)]


def test_a_history_that_survives_a_reset_is_caught(dataset):
    folder, written = dataset
    with pytest.raises((AssertionError, ValueError)):
        check_equal(live_batches(written, [0, 1, 2], 1, agent_class=Forgetful), recorded_batches(folder))


def test_a_reset_forgets_its_own_row_alone():
    config = small(ACTConfig, objects=True)
    agent = PolicyAgent(None, Batcher(TOKENIZER.encode, (), frames=2), 0.1, True)
    seen = random_observation(config, np.random.default_rng(0), [""])
    for row in (0, 1):
        agent.watch(row, seen)
    agent.reset(0)
    assert set(agent._seen) == {1}


def test_an_agent_that_sees_planned_ticks_only_is_caught(dataset, monkeypatch):
    folder, written = dataset
    monkeypatch.setattr("robotattn.loop.Watcher", type(None))  # of which no agent is one
    with pytest.raises(AssertionError):
        check_equal(live_batches(written, [0], 1, execute=3, agent_class=Blind), recorded_batches(folder))


@each
def test_micro_batches_are_exact_and_act_like_single_rows(config):
    policy, rng = make(config), np.random.default_rng(0)
    batcher = Batcher(lambda texts: (np.array([[1, 2, 3]]), None), list(config.cameras), frames=config.frames)
    one = PolicyAgent(policy.act, batcher, 0.1, True)
    seen = [random_observation(config, rng, [""]) for _ in range(4)]
    assert exact_micro_batch(one, seen[0], 4) in (1, 4)
    several = PolicyAgent(policy.act, batcher, 0.1, True, 4)
    for agent in (one, several):
        for row in range(4):
            agent.watch(row, dataclasses.replace(seen[3 - row], time=-0.1))
    plans = zip(one.plan(range(4), seen), several.plan(range(4), seen), strict=True)
    assert all(np.allclose(a.actions, b.actions, rtol=1e-4, atol=1e-5) for a, b in plans)


# ------------------------------------------------------------------------------------------ batches of observations


def test_looks_farther_apart_are_taken_by_ticks_and_never_from_before_the_start():
    seen = [random_observation(small(ACTConfig, objects=True), np.random.default_rng(t), [""]) for t in range(5)]
    seen = [dataclasses.replace(observation, time=t / 8) for t, observation in enumerate(seen)]
    batcher = Batcher(lambda texts: (np.array([[1]]), None), (), frames=2, frame_gap=3)
    assert batcher.memory == 4
    assert batcher.batch([seen[:1], seen[:3], seen[:4], seen])["ages"].tolist() == [[t / 8, 0.0] for t in (0, 2, 3, 3)]


def test_a_row_of_fewer_observations_repeats_the_first_and_of_more_takes_the_last():
    config = small(ACTConfig, cameras={"front": (32, 32)}, objects=True)
    seen = [
        dataclasses.replace(random_observation(config, np.random.default_rng(t), [""]), time=t / 4) for t in range(4)
    ]
    batcher = Batcher(lambda texts: (np.array([[1]]), None), ["front"], frames=3)
    got = batcher.batch([seen[3], seen[2:], seen])
    assert got["ages"].tolist() == [[0.0, 0.0, 0.0], [0.25, 0.25, 0.0], [0.5, 0.25, 0.0]]
    for row, ticks in enumerate(([3, 3, 3], [2, 2, 3], [1, 2, 3])):
        np.testing.assert_array_equal(got["images"]["front"][row], [seen[t].images["front"] for t in ticks])
        np.testing.assert_array_equal(got["objects"][row], [seen[t].objects for t in ticks])
        np.testing.assert_array_equal(got["history"][row], [seen[t].state for t in ticks[:-1]])
        np.testing.assert_array_equal(got["state"][row], seen[3].state)
    with pytest.raises(ValueError, match="frames: must come oldest first"):
        batcher.batch([seen[::-1]])


def test_one_frame_has_no_axis_and_no_ages():
    seen = Observation({"front": np.zeros((32, 32, 3), np.uint8)}, np.zeros(13, np.float32), "", None, 0.0)
    one = Batcher(lambda texts: (np.array([[1]]), None), ["front"]).batch([seen, (seen, seen)])
    assert set(one) == {"images", "state", "text", "text_mask"} and one["images"]["front"].shape == (2, 32, 32, 3)
