"""One loop runs every episode (robotattn/loop.py); a small world that counts stands in for MuJoCo here."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from robotattn.control.chunks import ChunkOptions
from robotattn.loop import run_episodes
from robotattn.sight import read_observation
from robotattn.types import Episode, Observation, Plan

LIMIT = 12  # ticks


class Counter(gym.Env):
    """A number to be brought to 0 by steps of at most 1; where it starts comes from the seed."""

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float64)
    observation_space = gym.spaces.Dict({"state": gym.spaces.Box(-np.inf, np.inf, (13,), np.float32)})

    def __init__(self) -> None:
        self.resets: list[int] = []
        self.options: list[dict[str, Any] | None] = []
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        assert seed is not None
        self.resets.append(seed)
        self.options.append(options)
        self.seed, self.tick = seed, 0
        self.value = float(np.random.default_rng(seed).uniform(1, 14))  # from 12 on it cannot be done in time
        return self._see(), self._info()

    substeps = 50  # a control period of 100 ms

    def tool_pose(self) -> np.ndarray:
        return np.zeros(4)

    def send(self, action) -> None:
        self.action = float(np.clip(action[0], -1, 1))

    def advance(self, steps: int) -> None:
        """What was sent acts by the end of the tick."""

    def end_tick(self):
        self.steps, self.tick = self.steps + 1, self.tick + 1
        self.value -= self.action
        success = abs(self.value) < 0.05
        return success, self.tick >= LIMIT, self._info(success)

    def observe(self) -> dict[str, Any]:
        return self._see()

    def labels(self) -> dict[str, Any]:
        return {"value": self.value}

    def _see(self) -> dict[str, Any]:
        state = np.zeros(13, np.float32)
        state[0], state[12] = self.value, 1.0
        return {"state": state, "instruction": f"count {self.seed}", "time": np.array([self.tick * 0.1])}

    def _info(self, success: bool = False) -> dict[str, Any]:
        return {"success": success, "reason": "time_limit", "episode": {"seed": self.seed}}


class Planner:
    """Plan chunks towards 0 with a habit that must not leak: it overshoots more the longer an episode has run."""

    def __init__(self, horizon: int = 4) -> None:
        self.horizon, self.age = horizon, dict[int, int]()
        self.resets: list[int] = []
        self.asked: list[list[int]] = []

    def reset(self, row: int) -> None:
        self.resets.append(row)
        self.age[row] = 0

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        self.asked.append(list(rows))
        return [self._one(row, seen) for row, seen in zip(rows, observations, strict=True)]

    def _one(self, row: int, seen: Observation) -> Plan:
        left, actions = float(seen.state[0]), []
        for _ in range(self.horizon):
            actions.append([np.clip(left, -1, 1) * (1 + 0.01 * self.age[row])])
            left -= actions[-1][0]
        self.age[row] += 1
        return Plan(np.array(actions), seen.time, 0.1)


def play(seeds: Sequence[int], batch: int, chunks: ChunkOptions | None = None, **more: Any) -> dict[int, Episode]:
    episodes = list(run_episodes([Counter() for _ in range(batch)], Planner(), seeds, chunks, **more))
    assert len(episodes) == len(seeds)
    return {episode.seed: episode for episode in episodes}


def test_every_episode_has_exactly_one_reset_in_the_order_of_the_seeds():
    """Nothing resets at the end of an episode: three episodes are three resets."""
    env, agent = Counter(), Planner()
    seeds = [5, 3, 9]
    assert [episode.seed for episode in run_episodes([env], agent, seeds)] == seeds
    assert env.resets == seeds
    assert agent.resets == [0, 0, 0]


def test_a_batch_resets_once_an_episode_and_skips_no_seed():
    envs = [Counter() for _ in range(3)]
    seeds = list(range(100, 110))
    list(run_episodes(envs, Planner(), seeds))
    assert sorted(seed for env in envs for seed in env.resets) == seeds
    assert sum(env.steps for env in envs) == sum(episode.steps for episode in play(seeds, 1).values())


@pytest.mark.parametrize("chunks", [ChunkOptions(), ChunkOptions(execute=3), ChunkOptions(ensemble=0.3)])
def test_the_batch_size_never_changes_a_result(chunks: ChunkOptions):
    """Twenty episodes with 1, 4, 7, 20 and 30 environments: the same result for every seed."""
    seeds = list(range(20))
    alone = play(seeds, 1, chunks)
    assert {episode.success for episode in alone.values()} == {True, False}  # the world tells good from bad
    for batch in (4, 7, 20, 30):
        assert play(seeds, batch, chunks) == alone


def test_an_episode_depends_on_its_seed_alone():
    """Whatever ran before it, in its row or beside it, and in whatever order: the same commands and labels."""
    keep: dict[str, Any] = {"keep": lambda seed: seed == 7, "chunks": ChunkOptions(execute=3)}
    alone = play([7], 1, **keep)[7]
    for seeds, batch in (([1, 2, 7, 3], 1), ([9, 8, 7, 6, 5, 4], 2), ([7, 1], 2)):
        other = play(seeds, batch, **keep)[7]
        assert (other.success, other.steps, other.instruction) == (alone.success, alone.steps, alone.instruction)
        for mine, theirs in zip(alone.rows, other.rows, strict=True):
            np.testing.assert_array_equal(mine.command.action, theirs.command.action)
            assert mine.labels == theirs.labels


def test_a_row_that_ends_early_leaves_the_others_alone():
    """O21: the third of four episodes ends, and another starts in its row: reset and queue are that row's alone."""
    keep: dict[str, Any] = {"keep": lambda seed: True, "chunks": ChunkOptions(execute=3)}
    alone = {seed: play([seed], 1, **keep)[seed] for seed in range(40)}
    order = sorted(alone, key=lambda seed: alone[seed].steps)
    seeds = [*order[-2:], order[0], *order[-4:-2]]
    assert alone[seeds[2]].steps <= 4 and min(alone[seed].steps for seed in (*seeds[:2], seeds[3])) == LIMIT
    agent = Planner()
    together = {episode.seed: episode for episode in run_episodes([Counter() for _ in range(4)], agent, seeds, **keep)}
    assert agent.resets == [0, 1, 2, 3, 2]
    for seed in seeds:
        mine, theirs = ([row.command.action for row in found[seed].rows] for found in (alone, together))
        np.testing.assert_array_equal(mine, theirs)


