"""The attention audit says what ran, not what was asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from robotattn.attention import Attention, Encoder, Transformer, TransformerConfig
from robotattn.attention.masks import Causal
from robotattn.latency.backends import MATH, WRITTEN_OUT, audit

FLASH = "flash (CPU)"


def test_the_fused_kernel_its_lengths_and_the_shape_of_its_mask_are_seen():
    stack, x = Encoder(2, 16, 2, 8).eval(), torch.randn(3, 5, 16)
    rows = audit(stack, lambda: stack(x))
    assert [row["site"] for row in rows] == ["layers.0.attention", "layers.1.attention"]
    same = {"backend": FLASH, "dtype": "float32", "q": 5, "kv": 5, "kv_least": 5, "mask": None, "calls": 1}
    assert all(row == same | {"site": row["site"]} for row in rows)
    masked = audit(stack, lambda: stack(x, torch.ones(3, 5, dtype=torch.bool)))
    assert [row["mask"] for row in masked] == [[3, 1, 5, 5]] * 2


def test_the_fallback_to_plain_products_is_named_math():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Identity())

        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    model = nn.Sequential(Three())
    (row,) = audit(model, lambda: model(torch.randn(2, 4, 8)))  # three dimensions: no fused kernel takes them
    assert (row["site"], row["backend"], row["q"], row["kv"]) == ("0", MATH, 4, 4)
    stack = Encoder(1, 16, 2, 8).eval()
    with sdpa_kernel(SDPBackend.MATH):
        (forced,) = audit(stack, lambda: stack(torch.randn(1, 4, 16)))
    assert forced["backend"] == MATH


def test_attention_that_never_calls_the_fused_function_is_seen_too():
    stack = Encoder(1, 16, 2, 8, kernel="reference").eval()
    (row,) = audit(stack, lambda: stack(torch.randn(1, 6, 16)))
    assert (row["site"], row["backend"], row["q"], row["kv"]) == ("layers.0.attention", WRITTEN_OUT, 6, 6)


def test_a_growing_cache_is_one_row_with_its_range_of_keys():
    stack = Transformer(TransformerConfig(1, 16, 2, 8)).eval()

    def step():
        cache = stack.cache(1, 8)
        for _ in range(4):
            stack(torch.randn(1, 1, 16), Causal(), cache=cache)

    (row,) = audit(stack, step)
    assert (row["calls"], row["q"], row["kv_least"], row["kv"]) == (4, 1, 1, 4)


def test_the_causal_flag_and_other_types_are_seen():
    layer = nn.Sequential(Attention(16, 2)).double()
    q = torch.randn(1, 2, 3, 8, dtype=torch.double)
    rows = audit(layer, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert [(row["mask"], row["dtype"], row["site"]) for row in rows] == [("causal flag", "float64", "")]


def test_the_audit_leaves_no_hook_behind_even_after_an_error():
    stack = Encoder(1, 16, 2, 8).eval()
    with pytest.raises(RuntimeError):
        audit(stack, lambda: stack(torch.randn(1, 4, 7)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in stack.modules())
