"""E7 From cameras to tokens: the n^2 wall.

Closed forms for tokens, FLOPs, cache bytes and parameters, checked against what the project's own modules make: the
image tokens' patches, FLOPs counted by torch on tensors without storage, the bytes of real caches.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from robotattn.attention import Transformer, TransformerConfig, kv_bytes
from robotattn.experiments.drawing import BLUE, COLOURS, GREY, RED, legend, panels
from robotattn.experiments.result import Progress, Result, Row, exact, row
from robotattn.tokens.images import ImageTokens

SIDE = 224  # of an image (pixels)


@dataclass(frozen=True)
class Size:
    """A model of the usual shape: as many key heads as query heads, an MLP of four widths."""

    name: str
    layers: int
    width: int
    heads: int

    def config(self, layers: int, kv_heads: int | None = None) -> TransformerConfig:
        """Return the configuration of that many of its layers, without biases as the closed forms have it."""
        return TransformerConfig(
            layers, self.width, self.heads, 4 * self.width, kv_heads=kv_heads, bias=False, kernel="reference"
        )


SMALL, SEVEN = Size("small", 6, 512, 8), Size("7B", 32, 4096, 32)


def tokens(cameras: int, patch: int, frames: int = 1, actions: int = 0, instruction: int = 0, side: int = SIDE) -> int:
    """Return the tokens of a sequence: patches of all cameras and frames, one of proprioception a frame, the rest."""
    return cameras * (side // patch) ** 2 * frames + frames + actions + instruction


def real_patches(cameras: int, patch: int) -> int:
    """Count the image tokens that the project's patch stem makes."""
    with torch.device("meta"):
        images = ImageTokens({f"camera {i}": (SIDE, SIDE) for i in range(cameras)}, 8, "patch", patch)
        views = images({name: torch.empty(1, SIDE, SIDE, 3, dtype=torch.uint8) for name in images.cameras})
    return sum(view.group.tokens.shape[1] for view in views.values())


@dataclass(frozen=True)
class Flops:
    """FLOPs of one layer's forward pass. linear: projections and MLP; attention: scores and weighted sums."""

    linear: int
    attention: int

    @property
    def share(self) -> float:
        """Return attention's share."""
        return self.attention / (self.linear + self.attention)


def formula(n: int, d: int) -> Flops:
    """Return the closed forms: projections 8 n d², MLP 16 n d², attention 4 n² d."""
    return Flops(24 * n * d**2, 4 * n**2 * d)


def counted(size: Size, n: int) -> Flops:
    """Count the FLOPs of one layer of the library on `n` tokens; nothing is computed, so any size will do."""
    with torch.device("meta"):
        layer = Transformer(size.config(1)).layers[0]
        x = torch.empty(1, n, size.width)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        layer(x)
    found = {str(op).split(".")[-1]: flops for op, flops in counter.get_flop_counts()["Global"].items()}
    return Flops(sum(found.get(op, 0) for op in ("mm", "addmm")), found.get("bmm", 0))


def crossing(size: Size) -> int:
    """Return the fewest tokens at which the counted FLOPs of attention reach those of all else in a layer."""
    low, high = 0, 16 * size.width
    while high - low > 1:
        middle = (low + high) // 2
        flops = counted(size, middle)
        low, high = (low, middle) if flops.attention >= flops.linear else (middle, high)
    return high


def block_parameters(size: Size) -> tuple[int, int]:
    """Count a block's parameters: of attention, of the MLP (the norms aside)."""
    with torch.device("meta"):
        layer = Transformer(size.config(1)).layers[0]
    named = [(name, values.numel()) for name, values in layer.named_parameters()]
    attention, mlp = (
        sum(n for name, n in named if name.startswith(f"{part}.")) for part in ("attention", "feedforward")
    )
    return attention, mlp


def cache_bytes(size: Size, n: int, dtype: torch.dtype, kv_heads: int | None = None, device: str = "meta") -> int:
    """Return the bytes of the tensors of a cache for one sequence of `n` tokens."""
    with torch.device("meta"):
        model = Transformer(size.config(size.layers, kv_heads))
    cache = model.cache(1, n, dtype=dtype, device=device)
    return sum(store.numel() * store.element_size() for store in (*cache.keys, *cache.values))


