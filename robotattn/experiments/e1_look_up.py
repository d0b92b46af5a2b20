"""E1 Soft look-up: five objects on a table, keys by colour, values by place, and one query that asks.

``alpha = softmax(q . k_i / sqrt(d))``, ``y = sum alpha_i v_i``. The same look-up with a fixed Gaussian score is
Nadaraya-Watson kernel regression, and with a learned additive score it is Bahdanau's attention.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from scipy.spatial import ConvexHull
from torch import Tensor

from robotattn.attention import AdditiveAttention, attend, gaussian_weights, weights
from robotattn.experiments.drawing import BLUE, COLOURS, GREEN, GREY, RED, legend, panels
from robotattn.experiments.result import Progress, Result, Row, row

COLOUR_NAMES = ("red", "yellow", "green", "blue", "purple")
PAINT = ("#c0392b", "#d4ac0d", "#3d8b40", "#2166ac", "#7b3f99")
RADIUS = 3.0  # of the circle of keys
LONG, SHORT = 4.0, 0.05  # lengths of a query
TABLE = ((-0.28, 0.12), (-0.05, 0.30), (0.26, 0.18), (0.20, -0.24), (-0.18, -0.26))  # values: places (m)
RANDOM_QUERIES = 2000
QUERIES = ("along a key", "between two keys", "near the origin")
QUERY_COLOURS = (BLUE, RED, GREEN)
Samples = tuple[np.ndarray, np.ndarray, np.ndarray]  # x, y, queries
WIDTHS = (0.1, 0.4, 1.5)  # of the Gaussian score


def objects() -> tuple[Tensor, Tensor]:
    """Return keys on a circle by colour and values on the table (m), each ``[5, 2]`` float64."""
    angle = torch.arange(5, dtype=torch.float64) * (2 * math.pi / 5) + math.pi / 2
    return RADIUS * torch.stack([angle.cos(), angle.sin()], 1), torch.tensor(TABLE, dtype=torch.float64)


def look_up(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Ask with queries ``[n, 2]``; return the weights ``[n, 5]`` and the outputs ``[n, 2]`` (m)."""
    q, k, v = queries[None, None], keys[None, None], values[None, None]
    return weights(q, k)[0, 0], attend(q, k, v, kernel="reference")[0, 0]


