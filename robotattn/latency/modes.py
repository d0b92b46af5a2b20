"""Ways to run one policy: eager, compiled, as a CUDA graph, in fewer bits; each judged by the actions it gives.

In goes a float32 policy in evaluation mode, out comes a function from batches to actions. A mode is only worth its
speed if it does the same thing, so the actions are compared with those of the eager policy first. On CPUs, a start-up
probe chooses the number of threads and the attention kernel: PyTorch's defaults are often the slower ones.
"""

import copy
import math
import os
import shutil
import statistics as numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from robotattn.attention import Attention, fuse, quantise
from robotattn.attention.kernels import Kernel
from robotattn.latency.stages import Act
from robotattn.policies import Policy
from robotattn.policies.act_resnet import ACTResNet

Mode = Literal["eager", "compile", "reduce-overhead", "graph", "bf16", "int8"]
MODES: tuple[Mode, ...] = get_args(Mode)
EXACT = ("eager", "compile", "reduce-overhead", "graph")
"""Modes that only reorder float32 sums; the others round."""
TOLERANCE = {True: 1e-3, False: 0.1}
"""Largest action error in standard deviations of the actions: exact modes, rounding ones (about 1 mm here)."""
AGREEMENT = {True: 0.999, False: 0.9}
"""Least share of equal bins (policies that choose bins) and of equal gripper commands."""
WARM_CALLS = 3
CLEARLY = 1.05
"""The probe leaves PyTorch's default alone unless another way is faster by this factor."""
KERNELS: tuple[Kernel, ...] = ("sdpa", "reference")
HEADS = ("head", "flow.out")
"""Layers that say the actions: few weights, and what int8 would round there nothing behind them mends."""


class Unavailable(RuntimeError):
    """A mode cannot run here; the message says why."""


def prepare(policy: Policy, mode: Mode, example: Mapping[str, Any]) -> Act:
    """Return how `policy` is run in a mode, after a first call with `example`, a batch on the policy's device.

    Raises Unavailable, with the reason, where the device, a compiler or a part of the program is missing or fails.
    """
    if reason := missing(mode, policy.device):
        raise Unavailable(reason)
    try:
        with torch.inference_mode(False), torch.no_grad():  # a weight made in inference mode could not be changed
            act = _BUILD[mode](policy, example)
        act(dict(example))
    except Unavailable:
        raise
    except Exception as error:  # compilers, drivers and quantisers fail in their own ways; the reason is the result
        raise Unavailable(f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}") from error
    return act


def missing(mode: Mode, device: torch.device) -> str | None:
    """Say why a mode cannot be tried on a device; None if it can."""
    if mode == "graph" and device.type != "cuda":
        return f"CUDA graphs need a CUDA device, this is {device.type}"
    if mode == "int8" and device.type != "cpu":
        return f"dynamic int8 is for CPUs, this is {device.type}"
    if mode in ("compile", "reduce-overhead") and compiler() is None:
        return "torch.compile needs a C++ compiler: none of $CXX, g++, clang++, c++ was found"
    return None


