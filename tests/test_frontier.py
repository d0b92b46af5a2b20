"""The frontier: which cells there are, whose latencies they have, that a run goes on where it stopped, the front."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from robotattn import cli, evaluate, frontier, frontier_cells
from robotattn.config import UsageError, to_dict
from robotattn.frontier_cells import FrontierConfig, conditions, contradiction, planned
from robotattn.latency import bounds, sources
from robotattn.latency.devices import DEVICES
from robotattn.latency.subject import written
from robotattn.policies import build
from robotattn.policies.base import CANNOT_CONTINUE

sys.path.insert(0, str(Path(__file__).parent))
from frontiers import ACT, BINS, FLOW, TOKENS, WORDS, asked, recorded, save, two


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs, one of each kind of policy."""
    return two(tmp_path_factory.mktemp("runs"))


# ------------------------------------------------------------------------------------------ planning


def test_cells_are_all_combinations_and_what_contradicts_itself_is_left_out_with_a_reason(runs, tmp_path: Path):
    late = ("hold", "skip-executed", "real-time")
    cells, left_out = planned(asked(runs, tmp_path, late=late, execute=(1, 2, 8)))
    ways = [(cell.policy, cell.config.timing.late, cell.config.execute) for cell in cells]
    act = [("act", "hold", 1), ("act", "hold", 2), ("act", "skip-executed", 1)]
    flow = [("flow", way, n) for way, n in (("hold", 1), ("hold", 2), ("skip-executed", 1), ("real-time", 1))]
    assert ways == [way for way in act + flow for _ in WORDS]
    assert left_out == [
        "act, hold: execute: 8 actions, the policy's chunk has 4",
        f"act, real-time: {CANNOT_CONTINUE}",
        "flow, hold: execute: 8 actions, the policy's chunk has 4",
    ]
    assert {cell.config.seed for cell in cells} == {5000}
    assert len({cell.path for cell in cells}) == len(cells)
    assert contradiction(build(BINS), 4, "real-time", 1) == CANNOT_CONTINUE
    assert contradiction(build(FLOW), 4, "real-time", 2) == (
        "execute: 2, allowed with real-time is 1: it does not count actions"
    )


def test_two_runs_of_one_name_are_told_apart_and_one_given_twice_is_refused(runs, tmp_path: Path):
    other = save(tmp_path / "later" / "act", ACT)
    first = runs[0].parent.name
    assert frontier_cells.names([runs[0], other / "checkpoint"]) == [f"{first}/act", "later/act"]
    with pytest.raises(UsageError, match="one is there twice"):
        frontier_cells.names([runs[0], runs[0] / "checkpoint"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoints": ()}, "checkpoints: none"),
        ({"late": ("hold", "hold")}, "late: hold hold, allowed is at least one, none twice"),
        ({"episodes": 0}, "episodes: 0"),
        ({"execute": (0,)}, "execute: 0"),
        ({"minutes": 0.0}, "minutes: 0.0"),
    ],
)
def test_a_wrong_value_is_named(changes, said: str):
    with pytest.raises(ValueError, match=said):
        FrontierConfig(**({"checkpoints": (Path("a"),)} | changes))


# ------------------------------------------------------------------------------------------ latencies


def test_of_a_folder_of_traces_that_of_the_very_policy_is_taken(tmp_path: Path):
    folder = tmp_path / "traces"
    recorded(folder, "act_trace.json", ACT, *range(1, 501))
    recorded(folder, "act_trace_paced.json", ACT, 7, hz=20.0)
    recorded(folder, "eight_trace.json", ACT, 9, shape={"batch": 8})
    older = {"act": {k: v for k, v in written(dataclasses.replace(ACT, chunk=8))["act"].items() if k != "latent"}}
    recorded(folder, "wide_trace.json", ACT, 1, 3, policy=older, environment={"cpu": "a processor"})
    (device,) = sources.devices([str(folder)])
    assert device.name == "cpu"
    found = device.latencies(ACT, TOKENS)
    assert (found.p50, found.p99, found.kind, found.word) == (250.5, pytest.approx(495.01), "measured", None)
    assert found.text == "measured on cpu, eager, n = 500 (act_trace.json)"
    wide = device.latencies(dataclasses.replace(ACT, chunk=8), TOKENS)  # of a time before the field `latent`
    assert (wide.p50, wide.p99) == (2.0, None)  # two samples do not say where the slowest hundredth begins
    assert "a processor" in wide.text
    assert "none of 4 traces is of this policy" in device.latencies(FLOW, TOKENS)
    recorded(folder, "again_trace.json", ACT, 2)
    (device,) = sources.devices([str(folder)])
    assert "act_trace.json, again_trace.json are all of this policy" in device.latencies(ACT, TOKENS).replace(
        "again_trace.json, act_trace.json", "act_trace.json, again_trace.json"
    )


