"""The block-masked policy: flow matching, its solver over an immutable prefix, and planted bugs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.attention import Transformer, audit_mask
from robotattn.policies import blockwise as module
from robotattn.policies.blocks import joined, recall

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, rows
from decoders import FLOW, exact, make, remembered


def noisy(policy, size=3):
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, *policy.units.shape, generator=g).double(), torch.rand(size, generator=g).double()


@torch.no_grad()
def test_the_scratch_of_the_solver_gives_the_velocity_of_the_training_pass():
    policy = make(FLOW)
    memory = policy.prefill(exact(policy, batch(FLOW)))
    (x, time), scratch = noisy(policy), recall(memory).scratch(3)
    for _ in range(3):  # overwritten each time, it never grows
        torch.testing.assert_close(
            policy.velocity(memory, x, time, scratch), policy.velocity(memory, x, time), rtol=0, atol=1e-12
        )
        x = x + 1.0


class Straight(torch.nn.Module):
    """A velocity field whose chunks are known: x' = target - x, so x(1) = target (1 - 1/e) from zero."""

    def __init__(self, target):
        super().__init__()
        self.target, self.calls = target, []

    def __call__(self, memory, x, time, scratch=None):
        self.calls.append(time[0].item())
        return self.target - x


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "steps", "factor"),
    [("euler", 1, 1.0), ("euler", 4, 1 - 0.75**4), ("midpoint", 1, 0.5), ("midpoint", 2, 1 - (1 - 0.5 + 0.125) ** 2)],
)
def test_the_solver_takes_the_steps_of_its_method(method, steps, factor):
    policy = make(FLOW, method=method, steps=steps)
    memory = remembered(policy, batch(FLOW))
    target = torch.randn(3, *policy.units.shape)
    object.__setattr__(policy, "velocity", field := Straight(target))
    torch.testing.assert_close(policy.denoise(memory), factor * target)
    starts = [step / steps for step in range(steps)]
    halves = [t for start in starts for t in (start, start + 0.5 / steps)]
    assert field.calls == pytest.approx(starts if method == "euler" else halves)


def test_at_no_noise_and_at_full_noise_the_target_of_the_velocity_is_the_same_line(monkeypatch):
    """x_t = (1 - t) noise + t chunk, whose derivative is chunk - noise at every t."""
    policy, data = make(FLOW), batch(FLOW)
    seen = {}

    def record(memory, x, time, scratch=None):
        seen.update(x=x, time=time)
        return torch.zeros_like(x)

    monkeypatch.setattr(policy, "velocity", record)
    torch.manual_seed(3)
    errors = policy._flow_errors(remembered(policy, data), policy.units.offsets(data["actions"], data["state"]))
    torch.manual_seed(3)
    chunk = policy.units.standardise(data["actions"])
    noise = torch.randn_like(chunk)
    time = seen["time"][:, None, None]
    torch.testing.assert_close(seen["x"], (1 - time) * noise + time * chunk)
    torch.testing.assert_close(errors, (chunk - noise).square())


def test_times_are_drawn_nearer_to_the_noise(monkeypatch):
    policy, times = make(FLOW), []
    data = batch(FLOW, size=4)
    memory = remembered(policy, data)
    monkeypatch.setattr(policy, "velocity", lambda memory, x, time, scratch=None: times.append(time) or x)
    for _ in range(500):
        policy._flow_errors(memory, data["actions"])
    drawn = torch.cat(times)
    assert drawn.min() >= 0 and drawn.max() <= 1
    assert drawn.mean().item() == pytest.approx(0.4, abs=0.03)  # 1 - the mean 0.6 of a Beta(1.5, 1)


@torch.no_grad()
def test_without_a_generator_it_starts_from_zero_and_with_one_from_its_noise():
    policy = make(FLOW)
    memory = remembered(policy, batch(FLOW))
    one, two, other = (policy.decode(memory, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(policy.decode(memory), policy.decode(memory))
    assert torch.equal(one, two) and not torch.equal(one, other) and not torch.equal(one, policy.decode(memory))


def test_standardised_chunks_have_the_gripper_at_one_and_minus_one():
    policy, data = make(FLOW), batch(FLOW)
    values = policy.units.standardise(policy.units.offsets(data["actions"], data["state"]))
    assert set(values[..., -1].unique().tolist()) == {-1.0, 1.0}
    back = policy.units.actions(policy.units.restore(values), data["state"])
    torch.testing.assert_close(back, data["actions"], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------ planted bugs


def test_a_scene_that_reads_the_target_token_is_caught():
    policy = make(FLOW)
    tokens = exact(policy, rows(batch(FLOW), slice(0, 1)))
    size = tokens.values.shape[1]

    def forward(x):
        return policy.encoder(x, joined(size + 2, 0), valid=tokens.mask)  # the own blocks lie two tokens too far

    allowed = joined(size, 0).tensor(size, size) & tokens.mask[0] & tokens.mask[0][:, None]
    leaks = audit_mask(forward, tokens.values.detach(), allowed, values=("value",), tolerance=1e-12).leaks
    assert any(finding.token >= size - 2 > finding.output for finding in leaks)


@torch.no_grad()
def test_a_prefix_cache_that_grows_with_every_step_is_caught(monkeypatch):
    policy = make(FLOW)
    memory = remembered(policy, batch(FLOW))
    right = policy.denoise(memory)
    monkeypatch.setattr(
        module, "recall", lambda memory: type("Growing", (), {"scratch": lambda self, n: recall(memory).grow(10 * n)})()
    )
    try:
        wrong = policy.denoise(memory)
    except ValueError as error:  # the library refuses: the block of actions is already there
        assert "would have to be computed again" in str(error)
    else:
        assert (wrong - right).abs().max() > 1e-3


def test_the_two_nets_must_be_equally_deep():
    policy = make(FLOW)
    policy.expert = Transformer(dataclasses.replace(policy.expert.config, layers=3))
    with pytest.raises((ValueError, IndexError)):
        policy.act(batch(FLOW))
