"""Training on made-up demonstrations: resuming to the same bits, being killed, stopping, what a run leaves behind."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from robotattn import checkpoint, tracking
from robotattn.config import UsageError, load, to_dict
from robotattn.data import store
from robotattn.ema import Average
from robotattn.policies import ACT, ACTConfig
from robotattn.train import TrainConfig, train
from robotattn.training_loop import TrainingStopped, learning_rate, sample_order
from robotattn.types import COLOURS, MAX_OBJECTS

POLICY = ACTConfig(objects=True, width=16, heads=2, feedforward=16, text_width=16, chunk=4, dropout=0.1)
ENV = {"cameras": [], "object_tokens": True, "action_mode": "tool", "language": "en", "hz": 10}


def write_demos(folder, episodes=3, frames=10, cameras=(), size=16, seed=0, spoil=lambda state: None):
    """Write a data set in which the arm moves straight to the target; spoil: changes an episode's states."""
    folder.mkdir(parents=True)
    env = ENV | {"cameras": [{"name": name, "width": size, "height": size} for name in cameras]}
    description = {"schema": store.SCHEMA, "env": env, "seed": seed, "noise": 0.0, "episodes": episodes, "versions": {}}
    store.open_dataset(folder, description)
    lines = {}
    for index in range(episodes):
        columns, attributes = _episode(np.random.default_rng([seed, index]), frames, cameras, size)
        spoil(columns["observations/state"])
        lines[index] = store.write_episode(folder, index, columns, attributes | {"env": json.dumps(env)})
    store.write_manifest(folder, lines)
    return folder


def _episode(rng, frames, cameras, size):
    present = np.arange(MAX_OBJECTS) < 3
    colour = rng.permutation(MAX_OBJECTS)
    position = rng.uniform([0.4, -0.2, 0.02, -0.5], [0.6, 0.2, 0.02, 0.5], (MAX_OBJECTS, 4)) * present[:, None]
    tool = np.linspace([0.4, 0.0, 0.3], position[0, :3], frames)
    state = rng.normal(size=(frames, 13))
    state[:, 8:11], state[:, 11:] = tool, [0.0, 1.0]
    objects = np.concatenate([position, np.eye(len(COLOURS))[colour] * present[:, None]], axis=1)
    goal = np.concatenate([position[0], [0.0]])
    still = np.broadcast_to
    columns = {
        "observations/state": state.astype(np.float32),
        "observations/objects": still(objects, (frames, MAX_OBJECTS, 10)).astype(np.float32),
        "action": np.zeros((frames, 5), np.float32),
        "expert_action": np.concatenate([tool + 0.1 * (position[0, :3] - tool), still(goal[3:], (frames, 2))], axis=1),
        "expert_joint": np.zeros((frames, 8), np.float32),
        "time/observation": np.arange(frames) / 10,
        "labels/position": still(position, (frames, MAX_OBJECTS, 4)).astype(np.float32),
        "labels/present": present,
        "labels/colour": colour,
        "final/state": state[-1].astype(np.float32),
    }
    for camera in cameras:
        columns[f"observations/images/{camera}"] = rng.integers(0, 256, (frames, size, size, 3), dtype=np.uint8)
        columns[f"labels/pixel/{camera}"] = rng.uniform(size=(frames, MAX_OBJECTS, 2)).astype(np.float32)
        columns[f"labels/visible/{camera}"] = still(present, (frames, MAX_OBJECTS)).copy()
    name = COLOURS[colour[0]]
    attributes = {"seed": 0, "instruction": f"pick up the {name} cube", "success": True, "reason": "success", "hz": 10}
    return columns, attributes | {"action_mode": "tool", "attempt": 0, "target": 0}


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return write_demos(tmp_path_factory.mktemp("data") / "demos")


