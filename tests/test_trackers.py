"""Trackers: training needs none of them, and each failure of one costs one warning."""

import os
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest

from robotattn import tracking
from robotattn.train import train

sys.path.insert(0, str(Path(__file__).parent))
from demonstrations import metrics_of, training, write_demos


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return write_demos(tmp_path_factory.mktemp("data") / "demos")


@pytest.fixture
def config(demos, tmp_path):
    return training(demos, tmp_path / "run")


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
