"""The attention library against closed forms, float64 and torch's own multi-head attention."""

import math

import pytest
import torch
from torch import nn

from robotattn.attention import Attention, Decoder, Encoder, LearnedGrid, attend, kernels, masks, sinusoidal

KERNELS = ("sdpa", "reference")


def tensors(*shape, count=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_keys_are_weighed_by_the_exponential_of_their_scores(kernel):
    q = torch.tensor([[[[2.0, 0.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    first = math.exp(2 / math.sqrt(2)) / (math.exp(2 / math.sqrt(2)) + 1)
    assert attend(q, k, v, kernel=kernel).item() == pytest.approx(first, abs=1e-15)


def test_kernels_agree_on_random_masks():
    q, k, v = tensors(2, 3, 7, 4)
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[1, 0, 3] = False
    torch.testing.assert_close(attend(q, k, v, mask), attend(q, k, v, mask, "reference"), rtol=0, atol=1e-12)


def test_bfloat16_on_a_cpu_equals_float32_within_its_rounding():
    q, k, v = tensors(1, 2, 5, 8, dtype=torch.float32)
    half = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), attend(q, k, v), rtol=0.05, atol=0.03)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("train", [False, True])
def test_a_row_that_may_attend_to_nothing_is_zero_and_its_neighbour_does_not_change(kernel, train):
    torch.manual_seed(0)
    layer = Attention(8, 2, kernel).double().train(train)
    x, context = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    x.requires_grad_(), context.requires_grad_()
    valid = torch.tensor([[False] * 4, [True] * 4])  # sample 0 has no instruction
    out = layer(x, layer.keys_values(context), masks.padding(valid))
    out.square().sum().backward()
    torch.testing.assert_close(out[0], layer.out.bias.expand(3, 8), rtol=0, atol=0)
    alone = layer(x[1:], layer.keys_values(context[1:]))
    torch.testing.assert_close(out[1:], alone, rtol=0, atol=1e-12)
    gradients = [x.grad, context.grad, *(p.grad for p in layer.parameters())]
    assert all(g.isfinite().all() for g in gradients)
    assert not context.grad[0].any()


@pytest.mark.parametrize("bad", [torch.zeros(3, 3), torch.ones(3, 3), torch.ones(3, 3).byte(), torch.ones(3, 3).long()])
def test_a_mask_that_is_not_boolean_is_refused(bad):
    q, k, v = tensors(1, 1, 3, 2)
    with pytest.raises(TypeError, match="must be bool with True = attend"):
        attend(q, k, v, bad)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (1, 3, 3), (2, 1, 3, 3), (1, 2, 3, 3), (1, 1, 2, 3)])
def test_a_mask_of_another_shape_is_refused(shape):
    q, k, v = tensors(1, 1, 3, 2)
    with pytest.raises(ValueError, match="attention mask must be"):
        attend(q, k, v, torch.ones(shape, dtype=torch.bool))


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="'sdpa', 'reference' or 'flex', got 'flash'"):
        attend(*tensors(1, 1, 3, 2), kernel="flash")


@pytest.mark.parametrize("kernel", KERNELS)
def test_multi_head_attention_equals_torch_with_the_same_weights(kernel):
    torch.manual_seed(0)
    ours, theirs = Attention(12, 3, kernel).double(), nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, torch.zeros(12), ours.value.bias]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, context = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    valid = torch.arange(7) < torch.tensor([[7], [4]])
    want, _ = theirs(x, context, context, key_padding_mask=~valid)  # torch: True = ignore
    have = ours(x, ours.keys_values(context), masks.padding(valid))
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def test_encoder_equals_torch_pre_norm_encoder():
    torch.manual_seed(0)
    ours = Encoder(2, 8, 2, 16).double()
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False).double()
    with torch.no_grad():
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            a = mine.attention
            other.self_attn.in_proj_weight.copy_(torch.cat([a.query.weight, a.key.weight, a.value.weight]))
            other.self_attn.in_proj_bias.copy_(torch.cat([a.query.bias, torch.zeros(8), a.value.bias]))
            other.self_attn.out_proj.load_state_dict(a.out.state_dict())
            other.linear1.load_state_dict(mine.feedforward[0].state_dict())
            other.linear2.load_state_dict(mine.feedforward[2].state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)


