"""The kernels agree with each other on every mask, and none of the known traps gets through."""

import pytest
import torch
import torch.nn.functional as F

from robotattn.attention import Attention, attend, kernels, masks, weights
from robotattn.attention.masks import Blocks, Causal, Everything, Padding, Prefix, Window

KERNELS = ("sdpa", "reference", "flex")
N = 9
VALID = torch.arange(N) >= torch.tensor([[0], [3]])
MASKS = {
    "everything": Everything(),
    "causal": Causal(),
    "window": Window(3),
    "causal window": Window(3) & Causal(),
    "prefix": Prefix(4) | Causal(),
    "blocks": Blocks((4, 1, 4)),
    "padding": Padding(VALID),
    "padded blocks": Blocks((4, 1, 4)) & Padding(VALID),
}


def tensors(heads=4, groups=4, queries=N, keys=N, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, queries, 6), (groups, keys, 6), (groups, keys, 5)
    return [torch.randn(2, *shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_flex_and_sdpa_agree_with_the_written_out_kernel_on_every_mask(name, groups):
    q, k, v = tensors(groups=groups)
    mask = MASKS[name]
    want = attend(q, k, v, mask.tensor(N, N), "reference")
    torch.testing.assert_close(attend(q, k, v, mask.build(N, N), "sdpa"), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(attend(q, k, v, mask.block_mask(N, N), "flex"), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(attend(q, k, v, mask.tensor(N, N), "flex"), want, rtol=0, atol=1e-12)


def test_a_block_mask_for_later_queries_is_the_last_rows_of_the_whole():
    q, k, v = tensors()
    mask = MASKS["blocks"]
    want = attend(q, k, v, mask.tensor(N, N))[:, :, 5:]
    have = attend(q[:, :, 5:], k, v, mask.block_mask(N - 5, N, first_query=5), "flex")
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(N, N), (1, 1, N, N), (2, 1, 1, N), (1, 4, N, N), (2, 4, N, N), (2, 1, N, N)])
def test_every_accepted_shape_of_mask_and_bias_works_with_grouped_heads(kernel, shape):
    q, k, v = tensors(groups=2)
    generator = torch.Generator().manual_seed(1)
    mask, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = mask > -1.0
    mask[..., 0] = True
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3 + bias
    want = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    have = attend(q, k, v, mask, kernel, scale=0.3, bias=bias)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_query_heads_read_the_key_head_of_their_group(kernel):
    """Head i reads i // (heads / groups): with one key, the output is its value, whatever the query."""
    q, k, _ = tensors(4, 2, 1, 1)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).expand(2, 2)[:, :, None, None]
    assert attend(q, k, v, kernel=kernel)[0, :, 0, 0].tolist() == [10.0, 10.0, 20.0, 20.0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_empty_row_gives_zeros_and_finite_gradients(kernel):
    q, k, v = tensors()
    mask = Causal().tensor(N, N).clone()
    mask[4] = False
    for x in (q, k, v):
        x.requires_grad_(kernel != "flex")  # which has no gradient on a CPU, and says so
    for bias in (None, torch.zeros(N, N, dtype=torch.float64)):
        out = attend(q, k, v, mask, kernel, bias=bias)
        assert not out[:, :, 4].any() and out[:, :, 3].all()
        if kernel == "flex":
            continue
        out.square().sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v)) and not q.grad[:, :, 4].any()


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_garbage_behind_a_mask_moves_neither_output_nor_gradient(kernel, garbage, dtype):
    clean = tensors(groups=2, dtype=dtype)
    spoilt = [x.clone() for x in clean]
    mask = Padding(VALID).tensor(N, N)
    for x in spoilt[1:]:
        x[1, :, :3] = garbage
    results = []
    for q, k, v in (clean, spoilt):
        for x in (q, k, v):
            x.requires_grad_()
        out = attend(q, k, v, mask, kernel)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("garbage", [torch.nan, 1e30])
def test_a_later_token_full_of_garbage_moves_no_earlier_query(kernel, garbage):
    q, k, v = tensors()
    mask = Causal().tensor(N, N)
    before = attend(q, k, v, mask, kernel)
    q[:, :, 6], k[:, :, 6], v[:, :, 6] = garbage, garbage, garbage
    after = attend(q, k, v, mask, kernel)
    torch.testing.assert_close(after[:, :, :6], before[:, :, :6], rtol=0, atol=1e-12)
    assert (
        not torch.isclose(after[:, :, 6:], before[:, :, 6:]).all(-1).any()
    )  # and is not hidden from those who read it


def test_one_query_over_a_cache_reads_all_of_it_and_the_causal_flag_is_refused():
    q, k, v = tensors(queries=1, keys=5)
    flag = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(flag, v[:, :, :1])  # the trap: aligned to the upper left
    mask = Causal().build(torch.tensor([4]), 5)
    torch.testing.assert_close(attend(q, k, v, mask), weights(q, k) @ v, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="equally many queries and keys and no mask, got 1 queries, 5 keys"):
        attend(q, k, v, causal=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_causal_flag_equals_the_causal_mask_and_refuses_another_mask(kernel):
    q, k, v = tensors(groups=2)
    want = attend(q, k, v, Causal().tensor(N, N), "reference")
    torch.testing.assert_close(attend(q, k, v, kernel=kernel, causal=True), want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="and a mask"):
        attend(q, k, v, torch.ones(N, N, dtype=torch.bool), kernel, causal=True)


def test_a_boolean_bias_and_a_block_mask_for_another_kernel_are_refused():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="bias must be floating point"):
        attend(q, k, v, bias=torch.ones(N, N, dtype=torch.bool))
    with pytest.raises(ValueError, match="BlockMask needs kernel 'flex'"):
        attend(q, k, v, Causal().block_mask(N, N), "sdpa")


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of key heads, got 4 and 3"):
        attend(*tensors(4, 3))
    with pytest.raises(ValueError, match="heads 4, kv_heads 3"):
        Attention(8, 4, kv_heads=3)


def test_unscaled_scores_are_a_scale_of_one():
    q, k, _ = tensors()
    torch.testing.assert_close(weights(q, k, scale=1.0), (q @ k.transpose(-1, -2)).softmax(-1))


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_grouped_attention_equals_full_attention_with_repeated_key_and_value_weights(groups):
    torch.manual_seed(0)
    few, all_ = Attention(24, 4, kv_heads=groups).double(), Attention(24, 4).double()
    state = few.state_dict()
    for name in ("key.weight", "value.weight", "value.bias"):
        part = state[name].unflatten(0, (groups, 6))
        state[name] = part.repeat_interleave(4 // groups, dim=0).flatten(0, 1)
    all_.load_state_dict(state)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    mask = masks.causal(torch.arange(7), torch.arange(7))
    torch.testing.assert_close(few(x, mask=mask), all_(x, mask=mask), rtol=0, atol=1e-12)
    torch.testing.assert_close(few.weights(x, mask=mask), all_.weights(x, mask=mask), rtol=0, atol=1e-12)


def test_the_check_for_garbage_is_skipped_only_if_promised():
    q, k, v = tensors(dtype=torch.float32)
    v[1, :, 0] = torch.nan
    mask = Padding(VALID).tensor(N, N)
    assert attend(q, k, v, mask)[1].isfinite().all()
    assert attend(q, k, v, mask, clean=False)[1].isfinite().all()
    assert attend(q, k, v, mask, clean=True)[1].isnan().any()  # a promise that was broken
    assert kernels._suspicious(k, v) and not kernels._suspicious(k, k)
