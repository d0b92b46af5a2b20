"""Bugs of other people's attention code, planted here one by one: each is caught by the check that should catch it."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from robotattn.attention import (
    Attention,
    KVCache,
    Transformer,
    TransformerConfig,
    audit_mask,
    kernels,
    layers,
    masks,
)
from robotattn.attention.masks import Blocks, Causal, Prefix

N, PREFIX = 8, 4


def model(**changes):
    torch.manual_seed(0)
    config = dataclasses.replace(TransformerConfig(2, 16, 4, 24, position="rotary"), **changes)
    return Transformer(config).double().eval().requires_grad_(False)


def tokens(count=N, batch=2, seed=0):
    return torch.randn(batch, count, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def equal(have, want):
    torch.testing.assert_close(have, want, rtol=0, atol=1e-10)


def check_audit(mask, allowed):
    """Audit one layer without residuals, so that a token reads itself through the mask or not at all."""
    net = model(layers=1, residual=False, hidden=0)
    draws = torch.Generator().manual_seed(1)
    audit_mask(lambda x: net(x, mask), tokens(), allowed, tolerance=1e-9, generator=draws).check()


def check_causal():
    check_audit(Causal(), torch.ones(N, N, dtype=torch.bool).tril())


def check_prefix_reads_no_action():
    allowed = torch.ones(N, N, dtype=torch.bool)
    allowed[:PREFIX, PREFIX:] = False
    check_audit(Blocks((PREFIX, N - PREFIX)), allowed)


def check_cached_equals_uncached():
    net, x = model(), tokens()
    for split in (1, 2, 5):
        cache = net.cache(2, N)
        parts = [net(x[:, s : s + split], Causal(), cache=cache) for s in range(0, N, split)]
        equal(torch.cat(parts, dim=1), net(x, Causal()))


def check_padded_equals_unpadded():
    net, x = model(), tokens()
    valid = torch.arange(N) >= torch.tensor([[0], [3]])
    equal(net(x, Causal(), valid=valid)[1:, 3:], net(x[1:, 3:], Causal()))
    equal(net(x, valid=valid)[1:, 3:], net(x[1:, 3:]))


def check_second_episode_equals_fresh():
    net = model(position="sinusoidal")  # rotations know distances alone: a count that goes on would go unseen
    cache = net.cache(2, 2 * N)
    net(tokens(), Causal(), cache=cache)
    cache.reset()
    equal(net(tokens(seed=1), Causal(), cache=cache), net(tokens(seed=1), Causal()))


def check_one_row_reset_equals_fresh():
    net = model()
    cache = net.cache(2, 2 * N)
    net(tokens(), Causal(), cache=cache)
    cache.reset([1])
    equal(net(tokens(seed=1), Causal(), cache=cache)[1:], net(tokens(seed=1)[1:], Causal()))


def check_groups(kernel):
    few, full = (Attention(16, 4, kernel, kv_heads=kv).double() for kv in (2, 4))
    state = few.state_dict()
    for name in ("key.weight", "value.weight", "value.bias"):
        state[name] = torch.cat([part for part in state[name].chunk(2) for _ in range(2)])
    full.load_state_dict(state)
    equal(few(tokens()), full(tokens()))


def check_empty_rows_are_zero():
    q = tokens()[:, None]
    out = kernels.attend(q, q, q, torch.zeros(N, N, dtype=torch.bool), "reference")
    assert not out.any()


CHECKS = {
    "causal": check_causal,
    "prefix": check_prefix_reads_no_action,
    "cached": check_cached_equals_uncached,
    "padded": check_padded_equals_unpadded,
    "reset": check_second_episode_equals_fresh,
    "row reset": check_one_row_reset_equals_fresh,
    "groups, sdpa": lambda: check_groups("sdpa"),
    "groups, reference": lambda: check_groups("reference"),
    "empty": check_empty_rows_are_zero,
}


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_bug_every_check_passes(name):
    assert not caught(CHECKS[name])


def caught(check):
    """Tell whether a check fails."""
    try:
        check()
    except AssertionError:
        return True
    return False


def test_a_transposed_mask_is_caught(monkeypatch):
    monkeypatch.setattr(Causal, "allows", lambda self, row, query, key: query <= key)
    assert caught(check_causal)
    assert caught(check_cached_equals_uncached)


def test_a_causal_mask_that_is_one_off_is_caught(monkeypatch):
    for shift in (-1, 1):
        monkeypatch.setattr(Causal, "allows", lambda self, row, query, key, s=shift: key <= query + s)
        assert caught(check_causal)


def test_the_causal_flag_on_a_cache_is_caught(monkeypatch):
    def attend(q, k, v, *_, **__):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    monkeypatch.setattr(layers, "attend", attend)
    assert caught(check_cached_equals_uncached)


def test_no_mask_because_there_is_a_cache_is_caught(monkeypatch):
    """O27: right for one new token, wrong for several."""
    right = Causal.tensor

    def tensor(self, queries, keys, device=None):
        mask = right(self, queries, keys, device)
        return mask if isinstance(queries, int) else torch.ones_like(mask)

    monkeypatch.setattr(Causal, "tensor", tensor)
    assert caught(check_cached_equals_uncached)


def test_a_prefix_that_reads_actions_is_caught(monkeypatch):
    monkeypatch.setattr(Blocks, "_block", lambda self, slot: torch.zeros_like(slot))
    assert caught(check_prefix_reads_no_action)


def test_a_prefix_that_reads_actions_is_refused_by_a_cache():
    net = model()
    _, prefix = net.prefix(tokens(PREFIX))
    with pytest.raises(ValueError, match="cached tokens read the 4 new ones"):
        net(tokens(4), masks.Everything(), cache=prefix)
    assert net(tokens(4), Prefix(PREFIX) | Causal(), cache=prefix).shape == (2, 4, 16)


def test_unmasked_padding_is_caught(monkeypatch):
    monkeypatch.setattr(masks, "padding", lambda valid: torch.ones_like(valid)[:, None, None])
    assert caught(check_padded_equals_unpadded)


def test_padding_of_the_wrong_polarity_is_caught(monkeypatch):
    monkeypatch.setattr(masks, "padding", lambda valid: ~valid[:, None, None])
    assert caught(check_padded_equals_unpadded)


@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_a_rotary_offset_that_is_one_off_is_caught(monkeypatch, shift):
    right = KVCache.next_positions
    monkeypatch.setattr(KVCache, "next_positions", lambda self: right(self) + shift * (self.length > 0))
    assert caught(check_cached_equals_uncached)


def test_one_position_counter_for_the_whole_batch_is_caught(monkeypatch):
    """O25: shorter rows get the positions of the longest."""
    right = Transformer.forward

    def forward(self, x, mask=None, *, valid=None, cache=None, **how):
        start = 0 if cache is None else cache.length
        counter = torch.arange(start, start + x.shape[1]).float()[None]
        return right(self, x, mask, valid=valid, cache=cache, positions=counter, **how)

    monkeypatch.setattr(Transformer, "forward", forward)
    # a rotation knows distances alone, and they are the same; vectors that are added to tokens are not
    net, x, valid = model(position="sinusoidal"), tokens(), torch.arange(N) >= torch.tensor([[0], [3]])
    assert caught(lambda: equal(net(x, Causal(), valid=valid)[1:, 3:], net(x[1:, 3:], Causal())))


def test_a_count_that_the_first_layer_moves_is_caught(monkeypatch):
    """O26: layers above would see an offset that is too large."""
    right = KVCache.write

    def write(self, layer, keys, values):
        out = right(self, layer, keys, values)
        self._fresh = self._fresh + (keys.shape[2] if self._fresh[-1] + keys.shape[2] < self.capacity else 0)
        return out

    monkeypatch.setattr(KVCache, "write", write)
    assert caught(check_cached_equals_uncached)


def test_a_cache_that_is_not_reset_between_episodes_is_caught(monkeypatch):
    monkeypatch.setattr(KVCache, "reset", lambda self, rows=None: None)
    assert caught(check_second_episode_equals_fresh)
    assert caught(check_one_row_reset_equals_fresh)


def test_a_reset_that_forgets_the_positions_is_caught(monkeypatch):
    def reset(self, rows=None):
        self.position.zero_()
        self.length = 0

    monkeypatch.setattr(KVCache, "reset", reset)
    monkeypatch.setattr(KVCache, "_written", lambda self: self.valid)
    assert caught(check_second_episode_equals_fresh)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_key_heads_in_the_wrong_order_are_caught(monkeypatch, kernel):
    def tiled(x, heads):
        return x.repeat(1, heads // x.shape[1], 1, 1)

    def fused(q, k, v, mask, scale, bias, causal):
        return F.scaled_dot_product_attention(q, tiled(k, q.shape[1]), tiled(v, q.shape[1]), attn_mask=mask)

    monkeypatch.setattr(kernels, "repeat_heads", tiled)
    monkeypatch.setattr(kernels, "_fused", fused)
    assert caught(lambda: check_groups(kernel))


def test_a_mean_of_values_for_a_row_that_reads_nothing_is_caught(monkeypatch):
    def softmax(scores, mask):
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)

    monkeypatch.setattr(kernels, "masked_softmax", softmax)
    assert caught(check_empty_rows_are_zero)
