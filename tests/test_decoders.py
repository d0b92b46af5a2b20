"""Policies whose actions follow a prefix: cached = uncached, the shift of the labels, units, and planted bugs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.attention import attend
from robotattn.attention.masks import padding
from robotattn.policies.blocks import causal, check_order, joined, recall
from robotattn.policies.sampling import GREEDY, Sampling
from robotattn.tokens.normaliser import Moments, Statistics, Steps

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, rows, statistics
from decoders import BINNED, BINS, DECODERS, FLOW, TOKENS, by_token, check_shift, exact, make, remembered

each = pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS)
each_binned = pytest.mark.parametrize("config", BINNED.values(), ids=BINNED)


def nets(policy):
    """The net of the prefix and that of the actions: two, or one for both."""
    return (policy.decoder, policy.decoder) if hasattr(policy, "decoder") else (policy.encoder, policy.expert)


# ------------------------------------------------------------------------------------------ cached = uncached


def whole_pass(policy, tokens, x):
    """Compute prefix and actions as one sequence under one mask, layer by layer, and return the actions' part.

    Every token has the weights of its own net; no cache is involved.
    """
    count, size = x.shape[1], tokens.values.shape[1]
    valid = torch.cat([tokens.mask, tokens.mask.new_ones(len(x), count)], dim=1)
    mask = policy.mask(size).tensor(size + count, size + count) & padding(valid)
    parts = [tokens.values, x]
    for layers in zip(*(net.layers for net in nets(policy)), strict=True):
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
    return nets(policy)[1].norm(parts[1])


@torch.no_grad()
@each
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_reading_the_kept_prefix_equals_one_pass_over_the_whole_sequence(config, kv_heads):
    policy = make(config, kv_heads=kv_heads)
    tokens = exact(policy, batch(config))
    memory = policy.prefill(tokens)
    x = torch.randn(3, policy.chunk_tokens, 32, generator=torch.Generator().manual_seed(2)).double()
    apart = nets(policy)[1](x, policy.mask(memory.mask.shape[1]), cache=recall(memory))
    torch.testing.assert_close(apart, whole_pass(policy, tokens, x), rtol=0, atol=1e-12)


@torch.no_grad()
@each_binned
def test_cached_decoding_chooses_the_bins_of_the_full_forward(config):
    policy = make(config)
    memory = remembered(policy, batch(config, size=4))
    ids = torch.zeros(4, *policy.units.shape, dtype=torch.long)
    for place in range(policy.chunk_tokens):
        by_token(policy, ids)[:, place] = by_token(policy, policy.scores(memory, ids))[:, place].argmax(dim=-1)
    assert torch.equal(policy.greedy(memory), ids)


@torch.no_grad()
@each_binned
def test_cached_scores_are_those_of_the_full_forward_for_every_split(config):
    policy = make(config)
    memory = policy.prefill(exact(policy, batch(config)))
    ids = torch.randint(0, 256, (3, *policy.units.shape), generator=torch.Generator().manual_seed(1))
    x, mask, net = policy.action_tokens(memory, ids), policy.mask(memory.mask.shape[1]), nets(policy)[1]
    whole = net(x, mask, cache=recall(memory))
    for split in (1, 2, 5, x.shape[1]):
        cache = recall(memory).grow(x.shape[1])
        parts = [net(part, mask, cache=cache) for part in x.split(split, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)


@each
def test_two_episodes_after_each_other_are_as_two_alone(config):
    check_two_episodes(make(config))


def check_two_episodes(policy):
    data = batch(policy.config, size=2)
    first, second = (policy.act(rows(data, slice(i, i + 1))) for i in (0, 1))
    again = policy.act(rows(data, slice(0, 1)))
    assert torch.equal(first, again) and not torch.equal(first, second)


@torch.no_grad()
@each
def test_decoding_leaves_the_prefix_as_it_was(config):
    policy = make(config)
    memory = remembered(policy, batch(config))
    before = [part.clone() for pair in memory.context for part in pair]
    policy.decode(memory)
    assert all(map(torch.equal, before, [part for pair in memory.context for part in pair]))


# ------------------------------------------------------------------------------------------ who reads whom


def test_no_block_of_the_prefix_reads_a_later_one_or_an_action():
    mask = causal(9, 4).tensor(13, 13)
    assert mask[:7, :7].all() and not mask[:7, 7:].any()  # scene and instruction
    assert mask[7, :8].all() and not mask[7, 8:].any()  # proprioception
    assert mask[8, :9].all() and not mask[8, 9:].any()  # target
    assert torch.equal(mask[9:, 9:], torch.ones(4, 4).tril().bool()) and mask[9:, :9].all()


def test_flow_reads_all_actions_and_the_others_earlier_ones_only():
    flow, bins = (make(config).mask(9).tensor(12, 12) for config in (FLOW, BINS))
    assert flow[9:].all() and not flow[:9, 9:].any()
    assert torch.equal(bins[9:, 9:], torch.ones(3, 3).tril().bool()) and not bins[:9, 9:].any()
    assert not bins[:8, 8].any() and not flow[:8, 8].any()
    assert not flow[:7, 7].any()  # the scene does not read proprioception


@each
def test_what_the_scene_says_never_depends_on_proprioception(config):
    policy, data = make(config), batch(config)
    one, two = (remembered(policy, data | {"state": data["state"] + shift}) for shift in (0.0, 1.0))
    scene = one.mask.shape[1] - 2
    for (k1, v1), (k2, v2) in zip(one.context, two.context, strict=True):
        assert torch.equal(k1[:, :, :scene], k2[:, :, :scene]) and torch.equal(v1[:, :, :scene], v2[:, :, :scene])
        assert not torch.equal(k1[:, :, scene:], k2[:, :, scene:])


def test_a_prefix_in_another_order_is_refused():
    tokens = make(TOKENS).tokenize(batch(TOKENS))
    swapped = dict(tokens.slices) | {"target": tokens.slices["proprioception"]}
    with pytest.raises(ValueError, match=r"the prefix must end in \['proprioception', 'target'\]"):
        check_order(dataclasses.replace(tokens, slices=swapped))


# ------------------------------------------------------------------------------------------ labels and choices


@each_binned
def test_a_token_is_scored_by_every_earlier_one_and_not_by_itself_or_later_ones(config):
    policy = make(config)
    check_shift(policy)
    assert policy.chunk_tokens in (3, 15)  # an action a token, or a number a token


@each_binned
def test_accuracy_is_counted_with_the_true_and_with_its_own_earlier_tokens(config):
    policy, data = make(config), batch(config)
    own = policy.bins.decode(policy.greedy(remembered(policy, data)))
    found = policy.accuracy(data | {"actions": own})
    torch.testing.assert_close(found["free"], torch.ones(3, 5))
    torch.testing.assert_close(found["forced"], torch.ones(3, 5))
    other = policy.accuracy(data)
    assert set(other) == {"forced", "free"} and other["free"].shape == (3, 5)
    assert (other["free"] <= 1).all() and other["free"].mean() < 0.5


@torch.no_grad()
@each
def test_the_same_generator_draws_the_same_chunk_and_another_draws_another(config):
    policy = make(config)
    memory, draw = remembered(policy, batch(config)), Sampling(1.0)
    one, two, other = (
        policy.decode(memory, sampling=draw, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one, two) and not torch.equal(one, other)
    greedy = policy.decode(memory)
    assert torch.equal(policy.decode(memory, sampling=GREEDY), greedy) and not torch.equal(one, greedy)


@each_binned
def test_drawing_without_a_generator_is_refused(config):
    policy = make(config)
    with pytest.raises(ValueError, match="generator: needed"):
        policy.decode(remembered(policy, batch(config)), sampling=Sampling(1.0))


# ------------------------------------------------------------------------------------------ units of the steps


def steps(chunk, size=5):
    names = tuple(f"d{i}" for i in range(size))
    moments = tuple(Moments(names, (0.0,) * size, (0.01 * (k + 1),) * size, 0.001) for k in range(chunk))
    return Steps(moments, *(tuple((sign * 0.02 * (k + 1),) * size for k in range(chunk)) for sign in (-1, 1)))


@each
def test_each_step_has_bins_of_its_own_range(config):
    policy = make(config)
    policy.set_statistics(Statistics(statistics().moments, steps(4)))
    widths = policy.bins.get_buffer("width")
    torch.testing.assert_close(widths[:, 0], torch.tensor([0.04, 0.08, 0.12]) / 255)
    torch.testing.assert_close(widths[:, -1], torch.ones(3) / 255)  # the gripper's is fixed


@each
def test_steps_of_a_shorter_chunk_are_refused(config):
    with pytest.raises(ValueError, match=r"steps are \[2, 5\] \(steps, dimensions\), this policy needs \[3, 5\]"):
        make(config).set_statistics(Statistics(statistics().moments, steps(2)))


@each
def test_joint_chunks_are_offsets_from_the_joints_now(config):
    config = dataclasses.replace(config, action_mode="joint")
    policy = make(config)
    memory = remembered(policy, batch(config))
    state = memory.state.clone()
    state[:, :7] += 0.25
    with torch.no_grad():
        gap = policy.decode(dataclasses.replace(memory, state=state)) - policy.decode(memory)
    torch.testing.assert_close(gap[..., :7], torch.full_like(gap[..., :7], 0.25), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------ planted bugs


@each_binned
def test_labels_that_are_not_shifted_are_caught(config):
    policy = make(config)

    def not_shifted(memory, ids):
        if config is BINS:
            return policy._embed(ids) + policy._inputs(memory)
        return policy.head.embed(ids, torch.arange(5)).flatten(1, 2) + policy._inputs(memory)

    policy.action_tokens = not_shifted
    with pytest.raises(AssertionError):
        check_shift(policy)


@each_binned
def test_a_mask_that_lets_actions_read_later_ones_is_caught(config):
    policy = make(config)
    policy.mask = lambda prefix: joined(prefix, policy.chunk_tokens)
    with pytest.raises(AssertionError):
        check_shift(policy)
