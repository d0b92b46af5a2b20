"""One page of everything that was measured in a folder: success, roll-outs, learning curve, latency, machine.

Result files come in; out comes one HTML file with everything inside it, which opens without a network. What was not
measured is said on the page, with the command that measures it.
"""

import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jinja2
import matplotlib
import tyro
from matplotlib.figure import Figure

from robotattn import assets, latency_page
from robotattn.config import UsageError
from robotattn.latency_page import inlined

SCHEMAS = {"evaluation": 1, "profile": 2, "sweep_result": 1}
METRICS = "metrics.jsonl"
NOT_RESULTS = {"checkpoint", "snapshots"}  # folders inside a run that hold weights
VIDEO_BYTES = 8_000_000  # videos are put into the page up to this size in all, filmstrips always
COLOURS = ("#1f5f8b", "#c8553d", "#588157", "#7b5ea7", "#b08900", "#5c6b73")


@dataclass(frozen=True)
class ReportConfig:
    """Make one page of the results in a folder."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folders that hold results, at any depth."""
    out: Path | None = None
    """The page; default: report.html in the (first) folder."""

    def __post_init__(self) -> None:
        if not self.folders:
            raise ValueError("folders: give at least one folder of results")


@dataclass
class Run:
    """The results of one folder. notes: what is wrong with a file here."""

    name: str
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    sweeps: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def report(config: ReportConfig) -> Path:
    """Write the page and return its path; raises UsageError for a folder that does not exist."""
    for folder in config.folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; allowed is a folder with results")
    out = config.out or config.folders[0] / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.{os.getpid()}.part")
    partial.write_text(render(gather(config.folders)), encoding="utf-8")
    partial.replace(out)
    return out


def gather(folders: Sequence[Path]) -> list[Run]:
    """Read every result below these folders; one run for each folder that holds any."""
    runs: dict[Path, Run] = {}
    for top in folders:
        for path in sorted([*top.rglob("*.json"), *top.rglob(METRICS)]):
            inside = path.relative_to(top).parts[:-1]
            if not NOT_RESULTS.intersection(inside):
                name = "/".join(inside) or top.resolve().name
                _read(path, runs.setdefault(path.parent, Run(name)))
    return [run for run in runs.values() if any((run.evaluations, run.profiles, run.sweeps, run.metrics, run.notes))]


def _read(path: Path, run: Run) -> None:
    try:
        if path.name == METRICS:
            run.metrics = _lines(path)
            return
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        run.notes.append(f"{path.name} cannot be read: {error}")
        return
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in SCHEMAS:
        return  # some other JSON file
    if data.get("schema") != SCHEMAS[kind]:
        run.notes.append(f"{path.name} has schema {data.get('schema')}, this program reads {SCHEMAS[kind]}")
        return
    results = {"evaluation": run.evaluations, "profile": run.profiles, "sweep_result": run.sweeps}[kind]
    results.append(data | {"file": path})


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a run that is being written may end in half a line."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return [line for line in lines if isinstance(line, dict)]


def render(runs: Sequence[Run]) -> str:
    """The page as HTML text."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"percent": _percent, "acted": _acted}
    template = environment.from_string(assets.path("report.html.j2").read_text(encoding="utf-8"))
    budget = [VIDEO_BYTES]
    return template.render(
        runs=runs,
        films=[film for run in runs for evaluation in run.evaluations for film in _films(run, evaluation, budget)],
        curves=_curves(runs),
        machines=_machines(runs),
        latencies=[latency_page.profiled(run.name, profile) for run in runs for profile in run.profiles],
        sweeps=[latency_page.swept(run.name, sweep) for run in runs for sweep in run.sweeps],
        beside=latency_page.beside([profile for run in runs for profile in run.profiles]),
    )


def _acted(evaluation: Mapping[str, Any]) -> str:
    """What an evaluation did differently from the default, in a few words."""
    config = evaluation["config"]
    usual = {"execute": 1, "ensemble": None, "objects": None, "other": False, "hz": None, "phrases": None}
    usual |= dict.fromkeys(("yaw", "light", "colour_jitter", "camera_jitter", "texture", "language"))
    changed = [f"{name} {config[name]}" for name in usual if config.get(name, usual[name]) != usual[name]]
    return ", ".join([str(config["agent"]), *changed])


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _films(run: Run, evaluation: Mapping[str, Any], budget: list[int]) -> list[dict[str, Any]]:
    """An evaluation's roll-outs with their pictures inlined; a missing file is None."""
    folder, films = evaluation["file"].parent, []
    for film in evaluation["videos"]:
        movie = inlined(folder / film["video"], "video/mp4", budget[0])
        budget[0] -= (folder / film["video"]).stat().st_size if movie else 0
        strip = inlined(folder / film["filmstrip"], "image/png")
        films.append(film | {"run": run.name, "agent": _acted(evaluation), "movie": movie, "strip": strip})
    return films


def _curves(runs: Sequence[Run]) -> list[dict[str, str]]:
    """One drawing for each kind of number that the metrics files hold: all runs in it."""
    drawn = []
    for key, label in (("loss", "training loss"), ("position_error", "target position error (m)")):
        lines = {run.name: _points(run.metrics, key) for run in runs}
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            drawn.append({"label": label, "svg": draw_curves(lines, label)})
    return drawn


def _points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(minutes, value) of the lines with a finite, positive value (the axis is logarithmic)."""
    found = [(line.get("minutes"), line.get(key)) for line in metrics]
    numbers = [(x, y) for x, y in found if isinstance(x, int | float) and isinstance(y, int | float)]
    return [(x, y) for x, y in numbers if math.isfinite(x) and 0 < y < math.inf]


def draw_curves(lines: Mapping[str, Sequence[tuple[float, float]]], label: str) -> str:
    """Draw name → points as SVG text that can stand inside HTML: no document head, no outside names."""
    with matplotlib.rc_context({"svg.hashsalt": "robotattn", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for (name, points), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, linewidth=1.4, label=name, marker="o" if len(x) == 1 else None)
        axes.set(yscale="log", xlabel="minutes of training", ylabel=label)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)


def _machines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Where each result was measured."""
    found = []
    for run in runs:
        for evaluation in run.evaluations:
            found.append({"result": f"{run.name}: evaluation", **_facts(evaluation["machine"])})
        for profile in run.profiles:
            found.append({"result": f"{run.name}: profile", **_facts(profile["environment"])})
    return found


def _facts(machine: Mapping[str, Any]) -> dict[str, Any]:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    device = machine["device"] if machine["device"] != "cpu" else machine.get("cpu", "cpu")
    renderer = machine.get("renderer", "none")
    return {"device": device, "threads": machine["torch_threads"], "renderer": renderer, "versions": versions}
