"""Training on made-up demonstrations: resuming to the same bits, being killed, stopping, what a run leaves behind."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from robotattn import checkpoint
from robotattn.config import UsageError, load, to_dict
from robotattn.data import store
from robotattn.policies import ACT
from robotattn.train import TrainConfig, train
from robotattn.training_loop import TrainingStopped

sys.path.insert(0, str(Path(__file__).parent))
from demonstrations import ENV, POLICY, metrics_of, state_of, timeless, training, write_demos


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return write_demos(tmp_path_factory.mktemp("data") / "demos")


@pytest.fixture
def config(demos, tmp_path):
    return training(demos, tmp_path / "run")


def assert_same_bits(one, other):
    """Compare weights, average, optimiser and counters of two training states, and the lines of metrics."""
    a, b = state_of(one), state_of(other)
    assert a["step"] == b["step"]
    for part in ("policy", "average"):
        assert a[part].keys() == b[part].keys()
        assert all(torch.equal(a[part][name], b[part][name]) for name in a[part])
    moments = [s["optimizer"]["state"] for s in (a, b)]
    assert moments[0].keys() == moments[1].keys()
    for index, entries in moments[0].items():
        assert all(torch.equal(value, moments[1][index][name]) for name, value in entries.items())
    assert timeless(metrics_of(one)) == timeless(metrics_of(other))
    weights = [(out / "checkpoint" / "model.safetensors").read_bytes() for out in (one, other)]
    assert weights[0] == weights[1]


class Interrupt(Exception):
    pass


def stop_at(step):
    def callback(line):
        if line["step"] == step:
            raise Interrupt

    return callback


# --- the run's folder


def test_a_run_leaves_checkpoint_metrics_and_its_resolved_configuration(config):
    seen: list[dict] = []
    calls: list[tuple] = []
    out = train(config, progress=lambda *args: calls.append(args), callbacks=[seen.append])
    assert out == config.out
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint", "config.yaml", "metrics.jsonl", "training_state.pt"]
    assert load(out / "config.yaml", TrainConfig) == config
    assert [line["step"] for line in metrics_of(out)] == [3, 6, 9, 12]
    assert seen == metrics_of(out)
    assert {"minutes", "lr", "loss", "action", "gripper", "gradient_norm", "samples_per_second"} <= seen[0].keys()
    assert [c[1:] for c in calls if c[0] == "train"] == [(step, 12) for step in range(1, 13)]


def test_the_checkpoint_is_the_averaged_policy_and_knows_its_training(config):
    loaded = checkpoint.load(train(config))
    state = state_of(config.out)
    weights = loaded.policy.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in state["average"].items())
    assert any(not torch.equal(weights[name], value) for name, value in state["policy"].items())
    assert loaded.config == POLICY
    assert loaded.training == to_dict(config)
    assert loaded.env == ENV
    assert loaded.fingerprint["training"]["steps"] == 12
    assert loaded.fingerprint["dataset"]["sha256"] == store.dataset_hash(store.read_manifest(config.data))


def test_metrics_are_means_over_the_steps_since_the_last_line(config, tmp_path):
    train(config)
    train(replace(config, out=tmp_path / "fine", log_every=1))
    fine = metrics_of(tmp_path / "fine")
    for line in metrics_of(config.out):
        part = [other["loss"] for other in fine if line["step"] - 3 < other["step"] <= line["step"]]
        assert line["loss"] == pytest.approx(np.mean(part), rel=1e-12)
        assert line["lr"] == fine[line["step"] - 1]["lr"]


def test_snapshots_are_kept_at_their_minutes(config):
    train(replace(config, snapshot_minutes=(1e-6, 1e-5, 500.0)))
    kept = sorted(path.name for path in (config.out / "snapshots").iterdir())
    assert kept == ["1e-05", "1e-06"]
    first = checkpoint.load(config.out / "snapshots" / "1e-06")
    assert first.fingerprint["training"]["steps"] == 1
    assert first.fingerprint["training"]["minutes"] >= 1e-6


# --- resuming


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(config, tmp_path):
    whole = train(replace(config, steps=30, out=tmp_path / "whole"))
    config = replace(config, steps=30, checkpoint_every=5)
    with pytest.raises(Interrupt):
        train(config, callbacks=[stop_at(18)])  # 15 was the last checkpoint; 16 to 18 are lost, with a line of metrics
    assert state_of(config.out)["step"] == 15
    assert metrics_of(config.out)[-1]["step"] == 18
    assert_same_bits(train(config, resume=True), whole)


def test_training_minutes_add_up_over_resumes(config):
    with pytest.raises(Interrupt):
        train(config, callbacks=[stop_at(6)])
    before = state_of(config.out)["minutes"]
    train(config, resume=True)
    minutes = [line["minutes"] for line in metrics_of(config.out)]
    assert 0 < before < minutes[-1]
    assert minutes == sorted(minutes)


def test_resuming_a_finished_run_changes_nothing(config):
    train(config)
    before = (config.out / "checkpoint" / "model.safetensors").read_bytes(), metrics_of(config.out)
    train(config, resume=True)
    assert before == ((config.out / "checkpoint" / "model.safetensors").read_bytes(), metrics_of(config.out))


def test_resume_without_a_run_starts_one(config, tmp_path):
    assert_same_bits(train(config, resume=True), train(replace(config, out=tmp_path / "plain")))


def test_a_folder_with_a_run_is_refused_without_resume(config):
    train(config)
    before = (config.out / "config.yaml").read_text(), metrics_of(config.out)
    with pytest.raises(UsageError, match="already holds a run; --resume goes on"):
        train(replace(config, lr=0.1))
    assert before == ((config.out / "config.yaml").read_text(), metrics_of(config.out))


def test_a_folder_with_something_else_is_refused(config):
    with pytest.raises(UsageError, match=r"holds manifest\.jsonl, dataset\.json but no config\.yaml"):
        train(replace(config, out=config.data))


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"seed": 1}, {"policy": replace(POLICY, chunk=5)}, {"batch": 4}])
def test_resuming_with_another_configuration_names_the_field(config, change):
    train(config)
    with pytest.raises(UsageError, match=f"cannot resume with another {next(iter(change))}: was "):
        train(replace(config, **change), resume=True)


def test_a_run_can_be_lengthened_but_not_shortened(config):
    train(config)
    train(replace(config, steps=16), resume=True)
    assert state_of(config.out)["step"] == 16
    assert load(config.out / "config.yaml", TrainConfig).steps == 16
    with pytest.raises(UsageError, match="steps=12, but the run has done 16"):
        train(config, resume=True)


def test_resuming_on_other_demonstrations_is_refused(config, tmp_path):
    train(config)
    other = write_demos(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match="not those that the run"):
        train(replace(config, data=other), resume=True)


def _seen(path):
    """Which file of metrics is there (each start of a training writes a new one), and its last whole line's step."""
    if not path.exists():
        return None, 0
    with path.open() as file:
        whole = [line for line in file if line.endswith("\n")]
        return os.fstat(file.fileno()).st_ino, json.loads(whole[-1])["step"] if whole else 0


