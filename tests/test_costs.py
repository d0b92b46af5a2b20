"""Closed forms of the building blocks: against real stacks, and against what others have published of their models."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from robotattn.attention import Decoder, Transformer, TransformerConfig, masks
from robotattn.latency.bounds import Work, as_work, bound, bounds
from robotattn.latency.costs import (
    Cost,
    convolution,
    kept,
    keys_values,
    kv_elements,
    linear,
    stack,
    stack_parameters,
    total,
)
from robotattn.latency.devices import DEVICES, Device

SPEC = ("h200", "a100", "rtx4090", "orin")


def sizes(layers, width, heads, hidden, **more):
    return TransformerConfig(layers, width, heads, hidden, **more)


SHAPES = [
    sizes(2, 32, 4, 48),
    sizes(3, 32, 4, 48, kv_heads=2, head_width=16, norm_kind="rms", activation="swiglu", bias=False),
    sizes(1, 24, 2, 0, kv_heads=1, norm="post"),
    sizes(2, 32, 4, 40, norm="none", activation="relu"),
]


def counted(work):
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        result = work()
    return result, counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_stacks_have_the_parameters_and_flops_of_the_real_ones(shape):
    model = Transformer(shape).requires_grad_(False)
    assert stack_parameters(shape) == sum(p.numel() for p in model.parameters())
    _, whole = counted(lambda: model(torch.randn(2, 9, shape.width), masks.Causal()))
    assert total(stack(shape, 9, batch=2)).flops == whole
    cache = model.cache(2, 12)
    counted(lambda: model(torch.randn(2, 9, shape.width), masks.Causal(), cache=cache))
    _, step = counted(lambda: model(torch.randn(2, 3, shape.width), masks.Causal(), cache=cache))
    assert total(stack(shape, 3, batch=2, cached=9)).flops == step
    assert 4 * kv_elements(shape) * 12 * 2 == cache.bytes and total(kept(shape, 12, 2)).written * 4 == cache.bytes


def test_a_decoder_has_the_flops_of_the_real_one():
    model, shape = Decoder(2, 32, 4, 48).requires_grad_(False), sizes(2, 32, 4, 48, cross=True)
    assert stack_parameters(shape) == sum(p.numel() for p in model.parameters())
    context, made = counted(lambda: model.keys_values(torch.randn(1, 11, 32)))
    _, decoded = counted(lambda: model(torch.randn(1, 5, 32), context))
    assert total(keys_values(shape, 11)).flops == made
    assert total(stack(shape, 5, context=11, masked=False)).flops == decoded
    assert total(keys_values(shape, 11)).written == sum(part.numel() for pair in context for part in pair)


def test_costs_by_hand():
    assert total(linear(3, 4, 5)) == Cost(flops=120, weights=25, passed=27, kernels=1)
    (cost,) = convolution(2, (3, 8), 4, cells=36)  # 2 images, 6 x 6 cells, kernel 4 x 4
    assert (cost.flops, cost.weights) == (2 * 2 * 36 * 8 * 48, 8 * 48 + 8)
    assert (cost + cost) == cost * 2 and total(()) == Cost()


# ------------------------------------------------------------------------------------------ models of others


def of(*parts, repeats=1):
    return as_work(total(cost for part in parts for cost in part), repeats)


VIT = sizes(6, 512, 8, 2048)


def worked_act(kv_heads=None):
    """ACT of 6 + 6 layers behind a ViT of 6: 3 cameras x 196 + 1 + 16 tokens, 100 queries, bf16."""
    decoder = sizes(6, 512, 8, 2048, cross=True, kv_heads=kv_heads)
    return {
        "vision": of(stack(VIT, 196, batch=3, masked=False)),
        "prefix": of(stack(VIT, 605, masked=False)),
        "cross_kv": of(keys_values(decoder, 605)),
        "decode": of(stack(decoder, 100, context=605, masked=False, padded=False)),
    }


@pytest.mark.parametrize(("kv_heads", "mebibytes"), [(None, 7.09), (2, 1.77), (1, 0.89)])
def test_worked_act_keeps_the_bytes_of_the_specification(kv_heads, mebibytes):
    written = worked_act(kv_heads)["cross_kv"].written_bytes
    assert written / 2**20 == pytest.approx(mebibytes, abs=0.005)
    assert kv_heads or written == 605 * 12_288


@pytest.mark.parametrize(("device", "microseconds"), list(zip(SPEC, (80, 199, 378, 1510), strict=True)))
def test_worked_act_has_the_roofline_of_the_specification(device, microseconds):
    step = bounds(worked_act(), DEVICES[device], "bfloat16")["step"]
    assert step.roofline_ms * 1e3 == pytest.approx(microseconds, rel=0.02)


def test_worked_act_is_bound_by_launches_on_a_large_gpu():
    """About 250 launches, 1.25 ms one by one and 0.35 ms in a graph, against 0.08 ms of work."""
    eager = bounds(worked_act(), DEVICES["h200"], "bfloat16")["step"]
    graph = bounds(worked_act(), DEVICES["h200"], "bfloat16", graph=True)["step"]
    launches = sum(work.all_kernels for work in worked_act().values())
    assert launches == pytest.approx(250, rel=0.07)
    assert eager.label == graph.label == "launch" and eager.floor_ms == pytest.approx(1.25, rel=0.07)
    assert graph.floor_ms == pytest.approx(0.35, rel=0.07) and graph.floor_ms == pytest.approx(launches * 1.25e-3)


LLAMA = sizes(32, 4096, 32, 11008, norm_kind="rms", activation="swiglu", bias=False)
LOGITS = linear(1, 4096, 32_064, bias=False)


def openvla(tokens=281, actions=7):
    """DINOv2 ViT-L and SigLIP So400m on 256 patches, Llama-2 7B, and a step for every action token but the first."""
    step = of(stack(LLAMA, 1, cached=tokens + 3), kept(LLAMA, 1), LOGITS, repeats=actions - 1)
    return {
        "vision": of(stack(sizes(24, 1024, 16, 4096), 256), stack(sizes(27, 1152, 16, 4304), 256)),
        "prefix": of(stack(LLAMA, tokens), kept(LLAMA, tokens), LOGITS),
        "decode": step,
    }


def test_openvla_keeps_half_a_mebibyte_a_token():
    assert 2 * kv_elements(LLAMA) == 524_288


@pytest.mark.parametrize(("device", "milliseconds"), list(zip(SPEC, (23.8, 52.4, 104.0, 488.0), strict=True)))
def test_openvla_has_the_roofline_of_the_specification(device, milliseconds):
    found = bounds(openvla(), DEVICES[device], "bfloat16")
    assert found["step"].roofline_ms == pytest.approx(milliseconds, rel=0.01)
    assert found["decode"].label == "bandwidth" and found["prefix"].label == "compute"


SIGLIP = sizes(27, 1152, 16, 4304)
GEMMA = sizes(18, 2048, 8, 16_384, kv_heads=1, head_width=256, norm_kind="rms", activation="swiglu", bias=False)
EXPERT = sizes(18, 1024, 8, 4096, kv_heads=1, head_width=256, norm_kind="rms", activation="swiglu", bias=False)


def pi0(cameras=3, words=32, actions=50, steps=10):
    prefix = 256 * cameras + words
    return {
        "vision": of(stack(SIGLIP, 256, batch=cameras)),
        "prefix": of(stack(GEMMA, prefix), kept(GEMMA, prefix)),
        "denoise": of(stack(EXPERT, actions, cached=prefix), kept(EXPERT, actions), repeats=steps),
    }


def test_pi0_keeps_the_bytes_of_the_specification():
    assert 2 * kv_elements(GEMMA) == 18_432
    assert 2 * total(kept(GEMMA, 816)).written / 2**20 == pytest.approx(14.3, abs=0.05)
    assert stack_parameters(GEMMA) == pytest.approx(1.98e9, rel=0.01)  # arXiv 2602.18397, table 11
    assert stack_parameters(SIGLIP) == pytest.approx(411.19e6, rel=0.01)


def device(terabytes, tera):
    return Device("of table 10", terabytes * 1e12, {"bfloat16": tera * 1e12}, 0.0, 0.0, "arXiv 2602.18397")


VLA_PERF = {  # arXiv 2602.18397, tables 10 and 3: device, and ms of vision, language model, actions, all
    "RTX 4090": (device(1.008, 165), (4.02, 19.79, 7.25, 31.06)),
    "A100": (device(2.039, 312), (2.13, 10.47, 3.60, 16.20)),
    "H100": (device(3.35, 989), (0.71, 3.30, 2.14, 6.15)),
    "B100": (device(8.0, 1750), (0.40, 1.87, 0.91, 3.18)),
}


@pytest.mark.parametrize("name", VLA_PERF)
def test_pi0_agrees_with_vla_perf_within_seven_percent(name):
    """Theirs moves what passes between operators through memory as well, so its denoising is a little slower."""
    machine, (vision, language, actions, together) = VLA_PERF[name]
    works = pi0()
    found = bounds(works, machine, "bfloat16")
    assert found["vision"].roofline_ms == pytest.approx(vision, rel=0.07)
    assert found["prefix"].roofline_ms == pytest.approx(language, rel=0.02)
    assert found["step"].roofline_ms == pytest.approx(together, rel=0.07)
    assert found["step"].roofline_ms < together and found["denoise"].label == "bandwidth"
    denoise = works["denoise"]
    moved = denoise.all_bytes + denoise.repeats * denoise.passed_bytes
    assert 1e3 * moved / machine.bandwidth == pytest.approx(actions, rel=0.07)


@pytest.mark.parametrize(("cameras", "milliseconds", "measured"), [(1, 14.7, 20.0), (2, 22.5, 27.3), (3, 30.4, 36.8)])
def test_pi0_on_a_4090_agrees_with_vla_perfs_check_against_a_measurement(cameras, milliseconds, measured):
    """Arxiv 2602.18397, table 1: no text, 63 actions, ten steps; measured by arXiv 2510.26742."""
    step = bounds(pi0(cameras, words=0, actions=63), DEVICES["rtx4090"], "bfloat16")["step"]
    assert step.roofline_ms == pytest.approx(milliseconds, rel=0.07) and step.roofline_ms < measured


def test_a_stage_cannot_be_faster_than_its_weights_can_be_read():
    work = Work(flops=0, weight_bytes=4_300_000_000, read_bytes=0, written_bytes=0, kernels=1)
    assert bound(work, DEVICES["h200"], "bfloat16").roofline_ms == pytest.approx(1.0)
