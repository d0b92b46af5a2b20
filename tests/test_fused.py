"""Fused layers and int8 weights: the outputs of the layers they replace, cached or not, and nothing else moved."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from robotattn.attention import Transformer, TransformerConfig, fuse, quantise
from robotattn.attention.fused import FusedLayer, FusedRMSNorm, Projection
from robotattn.attention.masks import Blocks, Causal, Prefix, Window
from robotattn.attention.quantised import Int8Linear

N = 9
CONFIG = TransformerConfig(2, 16, 4, 24, limit=16)
KINDS = {
    "gelu": {},
    "llama": {"norm_kind": "rms", "activation": "swiglu", "bias": False, "position": "rotary"},
    "grouped": {"kv_heads": 2, "position": "rotary"},
    "query norm": {"qk_norm": True, "position": "alibi", "norm_kind": "rms"},
    "attention alone": {"hidden": 0, "position": "shaw"},
    "reference": {"kernel": "reference", "position": "buckets"},
    "post": {"norm": "post"},  # stays as it is
    "no residual": {"residual": False},
}


def model(**changes):
    torch.manual_seed(0)
    net = Transformer(dataclasses.replace(CONFIG, **changes)).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # gains and biases that a mistake would show in
    return net.requires_grad_(False)


def tokens(count=N, batch=2, seed=0):
    return torch.randn(batch, count, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_fused_layers_give_what_the_layers_gave(kind, batch):
    net = model(**KINDS[kind])
    fused, x = fuse(net), tokens(batch=batch)
    for mask in (None, Causal(), Blocks((4, 5)), Window(3) & Causal()):
        torch.testing.assert_close(fused(x, mask), net(x, mask), rtol=0, atol=1e-12)
    valid = torch.arange(N) >= torch.tensor([[3], [0]])[:batch]
    torch.testing.assert_close(fused(x, Causal(), valid=valid), net(x, Causal(), valid=valid), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_fused_layers_decode_with_a_cache_as_the_whole_pass(kind, padded):
    net = model(**KINDS[kind])
    fused, x = fuse(net), tokens()
    valid = torch.arange(N) >= torch.tensor([[3], [0]]) if padded else None
    whole = net(x, Prefix(4) | Causal(), valid=valid)
    for first, split in ((4, 1), (4, 2), (9, 1)):
        cache, out, start = fused.cache(2, N), [], 0
        while start < N:
            end = min(N, start + (split if start else first))
            real = None if valid is None else valid[:, start:end]
            out.append(fused(x[:, start:end], Prefix(4) | Causal(), valid=real, cache=cache))
            start = end
        torch.testing.assert_close(torch.cat(out, dim=1), whole, rtol=0, atol=1e-12)


@torch.no_grad()
def test_fused_layers_read_a_context():
    net = model(cross=True, norm_kind="rms")
    fused, x, context = fuse(net), tokens(), tokens(5, seed=1)
    valid = torch.arange(5) < torch.tensor([[5], [3]])
    want = net(x, context=net.remember(context, valid))
    torch.testing.assert_close(fused(x, context=fused.remember(context, valid)), want, rtol=0, atol=1e-12)


def test_the_original_is_left_alone_and_the_copy_takes_no_gradients():
    net = model().train().requires_grad_(True)
    before = copy.deepcopy(net.state_dict())
    fused = fuse(net)
    assert all(isinstance(layer, FusedLayer) for layer in fused.layers) and not fused.training
    assert not any(parameter.requires_grad for parameter in fused.parameters())
    assert net.training and all(parameter.requires_grad for parameter in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    out = fused(tokens(), Causal())
    next(net.parameters()).data.fill_(100.0)
    assert torch.equal(fused(tokens(), Causal()), out)  # no weight is shared
    assert sum(p.numel() for p in fuse(model()).parameters()) >= sum(p.numel() for p in model().parameters())


def test_large_weights_on_huge_pages_hold_what_they_held():
    torch.manual_seed(0)
    net = Transformer(TransformerConfig(1, 512, 8, 1024, norm_kind="rms", activation="swiglu", bias=False)).eval()
    x = torch.randn(1, 3, 512)
    with torch.no_grad():
        fused = fuse(net)
        torch.testing.assert_close(fused(x), net(x), rtol=0, atol=1e-5)
        copied = copy.deepcopy(fused)
        assert torch.equal(copied(x), fused(x))


def test_a_moved_copy_computes_in_its_new_type():
    fused = fuse(model(norm_kind="rms")).float()
    assert fused(tokens().float()).dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 5])
def test_rms_norm_equals_torch(rows):
    norm = nn.RMSNorm(16, eps=1e-6).double()
    norm.weight.data = torch.randn(16, dtype=torch.float64)
    x = tokens(rows, batch=1)
    torch.testing.assert_close(FusedRMSNorm(norm, True)(x), norm(x), rtol=0, atol=1e-12)
    bare = FusedRMSNorm(norm, False)(x[0]) * norm.weight
    torch.testing.assert_close(bare, norm(x)[0], rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------ int8


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [1, 5, 24, 32, 100])
def test_int8_products_are_within_the_rounding_of_weights_and_inputs(rows, bias, inputs):
    """A weight is off by half a step at most, and so is an input in bfloat16.

    Of numbers of inputs that are no multiple of 16, torch's own kernels return garbage or crash.
    """
    torch.manual_seed(0)
    linear, x = nn.Linear(inputs, 12, bias=bias), torch.randn(rows, inputs)
    layer = quantise(nn.Sequential(linear))[0]
    assert isinstance(layer, Int8Linear) and layer.weight.dtype == torch.int8
    steps = linear.weight.abs().amax(1) / 127 * 1.01
    limit = x.abs().sum(1, keepdim=True) * steps / 2 + x.abs() * 2**-8 @ (linear.weight.abs().T + steps / 2)
    limit = limit + linear(x).abs() * 2**-7 + 1e-3
    assert ((layer(x) - linear(x)).abs() <= limit).all()
    assert (layer(x) - linear(x)).norm() <= 0.02 * linear(x).norm()


def test_int8_weights_are_a_fourth_of_the_bytes_and_the_bias_is_exact():
    linear = nn.Linear(64, 64)
    layer = quantise(nn.Sequential(linear))[0]
    assert layer.weight.numel() * layer.weight.element_size() * 4 == linear.weight.numel() * 4
    assert torch.equal(layer.bias, linear.bias)
    assert torch.equal(layer(torch.zeros(1, 64))[0], linear.bias)


@pytest.mark.parametrize("rows", [3, 20])
def test_what_an_int8_layer_gives_a_row_does_not_depend_on_the_other_rows(rows):
    torch.manual_seed(0)
    layer, x = quantise(nn.Sequential(nn.Linear(32, 12))), torch.randn(rows, 32)
    spoilt = x.clone()
    spoilt[1:] *= 1e4
    assert torch.equal(layer(x)[0], layer(spoilt)[0])


def test_zero_weights_and_zero_inputs_stay_finite():
    linear = nn.Linear(8, 4, bias=False)
    linear.weight.data[0] = 0.0
    for rows in (1, 9):
        assert torch.equal(quantise(nn.Sequential(linear))(torch.zeros(rows, 8)), torch.zeros(rows, 4))
        assert not quantise(nn.Sequential(linear))(torch.ones(rows, 8))[:, 0].any()


@pytest.mark.parametrize("prepare", [lambda net: net, fuse])
@torch.no_grad()
def test_a_stack_with_int8_weights_stays_close_cached_or_not(prepare):
    net = model(norm_kind="rms", activation="swiglu", bias=False, position="rotary", width=64, hidden=128).float()
    rounded, x = quantise(prepare(net)), torch.randn(1, N, 64, generator=torch.Generator().manual_seed(0))
    assert not [part for part in rounded.modules() if isinstance(part, nn.Linear | Projection)]
    want = net(x, Causal())
    assert (rounded(x, Causal()) - want).norm() < 0.05 * want.norm()
    cache = rounded.cache(1, N)
    steps = torch.cat([rounded(x[:, i : i + 1], Causal(), cache=cache) for i in range(N)], dim=1)
    assert (steps - want).norm() < 0.05 * want.norm()


def test_modules_that_are_to_be_kept_stay_in_float32():
    net = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 4)})
    rounded = quantise(net, keep=("head", "a.1"))
    kinds = {name: type(part) for name, part in rounded.named_modules()}
    assert (kinds["a.0"], kinds["a.1"], kinds["head"]) == (Int8Linear, nn.Linear, nn.Linear)


def test_int8_refuses_another_device_naming_it():
    with pytest.raises(ValueError, match=r"0.weight is on meta: int8 weights work on a CPU only"):
        quantise(nn.Sequential(nn.Linear(4, 4, device="meta")))
    with pytest.raises(ValueError, match="the input is on meta"):
        quantise(nn.Sequential(nn.Linear(4, 4)))(torch.zeros(1, 4, device="meta"))
