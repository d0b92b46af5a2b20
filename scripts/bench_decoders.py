"""Time the decoders against what they should beat, on one CPU core in float32, A B A B:

1. cached decoding of 56 action tokens against `generate` of the equal Llama of transformers (static and dynamic cache);
2. the same with int8 weights, and how many of its tokens are those of float32;
3. ten denoising steps of the block-masked policy against projecting the prefix's keys and values in every step.

    pip install -e .[dev]; python scripts/bench_decoders.py            # about 5 minutes; --quick: seconds, no figures

Sizes: width 512, 6 layers, 8 heads, feed-forward 2048, a prefix of 605 tokens. transformers is needed by this
comparison only. A figure is the median over rounds of the paired ratio, its interval a bootstrap of 95 %.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from equal_llama import BINS, Ours, Sizes, generate, llama, prompt, rule, train
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from robotattn.attention import PrefixKV, fuse, row_positions
from robotattn.latency.profile import environment
from robotattn.policies import BlockwiseConfig, build
from robotattn.policies.base import Memory
from robotattn.policies.blockwise import Blockwise
from robotattn.statistics import bootstrap
from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.tokens.sequence import Tokens

FULL = Sizes()
QUICK = Sizes(width=64, layers=2, heads=2, hidden=128, vocabulary=300, prefix=40, tokens=8, pixels=32, chunk=4, steps=3)


@dataclass(frozen=True)
class Bench:
    """What to measure."""

    rounds: int = 9
    """Rounds of A B A B."""
    train_steps: int = 120
    """Updates of the Llama before its tokens are compared with those of its int8 copy."""
    prompts: int = 8
    """Prefixes over which tokens are compared."""
    seed: int = 0
    """Of weights, prefixes and training data."""
    out: Path = Path("results/decoders/bench_decoders.json")
    """Where the figures go."""
    quick: bool = False
    """A smoke run with tiny sizes: nothing it prints is a figure, and no file is written."""


def main(bench: Bench) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(bench.seed)
    sizes = QUICK if bench.quick else FULL
    rounds, steps, prompts = (2, 3, 2) if bench.quick else (bench.rounds, bench.train_steps, bench.prompts)
    result: dict[str, Any] = {"script": "bench_decoders", "sizes": vars(sizes), "rounds": rounds}
    theirs = llama(sizes)
    result["int8 tokens"] = agreement(theirs, sizes, steps, prompts, bench.seed)
    result["autoregressive"] = autoregressive(theirs, sizes, rounds, bench.seed)
    result["blockwise"] = blockwise(sizes, rounds, bench.seed)
    result["environment"] = environment(torch.device("cpu")) | {"threads": torch.get_num_threads()}
    show(result)
    if not bench.quick:
        bench.out.parent.mkdir(parents=True, exist_ok=True)
        bench.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


# ------------------------------------------------------------------------------------------ one token at a time


def bare_products(model: Ours, rounds: int = 4) -> float:
    """Return the time (ms) of a token's matrix products alone: every weight times one row."""
    weights = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
    rows = {weight.shape[1]: torch.randn(1, weight.shape[1]) for weight in weights}
    began = time.perf_counter()
    with torch.inference_mode():
        for _ in range(rounds):
            for weight in weights:
                F.linear(rows[weight.shape[1]], weight)
    return 1e3 * (time.perf_counter() - began) / rounds


def autoregressive(theirs: Any, sizes: Sizes, rounds: int, seed: int) -> dict[str, Any]:
    """Time both libraries on the same prefixes and weights."""
    ours = Ours(theirs, sizes)
    fused = fuse(ours)
    rounded = fused.rounded()
    runs: dict[str, Callable[[Tensor], tuple[Tensor, list[float]]]] = {
        "transformers, static cache": lambda x: generate(theirs, x, sizes.tokens, True),
        "transformers, dynamic cache": lambda x: generate(theirs, x, sizes.tokens, False),
        "ours, as trained": lambda x: ours.decode(x, sizes.tokens),
        "ours, fused": lambda x: fused.decode(x, sizes.tokens),
        "ours, fused, int8": lambda x: rounded.decode(x, sizes.tokens),
    }
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    floor, equal = [], dict.fromkeys(runs, 0)
    for index in track(range(-1, rounds), "decoding, A B A B", console=Console(stderr=True)):
        prefix = prompt(sizes, 1, seed + index)
        first: Tensor | None = None
        for name, run in runs.items():
            (tokens, clock), _ = timed(run, prefix)
            first = tokens if first is None else first
            if index >= 0:  # the first round warms up
                times[name].append(np.diff(clock).tolist())
                equal[name] += int((tokens == first).sum())
        floor.append(bare_products(ours))
    return {
        "runs": {
            name: {
                "equal_tokens": equal[name] / (rounds * sizes.tokens),
                **{what: summary(values) for what, values in parts(times[name]).items()},
            }
            for name in runs
        },
        "bare_products_ms": summary(floor[1:]),
        "ratios": {
            f"{slow} / {fast}": {
                what: summary([a / b for a, b in zip(parts(times[slow])[what], parts(times[fast])[what], strict=True)])
                for what in ("token_ms", "whole_ms")
            }
            for slow in list(runs)[:2]
            for fast in list(runs)[2:]
        },
    }


