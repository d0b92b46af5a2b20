"""E4 Position encodings: what sines and rotations know, and a trajectory that must not equal its reverse.

Self-attention without positions treats a sequence as a set. A reach of six way-points goes through one random layer
(d = 8) and mean pooling: without positions the reversed reach gives the same output.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from robotattn.attention import Attention, PositionKind, Transformer, TransformerConfig, masks, rotate, sinusoidal
from robotattn.experiments.drawing import BLUE, COLOURS, GREY, RED, legend, matrix, panels
from robotattn.experiments.result import Progress, Result, Row, median, row, spread

WIDTH, HEADS = 8, 2  # of the random layer
LINE, LINE_WIDTH = 64, 32  # positions and width of the sinusoidal table
SHIFTS = (1, 7, 64, 256, 1000)
SEEDS = range(20)
# A reach (m): from above the table down to a cube and up again, six way-points.
REACH = (
    (0.30, 0.00, 0.40),
    (0.36, 0.04, 0.33),
    (0.43, 0.09, 0.24),
    (0.48, 0.12, 0.12),
    (0.50, 0.13, 0.04),
    (0.50, 0.13, 0.15),
)


@dataclass(frozen=True)
class Setting:
    """One way to tell the order. same: theory says the reversed reach gives the same output."""

    label: str
    kind: PositionKind
    causal: bool = False
    same: bool = False


SETTINGS = (
    Setting("no positions", "none", same=True),
    Setting("sinusoidal", "sinusoidal"),
    Setting("learned", "learned"),
    Setting("rotary (RoPE)", "rotary"),
    Setting("ALiBi, causal as by its authors", "alibi", causal=True),
    Setting("relative (Shaw)", "shaw"),
    Setting("relative (T5 buckets)", "buckets"),
    Setting("time stamps", "time"),
    Setting("ALiBi on |i - j|, no mask", "alibi", same=True),
    Setting("causal mask alone", "none", causal=True),
)


def gram() -> Tensor:
    """Return the products of the sinusoidal vectors of all pairs of positions, ``[64, 64]`` float64."""
    table = sinusoidal(torch.arange(LINE, dtype=torch.float64), LINE_WIDTH)
    return table @ table.T


def off_toeplitz(products: Tensor) -> float:
    """Return the largest difference within a diagonal: 0 if a product depends on the distance alone."""
    sides = [products.diagonal(offset) for offset in range(1 - len(products), len(products))]
    return max(float(side.max() - side.min()) for side in sides)


def rotary_scores(query: Tensor, key: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the scores of one query and one key ``[d]`` at pairs of positions ``[n]``."""
    count = len(first)
    turned = [rotate(x.expand(1, 1, count, -1), at) for x, at in ((query, first), (key, second))]
    return (turned[0] * turned[1]).sum(-1)[0, 0]


def shift_error() -> float:
    """Return how far RoPE's scores move when both positions shift by the same amount, for pairs within 16."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 32, generator=generator, dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(16.0), torch.arange(16.0)).double()
    here = rotary_scores(query, key, pairs[:, 0], pairs[:, 1])
    moved = [rotary_scores(query, key, pairs[:, 0] + shift, pairs[:, 1] + shift) for shift in SHIFTS]
    return max(float((there - here).abs().max()) for there in moved)


def random_layer(kind: PositionKind, seed: int) -> Transformer:
    """Build one layer of self-attention alone, float64, every parameter and position table drawn at random."""
    config = TransformerConfig(1, WIDTH, HEADS, 0, norm="none", residual=False, position=kind, limit=16)
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            scale = 1.0 if name.startswith("position") else WIDTH**-0.5
            values.copy_(scale * torch.randn(values.shape, generator=generator, dtype=torch.float64))
    return model


def way_points(seed: int) -> Tensor:
    """Return the reach as tokens ``[1, 6, 8]``: way-points through a random projection."""
    generator = torch.Generator().manual_seed(1000 + seed)
    points = torch.tensor(REACH, dtype=torch.float64)
    points = (points - points.mean(0)) / points.std()
    return (points @ torch.randn(3, WIDTH, generator=generator, dtype=torch.float64))[None]


def reversal(setting: Setting, seed: int) -> float:
    """Return how far the pooled output of the reversed reach is from that of the reach, relative to its length."""
    model, path = random_layer(setting.kind, seed), way_points(seed)
    mask = masks.Causal() if setting.causal else None
    with torch.no_grad():
        forth, back = (model(tokens, mask).mean(1) for tokens in (path, path.flip(1)))
    return float((back - forth).norm() / forth.norm())


def equivariance_error() -> float:
    """Return how far self-attention of shuffled tokens is from the shuffled output."""
    model, path, order = random_layer("none", 0), way_points(0), torch.tensor([3, 0, 5, 1, 4, 2])
    with torch.no_grad():
        return float((model(path[:, order]) - model(path)[:, order]).abs().max())


def invariance_error() -> float:
    """Return how far the output of cross-attention moves when its memory is shuffled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = Attention(WIDTH, HEADS).double()
    memory, queries, order = way_points(0), way_points(1)[:, :2], torch.tensor([3, 0, 5, 1, 4, 2])
    with torch.no_grad():
        plain, shuffled = (layer(queries, layer.keys_values(some)) for some in (memory, memory[:, order]))
    return float((plain - shuffled).abs().max())


