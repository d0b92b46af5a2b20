"""Execution modes: each must do the same thing, and what cannot run here says why."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from robotattn.attention import Attention
from robotattn.attention.fused import FusedLayer
from robotattn.attention.quantised import Int8Linear
from robotattn.latency import modes
from robotattn.latency.modes import Graphs, Rounded, Unavailable, parity, prepare, probe
from robotattn.latency.subject import of_policy
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig
from robotattn.policies.act_resnet import ACTResNetConfig

SMALL = {"cameras": {"front": (32, 32)}, "width": 32, "feedforward": 32, "text_width": 16, "stem_channels": 8}


def made(config, count=3, rows=2):
    """A policy with random weights, and batches for it."""
    torch.manual_seed(0)
    subject = of_policy("small", config, "cpu", 6)
    fresh = subject.inputs(rows, 0)
    return subject.policy, [subject.batcher.batch(fresh(), subject.length) for _ in range(count)]


@pytest.fixture(scope="module")
def act():
    return made(ACTConfig(chunk=3, **SMALL))


@pytest.fixture(scope="module")
def bins():
    return made(AutoregressiveConfig(chunk=1, layers=1, **SMALL))


@pytest.fixture(scope="module")
def flow():
    return made(BlockwiseConfig(chunk=2, layers=1, steps=2, **SMALL))


@pytest.fixture(scope="module")
def published():
    sizes = {"encoder_layers": 1, "style_layers": 1, "dropout": 0.0}
    return made(ACTResNetConfig(chunk=3, **sizes, **SMALL))


def test_eager_is_the_policy_itself_and_has_no_error(act):
    policy, batches = act
    found = parity(policy, prepare(policy, "eager", batches[0]), batches, exact=True)
    assert (found.error, found.relative, found.gripper, found.bins, found.ok) == (0, 0, 1, None, True)


@pytest.mark.parametrize(("shift", "exact", "ok"), [(5e-4, True, True), (2e-3, True, False), (2e-3, False, True)])
def test_an_action_error_is_measured_in_metres_and_in_standard_deviations(act, shift, exact, ok):
    policy, batches = act

    def shifted(batch):
        actions = policy.act(batch).clone()
        actions[0, 0, 1] += 2 * shift
        return actions

    statistics = policy.statistics
    action = statistics.moments["action"]
    twice = SimpleNamespace(moments={"action": SimpleNamespace(scale=tuple(2 * s for s in action.scale))})
    policy.normaliser.statistics = twice
    try:
        found = parity(policy, shifted, batches, exact)
    finally:
        policy.normaliser.statistics = statistics
    assert found.error == pytest.approx(2 * shift, rel=1e-3) and found.relative == pytest.approx(shift, rel=1e-3)
    motions = len(batches) * 2 * 3 * 4  # in one of as many, in each batch
    assert found.mean == pytest.approx(shift * len(batches) / motions, rel=1e-3)
    assert found.ok is ok


def test_nan_and_another_gripper_are_no_parity(act):
    policy, batches = act
    assert not parity(policy, lambda batch: policy.act(batch) * torch.nan, batches, exact=False).ok

    def gripper(batch):
        actions = policy.act(batch).clone()
        actions[..., -1] = 1 - actions[..., -1]
        return actions

    found = parity(policy, gripper, batches, exact=False)
    assert found.error == 0 and found.gripper == 0 and not found.ok


def test_policies_that_choose_bins_are_judged_by_how_many_are_the_same(bins):
    policy, batches = bins
    assert parity(policy, policy.act, batches, exact=True).bins == 1

    def one_bin_further(batch):
        actions = policy.act(batch).clone()
        actions[:, :, 0] += 0.02  # one of four motions: 75 % of the bins are the same
        return actions

    found = parity(policy, one_bin_further, batches, exact=False)
    assert found.bins == 0.75 and not found.ok


def test_what_cannot_run_here_says_why(act, monkeypatch):
    policy, batches = act
    with pytest.raises(Unavailable, match="CUDA graphs need a CUDA device, this is cpu"):
        prepare(policy, "graph", batches[0])
    monkeypatch.setattr(modes.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match=r"torch.compile needs a C\+\+ compiler"):
        prepare(policy, "compile", batches[0])
    assert modes.missing("int8", torch.device("cuda")) == "dynamic int8 is for CPUs, this is cuda"


def test_a_compiler_that_fails_is_a_reason_and_no_crash(act, monkeypatch):
    policy, batches = act

    def broken(act, **options):
        raise AssertionError("first line\nsecond")

    monkeypatch.setattr(modes, "compiler", lambda: "/bin/true")
    monkeypatch.setattr(modes.torch, "compile", broken)
    with pytest.raises(Unavailable, match=r"^AssertionError: first line$"):
        prepare(policy, "compile", batches[0])


def test_compiling_asks_for_static_shapes_and_reduce_overhead_begins_a_step_each_time(act, monkeypatch):
    policy, batches = act
    asked, begun = [], []

    def compiled(act, **options):
        asked.append(options)
        return act

    monkeypatch.setattr(modes, "compiler", lambda: "/bin/true")
    monkeypatch.setattr(modes.torch, "compile", compiled)
    monkeypatch.setattr(modes.torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    prepare(policy, "compile", batches[0])
    prepare(policy, "reduce-overhead", batches[0])(batches[1])
    assert asked == [{"dynamic": False}, {"dynamic": False, "mode": "reduce-overhead"}] and len(begun) == 2


@pytest.mark.parametrize("name", ["act", "bins", "flow", "published"])
def test_int8_rounds_the_layers_and_keeps_heads_and_grounding_in_float32(request, name):
    policy, batches = request.getfixturevalue(name)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    small = modes.in_int8(policy, batches[0])
    kinds = {key: type(part) for key, part in small.named_modules()}
    exact = {key for key, kind in kinds.items() if kind is nn.Linear}
    assert {"head", "flow.out"} & exact or name == "bins"
    assert name == "published" or all(any(part in key for key in exact) for part in ("grounding", "target"))
    assert all(key in modes.HEADS or "grounding" in key or "target" in key for key in exact)
    assert Int8Linear in kinds.values() and (FusedLayer in kinds.values() or name == "published")
    assert all(torch.equal(before[key], value) for key, value in policy.state_dict().items())


@pytest.mark.parametrize("name", ["act", "flow", "published"])
def test_int8_changes_actions_by_less_than_a_tenth_of_their_deviation(request, name):
    policy, batches = request.getfixturevalue(name)
    found = parity(policy, prepare(policy, "int8", batches[0]), batches, exact=False)
    assert 0 < found.mean < found.relative < 0.1 and found.ok


def test_int8_without_rounding_anything_chooses_the_same_bins(bins, monkeypatch):
    policy, batches = bins
    monkeypatch.setattr(modes, "quantise", lambda module, keep: module)
    assert parity(policy, prepare(policy, "int8", batches[0]), batches, exact=True).bins == 1


def test_a_published_act_in_bfloat16_is_its_own_form_for_inference(published):
    policy, batches = published
    act = prepare(policy, "bf16", batches[0])
    assert {part.dtype for part in act.__self__.encoder.parameters()} == {torch.bfloat16}
    assert act(batches[0]).dtype == torch.float32
    assert 0 < parity(policy, act, batches, exact=False).relative < 0.1


def test_bfloat16_rounds_the_transformer_once_and_keeps_grounding_in_float32(act):
    policy, batches = act
    rounded = Rounded(policy, batches[0])
    kinds = {name: p.dtype for name, p in rounded.policy.named_parameters() if name.endswith("weight")}
    assert kinds["encoder.layers.0.attention.query.weight"] == torch.bfloat16
    assert kinds["prefix.images.stem.coarse.0.weight"] == torch.bfloat16
    assert {kind for name, kind in kinds.items() if "grounding" in name or "prefix.target" in name} == {torch.float32}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    actions = rounded(batches[0])
    assert actions.dtype == torch.float32
    assert 0 < parity(policy, rounded, batches, exact=False).relative < 0.1


class FakeCuda:
    """Streams and graphs that run on the CPU: a captured graph runs its work again when it is replayed."""

    def __init__(self, monkeypatch):
        self.captures, self.streams, self.capturing = 0, 0, None
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": self.stream, "stream": lambda stream: contextlib.nullcontext(), "CUDAGraph": self.graph_object,
            "current_stream": lambda: stream, "graph": self.graph,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def stream(self):
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    def graph_object(self):
        return SimpleNamespace(work=None, replay=lambda: None)

    @contextlib.contextmanager
    def graph(self, graph):
        self.captures += 1
        self.capturing = graph
        yield
        self.capturing = None


def test_a_cuda_graph_is_captured_once_for_each_length_and_replayed_on_its_own_buffers(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def act(batch):
        out = torch.empty(1)
        graph = cuda.capturing

        def work():
            out.copy_(batch["state"].sum() + batch["images"]["front"].sum() + batch["text"].sum())

        if graph is None:
            work()
        else:
            graph.replay = work
        return out

    def batch(value, length):
        images = {"front": torch.full((2,), 10 * value)}
        return {"state": torch.full((3,), value), "images": images, "text": torch.full((length,), 100 * value)}

    graphs = Graphs(act)
    assert graphs(batch(1.0, 4)).item() == 423
    first = graphs(batch(2.0, 4))
    assert first.item() == 846 and cuda.captures == 1
    mine = batch(3.0, 6)
    assert graphs(mine).item() == 3 * (3 + 20 + 600) and (cuda.captures, cuda.streams) == (2, 2)
    assert graphs(batch(1.0, 4)).item() == 423 and cuda.captures == 2, "a length that is known is not captured again"
    assert mine["state"].tolist() == [3.0] * 3, "the caller's tensors are not the graph's buffers"


def fake_times(monkeypatch, policy, cost):
    """Let the probe's clock advance by what `cost` (ms) says of the threads and the kernel in use."""
    now, threads = [0], [1]

    def act(batch):
        now[0] += round(1e6 * cost(threads[0], kernel(policy)))
        return torch.zeros(1, 2, 5)

    monkeypatch.setattr(modes, "time", SimpleNamespace(perf_counter_ns=lambda: now[0], monotonic=lambda: 0.0))
    monkeypatch.setattr(modes.torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    monkeypatch.setattr(modes.torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(policy, "act", act)
    return threads


def kernel(policy):
    return next(module.kernel for module in policy.modules() if isinstance(module, Attention))


@pytest.mark.parametrize(
    ("cost", "chosen"),
    [
        (lambda threads, kernel: 8 / threads + (kernel == "reference"), (4, "sdpa")),
        (lambda threads, kernel: 4 * threads - 2 * (kernel == "reference"), (1, "reference")),
        (lambda threads, kernel: 10 - 0.1 * (threads == 2), (1, "sdpa")),  # 1 % is noise: the default stays
    ],
)
def test_the_probe_finds_the_fastest_way_and_leaves_it_set(monkeypatch, cost, chosen):
    policy, batches = made(ACTConfig(chunk=2, **SMALL))
    threads = fake_times(monkeypatch, policy, cost)
    found = probe(policy, batches, threads=(1, 2, 4))
    assert (found["threads"], found["kernel"]) == chosen == (threads[0], kernel(policy))
    assert found["default"] == {"threads": 1, "kernel": "sdpa"}
    times = {(one["threads"], one["kernel"]): one["p50_ms"] for one in found["candidates"]}
    assert len(times) == 6 and times[2, "sdpa"] == pytest.approx(cost(2, "sdpa"))


def test_a_kernel_that_acts_differently_is_no_candidate_however_fast(monkeypatch):
    policy, batches = made(ACTConfig(chunk=2, **SMALL))
    fake_times(monkeypatch, policy, lambda threads, kernel: 1.0)
    monkeypatch.setattr(policy, "act", lambda batch: torch.full((1, 2, 5), float(kernel(policy) == "reference")))
    found = probe(policy, batches, threads=(1,))
    assert found["kernel"] == "sdpa"
    assert [one["p50_ms"] is None for one in found["candidates"]] == [False, True]


def test_both_kernels_are_candidates_for_a_real_policy(act):
    policy, batches = act
    found = probe(policy, batches, threads=(torch.get_num_threads(),), rounds=3)
    assert [one["kernel"] for one in found["candidates"]] == ["sdpa", "reference"]
    assert all(one["p50_ms"] > 0 for one in found["candidates"])
    modes.use_kernel(policy, "sdpa")
