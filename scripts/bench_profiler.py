"""Measure the profiler itself: what its clock and spans add to a step of 5 ms, and memory over 10,000 steps.

    python scripts/bench_profiler.py

The overhead is measured twice: spans around no work (their own price, per step of nine stages), and a fixed piece of
work of about 5 ms with and without spans, in turn, as paired ratios.
"""

import json
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from robotattn.latency.measure import Clock, Spans, window
from robotattn.statistics import bootstrap

STAGES = ("preprocess", "transfer", "vision", "prefix", "cross_kv", "decode", "to_host", "postprocess", "safety")
STEP_NS = 5_000_000


@dataclass(frozen=True)
class Bench:
    """What to measure."""

    device: str = "cpu"
    """Where the clock waits: cpu, cuda or mps."""
    steps: int = 10_000
    """Steps of the memory run, each with nine stages."""
    pairs: int = 100
    """Pairs of steps with and without spans."""


def main(bench: Bench) -> None:
    torch.set_num_threads(1)
    clock = Clock(bench.device)
    own, memory = overhead(clock), growth(clock, bench.steps)
    ratio = bootstrap(paired(clock, bench.pairs), np.random.default_rng(0), np.median, resamples=2000)
    result = {
        "script": "bench_profiler",
        "device": bench.device,
        "overhead_us_per_step": own / 1e3,
        "share_of_a_5_ms_step": own / STEP_NS,
        "paired_ratio": {"value": ratio.value, "low": ratio.low, "high": ratio.high},
        **memory,
    }
    table = Table("what", "measured", "allowed")
    table.add_row("nine spans and the step's, of 5 ms", f"{own / 1e3:.1f} us = {own / STEP_NS:.2%}", "< 1 %")
    table.add_row("5 ms step with / without spans", f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]", "")
    table.add_row(f"memory over {bench.steps} steps", f"{memory['growth_bytes'] / 1024:.0f} KiB", "flat")
    table.add_row("of it, samples (8 bytes each)", f"{memory['sample_bytes'] / 1024:.0f} KiB", "")
    Console().print(table)
    print(json.dumps(result))


def step(spans: Spans, stages: Mapping[str, Callable[[], object]]) -> None:
    """Run a step's stages, each in its span."""
    for name, work in stages.items():
        spans.run(name, work)


def overhead(clock: Clock, steps: int = 2000) -> float:
    """Nanoseconds that the spans of one step take when there is nothing to time (median of 20 rounds)."""
    stages, rounds = dict.fromkeys(STAGES, int), list[float]()
    for _ in range(20):
        spans, start = Spans(clock), clock.now()
        for _ in range(steps // 20):
            spans.run("step", partial(step, spans, stages))
        rounds.append((clock.now() - start) / (steps // 20))
    return statistics.median(rounds)


def paired(clock: Clock, pairs: int) -> np.ndarray:
    """Ratios of the same work with and without spans, in turn; the order alternates too."""
    matrix = torch.randn(256, 256, device=clock.device)
    products = max(1, round(STEP_NS / 9 / _median_ns(clock, lambda: matrix @ matrix)))
    stages: dict[str, Callable[[], object]] = dict.fromkeys(STAGES, lambda: [matrix @ matrix for _ in range(products)])
    spans, ratios = Spans(clock), []
    with window():
        for pair in range(pairs):
            times = {}
            for measured in (True, False) if pair % 2 else (False, True):
                start = clock.now()
                if measured:
                    spans.run("step", partial(step, spans, stages))
                else:
                    for work in stages.values():
                        work()
                times[measured] = clock.now() - start
            ratios.append(times[True] / times[False])
    return np.array(ratios)


def _median_ns(clock: Clock, work: Callable[[], object]) -> float:
    return statistics.median(clock.time(work)[1] for _ in range(50))


def growth(clock: Clock, steps: int) -> dict[str, int]:
    """By how much the process grows over that many steps, after a tenth of them to settle."""
    spans, stages = Spans(clock), dict.fromkeys(STAGES, int)
    with window():
        for _ in range(steps // 10):
            spans.run("step", partial(step, spans, stages))
        before = resident()
        for _ in range(steps):
            spans.run("step", partial(step, spans, stages))
        after = resident()
    return {"steps": steps, "growth_bytes": after - before, "sample_bytes": 8 * (len(STAGES) + 1) * steps}


def resident() -> int:
    """Bytes of memory that the process holds now (where /proc tells it), or has held at most."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(tyro.cli(Bench))
