"""Latency: the clock waits for the work, warm-up settles first, thin percentiles are refused, no simulator."""

import gc
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from robotattn.config import UsageError
from robotattn.latency import measure
from robotattn.latency.inputs import Batcher
from robotattn.latency.measure import Clock, Spans, quiet, summary, warm_up
from robotattn.latency.profile import ProfileConfig, profile
from robotattn.latency.stages import STAGES, random_observation
from robotattn.policies import ACTConfig

CONFIG = """
policy:
  act:
    cameras: {front: [32, 48], wrist: [32, 32]}
    width: 32
    feedforward: 32
    text_width: 16
    stem_channels: 8
    chunk: 5
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def test_known_slow_work_cannot_read_fast():
    _, duration = Clock("cpu").time(lambda: time.sleep(0.006))
    assert duration >= 6e6


def test_a_chain_of_products_reads_as_long_as_it_takes():
    matrix = torch.randn(400, 400)
    power = matrix

    def chain():
        nonlocal power
        for _ in range(10):
            power = torch.nn.functional.normalize(power @ matrix)
        return power

    inside, clock = Spans(Clock("cpu")), Clock("cpu")
    (_, duration), outside = Clock("cpu").time(lambda: clock.time(lambda: inside.run("chain", chain)))
    assert 0 < inside.samples["chain"][0] <= duration <= outside


def test_on_a_device_that_queues_work_both_readings_wait_for_it(monkeypatch):
    """A stand-in for a GPU: work returns at once, and only a synchronisation takes the time it needs."""
    now, queued = [0], []

    def synchronise(device):
        now[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    monkeypatch.setattr(measure.torch.cuda, "synchronize", synchronise)
    clock = Clock("cuda")
    assert "synchronised" in clock.name
    queued.append(20_000_000)  # (ns) left over from before: must not be counted
    _, duration = clock.time(lambda: queued.append(5_000_000))
    assert duration == 5_000_000


def test_a_device_that_cannot_be_synchronised_is_refused():
    with pytest.raises(ValueError, match="meta, allowed are cpu, cuda, mps"):
        Clock("meta")


def test_percentiles_without_enough_samples_are_refused_with_the_number_needed():
    durations = list(range(1_000_000, 459_000_001, 1_000_000))  # 1 ms, 2 ms, ... 459 ms
    full, short = summary(durations), summary(durations[:458])
    assert (full["n"], full["p50"], full["max"], full["min"], full["mean"]) == (459, 230.0, 459.0, 1.0, 230.0)
    assert full["p99"] == pytest.approx(np.quantile(np.arange(1, 460), 0.99))
    assert short["p99"] is None and short["p90"] is not None
    assert short["refused"] == {"p99": "needs 459 samples, has 458", "p99.9": "needs 4603 samples, has 458"}
    assert summary(durations[:3])["p50"] is None


class FakeClock:
    """A clock on which the calls take the given times (ns)."""

    def __init__(self, durations):
        self.durations = iter(durations)

    def time(self, work):
        return work(), next(self.durations)


def test_warm_up_goes_on_until_the_calls_settle():
    settling = [1000] * 10 + [500] * 10 + [101] * 10 + [100] * 30
    warm = warm_up(lambda: None, FakeClock(settling))
    assert (warm.calls, warm.steady, warm.durations[0]) == (40, True, 1000)
    never = warm_up(lambda: None, FakeClock(2.0**-k for k in range(1000)), most=60)
    assert (never.calls, never.steady) == (60, False)


def test_the_garbage_collector_is_off_inside_the_window_and_back_on_after_it():
    with quiet():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError), quiet():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_spans_collect_by_name_and_return_the_result():
    spans = Spans(FakeClock([5, 6, 7]))
    assert [spans.run(name, name.upper) for name in "aba"] == ["A", "B", "A"]
    assert spans.samples == {"a": [5, 7], "b": [6]}


def test_inputs_are_fresh_at_every_step_and_never_zero():
    config, generator = ACTConfig(cameras={"front": (32, 32)}, objects=True), np.random.default_rng(0)
    first, second = (random_observation(config, generator, ["a", "b"]) for _ in range(2))
    assert first.images["front"].std() > 50 and (first.images["front"] != second.images["front"]).mean() > 0.9
    assert (first.state != second.state).all() and (first.objects[:, 4:].sum(0) == 1).all()


def test_batches_pad_texts_to_one_length_and_mark_absent_objects():
    def encode(texts):
        return np.array([[len(texts[0])] * len(texts[0])]), None

    config = ACTConfig(objects=True)
    seen = [random_observation(config, np.random.default_rng(0), [text]) for text in ("ab", "abc")]
    seen[0].objects[4:] = 0
    batch = Batcher(encode, []).batch(seen, length=4)
    assert batch["text"].tolist() == [[2, 2, 0, 0], [3, 3, 3, 0]]
    assert batch["text_mask"].tolist() == [[True, True, False, False], [True, True, True, False]]
    assert batch["objects_mask"].tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert batch["state"].shape == (2, 13) and batch["images"] == {}


def test_a_profile_holds_every_stage_and_adds_up(config, tmp_path):
    result = profile(ProfileConfig(config=config, samples=60, out=tmp_path / "out"))
    assert result == json.loads((tmp_path / "out" / "profile.json").read_text())
    assert (result["schema"], result["kind"]) == (1, "profile")
    assert {name: stage["n"] for name, stage in result["stages"].items()} == dict.fromkeys(
        (*STAGES, "staged", "step"), 60
    )
    for stage in result["stages"].values():
        assert 0 < stage["min"] <= stage["p50"] <= stage["p90"] <= stage["max"] and stage["p99"] is None
    assert 0 <= result["shares"]["unaccounted"] < 0.5
    tokens = result["tokens"]
    assert tokens["front"] == 6 and tokens["wrist"] == 4 and tokens["proprioception"] == 1 and tokens["actions"] == 5
    assert tokens["total"] == sum(count for name, count in tokens.items() if name not in ("total", "actions"))
    assert result["staged_equals_whole"]["largest_difference"] == 0
    assert len(result["cold_start"]["first_calls_ms"]) == 3 and result["parameters"] > 1000


def test_profile_runs_where_no_simulator_renderer_or_video_library_can_be_imported(config, tmp_path):
    program = f"""
import sys
for name in ("mujoco", "gymnasium", "cv2", "h5py", "OpenGL", "matplotlib", "accelerate"):
    sys.modules[name] = None  # importing it raises
from pathlib import Path
from robotattn.latency.profile import ProfileConfig, profile
profile(ProfileConfig(config=Path({str(config)!r}), samples=8, out=Path({str(tmp_path)!r})))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert (tmp_path / "profile.json").is_file()


def test_what_cannot_be_profiled_is_refused_in_one_line(config, tmp_path):
    with pytest.raises(ValueError, match="either a checkpoint folder or a config"):
        ProfileConfig()
    with pytest.raises(ValueError, match="samples: 0"):
        ProfileConfig(config=config, samples=0)
    with pytest.raises(UsageError, match="device: warp9"):
        profile(ProfileConfig(config=config, device="warp9", out=tmp_path))
    with pytest.raises(UsageError, match=r"none\.yaml: No such file"):
        profile(ProfileConfig(config=tmp_path / "none.yaml", out=tmp_path))
    config.write_text("steps: 3")
    with pytest.raises(UsageError, match="has no policy"):
        profile(ProfileConfig(config=config, out=tmp_path))
    assert not (tmp_path / "profile.json").exists()
