"""Draw how a pixel policy learns: training loss, and success of its snapshots, over minutes of training.

    python scripts/draw_learning.py RUN_OR_CHECKPOINT results/pick_up/curve --out results/pick_up/learning.png

The folder holds one evaluation file for each snapshot; the minutes are those of the checkpoint that it names.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Drawing:
    """What to draw."""

    run: tyro.conf.Positional[Path]
    """Folder with metrics.jsonl."""
    evaluations: tyro.conf.Positional[Path]
    """Folder with the evaluation files."""
    out: Path = Path("learning.png")
    """Picture."""


def main(drawing: Drawing) -> None:
    lines = [json.loads(line) for line in (drawing.run / "metrics.jsonl").read_text().splitlines()]
    results = [json.loads(path.read_text()) for path in drawing.evaluations.glob("*.json")]
    results.sort(key=lambda result: result["fingerprint"]["training"]["minutes"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogy([line["minutes"] for line in lines], [line["loss"] for line in lines])
    left.set(xlabel="minutes of training", ylabel="training loss")
    minutes = [result["fingerprint"]["training"]["minutes"] for result in results]
    rates = [result["success"] for result in results]
    spread = [[100 * abs(rate["rate"] - rate[side]) for rate in rates] for side in ("low", "high")]
    right.errorbar(minutes, [100 * rate["rate"] for rate in rates], spread, marker="o", capsize=3)
    right.set(xlabel="minutes of training", ylabel="success (%), 95 % interval", ylim=(0, 102))
    figure.savefig(drawing.out, dpi=120)
    points = [{"minutes": m, **r} for m, r in zip(minutes, rates, strict=True)]
    for point in points:
        print(f"{point['minutes']:5.1f} min  {point['rate']:.1%}  ({point['low']:.1%} to {point['high']:.1%})")
    print(json.dumps({"script": "draw_learning", "file": str(drawing.out), "points": points}))


if __name__ == "__main__":
    main(tyro.cli(Drawing, description=__doc__))
