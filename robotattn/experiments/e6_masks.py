"""E6 Masks and the KV cache: 6 observation tokens, then 8 action tokens generated one by one.

The observation: 4 image tokens, 1 proprioception, 1 instruction. Three masks: bidirectional, causal, block (the
observation is bidirectional, an action reads it and earlier actions).
A cache is right where no old token would have read a new one; elsewhere it computes something else.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from robotattn.attention import Transformer, TransformerConfig, masks
from robotattn.experiments.drawing import BLUE, GREEN, RED, legend, matrix, panels
from robotattn.experiments.result import Progress, Result, Row, exact, row

OBSERVATION, ACTIONS = 6, 8
TOTAL = OBSERVATION + ACTIONS
NAMES = ("image",) * 4 + ("proprio", "instruction") + tuple(f"action {i + 1}" for i in range(ACTIONS))
WIDTH, HEADS, LAYERS, BINS = 32, 4, 3, 256
SEQUENCES = 16
MASKS: dict[str, masks.Mask] = {
    "bidirectional": masks.Everything(),
    "causal": masks.Causal(),
    "block": masks.Prefix(OBSERVATION) | masks.Causal(),
}
PAINT = {"bidirectional": RED, "causal": BLUE, "block": GREEN}


@dataclass(frozen=True)
class Model:
    """A random decoder, float64; table [256, D]: the vectors of its action tokens; head [D, 256]: reads them out."""

    stack: Transformer
    table: Tensor
    head: Tensor


@dataclass(frozen=True)
class Run:
    """What a way of decoding did. outputs [B, 8, D] at the positions that predict the actions; actions [B, 8]: their
    tokens; products: dot products a layer and head, after the observation and after each action."""

    outputs: Tensor
    actions: Tensor
    products: list[int]


def make_model(seed: int = 0) -> Model:
    """Build the decoder with rotary positions, its matrices so drawn that they keep the variance of their input."""
    config = TransformerConfig(LAYERS, WIDTH, HEADS, 2 * WIDTH, position="rotary")
    stack, generator = Transformer(config).double().eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in stack.named_parameters():
            if name.endswith("bias"):
                values.zero_()
            elif values.dim() == 2:
                drawn = torch.randn(values.shape, generator=generator, dtype=torch.float64)
                values.copy_(drawn * values.shape[1] ** -0.5)
    table, head = torch.randn(2, BINS, WIDTH, generator=generator, dtype=torch.float64)
    return Model(stack, table, head.T)


def observations(count: int = SEQUENCES, seed: int = 0) -> Tensor:
    """Draw observation tokens ``[count, 6, D]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, OBSERVATION, WIDTH, generator=generator, dtype=torch.float64)


def products(mask: masks.Mask, start: int, stop: int) -> int:
    """Count the dot products of queries start..stop-1 with the keys up to stop that the mask lets them read."""
    return int(mask.tensor(torch.arange(start, stop), torch.arange(stop)).sum())


@torch.no_grad()
def recompute(model: Model, seen: Tensor, mask: masks.Mask, forced: Tensor | None = None) -> Run:
    """Generate the actions, sending the whole sequence through the model for each. forced: tokens to feed instead.

    The eighth action is fed back as well, as it would be for a ninth.
    """
    x = seen
    counts: list[int] = []
    outputs: list[Tensor] = []
    actions: list[Tensor] = []
    for step in range(ACTIONS + 1):
        out = model.stack(x, mask)[:, -1]
        counts.append(products(mask, 0, x.shape[1]))
        if step < ACTIONS:
            outputs.append(out)
            actions.append(_greedy(model, out))
            x = torch.cat([x, model.table[actions[-1] if forced is None else forced[:, step], None]], 1)
    return Run(torch.stack(outputs, 1), torch.stack(actions, 1), counts)


