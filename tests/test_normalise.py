"""Statistics of a dataset: closed forms, a floor that is named, and nothing counted that was not there."""

import json

import numpy as np
import pytest
import torch

from robotattn.data import store
from robotattn.data.normalise import FLOOR, STEP_FLOOR, statistics
from robotattn.data.windows import Windows
from robotattn.tokens.normaliser import Normaliser, Statistics
from robotattn.tokens.text import default_tokenizer

TOKENIZER = default_tokenizer()


def dataset(folder, state, expert, position, present, chunk=3, mode="joint"):
    """Write one episode of these columns and load it."""
    env = {"cameras": [], "object_tokens": False, "action_mode": mode, "language": "en"}
    store.open_dataset(folder, {"schema": 1, "env": env, "seed": 0, "noise": 1.0, "episodes": 1})
    columns = {"observations/state": state, "action": expert, "expert_action": expert, "labels/position": position}
    columns |= {"labels/present": present, "labels/colour": np.arange(6)}
    about = {"attempt": 1, "seed": 0, "instruction": "", "success": True, "reason": "success", "hz": 10}
    about |= {"action_mode": mode, "env": json.dumps(env), "target": 0}
    store.write_manifest(folder, {0: store.write_episode(folder, 0, columns, about)})
    return Windows(folder, chunk, (), mode, tokenizer=TOKENIZER)


def content(length=50):
    rng = np.random.default_rng(3)
    state = rng.normal(size=(length, 13)).astype(np.float32)
    return state, rng.normal(size=(length, 8)), rng.normal(size=(length, 6, 4)).astype(np.float32), np.arange(6) < 4


def test_moments_are_those_of_the_data(tmp_path):
    state, expert, position, present = content()
    moments = statistics(dataset(tmp_path, state, expert, position, present)).moments
    np.testing.assert_allclose(moments["state"].mean, state.astype(float).mean(axis=0), atol=1e-7)
    np.testing.assert_allclose(moments["state"].scale, state.astype(float).std(axis=0), rtol=1e-6)
    shown = position[:, :4].reshape(-1, 4).astype(float)
    np.testing.assert_allclose(moments["position"].mean, shown.mean(axis=0), atol=1e-7)
    np.testing.assert_allclose(moments["position"].scale, shown.std(axis=0), rtol=1e-6)


