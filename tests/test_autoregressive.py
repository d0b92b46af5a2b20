"""The autoregressive policy: room for its tokens, the horizon, the loss, expected values, and planted bugs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.attention import CacheOverflow, Mask, PrefixKV, audit_mask
from robotattn.policies import autoregressive as module
from robotattn.policies.base import masked_mean
from robotattn.policies.bin_head import cross_entropy
from robotattn.policies.blocks import causal, joined, recall

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, rows
from decoders import TOKENS as CONFIG
from decoders import exact, make, remembered
from test_decoders import check_two_episodes


@torch.no_grad()
def test_one_token_more_than_the_chunk_does_not_fit():
    policy = make(CONFIG)
    memory = remembered(policy, batch(CONFIG))
    cache, x = recall(memory).grow(15), policy.action_tokens(memory, torch.zeros(3, 3, 5, dtype=torch.long))
    policy.decoder(x, policy.mask(memory.mask.shape[1]), cache=cache)
    with pytest.raises(CacheOverflow):
        policy.decoder(x[:, :1], policy.mask(memory.mask.shape[1]), cache=cache)


@torch.no_grad()
def test_a_shorter_horizon_gives_the_first_actions_of_the_chunk():
    policy = make(CONFIG)
    memory = remembered(policy, batch(CONFIG))
    assert torch.equal(policy.decode(memory, horizon=1), policy.decode(memory)[:, :1])
    with pytest.raises(ValueError, match=r"horizon: 4 is not in 1\.\.3"):
        policy.decode(memory, horizon=4)


def test_the_loss_is_the_mean_cross_entropy_of_the_tokens_inside_the_episodes():
    policy, data = make(CONFIG), batch(CONFIG)
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


@torch.no_grad()
def test_the_expected_value_is_the_mean_of_the_first_tokens_bins():
    policy = make(CONFIG, expected=True)
    memory = remembered(policy, batch(CONFIG))
    ids, offsets = policy.choose(memory)
    scores = policy.scores(memory, ids)
    centres = policy.bins.decode(torch.arange(256)[:, None, None].expand(-1, 3, 5))  # [256, H, A]
    want = torch.einsum("bhan,nha->bha", scores.softmax(dim=-1), centres)
    torch.testing.assert_close(offsets, want, rtol=1e-3, atol=1e-5)
    assert torch.equal(policy.bins.encode(offsets)[0], ids)


# ------------------------------------------------------------------------------------------ planted bugs


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


def test_a_cache_that_keeps_the_last_episode_is_caught(monkeypatch):
    kept_caches = []
    grow = PrefixKV.grow

    def stale(self, extra, whole=False):
        kept_caches.append(kept_caches[0] if kept_caches else grow(self, 4 * extra, whole))
        return kept_caches[-1]

    monkeypatch.setattr(PrefixKV, "grow", stale)
    with pytest.raises((AssertionError, ValueError)):
        check_two_episodes(make(CONFIG))


def test_a_prefix_that_reads_actions_is_caught(monkeypatch):
    leaks = audited(make(CONFIG), lambda prefix: joined(prefix - 15, 30)).leaks
    assert any(finding.output < 9 <= finding.token for finding in leaks)
    monkeypatch.setattr(module.Autoregressive, "mask", lambda self, prefix: joined(prefix - 15, 30))
    with pytest.raises(ValueError, match="would have to be computed again"):
        make(CONFIG).act(batch(CONFIG))


def test_a_transposed_mask_is_caught():
    class Transposed(Mask):
        def allows(self, row, query, key):
            return causal(12, 15).allows(row, key, query)

    assert not audited(make(CONFIG), lambda prefix: Transposed()).ok


def test_padding_that_is_read_is_caught(monkeypatch):
    def careless(memory):
        return dataclasses.replace(recall(memory), valid=torch.ones_like(memory.mask))

    policy = make(CONFIG)
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
