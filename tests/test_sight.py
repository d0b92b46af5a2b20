"""What the loop's observations are made of where sensors have rates of their own (robotattn/sight.py)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from robotattn.control.chunks import ChunkOptions
from robotattn.control.sensors import Captures, SensorRates
from robotattn.envs import CameraConfig, EnvConfig, make_env
from robotattn.latency.inputs import Batcher
from robotattn.loop import Timing, run_episodes
from robotattn.types import Observation, Plan, tool_pose

MS = 1_000_000
ENV = EnvConfig(task="pick_moving", hz=20, time_limit=0.6, object_tokens=True)


class Noting:
    """Reaches forward, and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        self.seen += observations
        action = np.array([[0.01, 0.005, -0.01, 0.02, 1.0]])
        return [Plan(action, seen.time, 0.05, tool_pose(seen.state.astype(np.float64))) for seen in observations]


def watched(rates: SensorRates, config: EnvConfig = ENV, seed: int = 4) -> tuple[list[Observation], Any]:
    """Run one episode with these sensors; return what the agent was shown, and what the loop says of time."""
    env, agent = make_env(config), Noting()
    (episode,) = run_episodes([env], agent, [seed], ChunkOptions(), timing=Timing(sensors=rates))
    env.close()
    return agent.seen, episode.timing


def test_an_observation_holds_the_newest_capture_of_each_sensor_and_its_stamp():
    """Cubes at 30 Hz are seen at 0, 34, 68, 100, 134, ... ms, the joints at 100 Hz on every tick of 50 ms."""
    slow, timing = watched(SensorRates(camera_hz=30, state_hz=100))
    fast, _ = watched(SensorRates(camera_hz=500, state_hz=500))
    assert [round(seen.stamps["objects"] * 1e3) for seen in slow[:6]] == [0, 34, 100, 134, 200, 234]
    assert [round(seen.stamps["state"] * 1e3) for seen in slow[:6]] == [0, 50, 100, 150, 200, 250]
    assert [seen.time for seen in slow[:3]] == [0.0, 0.05, 0.1]
    late = [round((seen.time - seen.stamps["objects"]) * 1e3) for seen in slow]
    assert sorted(age // MS for age in timing["information"]["objects"]) == sorted(late)
    assert set(timing["information"]["state"]) == {0}
    assert slow[1].objects is not None and fast[1].objects is not None and fast[0].objects is not None
    moved = fast[1].objects[0, 1] - fast[0].objects[0, 1]
    assert slow[1].objects[0, 1] - fast[0].objects[0, 1] == pytest.approx(moved * 34 / 50, rel=1e-3)


def test_lost_frames_leave_the_capture_before_them():
    rates = SensorRates(camera_hz=30, jitter_ms=4, drop=0.5)
    captures = Captures(rates, 4)
    seen, _ = watched(rates)
    stamps = [round(one.stamps["objects"] * 1e9) for one in seen]
    assert stamps == [captures.latest("objects", 50 * MS * tick) for tick in range(len(seen))]
    assert len(set(stamps)) < len(stamps)  # some were lost


def test_sensors_at_the_control_rate_change_nothing():
    plain, _ = watched(SensorRates())
    timed, _ = watched(SensorRates(camera_hz=20, state_hz=20))
    for one, other in zip(plain, timed, strict=True):
        np.testing.assert_array_equal(one.state, other.state)
        np.testing.assert_array_equal(one.objects, other.objects)
        assert one.time == other.time and not one.stamps


def test_a_camera_at_its_own_rate_shows_the_picture_of_its_capture():
    config = EnvConfig(hz=20, time_limit=0.3, cameras=(CameraConfig("wrist", 32, 32),))
    slow, _ = watched(SensorRates(camera_hz=10), config)
    plain, _ = watched(SensorRates(), config)
    for tick in range(6):
        np.testing.assert_array_equal(slow[tick].images["wrist"], plain[tick - tick % 2].images["wrist"])
        np.testing.assert_array_equal(slow[tick].state, plain[tick].state)
    assert not np.array_equal(plain[1].images["wrist"], plain[0].images["wrist"])


def test_a_batch_tells_the_policy_how_old_each_look_is():
    """Frames of 50 ms ticks whose cubes were seen at 34 and 100 ms, at 100 ms; the joints looked at every tick."""
    state, objects = np.zeros(13, np.float32), np.ones((6, 10), np.float32)
    seen = [
        Observation({}, state, "", objects, 0.05, {"state": 0.05, "objects": 0.034}),
        Observation({}, state, "", objects, 0.12, {"state": 0.12, "objects": 0.1}),
    ]
    batch: dict[str, Any] = Batcher(lambda texts: (np.array([[1]]), np.array([[True]])), (), frames=2).batch([seen])
    np.testing.assert_allclose(batch["ages"], [[0.086, 0.02]], atol=1e-6)
    np.testing.assert_allclose(batch["state_ages"], [[0.07, 0.0]], atol=1e-6)
