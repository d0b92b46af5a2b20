"""The autoregressive policy: cached = uncached, who reads whom, the shift of the labels, sampling, and planted bugs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.attention import CacheOverflow, Mask, PrefixKV, audit_mask
from robotattn.policies import AutoregressiveConfig, build
from robotattn.policies import autoregressive as module
from robotattn.policies.base import masked_mean
from robotattn.policies.bin_head import cross_entropy
from robotattn.policies.blocks import causal, check_order, joined, recall
from robotattn.policies.sampling import GREEDY, Sampling, choose, kept
from robotattn.tokens.normaliser import Moments, Statistics, Steps

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, rows, statistics

SMALL = {"width": 32, "heads": 2, "feedforward": 32, "text_width": 16, "stem_channels": 8, "vocabulary": 10, "chunk": 3}
CONFIG = AutoregressiveConfig(objects=True, layers=2, **SMALL)


def make(config=CONFIG):
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


def uncached(policy, memory):
    """Choose greedily with a full pass over the whole chunk for every token."""
    ids = torch.zeros(len(memory.state), *policy.units.shape, dtype=torch.long)
    for place in range(policy.units.shape.numel()):
        step, dimension = divmod(place, policy.units.shape[1])
        ids[:, step, dimension] = policy.scores(memory, ids)[:, step, dimension].argmax(dim=-1)
    return ids


# ------------------------------------------------------------------------------------------ cached = uncached


@torch.no_grad()
def test_cached_decoding_chooses_the_tokens_of_the_full_forward():
    policy = make()
    memory = remembered(policy, batch(CONFIG, size=4))
    assert torch.equal(policy.choose(memory)[0], uncached(policy, memory))


@torch.no_grad()
def test_cached_scores_are_those_of_the_full_forward_for_every_split():
    policy = make()
    memory = policy.prefill(exact(policy, batch(CONFIG)))
    ids = torch.randint(0, 256, (3, *policy.units.shape), generator=torch.Generator().manual_seed(1))
    x = policy.action_tokens(memory, ids)
    mask, whole = (
        policy.mask(memory.mask.shape[1]),
        policy.decoder(x, policy.mask(memory.mask.shape[1]), cache=recall(memory)),
    )
    for split in (1, 2, 5, 15):
        cache = recall(memory).grow(x.shape[1])
        parts = [policy.decoder(part, mask, cache=cache) for part in x.split(split, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_prefix_alone_gives_what_it_gives_in_the_whole_sequence():
    policy = make()
    tokens = exact(policy, batch(CONFIG))
    memory = policy.prefill(tokens)
    x = policy.action_tokens(memory, torch.zeros(3, *policy.units.shape, dtype=torch.long))
    valid = torch.cat([tokens.mask, tokens.mask.new_ones(3, x.shape[1])], dim=1)
    together = policy.decoder(torch.cat([tokens.values, x], dim=1), policy.mask(memory.mask.shape[1]), valid=valid)
    apart = policy.decoder(x, policy.mask(memory.mask.shape[1]), cache=recall(memory))
    torch.testing.assert_close(together[:, -x.shape[1] :], apart, rtol=0, atol=1e-12)


@torch.no_grad()
def test_one_token_more_than_the_chunk_does_not_fit():
    policy = make()
    memory = remembered(policy, batch(CONFIG))
    cache, x = recall(memory).grow(15), policy.action_tokens(memory, torch.zeros(3, 3, 5, dtype=torch.long))
    policy.decoder(x, policy.mask(memory.mask.shape[1]), cache=cache)
    with pytest.raises(CacheOverflow):
        policy.decoder(x[:, :1], policy.mask(memory.mask.shape[1]), cache=cache)


def test_two_episodes_after_each_other_are_as_two_alone():
    policy = make()
    data = batch(CONFIG, size=2)
    first, second = (policy.act(rows(data, slice(i, i + 1))) for i in (0, 1))
    again = policy.act(rows(data, slice(0, 1)))
    assert torch.equal(first, again) and not torch.equal(first, second)


@torch.no_grad()
def test_a_shorter_horizon_gives_the_first_actions_of_the_chunk():
    policy = make()
    memory = remembered(policy, batch(CONFIG))
    assert torch.equal(policy.decode(memory, horizon=1), policy.decode(memory)[:, :1])
    with pytest.raises(ValueError, match=r"horizon: 4 is not in 1\.\.3"):
        policy.decode(memory, horizon=4)


# ------------------------------------------------------------------------------------------ who reads whom


def audited(policy, planted=None, values=("value",)):
    """Audit the decoder over a whole sequence; planted: a mask in place of the policy's."""
    tokens = exact(policy, rows(batch(CONFIG), slice(0, 1)))
    prefix, actions = tokens.values.shape[1], 15
    valid = torch.cat([tokens.mask, tokens.mask.new_ones(1, actions)], dim=1)
    x = torch.cat([tokens.values, torch.randn(1, actions, 32).double()], dim=1).detach()
    mask = policy.mask(prefix)
    allowed = mask.tensor(prefix + actions, prefix + actions) & valid[0] & valid[0][:, None]
    used = mask if planted is None else planted(prefix)
    return audit_mask(lambda x: policy.decoder(x, used, valid=valid), x, allowed, values=values, tolerance=1e-12)


