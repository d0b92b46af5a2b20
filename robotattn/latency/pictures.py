"""The picture of a profile: how times are distributed against the budget, where a step goes, how late ticks begin."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

COLOURS = ("#1f5f8b", "#c8553d", "#588157", "#7b5ea7", "#b08900", "#5c6b73", "#2a9d8f", "#d4a373", "#8d99ae", "#6d597a")
BUDGET = "#8a1c1c"


def draw(result: Mapping[str, Any], services: Mapping[str, Sequence[int]], responses: Sequence[int] = ()) -> str | None:
    """Draw a profile as SVG text; None where matplotlib is not installed.

    services: name of a run → its service times (ns). responses: of the paced run, from the schedule (ns).
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return None
    jitter = (result["paced"] or {}).get("jitter")
    with matplotlib.rc_context({"svg.hashsalt": "robotattn", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(11.0, 3.4), layout="constrained")
        left, middle, *right = figure.subplots(1, 3 if jitter else 2, width_ratios=(5, 3, 3) if jitter else (5, 3))
        _distribution(left, services, responses, (result["verdict"] or {}).get("budget_ms"))
        _stages(middle, result)
        if jitter:
            _jitter(right[0], jitter)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return re.sub(r"<metadata>.*?</metadata>\s*", "", buffer.getvalue(), flags=re.DOTALL)


def _distribution(
    axes: Any, services: Mapping[str, Sequence[int]], responses: Sequence[int], budget: float | None
) -> None:
    """Draw the share of steps that take longer than a time, so that the tail is what is seen."""
    lines = {f"service, {name}": times for name, times in services.items()}
    if len(responses):
        lines["response to the schedule"] = responses
    for (name, times), colour in zip(lines.items(), COLOURS, strict=False):
        milliseconds = np.sort(np.asarray(times, np.float64)) / 1e6
        longer = 1.0 - np.arange(len(milliseconds)) / len(milliseconds)  # at least as long as this one
        axes.step(milliseconds, longer, where="pre", color=colour, linewidth=1.4, label=name)
    if budget is not None:
        axes.axvline(budget, color=BUDGET, linewidth=1.2, linestyle="--", label=f"budget {budget:.4g} ms")
    axes.set(xscale="log", yscale="log", xlabel="milliseconds", ylabel="share of steps that take longer")
    ticks = [1.0, 0.1, 0.01, 0.001]
    axes.set_yticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
    axes.set_ylim(0.8 / max(len(times) for times in lines.values()), 1.15)
    _marks(axes, *axes.get_xlim())
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)


def _stages(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw the median of each stage as a bar, with its floor as a mark."""
    names = list(result["stages"])
    times = [_middle(result["stages"][name]) for name in names]
    places = range(len(names))
    axes.barh(places, times, color=[COLOURS[k % len(COLOURS)] for k in places], height=0.65)
    floors = [(k, result["bounds"]["stages"].get(name)) for k, name in enumerate(names)]
    marks = [(bound["floor_ms"], k) for k, bound in floors if bound]
    if marks:
        axes.scatter(*zip(*marks, strict=True), marker="|", s=120, color="#1d2733", label="floor (predicted)", zorder=3)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_yticks(list(places), [name.replace("_", " ") for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds (median)")
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)


def _middle(times: Mapping[str, Any]) -> float:
    return float(times["mean"] if times["p50"] is None else times["p50"])


def _jitter(axes: Any, jitter: Mapping[str, Any]) -> None:
    """Draw how late the loop woke up, in microseconds."""
    counts, edges = np.asarray(jitter["counts"]), np.asarray(jitter["edges"])
    filled = np.flatnonzero(counts)
    first, last = max(int(filled[0]) - 1, 1), min(int(filled[-1]) + 2, len(counts))  # the bin below 1 has no logarithm
    axes.stairs(counts[first:last], edges[first : last + 1], fill=True, color=COLOURS[0])
    axes.set(xlabel="wake-up lateness (microseconds)", ylabel="ticks", xscale="log")
    _marks(axes, edges[first], edges[last])
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)


def _marks(axes: Any, low: float, high: float) -> None:
    """Mark a logarithmic axis with round numbers written out, few enough to be read."""
    steps = (1, 2, 5) if high < 100 * low else (1, 3) if high < 1000 * low else (1,)
    marks = [step * 10.0**power for power in range(-4, 8) for step in steps if low <= step * 10.0**power <= high]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
