"""Linear layers with int8 weights, for inference on CPUs: a fourth of the bytes, one scale for each output.

Weights alone are rounded, and inputs are bfloat16. A few rows (a token at a time) cost the bandwidth of the int8
weights; for more rows the weights are widened to bfloat16, in which every int8 is exact, and multiplied in that type.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from robotattn.attention.fused import Projection, move, shorten

if TYPE_CHECKING:
    from jaxtyping import Float

FEW = 16  # rows up to which the int8 kernel is the faster one (measured on an AVX-512 and AMX machine)
DEPTH = 16  # torch's int8 kernel reads beyond the end or returns garbage unless the inputs are a multiple of this
LARGEST = 127.0

Module = TypeVar("Module", bound=nn.Module)


def quantise(module: Module, keep: Collection[str] = ()) -> Module:
    """Return a copy for inference whose linear layers (those of `fuse` too) hold int8 weights; biases stay as they are.

    keep: names of modules (such as a head, whose scores bfloat16 would round to 3 digits) that stay as they are.
    Raises ValueError for a module that is not on a CPU, naming the parameter: there are no such kernels elsewhere.
    """
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"{name} is on {parameter.device}: int8 weights work on a CPU only, move the module first")
    quantised = _replace(copy.deepcopy(module).requires_grad_(False).eval(), keep)
    layers = [part for part in quantised.modules() if isinstance(part, Int8Linear)]
    move([layer.weight for layer in layers])
    for layer in layers:
        layer.__dict__.update(layer._buffers)
    shorten(quantised)
    return quantised


class Int8Linear(nn.Module):
    """x W^T + bias with W in int8, ``[out, in]``, the inputs padded with zeros to a multiple of `DEPTH`."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Float[Tensor, "e d"], bias: Tensor | None) -> None:
        super().__init__()
        scale = (weight.abs().amax(dim=1).float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        scale = (scale * (1.0 + 2.0**-8)).bfloat16()  # what the kernel takes; rounded up, so that nothing is cut off
        rounded = (weight.float() / scale.float()[:, None]).round().clamp(-LARGEST, LARGEST)
        self.missing = -weight.shape[1] % DEPTH
        self.register_buffer("weight", nn.functional.pad(rounded, (0, self.missing)).to(torch.int8).contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        """Return the product, of x's type. Raises ValueError for an input that is not on a CPU."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        out = self.raw(rows).to(x.dtype)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)

    def raw(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m e"]:
        """Return the product in bfloat16 or float32, whichever it came in."""
        if x.device.type != "cpu":
            raise ValueError(f"the input is on {x.device}: int8 weights work on a CPU only")
        x = nn.functional.pad(x, (0, self.missing)) if self.missing else x
        half = x.bfloat16()
        if x.shape[0] <= FEW:
            out = torch._weight_int8pack_mm(half, self.weight, self.scale)
        else:
            out = torch.mm(half, self.weight.bfloat16().t()) * self.scale.float()
        return out if self.bias is None else out + self.bias

    def added(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x W^T + bias."""
        return residual + self.raw(x)  # what comes is bfloat16 and what goes is the residual's type


def _replace(module: Module, keep: Collection[str], above: str = "") -> Module:
    for name, part in module.named_children():
        if above + name in keep:
            continue
        if isinstance(part, nn.Linear | Projection):
            weight = part.weight.t() if isinstance(part, Projection) else part.weight
            setattr(module, name, Int8Linear(weight.detach(), part.bias))
        else:
            _replace(part, keep, f"{above}{name}.")
    return module
