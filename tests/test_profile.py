"""A profile from end to end: its file, its verdict, its tables and picture, on a machine with next to nothing."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from robotattn import cli
from robotattn.config import UsageError
from robotattn.latency import pictures, runs, schedule, tables, trace
from robotattn.latency.card import bound_rows, card, checked
from robotattn.latency.devices import DEVICES
from robotattn.latency.profile import ProfileConfig, profile, result_path
from robotattn.latency.runs import Run, verdict
from robotattn.latency.stages import STAGES, ControlStep
from robotattn.latency.subject import of_config, read_policy, resolve

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
SAMPLES = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def made(config):
    """One profile of a small policy: the result, the tables that came first, and where the files are."""
    folder, first = config.parent / "out", []
    asked = ProfileConfig(config=config, samples=SAMPLES, hz=20, mode=("eager", "bf16", "graph"), threads=1, out=folder)
    result = profile(asked, first=first.append)
    return SimpleNamespace(result=result, first=first[0], folder=folder, config=asked)


def test_the_file_holds_what_was_returned_and_every_part_of_a_report(made):
    result = made.result
    assert result == json.loads((made.folder / "profile.json").read_text())
    assert (result["schema"], result["kind"], result["mode"], result["recompiles"]) == (2, "profile", "eager", 0)
    assert list(result["stages"]) == [name for name in STAGES if name not in ("capture", "denoise")]
    for times in [*result["stages"].values(), result["staged"], result["step"]]:
        assert times["n"] == SAMPLES and 0 < times["min"] <= times["p50"] <= times["max"] and times["p99"] is None
    assert result["policy"]["act"]["chunk"] == 5 and result["fingerprint"] is None
    assert result["memory"]["process"] > 1e7 and result["environment"]["seed"] == 0
    assert len(result["cold_start"]["first_calls_ms"]) == 3 and "build_ms" in result["cold_start"]
    assert result["chosen"]["threads"] == 1 == result["environment"]["torch_threads"]


def test_the_cost_card_comes_first_and_agrees_with_the_policy(made):
    assert set(made.first) == {"card", "bounds"} and made.first["card"] == made.result["card"]
    found = made.result["card"]
    assert found["checked"] == {"agrees": True, "differs": []}
    assert (found["tokens"]["front"], found["tokens"]["wrist"], found["tokens"]["instruction"]) == (6, 4, 16)
    assert found["tokens"]["prefix"] == 28 and found["tokens"]["chunk"] == 5
    assert found["kv"]["per_token"] == 2 * 1 * 32 * 4  # keys and values, one decoder layer, 32 wide, float32


def test_a_card_that_is_wrong_is_named(config):
    subject = of_config(config, "cpu", None)
    step, wrong = ControlStep(subject.policy, subject.batcher, subject.length), card(subject.config, 16)
    wrong["tokens"]["front"], wrong["parameters"] = 7, 1
    found = checked(wrong, subject, step)
    assert not found["agrees"] and found["differs"][0] == "front: 7 by the closed form, 6 in the policy"
    assert found["differs"][1].startswith("parameters: 1 by the closed form")


def test_measured_stages_stand_beside_their_bounds(config):
    policy = read_policy(config)
    rows = bound_rows(policy, 16, DEVICES["h200"], measured_ms={"vision": 100.0, "prefix": None})["stages"]
    assert (
        rows["vision"]["bound_by"] == "host" and 0 < rows["vision"]["mbu"] < 1 and rows["vision"]["kind"] == "predicted"
    )
    assert "measured_ms" not in rows["prefix"] and rows["step"]["floor_ms"] >= rows["vision"]["floor_ms"]


def test_shares_and_the_split_add_up(made):
    shares = made.result["shares"]
    parts = sum(share for name, share in shares.items() if name in STAGES)
    assert parts + shares["unaccounted"] == pytest.approx(1, abs=0.2)  # medians of each: not exactly
    assert 0 <= shares["unaccounted"] < 0.1
    assert made.result["staged_equals_whole"]["largest_difference"] == 0


def test_a_mode_that_cannot_run_has_a_reason_and_no_speed(made):
    found = made.result["modes"]
    assert found["eager"]["parity"]["error"] == 0 and found["eager"]["step"]["n"] == SAMPLES
    assert found["bf16"]["parity"]["tolerance"] == 0.1
    assert found["graph"]["step"] is None and "CUDA graphs need a CUDA device" in found["graph"]["refused"]
    assert any(warning.startswith("mode graph: ") for warning in made.result["warnings"])


def test_a_mode_without_parity_is_refused_its_speed(config, monkeypatch):
    subject = of_config(config, "cpu", None)
    step = ControlStep(subject.policy, subject.batcher, subject.length)
    monkeypatch.setattr(runs, "prepare", lambda policy, mode, example: lambda batch: policy.act(batch) + 1.0)
    clock = SimpleNamespace(time=lambda work: (work(), 5_000_000))
    run = runs.ready("bf16", step, subject.inputs(1, 0), clock, lambda *told: None)
    assert run.step is None and run.first_call_ms == 5 and not run.parity["ok"]
    assert run.refused.startswith("no parity with eager float32: actions differ by 1")


def test_the_audit_names_the_kernel_of_every_attention(made):
    rows = [row for row in made.result["attention"] if row["mode"] == "eager"]
    assert [row["site"] for row in rows] == [
        "prefix.text.layer.attention", "prefix.text", "encoder.layers.0.attention", "decoder.layers.0.attention",
        "decoder.layers.0.cross",
    ]  # fmt: skip
    assert (rows[-1]["q"], rows[-1]["kv"]) == (5, 28)
    assert {row["mode"] for row in made.result["attention"]} == {"eager", "bf16"}


def test_the_single_times_are_kept_as_traces(made):
    paced = trace.read(made.folder / made.result["traces"]["paced"])
    single = trace.read(made.folder / made.result["traces"]["back to back"])
    assert (paced.hz, single.hz, len(paced.service), len(single.service)) == (20, None, SAMPLES, SAMPLES)
    assert single.shape == {"batch": 1, "cameras": 2, "prefix": 28, "actions": 5, "chunk": 5}
    assert max(single.service) / 1e6 == pytest.approx(made.result["step"]["max"])
    assert single.policy == made.result["policy"] and single.mode == "eager"


def test_the_paced_run_has_a_verdict_with_its_bound(made):
    said, paced = made.result["verdict"], made.result["paced"]
    assert said["hz"] == 20 and said["budget_ms"] == 50 and said["ticks"] == SAMPLES == paced["ticks"]
    assert said["pass"] is None if said["misses"] == 0 else said["pass"] is False
    assert paced["response"]["max"] >= paced["service"]["min"]


def replayed(ticks, slow=()):
    service = np.full(ticks, 1_000_000)
    service[list(slow)] = 30_000_000
    return schedule.replay(service, 20_000_000)


@pytest.mark.parametrize(
    ("paced", "kept", "said"),
    [
        (replayed(459), True, "PASS at 50 Hz in mode eager, budget 20 ms: 0 of 459 ticks missed, at most 1.00%"),
        (replayed(458), None, "UNDECIDED at 50 Hz"),
        (replayed(2000, slow=[7]), True, "PASS at 50 Hz in mode eager, budget 20 ms: 1 of 2000"),
        (replayed(459, slow=[7]), False, "FAIL at 50 Hz in mode eager, budget 20 ms: 1 of 459"),
    ],
)
def test_a_rate_is_kept_only_if_the_bound_of_the_miss_rate_says_so(paced, kept, said):
    found = verdict(50, 0, Run("eager"), paced)
    assert found["pass"] is kept
    assert tables.verdict({"verdict": found}).startswith(said)


def test_a_mode_that_was_refused_gets_no_verdict_and_io_comes_off_the_budget():
    found = verdict(50, 5.0, Run("graph", refused="no GPU"), None)
    assert (found["pass"], found["budget_ms"], found["miss_bound"]) == (None, 15, None)
    assert tables.verdict({"verdict": found}) == "UNDECIDED at 50 Hz in mode graph, budget 15 ms: no GPU"
    assert verdict(None, 0, Run("eager"), None) is None and tables.verdict({"verdict": None}) is None


def test_compiling_inside_the_window_costs_a_mode_its_figures(config, monkeypatch):
    subject = of_config(config, "cpu", None)
    step = ControlStep(subject.policy, subject.batcher, subject.length)
    counts = iter([3, 5])
    monkeypatch.setattr("robotattn.latency.measure.compiled_graphs", lambda: next(counts))
    ways = [Run("eager", step), Run("compile", step)]
    _, around = runs.timed(step, ways, subject.inputs(1, 0), 3, runs.Clock("cpu"), lambda *told: None)
    assert around["recompiles"] == 2 and len(ways[0].samples) == 3
    assert (ways[1].samples, ways[1].refused) == ((), "2 graphs were compiled while it was timed")


# ---------------------------------------------------------------------------------------------- tables and picture


def test_tables_say_how_their_figures_were_come_by(made):
    sheets = [*tables.first(made.result), *tables.measured(made.result)]
    kinds = {sheet.title.split(" on ")[0].split(":")[0]: sheet.kind for sheet in sheets}
    assert kinds == {
        "cost card": "closed form", "bounds": "predicted", "a control step": "measured here",
        "ways to run it": "measured here", "which attention ran": "measured here", "start-up probe": "measured here",
        "paced at 20 Hz": "measured here",
    }  # fmt: skip
    for sheet in sheets:
        assert all(len(row) == len(sheet.titles) for row in sheet.rows), sheet.title
        widths = {len(line.rstrip()) for line in tables.plain(sheet).splitlines()[1:]}
        assert widths and "None" not in tables.plain(sheet)


def test_plain_tables_are_aligned_words_left_and_numbers_right():
    sheet = tables.Sheet("t", "predicted", ("name", "ms"), [("ab", "1.5"), ("c", "12.25")])
    assert tables.plain(sheet) == "t [predicted]\n  name     ms\n  ab      1.5\n  c     12.25"


def test_the_same_call_in_every_layer_is_one_row():
    row = {
        "mode": "eager",
        "backend": "flash",
        "dtype": "float32",
        "q": 1,
        "kv": 9,
        "kv_least": 3,
        "mask": None,
        "calls": 7,
    }
    audit = [row | {"site": f"decoder.layers.{layer}.attention"} for layer in range(3)]
    sheet = tables._attention([*audit, row | {"site": "prefix.text"}])
    assert [(r[1], r[5], r[-2], r[-1]) for r in sheet.rows] == [
        ("decoder.layers.*.attention", "3 to 9", 7, 3), ("prefix.text", "3 to 9", 7, 1),
    ]  # fmt: skip


def test_the_picture_shows_budget_stages_and_jitter_and_reaches_for_nothing(made):
    text = (made.folder / made.result["picture"]).read_text()
    for said in ("budget 50 ms", "service, paced", "response to the schedule", "floor (predicted)", "vision"):
        assert said in text, said
    assert ("wake-up lateness" in text) == (made.result["paced"]["jitter"] is not None)
    assert "<metadata>" not in text and "file:" not in text


def test_without_matplotlib_there_is_no_picture(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert pictures.draw(made.result, {"back to back": [1_000_000]}) is None


# ------------------------------------------------------------------------------------------------ what is asked for


def test_a_name_means_a_checkpoint_or_a_configuration_by_what_it_is(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(str(config)) == ("config", config) and resolve(str(config.parent)) == ("checkpoint", config.parent)
    kind, shipped = resolve("act_pixels")
    assert kind == "checkpoint" and (shipped / "model.safetensors").is_file()
    assert resolve("assets/checkpoints/act_pixels") == (kind, shipped)
    assert resolve("act_pixels.yaml")[0] == resolve("configs/act_pixels.yaml")[0] == resolve("act_state")[0] == "config"
    assert resolve("runs/mine")[0] == "checkpoint"
    with pytest.raises(UsageError, match=r"mine.yaml: no such file; shipped configurations: act_.*act_pixels.yaml"):
        resolve("mine.yaml")
    with pytest.raises(
        UsageError,
        match=r"act_pix: no such checkpoint.*checkpoints: act_moving_pixels, act_pixels; configurations: act_",
    ):
        resolve("act_pix")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"samples": 0}, "samples: 0"),
        ({"mode": ("eager", "eager")}, "mode"),
        ({"mode": ()}, "mode"),
        ({"hz": 0.0}, "hz: 0.0"),
        ({"hz": 50.0, "io_ms": 20.0}, "io_ms: 20.0"),
        ({"instruction_tokens": 0}, "instruction_tokens: 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(made, wrong, why):
    with pytest.raises(ValueError, match=why):
        replace(made.config, **wrong)
    with pytest.raises(ValueError, match="either a checkpoint folder or a config"):
        ProfileConfig()


def test_what_cannot_be_profiled_is_refused_and_nothing_is_written(config, tmp_path):
    with pytest.raises(UsageError, match="device: warp9"):
        profile(ProfileConfig(config=config, device="warp9", out=tmp_path))
    with pytest.raises(UsageError, match=r"none\.yaml: No such file"):
        profile(ProfileConfig(config=tmp_path / "none.yaml", out=tmp_path))
    empty = tmp_path / "empty.yaml"
    empty.write_text("steps: 3")
    with pytest.raises(UsageError, match="has no policy"):
        profile(ProfileConfig(config=empty, out=tmp_path))
    assert not (tmp_path / "profile.json").exists()


def test_results_go_beside_the_run_or_where_they_are_asked_for(config, tmp_path):
    assert result_path(ProfileConfig(config=config)).as_posix() == "runs/small/profile.json"
    assert result_path(ProfileConfig(config=config, out=tmp_path)) == tmp_path / "profile.json"
    assert result_path(ProfileConfig(config=config, out=tmp_path / "a.json")) == tmp_path / "a.json"


def test_the_command_takes_a_name_and_says_where_the_file_is(made, monkeypatch, capsys):
    asked = []

    def run(config, progress, first, seconds):
        asked.append(config)
        first({"card": made.result["card"], "bounds": made.result["bounds"]})
        return made.result

    monkeypatch.setattr("robotattn.latency.profile.profile", run)
    assert cli.main(["profile", "act_state.yaml", "--hz", "50", "--mode", "eager", "bf16", "--out", "here"]) == 0
    assert asked[0].config.name == "act_state.yaml" and asked[0].mode == ("eager", "bf16") and asked[0].hz == 50
    shown = capsys.readouterr()
    assert shown.out.index("cost card [closed form]") < shown.out.index("a control step [measured here]")
    assert json.loads(shown.out.splitlines()[-1])["file"] == "here/profile.json"
    assert "warning: mode graph: CUDA graphs need" in shown.err
    shipped = str(resolve("act_pixels")[1])
    assert cli.main(["profile", "--checkpoint", shipped]) == 0 and str(asked[1].checkpoint) == shipped
    with pytest.raises(SystemExit):
        cli.main(["profile", "act_state.yaml", "--mode", "turbo"])


def test_threads_are_set_back_after_a_profile(made):
    assert torch.get_num_threads() >= 1 and made.result["environment"]["torch_threads"] == 1
