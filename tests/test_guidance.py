"""Real-time chunking: guidance against closed forms, and agents that go on from what is running."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from robotattn.agents import PolicyAgent, exact_micro_batch, stack_overlaps
from robotattn.control.chunks import absolute
from robotattn.latency.inputs import Batcher, random_observation
from robotattn.policies import ACTConfig
from robotattn.policies.base import Memory
from robotattn.policies.guidance import BETA, Guide, guided, soft_weights, strength
from robotattn.types import Continuer, Observation, Running

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch
from decoders import BINS, FLOW, TOKENS, exact, make, remembered

PERIOD = 0.1
BATCHER = Batcher(lambda texts: (np.array([[1, 2, 3]]), None), ())


# ------------------------------------------------------------------------------------------ weights and strength


def test_weights_are_one_while_frozen_and_fall_to_nothing_at_the_end_of_the_overlap():
    """Five rows of overlap, two of them frozen: c = 3/4, 2/4, 1/4."""
    by_hand = [c * (math.e**c - 1) / (math.e - 1) for c in (0.75, 0.5, 0.25)]
    assert soft_weights(5, 2).tolist() == pytest.approx([1, 1, *by_hand], abs=1e-15)
    assert by_hand == pytest.approx([0.48756, 0.18877, 0.04132], abs=1e-5)


def test_weights_of_nothing_of_all_and_of_no_frozen_row():
    assert soft_weights(0, 0).tolist() == []
    assert soft_weights(3, 3).tolist() == [1, 1, 1]
    half = 0.5 * (math.sqrt(math.e) - 1) / (math.e - 1)
    assert soft_weights(1, 0).tolist() == pytest.approx([half], abs=1e-15)


@pytest.mark.parametrize(("overlap", "frozen"), [(3, 4), (3, -1), (0, 1)])
def test_more_frozen_rows_than_overlap_are_refused(overlap, frozen):
    with pytest.raises(ValueError, match=rf"frozen: {frozen} rows, allowed is 0 to {overlap}"):
        soft_weights(overlap, frozen)


def test_the_pull_is_limited_at_both_ends_and_least_in_the_middle():
    """At 1/4: r^2 = (9/16) / (10/16), and (3/4) / (1/4) / r^2 = 10/3."""
    assert strength(0.0) == strength(1.0) == strength(1e-300) == BETA == 5.0
    assert strength(0.0, 2.5) == 2.5
    assert strength(0.25) == pytest.approx(10 / 3) == strength(0.75)
    assert strength(0.5) == pytest.approx(2.0)
    assert strength(0.1, 100.0) == pytest.approx(1 / 9 + 9)


# ------------------------------------------------------------------------------------------ closed forms


class Linear:
    """The field v = M x + c on chunks of 3 actions of 2 numbers, whose estimate x + (1 - t) v has a known Jacobian."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.matrix, self.constant = rng.normal(0, 0.5, (6, 6)), rng.normal(size=6)

    def __call__(self, x, time):
        flat = x.flatten(1) @ torch.from_numpy(self.matrix).T + torch.from_numpy(self.constant)
        return flat.unflatten(1, (3, 2))

    def by_hand(self, x, time, target, weights, beta):
        """The guided velocity of one chunk, in numpy."""
        velocity = self.matrix @ x + self.constant
        final = x + (1 - time) * velocity
        jacobian = np.eye(6) + (1 - time) * self.matrix
        squared = (1 - time) ** 2 / (time**2 + (1 - time) ** 2)
        pull = beta if time == 0 else min(beta, (1 - time) / (time * squared))
        return velocity + pull * jacobian.T @ (np.repeat(weights, 2) * (target - final))


