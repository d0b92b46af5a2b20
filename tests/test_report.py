"""The report: one self-contained page that says what is missing instead of inventing it."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from robotattn import video
from robotattn.config import UsageError
from robotattn.latency.profile import ProfileConfig, profile
from robotattn.report import ReportConfig, gather, report

VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Collects tags and text, and checks that what is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def rate(successes, episodes, low, high):
    return {"successes": successes, "episodes": episodes, "rate": successes / episodes, "low": low, "high": high}


MACHINE = {"versions": {"torch": "2.9", "mujoco": "4.0.0"}, "renderer": "llvmpipe", "device": "cpu", "torch_threads": 1}
STAGE = {"n": 60, "p50": 1.25, "p90": 2.5, "p99": None, "p99.9": None, "min": 1.0, "max": 7.75, "mean": 1.5}


def evaluation(folder):
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:, :, 0] = 255
    video.write(folder / "evaluation_videos" / "episode_0000.mp4", [frame] * 4, 10)
    video.write_png(folder / "evaluation_videos" / "episode_0000.png", frame)
    files = {"video": "evaluation_videos/episode_0000.mp4", "filmstrip": "evaluation_videos/episode_0000.png"}
    film = files | {"index": 0, "instruction": "pick up <b>拿</b>", "reason": "time_limit", "frames": 4}
    return {
        "schema": 1, "kind": "evaluation", "machine": MACHINE, "warnings": ["mujoco is 4.0.0 here, trained with 3.0.0"],
        "config": {"agent": "policy", "execute": 4, "objects": 6, "phrases": "heldout"},
        "success": rate(48, 50, 0.8654, 0.9890), "reasons": {"success": 48, "time_limit": 2},
        "failures": {"not_lifted": 2}, "steps_to_success": {"mean": 17.4, "median": 17, "mean_seconds": 1.74},
        "by": {"objects": {"6": rate(48, 50, 0.8654, 0.9890)}, "colour": {}, "language": {}}, "rows": [],
        "videos": [film],
    }  # fmt: skip


def profiled(folder):
    """What `robotattn profile` writes, from a run of the smallest policy, with figures that are easy to find."""
    config = folder / "small.yaml"
    config.write_text("policy: {act: {objects: true, width: 32, feedforward: 32, text_width: 16, chunk: 2}}")
    result = profile(ProfileConfig(config=config, samples=8, hz=20, threads=1, mode=("eager", "graph"), out=folder))
    result["stages"]["vision"] |= STAGE
    result["step"] |= STAGE | {"refused": {"p99": "needs 459 samples, has 60"}}
    result["verdict"] |= {"pass": True, "misses": 0, "ticks": 500, "miss_bound": 0.00917, "why": None}
    result["environment"] |= {"cpu": "a processor"}
    return result


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    return folder, profiled(folder)


@pytest.fixture
def results(tmp_path, once):
    folder, small = once
    run = tmp_path / "act"
    (run / "checkpoint").mkdir(parents=True)
    (run / "evaluation.json").write_text(json.dumps(evaluation(run)))
    (run / "profile.json").write_text(json.dumps(small))
    (run / "profile.svg").write_text((folder / "profile.svg").read_text())
    (run / "checkpoint" / "evaluation.json").write_text("{}")
    lines = [{"minutes": 0.1 * k, "loss": 1 / (k + 1), "position_error": 0.1 / (k + 1)} for k in range(9)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 1')
    return tmp_path


def test_the_page_shows_every_result_and_reaches_for_nothing_outside(results):
    path = report(ReportConfig((results,)))
    assert path == results / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert "&#39;schema&#39;" not in text, "a result is shown raw"
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", re.sub(r"base64,[A-Za-z0-9+/=]+", "", text))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe")
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("xlink:href", attributes.get("href", "#")).startswith("#")
    assert {"video", "img", "svg"} <= {tag for tag, _ in page.tags}
    for said in (
        "96.0 % 48 / 50 86.5 % to 98.9 %",
        "policy, execute 4, objects 6, phrases heldout",
        "17.4 (1.7 s)",
        "mujoco is 4.0.0 here, trained with 3.0.0",
        "not lifted",
        "“pick up <b>拿</b>”, time limit after 4 steps",
        "parameters (random weights) on a processor, 1 thread, batch 1.",
        "whole step (eager) 1.25 2.5 – 7.75 60",
        "p99 needs 459 samples, has 60",
        "PASS at 20 Hz in mode eager, budget 50 ms: 0 of 500 ticks missed, at most 0.92%",
        "CUDA graphs need a CUDA device",
        "cost card closed form",
        "a control step measured here",
        "which attention ran measured here",
        "latency of a step or chunk each labelled",
        "OpenVLA RTX 4090 166 published",
        "small a processor 1.25 measured here p50 of a control step, eager",
        "training loss",
        "llvmpipe",
    ):
        assert said in page.text, said


def test_two_pages_of_the_same_results_are_the_same(results):
    first = report(ReportConfig((results,))).read_text()
    assert report(ReportConfig((results,), out=results / "pages" / "two.html")).read_text() == first


def test_what_is_missing_is_said_with_the_command_that_measures_it(tmp_path):
    (tmp_path / "other.json").write_text("[1]")
    page = Page(report(ReportConfig((tmp_path,))).read_text())
    for command in ("evaluate CHECKPOINT", "--videos 4", "train CONFIG.yaml", "profile CHECKPOINT --hz 50"):
        assert f"robotattn {command}" in page.text or command in page.text
    assert "%" not in page.text.replace("95 %", "")


def test_damaged_and_newer_files_and_lost_videos_are_named(results):
    (results / "act" / "profile.json").write_text('{"kind": "pro')
    (results / "act" / "second.json").write_text(json.dumps({"kind": "evaluation", "schema": 99}))
    (results / "act" / "evaluation_videos" / "episode_0000.mp4").unlink()
    page = Page(report(ReportConfig((results,))).read_text())
    assert "act: profile.json cannot be read" in page.text
    assert "act: second.json has schema 99, this program reads 1" in page.text
    assert "video not embedded: evaluation_videos/episode_0000.mp4" in page.text


def test_files_inside_a_checkpoint_are_not_results(results):
    (run,) = gather([results])
    assert run.name == "act" and len(run.evaluations) == 1 and len(run.metrics) == 9


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        report(ReportConfig((tmp_path / "nowhere",)))
    with pytest.raises(ValueError, match="folders"):
        ReportConfig(())


def test_a_sweep_is_shown_with_its_budgets_its_fits_and_its_picture(tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "sweep.png").write_bytes(b"a picture")
    row = {"kind": "act", "mode": "eager", "statistic": "p99", "hz": 50, "cameras": {"36": 3}, "tokens": 140}
    free = {"tokens": None, "extrapolated": False, "cameras": {"36": None}}
    sweep = {
        "schema": 1, "kind": "sweep_result",
        "budgets": [row | {"extrapolated": True}, row | free],
        "fits": {"p50": {"act eager": {"n": 24, "r2_held_out": 0.991, "error": 0.034}}},
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(sweep))
    page = Page(report(ReportConfig((tmp_path,))).read_text())
    assert "sweep: sweep" in page.text
    for said in ("act eager p99 50 140* 3 of 36", "any any of 36", "p50, act eager 24 0.991 3.4%"):
        assert said in page.text, said
    assert [attributes["src"][:21] for tag, attributes in page.tags if tag == "img"] == ["data:image/png;base64"]
