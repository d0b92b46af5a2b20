"""Put a pick-up checkpoint to the test: nominal scenes, then everything that was not in its training.

    python scripts/study_pick_up.py CHECKPOINT --episodes 500 --out results/pick_up

Every condition runs the same episodes (paired seeds), so differences between conditions are differences of the policy.
Writes one evaluation file a condition and study.json; conditions that are already there are not run again.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from robotattn.evaluate import EvaluateConfig, evaluate, write_json

PLAIN = {"light": 0.0, "colour_jitter": 0.0}  # the default scenes, whatever the checkpoint was trained on
CONDITIONS: dict[str, dict[str, object]] = {
    "nominal": {},
    "6 cubes": {"objects": 6},
    "yaw ±45°": {"yaw": float(np.pi / 4)},
    "light and colours": {"light": 1.0, "colour_jitter": 1.0},
    "camera moved": {"camera_jitter": 1.0},
    "table texture": {"texture": True},
    "English": {"language": "en"},
    "Chinese": {"language": "zh"},
    "held-out English": {"language": "en", "phrases": "heldout"},
    "held-out Chinese": {"language": "zh", "phrases": "heldout"},
    "another cube named": {"other": True},
}


@dataclass(frozen=True)
class Study:
    """What to test."""

    checkpoint: tyro.conf.Positional[Path]
    """Checkpoint folder."""
    out: Path = Path("results/pick_up")
    """Folder for the evaluation files."""
    episodes: int = 500
    """Episodes of a condition."""
    seed: int = 1000
    """Base seed of the episodes."""
    workers: int = 2
    """Processes."""
    only: tuple[str, ...] = ()
    """Run these conditions only."""


def main(study: Study) -> None:
    unknown = set(study.only) - set(CONDITIONS)
    if unknown:
        raise SystemExit(f"only: {sorted(unknown)} not known, allowed are {list(CONDITIONS)}")
    names = [name for name in CONDITIONS if not study.only or name in study.only]
    results = {}
    with Progress() as bars:
        whole = bars.add_task("conditions", total=len(names))
        for name in names:
            results[name] = run(study, name, bars)
            bars.advance(whole)
    write_json(study.out / "study.json", {"schema": 1, "kind": "study", "conditions": results})
    table = Table("condition", "success", "95 % interval", "episodes", "failures")
    for name, row in results.items():
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        table.add_row(name, f"{row['rate']:.1%}", interval, str(row["episodes"]), json.dumps(row["failures"]))
    Console().print(table)
    print(json.dumps({"script": "study_pick_up", **results}, ensure_ascii=False))


def run(study: Study, name: str, bars: Progress) -> dict[str, object]:
    """Evaluate one condition, or read the file of an earlier run with the same settings."""
    slug = name.replace(" ", "_").replace("±", "").replace("°", "")
    out = study.out / f"{slug}.json"
    config = EvaluateConfig(
        checkpoint=study.checkpoint, episodes=study.episodes, seed=study.seed, workers=study.workers, out=out,
        **(PLAIN | CONDITIONS[name]),  # type: ignore[arg-type]
    )  # fmt: skip
    if out.exists() and (known := json.loads(out.read_text()))["success"]["episodes"] == study.episodes:
        return {**known["success"], "failures": known["failures"]}
    bar = bars.add_task(name, total=study.episodes)
    result = evaluate(config, lambda what, done, total: bars.update(bar, completed=done))
    return {**result["success"], "failures": result["failures"]}


if __name__ == "__main__":
    main(tyro.cli(Study, description=__doc__))