@torch.no_grad()
def cached(
    model: Model, seen: Tensor, mask: masks.Mask, forced: Tensor | None = None, valid: Tensor | None = None
) -> Run:
    """Generate the actions with a cache: each token goes through the model once. valid [B, 6]: real observations."""
    cache = model.stack.cache(len(seen), TOTAL, dtype=torch.float64, allow_stale=True)
    out = model.stack(seen, mask, valid=valid, cache=cache)[:, -1]
    counts = [products(mask, 0, OBSERVATION)]
    outputs: list[Tensor] = []
    actions: list[Tensor] = []
    for step in range(ACTIONS):
        outputs.append(out)
        actions.append(_greedy(model, out))
        token = model.table[actions[-1] if forced is None else forced[:, step], None]
        out = model.stack(token, mask, cache=cache)[:, -1]
        counts.append(products(mask, cache.length - 1, cache.length))
    return Run(torch.stack(outputs, 1), torch.stack(actions, 1), counts)


def _greedy(model: Model, out: Tensor) -> Tensor:
    return (out @ model.head).argmax(1)


def disagreement(one: Run, other: Run) -> list[float]:
    """Return for each action how far the outputs are apart, relative to their size, averaged over sequences."""
    return ((one.outputs - other.outputs).norm(dim=2) / other.outputs.norm(dim=2)).mean(0).tolist()


def is_refused(model: Model, mask: masks.Mask) -> bool:
    """Tell whether a cache, as it comes, refuses to go on under this mask."""
    cache, x = model.stack.cache(1, TOTAL, dtype=torch.float64), observations(1)
    with torch.no_grad():
        model.stack(x, mask, cache=cache)
        try:
            model.stack(x[:, :1], mask, cache=cache)
        except ValueError:
            return True
    return False


def padding_error(model: Model, name: str) -> float:
    """Return how far rows of a batch left-padded with NaN (4, 5 and 6 real observations) are from those rows alone."""
    seen, kept = observations(3), (4, 5, 6)
    forced = torch.arange(3 * ACTIONS).view(3, ACTIONS)
    valid = torch.stack([torch.arange(OBSERVATION) >= OBSERVATION - real for real in kept])
    together = cached(model, seen.masked_fill(~valid[..., None], torch.nan), MASKS[name], forced, valid).outputs
    worst = 0.0
    for i, real in enumerate(kept):
        alone = _alone(model, seen[i : i + 1, -real:], forced[i : i + 1], name)
        worst = max(worst, float((together[i] - alone[0]).abs().max()))
    return worst if together.isfinite().all() else torch.inf


@torch.no_grad()
def _alone(model: Model, seen: Tensor, forced: Tensor, name: str) -> Tensor:
    """Return the outputs of one short row in one pass, without padding or cache."""
    real = seen.shape[1]
    mask = masks.Prefix(real) | masks.Causal() if name == "block" else MASKS[name]
    return model.stack(torch.cat([seen, model.table[forced[:, :-1]]], 1), mask)[:, real - 1 :]


def run(progress: Progress) -> Result:
    """Run the experiment."""
    model, seen = make_model(), observations()
    full = {name: recompute(model, seen, mask) for name, mask in MASKS.items()}
    fast = {name: cached(model, seen, mask) for name, mask in MASKS.items()}
    forced = {name: cached(model, seen, mask, full[name].actions) for name, mask in MASKS.items()}
    errors = {name: disagreement(forced[name], full[name]) for name in MASKS}
    progress("e6 masks", 1, 1)
    return Result(
        "Masks and the KV cache",
        "A cache keeps the keys and values of old tokens, so that each new token costs one row of the score matrix. "
        "That is the same computation only if no old token should have read a new one: causal and block masks "
        "promise this, a bidirectional one does not, and the library's cache refuses it unless told otherwise (as it "
        "was here, to measure the error).",
        _rows(model, full, fast, errors),
        _draw(full, fast, errors),
        "From the left: who reads whom (row reads column; the frame is the observation); dot products a layer and "
        "head, added up over the episode, with a cache (full lines) and without (broken); error of the cached output "
        "at each action, fed with the same tokens.",
        {
            "errors": errors,
            "cached": {n: r.products for n, r in fast.items()},
            "full": {n: r.products for n, r in full.items()},
        },
    )


