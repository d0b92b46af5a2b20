"""Two results side by side, and the exit code that a regression has (robotattn/compare.py)."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robotattn.compare import CompareConfig, compare, difference, ratio, resampled
from robotattn.config import UsageError
from robotattn.latency import trace
from robotattn.statistics import wilson


def evaluation(path: Path, outcomes: dict[int, bool], **env: Any) -> Path:
    rows = [{"seed": seed, "success": success} for seed, success in outcomes.items()]
    data = {"schema": 1, "kind": "evaluation", "config": {"execute": 1}, "env": {"hz": 10, **env}, "rows": rows}
    path.write_text(json.dumps(data))
    return path


def latencies(path: Path, milliseconds: np.ndarray, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """A trace with these samples; what reads the samples of a trace is tested with the trace."""
    data = {
        "schema": 1,
        "kind": "trace",
        "environment": {"device": "cpu", "cpu": "a chip", "torch_threads": 1},
        "shape": {"batch": 1},
        "service": [round(1e6 * value) for value in milliseconds],
        "hz": None,
    }
    path.write_text(json.dumps(data | changes))
    monkeypatch.setattr("robotattn.compare.samples", lambda path, data: np.array(data["service"]) / 1e6)
    return path


def draw(n: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return scale * np.random.default_rng(seed).gamma(50.0, 0.1, n)


def worst(path: Path, of: int) -> dict[int, bool]:
    return {seed: seed >= of for seed in range(100)}


def test_equal_seeds_are_paired_and_the_discordant_ones_decide(tmp_path):
    """90 and 80 of 100 over the same seeds, all 10 lost by B: McNemar p = 2 / 2^10, and a regression."""
    a = evaluation(tmp_path / "a.json", {seed: seed >= 10 for seed in range(100)})
    b = evaluation(tmp_path / "b.json", {seed: seed >= 20 for seed in reversed(range(100))})
    result = compare(CompareConfig(a, b))
    (row,) = result["rows"]
    assert row["paired"] and (row["only_a"], row["only_b"]) == (10, 0) and row["p"] == pytest.approx(2 / 2**10)
    assert row["change"] == pytest.approx(-0.1) and row["high"] < 0 and result["regression"]
    assert (
        not compare(CompareConfig(b, a))["regression"]
        and compare(CompareConfig(b, a))["rows"][0]["verdict"] == "better"
    )
    assert not compare(CompareConfig(a, b, tolerance=0.1))["regression"]  # the interval reaches over the tolerance


def test_other_seeds_are_not_paired(tmp_path):
    a = evaluation(tmp_path / "a.json", {seed: seed >= 10 for seed in range(100)})
    b = evaluation(tmp_path / "b.json", {1000 + seed: seed >= 15 for seed in range(100)})
    (row,) = compare(CompareConfig(a, b))["rows"]
    assert not row["paired"] and row["change"] == pytest.approx(-0.05) and row["low"] < 0 < row["high"]
    assert row["verdict"] == "no significant change"


def test_times_and_tries_are_compared_where_both_tell_of_them(tmp_path):
    """Of four seeds B is as successful, but twice later than 3 s, and once only at the second try."""
    outcomes = dict.fromkeys(range(4), True)
    a, b, old = (evaluation(tmp_path / f"{name}.json", outcomes) for name in "abc")
    for path, times, tries in ((a, [1, 2, 3, 3], [1, 1, 1, 1]), (b, [1, 3, 3.1, 6], [1, 1, 2, 1])):
        data = json.loads(path.read_text())
        for row, time, tried in zip(data["rows"], times, tries, strict=True):
            row |= {"time": time, "tries": tried}
        path.write_text(json.dumps(data))
    rows = {row["quantity"]: (row["a"], row["b"], row["only_a"]) for row in compare(CompareConfig(a, b))["rows"]}
    assert rows == {
        "success": (1.0, 1.0, 0),
        "success within 3 s": (1.0, 0.5, 2),
        "success at first try": (1.0, 0.75, 1),
    }
    assert [row["quantity"] for row in compare(CompareConfig(a, old))["rows"]] == ["success"]


def test_the_folder_of_an_evaluation_names_it(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        evaluation(tmp_path / name / "evaluation.json", {1: True, 2: name == "a"})
    (row,) = compare(CompareConfig(tmp_path / "a", tmp_path / "b"))["rows"]
    assert (row["a"], row["b"]) == (1.0, 0.5)
    with pytest.raises(UsageError, match="Is a directory"):
        compare(CompareConfig(tmp_path, tmp_path))


def test_the_unpaired_interval_is_newcombes_published_example():
    """Newcombe 1998, table II, 56/70 against 48/80 (method 10): 0.0524 to 0.3339 for the first minus the second."""
    first, second = [True] * 56 + [False] * 14, [True] * 48 + [False] * 32
    found = difference(second, first)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_an_interval_of_two_perfect_rates_is_wilsons(tmp_path):
    found = difference([True] * 50, [True] * 50)
    assert found.value == 0 and -found.low == pytest.approx(1 - wilson(50, 50).low) == pytest.approx(found.high)


def test_a_slower_trace_is_a_regression_and_a_faster_one_is_better(tmp_path, monkeypatch):
    a = latencies(tmp_path / "a.json", draw(1000), monkeypatch)
    b = latencies(tmp_path / "b.json", draw(1000, 1.2, seed=1), monkeypatch)
    result = compare(CompareConfig(a, b))
    p50, p99 = result["rows"]
    assert result["regression"] and p50["verdict"] == "worse" and p99["quantity"] == "p99 (ms)"
    assert p50["low"] < 1.2 < p50["high"] and p50["low"] > 1.1
    assert compare(CompareConfig(b, a))["rows"][0]["verdict"] == "better"
    assert not compare(CompareConfig(a, b, tolerance=0.25))["regression"]
    same = compare(CompareConfig(a, latencies(tmp_path / "c.json", draw(1000, seed=2), monkeypatch)))
    assert not same["regression"]


def test_a_percentile_without_enough_samples_is_refused_by_name(tmp_path, monkeypatch):
    a = latencies(tmp_path / "a.json", draw(458), monkeypatch)
    b = latencies(tmp_path / "b.json", draw(1000, 5.0), monkeypatch)
    p50, p99 = compare(CompareConfig(a, b))["rows"]
    assert p50["verdict"] == "worse"
    assert p99["verdict"] == "refused: needs 459 samples" and p99["a"] is None and "change" not in p99


def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    generator = np.random.default_rng(3)
    covered = 0
    for seed in range(100):
        a, b = generator.gamma(50.0, 0.1, 400), 1.1 * generator.gamma(50.0, 0.1, 400)
        found = ratio(a, b, 0.5, np.random.default_rng(seed), resamples=200)
        covered += found.low <= 1.1 <= found.high
    assert 84 <= covered <= 100  # 95 of 100, give or take 4 standard deviations and the bootstrap's own 200 draws


def test_blocks_see_that_neighbours_are_alike():
    """Latencies in runs of 25 equal ones: blocks give a wider interval than single samples would."""
    values = np.repeat(np.random.default_rng(0).normal(10, 1, 40), 25)
    blocks = resampled(values, 0.5, np.random.default_rng(0), 500)
    singles = [np.median(np.random.default_rng(k).choice(values, len(values))) for k in range(500)]
    assert np.std(blocks) > 2 * np.std(singles)


def test_paired_steps_cancel_what_the_machine_did_to_both(tmp_path, monkeypatch):
    drift = np.repeat(np.random.default_rng(0).uniform(5, 15, 40), 25)
    a, b = drift + draw(1000) * 1e-3, 1.02 * drift
    rng = np.random.default_rng(1)
    apart, together = (ratio(a, b, 0.5, rng, paired) for paired in (False, True))
    assert together.high - together.low < (apart.high - apart.low) / 3 and together.low > 1.01
    one, two = latencies(tmp_path / "a.json", a, monkeypatch), latencies(tmp_path / "b.json", b[:-1], monkeypatch)
    with pytest.raises(UsageError, match=r"999 steps, .*1000: --paired"):
        compare(CompareConfig(one, two, paired=True))


def test_other_conditions_are_refused_and_named(tmp_path, monkeypatch):
    outcomes = {1: True, 2: False}
    a, b = evaluation(tmp_path / "a.json", outcomes, light=0.0), evaluation(tmp_path / "b.json", outcomes, light=1.0)
    with pytest.raises(UsageError, match=r"env\.light: 0\.0, then 1\.0"):
        compare(CompareConfig(a, b))
    assert compare(CompareConfig(a, b, anyway=True))["differs"] == ["env.light: 0.0, then 1.0"]
    first = latencies(tmp_path / "c.json", draw(500), monkeypatch)
    other = {"device": "a GPU", "cpu": "a chip", "torch_threads": 1}
    second = latencies(tmp_path / "d.json", draw(500), monkeypatch, environment=other, hz=50)
    with pytest.raises(UsageError, match=r"environment\.device: cpu, then a GPU; hz: None, then 50"):
        compare(CompareConfig(first, second))
    with pytest.raises(UsageError, match=r"is a trace, .* a evaluation"):
        compare(CompareConfig(a, second))


def test_what_may_be_compared_is_noted_but_not_refused(tmp_path, monkeypatch):
    a = latencies(tmp_path / "a.json", draw(500), monkeypatch, mode="eager")
    b = latencies(tmp_path / "b.json", draw(500), monkeypatch, mode="graph")
    assert compare(CompareConfig(a, b))["notes"] == ["mode: eager, then graph"]


def test_a_profile_is_compared_by_the_trace_beside_it(tmp_path):
    for name, scale in (("a", 1.0), ("b", 1.3)):
        service = tuple(int(1e6 * value) for value in draw(500, scale))
        recorded = trace.Trace("cpu", {"act": {}}, {"batch": 1}, "eager", service)
        trace.write(tmp_path / f"{name}_trace.json", recorded)
        data = {"schema": 2, "kind": "profile", "traces": {"back to back": f"{name}_trace.json"}}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    for suffix in (".json", "_trace.json"):
        result = compare(CompareConfig(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"))
        assert result["regression"] and result["rows"][0]["change"] == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "kind None, allowed: evaluation, profile, trace"),
        ('{"kind": "study"}', "kind study"),
        ('{"kind": "trace", "schema": 9}', "schema 9, this program compares a trace of schema 1"),
        ('{"kind": "profile", "schema": 2}', "names no trace"),
        ('{"kind": "profile", "schema": 1}', "schema 1, this program compares a profile of schema 2"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, text: str, message: str):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        compare(CompareConfig(path, path))
    with pytest.raises(UsageError, match="No such file"):
        compare(CompareConfig(tmp_path / "none.json", path))


def test_impossible_settings_are_refused():
    for wrong in ({"tolerance": -0.1}, {"tolerance": math.nan}, {"resamples": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CompareConfig(Path("a"), Path("b"), **wrong)
