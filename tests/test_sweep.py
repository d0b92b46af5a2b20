"""A grid of policies, measured row by row into a file that survives a kill (robotattn/latency/{grid,sweep*}.py)."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robotattn.config import UsageError
from robotattn.latency import sweep as module
from robotattn.latency.devices import Device
from robotattn.latency.grid import BASE, as_kind, axis, grid, names
from robotattn.latency.sweep import SweepConfig, facts, order, point, sweep, words
from robotattn.latency.sweep_file import Writer, digest, lasting, merge, paces, read
from robotattn.latency.sweep_result import shape
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig

SMALL = ("width=32", "heads=2", "feedforward=32", "layers=1", "chunk=1", "size=32")
HERE = {"device": "cpu", "cpu": "a chip", "torch_threads": 1, "load": [0.1]}


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants of some machine, so that no test waits for the probe."""
    device = Device("a machine", 1e10, {"float32": 1e11}, 1e-6, 1e-6, "made up", True)
    monkeypatch.setattr(module.devices, "probe", lambda *arguments, **named: device, raising=False)


def small(out: Path, *axes: str, **changes: Any) -> SweepConfig:
    return replace(SweepConfig((*axes, *SMALL), out=out, samples=30, staged=5), **changes)


# ------------------------------------------------------------------------------------------ the grid


def test_the_issues_grid_is_every_combination_once():
    found, left_out = grid(["cameras=1:4", "patch=8,16,32", "policy=act,autoregressive,blockwise"])
    assert len(found) == 36 and not left_out
    assert {type(one.policy) for one in found} == {ACTConfig, AutoregressiveConfig, BlockwiseConfig}
    assert {len(one.policy.cameras) for one in found} == {1, 2, 3, 4}
    assert found[0].label == "cameras=1 patch=8 policy=act"
    assert all(one.policy.stem == "patch" for one in found if one.policy.patch != 16)
    assert len(grid(["cameras=1:2", "patch=16,16"])[0]) == 2


def test_other_kinds_take_over_what_they_have_in_common():
    base = ACTConfig(cameras={"eye": (64, 32)}, width=64, encoder_layers=3, chunk=5, pose_weight=0.0)
    other = as_kind(base, "blockwise")
    assert isinstance(other, BlockwiseConfig)
    assert (other.cameras, other.width, other.layers, other.chunk) == ({"eye": (64, 32)}, 64, 3, 5)
    assert as_kind(other, "act").encoder_layers == 3 and as_kind(base, "act") is base


def test_more_cameras_than_the_base_has_are_of_its_first_ones_size():
    base = replace(BASE, cameras={"wrist": (64, 32), "front": (96, 96)})
    (one,), _ = grid(["cameras=3"], base)
    assert one.policy.cameras == {"wrist": (64, 32), "front": (96, 96), "left": (64, 32)}
    (one,), _ = grid(["size=48"], base)
    assert one.policy.cameras == {"wrist": (48, 48), "front": (48, 48)}


