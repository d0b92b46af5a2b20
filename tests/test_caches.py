"""Caches: bytes, capacity, rewinding, resetting, and that a prefix never changes."""

import dataclasses

import pytest
import torch

from robotattn.attention import CacheOverflow, KVCache, Transformer, TransformerConfig, kv_bytes
from robotattn.attention.masks import Blocks, Causal

CONFIG = TransformerConfig(2, 16, 4, 24, kv_heads=2, position="rotary")


def model(**changes):
    torch.manual_seed(0)
    return Transformer(dataclasses.replace(CONFIG, **changes)).double().eval().requires_grad_(False)


def tokens(count, batch=2, seed=0):
    return torch.randn(batch, count, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def snapshot(cache):
    return [x.clone() for x in (*cache.keys, *cache.values, cache.valid, cache.positions, cache.position)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_closed_form_of_bytes_is_the_size_of_the_tensors(dtype):
    cache = KVCache(6, 2, 8, 64, 705, dtype)
    assert cache.bytes == kv_bytes(6, 8, 64, 705, dtype, batch=2) == 2 * 6 * 2 * 8 * 705 * 64 * dtype.itemsize
    cache.commit(605)
    assert cache.used_bytes == kv_bytes(6, 8, 64, 605, dtype, batch=2)
    assert cache.freeze().bytes == cache.used_bytes
    assert cache.freeze().scratch(100).bytes == cache.freeze().grow(100).bytes == cache.bytes


def test_bytes_a_token_are_those_of_the_published_models():
    assert kv_bytes(6, 8, 64, 1, torch.bfloat16) == 12_288
    assert kv_bytes(18, 1, 256, 1, torch.bfloat16) == 18_432
    assert kv_bytes(32, 32, 128, 1, torch.bfloat16) == 524_288


def test_memories_of_contexts_have_the_bytes_of_the_closed_form():
    memory = model(cross=True).remember(tokens(7))
    assert memory.bytes == kv_bytes(2, 2, 4, 7, torch.float64, batch=2)


@pytest.mark.parametrize("first", [16, 0, 10])
def test_a_token_too_many_is_refused_and_nothing_is_written(first):
    net = model()
    cache = net.cache(2, 16)
    if first:
        net(tokens(first), Causal(), cache=cache)
    before = snapshot(cache)
    with pytest.raises(CacheOverflow, match=f"holds {first} of 16 tokens, so {17 - first} more do not fit"):
        net(tokens(17 - first), Causal(), cache=cache)
    assert cache.length == first and all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))


def test_an_unused_slot_is_zero():
    net = model()
    cache = net.cache(2, 16)
    net(tokens(5), Causal(), cache=cache)
    assert all(not store[:, :, 5:].any() and store[:, :, :5].any() for store in (*cache.keys, *cache.values))
    assert cache.position.tolist() == [5] and cache.valid.sum(1).tolist() == [5, 5]


def test_a_rewound_cache_goes_on_as_if_the_rest_had_never_been():
    net = model()
    cache, other = net.cache(2, 16), net.cache(2, 16)
    net(tokens(4), Causal(), cache=cache), net(tokens(4), Causal(), cache=other)
    net(tokens(6, seed=1), Causal(), cache=cache)
    cache.rewind(4)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(cache), snapshot(other), strict=True))
    new = tokens(3, seed=2)
    assert torch.equal(net(new, Causal(), cache=cache), net(new, Causal(), cache=other))
    with pytest.raises(ValueError, match="7 tokens cannot be rewound to 8"):
        cache.rewind(8)


def test_a_pass_that_fails_midway_leaves_no_trace():
    net = model()
    cache = net.cache(2, 16)
    net(tokens(3), Causal(), cache=cache)
    fresh = net.cache(2, 16)
    net(tokens(3), Causal(), cache=fresh)
    want = net(tokens(2, seed=1), Causal(), cache=fresh)
    broken = torch.full((2, 2, 16), torch.nan, dtype=torch.float64)

    def stop(*_):
        raise RuntimeError("stop")

    hook = net.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop"):
        net(broken, Causal(), cache=cache)
    hook.remove()
    assert cache.length == 3
    torch.testing.assert_close(net(tokens(2, seed=1), Causal(), cache=cache), want, rtol=0, atol=0)


def test_resetting_one_row_makes_it_fresh_and_leaves_the_others():
    """O21: only one of three environments ends its episode."""
    net = model()
    cache = net.cache(3, 16)
    old, new = tokens(5, batch=3), tokens(4, batch=3, seed=1)
    net(old, Causal(), cache=cache)
    cache.reset([1])
    out = net(new, Causal(), cache=cache)
    whole = net(torch.cat([old, new], dim=1), Causal())[:, 5:]
    torch.testing.assert_close(out[[0, 2]], whole[[0, 2]], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[1:2], net(new[1:2], Causal()), rtol=0, atol=1e-12)


