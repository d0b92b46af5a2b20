"""The frontier's table, picture and page."""

import shlex
import sys
from pathlib import Path

import pytest

from robotattn import cli, evaluate, frontier, frontier_page, frontier_table
from robotattn.control.clock import Fixed
from robotattn.flags import parse
from robotattn.frontier_cells import FrontierConfig, planned
from robotattn.latency import bounds, trace
from robotattn.statistics import paired_difference

sys.path.insert(0, str(Path(__file__).parent))
from frontiers import FLOW, TOKENS, asked, two


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs, one of each kind of policy."""
    return two(tmp_path_factory.mktemp("runs"))


# ------------------------------------------------------------------------------------------ the table


def made(cell: str, device: str, rate: float, p99: float | None, soon: float = 0.0, seconds: float | None = 2.0):
    """A row with what the front is made of."""
    return {
        "cell": cell,
        "device": device,
        "success": {"rate": rate},
        "success_within_3_s": {"rate": soon},
        "time_to_success_s": None if seconds is None else {"mean": seconds},
        "latency_ms": {"p50": 1.0, "p99": p99},
    }


def test_the_front_of_each_device_is_what_no_other_row_beats():
    rows = [
        made("fast", "a", 0.7, 5.0),
        made("good", "a", 0.9, 20.0),
        made("worse and slower", "a", 0.8, 30.0),
        made("as good but slower", "a", 0.9, 25.0),
        made("as fast but worse", "a", 0.6, 5.0),
        made("unknown p99", "a", 1.0, None),
        made("later", "b", 0.5, 9.0, soon=0.2),
        made("sooner", "b", 0.5, 9.0, soon=0.3),
        made("sooner, too", "b", 0.5, 9.0, soon=0.3),
        made("sooner but slower", "b", 0.5, 9.0, soon=0.3, seconds=2.5),
        made("never", "c", 0.0, 9.0, seconds=None),
    ]
    frontier_table.mark_fronts(rows)
    assert [row["cell"] for row in rows if row["front"]] == ["fast", "good", "sooner", "sooner, too", "never"]


def test_differences_are_paired_by_seed_with_the_same_handling_without_latency(runs, tmp_path: Path):
    results = {"fixed_0ms-hold": (1, 1, 1, 0), "fixed_150ms-hold": (0, 1, 0, 0), "fixed_150ms-naive": (0, 0, 0, 1)}
    found = []
    for cell in planned(asked(runs[:1], tmp_path, late=("hold", "naive")))[0]:
        for name, outcomes in results.items():
            if cell.name == f"act-{name}-1":
                data = evaluate.evaluate(cell.config)
                episodes = [{"seed": 9 - n, "success": bool(one), "time": 1.5} for n, one in enumerate(outcomes)]
                data |= {"rows": episodes, "success": evaluate.success_rate(episodes)}
                found.append(frontier_table.row(cell, data, tmp_path))
    still, held, naive = frontier_table.rows(found)
    expected = paired_difference([1, 1, 1, 0], [0, 1, 0, 0])
    against = held["against_no_latency"]
    assert (against["cell"], against["difference"]) == (still["cell"], -0.5)
    assert (against["low"], against["high"], against["only_a"]) == (expected.low, expected.high, 2)
    assert (still["against_no_latency"], naive["against_no_latency"]) == (None, None)  # naive ran under latency only
    best = held["against_best_handling"]  # as many successes, none within 3 s: the mean time decides, and it is equal
    assert best is None
    assert naive["against_best_handling"]["cell"] == held["cell"]
    assert held["time_to_success_s"] == {"mean": 1.5, "median": 1.5}


@pytest.mark.usefixtures("no_picture")
def test_a_row_tells_costs_lateness_and_where_its_latency_is_from(runs, tmp_path: Path):
    result = frontier.frontier(asked(runs[1:], tmp_path, devices=("h200", "fixed:150ms"), late=("naive",)))
    predicted, late = result["rows"]
    work = bounds.work(FLOW, TOKENS)
    assert predicted["flops"] == sum(one.flops * one.repeats for one in work.values())
    assert predicted["kv_bytes"] == bounds.kv_bytes(FLOW, TOKENS)["total"]
    assert (predicted["tokens"], predicted["cameras"], predicted["chunk"]) == ({"prefix": 21, "actions": 4}, 0, 4)
    assert (predicted["miss_rate"], late["miss_rate"]) == (0.0, 1.0)  # of 100 ms periods
    assert (predicted["latency"]["kind"], late["latency"]["kind"]) == ("predicted", "assumed")
    kept = tmp_path / predicted["latency"]["trace"]
    assert trace.read(kept).service[0] == round(1e6 * predicted["latency_ms"]["p99"])
    assert late["latency"]["trace"] is None
    assert late["age_ms"]["mean"] > 150 > predicted["age_ms"]["mean"]
    assert (tmp_path / late["file"]).is_file()


def test_the_page_stands_alone_and_says_how_to_make_it_again(runs, tmp_path: Path):
    config = asked(runs, tmp_path / "o u t", devices=("orin", "fixed:0ms"), late=("hold", "naive"), hz=20)
    result = frontier.frontier(config)
    page = (config.out / "frontier.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert "predicted from the roofline and launch floor of NVIDIA Jetson AGX Orin" in page
    assert "evaluated at 20 Hz, but the policy&#39;s actions are 0.1 s apart" in page
    words = shlex.split(frontier_page.command(result["config"]))
    assert words[:2] == ["robotattn", "frontier"]
    assert parse(FrontierConfig, words[2:], cli.frontier) == config
    assert (config.out / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_in_the_picture_handlings_of_one_latency_stand_side_by_side_and_no_latency_stands_left():
    rows = [made(f"{late} {p99}", "a", 0.5, p99) for late in ("hold", "naive") for p99 in (0.0, 40.0)]
    rows = [row | {"late": row["cell"].split()[0], "execute": 1} for row in rows]
    place = frontier_page.places(rows)
    assert place["hold 0.0"] < place["naive 0.0"] < place["hold 40.0"] < 40.0 < place["naive 40.0"]
    assert place["naive 40.0"] / place["hold 40.0"] == pytest.approx(frontier_page.SPREAD)


def test_a_clock_of_a_cell_is_what_the_source_says(runs, tmp_path: Path):
    (cell,), _ = planned(asked(runs[:1], tmp_path, devices=("fixed:150ms",)))
    assert cell.config.timing.clock() == Fixed(150_000_000)
    (cell,), _ = planned(asked(runs[:1], tmp_path, devices=("h200",)))
    assert cell.config.timing.clock().latency(3, 5) == cell.source.trace_of.service[0]
