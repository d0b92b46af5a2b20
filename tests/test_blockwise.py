"""The block-masked policy: an immutable prefix, flow matching, the autoregressive blocks, and planted bugs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.attention import Transformer, attend, audit_mask
from robotattn.attention.masks import padding
from robotattn.policies import BlockwiseConfig, build
from robotattn.policies import blockwise as module
from robotattn.policies.blocks import joined, recall
from robotattn.policies.sampling import Sampling

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, rows, statistics

SMALL = {"width": 32, "heads": 2, "feedforward": 32, "text_width": 16, "stem_channels": 8, "vocabulary": 10, "chunk": 3}
FLOW = BlockwiseConfig(objects=True, layers=2, **SMALL)
BINS = dataclasses.replace(FLOW, head="autoregressive")


def make(config):
    torch.manual_seed(0)
    policy = build(config).eval()
    policy.set_statistics(statistics(config.action_mode))
    return policy


def remembered(policy, data):
    with torch.no_grad():
        return policy.prefill(policy.tokenize(data))


def exact(policy, data):
    """Return tokens in float64, and move the policy there too (it sees in float32)."""
    with torch.no_grad():
        tokens = policy.tokenize(data)
    policy.double()
    return dataclasses.replace(tokens, values=tokens.values.double(), state=tokens.state.double())


def noisy(policy, size=3):
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, *policy.units.shape, generator=g).double(), torch.rand(size, generator=g).double()


# ------------------------------------------------------------------------------------------ the joint pass


def whole_pass(policy, tokens, x):
    """Compute prefix and actions as one sequence under one mask, layer by layer, and return the actions' part.

    Every token has the weights of its own net; no cache is involved.
    """
    count, size = x.shape[1], tokens.values.shape[1]
    valid = torch.cat([tokens.mask, tokens.mask.new_ones(len(x), count)], dim=1)
    mask = policy.mask(size).tensor(size + count, size + count) & padding(valid)
    parts = [tokens.values, x]
    for layers in zip(policy.encoder.layers, policy.expert.layers, strict=True):
        normed = [layer.attention_norm(part) for layer, part in zip(layers, parts, strict=True)]
        pairs = [layer.attention.keys_values(part) for layer, part in zip(layers, normed, strict=True)]
        heads = layers[0].attention.heads
        queries = [
            layer.attention.query(part).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, part in zip(layers, normed, strict=True)
        ]
        keys, values = (torch.cat(both, dim=2) for both in zip(*pairs, strict=True))
        mixed = attend(torch.cat(queries, dim=2), keys, values, mask, "reference").transpose(1, 2).flatten(2)
        mixed = mixed.split([size, count], dim=1)
        for i, layer in enumerate(layers):
            parts[i] = parts[i] + layer.attention.out(mixed[i])
            parts[i] = parts[i] + layer.feedforward(layer.feedforward_norm(parts[i]))
    return policy.expert.norm(parts[1])


@torch.no_grad()
@pytest.mark.parametrize("config", [FLOW, BINS], ids=["flow", "autoregressive"])
def test_reading_the_kept_prefix_equals_one_pass_over_the_whole_sequence(config):
    policy = make(config)
    tokens = exact(policy, batch(config))
    memory = policy.prefill(tokens)
    x = torch.randn(3, 3, 32, generator=torch.Generator().manual_seed(2)).double()
    apart = policy.expert(x, policy.mask(memory.mask.shape[1]), cache=recall(memory))
    torch.testing.assert_close(apart, whole_pass(policy, tokens, x), rtol=0, atol=1e-12)


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


@torch.no_grad()
def test_ten_steps_leave_the_prefix_as_it_was():
    policy = make(FLOW)
    memory = remembered(policy, batch(FLOW))
    before = [part.clone() for pair in memory.context for part in pair]
    policy.denoise(memory)
    assert all(map(torch.equal, before, [part for pair in memory.context for part in pair]))


@torch.no_grad()
def test_cached_choices_are_those_of_the_full_forward():
    policy = make(BINS)
    memory = remembered(policy, batch(BINS, size=4))
    ids = torch.zeros(4, *policy.units.shape, dtype=torch.long)
    for step in range(3):
        ids[:, step] = policy.scores(memory, ids)[:, step].argmax(dim=-1)
    assert torch.equal(policy.choose(memory), ids)


@torch.no_grad()
@pytest.mark.parametrize("split", [1, 2, 3])
def test_cached_scores_are_those_of_the_full_forward_for_every_split(split):
    policy = make(BINS)
    memory = policy.prefill(exact(policy, batch(BINS)))
    x = policy.action_tokens(memory, torch.randint(0, 256, (3, *policy.units.shape)))
    mask = policy.mask(memory.mask.shape[1])
    cache = recall(memory).grow(3)
    parts = [policy.expert(part, mask, cache=cache) for part in x.split(split, dim=1)]
    whole = policy.expert(x, mask, cache=recall(memory))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------ who reads whom


def audited(policy, config, values=("value",), planted=None):
    """Audit the two nets as one function of prefix and action tokens."""
    tokens = exact(policy, rows(batch(config), slice(0, 1)))
    size, count = tokens.values.shape[1], 3
    x = torch.cat([tokens.values, torch.randn(1, count, 32).double()], dim=1).detach()
    valid = torch.cat([tokens.mask[0], tokens.mask.new_ones(count)])
    mask = policy.mask(size)

    def forward(x):
        seen, kv = policy.encoder.prefix(x[:, :size], joined(size, 0), valid=tokens.mask)
        acted = policy.expert(x[:, size:], mask if planted is None else planted(size), cache=kv)
        return torch.cat([seen, acted], dim=1)

    allowed = mask.tensor(size + count, size + count) & valid & valid[:, None]
    return audit_mask(forward, x, allowed, values=values, tolerance=1e-12)


@pytest.mark.parametrize("kind", ["value", "nan", "1e30"])
@pytest.mark.parametrize("config", [FLOW, BINS], ids=["flow", "autoregressive"])
def test_an_audit_of_every_token_finds_no_leak(config, kind):
    audited(make(config), config, (kind,)).check()


def test_flow_reads_all_actions_and_the_autoregressive_blocks_earlier_ones_only():
    flow, bins = (make(config).mask(9).tensor(12, 12) for config in (FLOW, BINS))
    assert flow[9:].all() and not flow[:9, 9:].any()
    assert torch.equal(bins[9:, 9:], torch.ones(3, 3).tril().bool()) and not bins[:9, 9:].any()
    assert not bins[:8, 8].any() and not flow[:8, 8].any()
    assert not flow[:7, 7].any()  # the scene does not read proprioception


def test_an_action_is_scored_by_earlier_actions_and_not_by_itself():
    check_shift(make(BINS))


def check_shift(policy):
    """Change one action after the other: only the scores of later ones may move, and all of them must."""
    memory = policy.prefill(exact(policy, rows(batch(BINS), slice(0, 1))))
    ids = torch.full((1, *policy.units.shape), 100)
    with torch.no_grad():
        before = policy.scores(memory, ids)[0]
        for step in range(3):
            changed = ids.clone()
            changed[:, step] = 200
            moved = (policy.scores(memory, changed)[0] - before).abs().amax(dim=(1, 2)) > 1e-9
            assert moved.tolist() == [False] * (step + 1) + [True] * (2 - step)


# ------------------------------------------------------------------------------------------ flow matching


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
    policy = make(dataclasses.replace(FLOW, method=method, steps=steps))
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
    errors, _ = policy._flow_errors(remembered(policy, data), policy.units.offsets(data["actions"], data["state"]))
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


@torch.no_grad()
def test_the_autoregressive_head_draws_with_its_generator():
    policy = make(BINS)
    memory = remembered(policy, batch(BINS))
    draw = Sampling(1.0)
    one, two, other = (policy.decode(memory, torch.Generator().manual_seed(seed), draw) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)
    with pytest.raises(ValueError, match="generator: needed"):
        policy.decode(memory, sampling=draw)


def test_standardised_chunks_have_the_gripper_at_one_and_minus_one():
    policy, data = make(FLOW), batch(FLOW)
    values = policy.units.standardise(policy.units.offsets(data["actions"], data["state"]))
    assert set(values[..., -1].unique().tolist()) == {-1.0, 1.0}
    back = policy.units.actions(policy.units.restore(values), data["state"])
    torch.testing.assert_close(back, data["actions"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["flow", "autoregressive"])
def test_joint_chunks_are_offsets_from_the_joints_now(head):
    config = dataclasses.replace(FLOW, action_mode="joint", head=head)
    policy, data = make(config), batch(config)
    memory = remembered(policy, data)
    state = memory.state.clone()
    state[:, :7] += 0.25
    with torch.no_grad():
        gap = policy.decode(dataclasses.replace(memory, state=state)) - policy.decode(memory)
    torch.testing.assert_close(gap[..., :7], torch.full_like(gap[..., :7], 0.25), rtol=0, atol=1e-5)


@torch.no_grad()
def test_accuracy_of_its_own_choices_is_one():
    policy, data = make(BINS), batch(BINS)
    own = policy.bins.decode(policy.choose(remembered(policy, data)))
    found = policy.accuracy(data | {"actions": own})
    torch.testing.assert_close(found["free"], torch.ones(3, 5))
    torch.testing.assert_close(found["forced"], torch.ones(3, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objects": False}, "cameras: empty, and objects is false"),
        ({"steps": 0}, "steps: 0 is less than 1"),
        ({"layers": 0}, "layers: 0 is less than 1"),
        ({"chunk": 0}, "chunk: 0 is less than 1"),
        ({"action_weight": -1.0}, r"action_weight: -1\.0 is less than 0"),
    ],
)
def test_impossible_configs_are_refused_with_the_field_and_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FLOW, **changes)


# ------------------------------------------------------------------------------------------ planted bugs


def test_labels_that_are_not_shifted_are_caught():
    policy = make(BINS)
    policy.action_tokens = lambda memory, ids: policy._embed(ids) + policy._inputs(memory)
    with pytest.raises(AssertionError):
        check_shift(policy)


def test_actions_that_read_later_ones_are_caught():
    assert audited(make(BINS), BINS, planted=lambda size: joined(size, 3)).leaks


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