def test_combinations_that_cannot_be_are_named_and_left_out():
    found, left_out = grid(["policy=act,blockwise", "steps=5,10"])
    assert [one.kind for one in found] == ["blockwise", "blockwise"]
    assert left_out == ["policy=act steps=5: act has no steps", "policy=act steps=10: act has no steps"]
    _, left_out = grid(["patch=16,7"])
    assert left_out[0].startswith("patch=7: cameras: front: height and width must be multiples of 7")
    with pytest.raises(UsageError, match="no combination can be: patch=7"):
        grid(["patch=7"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth=3", "names: policy, cameras, size"),
        ("cameras", "NAME=VALUE,VALUE"),
        ("cameras=", "NAME=VALUE,VALUE"),
        ("cameras=two", "two is not a whole number"),
        ("cameras=1:", "1: is not a whole number"),
        ("policy=ACT", "ACT, allowed: act, autoregressive, blockwise"),
        ("stem=vit", "vit, allowed: conv, patch"),
    ],
)
def test_an_axis_that_is_none_is_refused_with_what_is_allowed(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        axis(text)


def test_an_axis_given_twice_is_refused():
    with pytest.raises(UsageError, match="twice"):
        grid(["cameras=1", "cameras=2"])
    assert {"cameras", "frames", "kv_heads", "patch", "policy"} <= set(names())


# ------------------------------------------------------------------------------------------ order


def test_kinds_take_turns_and_every_repeat_has_another_order():
    candidates, _ = grid(["policy=act,autoregressive,blockwise", "cameras=1:4"])
    config = SweepConfig(("cameras=1:4",), repeats=2)
    tasks = order(candidates, config)
    assert [task.candidate.kind for task in tasks[:6]] == ["act", "autoregressive", "blockwise"] * 2
    first, second = ([task.candidate.label for task in tasks if task.repeat == repeat] for repeat in (0, 1))
    assert sorted(first) == sorted(second) and first != second
    assert [task.key for task in order(candidates, config)] == [task.key for task in tasks]
    assert len({task.key for task in tasks}) == 24


# ------------------------------------------------------------------------------------------ rows


def test_a_sweep_measures_every_point_and_says_what_it_found(tmp_path):
    seen: list[tuple[int, int]] = []
    config = small(tmp_path, "policy=act,autoregressive,blockwise", "cameras=1,2", "patch=16,32")
    result = sweep(config, lambda what, done, total: seen.append((done, total)))
    assert (result["points"], result["missing"], result["failed"]) == (12, 0, [])
    assert seen[0] == (0, 12) and seen[-1] == (12, 12)
    assert set(result["fits"]["p50"]) == {"act eager", "autoregressive eager", "blockwise eager"}
    assert "4 of 4 points have too few samples" in result["refused"]["act eager p99"]
    assert json.loads((tmp_path / "sweep.json").read_text())["points"] == 12
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    rows = read(tmp_path)
    assert rows.environment["torch_threads"] == 1
    for row in rows.points:
        assert row["step"]["n"] == len(row["samples_us"]) == 30 and row["step"]["min"] > 0
        assert row["card"] == {"agrees": True, "differs": []}
        inside = sum(row["stages"][name] for name in row["work"])
        assert 0 < inside <= 1.02 * row["stages"]["staged"] * 1.5  # medians of parts, on a machine with other programs
    with_two = [row for row in rows.points if len(row["policy"][row["kind"]]["cameras"]) == 2]
    assert {row["tokens"]["prefix"] - row["tokens"]["instruction"] - 2 for row in with_two} == {8, 2}


def test_the_rows_hold_the_closed_forms_of_their_policy():
    policy = replace(BASE, cameras={"front": (96, 96), "wrist": (96, 96)})
    known = facts(policy, 16)
    assert known["image_bytes"] == 2 * 3 * 96 * 96 and known["tokens"]["prefix"] == 2 * 36 + 16 + 1 + 1
    assert known["parameters"] == sum(p.numel() for p in policy.build().parameters())
    assert known["kv"]["per_token"] == 2 * policy.layers * policy.width * 4
    assert set(known["work"]) == {"vision", "prefix", "decode"}


def test_a_sweep_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    config = small(tmp_path, "cameras=1,2", "patch=16,32")
    sweep(config)
    path = tmp_path / "sweep.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:50])  # the machine row, two points, half of the third
    assert len(read(path).points) == 2
    measured: list[str] = []
    monkeypatch.setattr(module, "point", lambda task, *rest: measured.append(task.key) or point(task, *rest))
    assert sweep(config)["missing"] == 0
    assert len(measured) == 2 and len(read(path).points) == 4
    assert path.read_bytes().startswith(b"".join(lines[:3])), "what was measured is measured once"
    sweep(config)
    assert len(measured) == 2


def test_a_process_that_is_killed_loses_at_most_the_point_in_flight(tmp_path):
    """The third point never ends; the program dies in it without a chance to write anything."""
    code = f"""
import os
from pathlib import Path
from robotattn.latency import sweep as module
from robotattn.latency.devices import Device
module.devices.probe = lambda *a, **k: Device("m", 1e10, {{"float32": 1e11}}, 1e-6, 1e-6, "", True)
real, count = module.point, []
def point(*arguments):
    count.append(1)
    return real(*arguments) if len(count) < 3 else os._exit(9)
module.point = point
module.sweep(module.SweepConfig({("cameras=1,2", "patch=16,32", *SMALL)!r}, out=Path({str(tmp_path)!r}), samples=30))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=500).returncode == 9
    assert len(read(tmp_path).points) == 2


def test_another_machine_is_refused_and_named(tmp_path):
    path = tmp_path / "sweep.jsonl"
    Writer(path, HERE, dict)
    Writer(path, HERE | {"load": [5.0]}, dict)  # load comes and goes
    with pytest.raises(UsageError, match=r"another machine \(cpu: a chip, here another chip\)"):
        Writer(path, HERE | {"cpu": "another chip"}, dict)
    with pytest.raises(UsageError, match="torch_threads: 1, here 2"):
        Writer(path, HERE | {"torch_threads": 2}, dict)
    assert digest(lasting(HERE)) == digest(lasting(HERE | {"load": [9.0]})) != digest(lasting(HERE | {"cpu": "x"}))


def test_half_a_first_line_is_begun_anew(tmp_path):
    path = tmp_path / "sweep.jsonl"
    path.write_text('{"schema": 1, "ki')
    Writer(path, HERE, lambda: {"name": "m"}).append({"key": "one"})
    rows = read(path)
    assert rows.device == {"name": "m"} and [row["key"] for row in rows.points] == ["one"]
    assert rows.points[0]["environment"] == digest(lasting(HERE))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a sweep"),
        ('{"kind": "trace"}\n', "is not a sweep"),
        ('{"kind": "sweep", "schema": 9}\n', "schema 9, this program reads 1"),
        ('{"kind": "sweep", "schema": 1, "environment": {}}\n[1]\n', ":2: expected a mapping"),
        ('{"kind": "sweep", "schema": 1, "environment": {}}\n{\n', ":2: not JSON"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text: str, message: str):
    (tmp_path / "sweep.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        read(tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory\ndetails"), MemoryError()])
def test_a_point_without_memory_is_a_row_and_the_rest_is_measured(tmp_path, monkeypatch, error: BaseException):
    real = module.of_policy

    def starved(name, policy, *rest):
        if len(policy.cameras) == 2:
            raise error
        return real(name, policy, *rest)

    monkeypatch.setattr(module, "of_policy", starved)
    result = sweep(small(tmp_path, "cameras=1:3"))
    (failed,) = result["failed"]
    assert failed.startswith("cameras=2") and type(error).__name__ in failed and "details" not in failed
    assert result["points"] == 2 and result["missing"] == 0
    assert len(merge(read(tmp_path).points)) == 2


def test_a_sweep_stops_when_its_time_is_up_and_says_what_is_missing(tmp_path):
    result = sweep(small(tmp_path, "cameras=1:4", minutes=1e-9))
    assert (result["points"], result["missing"]) == (0, 4)


def test_a_mode_that_is_not_there_is_a_row_with_its_reason(tmp_path):
    result = sweep(small(tmp_path, "cameras=1", mode="graph"))
    assert "need a CUDA device" in result["failed"][0]


def test_words_that_are_no_settings_are_axes():
    found = words(SweepConfig, ["cameras=1:4", "samples=50", "patch=8,16", "out=here"])
    assert found == ['sweep=["cameras=1:4", "patch=8,16"]', "samples=50", "out=here"]
    assert words(SweepConfig, ["--samples=50"]) == ["--samples=50"]


# ------------------------------------------------------------------------------------------ merging


def row(samples: list[int], stages: dict[str, float], repeat: int = 0, **changes: Any) -> dict[str, Any]:
    policy = {"act": {"cameras": {"front": [96, 96], "wrist": [96, 96]}}}
    tokens = {"front": 36, "front@1": 36, "wrist": 36, "wrist@1": 36, "instruction": 16, "prefix": 162, "actions": 8}
    made = {"label": "x", "kind": "act", "mode": "eager", "batch": 1, "instruction": 16, "repeat": repeat}
    made |= {"policy": policy, "tokens": tokens, "kv": {"total": 1000, "per_token": 6}, "work": {}, "image_bytes": 9}
    return made | {"samples_us": samples, "stages": stages, **changes}


def test_repeats_are_merged_and_enough_of_them_make_a_p99():
    one = row(list(range(1000, 1230)), {"vision": 1.0})
    two = row(list(range(1230, 1460)), {"vision": 3.0}, repeat=1)
    (merged,) = merge([one, two, {**row([], {}), "error": "OutOfMemoryError"}])
    assert merged.milliseconds["max"] == 1.459 and merged.stages == {"vision": 2.0}
    assert merged.milliseconds["p99"] == pytest.approx(np.quantile(np.arange(1000, 1460), 0.99) / 1e3)
    assert "p99" not in merge([one])[0].milliseconds
    assert len(merge([one, row([1000] * 9, {"vision": 1.0}, mode="int8")])) == 2


def test_a_machine_that_slows_down_for_a_while_does_not_change_the_p50():
    """Ten configurations of 10 to 19 ms, three passes; all of the second pass runs 1.3 times slower."""
    rows = []
    for repeat, slow in enumerate((1.0, 1.3, 1.0)):
        for n in range(10):
            policy = {"act": {"cameras": {}, "n": n}}
            samples = [round(1000 * (10 + n) * slow)] * 160
            rows.append(row(samples, {"vision": 5.0 * slow}, repeat, policy=policy))
    found = paces(rows)
    assert found[5] == found[25] == 1.0 and found[15] == pytest.approx(1.3)
    for n, merged in enumerate(merge(rows)):
        assert merged.milliseconds["p50"] == pytest.approx(10 + n, rel=1e-3)
        assert merged.milliseconds["max"] == pytest.approx(1.3 * (10 + n), rel=1e-3), "a tail is told as it was"
        assert merged.stages == {"vision": pytest.approx(5.0)}


def test_without_repeats_the_pace_is_unknown_and_nothing_is_changed():
    rows = [row([1000 * (n + 1)] * 9, {}, policy={"act": {"cameras": {}, "n": n}}) for n in range(5)]
    assert paces(rows) == [1.0] * 5 and paces([]) == []


def test_frames_of_a_camera_count_as_the_cameras():
    (merged,) = merge([row([1000] * 9, {"vision": 1.0})])
    assert asdict(shape(merged)) == {"per_camera": 72, "other": 18, "actions": 8, "kv_per_token": 6}
    assert merged.point().terms == (1.0, 162.0, 8.0, 1000.0)


def test_impossible_settings_are_refused():
    for wrong in ({"samples": 29}, {"repeats": 0}, {"seconds": 0.0}, {"minutes": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SweepConfig(("cameras=1",), **wrong)
    with pytest.raises(ValueError, match="at least one axis"):
        SweepConfig(())


# ------------------------------------------------------------------------------------------ the prepared run


def test_the_prepared_run_for_a_gpu_machine_rehearses_on_a_processor(tmp_path):
    """The smoke mode goes through the same functions of the script, with tiny policies."""
    script = Path(__file__).parents[1] / "scripts/profile_target.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(script), "--smoke", str(tmp_path)], capture_output=True, text=True, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads((tmp_path / "act_state.json").read_text())
    assert profile["kind"] == "profile" and profile["verdict"]["hz"] == 20
    traces = [json.loads(path.read_text())["kind"] for path in tmp_path.glob("*trace*.json")]
    assert traces == ["trace"] * 2
    assert 1 <= len(read(tmp_path / "sweep").measured) <= 8  # as far as it got in its time
    assert (tmp_path / "clocks_before.csv").exists() and not list(tmp_path.glob("*.log"))


def test_the_prepared_run_never_sets_clocks_or_power():
    script = (Path(__file__).parents[1] / "scripts/profile_target.sh").read_text()
    asked = [line for line in script.splitlines() if "nvidia-smi" in line and "--query-gpu" in line]
    others = [line for line in script.splitlines() if "nvidia-smi" in line and line not in asked]
    assert len(asked) == 1 and all("command -v" in line or "echo" in line for line in others)


def test_the_prepared_run_refuses_what_it_does_not_know():
    script = Path(__file__).parents[1] / "scripts/profile_target.sh"
    done = subprocess.run([str(script), "--lock-clocks"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "allowed: --cpu, --smoke" in done.stderr