def test_actions_count_as_they_are_trained_on_without_padding(tmp_path):
    state, expert, position, present = content(length=5)
    moments = statistics(dataset(tmp_path, state, expert, position, present, chunk=3)).moments["action"]
    trained = np.array([expert[t + k] for t in range(5) for k in range(3) if t + k < 5])
    np.testing.assert_allclose(moments.mean, trained.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(moments.scale, trained.std(axis=0), rtol=1e-5)


def test_tool_actions_are_relative_to_the_tool(tmp_path):
    state, _, position, present = content()
    state[:, 11:] = 0.0, 1.0
    expert = np.column_stack([state[:, 8:11] + [0.1, 0.2, 0.3], np.full(50, 0.4), np.arange(50) % 2])
    told: list[str] = []
    windows = dataset(tmp_path, state, expert, position, present, chunk=1, mode="tool")
    moments = statistics(windows, warn=told.append).moments
    assert len(told) == 1 and "action: dx, dy, dz, dyaw" in told[0]
    np.testing.assert_allclose(moments["action"].mean, [0.1, 0.2, 0.3, 0.4, 0.5], atol=1e-6)
    np.testing.assert_allclose(moments["action"].scale, [FLOOR] * 4 + [0.5], atol=1e-6)
    assert moments["action"].names == ("dx", "dy", "dz", "dyaw", "gripper")


def test_constant_dimensions_get_the_floor_and_are_named(tmp_path):
    """O17."""
    state, expert, position, present = content()
    expert[:, 7] = 1.0  # a gripper that is always open
    state[:, 2] = 0.5 + 1e-3 * np.linspace(0, 1, 50)  # a joint that hardly moves
    windows = dataset(tmp_path, state, expert, position, present)
    with pytest.warns(UserWarning, match=r"scale is the floor 0\.01: state: joint 2; action: gripper"):
        found = statistics(windows)
    assert found.moments["action"].scale[7] == FLOOR == found.moments["state"].scale[2]
    assert (found.moments["state"].floor, found.moments["action"].under_floor()) == (FLOOR, ("gripper",))
    normaliser = Normaliser({"state": 13, "action": 8, "position": 4})
    normaliser.set_statistics(Statistics.from_json(found.to_json()))
    value = torch.tensor(expert, dtype=torch.float32)
    there = normaliser.normalise("action", value)
    assert there.isfinite().all() and there[:, 7].abs().max() == 0
    assert (normaliser.denormalise("action", there) - value).abs().max() < 1e-5
    seen = torch.tensor(state)
    assert (normaliser.denormalise("state", normaliser.normalise("state", seen)) - seen).abs().max() < 1e-5
    seen[:, 2] += 0.3  # a tenth of a turn away from where the joint hardly moved: 30 scales, not thousands
    assert normaliser.normalise("state", seen)[:, 2].abs().max() < 31


def test_an_outlier_does_not_spoil_the_round_trip(tmp_path):
    state, expert, position, present = content()
    state[10, 4] = 1e3
    normaliser = Normaliser({"state": 13, "action": 8, "position": 4})
    normaliser.set_statistics(statistics(dataset(tmp_path, state, expert, position, present)))
    value = torch.tensor(state)
    back = normaliser.denormalise("state", normaliser.normalise("state", value))
    assert ((back - value).abs() <= 1e-5 * value.abs().clamp(min=1)).all()


def test_nothing_is_said_where_everything_moves(tmp_path):
    said = []
    statistics(dataset(tmp_path, *content()), warn=said.append)
    assert said == []


def test_values_that_are_not_finite_are_refused_by_name(tmp_path):
    state, expert, position, present = content()
    state[4, 7] = np.nan
    with pytest.raises(ValueError, match="state: finger width: the dataset holds values that are not finite"):
        statistics(dataset(tmp_path, state, expert, position, present))


def test_each_step_of_a_chunk_has_its_own_moments_and_range(tmp_path):
    state, _, position, present = content()
    state[:, 11:] = 0.0, 1.0  # no turn
    state[:, 8:11] = np.linspace(0, 1, 50)[:, None]  # a straight way at constant speed
    expert = np.column_stack([state[:, 8:11] + 0.5, np.full(50, 0.4), np.arange(50) % 2])
    windows = dataset(tmp_path, state, expert, position, present, chunk=3, mode="tool")
    steps = statistics(windows, warn=lambda text: None).steps
    for step in range(3):
        np.testing.assert_allclose(steps.moments[step].mean[:4], [*[0.5 + step / 49] * 3, 0.4], atol=1e-6)
        assert steps.moments[step].scale[0] == steps.moments[step].floor == STEP_FLOOR  # below a centimetre's floor
        np.testing.assert_allclose(steps.low[step], [*[0.5 + step / 49] * 3, 0.4, 0.0], atol=1e-6)
        assert all(
            high - low >= STEP_FLOOR * 0.999 for low, high in zip(steps.low[step], steps.high[step], strict=True)
        )
        assert (steps.low[step][4], steps.high[step][4]) == (0.0, 1.0)


def test_ranges_of_steps_are_percentiles_of_offsets_from_the_joints(tmp_path):
    state, expert, position, present = content(length=400)
    steps = statistics(dataset(tmp_path, state, expert, position, present, chunk=2)).steps
    for step in range(2):
        offsets = expert[step:, :7] - state[: len(state) - step, :7]
        low, high = np.percentile(offsets, [1, 99], axis=0)
        np.testing.assert_allclose(steps.low[step][:7], low, atol=1e-5)
        np.testing.assert_allclose(steps.high[step][:7], high, atol=1e-5)
        np.testing.assert_allclose(steps.moments[step].scale[:7], offsets.std(axis=0), rtol=1e-4)
        np.testing.assert_allclose(steps.moments[step].mean[7], expert[step:, 7].mean(), atol=1e-6)


def test_statistics_with_and_without_steps_survive_json_and_older_files_load(tmp_path):
    found = statistics(dataset(tmp_path, *content()))
    assert Statistics.from_json(found.to_json()) == found and found.steps is not None
    older = Statistics(found.moments)
    assert json.loads(older.to_json()).keys() == {"version", "hash", "moments"} and older.hash != found.hash
    assert json.loads(older.to_json())["version"] == 1 and Statistics.from_json(older.to_json()) == older
    body = json.loads(found.to_json())
    body["steps"]["low"][0][0] -= 0.5
    with pytest.raises(ValueError, match="do not match their hash"):
        Statistics.from_json(json.dumps(body))
    body["steps"]["low"][0][0] = 1e9
    with pytest.raises(ValueError, match="step 0: joint 0: the range must be finite and not empty"):
        Statistics.from_json(json.dumps(body))
