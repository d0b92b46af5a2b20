"""Choosing a bin: greedy, or drawn with a temperature, the k best, the smallest set of mass p."""

import pytest
import torch

from robotattn.policies.sampling import Sampling, choose, kept


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


@pytest.mark.parametrize(
    ("values", "message"),
    [((-1.0,), "temperature: -1.0"), ((1.0, -1), "top_k: -1"), ((1.0, 0, 0.0), "top_p: 0.0"), ((1.0, 0, 1.5), "top_p")],
)
def test_impossible_sampling_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(*values)