def compiler() -> str | None:
    """The C++ compiler that torch.compile would find."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _eager(policy: Policy, example: Mapping[str, Any]) -> Act:
    return policy.act


def _compile(policy: Policy, example: Mapping[str, Any]) -> Act:
    return torch.compile(policy.act, dynamic=False)


def _reduce_overhead(policy: Policy, example: Mapping[str, Any]) -> Act:
    compiled = torch.compile(policy.act, dynamic=False, mode="reduce-overhead")

    def act(batch: dict[str, object]) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the last call's actions may be overwritten
        return compiled(batch)

    return act


def _graph(policy: Policy, example: Mapping[str, Any]) -> Act:
    return Graphs(policy.act)


def _int8(policy: Policy, example: Mapping[str, Any]) -> Act:
    return in_int8(policy, example).act


def in_int8(policy: Policy, example: Mapping[str, Any]) -> Policy:
    """Return a copy for CPUs with int8 weights in rearranged layers; heads and what grounds stay in float32."""
    fast = policy.optimised() if isinstance(policy, ACTResNet) else fuse(policy)
    exact = [name for name, rounds in _rounding(policy, example).items() if not rounds]
    return quantise(fast, {*HEADS, *exact})


def _bf16(policy: Policy, example: Mapping[str, Any]) -> Act:
    return policy.optimised(torch.bfloat16).act if isinstance(policy, ACTResNet) else Rounded(policy, example)


_BUILD: dict[Mode, Callable[[Policy, Mapping[str, Any]], Act]] = {
    "eager": _eager,
    "compile": _compile,
    "reduce-overhead": _reduce_overhead,
    "graph": _graph,
    "bf16": _bf16,
    "int8": _int8,
}


class Rounded:
    """A copy of a policy in bfloat16: autocast, with the weights that it would round at each call rounded once."""

    def __init__(self, policy: Policy, example: Mapping[str, Any]) -> None:
        self.policy, self.device = copy.deepcopy(policy), policy.device.type
        for name, rounds in _rounding(policy, example).items():
            if rounds:
                self.policy.get_submodule(name).bfloat16()

    def __call__(self, batch: dict[str, object]) -> Tensor:
        """Return actions in float32."""
        with torch.autocast(self.device, torch.bfloat16):
            return self.policy.act(batch).float()


def _rounding(policy: Policy, example: Mapping[str, Any]) -> dict[str, bool]:
    """Say which layers autocast rounds at every call; the policy insists on float32 in the others (millimetres)."""
    device, found = policy.device.type, dict[str, bool]()

    def note(name: str, module: nn.Module, arguments: Any) -> None:
        found[name] = found.get(name, True) and torch.is_autocast_enabled(device)

    handles = [
        layer.register_forward_pre_hook(partial(note, name))
        for name, layer in policy.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    with torch.autocast(device, torch.bfloat16):
        policy.act(dict(example))
    for handle in handles:
        handle.remove()
    return found


class Graphs:
    """A whole step as one CUDA graph for each set of shapes (each length of text): no launches from Python.

    Inputs are copied into static buffers and the graph is replayed; the actions lie in the graph's own memory and are
    overwritten by the next call. Another set of shapes is captured at its first call: warm up with every one.
    """

    def __init__(self, act: Act) -> None:
        self.act = act
        self.captured: dict[tuple[Any, ...], tuple[Any, list[Tensor], Tensor]] = {}

    def __call__(self, batch: dict[str, object]) -> Tensor:
        """Return the actions of a batch whose tensors are on the device."""
        shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in _leaves(batch))
        if shapes not in self.captured:
            self.captured[shapes] = self._capture(batch)
        graph, static, actions = self.captured[shapes]
        for buffer, (_, fresh) in zip(static, _leaves(batch), strict=True):
            buffer.copy_(fresh, non_blocking=True)
        graph.replay()
        return actions

    def _capture(self, batch: dict[str, object]) -> tuple[Any, list[Tensor], Tensor]:
        static = _cloned(batch)
        side = torch.cuda.Stream()  # what the first calls set up (workspaces, plans) must not become part of the graph
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_CALLS):
                self.act(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actions = self.act(static)
        return graph, [tensor for _, tensor in _leaves(static)], actions


def _leaves(batch: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _cloned(batch: Mapping[str, Any]) -> dict[str, object]:
    return {k: _cloned(v) if isinstance(v, Mapping) else v.clone() for k, v in batch.items()}


# ------------------------------------------------------------------------------------------------------- parity


@dataclass(frozen=True)
class Parity:
    """How far a mode's actions are from those of eager float32, over several batches.

    error: largest difference of a motion (m, rad). relative: the same in standard deviations of that dimension,
    and mean: the mean of that over all motions.
    gripper: share of equal gripper commands. bins: share of equal values, for policies that choose bins, else None.
    """

    error: float
    relative: float
    mean: float
    gripper: float
    bins: float | None
    tolerance: float
    ok: bool


def parity(policy: Policy, act: Act, batches: Sequence[Mapping[str, Any]], exact: bool) -> Parity:
    """Compare a mode's actions with the policy's own; exact: whether it only reorders sums.

    A policy that chooses bins is judged by how many are the same: a neighbouring bin is a step, not an error.
    """
    pairs = [(policy.act(dict(b)).double().cpu(), act(dict(b)).double().cpu().clone()) for b in batches]
    ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    difference = (ours - theirs)[..., :-1].abs()
    assert policy.statistics is not None
    scale = torch.tensor(policy.statistics.moments["action"].scale, dtype=torch.float64)[:-1]
    relative = difference / scale
    error, largest = _largest(difference), _largest(relative)
    gripper = (ours[..., -1] == theirs[..., -1]).double().mean().item()
    bins = (difference <= 1e-6).double().mean().item() if _chooses_bins(policy) else None
    close = largest <= TOLERANCE[exact] if bins is None else bins >= AGREEMENT[exact]
    ok = math.isfinite(error) and close and gripper >= AGREEMENT[exact]
    return Parity(error, largest, relative.mean().nan_to_num(math.inf).item(), gripper, bins, TOLERANCE[exact], ok)


def _largest(values: Tensor) -> float:
    return math.inf if values.isnan().any() else values.max().item()


def _chooses_bins(policy: Policy) -> bool:
    return hasattr(policy, "bins") and getattr(policy, "flow", None) is None


# -------------------------------------------------------------------------------------------------------- probe


@dataclass(frozen=True)
class Candidate:
    """One way to run on a CPU, and its median time (None: its actions differed)."""

    threads: int
    kernel: Kernel
    p50_ms: float | None


def probe(
    policy: Policy, batches: Sequence[Mapping[str, Any]], threads: Sequence[int], rounds: int = 7, seconds: float = 5.0
) -> dict[str, Any]:
    """Time every number of threads with every attention kernel in turn (A B A B), set the fastest and say which.

    batches: on the policy's device, one a round at least. seconds: after these, a round is the last one (three are
    run in any case). A kernel whose actions are not those of the fused one is no candidate.
    """
    default = (torch.get_num_threads(), KERNELS[0])
    allowed = [kernel for kernel in KERNELS if _same(policy, kernel, batches[:1])]
    ways = [(count, kernel) for count in threads for kernel in allowed]
    times: dict[tuple[int, Kernel], list[float]] = {way: [] for way in ways}
    end = time.monotonic() + seconds
    for turn in range(rounds + 1):
        for way in ways:
            with using(policy, *way):
                began = time.perf_counter_ns()
                policy.act(dict(batches[turn % len(batches)]))
                times[way].append((time.perf_counter_ns() - began) / 1e6)
        if turn >= 3 and time.monotonic() > end:
            break
    medians = {way: numbers.median(spent[1:]) for way, spent in times.items()}  # the first round warms up
    best = min(medians, key=lambda way: medians[way])
    if medians.get(default, math.inf) <= CLEARLY * medians[best]:
        best = default  # a change must be worth more than the noise
    torch.set_num_threads(best[0])
    use_kernel(policy, best[1])
    found = [Candidate(*way, medians[way]) for way in ways]
    found += [Candidate(count, kernel, None) for count in threads for kernel in KERNELS if kernel not in allowed]
    return {
        "threads": best[0],
        "kernel": best[1],
        "default": {"threads": default[0], "kernel": default[1]},
        "candidates": [asdict(one) for one in found],
    }


def use_kernel(policy: nn.Module, kernel: Kernel) -> None:
    """Let every attention layer of a policy use this kernel."""
    for module in policy.modules():
        if isinstance(module, Attention):
            module.kernel = kernel


def _same(policy: Policy, kernel: Kernel, batches: Sequence[Mapping[str, Any]]) -> bool:
    def act(batch: dict[str, object]) -> Tensor:
        with using(policy, torch.get_num_threads(), kernel):
            return policy.act(batch)

    return parity(policy, act, batches, exact=True).ok


@contextmanager
def using(policy: Policy, threads: int, kernel: Kernel) -> Iterator[None]:
    """Run with so many threads and this kernel, and then as before."""
    before = torch.get_num_threads(), next((m.kernel for m in policy.modules() if isinstance(m, Attention)), KERNELS[0])
    torch.set_num_threads(threads)
    use_kernel(policy, kernel)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        use_kernel(policy, before[1])