def run(progress: Progress) -> Result:
    """Run the experiment."""
    products = gram()
    differences = {setting.label: [reversal(setting, seed) for seed in SEEDS] for setting in SETTINGS}
    progress("e4 positions", 1, 1)
    return Result(
        "Position encodings",
        "Sines and rotations make a score depend on the distance of two tokens. Without any positions a reach and "
        "its reverse are the same set of way-points, and the pooled output cannot differ. ALiBi on the plain "
        "distance |i - j| is blind to the direction too: its authors use it under a causal mask, which tells the "
        "direction by itself.",
        [*_table_rows(products), *(_reversal_row(one, differences[one.label]) for one in SETTINGS)],
        _draw(products, differences),
        "From the left: products of sinusoidal vectors of 64 positions (d = 32), constant along diagonals; RoPE's "
        "score by distance of query and key, at four places of the sequence (the curves coincide); how far reversing "
        "the reach moves the pooled output, median and range of 20 random layers.",
        {"gram_row_32": products[32].tolist(), "reversal": differences},
    )


def _table_rows(products: Tensor) -> list[Row]:
    peaks = int((products.argmax(1) == torch.arange(LINE)).sum())
    return [
        row("sinusoidal: PE(p) . PE(p') within a diagonal", "p - p' alone", off_toeplitz(products), most=1e-12),
        row("sinusoidal: peak at p' = p, of 64", "64", peaks, least=LINE, most=LINE),
        row("RoPE: score after shifting both positions", "< 1e-12", shift_error(), most=1e-12),
        row("self-attention of shuffled tokens: shuffled output", "equal", equivariance_error(), most=1e-12),
        row("cross-attention to a shuffled memory: output", "equal", invariance_error(), most=1e-12),
    ]


def _reversal_row(setting: Setting, values: list[float]) -> Row:
    quantity = f"reversed reach, {setting.label}: change"
    if setting.same:
        published = "about 1e-16" if setting.kind == "none" else "(theory: 0)"
        return row(quantity, published, max(values), most=1e-12)
    published = "clearly different" if setting.kind not in ("time", "none") else "(theory: different)"
    return row(quantity, published, median(values), least=0.01, shown=spread(values))


def _draw(products: Tensor, differences: dict[str, list[float]]) -> Figure:
    figure, (table, score, bars) = panels((1, 1.15, 1.35), height=3.7, total=13.0)
    matrix(table, products.numpy())
    table.set(title="PE(p) . PE(p')", xlabel="p'", ylabel="p")
    _draw_scores(score)
    for i, (label, values) in enumerate(differences.items()):
        seen = [max(value, 1e-17) for value in values]
        same = next(one.same for one in SETTINGS if one.label == label)
        bars.plot([min(seen), max(seen)], [i, i], color=GREY, linewidth=1.2)
        bars.plot(median(seen), i, "o", color=RED if same else BLUE)
    bars.set_yticks(range(len(differences)), list(differences))
    bars.invert_yaxis()
    bars.set(title="the reversed reach changes the output by", xscale="log", xlim=(1e-17, 10), xlabel="relative change")
    return figure


def _draw_scores(axes: Axes) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(32, generator=generator, dtype=torch.float64)
    far = torch.arange(-32.0, 33.0, dtype=torch.float64)
    for (start, line), colour in zip(((0, "-"), (100, "--"), (1000, "-."), (4096, ":")), COLOURS, strict=False):
        at = torch.full_like(far, float(start)) + 32
        scores = rotary_scores(query, query, at, at + far) / query.square().sum()
        axes.plot(far, scores, line, color=colour, linewidth=2.6 if start == 0 else 1.4, label=f"query at {start + 32}")
    axes.set(title="RoPE: score of equal vectors", xlabel="distance, p' - p", ylabel="score / |q|²")
    legend(axes)
