"""Chunks of planned actions become one command a tick (robotattn/control/chunks.py)."""

import numpy as np
import pytest

from robotattn.control.chunks import ChunkOptions, ChunkQueue, absolute, relative
from robotattn.types import Command, Plan, wrap_angle

POSE = np.array([0.3, -0.1, 0.2, 0.4])  # x, y, z (m), yaw (rad)


def joint_plan(*values: float) -> Plan:
    """A plan of H absolute one-number actions: easy to recognise on the other side."""
    return Plan(np.array(values, dtype=np.float64)[:, None], start=0.0, period=0.1)


def tool_plan(actions: list[list[float]], anchor: np.ndarray, expert: list[list[float]] | None = None) -> Plan:
    return Plan(np.array(actions), 0.0, 0.1, anchor, None if expert is None else np.array(expert))


TICK = 100_000_000  # (ns), the period of the plans


def put(queue: ChunkQueue, plan: Plan, tick: int = 0) -> None:
    """A plan made and there in one instant."""
    queue.start(tick * TICK, plan, 0)
    queue.arrive(tick * TICK)


def send(queue: ChunkQueue, tick: int = 0, pose: np.ndarray = POSE) -> Command:
    command = queue.look_up(tick * TICK, pose)
    assert command is not None
    return command


def play(queue: ChunkQueue, plans: list[Plan]) -> list[float]:
    """Put one plan a tick and return the first action component sent at each tick."""
    sent = []
    for tick, plan in enumerate(plans):
        put(queue, plan, tick)
        sent.append(float(send(queue, tick).action[0]))
    return sent


def test_ensemble_weights_the_oldest_prediction_most():
    """With m = ln 2 and 0, 1, 2 predicted for one tick (oldest first): (0 + 1/2 + 2/4) / (1 + 1/2 + 1/4) = 4/7."""
    queue = ChunkQueue(ChunkOptions(ensemble=np.log(2)))
    sent = play(queue, [joint_plan(9, 9, 0), joint_plan(9, 1), joint_plan(2)])
    assert sent[2] == pytest.approx(4 / 7, abs=1e-15)


def test_ensemble_with_no_decay_is_the_plain_mean():
    queue = ChunkQueue(ChunkOptions(ensemble=0.0))
    assert play(queue, [joint_plan(9, 9, 0), joint_plan(9, 1), joint_plan(5)])[2] == pytest.approx(2.0)


def test_ensemble_matches_the_formula_for_long_chunks():
    """Against w_i = exp(-m i) written out with float64 loops, 12 ticks of chunks of 5."""
    decay, horizon, ticks = 0.1, 5, 12
    predictions = np.random.default_rng(0).normal(size=(ticks, horizon))
    sent = play(ChunkQueue(ChunkOptions(ensemble=decay)), [joint_plan(*row) for row in predictions])
    for tick in range(ticks):
        covering = [predictions[s, tick - s] for s in range(max(0, tick - horizon + 1), tick + 1)]
        weights = np.exp(-decay * np.arange(len(covering)))
        assert sent[tick] == pytest.approx(float(weights @ covering / weights.sum()), abs=1e-12)


def test_ensemble_forgets_chunks_that_no_longer_cover_the_tick():
    queue = ChunkQueue(ChunkOptions(ensemble=0.0))
    assert play(queue, [joint_plan(100), joint_plan(1), joint_plan(2)]) == [100.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        ((1, 0, 0), 1.0),  # 1 against 1/2 + 1/4 by weight
        ((0, 1, 1), 0.0),
        ((0.8, 0.4, 0.4), 0.8 * 4 / 7 + 0.4 * 3 / 7),  # no decisions: a mean as of any number
    ],
)
@pytest.mark.parametrize("anchor", [np.zeros(4), None])
def test_an_ensemble_opens_or_shuts_the_gripper_as_the_most_say_by_weight(wanted, sent, anchor):
    """m = ln 2, oldest first. Half open is what none of them means."""
    queue = ChunkQueue(ChunkOptions(ensemble=np.log(2)))
    size = 5 if anchor is not None else 8
    for tick, gripper in enumerate(wanted):
        actions = np.full((3, size), 0.1 * tick)
        actions[:, -1] = gripper
        put(queue, Plan(actions, 0.0, 0.1, anchor), tick)
        command = send(queue, tick, np.zeros(4))
    assert command.action[0] == pytest.approx((0.1 / 2 + 0.2 / 4) * 4 / 7)
    assert command.action[-1] == pytest.approx(sent)


def test_ensemble_blends_angles_across_the_wrap():
    """Yaw targets of pi - 0.1 and -pi + 0.1 lie 0.2 rad apart: their mean is pi, not 0."""
    queue = ChunkQueue(ChunkOptions(ensemble=0.0))
    anchor = np.zeros(4)
    put(queue, tool_plan([[0, 0, 0, 0, 1], [0, 0, 0, np.pi - 0.1, 1]], anchor))
    send(queue, 0, anchor)
    put(queue, tool_plan([[0, 0, 0, -np.pi + 0.1, 1]], anchor), 1)
    assert abs(send(queue, 1, anchor).action[3]) == pytest.approx(np.pi)


