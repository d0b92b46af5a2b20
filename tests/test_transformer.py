"""The stack of layers: equal to torch's own, cached = uncached, padded = unpadded, batch = single, clean of garbage."""

import dataclasses

import pytest
import torch
from torch import nn

from robotattn.attention import Transformer, TransformerConfig, masks
from robotattn.attention.masks import Blocks, Causal, Prefix, Window

KINDS = ("none", "sinusoidal", "learned", "rotary", "alibi", "shaw", "buckets", "time")
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
PREFIX, N = 5, 11
MASKS = {
    "causal": Causal(),
    "block": Prefix(PREFIX) | Causal(),
    "window": Window(3) & Causal(),
}


def model(**changes):
    torch.manual_seed(0)
    config = TransformerConfig(2, 16, 4, 24, limit=16)
    return Transformer(dataclasses.replace(config, **changes)).double().eval()


def tokens(count=N, batch=2, seed=0):
    return torch.randn(batch, count, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def times(kind, count=N):
    """Uneven time stamps (s) for the kind that takes them; the other kinds count for themselves."""
    return torch.linspace(0.0, 1.0, count)[None] ** 2 if kind == "time" else None


def part(positions, start, end):
    return None if positions is None else positions[:, start:end]


def in_parts(net, mask, x, split, first, positions=None, valid=None):
    """Feed x to a cache: the first tokens in one call, then `split` a call (0: everything else)."""
    cache, outputs, start = net.cache(len(x), x.shape[1]), [], 0
    while start < x.shape[1]:
        size = first if start == 0 and first else split or x.shape[1]
        end = min(start + size, x.shape[1])
        real = None if valid is None else valid[:, start:end]
        outputs.append(net(x[:, start:end], mask, valid=real, positions=part(positions, start, end), cache=cache))
        start = end
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_cached_equals_uncached(kind, heads, mask):
    net, x = model(position=kind, kv_heads=HEADS[heads]), tokens()
    whole = net(x, MASKS[mask], positions=times(kind))
    for split in (1, 2, 5, 0):
        parts = in_parts(net, MASKS[mask], x, split, PREFIX if mask == "block" else 0, times(kind))
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12, msg=lambda m, s=split: f"split {s}: {m}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_left_padded_rows_equal_themselves_alone_with_and_without_a_cache(kind, mask):
    """O25: rows of 11 and 8 tokens in one batch; the mask's slots move with the padding, the positions do not."""
    net, x = model(position=kind, kv_heads=2), tokens()
    valid = torch.arange(N) >= torch.tensor([[0], [3]])
    seconds = None if kind != "time" else torch.stack([times(kind)[0], times(kind, N + 3)[0, :N]])
    alone_mask = Prefix(PREFIX - 3) | Causal() if mask == "block" else MASKS[mask]
    alone = net(x[1:, 3:], alone_mask, positions=None if seconds is None else seconds[1:, 3:])
    for garbage in (0.0, torch.nan, 1e30):
        spoilt = x.masked_fill(~valid[..., None], garbage)
        together = net(spoilt, MASKS[mask], valid=valid, positions=seconds)
        torch.testing.assert_close(together[1:, 3:], alone, rtol=0, atol=1e-12)
        first = net(x[:1], MASKS[mask], positions=None if seconds is None else seconds[:1])
        torch.testing.assert_close(together[:1], first, rtol=0, atol=1e-12)
        assert not together[1, :3].any()
        for split in (1, 2, 5, 0):
            parts = in_parts(net, MASKS[mask], spoilt, split, PREFIX if mask == "block" else 0, seconds, valid)
            torch.testing.assert_close(parts, together, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_right_padding_and_the_batch_move_nothing(kind):
    net, x = model(position=kind), tokens(batch=3)
    lengths = torch.tensor([11, 7, 4])
    valid = torch.arange(N) < lengths[:, None]
    together = net(x.masked_fill(~valid[..., None], torch.nan), valid=valid, positions=times(kind))
    for row, length in enumerate(lengths.tolist()):
        alone = net(x[row : row + 1, :length], positions=part(times(kind), 0, length))
        torch.testing.assert_close(together[row : row + 1, :length], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_garbage_in_padding_moves_no_gradient(garbage, norm):
    valid = torch.arange(N) >= torch.tensor([[0], [3]])
    context_valid = torch.arange(4) < torch.tensor([[4], [2]])
    results = []
    for filling in (0.0, garbage):
        net = model(position="rotary", norm=norm, cross=True)
        x = tokens().masked_fill(~valid[..., None], filling).requires_grad_()
        context = tokens(4, seed=1).masked_fill(~context_valid[..., None], filling).requires_grad_()
        out = net(x, Causal(), valid=valid, context=net.remember(context, context_valid))
        out.square().sum().backward()
        results.append([out, x.grad, context.grad, *(p.grad for p in net.parameters())])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["none", "rotary"])
@torch.no_grad()
def test_a_row_of_padding_alone_is_zero_and_moves_no_neighbour(kind):
    net, x = model(position=kind, cross=True), tokens()
    context, valid = tokens(3, seed=1), torch.tensor([[False] * 3, [True] * 3])
    out = net(x, context=net.remember(context, valid))
    assert out.isfinite().all()
    torch.testing.assert_close(out[1:], net(x[1:], context=net.remember(context[1:])), rtol=0, atol=1e-12)
    nothing = torch.zeros(2, N, dtype=torch.bool)
    assert not net(x, valid=nothing).any()


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("none", "alibi", "time")])
@torch.no_grad()
def test_every_kind_of_position_tells_a_sequence_from_its_reverse(kind):
    assert gap_to_the_reverse(kind, None) > 1e-3