def cache_formula(size: Size, n: int, dtype: torch.dtype, kv_heads: int | None = None) -> int:
    """Return 2 L n d_kv bytes, with d_kv = d kv_heads / heads."""
    return 2 * size.layers * n * (size.width * (kv_heads or size.heads) // size.heads) * dtype.itemsize


def run(progress: Progress) -> Result:
    """Run the experiment."""
    rows = [*_token_rows(), *_flop_rows(), *_memory_rows()]
    progress("e7 tokens", 1, 1)
    figure, series = _draw()
    return Result(
        "From cameras to tokens: the n² wall",
        "Halving the patch makes four times the tokens and sixteen times the attention matrix. Below 6d tokens the "
        "projections and the MLP cost more than attention; beyond, attention does. A small robot policy reaches that "
        "wall with four cameras of fine patches, a 7B model far later; its cache is what fills the memory first.",
        rows,
        figure,
        "From the left: tokens of a sequence by patch and cameras (one frame of 224 x 224 pixels), and the small "
        "model's crossing; attention's share of a layer's FLOPs (lines: closed form, dots: counted); bytes of a KV "
        "cache for one sequence (dots: real caches).",
        series,
    )


def _token_rows() -> list[Row]:
    coarse, fine = real_patches(1, 16), real_patches(1, 8)
    grid = [(cameras, patch) for cameras in (1, 2, 4) for patch in (8, 14, 16, 28, 32)]
    off = max(abs(real_patches(c, p) + 1 - tokens(c, p)) for c, p in grid)
    matrix = counted(SMALL, fine).attention / counted(SMALL, coarse).attention
    return [
        exact("224 x 224 pixels, patch 16: image tokens", "196", coarse, 196),
        exact("patch 8: image tokens", "784", fine, 784),
        exact("patch 8 / patch 16: tokens", "x 4", fine / coarse, 4),
        exact("patch 8 / patch 16: FLOPs of the attention matrix", "x 16", matrix, 16),
        exact("tokens made by the image module off the formula, 15 settings", "(formula)", off, 0),
    ]


def _flop_rows() -> list[Row]:
    cases = [(size, n) for size in (SMALL, SEVEN) for n in (1, 49, 605, 3136, 30_000)]
    pairs = [(counted(size, n), formula(n, size.width)) for size, n in cases]
    linear = max(abs(found.linear / wanted.linear - 1) for found, wanted in pairs)
    attention = max(abs(found.attention / wanted.attention - 1) for found, wanted in pairs)
    wall = tokens(4, 8)
    return [
        exact("counted FLOPs off 24 n d² (projections 8, MLP 16), 10 settings", "(formula)", linear, 0),
        exact("counted FLOPs off 4 n² d (attention), 10 settings", "(formula)", attention, 0),
        exact("small model (d = 512): attention reaches half at", "3072 tokens", crossing(SMALL), 3072),
        exact("7B (d = 4096): attention reaches half at", "24576 tokens", crossing(SEVEN), 24576),
        row(
            f"small model, 4 cameras, patch 8 ({wall:,} tokens): share",
            "past half",
            counted(SMALL, wall).share,
            least=0.5,
        ),
    ]


def _memory_rows() -> list[Row]:
    small, seven = block_parameters(SMALL), block_parameters(SEVEN)
    real = cache_bytes(SMALL, 605, torch.float32, device="cpu")
    large, grouped = (cache_bytes(SEVEN, 24576, torch.bfloat16, kv) for kv in (None, 8))
    by_library = kv_bytes(SMALL.layers, SMALL.heads, SMALL.width // SMALL.heads, 605)
    total = SEVEN.layers * sum(seven)
    return [
        exact("small model, 605 tokens, float32: bytes of a cache", "2 L n d_kv bytes", real,
              cache_formula(SMALL, 605, torch.float32)),
        exact("the same, by the library's kv_bytes", "2 L n d_kv bytes", by_library,
              cache_formula(SMALL, 605, torch.float32)),
        exact("7B, 24576 tokens, bfloat16: bytes of a cache", "2 L n d_kv bytes", large,
              cache_formula(SEVEN, 24576, torch.bfloat16), f"{large / 2**30:.3g} GiB"),
        exact("7B with 8 of 32 key heads: of that", "1/4", grouped / large, 0.25),
        exact("parameters of attention in a block / d²", "4", small[0] / SMALL.width**2, 4),
        exact("parameters of the MLP in a block / d²", "8", small[1] / SMALL.width**2, 8),
        row("32 blocks of d = 4096: parameters", '"7B"', total, least=6e9, most=7.5e9,
            shown=f"{total / 1e9:.2f} billion"),
    ]  # fmt: skip


def _draw() -> tuple[Figure, dict[str, list[list[float]]]]:
    figure, (made, share, memory) = panels((1, 1.15, 1.15), height=3.7, total=13.0)
    series = {"share": _draw_share(share), "cache": _draw_memory(memory)}
    patches = (32, 28, 16, 14, 8)
    for cameras, colour in zip((1, 2, 4), COLOURS, strict=False):
        counts = [tokens(cameras, patch) for patch in patches]
        made.plot(range(len(patches)), counts, "o-", color=colour, label=f"{cameras} camera{'s' * (cameras > 1)}")
        made.annotate(f"{counts[-1]:,}", (len(patches) - 1, counts[-1]), xytext=(6, -3), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    made.axhline(6 * SMALL.width, color=GREY, linewidth=0.9, linestyle=":")
    made.annotate(
        "6d = 3,072, small model", (0, 6 * SMALL.width), xytext=(0, 3), textcoords="offset points", fontsize=8
    )
    made.set_xticks(range(len(patches)), [str(patch) for patch in patches])
    made.set(title="tokens of one frame", xlabel="patch (pixels)", ylabel="tokens", yscale="log", xlim=(-0.3, 4.8))
    legend(made, loc="lower right")
    return figure, series


def _draw_share(axes: Axes) -> list[list[float]]:
    """Draw attention's share of FLOPs by closed form and by count; return [d, n, counted share]."""
    line = torch.logspace(1.5, 5.5, 200).tolist()
    dots = []
    for size, colour in ((SMALL, BLUE), (SEVEN, RED)):
        axes.plot(line, [n / (n + 6 * size.width) for n in line], color=colour, label=f"{size.name}, d = {size.width}")
        found = [[float(size.width), float(n), counted(size, n).share] for n in (64, 196, 784, 3136, 12544, 50176)]
        axes.plot([n for _, n, _ in found], [share for _, _, share in found], "o", color=colour, markersize=4)
        axes.axvline(6 * size.width, color=colour, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{6 * size.width:,}", (6 * size.width, 0.53), rotation=90, fontsize=7.5, color=colour, ha="right"
        )
        dots += found
    axes.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(title="attention's share of FLOPs", xscale="log", xlabel="tokens", ylabel="share", ylim=(0, 1))
    legend(axes)
    return dots


def _draw_memory(axes: Axes) -> list[list[float]]:
    """Draw the bytes of KV caches; return [d, n, bytes]."""
    line, dots = [64, 65_536], []
    kinds = ((SMALL, None, torch.float32, "small, float32"), (SEVEN, None, torch.bfloat16, "7B, bfloat16"),
             (SEVEN, 8, torch.bfloat16, "7B, 8 key heads of 32"))  # fmt: skip
    for (size, kv, dtype, label), colour in zip(kinds, COLOURS, strict=False):
        axes.plot(line, [cache_formula(size, n, dtype, kv) for n in line], color=colour, label=label)
        found = [[float(size.width), float(n), float(cache_bytes(size, n, dtype, kv))] for n in (196, 784, 3136, 24576)]
        axes.plot([n for _, n, _ in found], [size for _, _, size in found], "o", color=colour, markersize=4)
        dots += found
    axes.set(title="bytes of the KV cache", xscale="log", yscale="log", xlabel="tokens")
    axes.set_yticks([2.0**20, 2.0**25, 2.0**30, 2.0**35], ["1 MiB", "32 MiB", "1 GiB", "32 GiB"])
    legend(axes)
    return dots