@pytest.mark.parametrize("name", ["h200", "orin"])
@pytest.mark.parametrize("config", [ACT, FLOW, BINS], ids=["act", "flow", "bins"])
def test_a_predicted_latency_is_the_longer_of_roofline_and_launches_added_up_over_the_stages(name: str, config):
    device, milliseconds = DEVICES[name], 0.0
    for work in bounds.work(config, TOKENS).values():
        moved = work.repeats * (work.weight_bytes + work.read_bytes + work.written_bytes) + work.once_bytes
        arithmetic = work.repeats * work.flops / device.flops["float32"]
        launches = (work.repeats * work.kernels + work.once_kernels) * 5e-6
        milliseconds += 1e3 * max(arithmetic, moved / device.bandwidth, launches)
    (found,) = (one.latencies(config, TOKENS) for one in sources.devices([name]))
    assert found.p50 == found.p99 == pytest.approx(milliseconds, rel=1e-12)
    assert set(found.trace_of.service) == {round(1e6 * milliseconds)}
    assert (found.kind, found.tail, found.trace_of.synthetic) == ("predicted", False, True)
    for part in (f"predicted from the roofline and launch floor of {device.name}", "no p99", device.source):
        assert part in found.text
        assert part in found.trace_of.source


def test_words_of_a_clock_are_assumptions(tmp_path: Path):
    still, wide = (one.latencies(ACT, TOKENS) for one in sources.devices(["fixed:0ms", "lognormal:80ms:200ms"]))
    assert (still.p50, still.p99, still.is_zero, still.word) == (0.0, 0.0, True, "fixed:0ms")
    assert (wide.p50, wide.p99, wide.is_zero, wide.kind, wide.tail) == (80.0, 200.0, False, "assumed", True)


def test_a_device_that_means_nothing_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"devices: h2000: no such file or folder; allowed is .*h200, .* fixed:80ms"):
        sources.devices(["h2000"])
    with pytest.raises(UsageError, match="devices: orin is there twice"):
        sources.devices(["orin", "orin"])
    with pytest.raises(UsageError, match=r"no \*_trace.json in it"):
        sources.devices([str(tmp_path)])
    (tmp_path / "bad_trace.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad_trace.json: kind"):
        sources.devices([str(tmp_path)])


def test_two_folders_of_one_device_have_two_names(tmp_path: Path):
    words = [str(recorded(tmp_path / name, "act_trace.json", ACT, 5).parent) for name in ("old", "new")]
    assert [one.name for one in sources.devices(words)] == ["cpu (old)", "cpu (new)"]


# ------------------------------------------------------------------------------------------ running


@pytest.mark.usefixtures("no_picture")
def test_a_second_run_runs_nothing_and_a_killed_one_loses_the_cell_in_flight(runs, tmp_path: Path, monkeypatch):
    config = asked(runs, tmp_path / "out", devices=("fixed:0ms", "h200"))
    calls: list[tuple] = []
    first = frontier.frontier(config, lambda *told: calls.append(told))
    assert first["cells"]["run"] == len(first["rows"]) == 4
    assert {(what, total) for what, _, total, _ in calls} == {("frontier", 8)}  # one bar: two episodes of four cells
    assert [calls[0][3], calls[-1][3]] == ["act-fixed_0ms-hold-1", "flow-h200-hold-1"]
    assert calls[-1][1] == 8
    assert json.loads((tmp_path / "out" / "frontier.json").read_text())["rows"] == first["rows"]

    monkeypatch.setattr(frontier, "evaluate", lambda *told: pytest.fail("a cell was run again"))
    second = frontier.frontier(dataclasses.replace(config, workers=2))
    assert (second["cells"]["there"], second["cells"]["run"], second["rows"]) == (4, 0, first["rows"])

    lost = tmp_path / "out" / "cells" / "flow-fixed_0ms-hold-1.json"
    lost.rename(lost.with_name(f"{lost.name}.123.part"))  # what a kill in the middle of writing leaves
    ran = []
    monkeypatch.setattr(frontier, "evaluate", lambda one, shown: ran.append(one.out) or evaluate.evaluate(one, shown))
    third = frontier.frontier(config)
    assert ran == [lost]
    assert third["rows"] == first["rows"]