@pytest.mark.parametrize("kind", ["value", "nan", "1e30"])
def test_an_audit_of_every_token_finds_no_leak(kind):
    audited(make(), values=(kind,)).check()


def test_no_block_of_the_prefix_reads_a_later_one_or_an_action():
    mask = causal(9, 4).tensor(13, 13)
    assert mask[:7, :7].all() and not mask[:7, 7:].any()  # scene and instruction
    assert mask[7, :8].all() and not mask[7, 8:].any()  # proprioception
    assert mask[8, :9].all() and not mask[8, 9:].any()  # target
    assert torch.equal(mask[9:, 9:], torch.ones(4, 4).tril().bool()) and mask[9:, :9].all()


def test_what_the_scene_says_never_depends_on_proprioception():
    policy = make()
    data = batch(CONFIG)
    one, two = (remembered(policy, data | {"state": data["state"] + shift}) for shift in (0.0, 1.0))
    scene = one.mask.shape[1] - 2
    for (k1, v1), (k2, v2) in zip(one.context, two.context, strict=True):
        assert torch.equal(k1[:, :, :scene], k2[:, :, :scene]) and torch.equal(v1[:, :, :scene], v2[:, :, :scene])
        assert not torch.equal(k1[:, :, scene:], k2[:, :, scene:])


def test_a_prefix_in_another_order_is_refused():
    tokens = make().tokenize(batch(CONFIG))
    swapped = dict(tokens.slices) | {"target": tokens.slices["proprioception"]}
    with pytest.raises(ValueError, match=r"the prefix must end in \['proprioception', 'target'\]"):
        check_order(dataclasses.replace(tokens, slices=swapped))


# ------------------------------------------------------------------------------------------ labels


def check_shift(policy):
    """Change one token after the other: only the scores of later ones may move, and all of them must."""
    memory = policy.prefill(exact(policy, rows(batch(CONFIG), slice(0, 1))))
    ids = torch.full((1, *policy.units.shape), 100)
    with torch.no_grad():
        before = policy.scores(memory, ids).flatten(1, 2)[0]
        for place in range(15):
            changed = ids.clone()
            changed.view(-1)[place] = 200
            moved = (policy.scores(memory, changed).flatten(1, 2)[0] - before).abs().amax(dim=-1) > 1e-9
            assert moved.tolist() == [False] * (place + 1) + [True] * (14 - place)


def test_a_token_is_scored_by_every_earlier_one_and_not_by_itself_or_later_ones():
    check_shift(make())


