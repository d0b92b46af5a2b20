"""Gaussian-kernel and additive scores against their formulas."""

import math

import pytest
import torch

from robotattn.attention import AdditiveAttention, gaussian_weights


def test_two_keys_are_weighed_by_the_gaussian_of_their_distances():
    q, k = torch.tensor([[0.0]]), torch.tensor([[1.0], [2.0]])
    a, b = math.exp(-1 / (2 * 0.25)), math.exp(-4 / (2 * 0.25))
    assert gaussian_weights(q, k, 0.5)[0].tolist() == pytest.approx([a / (a + b), b / (a + b)], abs=1e-7)


def test_a_narrow_kernel_takes_the_nearest_and_a_wide_one_the_mean():
    q, k = torch.tensor([[0.9]]), torch.tensor([[0.0], [1.0], [3.0]])
    assert gaussian_weights(q, k, 0.05)[0, 1] > 0.999
    torch.testing.assert_close(gaussian_weights(q, k, 1e3), torch.full((1, 3), 1 / 3), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        gaussian_weights(q, k, 0.0)


def test_a_masked_gaussian_key_weighs_nothing_and_an_empty_row_is_zero():
    q, k = torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])
    mask = torch.tensor([[False, True], [False, False]])
    assert gaussian_weights(q, k, 1.0, mask).tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_additive_scores_are_those_of_bahdanau():
    torch.manual_seed(0)
    attention = AdditiveAttention(3, 4, 5).double()
    q, k = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    scores = torch.empty(2, 6, 7, dtype=torch.float64)
    for b in range(2):
        for i in range(6):
            for j in range(7):
                hidden = attention.query.weight @ q[b, i] + attention.query.bias + attention.key.weight @ k[b, j]
                scores[b, i, j] = attention.score.weight[0] @ torch.tanh(hidden)
    torch.testing.assert_close(attention.weights(q, k), scores.softmax(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(attention(q, k), scores.softmax(-1) @ k, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [torch.nan, 1e30])
def test_additive_attention_ignores_padding_whatever_is_in_it(garbage):
    torch.manual_seed(0)
    attention = AdditiveAttention(3, 4, 5)
    q, k, valid = torch.randn(2, 6, 3), torch.randn(2, 7, 4), torch.arange(7) < torch.tensor([[7], [4]])
    spoilt = k.masked_fill(~valid[..., None], garbage).requires_grad_()
    out = attention(q, spoilt, mask=valid[:, None])
    torch.testing.assert_close(out[1:], attention(q[1:], k[1:, :4]))
    out.sum().backward()
    assert spoilt.grad.isfinite().all() and all(p.grad.isfinite().all() for p in attention.parameters())