@pytest.mark.usefixtures("no_picture")
def test_a_cell_that_was_made_otherwise_is_an_error_that_names_it(runs, tmp_path: Path, capsys):
    folder = tmp_path / "traces"
    recorded(folder, "act_trace.json", ACT, 20, 30)
    config = asked(runs[:1], tmp_path / "out", devices=(str(folder),))
    frontier.frontier(config)
    with pytest.raises(UsageError, match=r"act-cpu-hold-1.json: was made with episodes 2, now 3; name another --out"):
        frontier.frontier(dataclasses.replace(config, episodes=3))
    recorded(folder, "act_trace.json", ACT, 20, 31)
    with pytest.raises(UsageError, match=r"was made with timing.latency_trace act-cpu-\w{8}.json, now act-cpu-"):
        frontier.frontier(config)
    recorded(folder, "act_trace.json", ACT, 20, 30)
    frontier.frontier(config)
    words = ["frontier", str(runs[0]), "--devices", str(folder), "--late", "hold", "--out", str(config.out)]
    assert cli.main([*words, "--episodes", "2", "--seed", "1"]) == 2
    assert "act-cpu-hold-1.json: was made with seed 5000, now 1" in capsys.readouterr().err


def test_another_checkpoint_of_the_same_name_is_another_condition():
    config = to_dict(evaluate.EvaluateConfig(checkpoint=Path("a"), out=Path("b")))
    other = to_dict(evaluate.EvaluateConfig(checkpoint=Path("c"), out=Path("d"), workers=1, batch=4))
    same, changed = {"sha256": {"model": "1"}}, {"sha256": {"model": "2"}}
    assert conditions(config, same) == conditions(other, same)
    assert conditions(config, same) != conditions(config, changed)


def test_what_the_time_does_not_allow_is_not_begun_and_comes_the_next_time(runs, tmp_path: Path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(frontier.time, "monotonic", lambda: clock[0])

    def slow(one, shown):
        clock[0] += 25.0
        return evaluate.evaluate(one, shown)

    monkeypatch.setattr(frontier, "evaluate", slow)
    config = asked(runs, tmp_path, minutes=1.0)
    first = frontier.frontier(config)  # a third cell would end after 75 s
    assert [row["cell"] for row in first["rows"]] == ["act-fixed_0ms-hold-1", "act-fixed_150ms-hold-1"]
    assert first["missing"] == ["flow-fixed_0ms-hold-1", "flow-fixed_150ms-hold-1"]
    assert "Not complete: 2 cells are missing" in (tmp_path / "frontier.html").read_text()
    second = frontier.frontier(config)
    assert (len(second["rows"]), second["missing"]) == (4, [])


@pytest.mark.usefixtures("no_picture")
def test_the_command_ends_with_tables_and_a_line_of_json_and_says_what_it_left_out(runs, tmp_path: Path, capsys):
    folder = tmp_path / "traces"
    recorded(folder, "act_trace.json", ACT, 20, 30)
    words = [*map(str, runs), "--devices", str(folder), "fixed:0ms", "--late", "hold", "naive", "--episodes", "2"]
    words += ["--workers", "0"]
    assert cli.main(["frontier", *words, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "warning: left out: flow, cpu: " in said.err
    assert "none of 1 traces is of this policy" in said.err
    last = json.loads(said.out.splitlines()[-1])
    assert last["cells"]["run"] == 6
    assert len(last["left_out"]) == 1
    assert "flow: 0 cameras, chunk 4, 21 + 4 tokens" in said.out
    assert cli.main(["frontier", str(runs[1]), "--devices", str(folder), "--out", str(tmp_path / "none")]) == 2
    assert "no cell is left" in capsys.readouterr().err
    assert cli.main(["frontier", str(tmp_path / "nothing"), "--out", str(tmp_path / "none")]) == 2
