"""Real-time chunking: a flow's chunk is pulled, while it is denoised, towards the actions that are already running.

In comes a velocity field and what is to be met (`Guide`), out comes the field that also meets it. Rows that will have
run before the chunk is ready are frozen (weight 1), the rest of the overlap is met the less the later it is, the tail
is free. After Black, Galliker and Levine 2025 (arXiv 2506.07339), and the pseudo-inverse guidance of Song et al. 2023:
inpainting of a trained flow, without training it for that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BETA = 5.0  # strongest pull: without a limit it would be infinite at both ends, and few steps would overshoot

Field = Callable[[Tensor, float], Tensor]
"""Chunks ``[B, H, A]`` at one time (0 = noise, 1 = chunk) → where they move ``[B, H, A]``, per unit of time."""


@dataclass(frozen=True)
class Guide:
    """What chunks are pulled to ``[B, H, A]``, in the units in which they are denoised, and how much ``[B, H]``.

    weights: 0 to 1. A row of the batch whose weights are all 0 is what it is without a guide, to the bit. beta: the
    strongest pull (a solver of fewer steps takes that number).
    """

    target: Tensor
    weights: Tensor
    beta: float = BETA

    @classmethod
    def of(cls, target: Tensor, weights: Tensor, chunk: int, beta: float = BETA) -> "Guide":
        """Make a guide of the first M actions ``[B, M, A]`` of chunks of so many; raises ValueError if M is more."""
        free = chunk - target.shape[1]
        if free < 0:
            raise ValueError(f"running: {target.shape[1]} actions, a chunk has {chunk}")
        return cls(F.pad(target, (0, 0, 0, free)), F.pad(weights, (0, free)), beta)


def soft_weights(rows: int, frozen: int) -> Tensor:
    """Return how much each of the overlap's rows is to be met ``[rows]``: 1 while frozen, then less and less.

    With c falling in equal steps from 1 (the last frozen row) to 0 (the first free one), the weight is
    c (e^c - 1) / (e - 1). Raises ValueError unless 0 <= frozen <= rows.
    """
    if not 0 <= frozen <= rows:
        raise ValueError(f"frozen: {frozen} rows, allowed is 0 to {rows}")
    row = torch.arange(rows, dtype=torch.float64)
    fall = ((rows - row) / (rows - frozen + 1)).clamp(max=1.0)
    return torch.where(row < frozen, 1.0, fall * torch.expm1(fall) / torch.expm1(torch.ones(()).double()))


def strength(time: float, beta: float = BETA) -> float:
    """Return how hard to pull at a time: (1 - t) / (t r^2), at most beta, r^2 = (1 - t)^2 / (t^2 + (1 - t)^2).

    That is u + 1 / u for u = t / (1 - t): 2 in the middle, infinite at both ends.
    """
    both = time * (1.0 - time)
    return beta if both <= 0.0 else min(beta, (time**2 + (1.0 - time) ** 2) / both)


def guided(field: Field, guide: Guide) -> Field:
    """Return the field that also carries chunks to where the guide wants them.

    At each time the chunk that x will become is estimated, x + (1 - t) v, and its weighted distance from the target is
    taken back through this estimate to x: one pass through the field with gradients and one back. Nothing is kept
    from one call to the next, and no gradient of the result.
    """
    weights = guide.weights[..., None]

    @torch.no_grad()
    def pulled(x: Tensor, time: float) -> Tensor:
        left = 1.0 - time
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            slope = field(start, time)
        away = (guide.target - (x + left * slope)) * weights
        (back,) = torch.autograd.grad(slope, start, away)
        return slope.detach() + strength(time, guide.beta) * (away + left * back)

    return pulled
