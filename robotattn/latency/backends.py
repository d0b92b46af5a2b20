"""Which attention kernel really ran, call by call, seen at the dispatcher: configurations and documentation only hope.

`scaled_dot_product_attention` chooses among fused kernels by device, type, shapes and mask, and falls back to plain
matrix products without a word. One eager step is run under two watchers: one sees the calls and their masks, the other
the operators that they became.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SDPA = torch.nn.functional.scaled_dot_product_attention
FUSED = "aten::_scaled_dot_product_"
NAMES = {
    "flash_attention_for_cpu": "flash (CPU)",
    "flash_attention": "flash",
    "efficient_attention": "memory-efficient",
    "cudnn_attention": "cuDNN",
    "fused_attention_overrideable": "overridden",
    "attention_math": "math",
    "attention_math_for_mps": "math (MPS)",
}
MATH = "math"
"""No fused kernel ran inside the call: softmax between two matrix products."""
WRITTEN_OUT = "written out"
"""A softmax over scores outside of any call of scaled_dot_product_attention."""


class _Operators(TorchDispatchMode):
    """Notes fused attention operators, and softmaxes over scores ``[B, H, q, kv]`` with the module they ran in."""

    def __init__(self, audit: "_Audit") -> None:
        super().__init__()
        self.audit = audit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name.startswith(FUSED) and "backward" not in name:
            self.audit.fused = NAMES.get(name.removeprefix(FUSED), name.removeprefix(FUSED))
        elif name in ("aten::_softmax", "aten::_safe_softmax") and args[0].dim() == 4 and not self.audit.inside:
            self.audit.note(WRITTEN_OUT, args[0], args[0].shape[-2], args[0].shape[-1], "inside")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Notes calls of scaled_dot_product_attention: shapes, mask, and, after the call, what it became."""

    def __init__(self, audit: "_Audit") -> None:
        super().__init__()
        self.audit = audit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not SDPA:
            return func(*args, **named)
        q, k, mask = args[0], args[1], args[3] if len(args) > 3 else named.get("attn_mask")
        self.audit.fused, self.audit.inside = MATH, True
        result = func(*args, **named)
        self.audit.inside = False
        shape = list(mask.shape) if mask is not None else "causal flag" if named.get("is_causal") else None
        self.audit.note(self.audit.fused, q, q.shape[-2], k.shape[-2], shape)
        return result


class _Audit:
    """The rows so far, and where in the model the program is."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.where: list[str] = []
        self.fused, self.inside = MATH, False

    def note(self, backend: str, q: Tensor, queries: int, keys: int, mask: list[int] | str | None) -> None:
        site, dtype = self.where[-1] if self.where else "", str(q.dtype).removeprefix("torch.")
        row = self.rows.setdefault(
            (site, backend, dtype, queries, mask is None),
            {"site": site, "backend": backend, "dtype": dtype, "q": queries, "kv": keys, "kv_least": keys, "calls": 0},
        )
        row["calls"] += 1
        row["kv_least"] = min(row["kv_least"], keys)
        if row["calls"] == 1 or keys >= row["kv"]:  # a growing cache: the longest call stands for all
            row |= {"kv": keys, "mask": mask}


def audit(policy: nn.Module, step: Callable[[], object]) -> list[dict[str, Any]]:
    """Run one eager step and return a row for each site and kernel, in the order of their first calls.

    A row: site (module), backend, dtype, q (queries), kv (keys; the most over its calls) and kv_least, mask (its shape,
    None, "causal flag", or "inside" where a written-out attention masked its scores itself), calls.
    """
    found = _Audit()
    with torch.no_grad(), _located(policy, found.where), _Operators(found), _Calls(found):
        step()
    return list(found.rows.values())


@contextmanager
def _located(policy: nn.Module, where: list[str]) -> Iterator[None]:
    """Keep the name of the innermost module that is running at the end of `where`."""

    def enter(name: str) -> Callable[..., None]:
        return lambda module, arguments: where.append(name)

    def leave(module: nn.Module, arguments: Any, result: Any) -> None:
        where.pop()

    handles = []
    for name, module in policy.named_modules():
        if name and next(module.children(), None) is not None:  # leaves do not attend
            handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