def hard_look_up(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the value of the best-matching key for each query: the look-up of a dictionary."""
    return values[look_up(queries, keys, values)[0].argmax(1)]


def outside(points: Tensor, values: Tensor) -> float:
    """Return how far the worst point lies outside the convex hull of the values (m); negative: all are inside."""
    sides = ConvexHull(values.numpy()).equations  # [sides, 3]: outward normal and offset
    return float((points.numpy() @ sides[:, :2].T + sides[:, 2]).max())


def slopes(look: Callable[[Tensor], Tensor], queries: Tensor, step: float = 1e-6) -> Tensor:
    """Return central differences of a look-up ``[n, 2] -> [n, 2]`` with respect to its queries, ``[n, 2, 2]``."""
    columns = []
    for axis in torch.eye(2, dtype=torch.float64) * step:
        columns.append((look(queries + axis) - look(queries - axis)) / (2 * step))
    return torch.stack(columns, -1)


def closed_slopes(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return dy/dq = cov_alpha(v, k) / sqrt(d) in closed form, ``[n, 2, 2]``."""
    alpha, mean = look_up(queries, keys, values)
    spread = (alpha[:, :, None, None] * values[None, :, :, None] * keys[None, :, None, :]).sum(1)
    return (spread - mean[:, :, None] * (alpha @ keys)[:, None, :]) / math.sqrt(2)


def regression() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 25 noisy samples of a curve, and where to ask for it: x, y, queries."""
    random = np.random.default_rng(0)
    x = np.sort(random.uniform(0, 5, 25))
    return x, 2 * np.sin(x) + x**0.8 + random.normal(0, 0.4, 25), np.linspace(0, 5, 201)


def nadaraya_watson(x: np.ndarray, y: np.ndarray, queries: np.ndarray, width: float) -> np.ndarray:
    """Return kernel regression written out, as an independent reference."""
    kernel = np.exp(-((queries[:, None] - x[None]) ** 2) / (2 * width**2))
    return (kernel * y).sum(1) / kernel.sum(1)


def by_attention(x: np.ndarray, y: np.ndarray, queries: np.ndarray, width: float) -> np.ndarray:
    """Return the same regression as attention with a Gaussian score."""
    alpha = gaussian_weights(torch.from_numpy(queries)[:, None], torch.from_numpy(x)[:, None], width)
    return (alpha @ torch.from_numpy(y)).numpy()


def train_additive(keys: Tensor, steps: int = 300) -> AdditiveAttention:
    """Train an additive score to give the best-matching key's value to queries along the keys."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = AdditiveAttention(2, 2, 16).double()
    values = torch.tensor(TABLE, dtype=torch.float64)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (additive_look_up(layer, keys, keys, values) - values).square().sum(1).mean()
        torch.autograd.backward(loss)
        optimiser.step()
    return layer


def additive_look_up(layer: AdditiveAttention, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Look up with the additive score, ``[n, 2] -> [n, 2]`` (m)."""
    return layer(queries[None], keys[None], values[None])[0]


def run(progress: Progress) -> Result:
    """Run the experiment."""
    keys, values = objects()
    generator = torch.Generator().manual_seed(0)
    queries = 3.0 * torch.randn(RANDOM_QUERIES, 2, generator=generator, dtype=torch.float64)
    samples = regression()
    additive = train_additive(keys)
    progress("e1 look-up", 1, 1)
    rows = [
        *_dot_product_rows(keys, values, queries),
        *_gradient_rows(keys, values, queries[:200]),
        *_family_rows(keys, values, queries, additive, samples),
    ]
    figure, series = _draw(keys, values, samples)
    return Result(
        "Soft look-up",
        "Attention is a dictionary that can be asked between its entries: a long query picks one object, a short one "
        "averages them all, one between two keys blends two. The answer never leaves the convex hull of the values, "
        "and, unlike a hard look-up, it has a slope to learn from.",
        rows,
        figure,
        "From the left: keys by colour with three queries; the table with the five values, their hull, the three "
        "answers and the path of the answer while a query of fixed length turns once; the five weights of a turning "
        "query; kernel regression as attention with a Gaussian score of three widths.",
        series,
    )


def _dot_product_rows(keys: Tensor, values: Tensor, queries: Tensor) -> list[Row]:
    along = LONG * keys / RADIUS
    between = along + along.roll(-1, 0)
    between = LONG * between / between.norm(dim=1, keepdim=True)
    short = SHORT * keys / RADIUS
    alone, _ = look_up(along, keys, values)
    shared, middle = look_up(between, keys, values)
    flat, centre = look_up(short, keys, values)
    pairs = torch.stack([shared.diagonal(), shared.roll(-1, 1).diagonal()])
    off = _from_segment(middle, values, values.roll(-1, 0))
    mean = (centre - values.mean(0)).norm(dim=1)
    out = outside(look_up(torch.cat([queries, along, between, short]), keys, values)[1], values)
    return [
        row("long query along one key: its weight (worst of 5)", "> 0.9", alone.diagonal().min(), least=0.9),
        row("query near the origin: largest weight", "< 0.3", flat.max(), most=0.3),
        row("query near the origin: answer from the mean (cm)", "near", 100 * mean.max(), most=2.0),
        row("long query between two keys: smaller of both weights", "> 0.4", pairs.min(), least=0.4),
        row("the same: answer from the segment of both values (cm)", "on it", 100 * off.max(), most=0.1),
        row("answers outside the hull of the values, 2,015 queries (m)", "never", max(out, 0.0), most=1e-12),
    ]


def _from_segment(points: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Return the distances of points from segments, ``[n]``."""
    along = ((points - start) * (end - start)).sum(1) / (end - start).square().sum(1)
    return (points - start - along.clamp(0, 1)[:, None] * (end - start)).norm(dim=1)


def _gradient_rows(keys: Tensor, values: Tensor, queries: Tensor) -> list[Row]:
    hard = slopes(lambda q: hard_look_up(q, keys, values), queries)
    soft = slopes(lambda q: look_up(q, keys, values)[1], queries)
    learned = torch.autograd.functional.jacobian(lambda q: look_up(q, keys, values)[1].sum(0), queries).permute(1, 0, 2)
    closed = closed_slopes(queries, keys, values)
    return [
        row("hard look-up (argmax): largest slope of 200 queries", "0", hard.abs().max(), most=0.0),
        row("soft look-up: smallest slope of 200 queries (m)", "> 0", soft.flatten(1).norm(dim=1).min(), least=1e-12),
        row("its gradient against cov(v, k) / sqrt(d)", "equal", (learned - closed).abs().max(), most=1e-12),
        row("its gradient against central differences", "equal", (learned - soft).abs().max(), most=1e-8),
    ]


def _family_rows(
    keys: Tensor, values: Tensor, queries: Tensor, additive: AdditiveAttention, samples: Samples
) -> list[Row]:
    x, y, asked = samples
    apart = max(np.abs(by_attention(x, y, asked, s) - nadaraya_watson(x, y, asked, s)).max() for s in WIDTHS)
    dot, _ = look_up(queries, keys, values)
    same = (gaussian_weights(queries, keys, 2**0.25) - dot).abs().max()
    with torch.no_grad():
        fetched = (additive_look_up(additive, keys, keys, values) - values).norm(dim=1).max()
        out = outside(additive_look_up(additive, queries, keys, values), values)
    return [
        row("Gaussian score against Nadaraya-Watson regression", "equal", apart, most=1e-12),
        row("Gaussian score, width d^(1/4), against dot product (keys of one length)", "equal", same, most=1e-12),
        row("additive score, trained: error of queries along a key (cm)", "fetches", 100 * fetched, most=1.0),
        row("additive score: answers outside the hull (m)", "never", max(out, 0.0), most=1e-12),
    ]


def _draw(keys: Tensor, values: Tensor, samples: Samples) -> tuple[Figure, dict[str, Any]]:
    figure, (circle, table, turn, curve) = panels((1, 1, 1.15, 1.15), height=3.5, total=13.0)
    asked = torch.stack([LONG * keys[2] / RADIUS, LONG * _unit(keys[3] + keys[4]), SHORT * _unit(keys[0])])
    _draw_keys(circle, keys, asked)
    _draw_table(table, keys, values, asked)
    angle = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    alpha, _ = look_up(2.0 * ring, keys, values)
    for i, name in enumerate(COLOUR_NAMES):
        turn.plot(angle.rad2deg(), alpha[:, i], color=PAINT[i], label=name)
    turn.set(title="weights of a turning query", xlabel="direction (degrees), length 2", ylabel="weight")
    turn.set(xticks=range(0, 361, 90), ylim=(0, 1.02))
    x, y, queries = samples
    curve.plot(x, y, "o", color=GREY, markersize=3, alpha=0.7, label="samples")
    for width, colour in zip(WIDTHS, COLOURS, strict=False):
        curve.plot(queries, by_attention(x, y, queries, width), color=colour, label=f"width {width}")
    curve.set(title="Gaussian score = kernel regression", xlabel="query", ylabel="answer")
    legend(curve)
    return figure, {"direction_deg": angle.rad2deg().tolist(), "weights": alpha.T.tolist()}


def _draw_keys(axes: Axes, keys: Tensor, asked: Tensor) -> None:
    for key, name, paint in zip(keys.tolist(), COLOUR_NAMES, PAINT, strict=True):
        axes.plot(*key, "o", color=paint, markersize=9)
        axes.annotate(
            name, (key[0], key[1]), xytext=(0, -15 if key[1] < 0 else 8), textcoords="offset points", ha="center"
        )
    for query, label, colour in zip(asked.tolist(), QUERIES, QUERY_COLOURS, strict=True):
        axes.annotate(
            "", (query[0], query[1]), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6}
        )
        axes.plot([], [], color=colour, label=label)
    axes.plot(0, 0, "o", color=QUERY_COLOURS[2], markersize=4)
    axes.set(title="keys and queries", xlim=(-5.3, 5.3), ylim=(-4.4, 6.2), aspect="equal")
    legend(axes, loc="upper left", fontsize=7.5)


def _draw_table(axes: Axes, keys: Tensor, values: Tensor, asked: Tensor) -> None:
    axes.add_patch(Polygon(values.tolist(), closed=True, facecolor="#f0f3f6", edgecolor=GREY, linewidth=0.8))
    angle = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    for length, shade in ((0.5, 0.3), (1.0, 0.5), (2.0, 0.75), (6.0, 1.0)):
        path = look_up(length * ring, keys, values)[1]
        axes.plot(path[:, 0], path[:, 1], color=BLUE, alpha=shade, linewidth=1.2, label=f"{length:g}")
    for place, paint in zip(values.tolist(), PAINT, strict=True):
        axes.plot(*place, "s", color=paint, markersize=9)
    for answer, colour in zip(look_up(asked, keys, values)[1].tolist(), QUERY_COLOURS, strict=True):
        axes.plot(*answer, "X", color=colour, markersize=9, markeredgecolor="white")
    axes.set(title="answers on the table", xlabel="x (m)", ylabel="y (m)", aspect="equal")
    axes.set(xlim=(-0.4, 0.4), ylim=(-0.5, 0.4))
    legend(axes, loc="lower center", ncols=4, title="length of the turning query", title_fontsize=7.5, fontsize=7.5)


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()
