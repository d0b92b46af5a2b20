"""Grounding: in come an instruction's vector and what may be meant (cells of a map, objects), out goes the target.

A query made from the instruction attends over the candidates of each source. What it finds is described by the
attended features, the attended coordinates (a soft-argmax) and the height of the peak; from the descriptors of all
sources together the target's pose is predicted. Neither ever sees proprioception: late in a demonstration the arm
stands at the target, and a pose read off the arm teaches the eyes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from robotattn.attention import FeedForward

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

POSE_SIZE = 5  # normalised x, y, z; cos and sin of 4 yaw
EXTENT = 10.0  # half an image: objects a few hundredths of it apart must differ by about 1 to be told apart early


@dataclass(frozen=True)
class Candidates:
    """What one source offers. coordinates: where each candidate is; mask: True = may be meant (None = all)."""

    features: Float[Tensor, "b n c"]
    coordinates: Float[Tensor, "#b n p"]
    mask: Bool[Tensor, "b n"] | None = None


@dataclass(frozen=True)
class Grounded:
    """What Q instructions a sample mean. attention: source → log-probabilities; pose: see `pose_vector`."""

    descriptor: Float[Tensor, "b q f"]
    pose: Float[Tensor, "b q 5"]
    attention: Mapping[str, Float[Tensor, "b q n"]]


class Grounding(nn.Module):
    """Attention of an instruction over the candidates of several sources.

    sources: name → (feature size, coordinate size). text: size of the instruction's vector. hidden: of the pose MLP.
    """

    def __init__(self, sources: Mapping[str, tuple[int, int]], text: int, hidden: int) -> None:
        super().__init__()
        self.sources = dict(sources)
        self.queries = nn.ModuleList(nn.Linear(text, features) for features, _ in sources.values())
        found = sum(features + places + 1 for features, places in sources.values())
        self.size = found + text
        self.pose = FeedForward(found, hidden, POSE_SIZE)
        self.pose_line = nn.Linear(found, POSE_SIZE, bias=False)  # a pose is nearly linear in the coordinates

    def forward(self, candidates: Mapping[str, Candidates], text: Float[Tensor, "b q t"]) -> Grounded:
        """Ground Q instructions a sample; the features are computed once, only the attention is repeated.

        Always in float32: in bfloat16, coordinates would be rounded to a few millimetres.
        """
        with torch.autocast(text.device.type, enabled=False):
            return self._ground(candidates, text.float())

    def _ground(self, candidates: Mapping[str, Candidates], text: Tensor) -> Grounded:
        parts, attention = [], {}
        for name, query in zip(self.sources, self.queries, strict=True):
            found, log_weights = _look(query(text), candidates[name])
            parts.append(found)
            attention[name] = log_weights
        found = torch.cat(parts, dim=-1)
        pose = self.pose(found) + self.pose_line(found)
        return Grounded(torch.cat([found, text], dim=-1), pose, attention)


def _look(query: Float[Tensor, "b q c"], candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return [features, coordinates, peak] of what a query finds, and the log of its attention."""
    features = candidates.features.float()
    scores = query @ features.transpose(1, 2) * features.shape[-1] ** -0.5  # [B, Q, N]
    if candidates.mask is not None:  # finite, so that a sample without candidates has no NaN
        scores = scores.masked_fill(~candidates.mask[:, None], torch.finfo(scores.dtype).min)
    log_weights = scores.log_softmax(dim=-1)
    weights = log_weights.exp()
    peak = weights.amax(dim=-1, keepdim=True)
    return torch.cat([weights @ features, weights @ candidates.coordinates, peak], dim=-1), log_weights


def cell_centres(rows: int, columns: int, device: torch.device | None = None) -> Float[Tensor, "1 n 2"]:
    """Return the centres (u right, v down) of the cells of an image, row by row, in [-EXTENT, EXTENT]."""
    u = (torch.arange(columns, device=device) + 0.5) * (2.0 * EXTENT / columns) - EXTENT
    v = (torch.arange(rows, device=device) + 0.5) * (2.0 * EXTENT / rows) - EXTENT
    return torch.stack([u.expand(rows, -1), v[:, None].expand(-1, columns)], dim=-1).flatten(0, 1)[None]


def bilinear_cells(pixel: Float[Tensor, "*b 2"], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Spread a point over the four cells around it: indices and weights ``[..., 4]``, whose mean is the point.

    pixel: (u, v) in [0, 1] of the image. Nearer to the border than half a cell, the point moves to the border cells.
    """
    size = pixel.new_tensor([columns, rows])
    place = torch.minimum((pixel * size - 0.5).clamp(min=0.0), size - 1.0)
    low = torch.minimum(place.floor(), (size - 2.0).clamp(min=0.0))
    part = place - low
    high = torch.minimum(low + 1.0, size - 1.0)
    (u0, v0), (u1, v1) = low.long().unbind(-1), high.long().unbind(-1)
    du, dv = part.unbind(-1)
    cells = torch.stack([v0 * columns + u0, v0 * columns + u1, v1 * columns + u0, v1 * columns + u1], dim=-1)
    weights = torch.stack([(1 - dv) * (1 - du), (1 - dv) * du, dv * (1 - du), dv * du], dim=-1)
    return cells, weights


def pixel_loss(log_weights: Float[Tensor, "b q n"], pixel: Float[Tensor, "b q 2"], rows: int, columns: int) -> Tensor:
    """Return the cross-entropy ``[B, Q]`` between attention and the cells around a point; see `bilinear_cells`."""
    cells, weights = bilinear_cells(pixel.nan_to_num(0.0).clamp(0.0, 1.0), rows, columns)
    return -(log_weights.gather(-1, cells) * weights).sum(-1)
