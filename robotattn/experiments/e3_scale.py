"""E3 Why divide by sqrt(d): a query and 16 keys of standard normal components, from 1 to 1024 of them.

A score is a sum of d products, so its standard deviation is sqrt(d). Undivided, the softmax of wide heads is nearly an
argmax and its Jacobian ``diag(a) - a a^T``, through which all learning goes, shrinks.
"""

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from robotattn.attention import weights
from robotattn.experiments.drawing import BLUE, GREY, RED, legend, panels
from robotattn.experiments.result import Progress, Result, Row, number, row

WIDTHS = tuple(2**power for power in range(11))  # d_k: 1 … 1024
DRAWS, KEYS, SEED = 200, 16, 0
WIDE = 256


@dataclass(frozen=True)
class Measured:
    """At one width: the standard deviation of unscaled scores; mean largest weight and Jacobian norm, both ways."""

    deviation: float
    largest: tuple[float, float]  # unscaled, scaled
    jacobian: tuple[float, float]


def jacobian_norms(alpha: Tensor) -> Tensor:
    """Return the Frobenius norm of the softmax Jacobian diag(a) - a a^T of each row of weights, ``[n]``."""
    return (torch.diag_embed(alpha) - alpha[:, :, None] * alpha[:, None, :]).flatten(1).norm(dim=1)


def measure(width: int, generator: torch.Generator) -> Measured:
    """Draw queries and keys of one width and measure."""
    q = torch.randn(DRAWS, 1, 1, width, generator=generator, dtype=torch.float64)
    k = torch.randn(DRAWS, 1, KEYS, width, generator=generator, dtype=torch.float64)
    both = [weights(q, k, scale=scale)[:, 0, 0] for scale in (1.0, None)]
    largest = [float(alpha.amax(1).mean()) for alpha in both]
    norms = [float(jacobian_norms(alpha).mean()) for alpha in both]
    return Measured(float((q * k).sum(-1).std()), (largest[0], largest[1]), (norms[0], norms[1]))


def run(progress: Progress) -> Result:
    """Run the experiment."""
    generator = torch.Generator().manual_seed(SEED)
    found = {width: measure(width, generator) for width in WIDTHS}
    progress("e3 widths", len(WIDTHS), len(WIDTHS))
    return Result(
        "Why divide by sqrt(d)",
        "The score of a query and a key is a sum of d products of standard normal numbers. Divided by sqrt(d), the "
        "softmax looks alike at every width; undivided, it turns into an argmax and passes on ever less gradient.",
        _rows(found),
        _draw(found),
        "From the left: standard deviation of the scores; mean largest of 16 weights (1/16 would be an even look); "
        "mean Frobenius norm of the softmax Jacobian; 200 draws at each width.",
        {"d_k": list(WIDTHS), "measured": [vars(one) for one in found.values()]},
    )


def _rows(found: dict[int, Measured]) -> list[Row]:
    wide = {width: one for width, one in found.items() if width >= WIDE}
    ratios = [one.jacobian[0] / one.jacobian[1] for one in wide.values()]
    scaled = [one.largest[1] for one in wide.values()]
    worst = max(abs(one.deviation / math.sqrt(width) - 1) for width, one in found.items())
    narrow = found[1].largest
    return [
        row("d_k = 64, unscaled: deviation of scores", "7.8 (theory 8)", found[64].deviation, least=7.5, most=8.5),
        row("the same at every d_k: off sqrt(d) by at most", "sqrt(d)", worst, most=0.1, shown=f"{worst:.1%}"),
        row("unscaled, d_k = 256: mean largest weight", "0.93, > 0.9", found[WIDE].largest[0], least=0.9),
        row("unscaled / scaled Jacobian norm, d_k = 256", "about 1/3", ratios[0], least=0.25, most=0.42),
        row("the same, d_k = 512 and 1024: no larger", "about 1/3", max(ratios[1:]), most=0.42,
            shown=" and ".join(number(ratio) for ratio in ratios[1:])),
        row("scaled, d_k >= 256: mean largest weight, lowest", "about 0.25", min(scaled), least=0.2, most=0.3),
        row("scaled, d_k >= 256: mean largest weight, highest", "about 0.25", max(scaled), least=0.2, most=0.3),
        row("d_k = 1: mean largest weight, scaled or not", "0.21", max(narrow), least=0.18, most=0.24),
    ]  # fmt: skip


def _draw(found: dict[int, Measured]) -> Figure:
    figure, (deviation, largest, jacobian) = panels((1, 1, 1))
    widths = list(found)
    deviation.plot(widths, [one.deviation for one in found.values()], "o", color=RED, label="unscaled, measured")
    deviation.plot(widths, [math.sqrt(width) for width in widths], color=GREY, linewidth=1, label="sqrt(d)")
    deviation.axhline(1, color=BLUE, linewidth=1.2, label="divided by sqrt(d)")
    deviation.set(title="standard deviation of scores", yscale="log")
    for i, (colour, label) in enumerate(((RED, "unscaled"), (BLUE, "divided by sqrt(d)"))):
        largest.plot(widths, [one.largest[i] for one in found.values()], "o-", color=colour, label=label)
        jacobian.plot(widths, [one.jacobian[i] for one in found.values()], "o-", color=colour, label=label)
    largest.axhline(1 / KEYS, color=GREY, linewidth=0.8, linestyle=":")
    largest.annotate(
        "1/16: even", (WIDTHS[-1], 1 / KEYS), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8
    )
    largest.set(title="mean largest weight", ylim=(0, 1))
    jacobian.set(title="norm of the softmax Jacobian", ylim=(0, None))
    for axes in (deviation, largest, jacobian):
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
        axes.set_xlabel("width of a head, d_k")
        legend(axes)
    return figure
