"""Positions: vectors added to tokens, rotations of queries and keys, or biases on scores.

A position is a number for each token and row (or seconds, for tokens that carry time stamps): it counts real tokens
only, so left padding moves nothing, and it goes on where a cache stopped. All kinds share two hooks: `embed` adds to
the tokens at the input, `place` prepares, once for all layers, what the scores need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

PositionKind = Literal["none", "sinusoidal", "learned", "rotary", "alibi", "shaw", "buckets", "time"]
Rotation = tuple[Tensor, Tensor]  # cosine, and sine of the sign its half has, [B|1, 1, N, d]


@dataclass(frozen=True)
class Placed:
    """What the scores of one pass need. rotation: of the new tokens; bias: ``[B|1, h, N, S]``; relative: see `Shaw`.

    added: vectors ``[B|1, N, D]`` added to what queries and keys, but not values, are made of (Carion et al. 2020).
    """

    rotation: Rotation | None = None
    bias: Tensor | None = None
    relative: Tensor | None = None
    added: Tensor | None = None

    def add(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Add positions to what queries or keys are projected from."""
        return x if self.added is None else x + self.added

    def turn(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Rotate queries or new keys by the angles of their positions."""
        return x if self.rotation is None else _turn(x, self.rotation)

    def scores(self, q: Float[Tensor, "b h n d"], scale: float) -> Tensor | None:
        """Return what is added to the scaled scores, None for nothing."""
        if self.relative is None:
            return self.bias
        return torch.einsum("bhnd,bnsd->bhns", q, self.relative.expand(q.shape[0], -1, -1, -1)) * scale


class Position(nn.Module):
    """No positions, and the base of all kinds."""

    def embed(self, x: Float[Tensor, "b n d"], positions: Float[Tensor, "#b n"]) -> Float[Tensor, "b n d"]:
        """Add positions to tokens, once at the input."""
        return x

    def place(
        self, queries: Float[Tensor, "#b n"], keys: Float[Tensor, "#b s"], dtype: torch.dtype = torch.float32
    ) -> Placed:
        """Prepare what the scores of all layers need."""
        return Placed()


class Sinusoidal(Position):
    """Fixed sines and cosines (Vaswani et al. 2017)."""

    def __init__(self, width: int, longest: float = 10_000.0) -> None:
        super().__init__()
        self.width, self.longest = width, longest

    def embed(self, x: Float[Tensor, "b n d"], positions: Float[Tensor, "#b n"]) -> Float[Tensor, "b n d"]:
        """Add the sines of positions to tokens."""
        return x + sinusoidal(positions.to(_precise(x.dtype)), self.width, self.longest).to(x.dtype)


class Timestamps(Position):
    """Sines of continuous time (s), of periods from `shortest` to `longest` (s), evenly spread in their logarithm."""

    def __init__(self, width: int, shortest: float = 0.01, longest: float = 100.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"the width of time stamps must be even, got {width}")
        self.width, self.shortest, self.longest = width, shortest, longest

    def embed(self, x: Float[Tensor, "b n d"], positions: Float[Tensor, "#b n"]) -> Float[Tensor, "b n d"]:
        """Add the sines of time stamps (s) to tokens."""
        seconds = positions.to(_precise(x.dtype))
        steps = torch.linspace(0.0, 1.0, self.width // 2, device=x.device, dtype=seconds.dtype)
        periods = self.shortest * (self.longest / self.shortest) ** steps
        angle = seconds[..., None] * (2.0 * math.pi / periods)
        return x + torch.cat([angle.sin(), angle.cos()], dim=-1).to(x.dtype)


class Learned(Position):
    """A learned vector for each of `limit` positions."""

    def __init__(self, limit: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(limit, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, x: Float[Tensor, "b n d"], positions: Float[Tensor, "#b n"]) -> Float[Tensor, "b n d"]:
        """Add the learned vectors; raises IndexError for a position beyond the table (seen on CPUs)."""
        limit = self.table.num_embeddings
        if positions.device.type == "cpu" and positions.numel() and positions.max() >= limit:
            raise IndexError(f"position {int(positions.max())} is beyond the {limit} learned positions")
        return x + self.table(positions.long())


class Rotary(Position):
    """Rotations of pairs of query and key components, so that a score knows the distance alone (Su et al. 2021)."""

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"the head width of rotary positions must be even, got {width}")
        self.width, self.base = width, base

    def place(
        self, queries: Float[Tensor, "#b n"], keys: Float[Tensor, "#b s"], dtype: torch.dtype = torch.float32
    ) -> Placed:
        """Return the angles of the new tokens; cached keys were turned when they came."""
        return Placed(rotation=_angles(queries, self.width, self.base, dtype))


class Alibi(Position):
    """A penalty that grows with the distance, one slope a head (Press et al. 2022)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def place(
        self, queries: Float[Tensor, "#b n"], keys: Float[Tensor, "#b s"], dtype: torch.dtype = torch.float32
    ) -> Placed:
        """Return minus slope times distance."""
        far = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
        return Placed(bias=(-self.get_buffer("slopes")[:, None, None].to(far.dtype) * far).to(dtype))


class Shaw(Position):
    """A learned key vector for each signed distance up to `limit` (Shaw et al. 2018, keys only); all layers share."""

    def __init__(self, limit: int, head_width: int) -> None:
        super().__init__()
        self.limit = limit
        self.table = nn.Parameter(torch.randn(2 * limit + 1, head_width) * head_width**-0.5)

    def place(
        self, queries: Float[Tensor, "#b n"], keys: Float[Tensor, "#b s"], dtype: torch.dtype = torch.float32
    ) -> Placed:
        """Return the vectors of all pairs, ``[B|1, N, S, d]``."""
        far = (keys[:, None, :] - queries[:, :, None]).long().clamp(-self.limit, self.limit)
        return Placed(relative=self.table[far + self.limit].to(dtype))


class Buckets(Position):
    """A learned bias for each head and bucket of distances, the far ones on a log scale (T5, Raffel et al. 2020)."""

    def __init__(self, heads: int, count: int = 32, longest: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.count, self.longest, self.bidirectional = count, longest, bidirectional
        self.table = nn.Embedding(count, heads)

    def place(
        self, queries: Float[Tensor, "#b n"], keys: Float[Tensor, "#b s"], dtype: torch.dtype = torch.float32
    ) -> Placed:
        """Return the biases of all pairs."""
        bucket = self.bucket((keys[:, None, :] - queries[:, :, None]).long())
        return Placed(bias=self.table(bucket).permute(0, 3, 1, 2).to(dtype))

    def bucket(self, far: Tensor) -> Tensor:
        """Return the bucket of signed distances (key minus query)."""
        count, first = self.count, torch.zeros_like(far)
        if self.bidirectional:
            count //= 2
            first, far = (far > 0) * count, far.abs()
        else:
            far = (-far).clamp(min=0)
        exact = count // 2
        ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(self.longest / exact)
        coarse = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(far < exact, far, coarse)


class LearnedGrid(nn.Module):
    """Learned 2-D positions of a grid of patches: the sum of a row and a column vector, row by row."""

    def __init__(self, rows: int, columns: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, width) * 0.02)
        self.columns = nn.Parameter(torch.randn(columns, width) * 0.02)

    def forward(self) -> Float[Tensor, "n d"]:
        """Return the vectors of all patches, ``[rows * columns, width]``."""
        return (self.rows[:, None] + self.columns[None, :]).flatten(0, 1)


def make_position(
    kind: PositionKind, width: int, heads: int, head_width: int, limit: int = 2048, base: float = 10_000.0
) -> Position:
    """Return positions of a kind. limit: of learned positions and of Shaw's distances; base: of rotary angles."""
    match kind:
        case "none":
            return Position()
        case "sinusoidal":
            return Sinusoidal(width)
        case "learned":
            return Learned(limit, width)
        case "rotary":
            return Rotary(head_width, base)
        case "alibi":
            return Alibi(heads)
        case "shaw":
            return Shaw(limit, head_width)
        case "buckets":
            return Buckets(heads)
        case "time":
            return Timestamps(width)
    raise ValueError(f"position must be one of {PositionKind.__args__}, got {kind!r}")  # type: ignore[attr-defined]


def sinusoidal(positions: Float[Tensor, "*b"], width: int, longest: float = 10_000.0) -> Float[Tensor, "*b {width}"]:
    """Encode positions as sines, then cosines, of wavelengths from 2π to 2π * `longest`. width must be even."""
    if width % 2:
        raise ValueError(f"the width of a sinusoidal encoding must be even, got {width}")
    frequency = torch.exp(torch.arange(width // 2, device=positions.device) * (-2.0 * math.log(longest) / width))
    angle = positions[..., None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def grid_sinusoidal(rows: int, columns: int, width: int) -> Float[Tensor, "n {width}"]:
    """Encode a grid of patches, row by row: half the width tells the row, half the column. width: a multiple of 4."""
    if width % 4:
        raise ValueError(f"the width of a sinusoidal grid must be a multiple of 4, got {width}")
    row, column = (sinusoidal(torch.arange(size).float(), width // 2) for size in (rows, columns))
    return torch.cat([row[:, None].expand(-1, columns, -1), column.expand(rows, -1, -1)], dim=-1).flatten(0, 1)


def grid_turns(rows: int, columns: int, width: int) -> Float[Tensor, "n {width}"]:
    """Encode a grid of patches, row by row, each side as one turn: sines and cosines alternate, rows come first.

    width: a multiple of 4. Row r of R lies at 2π (r + 1) / R (Carion et al. 2020, "End-to-End Object Detection").
    """
    if width % 4:
        raise ValueError(f"the width of a grid of turns must be a multiple of 4, got {width}")
    turns = (2.0 * math.pi * torch.arange(1, size + 1) / (size + 1e-6) for size in (rows, columns))
    row, column = (alternating(turn, width // 2) for turn in turns)
    return torch.cat([row[:, None].expand(-1, columns, -1), column.expand(rows, -1, -1)], dim=-1).flatten(0, 1)


def alternating(positions: Float[Tensor, "*b"], width: int) -> Float[Tensor, "*b {width}"]:
    """Encode positions as `sinusoidal` does, but with each cosine next to its sine. width must be even."""
    return sinusoidal(positions, width).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rotate(
    x: Float[Tensor, "b h n d"], positions: Float[Tensor, ...], base: float = 10_000.0
) -> Float[Tensor, "b h n d"]:
    """Rotate component i with component i + d/2 by position / base^(2i/d). positions: ``[N]`` or ``[B|1, N]``."""
    positions = positions if positions.dim() == 2 else positions[None]
    return _turn(x, _angles(positions, x.shape[-1], base, x.dtype))


def alibi_slopes(heads: int) -> Float[Tensor, " {heads}"]:
    """Return the slope of each head: a geometric series; between powers of two, every other one of the next is used."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes + between)


def row_positions(valid: Bool[Tensor, "b n"], start: Tensor | None = None) -> Float[Tensor, "b n"]:
    """Number the real tokens of each row, from 0 or its `start` ``[B]``; padding takes a number but uses up none."""
    count = valid.cumsum(dim=1) - 1
    return (count.clamp(min=0) if start is None else (count + start[:, None]).clamp(min=0)).float()


def _angles(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Rotation:
    precise = _precise(dtype)
    make = _frequencies.__wrapped__ if torch.compiler.is_compiling() else _frequencies
    frequency, sign = make(width, base, precise, positions.device)
    angle = positions.to(precise)[:, None, :, None] * frequency
    return angle.cos().to(dtype), (angle.sin() * sign).to(dtype)


@lru_cache(maxsize=32)
def _frequencies(width: int, base: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each component, how fast it turns and the sign of its sine: the same for all tokens and layers."""
    with torch.inference_mode(False):
        frequency = base ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)
        sign = torch.ones_like(frequency)
        return torch.cat([frequency, frequency]), torch.cat([-sign, sign])


def _turn(x: Tensor, rotation: Rotation) -> Tensor:
    cosine, sine = rotation
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Positions of thousands need more than a half-precision mantissa."""
    return torch.float64 if dtype == torch.float64 else torch.float32