def parts(times: list[list[float]]) -> dict[str, list[float]]:
    """Return, for each run, its prefill with the first token, the mean of the later ones, and the whole (ms)."""
    return {
        "prefill_ms": [1e3 * run[0] for run in times],
        "token_ms": [1e3 * float(np.mean(run[1:])) for run in times],
        "whole_ms": [1e3 * sum(run) for run in times],
    }


# ------------------------------------------------------------------------------------------ int8 tokens


def agreement(theirs: Any, sizes: Sizes, steps: int, prompts: int, seed: int) -> dict[str, Any]:
    """Compare tokens of float32 and int8, with random weights and after training the very weights that are timed."""
    found: dict[str, Any] = {"random weights": compared(theirs, sizes, prompts, seed)}
    found["training loss"] = train(theirs, sizes, steps, seed)
    found["trained weights"] = compared(theirs, sizes, prompts, seed)
    return found


def compared(theirs: Any, sizes: Sizes, prompts: int, seed: int) -> dict[str, float]:
    """Return the share of equal tokens: free-running, and given the tokens of float32 (teacher forcing)."""
    exact = fuse(Ours(theirs, sizes))
    rounded = exact.rounded()
    prefixes = prompt(sizes, prompts, seed + 100).split(1)
    tokens = [exact.decode(row, sizes.tokens)[0] for row in prefixes]
    free = [rounded.decode(row, sizes.tokens)[0] for row in prefixes]
    forced = [rounded.decode(row, sizes.tokens, given)[0] for row, given in zip(prefixes, tokens, strict=True)]
    truth = torch.cat(tokens)
    return {
        "free": (torch.cat(free) == truth).float().mean().item(),
        "forced": (torch.cat(forced) == truth).float().mean().item(),
        "by the rule": (truth[:, 1:] == rule(seed)[truth[:, :-1].clamp(max=BINS - 1)]).float().mean().item(),
        "tokens": truth.numel(),
    }


# ------------------------------------------------------------------------------------------ denoising


def blockwise(sizes: Sizes, rounds: int, seed: int) -> dict[str, Any]:
    """Time K denoising steps on keys and values of the prefix that are kept, or projected anew in every step."""
    cameras = dict.fromkeys(("front", "left", "wrist"), (sizes.pixels, sizes.pixels))
    config = BlockwiseConfig(
        cameras=cameras,
        stem="patch",
        width=sizes.width,
        heads=sizes.heads,
        layers=sizes.layers,
        feedforward=sizes.hidden,
        chunk=sizes.chunk,
        steps=sizes.steps,
    )
    policy = build(config).eval().requires_grad_(False)
    assert isinstance(policy, Blockwise)
    policy.set_statistics(unit_statistics())
    times: dict[str, list[float]] = {"prefill": [], "kept": [], "projected anew": []}
    gap = 0.0
    for index in track(range(-1, rounds), "denoising, A B A B", console=Console(stderr=True)):
        with torch.no_grad():
            tokens = policy.tokenize(observation(config, sizes, seed + index))
            (memory, inputs), prefill = timed(kept_inputs, policy, tokens)
            kept, first = timed(policy.denoise, memory)
            projected, second = timed(denoise_anew, policy, memory, partial(project, policy, inputs))
        gap = max(gap, float((projected - kept).abs().max()))
        if index >= 0:
            for name, value in zip(times, (prefill, first, second), strict=True):
                times[name].append(value)
    return {
        "prefix_tokens": memory.mask.shape[1],
        "action_tokens": sizes.chunk,
        "largest_gap": gap,
        "ms": {name: summary(values) for name, values in times.items()},
        "ratio": summary([a / b for a, b in zip(times["projected anew"], times["kept"], strict=True)]),
        "ratio_with_prefill": summary(
            [
                (p + a) / (p + b)
                for p, a, b in zip(times["prefill"], times["projected anew"], times["kept"], strict=True)
            ]
        ),
    }


