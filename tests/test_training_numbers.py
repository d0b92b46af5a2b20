"""The numbers of training: what is learned, rates, orders, averages, and what is refused before the first step."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from robotattn import checkpoint
from robotattn.config import UsageError
from robotattn.ema import Average
from robotattn.train import TrainConfig, train
from robotattn.training_loop import learning_rate, sample_order

sys.path.insert(0, str(Path(__file__).parent))
from demonstrations import POLICY, metrics_of, state_of, training, write_demos


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return write_demos(tmp_path_factory.mktemp("data") / "demos")


@pytest.fixture
def config(demos, tmp_path):
    return training(demos, tmp_path / "run")


def test_two_episodes_are_learned_by_heart(tmp_path):
    config = TrainConfig(
        data=write_demos(tmp_path / "demos", episodes=2, frames=6),
        out=tmp_path / "run",
        policy=replace(POLICY, width=32, feedforward=64, dropout=0.0),
        steps=300,
        batch=12,
        lr=5e-3,
        warmup=20,
        weight_decay=0.0,
        threads=1,
        device="cpu",
    )
    lines = metrics_of(train(config))
    assert lines[0]["action"] > 0.3
    assert lines[-1]["action"] < 0.03
    assert lines[-1]["gripper"] < 0.01


def test_constant_dimensions_train_finitely_and_round_trip(config, tmp_path, caplog):
    """O17: a joint and the fingers that never move, a joint with a spread of 1e-3, one with a single outlier."""

    def spoil(state):
        state[:, [0, 7]] = 1.0
        state[:, 2] = 0.5 + 1e-3 * np.linspace(0, 1, len(state))
        state[3, 4] = 1e3

    data = write_demos(tmp_path / "constant", spoil=spoil)
    with caplog.at_level(logging.WARNING):
        policy = checkpoint.load(train(replace(config, data=data, steps=20))).policy
    lines = metrics_of(config.out)
    assert lines[-1]["step"] == 20 and all(np.isfinite(line["loss"]) for line in lines)
    assert (
        "scale is the floor 0.01: state: joint 0, joint 2, finger width, sin yaw, cos yaw; action: gripper"
        in caplog.text
    )
    assert (
        json.loads((config.out / "checkpoint" / "normalisation.json").read_text())["moments"]["state"]["floor"] == 0.01
    )
    value = torch.tensor([[1.0, 0.0, 0.5005, 0.0, 1e3] + [1.0] * 8, [0.0, 0.0, 0.5, 0.0, 0.1] + [0.5] * 8])
    again = policy.normaliser.denormalise("state", policy.normaliser.normalise("state", value))
    torch.testing.assert_close(again, value, atol=1e-5, rtol=1e-6)


def test_a_damaged_episode_ends_the_training_with_its_name_or_is_left_out(config, tmp_path, caplog):
    """O12."""
    data = write_demos(tmp_path / "damaged")
    path = data / "episode_000001.hdf5"
    path.write_bytes(path.read_bytes()[:-1024])
    with pytest.raises(UsageError, match=r"episode_000001\.hdf5: episode 1: is damaged.*on_bad=skip leaves it out"):
        train(replace(config, data=data))
    assert not config.out.exists()
    with caplog.at_level(logging.WARNING):
        out = train(replace(config, data=data, on_bad="skip"))
    assert metrics_of(out)[-1]["step"] == 12
    assert "1 damaged episodes are left out, the first: " in caplog.text and "episode 1" in caplog.text
    assert checkpoint.load(out).fingerprint["dataset"]["used"] == 2


def test_mixed_precision_trains(config):
    lines = metrics_of(train(replace(config, precision="bf16")))
    assert len(lines) == 4
    assert {value.dtype for value in state_of(config.out)["policy"].values()} == {torch.float32}


def test_the_learning_rate_rises_linearly_then_falls_along_a_cosine(config):
    config = replace(config, steps=110, warmup=10, lr=2.0)
    rates = [learning_rate(config, step) for step in range(110)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.001
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(replace(config, warmup=0), 0) == 2.0


def test_every_epoch_sees_every_sample_once_whatever_the_batch():
    for batch in (1, 3, 7, 10, 25):
        drawn = np.concatenate([sample_order(5, step, batch, 10) for step in range(50)])
        for epoch in drawn[: len(drawn) // 10 * 10].reshape(-1, 10):
            assert sorted(epoch) == list(range(10))
    assert list(sample_order(5, 3, 4, 10)) == list(sample_order(5, 3, 4, 10))
    assert list(sample_order(5, 3, 10, 10)) != list(sample_order(6, 3, 10, 10))


def test_the_average_follows_the_weights_with_a_rising_decay():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.0)
    average, expected = Average(model, 0.5), 0.0
    torch.nn.init.constant_(model.weight, 1.0)
    for updates, decay in enumerate([1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 9 / 18, 0.5, 0.5]):
        average.update(model, updates)
        expected = decay * expected + (1 - decay)
        assert next(average.model.parameters()).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("batch", -1), ("lr", 0.0), ("lr", float("inf")), ("warmup", -1), ("ema", 1.0), ("clip", 0.0),
        ("betas", (0.9, 1.0)), ("episodes", 0), ("snapshot_minutes", (2.0, 1.0)), ("seed", -1), ("weight_decay", -0.1),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(config, field, value):
    with pytest.raises(ValueError, match=f"^{field} must be "):
        replace(config, **{field: value})


def test_what_does_not_fit_the_demonstrations_is_refused_before_anything_is_written(config, tmp_path):
    with pytest.raises(UsageError, match="what `robotattn record` writes"):
        train(replace(config, data=tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="vocabulary=100: the tokenizer has"):
        train(replace(config, policy=replace(POLICY, vocabulary=100)))
    with pytest.raises(UsageError, match="cameras: no wrist"):
        train(replace(config, policy=replace(POLICY, cameras={"wrist": (96, 96)})))
    data = write_demos(tmp_path / "front", cameras=("front",), size=32)
    with pytest.raises(UsageError, match=r"front: \[48, 32\] \(height, width\), but recorded are \[32, 32\]"):
        train(replace(config, data=data, policy=replace(POLICY, cameras={"front": (48, 32)})))
    assert not config.out.exists()


def test_a_folder_that_cannot_be_written_is_refused(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write there"):
        train(replace(config, out=tmp_path / "file" / "run"))
