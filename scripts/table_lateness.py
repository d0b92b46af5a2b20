"""Lay a frontier out as tables, a picture and one line an episode: success against latency, a line for each handling.

    robotattn frontier runs/lateness/*/ --late hold naive skip-executed ensemble real-time --execute 8 \
        --devices fixed:0ms fixed:100ms fixed:200ms fixed:300ms fixed:400ms lognormal:166ms:280ms \
        --episodes 100 --out runs/lateness_frontier
    python scripts/table_lateness.py --frontier runs/lateness_frontier --out results/lateness

Several frontiers go into one table; a policy of one that names a task is called after it, too.
Writes lateness.md (success within 6 s / within 3 s / at the first try, of all episodes), lateness.png and episodes.csv.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import tyro
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from robotattn.statistics import paired_difference, wilson

COLOURS = {
    "hold": "#bbbbbb",
    "naive": "#ee6677",
    "skip": "#ccbb44",
    "skip-executed": "#228833",
    "continue": "#66ccee",
    "queue": "#aa3377",
    "ensemble": "#4477aa",
    "real-time": "#000000",
}
SCORES = ("success", "success_within_3_s", "success_at_first_try")
Row = Mapping[str, Any]


def main(frontier: tuple[Path, ...] = (Path("runs/lateness_frontier"),), out: Path = Path("results/lateness")) -> None:
    """Write the tables, the picture and the episodes.

    Args:
        frontier: Folders of `robotattn frontier`.
        out: Where they go.
    """
    rows, cells = list[dict[str, Any]](), dict[str, Sequence[Row]]()
    for folder in frontier:
        for row, episodes in read(folder):
            rows.append(row)
            cells[row["cell"]] = episodes
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["\n".join(table(rows)), "", "\n".join(recovered(rows, cells)), ""])
    (out / "lateness.md").write_text(text, encoding="utf-8")
    draw(rows, out / "lateness.png")
    write_episodes(cells, out / "episodes.csv")
    print(text)
    print(json.dumps({"script": "table_lateness", "cells": len(rows), "out": str(out)}))


def read(folder: Path) -> Iterator[tuple[dict[str, Any], Sequence[Row]]]:
    """Each row of a frontier and the episodes of its cell, named after the task where the frontier names one."""
    found = json.loads((folder / "frontier.json").read_text(encoding="utf-8"))
    task = found["config"]["task"]
    for row in found["rows"]:
        episodes = json.loads((folder / row["file"]).read_text(encoding="utf-8"))["rows"]
        if task is not None:
            row |= {name: f"{task}-{row[name]}" for name in ("policy", "cell")}
        yield row, episodes


def table(rows: Sequence[Row]) -> list[str]:
    """One line a policy and handling, one column a device: success within 6 s / within 3 s / at the first try (%)."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    lines = [f"| policy | handling | {' | '.join(devices)} |", f"|---|---|{'---|' * len(devices)}"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        for late in dict.fromkeys(row["late"] for row in rows if row["policy"] == policy):
            found = {row["device"]: row for row in rows if (row["policy"], row["late"]) == (policy, late)}
            lines.append(f"| {policy} | {late} | {' | '.join(cell(found.get(device)) for device in devices)} |")
    return lines


def cell(row: Row | None) -> str:
    """The three rates of a cell, in per cent."""
    return " / ".join(f"{100 * row[score]['rate']:.0f}" for score in SCORES) if row else ""


def recovered(rows: Sequence[Row], cells: Mapping[str, Sequence[Row]]) -> list[str]:
    """How much of what `hold` loses against no latency another handling wins back, within 3 s, paired."""
    lines = ["Against `hold` under the same latency, success within 3 s, paired, 95 % interval:", ""]
    lines += ["| policy | latency | hold | handling | difference | of what hold lost |", "|---|---|---|---|---|---|"]
    at = {(row["policy"], row["late"], row["device"]): row for row in rows}
    for (policy, late, device), row in at.items():
        hold, free = at.get((policy, "hold", device)), at.get((policy, "hold", "fixed:0ms"))
        if late == "hold" or row["zero"] or hold is None or free is None:
            continue
        a, b = soon(cells[hold["cell"]]), soon(cells[row["cell"]])
        lost = sum(soon(cells[free["cell"]]).values()) - sum(a.values())
        pairs = paired_difference([a[seed] for seed in b], list(b.values()))
        won = sum(b.values()) - sum(a.values())
        share = "nothing lost" if lost <= 0 else f"{won / lost:.0%}" if won > 0 else "nothing"
        shown = f"{100 * pairs.difference:+.0f} [{100 * pairs.low:+.0f}, {100 * pairs.high:+.0f}]"
        lines.append(f"| {policy} | {device} | {sum(a.values())} | {late} | {shown} | {share} |")
    return lines


def soon(episodes: Sequence[Row], within: float = 3.0) -> dict[int, bool]:
    """Of each seed: whether it succeeded in that time."""
    return {one["seed"]: bool(one["success"] and one["time"] <= within) for one in episodes}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Success within 3 s against fixed latencies: a panel a policy, a line a handling, bands of 95 %."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    down = -(-len(policies) // 4)
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(14, 3.4 * down), layout="constrained")
        axes = figure.subplots(down, min(4, len(policies)), sharex=True, sharey=True, squeeze=False)
        for one, policy in zip(axes.flat, policies, strict=False):
            _panel(one, [row for row in rows if row["policy"] == policy and row["device"].startswith("fixed:")])
            one.set_title(policy)
        shown = [name for name in COLOURS if any(row["late"] == name for row in rows)]
        lines = [Line2D([], [], marker="o", markersize=4, color=COLOURS[name], label=name) for name in shown]
        axes.flat[0].legend(handles=lines, frameon=False, fontsize=8)
        figure.supxlabel("latency of every inference (ms)")
        figure.supylabel("success within 3 s (%), 95 % interval")
        figure.savefig(path, dpi=100)


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    for late in dict.fromkeys(row["late"] for row in rows):
        found = sorted((row["latency_ms"]["p50"], row["success_within_3_s"]) for row in rows if row["late"] == late)
        x, y = [point for point, _ in found], [100 * rate["rate"] for _, rate in found]
        ends = [wilson(rate["successes"], rate["episodes"]) for _, rate in found]
        low, high = [100 * end.low for end in ends], [100 * end.high for end in ends]
        axes.plot(x, y, marker="o", markersize=4, color=COLOURS[late], label=late)
        axes.fill_between(x, low, high, color=COLOURS[late], alpha=0.12, linewidth=0)
    axes.set(ylim=(-3, 103))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def write_episodes(cells: Mapping[str, Sequence[Row]], path: Path) -> None:
    """One line an episode: its cell, its seed, what came of it, when, and after how many tries."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("cell", "seed", "success", "time_s", "tries"))
        for name, episodes in cells.items():
            writer.writerows((name, one["seed"], int(one["success"]), one["time"], one["tries"]) for one in episodes)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
