"""E5 What residuals and normalisation are for: 24 random blocks, 8 tokens, d = 16, 2 heads.

After each block: diversity ``|X - 1 mean|_F / |X|_F`` (0: all tokens are the same) and the RMS of the stream.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from robotattn.attention import Transformer, TransformerConfig
from robotattn.experiments.drawing import COLOURS, legend, panels
from robotattn.experiments.result import Progress, Result, Row, median, row, spread

DEPTH, TOKENS, WIDTH, HEADS = 24, 8, 16, 2
SEEDS = range(10)


@dataclass(frozen=True)
class Setting:
    """One kind of block."""

    label: str
    residual: bool = True
    norm: Literal["pre", "post", "none"] = "none"
    norm_kind: Literal["layer", "rms"] = "layer"
    mlp: bool = True


COLLAPSE, COLLAPSE_MLP = (
    Setting("no residual, attention alone", residual=False, mlp=False),
    Setting("no residual", residual=False),
)
BARE, BARE_ATTENTION = Setting("residual, no norm"), Setting("residual, no norm, attention alone", mlp=False)
PRE, POST, RMS = (
    Setting("pre-LN", norm="pre"),
    Setting("post-LN", norm="post"),
    Setting("pre-RMSNorm", norm="pre", norm_kind="rms"),
)
PRE_ATTENTION = Setting("pre-LN, attention alone", norm="pre", mlp=False)
SETTINGS = (COLLAPSE, COLLAPSE_MLP, BARE, BARE_ATTENTION, PRE, PRE_ATTENTION, RMS, POST)


@dataclass(frozen=True)
class Trace:
    """After each of the 24 blocks."""

    diversity: list[float]
    rms: list[float]


def random_blocks(setting: Setting, seed: int) -> Transformer:
    """Build 24 blocks, float64: matrices that keep the variance of their input (twice it before a ReLU), no biases."""
    config = TransformerConfig(
        DEPTH,
        WIDTH,
        HEADS,
        4 * WIDTH if setting.mlp else 0,
        norm=setting.norm,
        norm_kind=setting.norm_kind,
        activation="relu",
        residual=setting.residual,
    )
    model, generator = Transformer(config).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                gain = (2.0 if module.out_features > WIDTH else 1.0) / module.in_features
                drawn = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)
                module.weight.copy_(gain**0.5 * drawn)
                if module.bias is not None:
                    module.bias.zero_()
    return model


def diversity(x: Tensor) -> float:
    """Return the share of tokens ``[1, n, d]`` that is not their mean, between 0 and 1."""
    return float((x - x.mean(1, keepdim=True)).norm() / x.norm())


def trace(setting: Setting, seed: int) -> Trace:
    """Send random tokens through random blocks."""
    model, generator = random_blocks(setting, seed), torch.Generator().manual_seed(500 + seed)
    x, found = torch.randn(1, TOKENS, WIDTH, generator=generator, dtype=torch.float64), Trace([], [])
    with torch.no_grad():
        for layer in model.layers:
            x = layer(x)
            found.diversity.append(diversity(x))
            found.rms.append(float(x.square().mean().sqrt()))
    return found


def run(progress: Progress) -> Result:
    """Run the experiment."""
    found = {setting: [trace(setting, seed) for seed in SEEDS] for setting in SETTINGS}
    progress("e5 depth", 1, 1)
    return Result(
        "What residuals and normalisation are for",
        "Attention averages tokens, so without residuals they become one and the same within a handful of blocks. "
        "Residuals keep a copy of each, but without a norm the stream nearly doubles in every block; a norm before "
        "each branch bounds what a branch adds, so the stream grows like the square root of the depth and the tokens "
        "stay apart. Norms after the residual hold the RMS at 1 and lose most of the diversity.",
        _rows(found),
        _draw(found),
        "Left: diversity of the eight tokens after each block. Right: RMS of the stream. Medians of ten random "
        "models; broken lines: blocks of attention alone.",
        {
            one.label: {"diversity": _medians(traces, "diversity"), "rms": _medians(traces, "rms")}
            for one, traces in found.items()
        },
    )


def _rows(found: dict[Setting, list[Trace]]) -> list[Row]:
    collapsed = [max(max(one.diversity[5:]) for one in found[setting]) for setting in (COLLAPSE, COLLAPSE_MLP)]
    bare = [one.rms[19] for one in found[BARE]]
    last = {setting: [one.rms[-1] for one in traces] for setting, traces in found.items()}
    kept = {setting: [one.diversity[-1] for one in traces] for setting, traces in found.items()}
    deep = [max(one.rms[19:]) for one in found[PRE]]
    off = max(abs(rms - 1) for one in found[POST] for rms in one.rms)
    return [
        row("no residual, attention alone, depth >= 6: largest diversity", "< 1e-10", collapsed[0], most=1e-10),
        row("no residual, with MLP, depth >= 6: largest diversity", "< 1e-10", collapsed[1], most=1e-10),
        row("residual, no norm, MLP, depth 20: RMS", "> 1e5", median(bare), least=1e5, shown=spread(bare)),
        row("the same, depth 24", "> 1e5", median(last[BARE]), least=1e5, shown=spread(last[BARE])),
        row("pre-LN, depth >= 20: largest RMS", "< 10", max(deep), most=10),
        row("pre-LN, depth 24: RMS", "about 7", median(last[PRE]), least=4, most=10, shown=spread(last[PRE])),
        row("pre-LN, depth 24: smallest diversity", "kept", min(kept[PRE]), least=0.1, shown=spread(kept[PRE])),
        row("pre-RMSNorm, depth 24: largest RMS", "(as pre-LN)", max(last[RMS]), most=10, shown=spread(last[RMS])),
        row("pre-RMSNorm: smallest diversity", "(as pre-LN)", min(kept[RMS]), least=0.1, shown=spread(kept[RMS])),
        row("post-LN: RMS off 1, any depth", "(theory: 0)", off, most=1e-3),
        row("pre-LN, attention alone: RMS at depth 24", "(below pre-LN)", median(last[PRE_ATTENTION]),
            most=median(last[PRE]), shown=spread(last[PRE_ATTENTION])),
        row("no norm, attention alone: RMS at depth 24", "(below no norm)", median(last[BARE_ATTENTION]),
            most=median(last[BARE]), shown=spread(last[BARE_ATTENTION])),
    ]  # fmt: skip


def _medians(traces: list[Trace], name: str) -> list[float]:
    return [median([getattr(one, name)[depth] for one in traces]) for depth in range(DEPTH)]


def _draw(found: dict[Setting, list[Trace]]) -> Figure:
    figure, (left, right) = panels((1, 1), height=3.9, total=12.0)
    colours = dict(zip(("no residual", "residual, no norm", "pre-LN", "pre-RMSNorm", "post-LN"), COLOURS, strict=False))
    for setting, traces in found.items():
        colour = colours[setting.label.removesuffix(", attention alone")]
        for axes, name in ((left, "diversity"), (right, "rms")):
            line = "-" if setting.mlp else "--"
            medians = _medians(traces, name)
            axes.plot(range(1, DEPTH + 1), medians, line, color=colour, linewidth=1.6, label=setting.label)
    left.set(title="diversity of the tokens", xlabel="depth (blocks)", yscale="log", ylim=(1e-17, 3))
    right.set(title="RMS of the stream", xlabel="depth (blocks)", yscale="log")
    legend(right, loc="upper left", fontsize=7.5)
    return figure