def test_padding_changes_nothing():
    torch.manual_seed(0)
    encoder, decoder = Encoder(2, 8, 2, 16).double(), Decoder(2, 8, 2, 16).double()
    x, queries = torch.randn(1, 4, 8, dtype=torch.float64), torch.randn(1, 3, 8, dtype=torch.float64)
    padded = torch.cat([x, torch.randn(1, 2, 8, dtype=torch.float64) * 1e3], dim=1)
    valid = torch.tensor([[True] * 4 + [False] * 2])
    memory, memory_padded = encoder(x), encoder(padded, valid)
    torch.testing.assert_close(memory_padded[:, :4], memory, rtol=0, atol=1e-12)
    want = decoder(queries, decoder.keys_values(memory))
    have = decoder(queries, decoder.keys_values(memory_padded), valid)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 4, 7])
def test_every_decoder_layer_learns_and_matters(layers):
    torch.manual_seed(0)
    decoder = Decoder(layers, 8, 2, 16)
    queries, context = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    out = decoder(queries, decoder.keys_values(context))
    (out * torch.randn_like(out)).sum().backward()
    assert [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.any()] == []
    with torch.no_grad():
        decoder.layers[-1].feedforward[2].weight += torch.randn(8, 16)
    assert (decoder(queries, decoder.keys_values(context)) - out).abs().max() > 0.01


def test_causal_mask_uses_absolute_positions_so_a_step_with_a_cache_sees_the_whole_cache():
    full = masks.causal(torch.arange(6), torch.arange(6))
    assert torch.equal(full, torch.ones(6, 6, dtype=torch.bool).tril())
    for new in (1, 2, 5):
        part = masks.causal(torch.arange(6 - new, 6), torch.arange(6))
        assert torch.equal(part, full[6 - new :])


@pytest.mark.parametrize("new", [1, 2, 3, 6])
def test_causal_attention_in_parts_equals_one_pass(new):
    q, k, v = tensors(1, 2, 6, 4)
    positions = torch.arange(6)
    whole = attend(q, k, v, masks.causal(positions, positions))
    parts = [
        attend(
            q[:, :, s : s + new],
            k[:, :, : s + new],
            v[:, :, : s + new],
            masks.causal(positions[s : s + new], positions[: s + new]),
        )
        for s in range(0, 6, new)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=0, atol=1e-12)


def test_masks_combine_with_and_and_none_means_everything():
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    assert torch.equal(masks.combine(a, None, b), torch.tensor([True, False, False]))
    assert masks.combine(None, None) is None


def test_validity_must_be_boolean():
    with pytest.raises(TypeError, match="must be bool"):
        masks.padding(torch.ones(2, 3))


def test_sinusoidal_positions_are_sines_then_cosines_of_growing_wavelength():
    code = sinusoidal(torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64), 4)
    rates = [1.0, 10_000.0**-0.5]
    want = [[*(math.sin(p * r) for r in rates), *(math.cos(p * r) for r in rates)] for p in (0.0, 1.0, 2.5)]
    torch.testing.assert_close(code, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="even, got 5"):
        sinusoidal(torch.zeros(1), 5)


def test_learned_grid_adds_row_and_column():
    grid = LearnedGrid(2, 3, 4)
    torch.testing.assert_close(grid()[1 * 3 + 2], grid.rows[1] + grid.columns[2], rtol=0, atol=0)
    assert grid().shape == (6, 4)


def test_width_must_be_a_multiple_of_heads():
    with pytest.raises(ValueError, match="width 10, heads 3"):
        Attention(10, 3)


def test_reference_weights_sum_to_one_or_zero():
    q, k, _ = tensors(1, 1, 3, 2)
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    torch.testing.assert_close(
        kernels.weights(q, k, mask).sum(-1)[0, 0], torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    )