def test_the_loss_is_the_mean_cross_entropy_of_the_tokens_inside_the_episodes():
    policy, data = make(), batch(CONFIG)
    with torch.no_grad():
        losses = policy.loss(data)
        offsets = policy.units.offsets(data["actions"], data["state"])
        ids, _ = policy.bins.encode(offsets)
        scores = policy.scores(remembered(policy, data), ids)
    errors = cross_entropy(scores, ids)
    valid = data["actions_mask"]
    assert losses["action"].item() == pytest.approx(errors[valid][:, :-1].mean().item(), rel=1e-5)
    assert losses["gripper"].item() == pytest.approx(errors[valid][:, -1].mean().item(), rel=1e-5)
    rest = losses["loss"] - losses["pose"] - CONFIG.attention_weight * losses["attention"]
    assert rest.item() == pytest.approx(0.2 * masked_mean(errors, valid).item(), rel=1e-4)


def test_accuracy_is_counted_with_the_true_and_with_its_own_earlier_tokens():
    policy, data = make(), batch(CONFIG)
    memory = remembered(policy, data)
    own = policy.choose(memory)[0]
    actions = policy.units.actions(policy.bins.decode(own), data["state"])
    actions[..., -1] = policy.bins.decode(own)[..., -1]  # not rounded, so that the very bins come back
    found = policy.accuracy(data | {"actions": actions})
    torch.testing.assert_close(found["free"], torch.ones(3, 5))
    torch.testing.assert_close(found["forced"], torch.ones(3, 5))
    other = policy.accuracy(data)
    assert set(other) == {"forced", "free"} and other["free"].shape == (3, 5)
    assert (other["free"] <= 1).all() and other["free"].mean() < 0.5


# ------------------------------------------------------------------------------------------ sampling


def test_greedy_takes_the_best_and_needs_no_generator():
    assert choose(torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])).tolist() == [1, 0]


