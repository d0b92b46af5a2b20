"""Vision tokens: in come uint8 images of several cameras, out go patch tokens and a finer feature map of each camera.

Two stems. ``patch`` is the plain ViT (Dosovitskiy et al. 2021): one convolution with kernel = stride = patch size.
``conv`` is a shallow convolutional stem, which learns faster on small images: it passes through a map of stride 4,
kept for grounding, and ends in tokens of stride 16. Cameras share the stem; those of one size run as one batch, and so
do all frames of a camera.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from robotattn.attention import LearnedGrid
from robotattn.tokens.sequence import TokenGroup

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

MAP_STRIDE = 4
CONV_STRIDE = 16


@dataclass(frozen=True)
class View:
    """What one camera gives. features: the finer map, one row a cell, row by row; grid: its (height, width)."""

    group: TokenGroup
    features: Float[Tensor, "b n c"]
    grid: tuple[int, int]


class PatchStem(nn.Module):
    """The plain ViT stem; its map is its tokens."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.stride = self.map_stride = patch
        self.channels = width
        self.embed = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, image: Float[Tensor, "b 3 h w"]) -> tuple[Tensor, Tensor]:
        """Return the map and the tokens as ``[B, channels, rows, columns]``: here, the same."""
        tokens = self.embed(image)
        return tokens, tokens


class ConvStem(nn.Module):
    """Four convolutions: to a map of stride 4 with `channels`, and on to tokens of stride 16."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.stride, self.map_stride, self.channels = CONV_STRIDE, MAP_STRIDE, channels
        middle = width // 2
        self.fine = nn.Sequential(
            nn.Conv2d(3, channels, 4, stride=4), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()
        )
        self.coarse = nn.Sequential(
            nn.Conv2d(channels, middle, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(middle, width, 3, stride=2, padding=1),
        )

    def forward(self, image: Float[Tensor, "b 3 h w"]) -> tuple[Tensor, Tensor]:
        """Return the map ``[B, channels, h/4, w/4]`` and the tokens ``[B, width, h/16, w/16]``."""
        fine = self.fine(image)
        return fine, self.coarse(fine)


class ImageTokens(nn.Module):
    """Tokens of all cameras, each with its camera's identity and its 2-D position.

    cameras: name → (height, width) in pixels, multiples of the stride; the order is part of the model.
    jitter: strength (0..1) of the random brightness, contrast and colour balance of each image while training, the
    same for all frames of a row. frames: looks of each camera; more than 1 come as ``[B, F, h, w, 3]``, oldest first.
    """

    def __init__(
        self,
        cameras: Mapping[str, tuple[int, int]],
        width: int,
        stem: Literal["conv", "patch"] = "conv",
        patch: int = 16,
        channels: int = 48,
        jitter: float = 0.0,
        frames: int = 1,
    ) -> None:
        super().__init__()
        self.cameras, self.jitter, self.frames = dict(cameras), jitter, frames
        self.stem = ConvStem(width, channels) if stem == "conv" else PatchStem(width, patch)
        stride = self.stem.stride
        for name, (height, width_) in self.cameras.items():
            if height % stride or width_ % stride or min(height, width_) < stride:
                raise ValueError(f"camera {name!r}: {height} x {width_} pixels are no multiples of {stride}")
        self.positions = nn.ModuleList(LearnedGrid(h // stride, w // stride, width) for h, w in cameras.values())
        self.identity = nn.Parameter(torch.randn(len(cameras), width) * 0.02)

    def forward(self, images: Mapping[str, UInt8[Tensor, "b *f h w 3"]]) -> dict[str, View]:
        """Encode the configured cameras; others are ignored. Raises ValueError for a missing or foreign image.

        Frames become rows: row b, frame f is row b * F + f of each view.
        """
        for name, size in self.cameras.items():
            check_images(name, size if self.frames == 1 else (self.frames, *size), images)
        if self.frames > 1:
            images = {name: images[name].flatten(0, 1) for name in self.cameras}
        views: dict[str, View] = {}
        for size in dict.fromkeys(self.cameras.values()):
            names = [name for name in self.cameras if self.cameras[name] == size]
            views |= self._encode(names, torch.cat([images[name] for name in names]))
        return {name: views[name] for name in self.cameras}

    def _encode(self, names: list[str], images: Tensor) -> dict[str, View]:
        fine, coarse = self.stem(self._pixels(images).permute(0, 3, 1, 2))  # a permuted [B, H, W, C] is channels_last
        grid = (fine.shape[2], fine.shape[3])
        fine, coarse = _rows(fine), _rows(coarse)
        order = list(self.cameras)
        views = {}
        for name, features, tokens in zip(names, fine.chunk(len(names)), coarse.chunk(len(names)), strict=True):
            place = self.positions[order.index(name)]() + self.identity[order.index(name)]
            views[name] = View(TokenGroup(tokens + place), features, grid)
        return views

    def _pixels(self, images: Tensor) -> Tensor:
        """Convert uint8 to floats around 0 on the device of the weights, with colour jitter while training."""
        device = self.identity.device
        images = images.to(device)
        if not self.training or self.jitter == 0.0:
            return images.float().mul_(2.0 / 255.0).sub_(1.0)
        count, strength = images.shape[0] // self.frames, self.jitter
        contrast, balance = spread(count, 1, strength, device), spread(count, 3, strength / 2, device)
        brightness = spread(count, 1, strength, device) - 1.0
        if self.frames > 1:  # a light that flickers between frames would hide what moved
            contrast, balance, brightness = (
                part.repeat_interleave(self.frames, dim=0) for part in (contrast, balance, brightness)
            )
        gain = contrast * balance * (2.0 / 255.0)
        return images.float().mul_(gain).add_(balance * (brightness - contrast))


def spread(count: int, channels: int, strength: float, device: torch.device) -> Tensor:
    """Draw factors in 1 ± strength, ``[count, 1, 1, channels]``."""
    return 1.0 + strength * (2.0 * torch.rand(count, 1, 1, channels, device=device) - 1.0)


def _rows(grid: Tensor) -> Tensor:
    return grid.permute(0, 2, 3, 1).flatten(1, 2)  # [B, C, h, w] → [B, h w, C]


def check_images(name: str, size: tuple[int, ...], images: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless this camera's images are there, as uint8 ``[B, *size, 3]``."""
    if name not in images:
        raise ValueError(f"camera {name!r} is missing from the batch, which has {sorted(images)}")
    image = images[name]
    if image.dtype != torch.uint8 or image.dim() != len(size) + 2 or tuple(image.shape[1:]) != (*size, 3):
        wanted = ", ".join(map(str, size))
        raise ValueError(f"camera {name!r}: expected uint8 [B, {wanted}, 3], got {image.dtype} {list(image.shape)}")
