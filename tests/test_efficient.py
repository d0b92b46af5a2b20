"""Efficient attention: where it must equal plain attention, and that padding does not matter."""

import pytest
import torch

from robotattn.attention import (
    Linformer,
    Performer,
    attend,
    linformer_attend,
    performer_attend,
    random_features,
    window_attend,
)
from robotattn.attention.masks import Causal, Padding, Window


def tensors(length=13, heads=4, groups=4, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, width, generator=generator, dtype=dtype) for h in (heads, groups, groups)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 13, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
def test_a_window_in_chunks_equals_the_window_mask(size, causal, groups):
    q, k, v = tensors(groups=groups)
    mask = Window(size) & Causal() if causal else Window(size)
    want = attend(q, k, v, mask.tensor(13, 13), "reference")
    torch.testing.assert_close(window_attend(q, k, v, size, causal), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_as_long_as_the_sequence_is_plain_attention(causal):
    q, k, v = tensors()
    torch.testing.assert_close(window_attend(q, k, v, 13, causal), attend(q, k, v, causal=causal), rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [0.0, torch.nan, 1e30])
def test_a_window_ignores_padding(garbage):
    q, k, v = tensors()
    valid = torch.arange(13) >= torch.tensor([[0], [4]])
    want = attend(q, k, v, (Window(3) & Padding(valid)).tensor(13, 13), "reference")
    k, v = (x.masked_fill(~valid[:, None, :, None], garbage) for x in (k, v))
    have = window_attend(q, k, v, 3, valid=valid)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="got size 0"):
        window_attend(q, k, v, 0)


def test_linformer_with_identity_projections_is_plain_attention():
    q, k, v = tensors()
    eye = torch.eye(13, dtype=torch.float64)
    torch.testing.assert_close(linformer_attend(q, k, v, eye, eye), attend(q, k, v), rtol=0, atol=1e-12)


def test_performer_comes_nearer_with_more_features():
    q, k, v = tensors(width=4)
    q, k = 0.5 * q, 0.5 * k  # the estimate's variance grows exponentially with the size of queries and keys
    want = attend(q, k, v)
    errors = []
    for count in (16, 256, 4096):
        draws = [random_features(count, 4, torch.Generator().manual_seed(seed)).double() for seed in range(4)]
        errors.append(sum((performer_attend(q, k, v, f) - want).square().mean().sqrt().item() for f in draws) / 4)
    assert errors[0] > 2.0 * errors[1] > 4.0 * errors[2] and errors[2] < 0.01


@pytest.mark.parametrize("garbage", [0.0, torch.nan, 1e30])
def test_performer_ignores_padding_and_gives_zeros_where_all_is_padding(garbage):
    q, k, v = tensors(dtype=torch.float32)
    features = random_features(32, 8, torch.Generator().manual_seed(0))
    valid = torch.arange(13) < torch.tensor([[9], [0]])
    spoilt = [x.masked_fill(~valid[:, None, :, None], garbage) for x in (k, v)]
    have = performer_attend(q, *spoilt, features, valid)
    torch.testing.assert_close(have[:1], performer_attend(q[:1], k[:1, :, :9], v[:1, :, :9], features))
    assert not have[1].any()


def test_a_causal_performer_reads_nothing_that_comes_later():
    q, k, v = tensors()
    features = random_features(64, 8, torch.Generator().manual_seed(0)).double()
    whole = performer_attend(q, k, v, features, causal=True)
    for end in (1, 5, 13):
        alone = performer_attend(q[:, :, :end], k[:, :, :end], v[:, :, :end], features)
        torch.testing.assert_close(whole[:, :, end - 1], alone[:, :, -1], rtol=0, atol=1e-9)


def test_random_features_are_orthogonal_in_blocks_with_the_lengths_of_normal_vectors():
    features = random_features(4000, 8, torch.Generator().manual_seed(0))
    product = features[:8] @ features[:8].T
    assert (product - product.diag().diag()).abs().max() < 1e-5
    assert features.square().sum(1).mean().item() == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("make", [lambda: Linformer(16, 4, 12, 5), lambda: Performer(16, 4, 32)])
def test_modules_ignore_padding_and_learn(make):
    torch.manual_seed(0)
    net, x = make(), torch.randn(2, 10, 16)
    valid = torch.arange(10) < torch.tensor([[10], [6]])
    out = net(x.masked_fill(~valid[..., None], torch.nan), valid)
    torch.testing.assert_close(out[1:, :6], net(x[1:, :6]), rtol=0, atol=1e-5)
    (out * torch.randn_like(out)).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


def test_linformer_refuses_a_longer_sequence():
    with pytest.raises(ValueError, match="13 tokens are more than the 12"):
        Linformer(16, 4, 12, 5)(torch.zeros(1, 13, 16))
