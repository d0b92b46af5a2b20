"""Closed forms against the real policies: parameters, tokens and caches exactly, FLOPs and launches as counted."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch

from robotattn.attention import PrefixKV, kernels, masks, row_positions
from robotattn.latency import bounds, counted
from robotattn.latency.bounds import Work, bound, label, mbu, mfu
from robotattn.latency.devices import Device
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig, autoregressive, blocks, blockwise
from robotattn.policies.blocks import recall

ONE = {"front": (32, 32)}
MANY = {"front": (48, 64), "wrist": (32, 32), "left": (48, 64)}
SMALL = {"width": 32, "heads": 4, "feedforward": 48, "text_width": 16, "stem_channels": 8, "vocabulary": 24, "chunk": 3}
WORDS = 7

ACT = ACTConfig(cameras=ONE, **SMALL)
TOKENS = AutoregressiveConfig(cameras=ONE, layers=2, **SMALL)
FLOW = BlockwiseConfig(cameras=ONE, layers=2, steps=3, **SMALL)
BINS = replace(FLOW, head="autoregressive")

SIGHTS = [
    {"cameras": MANY},
    {"cameras": MANY, "objects": True},
    {"cameras": {}, "objects": True},
    {"cameras": MANY, "stem": "patch", "patch": 8},
    {"stem": "patch", "patch": 32, "action_mode": "joint"},
]
GRID = [ACT, TOKENS, FLOW, BINS]
GRID += [replace(config, **sight) for config in (ACT, TOKENS, FLOW, BINS) for sight in SIGHTS]
GRID += [
    replace(ACT, grounding=False),
    replace(ACT, grounding=False, pose_weight=0.0, cameras=MANY),
    replace(ACT, grounding=False, objects=True, latent=4, encoder_layers=0),
    replace(ACT, latent=6, encoder_layers=3, decoder_layers=2, heads=2),
    replace(ACT, action_mode="joint", joints_from="absolute"),
    replace(ACT, action_mode="joint", chunk=9, feedforward=96),
    replace(TOKENS, expected=True, layers=1, chunk=1),
    replace(TOKENS, width=48, text_width=24, action_mode="joint"),
    replace(FLOW, method="midpoint", steps=2),
    replace(FLOW, steps=1, layers=3, heads=1, chunk=8),
    replace(BINS, chunk=1, layers=1),
]
if "frames" in {field.name for field in dataclasses.fields(ACTConfig)}:
    GRID += [replace(config, frames=2, objects=True) for config in (ACT, TOKENS, FLOW, BINS)]
    GRID += [replace(ACT, frames=3, grounding=False), replace(FLOW, frames=4, cameras=MANY)]
if "kv_heads" in {field.name for field in dataclasses.fields(ACTConfig)}:
    GRID += [replace(config, kv_heads=count) for config in (ACT, TOKENS, FLOW, BINS) for count in (1, 2)]


def name_of(config):
    changed = [
        f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default and f.name not in SMALL
    ]
    return "-".join([type(config).__name__.removesuffix("Config"), *changed])


every = pytest.mark.parametrize("config", GRID, ids=name_of)


@pytest.fixture
def accelerator(monkeypatch):
    """Leave out what only CPUs do: looks at masks, keys and values, for which an accelerator would have to wait."""
    monkeypatch.setattr(kernels, "_suspicious", lambda keys, values: False)
    monkeypatch.setattr(
        masks.Mask, "build", lambda mask, queries, keys, device=None: mask.tensor(queries, keys, device)
    )

    def recall(memory):
        keys, values = zip(*memory.context, strict=True)
        return PrefixKV(keys, values, memory.mask, row_positions(memory.mask), padded=True)

    for module in (blocks, autoregressive, blockwise):
        monkeypatch.setattr(module, "recall", recall)


def stages(config, rows=1):
    """Run the three stages of a real policy; return tokens, memory, and (FLOPs, launches, parameters) of each stage."""
    torch.manual_seed(0)
    policy, inputs = counted.make(config), counted.batch(config, WORDS, rows)
    with torch.no_grad():
        tokens, vision = counted.count(policy, lambda: policy.tokenize(inputs))
        memory, prefix = counted.count(policy, lambda: policy.prefill(tokens))
        _, last = counted.count(policy, lambda: policy.decode(memory))
    return tokens, memory, {"vision": vision, "prefix": prefix, "last": last}


def expected(config, rows=1):
    """Return the works of the three stages that a policy has methods for."""
    works = bounds.work(config, WORDS, batch=rows)
    prefix = [works[name] for name in ("prefix", "cross_kv") if name in works]
    return {"vision": [works["vision"]], "prefix": prefix, "last": [list(works.values())[-1]]}


def test_the_grid_is_large_enough():
    assert len(GRID) >= 30 and len(set(map(repr, GRID))) == len(GRID)


@every
def test_closed_forms_equal_the_real_policy(config, accelerator):
    tokens, memory, real = stages(config)
    found = bounds.tokens(config, WORDS)
    groups = {name: part.stop - part.start for name, part in tokens.slices.items()}
    assert list(found.items())[: len(groups)] == list(groups.items()) and found["prefix"] == tokens.values.shape[1]
    assert bounds.parameters(config) == sum(p.numel() for p in config.build().parameters())
    works = expected(config)
    for name, (flops, launches, _) in real.items():
        assert sum(work.all_flops for work in works[name]) == pytest.approx(flops, rel=1e-9), name
        assert sum(work.all_kernels for work in works[name]) == pytest.approx(launches, rel=0.03), name
    kv = bounds.kv_bytes(config, WORDS)
    held = sum(part.numel() * part.element_size() for pair in memory.context for part in pair)
    assert kv["prefix"] == held == kv["per_token"] * found["prefix"]
    if isinstance(config, ACTConfig):
        assert kv["actions"] == 0 and found["actions"] == found["chunk"] == config.chunk
    else:
        assert kv["total"] == recall(memory).grow(found["actions"]).bytes == kv["prefix"] + kv["actions"]


@pytest.mark.parametrize("config", [ACT, TOKENS, FLOW, BINS], ids=name_of)
def test_a_batch_multiplies_arithmetic_and_caches_but_neither_weights_nor_launches(config, accelerator):
    _, memory, real = stages(config, rows=3)
    one, three = expected(config), expected(config, 3)
    for name, (flops, _, _) in real.items():
        assert sum(work.all_flops for work in three[name]) == flops == 3 * sum(work.all_flops for work in one[name])
        assert [work.weight_bytes for work in three[name]] == [work.weight_bytes for work in one[name]]
        assert [work.all_kernels for work in three[name]] == [work.all_kernels for work in one[name]]
    held = sum(part.numel() * part.element_size() for pair in memory.context for part in pair)
    assert bounds.kv_bytes(config, WORDS, batch=3)["prefix"] == held


@pytest.mark.parametrize("config", [ACT, FLOW], ids=name_of)
def test_weights_of_a_stage_are_those_of_the_modules_that_run_in_it(config):
    """Tables and parameters held outside of modules are read in part or not noticed, so this holds to a few percent."""
    _, _, real = stages(replace(config, width=128, feedforward=512))
    works = expected(replace(config, width=128, feedforward=512))
    for name in ("prefix", "last"):
        assert sum(work.weight_bytes for work in works[name]) == pytest.approx(4 * real[name][2], rel=0.03)


def test_what_one_stage_leaves_the_next_reads():
    works = bounds.work(FLOW, WORDS)
    prefix, token = bounds.tokens(FLOW, WORDS)["prefix"], bounds.kv_bytes(FLOW, WORDS)["per_token"]
    assert works["vision"].written_bytes == works["prefix"].read_bytes == prefix * FLOW.width * 4
    assert works["prefix"].written_bytes == works["denoise"].read_bytes == prefix * token
    assert works["denoise"].written_bytes == FLOW.chunk * token and works["denoise"].repeats == FLOW.steps
    assert works["vision"].read_bytes == 32 * 32 * 3 + 8 * WORDS  # bytes of an image, int64 of the text
    assert bounds.work(ACT, WORDS)["cross_kv"].written_bytes == bounds.work(ACT, WORDS)["decode"].read_bytes


def test_a_step_of_a_growing_cache_is_the_mean_of_all_steps():
    work = bounds.work(TOKENS, WORDS)["decode"]
    prefix, token = bounds.tokens(TOKENS, WORDS)["prefix"], bounds.kv_bytes(TOKENS, WORDS)["per_token"]
    assert work.repeats == 3 * 5
    assert work.repeats * work.read_bytes == sum(token * (prefix + step) for step in range(15))


def test_a_number_format_halves_the_bytes_and_leaves_the_arithmetic():
    single, half = bounds.work(ACT, WORDS)["prefix"], bounds.work(ACT, WORDS, dtype_bytes=2)["prefix"]
    assert single.weight_bytes == 2 * half.weight_bytes and single.flops == half.flops
    assert bounds.kv_bytes(ACT, WORDS, dtype_bytes=2)["total"] * 2 == bounds.kv_bytes(ACT, WORDS)["total"]


def test_works_are_plain_data():
    work = bounds.work(ACT, WORDS)["vision"]
    assert Work(**json.loads(json.dumps(dataclasses.asdict(work)))) == work


# ------------------------------------------------------------------------------------------ other policies


@dataclasses.dataclass(frozen=True)
class Newcomer(ACTConfig):
    """A policy's config of a kind that nobody wrote a closed form for."""