def test_the_temporal_ensemble_reaches_the_environment():
    """O15: the k-th chunk predicts k for every tick; with m = ln 2 the third command sent is (0 + 1/2 + 2/4) / 1.75."""

    class Numbered(Planner):
        def _one(self, row: int, seen: Observation) -> Plan:
            return Plan(np.full((self.horizon, 1), round(seen.time / 0.1) / 10), seen.time, 0.1)

    for chunks, third in ((ChunkOptions(ensemble=np.log(2)), 0.4 / 7), (ChunkOptions(), 0.2)):
        (episode,) = run_episodes([Counter()], Numbered(), [0], chunks, keep=lambda seed: True)
        assert episode.rows[2].command.action[0] == pytest.approx(third, abs=1e-15)


def test_the_agent_is_asked_only_for_rows_that_need_a_plan():
    agent = Planner(horizon=4)
    (episode,) = run_episodes([Counter()], agent, [0], ChunkOptions(execute=4))
    assert len(agent.asked) == -(-episode.steps // 4)
    assert all(rows == [0] for rows in agent.asked)


def test_rows_are_kept_only_where_asked_and_hold_what_was_seen_before_the_command():
    episodes = play([0, 1], 2, keep=lambda seed: seed == 1)
    assert len(episodes[0].rows) == 0
    rows = episodes[1].rows
    assert len(rows) == episodes[1].steps
    for before, after in pairwise(rows):
        expected = before.observation.state[0] - np.clip(before.command.action[0], -1, 1)
        assert after.observation.state[0] == pytest.approx(expected, abs=1e-6)
        assert before.labels["value"] == pytest.approx(before.observation.state[0], abs=1e-6)
    assert [row.observation.time for row in rows] == pytest.approx(0.1 * np.arange(len(rows)))


def test_success_comes_from_the_world_and_running_out_of_time_is_not_success():
    class Still(Planner):
        def _one(self, row: int, seen: Observation) -> Plan:
            return Plan(np.zeros((1, 1)), seen.time, 0.1)

    for episode in run_episodes([Counter()], Still(), [1, 2]):
        assert (episode.success, episode.reason, episode.steps) == (False, "time_limit", LIMIT)


def test_success_at_the_last_allowed_tick_counts_as_success():
    class Late(Planner):
        def _one(self, row: int, seen: Observation) -> Plan:
            last = round(seen.time / 0.1) == LIMIT - 1
            return Plan(np.array([[float(seen.state[0]) if last else 0.0]]), seen.time, 0.1)

    class Near(Counter):
        def reset(self, **more):
            super().reset(**more)
            self.value = 0.5
            return self._see(), self._info()

    (episode,) = run_episodes([Near()], Late(), [1])
    assert (episode.success, episode.reason, episode.steps) == (True, "success", LIMIT)


def test_reset_options_reach_every_episode():
    env = Counter()
    list(run_episodes([env], Planner(), [1, 2], options={"objects": 6}))
    assert env.options == [{"objects": 6}, {"objects": 6}]


def test_no_seeds_means_no_episodes_and_no_reset():
    env = Counter()
    assert list(run_episodes([env], Planner(), [])) == []
    assert env.resets == []


def test_a_missing_camera_or_object_list_reads_as_absent():
    seen = read_observation({"state": np.zeros(13, np.float32), "instruction": "", "time": np.array([0.5])})
    assert (dict(seen.images), seen.objects, seen.time) == ({}, None, 0.5)