@torch.no_grad()
def test_without_positions_a_sequence_equals_its_reverse_and_so_it_does_with_plain_distances():
    assert gap_to_the_reverse("none", None) < 1e-12
    assert gap_to_the_reverse("alibi", None) < 1e-12  # made for causal masks: |i - j| is the same backwards
    assert gap_to_the_reverse("alibi", Causal()) > 1e-3


def gap_to_the_reverse(kind, mask):
    net, x = model(position=kind), tokens(6, batch=1)
    return (net(x, mask).mean(dim=1) - net(x.flip(1), mask).mean(dim=1)).abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_parameter_learns(kind, heads):
    net = model(position=kind, kv_heads=HEADS[heads], qk_norm=True, activation="swiglu", norm_kind="rms")
    out = net(tokens(), Causal(), positions=times(kind))
    (out * torch.randn_like(out)).sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []


@torch.no_grad()
def test_query_and_key_norm_makes_scores_blind_to_the_size_of_queries_and_keys():
    net = model(qk_norm=True, norm="none", hidden=0, residual=False, bias=False, layers=1)
    attention = net.layers[0].attention
    x = tokens()
    before = attention.weights(x)
    attention.query.weight.mul_(100.0), attention.key.weight.mul_(0.1)
    torch.testing.assert_close(attention.weights(x), before, rtol=0, atol=1e-3)


def copy_attention(ours, theirs):
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, torch.zeros_like(ours.query.bias), ours.value.bias]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())


def shuffle_norms(net):
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3), nn.init.normal_(module.bias, 0.0, 0.3)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.no_grad()
def test_a_stack_equals_torch_encoder_layers(norm, activation):
    ours = model(norm=norm, activation=activation)
    shuffle_norms(ours)
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, activation, batch_first=True, norm_first=norm == "pre")
    last = nn.LayerNorm(16) if norm == "pre" else None
    theirs = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=False).double()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        copy_attention(mine.attention, other.self_attn)
        other.linear1.load_state_dict(mine.feedforward[0].state_dict())
        other.linear2.load_state_dict(mine.feedforward[2].state_dict())
        other.norm1.load_state_dict(mine.attention_norm.state_dict())
        other.norm2.load_state_dict(mine.feedforward_norm.state_dict())
    if last is not None:
        theirs.norm.load_state_dict(ours.norm.state_dict())
    x, valid = tokens(), torch.arange(N) < torch.tensor([[N], [6]])
    have, want = ours(x, Causal()), theirs(x, ~masks.causal(torch.arange(N), torch.arange(N)))
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)
    want = theirs(x, src_key_padding_mask=~valid)
    torch.testing.assert_close(ours(x, valid=valid)[valid], want[valid], rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.no_grad()
def test_a_stack_with_a_context_equals_torch_decoder_layers(norm, activation):
    ours = model(norm=norm, activation=activation, cross=True)
    shuffle_norms(ours)
    layer = nn.TransformerDecoderLayer(16, 4, 24, 0.0, activation, batch_first=True, norm_first=norm == "pre")
    theirs = nn.TransformerDecoder(layer, 2, nn.LayerNorm(16) if norm == "pre" else None).double()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        copy_attention(mine.attention, other.self_attn)
        copy_attention(mine.cross, other.multihead_attn)
        other.linear1.load_state_dict(mine.feedforward[0].state_dict())
        other.linear2.load_state_dict(mine.feedforward[2].state_dict())
        for index, name in enumerate(("attention_norm", "cross_norm", "feedforward_norm"), start=1):
            getattr(other, f"norm{index}").load_state_dict(getattr(mine, name).state_dict())
    if norm == "pre":
        theirs.norm.load_state_dict(ours.norm.state_dict())
    x, context, valid = tokens(), tokens(7, seed=1), torch.arange(7) < torch.tensor([[7], [4]])
    have = ours(x, Causal(), context=ours.remember(context, valid))
    hidden = ~masks.causal(torch.arange(N), torch.arange(N))
    want = theirs(x, context, tgt_mask=hidden, memory_key_padding_mask=~valid)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_cache_and_a_context_work_together():
    net, x = model(position="rotary", cross=True), tokens()
    context = net.remember(tokens(4, seed=1))
    cache = net.cache(2, N)
    steps = [net(x[:, i : i + 1], Causal(), cache=cache, context=context) for i in range(N)]
    torch.testing.assert_close(torch.cat(steps, dim=1), net(x, Causal(), context=context), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [Causal(), Blocks((4, 1, 6)), Prefix(5) | Causal()])
@torch.no_grad()
def test_a_predicate_its_tensor_and_every_kernel_give_the_same(mask):
    x = tokens()
    want = model(position="alibi", kernel="reference", kv_heads=2)(x, mask)
    for kernel in ("sdpa", "flex"):
        net = model(position="alibi", kernel=kernel, kv_heads=2)
        torch.testing.assert_close(net(x, mask), want, rtol=0, atol=1e-12)
        torch.testing.assert_close(net(x, mask.tensor(N, N)), want, rtol=0, atol=1e-12)
