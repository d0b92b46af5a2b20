"""Late chunks: targets begin at the arrival, drawn by the batch's generator; recorded, resumed, warned about."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from robotattn import checkpoint
from robotattn.cli import main
from robotattn.config import UsageError
from robotattn.control.clock import Fixed
from robotattn.data import delays, store
from robotattn.data.normalise import STEP_FLOOR, statistics
from robotattn.data.windows import Windows
from robotattn.latency import trace
from robotattn.policies import AutoregressiveConfig, BlockwiseConfig, build
from robotattn.tokens.text import default_tokenizer
from robotattn.train import train
from robotattn.trained_delay import mismatches

sys.path.insert(0, str(Path(__file__).parent))
from demonstrations import ENV, POLICY, metrics_of, state_of, timeless, training, write_demos

TOKENIZER = default_tokenizer()
MS, ROW = 1_000_000, 100_000_000  # (ns); 10 Hz
LENGTHS = (12, 9)


def ramp(length, start=0.0, mode="tool"):
    """Targets of which every number tells the row: 0.1 further a row, the gripper closed from the fifth one on."""
    rows = start + 0.1 * np.arange(length)[:, None]
    motion = rows + 0.01 * np.arange(4 if mode == "tool" else 7)
    return np.column_stack([motion, np.arange(length) < 5])


def dataset(folder, targets, mode="tool"):
    """Write episodes with these targets; the tool stands still at (0.5, 0, 0.2) with yaw 0."""
    folder.mkdir()
    env = ENV | {"action_mode": mode, "object_tokens": False}
    store.open_dataset(folder, {"schema": 1, "env": env, "seed": 0, "noise": 0.0, "episodes": len(targets)})
    lines = {}
    for index, expert in enumerate(targets):
        state = np.zeros((len(expert), 13), np.float32)
        state[:, 8:11], state[:, 12] = (0.5, 0.0, 0.25), 1.0
        columns = {"observations/state": state, "action": expert, "expert_action": expert}
        columns |= {"labels/position": np.zeros((len(expert), 6, 4), np.float32)}
        columns |= {"labels/present": np.arange(6) < 3, "labels/colour": np.arange(6)}
        about = {"attempt": 1, "seed": index, "instruction": "", "success": True, "reason": "success", "hz": 10}
        about |= {"action_mode": mode, "env": json.dumps(env), "target": 0}
        lines[index] = store.write_episode(folder, index, columns, about)
    store.write_manifest(folder, lines)
    return folder


def windows(folder, latency=None, chunk=3, mode="tool", **options):
    latency = Fixed(latency).latency if isinstance(latency, int) else latency
    return Windows(folder, chunk, (), mode, tokenizer=TOKENIZER, latency=latency, **options)


def every(loaded, seed=0):
    return loaded.batch(np.arange(len(loaded)), np.random.default_rng(seed))


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("ramps") / "demos", [ramp(LENGTHS[0]), ramp(LENGTHS[1], start=-2.0)])


@pytest.fixture(scope="module")
def recorded():
    return trace.Trace("a device", {}, {}, "eager", tuple(MS * time for time in (20, 150, 80, 230, 35)))


# --- targets


def test_the_first_target_is_that_of_the_arrival_relative_to_the_tool_of_the_observation(demos):
    batch = every(windows(demos, 200 * MS))
    for start, row in ((0.0, 0), (0.0, 4), (-2.0, 12)):
        first = start + 0.1 * ((row if row < 12 else row - 12) + 2)
        expected = [[first + 0.1 * k - 0.5, first + 0.1 * k + 0.01, first + 0.1 * k + 0.02 - 0.25] for k in range(3)]
        np.testing.assert_allclose(batch["actions"][row, :, :3], expected, atol=1e-6)
    assert batch["actions"][:, 0, 4].tolist() == [1.0] * 3 + [0.0] * 9 + [1.0] * 3 + [0.0] * 6


def test_between_two_rows_the_targets_are_interpolated(demos):
    batch = every(windows(demos, 137 * MS))
    np.testing.assert_allclose(batch["actions"][2, :, 0], 0.1 * (2 + 1.37 + np.arange(3)) - 0.5, atol=1e-6)
    np.testing.assert_allclose(batch["actions"][2, :, 3], 0.1 * (2 + 1.37 + np.arange(3)) + 0.03, atol=1e-6)


def test_the_yaw_is_interpolated_by_the_shorter_way_round(tmp_path):
    targets = ramp(4)
    targets[:, 3] = [3.0, -3.0, -2.8, -2.6]  # over the seam: by 2 pi - 6 = 0.283
    batch = every(windows(dataset(tmp_path / "demos", [targets]), 25 * MS, chunk=1))
    seam = 3.0 + 0.25 * (2 * np.pi - 6.0)
    np.testing.assert_allclose(batch["actions"][:3, 0, 3], [seam, -2.95, -2.75], atol=1e-6)


def test_joint_targets_are_interpolated_as_they_are(tmp_path):
    folder = dataset(tmp_path / "demos", [ramp(8, start=3.0, mode="joint")], mode="joint")
    batch = every(windows(folder, 50 * MS, mode="joint"))
    expected = 3.0 + 0.1 * (1.5 + np.arange(3))[:, None] + 0.01 * np.arange(7)
    np.testing.assert_allclose(batch["actions"][1, :, :7], expected, rtol=1e-6)


def test_the_gripper_is_open_or_closed_with_the_right_mean_and_as_it_was_recorded(demos):
    loaded = windows(demos, 130 * MS)
    batch = loaded.batch(np.full(4000, 2), np.random.default_rng(0))  # rows 3.3, 4.3, 5.3: the last open one is 4
    gripper = batch["actions"][:, :, 4].numpy()
    assert {tuple(row) for row in gripper} == {(1.0, 1.0, 0.0), (1.0, 0.0, 0.0)}
    share = (gripper[:, 1] == 0).mean()
    assert abs(share - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 4000)


def test_after_the_episode_the_last_target_is_repeated_and_masked(demos):
    batch = every(windows(demos, 250 * MS))
    mask = batch["actions_mask"]
    assert mask[7].tolist() == [True, True, False]  # rows 9.5, 10.5 and 11.5; the last one is 11
    assert mask[8].tolist() == [True, False, False] and not mask[9:12].any()
    assert mask[12:15].all() and mask[16].tolist() == [True, True, False]  # the second episode ends at its row 8
    np.testing.assert_allclose(batch["actions"][9:12, :, 0], 1.1 - 0.5, atol=1e-6)
    np.testing.assert_allclose(batch["actions"][7, :, 0], np.array([0.95, 1.05, 1.1]) - 0.5, atol=1e-6)
    whole = every(windows(demos, 200 * MS))["actions_mask"]
    assert whole[9].tolist() == [True, False, False]  # just on the last row


def test_what_is_seen_does_not_depend_on_the_latency(tmp_path):
    folder = write_demos(tmp_path / "demos", cameras=("top",))
    plain, late = (
        Windows(folder, 4, ("top",), "tool", tokenizer=TOKENIZER, frames=2, objects=True, latency=latency)
        for latency in (None, Fixed(230 * MS).latency)
    )
    one, other = every(plain), every(late)
    assert one.keys() == other.keys()
    for name in one.keys() - {"actions", "actions_mask", "images", "labels"}:
        assert torch.equal(one[name], other[name]), name
    assert torch.equal(one["images"]["top"], other["images"]["top"])
    assert torch.equal(one["labels"]["names"], other["labels"]["names"])
    assert not torch.equal(one["actions"], other["actions"])


@pytest.mark.parametrize("permute", [False, True])
def test_without_latency_batch_and_generator_are_what_they_were(tmp_path, permute):
    """Nothing is drawn without the option; with 0 ms all bits are the same, for latencies are drawn last."""
    folder = write_demos(tmp_path / "demos")
    options = {"objects": True, "permute_colours": permute, "chunk": 4}
    plain, zero = windows(folder, **options), windows(folder, 0, **options)
    generator, same = np.random.default_rng(3), np.random.default_rng(3)
    batch, late = plain.batch(np.arange(30), generator), every(zero, seed=3)
    if permute:
        same.permuted(np.tile(np.arange(6), (30, 1)), axis=1)
    same.integers(plain.templates, size=(30, 6))
    assert generator.bit_generator.state == same.bit_generator.state
    for name in batch.keys() - {"images", "labels"}:
        assert torch.equal(batch[name], late[name]), name
    assert statistics(plain, warn=lambda text: None) == statistics(zero, warn=lambda text: None)


# --- draws


def test_each_sample_draws_a_latency_of_the_trace(demos, recorded):
    loaded = windows(demos, recorded.sample, chunk=1)
    batch = loaded.batch(np.zeros(5000, int), np.random.default_rng(1))
    late = np.round((batch["actions"][:, 0, 0].numpy() + 0.5) * 1e3).astype(int)  # 0.1 is a row: 1e-3 is 1 ms
    times, counts = np.unique(late, return_counts=True)
    assert times.tolist() == [20, 35, 80, 150, 230]
    assert np.abs(counts / 5000 - 0.2).max() < 4 * np.sqrt(0.2 * 0.8 / 5000)


def test_a_batch_depends_on_indices_and_generator_alone(demos, recorded):
    loaded, indices = windows(demos, recorded.sample), np.array([3, 0, 14, 3, 8, 5])
    first = loaded.batch(indices, np.random.default_rng(5))
    loaded.batch(indices, np.random.default_rng(6))  # leaves nothing behind
    again = windows(demos, recorded.sample).batch(indices, np.random.default_rng(5))
    assert torch.equal(first["actions"], again["actions"])
    assert not torch.equal(first["actions"], loaded.batch(indices, np.random.default_rng(6))["actions"])


def test_a_latency_below_zero_is_refused():
    with pytest.raises(ValueError, match="latency: -1 ns was drawn, allowed is 0 or more"):
        delays.draw(lambda seed, index: -1, ROW, 2, np.random.default_rng(0))


def test_a_latency_that_leaves_no_target_is_refused_and_one_row_less_is_not(demos):
    assert windows(demos, 1100 * MS).empty == 20 / 21
    with pytest.raises(
        UsageError, match=r"latency: 1101 ms at least, .* the longest episode has its last one at 1100 ms"
    ):
        windows(demos, 1101 * MS)


# --- statistics


def test_statistics_are_those_of_the_delayed_targets(demos):
    plain, late = (statistics(windows(demos, latency), warn=lambda text: None) for latency in (None, 240 * MS))
    for step in range(3):
        instants = [
            (start, row + 2.4 + step, length - 1) for start, length in ((0.0, 12), (-2.0, 9)) for row in range(length)
        ]
        inside = np.array([start + 0.1 * row - 0.5 for start, row, last in instants if row <= last])
        moments = late.steps.moments[step]
        assert moments.mean[0] == pytest.approx(inside.mean(), abs=1e-6)
        assert moments.scale[0] == pytest.approx(inside.std(), abs=1e-6)
        assert late.steps.low[step][0] == pytest.approx(np.percentile(inside, 1), abs=1e-6)
    assert late.steps.moments[0].mean[0] - plain.steps.moments[0].mean[0] > 0.1
    assert plain.moments["state"] == late.moments["state"]
    assert plain.moments["position"] == late.moments["position"]
    assert late.moments["action"] != plain.moments["action"]


def test_statistics_of_drawn_latencies_are_the_same_every_time_and_have_the_spread_of_the_trace(tmp_path):
    still = [ramp(400) for _ in range(4)]
    for episode in still:
        episode[:, :3] -= episode[:1, :3]  # relative to a tool that goes along, a target is ahead by its latency
    folder, seen = dataset(tmp_path / "demos", still), {}
    for jitter in (0, 40 * MS):
        times = (100 * MS - jitter, 100 * MS + jitter)
        loaded = windows(folder, trace.Trace("d", {}, {}, "m", times).sample, chunk=1)
        loaded.frames["observations/state"][:, 8:11] = np.concatenate(still)[:, :3]  # the tool is on its target
        seen[jitter] = statistics(loaded, warn=lambda text: None)
        assert statistics(loaded, warn=lambda text: None) == seen[jitter]
        assert seen[jitter].steps.moments[0].mean[0] == pytest.approx(0.1, abs=2e-3)
    assert seen[0].steps.moments[0].scale[0] == STEP_FLOOR
    assert seen[40 * MS].steps.moments[0].scale[0] == pytest.approx(0.04, rel=0.01)


# --- training


@pytest.fixture
def config(tmp_path, recorded):
    trace.write(tmp_path / "trace.json", recorded)
    config = training(write_demos(tmp_path / "demos"), tmp_path / "run")
    return replace(config, latency_trace=tmp_path / "trace.json")


class Interrupt(Exception):
    pass


def interrupt(line):
    if line["step"] == 9:
        raise Interrupt


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one_even_if_the_trace_was_moved(config, tmp_path):
    whole = train(replace(config, out=tmp_path / "whole"))
    with pytest.raises(Interrupt):
        train(config, callbacks=[interrupt])
    assert state_of(config.out)["step"] == 8
    config.latency_trace.rename(tmp_path / "elsewhere.json")
    with pytest.raises(
        UsageError, match=r"latency_trace: .*trace\.json: No such file .*--latency-trace names its new place"
    ):
        train(config, resume=True)
    train(replace(config, latency_trace=tmp_path / "elsewhere.json"), resume=True)
    one, other = state_of(config.out), state_of(whole)
    assert all(torch.equal(one["policy"][name], other["policy"][name]) for name in one["policy"])
    assert timeless(metrics_of(config.out)) == timeless(metrics_of(whole))


def test_the_checkpoint_names_trace_and_device(config, recorded):
    about = checkpoint.load(train(config)).fingerprint["training"]["latency"]
    assert about == {
        "latency": "trace.json",
        "sha256": recorded.sha256,
        "device": "a device",
        "unit": "ns",
        "median": 80 * MS,
        "mode": "eager",
        "synthetic": False,
    }


def test_a_clock_serves_as_well_and_a_plain_run_says_nothing(config, tmp_path):
    plain = train(replace(config, latency_trace=None))
    late = train(replace(config, latency_trace=None, latency="fixed:80ms", out=tmp_path / "late"))
    assert "latency" not in checkpoint.load(plain).fingerprint["training"]
    about = checkpoint.load(late).fingerprint["training"]["latency"]
    assert about == {"latency": "fixed:80ms", "sha256": None, "device": None, "unit": "ns", "median": 80 * MS}
    assert metrics_of(plain)[0]["loss"] != metrics_of(late)[0]["loss"]


def test_going_on_with_other_latencies_is_refused(config, tmp_path, recorded):
    train(config)
    trace.write(tmp_path / "other.json", replace(recorded, service=(5,)))
    for change in (tmp_path / "other.json", None):
        with pytest.raises(
            UsageError, match=f"another latency_trace: the run was started with sha256 {recorded.sha256}"
        ):
            train(replace(config, latency_trace=change), resume=True)
    with pytest.raises(UsageError, match="another latency: was None, is fixed:80ms"):
        train(replace(config, latency_trace=None, latency="fixed:80ms"), resume=True)


def test_trace_and_clock_together_are_refused(config):
    with pytest.raises(ValueError, match="latency must be absent where latency_trace names a trace, got fixed:80ms"):
        replace(config, latency="fixed:80ms")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--latency-trace", "nowhere.json"], "latency_trace: nowhere.json: No such file"),
        (["--latency-trace", "cut.json"], "latency_trace: cut.json: not JSON"),
        (["--latency", "fixd:80ms"], "latency: 'fixd:80ms', allowed is fixed:80ms"),
        (["--latency", "fixed:80s"], "latency: 80000 ms at least, but no target"),
    ],
)
def test_what_cannot_be_used_ends_the_command_with_2_before_any_training(tmp_path, monkeypatch, capsys, flags, message):
    write_demos(tmp_path / "demos")
    monkeypatch.chdir(tmp_path)
    Path("cut.json").write_text('{"kind": "trace", ')
    Path("c.yaml").write_text(
        "data: demos\nout: run\ndevice: cpu\npolicy: {act: {objects: true, width: 16, heads: 2}}\n"
    )
    assert main(["train", "c.yaml", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", [type(POLICY), AutoregressiveConfig, BlockwiseConfig])
def test_a_batch_without_any_target_teaches_nothing_and_breaks_nothing(demos, tmp_path, kind):
    loaded = windows(write_demos(tmp_path / "demos"), 230 * MS, chunk=4, objects=True)
    policy = build(kind(objects=True, width=16, heads=2, feedforward=16, text_width=16, chunk=4))
    policy.set_statistics(statistics(loaded, warn=lambda text: None))
    batch = loaded.batch(np.array([8, 9]), np.random.default_rng(0))
    assert not batch["actions_mask"].any()
    losses = policy.loss(batch)
    losses["loss"].backward()
    assert all(torch.isfinite(value).all() for value in losses.values())
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


# --- evaluation


@pytest.mark.parametrize(
    ("handling", "delayed", "found"),
    [
        ("naive", True, []),
        ("naive", False, ["without latency"]),
        ("hold", True, ["while the robot moves on, but hold stands still"]),
        ("skip-executed", True, ["skip-executed skips the time until then once more"]),
        ("real-time", False, ["without latency", "real-time skips the time"]),
    ],
)
def test_an_evaluation_unlike_the_training_is_named(handling, delayed, found):
    about = {"latency": "trace.json", "sha256": "0", "device": "d", "unit": "ns", "median": 80 * MS}
    said = mismatches({"training": {"latency": about}}, handling, delayed)
    assert len(said) == len(found) and all(part in text for part, text in zip(found, said, strict=True))
    assert all("80 ms late (trace.json, median)" in text for text in said)
    assert mismatches({"training": {"steps": 3}}, handling, delayed) == []
