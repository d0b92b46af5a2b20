"""Clocks give every inference its latency, and an evaluation says what they did (control/clock.py, timing.py)."""

import math
from pathlib import Path

import numpy as np
import pytest

from robotattn.config import UsageError
from robotattn.control.clock import PHYSICS_STEP, Fixed, LogNormal, Replay, on_grid, parse, uniform
from robotattn.latency.trace import Trace, write
from robotattn.timing import TimingConfig, distribution, of_row, short, summary

MS = 1_000_000


def recorded(*milliseconds: float) -> Trace:
    return Trace("a device", {}, {}, "eager", tuple(round(time * MS) for time in milliseconds))


@pytest.mark.parametrize(
    ("text", "clock"),
    [
        ("fixed:80ms", Fixed(80 * MS)),
        ("fixed:0ms", Fixed(0)),
        ("fixed:1.5s", Fixed(1500 * MS)),
        ("fixed:250us", Fixed(250_000)),
        ("lognormal:80ms:200ms", LogNormal(80 * MS, 200 * MS)),
    ],
)
def test_a_word_names_a_clock(text, clock):
    assert parse(text) == clock


@pytest.mark.parametrize(
    "text", ["80ms", "fixed", "fixed:80", "fixed:-1ms", "fixed:80ms:90ms", "lognormal:9ms:8ms", ""]
)
def test_another_word_is_named_with_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"latency: .*allowed is fixed:80ms, or lognormal"):
        parse(text)


def test_a_log_normal_clock_has_its_median_and_its_99th_percentile():
    clock = LogNormal(80 * MS, 200 * MS)
    drawn = np.array([clock.latency(seed, index) for seed in range(100) for index in range(100)]) / MS
    assert np.median(drawn) == pytest.approx(80, rel=0.02)
    assert np.quantile(drawn, 0.99) == pytest.approx(200, rel=0.05)
    assert np.log(drawn).std() == pytest.approx(math.log(200 / 80) / 2.3263, rel=0.03)  # ln(p99 / median) / z(0.99)


def test_a_latency_is_a_function_of_seed_and_number_alone():
    for clock in (LogNormal(80 * MS, 200 * MS), Replay(recorded(*range(1, 60)), "draw"), Replay(recorded(1, 2, 3))):
        first = [clock.latency(seed, index) for seed in (3, 4) for index in range(20)]
        backwards = [clock.latency(seed, index) for seed in (4, 3) for index in reversed(range(20))]
        assert first == backwards[::-1]
        assert first[:20] != first[20:]


def test_a_replay_goes_through_the_trace_in_order_from_an_offset_of_the_seed():
    found = [Replay(recorded(1, 2, 3)).latency(11, index) // MS for index in range(6)]
    assert found in ([1, 2, 3] * 2, [2, 3, 1] * 2, [3, 1, 2] * 2)


def test_what_comes_between_two_physics_steps_acts_at_the_next():
    assert [on_grid(time) for time in (0, 1, PHYSICS_STEP, PHYSICS_STEP + 1)] == [0, 2 * MS, 2 * MS, 4 * MS]


def test_draws_are_even_and_never_0_or_1():
    drawn = np.array([uniform(f"x {k}") for k in range(4000)])
    assert drawn.min() > 0 and drawn.max() < 1
    assert drawn.mean() == pytest.approx(0.5, abs=0.02) and drawn.var() == pytest.approx(1 / 12, rel=0.05)


# ------------------------------------------------------------------------------------------ an evaluation's flags


def test_two_latencies_at_once_and_options_that_contradict_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="both are given, allowed is one"):
        TimingConfig(latency="fixed:1ms", latency_trace=tmp_path / "x.json")
    with pytest.raises(ValueError, match="execute: 4, allowed with skip is 1"):
        TimingConfig(late="skip").chunks(4, None)
    with pytest.raises(UsageError, match=r"x\.json.*allowed is a trace"):
        TimingConfig(latency_trace=tmp_path / "x.json").clock()


def test_a_trace_file_becomes_a_replay(tmp_path: Path):
    write(tmp_path / "t.json", recorded(5, 7))
    clock = TimingConfig(latency_trace=tmp_path / "t.json", rule="draw").clock()
    assert {clock.latency(seed, 0) for seed in range(20)} == {5 * MS, 7 * MS}
    assert TimingConfig().clock().latency(0, 0) == 0


# ------------------------------------------------------------------------------------------ what a result says

EPISODE = {
    "latencies": [40 * MS, 60 * MS, 60 * MS],
    "ages": {0: 1, 2 * MS: 3},
    "ticks": {"cold": 1, "running": 6, "held": 3},
    "information": {"state": [0, 2 * MS]},
    "overtaken": 1,
}


def test_an_episode_is_counted_against_the_control_period():
    row = of_row(EPISODE, 50 * MS)
    assert (row["inferences"], row["missed"], row["held"], row["overtaken"]) == (3, 2, 3, 1)
    assert row["latencies"] == {40.0: 1, 60.0: 2} and row["ages"] == {0.0: 1, 2.0: 3}
    assert short(row) == {
        "inferences": 3, "missed": 2, "overtaken": 1, "cold": 1, "running": 6, "held": 3,
        "latency_ms_mean": pytest.approx(160 / 3), "latency_ms_max": 60.0, "age_ms_mean": 1.5, "age_ms_max": 2.0,
    }  # fmt: skip


def test_a_result_adds_episodes_up():
    quick = EPISODE | {"latencies": [10 * MS], "ticks": {"cold": 0, "running": 10, "held": 0}, "overtaken": 0}
    found = summary([of_row(EPISODE, 50 * MS), of_row(quick, 50 * MS)])
    assert (found["inferences"], found["missed"], found["miss_rate"], found["ticks"]) == (4, 2, 0.5, 20)
    assert (found["held"], found["cold"], found["overtaken"]) == (0.15, 0.05, 1)
    assert found["latency_ms"] == {"n": 4, "mean": 42.5, "p50": 40.0, "p95": 60.0, "p99": 60.0, "max": 60.0}
    assert found["sensor_age_ms"]["state"]["mean"] == 1.0


def test_percentiles_of_counts_are_those_of_the_values_written_out():
    counts = {1.0: 50, 2.0: 45, 3.0: 4, 9.0: 1}
    found = distribution(counts)
    assert found is not None
    assert found == {"n": 100, "mean": 1.61, "p50": 1.0, "p95": 2.0, "p99": 3.0, "max": 9.0}
    assert distribution({}) is None