def test_drawing_without_a_generator_is_refused():
    with pytest.raises(ValueError, match="generator: needed to sample"):
        choose(torch.zeros(1, 3), Sampling(0.5))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_frequencies_are_the_softmax_at_the_temperature(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0])
    drawn = choose(logits.expand(20_000, 3), Sampling(temperature), torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(share, (logits / temperature).softmax(dim=-1), rtol=0, atol=0.012)


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(1.0), [0, 1, 2, 3]),
        (Sampling(1.0, top_k=2), [0, 2]),
        (Sampling(1.0, top_k=9), [0, 1, 2, 3]),
        (Sampling(1.0, top_p=0.4), [0]),  # the best alone has 0.5
        (Sampling(1.0, top_p=0.5), [0]),
        (Sampling(1.0, top_p=0.6), [0, 2]),
        (Sampling(1.0, top_p=0.9), [0, 1, 2]),
        (Sampling(1.0, top_k=3, top_p=0.95), [0, 1, 2]),
        (Sampling(1.0, top_p=1e-6), [0]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(sampling, left):
    logits = torch.tensor([0.5, 0.15, 0.3, 0.05]).log()
    assert kept(logits, sampling).isfinite().nonzero().flatten().tolist() == left


def test_of_equals_top_k_keeps_exactly_k():
    assert kept(torch.zeros(5), Sampling(1.0, top_k=2)).isfinite().sum() == 2


@torch.no_grad()
def test_the_same_generator_draws_the_same_chunk_and_another_draws_another():
    policy = make()
    memory = remembered(policy, batch(CONFIG))
    one, two, other = (policy.decode(memory, Sampling(1.0), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(policy.decode(memory, GREEDY), policy.decode(memory))


@pytest.mark.parametrize(
    ("values", "message"),
    [((-1.0,), "temperature: -1.0"), ((1.0, -1), "top_k: -1"), ((1.0, 0, 0.0), "top_p: 0.0"), ((1.0, 0, 1.5), "top_p")],
)
def test_impossible_sampling_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(*values)


@torch.no_grad()
def test_the_expected_value_is_the_mean_of_the_first_tokens_bins():
    policy = make(dataclasses.replace(CONFIG, expected=True))
    memory = remembered(policy, batch(CONFIG))
    ids, offsets = policy.choose(memory)
    scores = policy.scores(memory, ids)
    centres = policy.bins.decode(torch.arange(256)[:, None, None].expand(-1, 3, 5))  # [256, H, A]
    want = torch.einsum("bhan,nha->bha", scores.softmax(dim=-1), centres)
    torch.testing.assert_close(offsets, want, rtol=1e-3, atol=1e-5)
    assert torch.equal(policy.bins.encode(offsets)[0], ids)


# ------------------------------------------------------------------------------------------ statistics of the steps


def steps(chunk, size=5):
    names = tuple(f"d{i}" for i in range(size))
    moments = tuple(Moments(names, (0.0,) * size, (0.01 * (k + 1),) * size, 0.001) for k in range(chunk))
    return Steps(moments, *(tuple((sign * 0.02 * (k + 1),) * size for k in range(chunk)) for sign in (-1, 1)))


def test_each_step_has_bins_of_its_own_range():
    policy = make()
    policy.set_statistics(Statistics(statistics().moments, steps(4)))
    widths = policy.bins.get_buffer("width")
    torch.testing.assert_close(widths[:, 0], torch.tensor([0.04, 0.08, 0.12]) / 255)
    torch.testing.assert_close(widths[:, -1], torch.ones(3) / 255)  # the gripper's is fixed


def test_steps_of_a_shorter_chunk_are_refused():
    with pytest.raises(ValueError, match=r"steps are \[2, 5\] \(steps, dimensions\), this policy needs \[3, 5\]"):
        make().set_statistics(Statistics(statistics().moments, steps(2)))


# ------------------------------------------------------------------------------------------ planted bugs


def test_labels_that_are_not_shifted_are_caught():
    policy = make()

    def not_shifted(memory, ids):
        tokens = policy.head.embed(ids, torch.arange(5)).flatten(1, 2)
        return tokens + policy._inputs(memory)

    policy.action_tokens = not_shifted
    with pytest.raises(AssertionError):
        check_shift(policy)


def test_a_mask_that_lets_actions_read_later_ones_is_caught():
    policy = make()
    policy.mask = lambda prefix: joined(prefix, 15)
    with pytest.raises(AssertionError):
        check_shift(policy)


def test_a_cache_that_keeps_the_last_episode_is_caught(monkeypatch):
    kept_caches = []
    grow = PrefixKV.grow

    def stale(self, extra, whole=False):
        kept_caches.append(kept_caches[0] if kept_caches else grow(self, 4 * extra, whole))
        return kept_caches[-1]

    monkeypatch.setattr(PrefixKV, "grow", stale)
    with pytest.raises((AssertionError, ValueError)):
        test_two_episodes_after_each_other_are_as_two_alone()


def test_a_prefix_that_reads_actions_is_caught(monkeypatch):
    leaks = audited(make(), lambda prefix: joined(prefix - 15, 30)).leaks
    assert any(finding.output < 9 <= finding.token for finding in leaks)
    monkeypatch.setattr(module.Autoregressive, "mask", lambda self, prefix: joined(prefix - 15, 30))
    with pytest.raises(ValueError, match="would have to be computed again"):
        make().act(batch(CONFIG))


def test_a_transposed_mask_is_caught():
    class Transposed(Mask):
        def allows(self, row, query, key):
            return causal(12, 15).allows(row, key, query)

    assert not audited(make(), lambda prefix: Transposed()).ok


def test_padding_that_is_read_is_caught(monkeypatch):
    def careless(memory):
        return dataclasses.replace(recall(memory), valid=torch.ones_like(memory.mask))

    policy = make()
    data = batch(CONFIG)
    longer = dict(data)
    longer["text"] = torch.cat([data["text"], torch.full((3, 5), 7)], dim=1)
    longer["text_mask"] = torch.cat([data["text_mask"], torch.zeros(3, 5, dtype=torch.bool)], dim=1)
    ids = torch.zeros(3, 3, 5, dtype=torch.long)

    def gap():
        with torch.no_grad():
            one, two = (policy.scores(remembered(policy, d), ids) for d in (data, longer))
        return (one - two).abs().max()

    assert gap() < 1e-4
    monkeypatch.setattr(module, "recall", careless)
    assert gap() > 1e-3