def kept_inputs(policy: Blockwise, tokens: Tokens) -> tuple[Memory, list[Tensor]]:
    """Prefill, and keep what every layer projects into keys and values."""
    inputs: list[Tensor] = []
    hooks = [
        layer.attention.key.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in policy.encoder._layers()
    ]
    memory = policy.prefill(tokens)
    for hook in hooks:
        hook.remove()
    return memory, inputs


def project(policy: Blockwise, inputs: list[Tensor]) -> PrefixKV:
    """Project the prefix into the keys and values of every layer."""
    layers = zip(policy.encoder._layers(), inputs, strict=True)
    keys, values = zip(*(layer.attention.keys_values(x) for layer, x in layers), strict=True)
    valid = torch.ones(inputs[0].shape[:2], dtype=torch.bool)
    return PrefixKV(keys, values, valid, row_positions(valid), padded=False)


def denoise_anew(policy: Blockwise, memory: Memory, prefix: Callable[[], PrefixKV]) -> Tensor:
    """Denoise as the policy does, with a prefix that is made again in every step."""
    steps = policy.config.steps
    x = memory.state.new_zeros(len(memory.state), *policy.units.shape)
    for step in range(steps):
        scratch = prefix().scratch(policy.config.chunk)
        x = x + policy.velocity(memory, x, x.new_full((len(x),), step / steps), scratch) / steps
    return x


def observation(config: BlockwiseConfig, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Return one made-up observation."""
    draws = torch.Generator().manual_seed(2_000 + seed)
    return {
        "state": torch.randn(1, 13, generator=draws) * 0.3,
        "text": torch.randint(0, config.vocabulary, (1, sizes.instruction), generator=draws),
        "text_mask": torch.ones(1, sizes.instruction, dtype=torch.bool),
        "images": {
            name: torch.randint(0, 256, (1, *size, 3), generator=draws, dtype=torch.uint8)
            for name, size in config.cameras.items()
        },
    }


def unit_statistics() -> Statistics:
    """Return statistics that leave values as they are."""
    sizes = {"state": 13, "action": 5, "position": 4}
    return Statistics(
        {key: Moments(tuple(f"d{i}" for i in range(n)), (0.0,) * n, (1.0,) * n, 0.01) for key, n in sizes.items()}
    )


# ------------------------------------------------------------------------------------------ clocks and figures


def timed(work: Callable[..., Any], *inputs: Any) -> tuple[Any, float]:
    """Return what work returns and its time (ms), without a collection of garbage in it."""
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    try:
        result = work(*inputs)
        return result, 1e3 * (time.perf_counter() - began)
    finally:
        gc.enable()


def summary(values: list[float]) -> dict[str, Any]:
    """Return the median and its 95 % interval."""
    found = bootstrap(values, np.random.default_rng(0), np.median, resamples=2_000)
    return {"median": found.value, "low": found.low, "high": found.high, "n": len(values)}


def written(figure: dict[str, Any], digits: int = 2) -> str:
    return f"{figure['median']:.{digits}f} [{figure['low']:.{digits}f}, {figure['high']:.{digits}f}]"


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    decoding, flow, tokens = result["autoregressive"], result["blockwise"], result["int8 tokens"]
    console, table = Console(), Table("decoding", "ms a token", "prefill, ms", "whole, ms", "equal tokens")
    for name, run in decoding["runs"].items():
        times = (written(run[what], 1) for what in ("token_ms", "prefill_ms", "whole_ms"))
        table.add_row(name, *times, f"{100 * run['equal_tokens']:.1f} %")
    table.add_row("bare matrix products", written(decoding["bare_products_ms"], 1))
    console.print(table)
    table = Table("ratio", "a token", "whole")
    for name, ratio in decoding["ratios"].items():
        table.add_row(name, written(ratio["token_ms"]), written(ratio["whole_ms"]))
    console.print(table)
    table = Table("int8 against float32", "free-running", "given the same tokens", "tokens")
    for name in ("random weights", "trained weights"):
        row = tokens[name]
        table.add_row(name, f"{100 * row['free']:.1f} %", f"{100 * row['forced']:.1f} %", str(row["tokens"]))
    console.print(table)
    table = Table(f"{result['sizes']['steps']} denoising steps, {flow['prefix_tokens']} tokens of prefix", "ms")
    for name, figure in flow["ms"].items():
        table.add_row(name, written(figure, 1))
    table.add_row("ratio of the steps", written(flow["ratio"]))
    table.add_row("ratio of prefill and steps", written(flow["ratio_with_prefill"]))
    console.print(table)
    console.print(f"largest difference of an action (standardised): {flow['largest_gap']:.1e}")


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
