"""How fast a policy could be at best: tokens, parameters, cache, the work of each stage, and the time that it takes.

In goes a policy's configuration, out come closed forms; nothing is built or run. A policy of a kind that has no closed
form is built and counted instead, and says so (`Work.counted`). The bound of a stage is the roofline
max(FLOPs / rate, bytes / bandwidth) with the bytes that no program can avoid: weights, and the keys and values that
pass from one stage to the next. Beside it stands the launch floor: kernels times the time of a launch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard

from robotattn.latency import counted, policy_costs, prefix_costs
from robotattn.latency.costs import Cost, kv_elements, total
from robotattn.latency.devices import Device
from robotattn.policies import PolicyConfig

Limit = Literal["compute", "bandwidth", "launch", "host"]
UNEXPLAINED = 2.0  # a measurement this many times above the floor is not explained by the device


@dataclass(frozen=True)
class Work:
    """What one stage does, of ONE repeat; where repeats differ (a growing cache), their mean."""

    flops: int
    weight_bytes: int
    read_bytes: int
    """Keys, values and tokens that an earlier stage left, images and text ids."""
    written_bytes: int
    """Keys, values and tokens left for later."""
    kernels: int
    repeats: int = 1
    """Action tokens (autoregressive) or denoising steps (flow)."""
    once_bytes: int = 0
    """Moved once before or after the repeats: the copy of a prefix into a cache with room behind it."""
    once_kernels: int = 0
    """Launched once before and after the repeats."""
    passed_bytes: int = 0
    """Between the operators of a program that fuses none; not part of the bound."""
    counted: bool = False
    """Counted while the built policy ran, not computed."""

    @property
    def all_flops(self) -> int:
        """FLOPs of all repeats."""
        return self.repeats * self.flops

    @property
    def all_bytes(self) -> int:
        """Bytes of all repeats, and those moved once."""
        return self.repeats * (self.weight_bytes + self.read_bytes + self.written_bytes) + self.once_bytes

    @property
    def all_kernels(self) -> int:
        """Launches of all repeats, and those launched once."""
        return self.repeats * self.kernels + self.once_kernels


def tokens(config: PolicyConfig, instruction_tokens: int) -> dict[str, int]:
    """Return the tokens of each group, of the whole ``prefix``, those that stand for ``actions``, and the ``chunk``.

    instruction_tokens: of the text, padding included.
    """
    if _known(config):
        groups, actions = prefix_costs.groups(config, instruction_tokens), policy_costs.action_tokens(config)
    else:
        groups, actions = counted.groups(config, instruction_tokens), config.chunk
    return {**groups, "prefix": sum(groups.values()), "actions": actions, "chunk": config.chunk}


def parameters(config: PolicyConfig) -> int:
    """Return the number of parameters."""
    return policy_costs.parameters(config) if _known(config) else counted.parameters(config)


def kv_bytes(config: PolicyConfig, instruction_tokens: int, dtype_bytes: int = 4, batch: int = 1) -> dict[str, int]:
    """Return the bytes of keys and values: one token of one row, the prefix, the actions behind it, and all of them."""
    if not _known(config):
        return counted.kv_bytes(config, instruction_tokens, dtype_bytes, batch)
    each = kv_elements(policy_costs.cache(config)) * dtype_bytes
    prefix = each * batch * sum(prefix_costs.groups(config, instruction_tokens).values())
    actions = each * batch * policy_costs.cached_actions(config)
    return {"per_token": each, "prefix": prefix, "actions": actions, "total": prefix + actions}


def work(config: PolicyConfig, instruction_tokens: int, dtype_bytes: int = 4, batch: int = 1) -> dict[str, Work]:
    """Return the work of each stage in its order: vision, prefix, cross_kv (ACT), and decode or denoise.

    vision is a policy's `tokenize`, prefix and cross_kv together its `prefill`.
    """
    if not _known(config):
        return {
            name: Work(**values, counted=True)
            for name, values in counted.work(config, instruction_tokens, dtype_bytes, batch).items()
        }
    stages = policy_costs.stages(config, instruction_tokens, batch)
    return {
        name: as_work(total(stage.each), stage.repeats, total(stage.once), dtype_bytes)
        for name, stage in stages.items()
    }


def as_work(each: Cost, repeats: int = 1, once: Cost | None = None, dtype_bytes: int = 2) -> Work:
    """Turn a cost in elements into work in bytes of a number format."""
    once = Cost() if once is None else once
    return Work(
        flops=each.flops,
        weight_bytes=each.weights * dtype_bytes,
        read_bytes=each.read * dtype_bytes + each.raw,
        written_bytes=each.written * dtype_bytes,
        kernels=each.kernels,
        repeats=repeats,
        once_bytes=(once.weights + once.read + once.written) * dtype_bytes,
        once_kernels=once.kernels,
        passed_bytes=each.passed * dtype_bytes,
    )


def _known(config: PolicyConfig) -> TypeGuard[prefix_costs.Described]:
    exact = type(config) in policy_costs.KINDS  # a subclass may do anything
    return exact and isinstance(config, policy_costs.KINDS) and config.stem in prefix_costs.STEMS


# ---------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Bound:
    """The least time (ms) that work takes on a device, all repeats, and what decides it."""

    compute_ms: float
    bandwidth_ms: float
    launch_ms: float
    roofline_ms: float
    """Of compute and bandwidth the longer, stage by stage."""
    floor_ms: float
    """Of the roofline and the launches the longer."""
    label: Limit


def bound(work: Work, device: Device, dtype: str = "float32", graph: bool = False) -> Bound:
    """Return the bound of one stage. graph: launched as one CUDA graph. Raises ValueError for an unknown dtype."""
    compute = 1e3 * work.all_flops / device.rate(dtype)
    bandwidth = 1e3 * work.all_bytes / device.bandwidth
    launch = 1e3 * work.all_kernels * (device.graph_launch if graph else device.launch)
    return _bound(compute, bandwidth, launch, max(compute, bandwidth))


def bounds(works: Mapping[str, Work], device: Device, dtype: str = "float32", graph: bool = False) -> dict[str, Bound]:
    """Return the bound of every stage and of the whole ``step``.

    The rooflines add up, since stages wait for one another; launches of one stage may hide behind another's work.
    """
    each = {name: bound(work, device, dtype, graph) for name, work in works.items()}
    sums = [
        sum(getattr(b, field) for b in each.values())
        for field in ("compute_ms", "bandwidth_ms", "launch_ms", "roofline_ms")
    ]
    return {**each, "step": _bound(*sums)}


def _bound(compute: float, bandwidth: float, launch: float, roofline: float) -> Bound:
    label: Limit = "compute" if compute >= bandwidth else "bandwidth"
    return Bound(compute, bandwidth, launch, roofline, max(roofline, launch), "launch" if launch > roofline else label)


def label(bound: Bound, measured_ms: float, device_ms: float | None = None) -> Limit:
    """Return what a measurement is bound by: ``host`` if the device cannot explain it, else the bound's own label.

    device_ms: what the device itself was busy for, if known; otherwise twice the floor is the most it explains.
    """
    explained = UNEXPLAINED * (bound.floor_ms if device_ms is None else device_ms)
    return "host" if measured_ms > explained else bound.label


def mbu(work: Work, ms: float, device: Device) -> float:
    """Return the share of the device's bandwidth that a measured stage used (0 to 1) on the bytes it had to move."""
    return work.all_bytes / (ms * 1e-3 * device.bandwidth)


def mfu(work: Work, ms: float, device: Device, dtype: str = "float32") -> float:
    """Return the share of the device's arithmetic that a measured stage used (0 to 1)."""
    return work.all_flops / (ms * 1e-3 * device.rate(dtype))