def _rows(model: Model, full: dict[str, Run], fast: dict[str, Run], errors: dict[str, list[float]]) -> list[Row]:
    count = {name: (sum(fast[name].products), sum(full[name].products)) for name in MASKS}
    equal = {name: float((fast[name].actions == full[name].actions).double().mean()) for name in MASKS}
    wrong = errors["bidirectional"]
    block_cached = OBSERVATION**2 + sum(range(OBSERVATION + 1, TOTAL + 1))
    block_full = sum(OBSERVATION**2 + sum(range(OBSERVATION + 1, n + 1)) for n in range(OBSERVATION, TOTAL + 1))
    return [
        exact("causal: dot products with a cache", "105", count["causal"][0], 105),
        exact("causal: dot products without", "525", count["causal"][1], 525),
        exact("block: dot products with a cache", f"(closed form: {block_cached})", count["block"][0], block_cached),
        exact("block: dot products without", f"(closed form: {block_full})", count["block"][1], block_full),
        *(row(f"{name}: cached against recomputed outputs", "float tolerance", max(errors[name]), most=1e-12)
          for name in ("causal", "block")),
        *(exact(f"{name}: generated actions that are equal", "all", equal[name], 1.0, f"{equal[name]:.0%}")
          for name in ("causal", "block")),
        row("bidirectional + cache: smallest error after the first action", "wrong", min(wrong[1:]), least=1e-3),
        row("bidirectional + cache: generated actions that are equal", "(not all)", equal["bidirectional"], most=0.99,
            shown=f"{equal['bidirectional']:.0%}"),
        exact("bidirectional + cache: the library refuses it", "(guard)", is_refused(model, MASKS["bidirectional"]), 1,
              "refused"),
        *(row(f"{name}: left-padded batch (NaN in the padding) against single rows", "agrees",
              padding_error(model, name), most=1e-12) for name in ("causal", "block")),
    ]  # fmt: skip


def _draw(full: dict[str, Run], fast: dict[str, Run], errors: dict[str, list[float]]) -> Figure:
    figure, axes = panels((1, 1, 1, 1.35, 1.35), height=3.3, total=15.0)
    for one, (name, mask) in zip(axes[:3], MASKS.items(), strict=True):
        _draw_mask(one, name, mask)
    for name, colour in PAINT.items():
        for runs, line, label in ((fast, "-", f"{name}, cache"), (full, "--", f"{name}, recompute")):
            total = torch.tensor(runs[name].products).cumsum(0)
            axes[3].plot(
                range(ACTIONS + 1), total, line, color=colour, label=label, linewidth=1.2 if name == "block" else 2.4
            )
        shown = [max(error, 1e-17) for error in errors[name]]
        marker, size = ("s", 4) if name == "block" else ("o", 8)
        axes[4].plot(range(1, ACTIONS + 1), shown, color=colour, label=name, marker=marker, markersize=size)
    axes[3].set(title="dot products so far", xlabel="action tokens generated")
    axes[4].set(title="error of the cache", xlabel="action", yscale="log", ylim=(1e-18, 10), ylabel="relative")
    legend(axes[3], fontsize=7)
    legend(axes[4], loc="center right")
    return figure


def _draw_mask(axes: Axes, name: str, mask: masks.Mask) -> None:
    matrix(axes, mask.picture(TOTAL, TOTAL).numpy(), 0, 1.6)
    axes.add_patch(
        Rectangle((-0.5, -0.5), OBSERVATION, OBSERVATION, fill=False, edgecolor="black", linewidth=1.2, zorder=3)
    )
    axes.set(title=name, xticks=[])
    for edge in range(1, TOTAL):
        axes.axhline(edge - 0.5, color="white", linewidth=0.6)
        axes.axvline(edge - 0.5, color="white", linewidth=0.6)
    first = name == next(iter(MASKS))
    axes.set_yticks(range(TOTAL), NAMES if first else [""] * TOTAL, fontsize=6.5)
