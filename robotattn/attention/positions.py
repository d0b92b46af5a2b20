"""Positions as vectors: fixed sines for a line of tokens or instants, learned rows and columns for patches."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


def sinusoidal(positions: Float[Tensor, "*b"], width: int, longest: float = 10_000.0) -> Float[Tensor, "*b {width}"]:
    """Encode positions as sines, then cosines, of wavelengths from 2π to 2π * `longest`. width must be even."""
    if width % 2:
        raise ValueError(f"the width of a sinusoidal encoding must be even, got {width}")
    frequency = torch.exp(torch.arange(width // 2, device=positions.device) * (-2.0 * math.log(longest) / width))
    angle = positions[..., None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class LearnedGrid(nn.Module):
    """Learned 2-D positions of a grid of patches: the sum of a row and a column vector, row by row."""

    def __init__(self, rows: int, columns: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, width) * 0.02)
        self.columns = nn.Parameter(torch.randn(columns, width) * 0.02)

    def forward(self) -> Float[Tensor, "n d"]:
        """Return the vectors of all patches, ``[rows * columns, width]``."""
        return (self.rows[:, None] + self.columns[None, :]).flatten(0, 1)