def test_a_policy_without_a_closed_form_is_built_and_counted_and_says_so():
    config = Newcomer(**{f.name: getattr(ACT, f.name) for f in dataclasses.fields(ACT)})
    works, known = bounds.work(config, WORDS), bounds.work(ACT, WORDS)
    assert [work.counted for work in works.values()] == [True] * 3 and not any(w.counted for w in known.values())
    assert works["vision"].flops == known["vision"].flops and works["decode"].flops == known["decode"].flops
    assert works["prefix"].flops == known["prefix"].flops + known["cross_kv"].flops
    assert bounds.parameters(config) == bounds.parameters(ACT)
    assert bounds.kv_bytes(config, WORDS) == bounds.kv_bytes(ACT, WORDS)
    assert bounds.tokens(config, WORDS) == bounds.tokens(ACT, WORDS)


# ------------------------------------------------------------------------------------------ time

MADE_UP = Device("made up", 1e9, {"float32": 1e12}, launch=1e-5, graph_launch=1e-6, source="nowhere")


def test_a_bound_is_the_longest_of_arithmetic_bytes_and_launches():
    work = Work(
        flops=4 * 10**9, weight_bytes=10**6, read_bytes=5 * 10**5, written_bytes=5 * 10**5, kernels=100, repeats=2
    )
    found = bound(work, MADE_UP)
    assert (found.compute_ms, found.bandwidth_ms, found.launch_ms) == pytest.approx((8.0, 4.0, 2.0))
    assert (found.roofline_ms, found.floor_ms, found.label) == (found.compute_ms, found.compute_ms, "compute")
    assert bound(replace(work, flops=0), MADE_UP).label == "bandwidth"
    many = bound(replace(work, kernels=1000), MADE_UP)
    assert many.label == "launch" and many.floor_ms == pytest.approx(20.0) and many.roofline_ms == pytest.approx(8.0)
    assert bound(replace(work, kernels=1000), MADE_UP, graph=True).label == "compute"
    with pytest.raises(ValueError, match="dtype: bfloat16 is not known for made up, allowed: float32"):
        bound(work, MADE_UP, "bfloat16")


def test_a_step_adds_its_stages_up():
    first, second = Work(10**10, 10**6, 0, 0, 10), Work(10**8, 10**7, 0, 0, 10, once_kernels=5, once_bytes=10**6)
    step = bounds.bounds({"a": first, "b": second}, MADE_UP)["step"]
    assert step.roofline_ms == pytest.approx(10.0 + 11.0) and step.launch_ms == pytest.approx(0.25)
    assert (step.compute_ms, step.bandwidth_ms) == pytest.approx((10.1, 12.0)) and step.label == "bandwidth"


def test_utilisation_and_labels_of_a_measurement():
    work = Work(flops=10**9, weight_bytes=10**6, read_bytes=0, written_bytes=0, kernels=1, repeats=2)
    assert mbu(work, 4.0, MADE_UP) == pytest.approx(0.5) and mfu(work, 4.0, MADE_UP) == pytest.approx(0.5)
    found = bound(work, MADE_UP)
    assert found.floor_ms == pytest.approx(2.0)
    assert label(found, 3.0) == "compute" and label(found, 5.0) == "host"
    assert label(found, 5.0, device_ms=4.0) == "compute" and label(found, 9.0, device_ms=4.0) == "host"
