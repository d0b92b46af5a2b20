"""ResNet-18 without its head (He et al. 2016): images in, a map of stride 32 and 8 x `channels` channels out.

Batch norms are frozen, as in ACT (Zhao et al. 2023): fixed numbers, which become part of the convolutions, on the fly
while training and once and for all in `folded`. State-dict names are those of the public weights, so they load.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robotattn.tokens.images import check_images, spread

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

STRIDE = 32
CHANNELS = 64  # of the first stage; the last one has 8 times as many
EPSILON = 1e-5
MEAN, SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in 0..1, which public weights expect


class FrozenBatchNorm(nn.Module):
    """A batch norm whose statistics and affine map are constants. weight: the initial factor of every channel."""

    def __init__(self, channels: int, weight: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((channels,), weight))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def line(self) -> tuple[Tensor, Tensor]:
        """Return factor and offset of each channel: all that is left of a frozen norm."""
        factor = self.get_buffer("weight") * (self.get_buffer("running_var") + EPSILON).rsqrt()
        return factor, self.get_buffer("bias") - self.get_buffer("running_mean") * factor


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, itself a 1 x 1 convolution where the map's size changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, out, 3, stride), FrozenBatchNorm(out)
        # with a weight of 1, random weights would double the variance in every block; public weights bring their own
        self.conv2, self.bn2 = _conv(out, out, 3), FrozenBatchNorm(out, 0.5)
        pair = (_conv(channels, out, 1, stride), FrozenBatchNorm(out))
        self.downsample = nn.Sequential(*pair) if stride > 1 or channels != out else None

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        """Return the next map."""
        y = _normed(_normed(x, self.conv1, self.bn1).relu_(), self.conv2, self.bn2)
        y += x if self.downsample is None else _normed(x, *self.downsample)
        return y.relu_()


class ResNet18(nn.Module):
    """The trunk. channels: of the first stage; 64 makes the published net, less makes a narrow one."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.channels = 8 * channels
        self.conv1, self.bn1 = _conv(3, channels, 7, 2), FrozenBatchNorm(channels)
        for stage, factor in enumerate((1, 2, 4, 8), start=1):
            size, out, stride = (
                (channels, channels, 1) if stage == 1 else (channels * factor // 2, channels * factor, 2)
            )
            self.add_module(f"layer{stage}", nn.Sequential(Block(size, out, stride), Block(out, out, 1)))

    def forward(self, x: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c i j"]:
        """Return the last map ``[B, 8 channels, h/32, w/32]``, sizes rounded up. x: normalised pixels."""
        x = _normed(x.contiguous(memory_format=torch.channels_last), self.conv1, self.bn1)
        x = F.max_pool2d(x, 3, stride=2, padding=1).relu_()  # a quarter of the numbers, and the same as ReLU first
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x

    def folded(self, dtype: torch.dtype = torch.float32) -> ResNet18:
        """Return a copy for inference: norms inside the convolutions, weights of a type and laid out channels last."""
        trunk = copy.deepcopy(self)
        for parent, conv, norm in _pairs(trunk):
            setattr(parent, conv, _fold(parent.get_submodule(conv), parent.get_submodule(norm)))
            setattr(parent, norm, nn.Identity())
        return trunk.to(dtype).requires_grad_(False)

    def load_public(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the weights of a public ResNet-18, without its head; strict about everything else."""
        kept = {k: v for k, v in weights.items() if not k.startswith("fc.") and not k.endswith("num_batches_tracked")}
        self.load_state_dict(kept)


class TrunkTokens(nn.Module):
    """One token for each cell of the trunk's map; all cameras of one size pass the trunk in one call.

    cameras: name → (height, width) in pixels, at least 32. jitter: see `ImageTokens`.
    """

    def __init__(self, cameras: Mapping[str, tuple[int, int]], width: int, channels: int, jitter: float = 0.0) -> None:
        super().__init__()
        self.cameras, self.jitter = dict(cameras), jitter
        self.trunk = ResNet18(channels)
        self.project = nn.Linear(self.trunk.channels, width)
        self.register_buffer("mean", torch.tensor(MEAN), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE), persistent=False)

    def forward(self, images: Mapping[str, UInt8[Tensor, "b h w 3"]]) -> dict[str, Float[Tensor, "b n d"]]:
        """Encode the configured cameras; others are ignored. Raises ValueError for a missing or foreign image."""
        for name, size in self.cameras.items():
            check_images(name, size, images)
        tokens: dict[str, Tensor] = {}
        for size in dict.fromkeys(self.cameras.values()):
            names = [name for name in self.cameras if self.cameras[name] == size]
            pixels = self._pixels(torch.cat([images[name] for name in names])).permute(0, 3, 1, 2)
            maps = self.trunk(pixels).permute(0, 2, 3, 1).flatten(1, 2)
            tokens |= dict(zip(names, self.project(maps).chunk(len(names)), strict=True))
        return {name: tokens[name] for name in self.cameras}

    def _pixels(self, images: Tensor) -> Tensor:
        """Convert uint8 to floats of mean 0 and scale 1 over natural images, jittered while training."""
        mean, scale = self.get_buffer("mean"), self.get_buffer("scale")
        images, count, strength = images.to(mean.device), len(images), self.jitter
        if not self.training or strength == 0.0:
            dtype = next(self.trunk.parameters()).dtype
            return images.to(torch.float32).mul_(1.0 / (255.0 * scale)).sub_(mean / scale).to(dtype)
        contrast, balance = spread(count, 1, strength, mean.device), spread(count, 3, strength / 2, mean.device)
        light = spread(count, 1, strength, mean.device) - 1.0
        offset = 0.5 * (1.0 + balance * (light - contrast)) - mean
        return images.float().mul_(contrast * balance / (255.0 * scale)).add_(offset / scale)


def grid(size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of the trunk's map of an image (height, width)."""
    return -(-size[0] // STRIDE), -(-size[1] // STRIDE)


def _conv(channels: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels, out, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _normed(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """Convolve and normalise in one pass: a frozen norm is a factor of the weights and a bias."""
    assert isinstance(conv, nn.Conv2d)
    if not isinstance(norm, FrozenBatchNorm):  # folded
        return conv(x)
    factor, offset = norm.line()
    weight = (conv.weight * factor[:, None, None, None]).contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, weight, offset, conv.stride, conv.padding)


def _pairs(trunk: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield where each convolution and its norm are: the module that has both, and their names in it."""
    for module in list(trunk.modules()):
        names = dict(module.named_children())
        pairs = {"conv1": "bn1", "conv2": "bn2", "0": "1"}
        yield from ((module, a, b) for a, b in pairs.items() if isinstance(names.get(b), FrozenBatchNorm))


def _fold(conv: nn.Module, norm: nn.Module) -> nn.Conv2d:
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, FrozenBatchNorm)
    factor, offset = norm.line()
    whole = copy.deepcopy(conv)
    weight = (conv.weight * factor[:, None, None, None]).detach()
    whole.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last))
    whole.bias = nn.Parameter(offset.clone())
    return whole