def _kill_while_training(config, context, steps, delay):
    """Train in another process; kill it `delay` seconds after it has done so many steps (0: it may not even start)."""
    before, _ = _seen(config.out / "metrics.jsonl")
    child = context.Process(target=train, args=(config, True))
    child.start()
    limit, (file, done) = time.monotonic() + 60, (before, 0)
    while steps and (file == before or done < steps) and child.is_alive() and time.monotonic() < limit:
        time.sleep(0.002)
        file, done = _seen(config.out / "metrics.jsonl")
    child.join(delay)
    child.kill()
    child.join()


def test_a_run_killed_ten_times_at_random_moments_ends_like_an_uninterrupted_one(config, tmp_path):
    config = replace(config, steps=40, checkpoint_every=2, log_every=1)
    whole = train(replace(config, out=tmp_path / "whole"))
    rng, furthest = np.random.default_rng(0), 0
    context = multiprocessing.get_context("forkserver")  # children that need not import anything
    context.set_forkserver_preload(["robotattn.train", "torch._dynamo"])
    for kill in range(10):
        more = kill % 5  # steps beyond what is saved
        _kill_while_training(config, context, more and furthest + more, rng.uniform(0.0, 0.05))
        if (config.out / "training_state.pt").exists():
            step = state_of(config.out)["step"]
            assert step >= furthest  # what was saved is never lost
            furthest = step
    checkpoint.load(config.out)
    assert furthest >= 8  # kills 3, 4, 8 and 9 came after the next checkpoint
    assert_same_bits(train(config, resume=True), whole)
    assert not [path for path in config.out.iterdir() if path.name.startswith(".")]


# --- stopping


def poison(monkeypatch, step, value):
    calls = iter(range(1, 1000))
    original = ACT.loss

    def loss(self, batch):
        losses = original(self, batch)
        return losses | {"loss": losses["loss"] * (value if next(calls) == step else 1.0)}

    monkeypatch.setattr("robotattn.policies.act.ACT.loss", loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(config, monkeypatch, value):
    poison(monkeypatch, 6, value)
    with pytest.raises(TrainingStopped, match=r"step 6: not finite: loss (nan|inf), .*kept") as caught:
        train(config)
    assert caught.value.exit_code == 1
    assert state_of(config.out)["step"] == 4
    assert all(torch.isfinite(value).all() for value in state_of(config.out)["policy"].values())
    assert checkpoint.load(config.out).fingerprint["training"]["steps"] == 4
    assert [line["step"] for line in metrics_of(config.out)] == [3]


def test_a_gradient_that_is_not_finite_stops_before_the_update(config, monkeypatch):
    poison(monkeypatch, 2, 1.0)
    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", lambda *args: torch.tensor(float("nan")))
    with pytest.raises(TrainingStopped, match=r"step 1: not finite: .*gradient_norm nan\. .*no checkpoint yet"):
        train(config)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_finishes_the_step_and_saves(config, tmp_path, number, error):
    handler = signal.getsignal(number)
    with pytest.raises(error):
        train(config, callbacks=[lambda line: os.kill(os.getpid(), number) if line["step"] == 6 else None])
    assert signal.getsignal(number) == handler
    assert state_of(config.out)["step"] == 6
    assert checkpoint.load(config.out).fingerprint["training"]["steps"] == 6
    assert_same_bits(train(config, resume=True), train(replace(config, out=tmp_path / "whole")))


def test_training_works_outside_the_main_thread(config):
    thread = threading.Thread(target=train, args=(config,))
    thread.start()
    thread.join()
    assert state_of(config.out)["step"] == 12
