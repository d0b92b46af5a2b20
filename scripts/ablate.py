"""Ablations of the pixel policy on paired seeds: the same training with one thing changed each time.

    python scripts/ablate.py --data demos/pick --steps 1500 --out runs/ablations

Trains each variant for the same number of steps, evaluates all on the same episodes, and prints each one's success and
its paired difference to the reference. A variant that is already there is not trained again, a killed one is resumed.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from robotattn.config import load
from robotattn.evaluate import EvaluateConfig, evaluate, write_json
from robotattn.statistics import paired_difference
from robotattn.train import TrainConfig, train


def variants(base: TrainConfig, data_20hz: Path | None) -> dict[str, TrainConfig]:
    """The reference and what is compared with it; chunks at 20 Hz are as long in seconds."""

    def policy(**changes: Any) -> TrainConfig:
        return replace(base, policy=replace(base.policy, **changes))

    first = dict(list(base.policy.cameras.items())[:1])
    faster = {} if data_20hz is None else {"20 Hz": replace(policy(chunk=2 * base.policy.chunk), data=data_20hz)}
    return {
        "reference": base,
        "reference, seed 1": replace(base, seed=1),
        "reference, seed 2": replace(base, seed=2),
        "no attention labels": policy(attention_labels=False),
        "no grounding (plain ACT)": policy(grounding=False, attention_labels=False),
        "joint targets": policy(action_mode="joint"),
        f"one camera ({next(iter(first))})": policy(cameras=first),
        "200 demonstrations": replace(base, episodes=200),
        **faster,
    }


@dataclass(frozen=True)
class Ablation:
    """What to train and test."""

    data: Path
    """Demonstrations, recorded with all cameras of the configuration."""
    data_20hz: Path | None = None
    """The same demonstrations recorded at 20 Hz, for the variant of that name."""
    config: Path = Path("configs/act_pixels.yaml")
    """The reference."""
    steps: int = 1500
    """Optimiser steps of every variant."""
    episodes: int = 200
    """Paired evaluation episodes of every variant."""
    seed: int = 2000
    """Base seed of the evaluation; not the one that a shipped checkpoint is judged on."""
    out: Path = Path("runs/ablations")
    """Folder of the runs."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the training."""
    threads: int = 1
    """Threads of torch."""
    workers: int = 2
    """Evaluation processes."""
    only: tuple[str, ...] = ()
    """Only these variants."""


def main(study: Ablation) -> None:
    base = replace(load(study.config, TrainConfig), data=study.data, steps=study.steps, threads=study.threads)
    base = replace(base, precision=study.precision)
    wanted = variants(base, study.data_20hz)
    unknown = set(study.only) - set(wanted)
    if unknown:
        raise SystemExit(f"only: {sorted(unknown)} not known, allowed are {list(wanted)}")
    names = [name for name in wanted if not study.only or name in study.only]
    with Progress() as bars:
        rows = {name: run(study, name, wanted[name], bars) for name in names}
    summary = {name: describe(row, rows.get("reference")) for name, row in rows.items()}
    write_json(study.out / "ablations.json", {"schema": 1, "kind": "ablations", "steps": study.steps, "rows": summary})
    table = Table("variant", "success", "95 % interval", "difference to the reference", "training minutes")
    for name, row in summary.items():
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        table.add_row(name, f"{row['rate']:.1%}", interval, row["difference"], f"{row['minutes']:.1f}")
    Console().print(table)
    print(json.dumps({"script": "ablate", **summary}, ensure_ascii=False))


def run(study: Ablation, name: str, config: TrainConfig, bars: Progress) -> dict[str, Any]:
    """Train one variant unless it is there, evaluate it unless that is there."""
    folder = study.out / name.replace(" ", "_").replace(",", "").replace("(", "").replace(")", "")
    result = folder / "evaluation.json"
    bar = bars.add_task(name, total=config.steps)

    def show(what: str, done: int, total: int) -> None:
        bars.update(bar, description=f"{name}: {what}", completed=done, total=total)

    if not result.exists():
        train(replace(config, out=folder), resume=True, progress=show)
        evaluate(
            EvaluateConfig(
                checkpoint=folder / "checkpoint", episodes=study.episodes, seed=study.seed, out=result,
                workers=study.workers,
            ),
            show,
        )  # fmt: skip
    return json.loads(result.read_text())


def describe(row: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Any]:
    """Success of a variant, and its paired difference to the reference with the 95 % interval."""
    difference = ""
    if reference is not None and row is not reference:
        ours, theirs = ([item["success"] for item in result["rows"]] for result in (row, reference))
        paired = paired_difference(theirs, ours)
        difference = f"{paired.difference:+.1%} ({paired.low:+.1%} to {paired.high:+.1%})"
    minutes = row["fingerprint"]["training"]["minutes"] if "training" in row["fingerprint"] else float("nan")
    return {**row["success"], "difference": difference, "minutes": minutes}


if __name__ == "__main__":
    main(tyro.cli(Ablation, description=__doc__))