def test_a_cache_that_was_reset_is_like_new():
    net = model()
    cache = net.cache(2, 16)
    spoilt = tokens(6).fill_(1e30)
    net(spoilt, Causal(), cache=cache)
    cache.reset()
    fresh = net.cache(2, 16)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(cache), snapshot(fresh), strict=True))
    assert torch.equal(net(tokens(4), Causal(), cache=cache), net(tokens(4), Causal(), cache=fresh))


def test_a_cache_that_reads_all_its_slots_gives_the_same():
    net = model()
    small, whole = net.cache(2, 12), net.cache(2, 12, whole=True)
    for count, seed in ((5, 0), (1, 1), (2, 2)):
        x = tokens(count, seed=seed)
        want = net(x, Causal(), cache=small)
        torch.testing.assert_close(net(x, Causal(), cache=whole), want, rtol=0, atol=1e-12)


def test_a_prefix_is_read_again_and_again_and_never_changes():
    net = model()
    mask = Blocks((5, 3))
    x, tails = tokens(5), [tokens(3, seed=seed) for seed in (1, 2, 3)]
    _, prefix = net.prefix(x, mask)
    before = [t.clone() for t in (*prefix.keys, *prefix.values)]
    scratch = prefix.scratch(3)
    for tail in tails:
        want = net(torch.cat([x, tail], dim=1), mask)[:, 5:]
        for cache in (prefix, scratch, prefix.grow(3)):
            torch.testing.assert_close(net(tail, mask, cache=cache), want, rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(before, (*prefix.keys, *prefix.values), strict=True))
    assert scratch.length == 5
    with pytest.raises(CacheOverflow, match="4 more do not fit"):
        net(tokens(4), mask, cache=scratch)
    with pytest.raises(dataclasses.FrozenInstanceError):
        prefix.keys = ()


def test_a_frozen_cache_is_the_prefix_that_a_first_pass_leaves():
    net, mask, x = model(), Blocks((5, 3)), tokens(5)
    cache = net.cache(2, 9)
    net(x, mask, cache=cache)
    _, prefix = net.prefix(x, mask)
    frozen = cache.freeze()
    for name in ("keys", "values"):
        for a, b in zip(getattr(frozen, name), getattr(prefix, name), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert torch.equal(frozen.positions, prefix.positions) and torch.equal(frozen.valid, prefix.valid)


def test_another_model_of_the_same_heads_may_read_a_prefix():
    """The action expert: own weights and width, the prefix's keys and values of the same depth."""
    net, expert = model(), model(width=24, heads=4, head_width=4)
    _, prefix = net.prefix(tokens(5))
    tail = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = expert(tail, Blocks((5, 3)), cache=prefix)
    assert out.shape == (2, 3, 24)
    torch.testing.assert_close(expert(tail, Blocks((5, 3)), cache=prefix.scratch(3)), out, rtol=0, atol=1e-12)


def test_gradients_flow_through_a_prefix_as_through_the_whole():
    net = model().requires_grad_(True)
    mask, x, tail = Blocks((5, 3)), tokens(5), tokens(3, seed=1)
    net(torch.cat([x, tail], dim=1), mask)[:, 5:].square().sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(tail, mask, cache=net.prefix(x, mask)[1]).square().sum().backward()
    for parameter, gradient in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)


def test_a_block_is_not_prefilled_in_parts():
    """O27: 3 + 5 tokens of a bidirectional prefix of 8 would leave the first three without the last five."""
    net, mask = model(), Blocks((8, 2))
    cache = net.cache(2, 16)
    net(tokens(3), mask, cache=cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="some of the 3 cached tokens read the 5 new ones"):
        net(tokens(5), mask, cache=cache)
    with pytest.raises(ValueError, match=r"by the mask Everything\(\)"):
        net(tokens(5), cache=cache)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))
    stale = net.cache(2, 16, allow_stale=True)
    parts = torch.cat([net(tokens(8)[:, :3], mask, cache=stale), net(tokens(8)[:, 3:], mask, cache=stale)], dim=1)
    assert (parts - net(tokens(8), mask)).abs().amax() > 1e-3  # what the refusal is for


def test_a_cache_needs_a_predicate():
    with pytest.raises(ValueError, match="must be a predicate"):
        model()(tokens(2), torch.ones(2, 2, dtype=torch.bool), cache=model().cache(2, 4))


def test_all_layers_of_a_step_see_the_same_offset():
    """O26: the count is committed once, after the last layer."""
    net = model(layers=3)
    cache, seen = net.cache(2, 8), []
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append((cache.length, cache.position.item())))
    for count in (4, 1):
        net(tokens(count), Causal(), cache=cache)
    assert seen == [(0, 0)] * 3 + [(4, 4)] * 3
