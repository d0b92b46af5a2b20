"""The same figures as the closed forms, counted while a real policy runs: for policies that have no closed form.

FLOPs are torch's own count of matrix products and convolutions, kernels are operators that are no views. The policy
has random weights and sees random input; it is built in memory, so this is not for models that do not fit.
"""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from robotattn.policies import Policy, PolicyConfig, build
from robotattn.policies.base import Memory
from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.types import ACTION_SIZE, MAX_OBJECTS, OBJECT_SIZE, STATE_SIZE

NO_KERNELS = {"aten._unsafe_view.default", "aten._local_scalar_dense.default"}  # a view, and a wait for the device


class Operators(TorchDispatchMode):
    """Counts the operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count it."""
        self.count += not func.is_view and str(func) not in NO_KERNELS
        return func(*args, **(kwargs or {}))


def make(config: PolicyConfig) -> Policy:
    """Return the policy that a config describes, with random weights, unit statistics and no gradients."""
    policy = build(config).eval().requires_grad_(False)
    sizes = {"state": STATE_SIZE, "action": ACTION_SIZE[config.action_mode], "position": 4}
    policy.set_statistics(Statistics({key: _unit(size) for key, size in sizes.items()}))
    return policy


def batch(config: PolicyConfig, instruction_tokens: int, rows: int = 1) -> dict[str, Any]:
    """Return a batch of random observations, every text of so many tokens."""
    looks = int(getattr(config, "frames", 1))
    axis = (rows,) if looks == 1 else (rows, looks)
    images = {
        name: torch.randint(0, 256, (*axis, *size, 3), dtype=torch.uint8) for name, size in config.cameras.items()
    }
    text = torch.randint(0, config.vocabulary, (rows, instruction_tokens))
    made = {"images": images, "state": 0.1 * torch.randn(rows, STATE_SIZE), "text": text}
    made |= {
        "text_mask": torch.ones_like(text, dtype=torch.bool),
        "objects": torch.rand(*axis, MAX_OBJECTS, OBJECT_SIZE),
    }
    made["objects_mask"] = torch.ones(*axis, MAX_OBJECTS, dtype=torch.bool)
    if looks > 1:
        made["history"] = 0.1 * torch.randn(rows, looks - 1, STATE_SIZE)
        made["ages"] = (0.1 * torch.arange(looks - 1, -1, -1.0)).expand(rows, -1)
    return made


def groups(config: PolicyConfig, instruction_tokens: int) -> dict[str, int]:
    """Return the tokens of each group."""
    with torch.no_grad():
        seen = make(config).tokenize(batch(config, instruction_tokens))
    return {name: part.stop - part.start for name, part in seen.slices.items()}


def parameters(config: PolicyConfig) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in build(config).parameters())


def kv_bytes(config: PolicyConfig, instruction_tokens: int, dtype_bytes: int, rows: int) -> dict[str, int]:
    """Return the bytes of what the prefix leaves; what actions add to it is not known."""
    with torch.no_grad():
        policy = make(config)
        memory = policy.prefill(policy.tokenize(batch(config, instruction_tokens, rows)))
    elements = _elements(memory)
    each = elements // memory.mask.numel()
    return {
        "per_token": each * dtype_bytes,
        "prefix": elements * dtype_bytes,
        "actions": 0,
        "total": elements * dtype_bytes,
    }


def work(config: PolicyConfig, instruction_tokens: int, dtype_bytes: int, rows: int) -> dict[str, dict[str, int]]:
    """Return the fields of `Work` for vision, prefix and decode, each as one repeat.

    Every stage is charged the parameters of the modules that ran in it.
    """
    with torch.no_grad():
        policy, inputs = make(config), batch(config, instruction_tokens, rows)
        seen, vision = count(policy, lambda: policy.tokenize(inputs))
        memory, prefix = count(policy, lambda: policy.prefill(seen))
        _, decode = count(policy, lambda: policy.decode(memory))
    left = {"vision": seen.values.numel(), "prefix": _elements(memory), "decode": 0}
    result, before = {}, 0
    for name, fields in (("vision", vision), ("prefix", prefix), ("decode", decode)):
        flops, kernels, weights = fields
        result[name] = {
            "flops": flops,
            "weight_bytes": weights * dtype_bytes,
            "read_bytes": before * dtype_bytes,
            "written_bytes": left[name] * dtype_bytes,
            "kernels": kernels,
        }
        before = left[name]
    return result


def count(policy: Policy, stage: Any) -> tuple[Any, tuple[int, int, int]]:
    """Run a stage twice; return what it returned, its FLOPs, its kernels, and the parameters it used.

    FLOPs are counted with attention written out, since torch does not count the fused kernel of CPUs.
    """
    counter, operators = FlopCounterMode(display=False), Operators()
    with counter, sdpa_kernel(SDPBackend.MATH):
        stage()
    used: dict[int, int] = {}
    hooks = [m.register_forward_pre_hook(_noting(used)) for m in policy.modules()]
    try:
        with operators:
            result = stage()
    finally:
        for hook in hooks:
            hook.remove()
    return result, (counter.get_total_flops(), operators.count, sum(used.values()))


def _noting(used: dict[int, int]) -> Any:
    def note(module: torch.nn.Module, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            used[id(parameter)] = parameter.numel()

    return note


def _elements(memory: Memory) -> int:
    return sum(part.numel() for pair in memory.context for part in pair)


def _unit(size: int) -> Moments:
    return Moments(tuple(f"d{index}" for index in range(size)), (0.0,) * size, (1.0,) * size, floor=1e-3)
