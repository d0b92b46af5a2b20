"""Three decoders on the same demonstrations: what each costs and how often it picks up the cube, in one table.

    robotattn record --out demos/state --episodes 1000 --object-tokens
    robotattn record --out demos/pick --episodes 1000 --cameras front:96 wrist:96 --light 1 --colour-jitter 1
    python scripts/study_decoders.py --state demos/state --pixels demos/pick --out results/decoders

Trains each shipped configuration unless its run is there (a killed one goes on), evaluates all on the same episodes
and times a control step. Writes one evaluation and one profile a policy, table.json and table.md.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from robotattn.config import load
from robotattn.evaluate import EvaluateConfig, evaluate, write_json
from robotattn.latency.profile import ProfileConfig, profile
from robotattn.train import TrainConfig, train

STATE = ("act_state", "autoregressive_state", "blockwise_state", "blockwise_autoregressive_state")
PIXELS = ("act_pixels", "autoregressive_pixels", "blockwise_pixels")
TITLES = (
    "policy",
    "parameters",
    "training (min)",
    "success",
    "95 % interval",
    "tokens",
    "KV (KiB)",
    "p50 (ms)",
    "p99 (ms)",
)
Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Study:
    """What to train and test."""

    state: Path = Path("demos/state")
    """Demonstrations with object tokens."""
    pixels: Path = Path("demos/pick")
    """Demonstrations with the front and the wrist camera."""
    configs: Path = Path("configs")
    """Folder of the configurations."""
    runs: Path = Path("runs/decoders")
    """Folder of the trainings."""
    out: Path = Path("results/decoders")
    """Folder of the results."""
    episodes: int = 200
    """Evaluation episodes of each policy, the same for all."""
    seed: int = 3000
    """Base seed of the evaluation."""
    samples: int = 500
    """Timed control steps."""
    threads: int = 1
    """Threads of torch in training and timing."""
    workers: int = 2
    """Evaluation processes."""
    only: tuple[str, ...] = ()
    """Only these configurations."""


def main(study: Study) -> None:
    unknown = set(study.only) - {*STATE, *PIXELS}
    if unknown:
        raise SystemExit(f"only: {sorted(unknown)} not known, allowed are {[*STATE, *PIXELS]}")
    names = [name for name in (*STATE, *PIXELS) if not study.only or name in study.only]
    with Progress() as bars:
        rows = {name: measure(study, name, bars) for name in names}
    write_json(study.out / "table.json", {"schema": 1, "kind": "decoders", "seed": study.seed, "rows": rows})
    lines = [cells(name, row) for name, row in rows.items()]
    markdown = [TITLES, ("---",) * len(TITLES), *lines]
    (study.out / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in markdown), encoding="utf-8")
    table = Table(*TITLES)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    print(json.dumps({"script": "study_decoders", **rows}, ensure_ascii=False))


def measure(study: Study, name: str, bars: Progress) -> dict[str, Any]:
    """Train, evaluate and time one configuration; what is there already is read."""
    bar = bars.add_task(name, total=1)

    def show(what: str, done: int, total: int) -> None:
        bars.update(bar, description=f"{name}: {what}", completed=done, total=total)

    trained = study.runs / name / "checkpoint"
    evaluation, profiled = study.out / f"{name}.json", study.out / f"{name}.profile.json"
    if not evaluation.exists() or not profiled.exists():
        _train(study, name, show)
    if not evaluation.exists():
        evaluate(
            EvaluateConfig(
                checkpoint=trained, episodes=study.episodes, seed=study.seed, workers=study.workers, out=evaluation
            ),
            show,
        )
        _relative(evaluation)
    if not profiled.exists():
        profile(ProfileConfig(checkpoint=trained, samples=study.samples, threads=study.threads, out=profiled))
        _relative(profiled)
    return _row(json.loads(evaluation.read_text()), json.loads(profiled.read_text()))


def _train(study: Study, name: str, show: Show) -> None:
    config = load(study.configs / f"{name}.yaml", TrainConfig)
    config = replace(config, data=study.state if name in STATE else study.pixels, out=study.runs / name)
    fingerprint = config.out / "checkpoint" / "fingerprint.json"
    if fingerprint.exists() and json.loads(fingerprint.read_text())["training"]["steps"] >= config.steps:
        return
    train(replace(config, threads=study.threads), resume=True, progress=show)


def _relative(path: Path) -> None:
    """Rewrite a result file with every path relative to here: it is to be read elsewhere."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for key in ("checkpoint", "out"):
        if data["config"].get(key):
            data["config"][key] = os.path.relpath(data["config"][key])
    write_json(path, data)


def _row(evaluation: dict[str, Any], profiled: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of one policy."""
    step, card = profiled["step"], profiled["card"]
    return {
        "parameters": card["parameters"],
        "minutes": evaluation["fingerprint"]["training"]["minutes"],
        "success": evaluation["success"],
        "reasons": evaluation["reasons"],
        "tokens": card["tokens"],
        "kv_bytes": card["kv"]["total"],
        "p50_ms": step["p50"],
        "p99_ms": step["p99"],
        "n": step["n"],
    }


def cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    success = row["success"]
    return (
        name,
        f"{row['parameters'] / 1e6:.2f} M",
        f"{row['minutes']:.1f}",
        f"{success['successes']} of {success['episodes']}",
        f"{success['low']:.1%} to {success['high']:.1%}",
        f"{row['tokens']['prefix']} + {row['tokens']['actions']}",
        f"{row['kv_bytes'] / 1024:.1f}",
        f"{row['p50_ms']:.2f}",
        f"{row['p99_ms']:.2f}",
    )


if __name__ == "__main__":
    main(tyro.cli(Study, description=__doc__))