@pytest.mark.parametrize("beta", [5.0, 2.2])
@pytest.mark.parametrize("time", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_a_linear_field_is_bent_as_computed_by_hand(time, beta):
    field, rng = Linear(), np.random.default_rng(1)
    x, target = rng.normal(size=(2, 4, 6))
    weights = np.array([[1, 1, 0.3], [1, 0.5, 0], [0, 0, 0], [0.2, 0.7, 1]])
    guide = Guide(torch.from_numpy(target).unflatten(1, (3, 2)), torch.from_numpy(weights), beta)
    bent = guided(field, guide)(torch.from_numpy(x).unflatten(1, (3, 2)), time).flatten(1)
    for row in range(4):
        np.testing.assert_allclose(bent[row], field.by_hand(x[row], time, target[row], weights[row], beta), atol=1e-12)


@pytest.mark.parametrize(("method", "steps"), [("euler", 4), ("midpoint", 3)])
def test_denoising_integrates_the_bent_field(method, steps):
    """In a policy: its field is replaced by x' = -x, whose estimate is t x, and a chunk is pulled to ones."""
    policy = make(FLOW, method=method, steps=steps)
    memory = remembered(policy, batch(FLOW, size=1))
    object.__setattr__(policy, "velocity", lambda memory, x, time, scratch=None: -x)
    weights = torch.tensor([[1.0, 0.5, 0.0]])
    found = policy.denoise(memory, guide=Guide(torch.ones(1, *policy.units.shape), weights))
    for row, weight in enumerate(weights[0].tolist()):
        x, step = 0.0, 1 / steps

        def slope(x, t, weight=weight):
            return -x + strength(t, min(BETA, steps)) * weight * (1 - t * x) * t

        for k in range(steps):
            middle = x + step / 2 * slope(x, k * step)
            x += step * (slope(x, k * step) if method == "euler" else slope(middle, (k + 0.5) * step))
        torch.testing.assert_close(found[0, row], torch.full_like(found[0, row], x))


@pytest.mark.parametrize("steps", [1, 2, 4, 10])
def test_few_steps_do_not_overshoot(steps):
    """Where nothing else moves them, chunks come no farther than to the target: 1 step takes them there."""
    policy = make(FLOW, steps=steps)
    memory = remembered(policy, batch(FLOW, size=1))
    object.__setattr__(policy, "velocity", lambda memory, x, time, scratch=None: 0.0 * x)
    found = policy.denoise(memory, guide=Guide(torch.ones(1, *policy.units.shape), torch.ones(1, 3), beta=50.0))
    assert found.min() > 0.9 and found.max() <= 1.0 + 1e-6


# ------------------------------------------------------------------------------------------ policies


def a_guide(policy, seed, weights):
    generator = torch.Generator().manual_seed(seed)
    return Guide(torch.randn(len(weights), *policy.units.shape, generator=generator), torch.as_tensor(weights))


@torch.no_grad()
@pytest.mark.parametrize("method", ["euler", "midpoint"])
def test_without_weight_a_row_is_what_it_is_without_a_guide_to_the_bit(method):
    policy = make(FLOW, method=method)
    memory = remembered(policy, batch(FLOW))
    plain = policy.denoise(memory)
    assert torch.equal(policy.denoise(memory, guide=a_guide(policy, 0, [[0.0] * 3] * 3)), plain)
    mixed = policy.denoise(memory, guide=a_guide(policy, 0, [[0.0] * 3, [1.0, 0.5, 0.0], [0.0] * 3]))
    assert torch.equal(mixed[[0, 2]], plain[[0, 2]]) and not torch.equal(mixed[1], plain[1])


@torch.no_grad()
def test_rows_with_guides_of_their_own_are_as_if_alone():
    policy = make(FLOW)
    memory = policy.prefill(exact(policy, batch(FLOW)))
    guide = a_guide(policy, 1, [[1.0, 1.0, 0.2], [0.0] * 3, [1.0, 0.4, 0.0]])
    guide = Guide(guide.target.double(), guide.weights.double())
    together = policy.denoise(memory, guide=guide)
    for row in range(3):
        one = slice(row, row + 1)
        context = tuple((keys[one], values[one]) for keys, values in memory.context)
        alone = Memory(context, memory.mask[one], memory.condition[one], memory.state[one])
        single = policy.denoise(alone, guide=Guide(guide.target[one], guide.weights[one]))
        torch.testing.assert_close(together[one], single, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_frozen_rows_come_ten_times_closer_to_what_is_running(seed):
    """From noise, at 5 and at 10 steps; the free row is not pulled there (its weight is 0)."""
    for steps in (5, 10):
        policy = make(FLOW, steps=steps)
        memory = remembered(policy, batch(FLOW, seed=seed))
        guide = a_guide(policy, seed, [[1.0, 0.5, 0.0]] * 3)
        plain, near = (
            (policy.denoise(memory, torch.Generator().manual_seed(seed), g) - guide.target).abs().mean(dim=(0, 2))
            for g in (None, guide)
        )
        assert near[0] < 0.1 * plain[0]
        assert near[0] < near[1] < plain[1] and near[2] > 0.5 * plain[2]


def test_no_gradient_is_left_behind():
    policy = make(FLOW)
    memory = remembered(policy, batch(FLOW))
    assert not policy.denoise(memory, guide=a_guide(policy, 0, [[1.0] * 3] * 3)).requires_grad
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("mode", ["tool", "joint"])
def test_what_is_running_is_met_in_physical_units(mode):
    """Chunks that the policy itself planned, moved by a centimetre (or 0.01 rad): frozen rows follow."""
    policy = make(replace(FLOW, action_mode=mode))
    data = batch(policy.config)
    own = policy.act(data)
    running = own + 0.01 * (torch.arange(own.shape[-1]) < own.shape[-1] - 1)
    moved = policy.act_on(data, running[:, :2], torch.ones(3, 2))
    assert (moved[:, :2] - running[:, :2]).abs().max() < 0.002
    assert torch.equal(moved[..., -1][:, :2], own[..., -1][:, :2])  # the gripper stays what it was


def test_in_inference_mode_too_a_policy_goes_on():
    policy = make(FLOW)
    with torch.inference_mode():
        data = batch(FLOW)
        found = policy.act_on(data, data["actions"], torch.ones(3, 3))
    data = batch(FLOW)
    assert torch.equal(found, policy.act_on(data, data["actions"], torch.ones(3, 3)))


@pytest.mark.parametrize("config", [BINS, TOKENS, ACTConfig(objects=True)])
def test_policies_without_a_flow_say_that_they_cannot(config):
    policy = make(config)
    assert make(FLOW).continues and not policy.continues
    with pytest.raises(ValueError, match="blockwise with head: flow"):
        policy.act_on(batch(config), torch.zeros(3, 1, 5), torch.ones(3, 1))


def test_more_running_actions_than_a_chunk_are_refused():
    with pytest.raises(ValueError, match="running: 4 actions, a chunk has 3"):
        make(FLOW).act_on(batch(FLOW), torch.zeros(3, 4, 5), torch.ones(3, 4))


# ------------------------------------------------------------------------------------------ agents


class Notes:
    """Stands in for a policy: notes what it is told is running, and plans to do just that."""

    def act(self, seen):
        return torch.zeros(len(seen["state"]), 3, 5)

    def act_on(self, seen, running, weights):
        self.running, self.weights = running, weights
        return torch.nn.functional.pad(running, (0, 0, 0, 3 - running.shape[1]))


def note_taker(micro_batch=1):
    notes = Notes()
    return notes, PolicyAgent(notes.act, BATCHER, PERIOD, True, micro_batch, notes.act_on)


def seen_from(x, y, z, yaw):
    state = np.zeros(13, np.float32)
    state[8:] = x, y, z, np.sin(yaw), np.cos(yaw)
    return Observation({}, state, "", np.zeros((6, 10), np.float32), 0.0)


def targets(count=3, yaw=0.0):
    found = np.tile([0.5, 0.1, 0.2, yaw, 1.0], (count, 1))
    found[:, 0] += 0.01 * np.arange(count)
    return found


def test_the_same_targets_from_anywhere_are_the_same_place_in_the_world():
    notes, agent = note_taker()
    for pose in ([0.5, 0.1, 0.2, 0.0], [0.4, -0.2, 0.3, 1.0], [0.7, 0.0, 0.05, -3.0]):
        (plan,) = agent.plan_from([0], [seen_from(*pose)], [Running(targets(), PERIOD, 1)])
        np.testing.assert_allclose(notes.running[0, :, :3], targets()[:, :3] - pose[:3], atol=1e-6)
        np.testing.assert_allclose(absolute(plan.actions, plan.anchor), targets(), atol=1e-6)
        np.testing.assert_allclose(notes.weights[0], soft_weights(3, 1), atol=1e-7)


def test_a_yaw_beyond_half_a_turn_is_met_by_the_shorter_way():
    notes, agent = note_taker()
    agent.plan_from([0], [seen_from(0.5, 0.1, 0.2, np.pi - 0.1)], [Running(targets(yaw=0.1 - np.pi), PERIOD, 3)])
    np.testing.assert_allclose(notes.running[0, :, 3], 0.2, atol=1e-6)


def test_joint_targets_are_given_as_they_are():
    notes = Notes()
    agent = PolicyAgent(notes.act, BATCHER, PERIOD, False, act_on=notes.act_on)
    joints = np.linspace(-1, 1, 16).reshape(2, 8)
    (plan,) = agent.plan_from([0], [seen_from(0.5, 0.1, 0.2, 0.3)], [Running(joints, PERIOD, 1)])
    np.testing.assert_allclose(notes.running[0], joints, atol=1e-7)
    assert plan.anchor is None


def test_padding_and_shorter_overlaps_have_no_weight():
    notes, agent = note_taker(micro_batch=4)
    here = seen_from(0.5, 0.1, 0.2, 0.0)
    plans = agent.plan_from([0, 1], [here] * 2, [Running(targets(1), PERIOD, 1), Running(targets(3), PERIOD, 0)])
    np.testing.assert_allclose(notes.weights[0], [1, 0, 0])
    np.testing.assert_allclose(notes.weights[1], soft_weights(3, 0), atol=1e-7)
    assert notes.weights.shape == (4, 3) and not notes.weights[2:].any()
    np.testing.assert_allclose(plans[1].actions[:, 0], [0, 0.01, 0.02], atol=1e-6)


def test_rows_of_which_nothing_runs_are_not_shown_to_the_guided_policy():
    notes, agent = note_taker(micro_batch=2)
    here, nothing = seen_from(0.5, 0.1, 0.2, 0.0), Running(np.zeros((0, 5)), PERIOD, 0)
    agent.plan_from([0, 1], [here] * 2, [None, nothing])
    assert not hasattr(notes, "running")
    plans = agent.plan_from([0, 1, 2], [here] * 3, [None, Running(targets(), PERIOD, 2), nothing])
    assert [bool(plan.actions.any()) for plan in plans] == [False, True, False]


@pytest.mark.parametrize(
    ("running", "message"),
    [
        (Running(targets(), 0.05, 1), r"running.period: 0.05 s, .* 0.1 s apart"),
        (Running(targets(), PERIOD, 4), "frozen: 4 rows, allowed is 0 to 3"),
        (Running(targets() * np.nan, PERIOD, 1), "running.targets: a non-finite target"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(running, message):
    _, agent = note_taker()
    with pytest.raises(ValueError, match=message):
        agent.plan_from([0], [seen_from(0.5, 0.1, 0.2, 0.0)], [running])


def test_an_agent_without_a_flow_refuses_to_go_on():
    agent = PolicyAgent(Notes().act, BATCHER, PERIOD, True)
    assert isinstance(agent, Continuer) and not agent.continues
    with pytest.raises(ValueError, match=r"plan_from: .* flow can"):
        agent.plan_from([0], [seen_from(0.5, 0.1, 0.2, 0.0)], [None])


def test_stacked_overlaps_of_nothing_are_empty():
    running, weights = stack_overlaps([None, None])
    assert running.shape == (2, 0, 0) and weights.shape == (2, 0)


def a_flow_agent(micro_batch=1):
    policy = make(FLOW)
    return PolicyAgent(policy.act, BATCHER, PERIOD, True, micro_batch, policy.act_on)


def seen_at_random(count):
    rng = np.random.default_rng(0)
    return [random_observation(FLOW, rng, [""]) for _ in range(count)]


def test_a_micro_batch_goes_on_as_single_rows_do():
    seen = seen_at_random(3)
    assert exact_micro_batch(a_flow_agent(), seen[0], 4) in (1, 4)
    running = [Running(targets(2), PERIOD, 1), None, Running(targets(3), PERIOD, 3)]
    one, several = (a_flow_agent(size).plan_from(range(3), seen, running) for size in (1, 4))
    for a, b in zip(one, several, strict=True):
        np.testing.assert_allclose(a.actions, b.actions, atol=1e-5)
    (plain,) = a_flow_agent().plan([0], [seen[1]])
    assert np.array_equal(one[1].actions, plain.actions)


def test_a_guided_batch_whose_rows_mix_is_never_used():
    agent, seen = a_flow_agent(), seen_at_random(1)[0]
    own = agent.act_on

    def mixing(batch, running, weights):
        return own(batch, running, weights) + running.sum() * 1e-6

    assert exact_micro_batch(PolicyAgent(agent.act, BATCHER, PERIOD, True, act_on=mixing), seen, 4) == 1
