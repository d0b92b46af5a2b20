"""All experiments together: every verdict, the files, the page, and the command."""

import json
import math
import re
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from robotattn import cli
from robotattn.experiments import suite
from robotattn.experiments.drawing import png
from robotattn.experiments.page import render
from robotattn.experiments.result import Result, row

SHORT = ("e1", "e3", "e4", "e5", "e6", "e7")  # e2 trains for a while: its parts are tested below


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder and the answer of a run of all but the trainings."""
    out = tmp_path_factory.mktemp("experiments")
    return out, suite.experiments(suite.ExperimentsConfig(SHORT, out))


def test_every_verdict_agrees(ran):
    _, answer = ran
    assert answer["differs"] == []
    assert answer["agrees"]
    assert [one["name"] for one in answer["experiments"]] == list(SHORT)
    assert min(len(one["rows"]) for one in answer["experiments"]) >= 8


def test_files_hold_rows_series_and_pictures(ran):
    out, answer = ran
    for one in answer["experiments"]:
        read = json.loads((out / f"{one['name']}.json").read_text())
        assert read["schema"] == 1
        assert read["kind"] == "experiment"
        assert read["rows"] == one["rows"]
        assert read["series"]
        assert (out / f"{one['name']}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("*.part"))


def test_the_page_needs_nothing_beside_it(ran):
    out, answer = ran
    page = (out / suite.PAGE).read_text()
    assert page.count("data:image/png;base64,") == len(SHORT)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert all(f'id="{name}"' in page for name in SHORT)
    total = answer["rows"]
    assert f"{total} of {total} measurements agree" in page


def made_up(measured: float) -> Result:
    rows = [row("a <quantity>", "< 1", measured, most=1.0)]
    return Result("Made up", "A text.", rows, Figure(figsize=(1, 1)), "A caption.", {"x": [1.0]})


@pytest.mark.parametrize(("measured", "code"), [(0.5, 0), (2.0, 1), (math.nan, 1)])
def test_the_command_exits_with_1_if_a_verdict_differs(measured: float, code: int, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(suite.EXPERIMENTS, "e2", lambda progress: made_up(measured))
    assert cli.main(["experiments", "e2", "--out", str(tmp_path)]) == code
    said = capsys.readouterr()
    last = json.loads(said.out.strip().splitlines()[-1])
    assert last["command"] == "experiments"
    assert last["agrees"] is (code == 0)
    assert last["differs"] == ([] if code == 0 else ["e2: a <quantity>"])
    assert ("differs from the published figure" in said.err) == bool(code)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e2.json", "e2.png", "experiments.html"]


def test_an_unknown_experiment_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["experiments", "e8"])
    assert stopped.value.code == 2
    assert "e8" in capsys.readouterr().err


def test_a_page_escapes_what_it_shows_and_a_figure_gives_the_same_bytes_again():
    result = replace(made_up(0.5), title="<b>")
    told = {"name": "e2", **result.plain(), "seconds": 1.0, "versions": {"torch": "2"}}
    page = render([(told, b"x")])
    assert "a &lt;quantity&gt;" in page
    assert "<b>" not in page
    assert png(result.figure) == png(result.figure)