@pytest.mark.parametrize("execute", [1, 2, 3])
def test_queue_sends_the_first_actions_of_each_chunk_with_their_age(execute: int):
    """Chunk c predicts 10 c + k for its k-th action; of each chunk only the first `execute` are sent."""
    queue, sent = ChunkQueue(ChunkOptions(execute=execute)), []
    for tick in range(6):
        if queue.due(tick * TICK):
            put(queue, joint_plan(*(10 * (tick // execute) + np.arange(4))), tick)
        command = send(queue, tick)
        sent.append((float(command.action[0]), command.age))
    assert sent == [(10 * (t // execute) + t % execute, t % execute / 10) for t in range(6)]


def test_queue_asks_again_when_a_chunk_is_shorter_than_execute():
    queue = ChunkQueue(ChunkOptions(execute=10))
    put(queue, joint_plan(1, 2))
    assert [float(send(queue, tick).action[0]) for tick in range(2)] == [1.0, 2.0]
    assert [queue.due(tick * TICK) for tick in range(3)] == [False, False, True]


def test_reset_forgets_the_chunk_of_the_last_episode():
    """An episode stopped in the middle of a chunk leaves nothing to the next one."""
    for options in (ChunkOptions(execute=4), ChunkOptions(ensemble=0.5)):
        used, fresh = ChunkQueue(options), ChunkQueue(options)
        put(used, joint_plan(7, 8, 9, 10))
        send(used)
        used.reset()
        assert used.due(0)
        put(used, joint_plan(1, 2, 3, 4))
        put(fresh, joint_plan(1, 2, 3, 4))
        after, alone = send(used), send(fresh)
        assert (after.action[0], after.age) == (alone.action[0], alone.age) == (1.0, 0)


def test_a_late_tool_action_still_means_the_same_target():
    """The offset of action 1 is rebased from the pose it was planned at to the pose now."""
    queue = ChunkQueue(ChunkOptions(execute=2))
    put(queue, tool_plan([[0.01, 0, 0, 0, 1], [0.02, 0.03, -0.01, 0.2, 0]], anchor=POSE))
    send(queue)
    now = POSE + np.array([0.015, -0.005, 0.002, 0.1])
    command = send(queue, 1, now)
    np.testing.assert_allclose(command.action, [0.005, 0.035, -0.012, 0.1, 0], atol=1e-12)
    np.testing.assert_allclose(now + command.action[:4], POSE + np.array([0.02, 0.03, -0.01, 0.2]), atol=1e-12)


def test_the_expert_target_is_reported_in_the_world_frame():
    queue = ChunkQueue(ChunkOptions())
    put(queue, tool_plan([[0.05, 0, 0, 0, 1]], POSE, expert=[[0.01, 0.02, 0.03, 0.1, 0]]))
    expert = send(queue).expert
    assert expert is not None
    np.testing.assert_allclose(expert, [0.31, -0.08, 0.23, 0.5, 0], atol=1e-12)


def test_joint_targets_pass_unchanged():
    queue = ChunkQueue(ChunkOptions())
    put(queue, Plan(np.arange(8.0)[None], 0.0, 0.1))
    np.testing.assert_array_equal(send(queue).action, np.arange(8.0))


def test_relative_undoes_absolute_and_takes_the_shorter_way_round():
    offsets = np.random.default_rng(1).uniform(-0.5, 0.5, size=(20, 5))
    anchor = np.array([0.1, 0.2, 0.3, 3.0])  # near the wrap of yaw
    targets = absolute(offsets, anchor)
    assert np.all((targets[:, 3] >= -np.pi) & (targets[:, 3] < np.pi))
    np.testing.assert_allclose(relative(targets, anchor), offsets, atol=1e-12)


def test_rebasing_leaves_its_inputs_alone():
    actions, anchor = np.ones((3, 5)), POSE.copy()
    absolute(actions, anchor)
    relative(actions, anchor)
    np.testing.assert_array_equal(actions, np.ones((3, 5)))
    np.testing.assert_array_equal(anchor, POSE)


def test_angles_wrap_into_one_half_open_turn():
    np.testing.assert_allclose(
        wrap_angle(np.array([0.0, np.pi, -np.pi, 3.5, -7.0])), [0, -np.pi, -np.pi, 3.5 - 2 * np.pi, 2 * np.pi - 7.0]
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"execute": 0}, "execute: 0"),
        ({"execute": -1}, "execute: -1"),
        ({"execute": 2, "ensemble": 0.1}, "execute must be 1, not 2"),
        ({"ensemble": float("nan")}, "ensemble: nan"),
        ({"ensemble": float("inf")}, "ensemble: inf"),
        ({"ensemble": 0.1, "handling": "skip"}, "ensemble: 0.1, allowed with skip is none"),
        ({"execute": 2, "handling": "naive"}, "execute: 2, allowed with naive is 1"),
        ({"threshold": 0.0}, "threshold: 0.0, allowed is above 0"),
        ({"in_flight": 2}, "in_flight: 2, allowed with hold is 1"),
    ],
)
def test_contradictory_options_are_refused(options: dict, named: str):
    with pytest.raises(ValueError, match=named):
        ChunkOptions(**options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_action_is_refused(bad: float):
    with pytest.raises(ValueError, match="non-finite"):
        put(ChunkQueue(ChunkOptions()), joint_plan(0.0, bad))


@pytest.mark.parametrize("shape", [(0, 5), (5,), (1, 2, 5)])
def test_a_plan_of_another_shape_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"allowed is \[H, A\]"):
        put(ChunkQueue(ChunkOptions()), Plan(np.zeros(shape), 0.0, 0.1))
