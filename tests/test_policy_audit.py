"""Every policy reads what its mask allows and nothing else: each token perturbed, each output compared."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.attention import audit_mask
from robotattn.attention.masks import Blocks, Everything
from robotattn.policies import blocks, build
from robotattn.policies.audit import audit_policy

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, statistics
from decoders import BINS, TOKENS, exact, make
from examples import CONFIGS, EVERY

AUDITED = EVERY | {
    name: config for name, config in CONFIGS.items() if name in ("act latent", "blockwise autoregressive")
}


def prepared(config, rows=2):
    """A policy in float64 and the tokens of some observations, of which at least one has padding."""
    policy = make(config)
    tokens = exact(policy, batch(config, size=rows))
    assert not tokens.mask.all()
    return policy, tokens


def draws():
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("kind", ["value", "nan", "1e30"])
@pytest.mark.parametrize("config", AUDITED.values(), ids=AUDITED)
def test_every_token_moves_what_the_mask_says_and_nothing_else(config, kind):
    policy, tokens = prepared(config)
    size = tokens.values.shape[1] + policy.chunk_tokens
    audit = audit_policy(policy, tokens, values=(kind,), generator=draws())
    assert str(audit) == f"{2 * size * size} pairs of output and token: 0 leaks, 0 deaf"


@pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
def test_by_its_mask_a_prefix_never_reads_actions(config):
    policy = make(config)
    size = 9 + policy.chunk_tokens
    mask = policy.mask(9).tensor(size, size)
    assert not mask[:9, 9:].any() and mask[9:, :9].all()


@pytest.mark.parametrize("config", [c for c in EVERY.values() if issubclass(type(build(c)), blocks.BlockPolicy)])
def test_by_its_mask_the_scene_reads_neither_proprioception_nor_the_target_token(config):
    mask = make(config).mask(9).tensor(10, 10)
    assert not mask[:7, 7:].any() and not mask[7, 8:].any() and mask[:9, :7].all()


@pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
def test_a_policy_that_claims_another_mask_is_caught(config):
    policy, tokens = prepared(config, rows=1)
    size = tokens.values.shape[1]
    wider = audit_policy(policy, tokens, Everything(), values=("value",), generator=draws())
    assert not wider.leaks and any(f.output < size <= f.token for f in wider.deaf)  # a prefix does not read actions
    narrower = audit_policy(policy, tokens, Blocks((1,) * size), values=("value",), generator=draws())
    assert any(f.output < f.token < size for f in narrower.leaks)  # but its tokens read one another


def test_a_prefix_whose_blocks_lie_elsewhere_is_caught(monkeypatch):
    policy, tokens = prepared(TOKENS, rows=1)
    size = tokens.values.shape[1]
    right = policy.mask(size)
    monkeypatch.setattr(blocks, "joined", lambda prefix, actions: Blocks((prefix, actions)))
    leaks = audit_policy(policy, tokens, right, values=("value",), generator=draws()).leaks
    assert {finding.token for finding in leaks} == {size - 2, size - 1}  # proprioception and the target token are read


def test_actions_that_read_later_ones_are_caught(monkeypatch):
    policy, tokens = prepared(BINS, rows=1)
    size = tokens.values.shape[1]
    right = policy.mask(size)
    policy.mask = lambda prefix: blocks.joined(prefix, 3)
    leaks = audit_policy(policy, tokens, right, values=("value",), generator=draws()).leaks
    assert {(f.output, f.token) for f in leaks} == {(size, size + 1), (size, size + 2), (size + 1, size + 2)}


def test_act_decodes_from_every_real_token_and_from_no_padding():
    config = CONFIGS["act state"]
    torch.manual_seed(0)
    policy = build(config).eval()
    policy.set_statistics(statistics())
    seen = policy.tokenize(batch(config))

    def forward(values):
        return policy.decode(policy.prefill(dataclasses.replace(seen, values=values)))

    allowed = seen.mask[:, None].expand(-1, config.chunk, -1).clone()
    assert not allowed.all()  # there is padding to be ignored
    allowed[:, :, seen.slices["target"]] = True
    audit = audit_mask(forward, seen.values.detach(), allowed, tolerance=1e-7, generator=draws())
    assert audit.ok, str(audit)
