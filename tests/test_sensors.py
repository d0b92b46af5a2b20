"""Sensors at rates of their own: schedules by hand on the grid of 2 ms, jitter, lost frames, ages at actuation."""

import subprocess
import sys

import numpy as np
import pytest

from robotattn.control.clock import uniform
from robotattn.control.sensors import AgeOfInformation, Captures, SensorRates, ages

MS = 1_000_000


def schedule(captures, sensor, until):
    """Step through the captures of a sensor (ms)."""
    found = [captures.latest(sensor, 0)]
    while (following := captures.next_after(sensor, found[-1])) <= until * MS:
        found.append(following)
    assert all(time % (2 * MS) == 0 for time in found)
    return [time // MS for time in found]


# --- schedules


def test_samples_are_taken_at_the_first_physics_step_at_or_after_they_are_due():
    captures = Captures(SensorRates(camera_hz=30, state_hz=100), seed=0)
    assert schedule(captures, "front", 270) == [0, 34, 68, 100, 134, 168, 200, 234, 268]  # 33.3, 66.7, 100, 133.3, ...
    assert schedule(captures, "state", 60) == [0, 10, 20, 30, 40, 50, 60]
    assert schedule(captures, "objects", 100) == schedule(captures, "wrist", 100) == [0, 34, 68, 100]


@pytest.mark.parametrize(
    ("hz", "expected"),
    [(500, [0, 2, 4, 6, 8, 10]), (400, [0, 4, 6, 8, 10]), (300, [0, 4, 8, 10]), (60, [0, 18]), (0.5, [0])],
)
def test_rates_that_the_grid_does_not_hold_are_rounded_up(hz, expected):
    """400 Hz: 2.5, 5, 7.5 and 10 ms; 300 Hz: 3.3, 6.7 and 10 ms; 60 Hz: 16.7 ms."""
    captures = Captures(SensorRates(state_hz=hz), seed=3)
    assert schedule(captures, "state", 10 if hz > 60 else 20) == expected


def test_a_rate_does_not_drift_in_ten_hours():
    captures = Captures(SensorRates(camera_hz=30), seed=0)
    assert captures.instant("front", 30 * 36_000) == 36_000_000 * MS
    assert captures.latest("front", 36_000_000 * MS) == 36_000_000 * MS
    assert captures.next_after("front", 36_000_000 * MS) == 36_000_034 * MS


def test_the_newest_capture_is_read_until_the_next_one_is_there():
    captures = Captures(SensorRates(camera_hz=30), seed=0)
    times = (0, 33_999_999, 34 * MS, 67 * MS, 68 * MS, 99 * MS, 100 * MS)
    assert [captures.latest("front", time) // MS for time in times] == [0, 0, 34, 34, 68, 68, 100]
    assert [captures.next_after("front", time) // MS for time in times] == [34, 34, 68, 68, 100, 100, 134]


def test_a_sensor_without_a_rate_looks_whenever_it_is_asked():
    captures = Captures(SensorRates(camera_hz=30), seed=0)
    assert captures.latest("state", 6 * MS) == 6 * MS and captures.next_after("state", 6 * MS) is None
    assert SensorRates(camera_hz=30).own and SensorRates(state_hz=1).own and not SensorRates(jitter_ms=3, drop=0.5).own


# --- lost frames


def test_a_lost_frame_is_not_there_and_the_one_before_is_read_on():
    rates, seed = SensorRates(camera_hz=30, state_hz=30, drop=0.3), 0
    lost = [number for number in range(60) if number and uniform(f"drop {seed} front {number}") < 0.3]
    captures, nominal = Captures(rates, seed), [2 * -(-500 * number // 30) for number in range(60)]
    expected = [time for number, time in enumerate(nominal) if number not in lost]
    assert 5 < len(lost) < 30 and (np.diff(lost) == 1).any()  # two in a row as well
    assert schedule(captures, "front", nominal[-1]) == expected
    for number in lost:
        before = max(time for time in expected if time < nominal[number])
        assert captures.latest("front", nominal[number] * MS) == before * MS
    assert schedule(captures, "state", nominal[-1]) == nominal  # only frames are lost


def test_frames_are_lost_at_their_rate_and_each_camera_loses_its_own():
    lost = {
        name: np.array([Captures(SensorRates(camera_hz=30, drop=0.1), seed).lost(name, 5) for seed in range(4000)])
        for name in ("front", "wrist")
    }
    for share in (lost["front"].mean(), lost["wrist"].mean()):
        assert abs(share - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 4000)
    assert abs((lost["front"] & lost["wrist"]).mean() - 0.01) < 4 * np.sqrt(0.01 * 0.99 / 4000)


@pytest.mark.parametrize("seed", range(5))
def test_the_frame_at_reset_is_always_there(seed):
    captures = Captures(SensorRates(camera_hz=30, drop=0.999, jitter_ms=10), seed)
    assert captures.latest("front", 0) == captures.latest("front", 30 * MS) == 0
    assert captures.next_after("front", 0) > 0


# --- jitter


@pytest.mark.parametrize(
    ("hz", "jitter", "most"), [(30, 5.0, 5.0), (30, 100.0, 47 / 3), (200, 9.0, 1.5), (500, 9.0, 0.0)]
)
def test_jitter_stays_within_its_bounds_and_keeps_the_order(hz, jitter, most):
    """The most is (period - 2 ms) / 2: then two samples are never taken at one physics step."""
    captures = Captures(SensorRates(camera_hz=hz, jitter_ms=jitter), seed=11)
    times = np.array([captures.instant("top", number) for number in range(2000)]) / MS
    off = times - np.arange(2000) * 1000 / hz
    assert times[0] == 0 and (np.diff(times) >= 2).all()
    assert off.min() > -most - 1e-6 and off.max() < most + 2  # rounding up to the grid adds less than 2 ms
    if most > 2:
        assert off.min() < 2 - most and off.max() > 0.95 * most
        assert abs(off.mean() - 1.0) < 4 * most / np.sqrt(3 * 2000) + 0.1  # evenly both ways; rounding adds 1 ms


def test_with_jitter_and_losses_both_questions_agree_with_the_whole_list():
    captures = Captures(SensorRates(camera_hz=45, jitter_ms=9, drop=0.4), seed=2)
    kept = np.array([captures.instant("top", n) for n in range(200) if not captures.lost("top", n)])
    for now in range(0, 3000 * MS, 1_999_999):
        assert captures.latest("top", now) == kept[kept <= now].max()
        assert captures.next_after("top", now) == kept[kept > now].min()


# --- determinism


def test_a_schedule_depends_on_seed_and_sensor_alone_in_another_process_too():
    rates = SensorRates(camera_hz=30, jitter_ms=8, drop=0.2)
    shown = schedule(Captures(rates, 5), "front", 2000)
    others = [schedule(Captures(rates, 6), "front", 2000), schedule(Captures(rates, 5), "wrist", 2000)]
    assert shown not in others and others[0] != others[1]
    code = (
        "from robotattn.control.sensors import *\n"
        "c = Captures(SensorRates(camera_hz=30, jitter_ms=8, drop=0.2), 5); t = [0]\n"
        "while t[-1] <= 2000_000_000: t.append(c.next_after('front', t[-1]))\n"
        "print([time // 1000_000 for time in t[:-1]])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(shown)


# --- mistakes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"camera_hz": 501}, r"camera_hz: 501 Hz, allowed is above 0 and up to 500 \(that of the physics\), or null"),
        ({"state_hz": 0}, "state_hz: 0 Hz, allowed is above 0"),
        ({"state_hz": float("nan")}, "state_hz: nan Hz"),
        ({"jitter_ms": -1}, "jitter_ms: -1 ms, allowed is 0 or more"),
        ({"jitter_ms": float("inf")}, "jitter_ms: inf ms"),
        ({"drop": 1.0}, "drop: 1.0, allowed is 0 to below 1"),
        ({"drop": -0.1}, "drop: -0.1"),
    ],
)
def test_values_that_are_not_allowed_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        SensorRates(**values)


def test_there_is_no_time_before_the_reset():
    captures = Captures(SensorRates(camera_hz=30), seed=0)
    for ask in (captures.latest, captures.next_after):
        with pytest.raises(ValueError, match="now: -1 ns, allowed is 0"):
            ask("front", -1)


# --- ages


def test_ages_are_counted_from_the_captures():
    assert ages(150 * MS, {"front": 134 * MS, "state": 150 * MS}) == {"front": 16 * MS, "state": 0}
    with pytest.raises(ValueError, match=r"front: captured after 100000000 ns: \[134000000\]"):
        ages(100 * MS, {"front": 134 * MS, "state": 100 * MS})


def test_the_summary_has_mean_p95_and_maximum_of_each_sensor():
    """A camera at 30 Hz read at every tick of 50 ms: captures 0, 34, 100, 134, 200, ...: ages 0, 16, 0, 16, 0 ..."""
    captures, collected = Captures(SensorRates(camera_hz=30, state_hz=100), seed=0), AgeOfInformation()
    for tick in range(21):
        now = 50 * MS * tick
        collected.add(now, {name: captures.latest(name, now) for name in ("state", "front")})
    assert collected.summary() == {
        "front": {"n": 21, "mean": pytest.approx(160 / 21), "p95": 16.0, "max": 16.0},
        "state": {"n": 21, "mean": 0.0, "p95": 0.0, "max": 0.0},
    }
    late = AgeOfInformation()
    late.add(80 * MS, {"front": 0})
    collected.extend(late)
    assert collected.summary()["front"] == {"n": 22, "mean": pytest.approx(240 / 22), "p95": 16.0, "max": 80.0}
    assert AgeOfInformation().summary() == {}