@pytest.fixture
def config(demos, tmp_path):
    return TrainConfig(
        data=demos,
        out=tmp_path / "run",
        policy=POLICY,
        steps=12,
        batch=8,
        warmup=3,
        ema=0.9,
        threads=1,
        device="cpu",
        checkpoint_every=4,
        log_every=3,
    )


def state_of(out):
    return checkpoint.load_state(out / "training_state.pt")


def metrics_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def timeless(lines):
    return [{k: v for k, v in line.items() if k not in ("minutes", "samples_per_second")} for line in lines]


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


# --- what is learned


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


# --- pieces


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


# --- trackers


OFFLINE = """
import socket, sys

tried = []

def refuse(*arguments, **more):
    tried.append(arguments)
    raise OSError("Network is unreachable")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
from robotattn.cli import main

code = main(sys.argv[1:])
assert not tried, tried
sys.exit(code)
"""


@pytest.mark.parametrize("tracker", ["none", "wandb"])
def test_training_needs_no_network_no_key_and_no_tracker(demos, tmp_path, tracker):
    """O38: twenty steps through the command line, within the minute that the case allows."""
    out = tmp_path / "run"
    small = "--steps 20 --warmup 2 --batch 8 --log-every 5 --threads 1 --device cpu --policy.width 16 --policy.heads 2"
    words = f"train act_state --data {demos} --out {out} --tracker {tracker} {small} --policy.feedforward 16"
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "HOME", "NETRC"))}
    (tmp_path / "wandb.py").write_text("raise ImportError('No module named wandb')")  # so too where it is installed
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = quiet | {"HOME": str(tmp_path), "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", OFFLINE, *words.split()], env=told, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert [line["step"] for line in metrics_of(out)] == [5, 10, 15, 20]
    assert ran.stderr.count("wandb gets no metrics") == (tracker == "wandb")


def fake_wandb(monkeypatch, init):
    module = types.SimpleNamespace(Settings=lambda **settings: settings, init=init)
    monkeypatch.setitem(sys.modules, "wandb", module)


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.name == "robotattn.tracking"]


def test_without_wandb_installed_there_is_one_warning_and_all_metrics(config, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(replace(config, tracker="wandb"))
    assert len(metrics_of(config.out)) == 4
    (message,) = warnings_of(caplog)
    assert "not installed" in message


def test_a_tracker_without_network_costs_one_warning(config, monkeypatch, caplog):
    def init(**kwargs):
        raise RuntimeError("api.example: network is unreachable\nmore")

    fake_wandb(monkeypatch, init)
    train(replace(config, tracker="wandb"))
    assert len(metrics_of(config.out)) == 4
    (message,) = warnings_of(caplog)
    assert "network is unreachable" in message
    assert "more" not in message


def test_a_tracker_that_hangs_is_left_behind(config, monkeypatch, caplog):
    release = threading.Event()
    fake_wandb(monkeypatch, lambda **kwargs: release.wait(60))
    monkeypatch.setattr(tracking, "FINISH", 0.2)
    train(replace(config, tracker="wandb"))
    assert len(metrics_of(config.out)) == 4
    assert warnings_of(caplog) == ["wandb gets no metrics (no answer for 0.2 s); metrics.jsonl is complete"]
    release.set()


def test_wandb_gets_the_lines_of_the_file(config, monkeypatch, caplog):
    lines, finished = [], []
    run = types.SimpleNamespace(log=lambda v, step: lines.append((step, v)), finish=lambda: finished.append(True))
    fake_wandb(monkeypatch, lambda **kwargs: run)
    train(replace(config, tracker="wandb"))
    assert [values for _, values in lines] == metrics_of(config.out)
    assert [step for step, _ in lines] == [3, 6, 9, 12]
    assert finished == [True]
    assert warnings_of(caplog) == []


def test_half_a_line_of_metrics_is_dropped_when_going_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics = tracking.Metrics(path, step=2)
    metrics.write({"step": 3, "again": True})
    metrics.close()
    assert metrics_of(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
