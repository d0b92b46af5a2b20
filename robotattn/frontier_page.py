"""The picture and the page of a frontier: success against latency, the joined table, where each figure is from."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from robotattn import assets
from robotattn.checkpoint import replace_file
from robotattn.experiments.drawing import GREY, panels, png
from robotattn.latency.pictures import COLOURS
from robotattn.latency_page import inlined

MARKERS = "osD^vPX*"
INK = "#1d2733"
POLICIES = tuple(colour for colour in COLOURS if colour != GREY)  # grey is what is of no policy
SPREAD = 1.05  # between handlings at one latency, that their intervals do not hide each other
PANELS = (("success", "success within the time limit"), ("success_within_3_s", "success within 3 s"))
FLAGS = ("devices", "late", "execute", "episodes", "seed", "out", "hz", "task", "workers", "minutes")

Row = Mapping[str, Any]


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """Write frontier.png and frontier.html into the folder."""
    picture = png(draw(result["rows"]))
    replace_file(folder / "frontier.png", lambda file: file.write(picture))
    page = render(result, inlined(folder / "frontier.png", "image/png"))
    replace_file(folder / "frontier.html", lambda file: file.write(page.encode()))


# ------------------------------------------------------------------------------------------ picture


def draw(rows: Sequence[Row]) -> Any:
    """Draw success with its interval against p99 latency: colours are policies, marks handlings, lines the fronts."""
    shown = [row for row in rows if row["latency_ms"]["p99"] is not None]
    figure, axes = panels((1, 1), height=5.2, total=13.0)
    place = places(shown)
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        for row in shown:
            _mark(axis, row, key, place[row["cell"]], rows)
        axis.set(xscale="log", title=title, ylabel="% of episodes, 95 % interval")
        axis.set_xlabel("p99 of an inference (ms)")
        _ticks(axis, shown)
        _devices(axis, shown, rows)
    for device in dict.fromkeys(row["device"] for row in shown):
        _front(axes[0], [row for row in shown if row["device"] == device and row["front"]], place)
    _legend(figure, axes[0], rows)
    return figure


def places(rows: Sequence[Row]) -> dict[str, float]:
    """Where each row stands: its p99, handlings of one latency side by side; no latency stands left of all."""
    ways = handlings(rows)
    return {
        row["cell"]: (row["latency_ms"]["p99"] or _left(rows))
        * SPREAD ** (ways.index((row["late"], row["execute"])) - (len(ways) - 1) / 2)
        for row in rows
    }


def _left(rows: Sequence[Row]) -> float:
    """Where 0 ms stands on a logarithmic axis."""
    return min((row["latency_ms"]["p99"] for row in rows if row["latency_ms"]["p99"] > 0), default=1.0) / 4


def handlings(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """The ways in which late chunks are handled, in their order."""
    return list(dict.fromkeys((row["late"], row["execute"]) for row in rows))


def _look(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Colour of the policy, mark of the handling; hollow where more than one action is executed."""
    policies, late = [list(dict.fromkeys(one[key] for one in rows)) for key in ("policy", "late")]
    colour = POLICIES[policies.index(row["policy"]) % len(POLICIES)]
    marker = MARKERS[late.index(row["late"]) % len(MARKERS)]
    return {"color": colour, "marker": marker, "markerfacecolor": colour if row["execute"] == 1 else "white"}


def _mark(axis: Any, row: Row, key: str, x: float, rows: Sequence[Row]) -> None:
    rate = row[key]
    down, up = rate["rate"] - rate["low"], rate["high"] - rate["rate"]
    spans = [[max(0.0, 100 * down)], [max(0.0, 100 * up)]]
    axis.errorbar([x], [100 * rate["rate"]], yerr=spans, markersize=6, linewidth=0.9, **_look(row, rows))


def _ring(axis: Any, x: Sequence[float], y: Sequence[float], **named: Any) -> Any:
    look = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 0.9, "linestyle": "none"}
    return axis.plot(x, y, color=INK, **(look | named))[0]


def _front(axis: Any, rows: Sequence[Row], place: Mapping[str, float]) -> None:
    """Put rings around one device's front, and join them by steps if it is more than a point."""
    for row in rows:
        _ring(axis, [place[row["cell"]]], [100 * row["success"]["rate"]])
    points = sorted({(row["latency_ms"]["p99"], 100 * row["success"]["rate"]) for row in rows})
    if len(points) > 1:
        axis.plot(
            *zip(*points, strict=True), color=GREY, linewidth=1.2, linestyle="--", drawstyle="steps-post", zorder=0
        )


def _ticks(axis: Any, rows: Sequence[Row]) -> None:
    """Round numbers written out, and 0 where no latency stands."""
    times = [row["latency_ms"]["p99"] for row in rows]
    left, most = _left(rows), max([1.0, *times])
    least = min((time for time in times if time > 0), default=1.0)
    marks = [s * 10.0**p for p in range(-3, 5) for s in (1, 3) if least <= s * 10.0**p <= 1.2 * most]
    zero = [left] if 0 in times else []
    axis.set_xticks(zero + marks, ["0"] * len(zero) + [f"{mark:g}" for mark in marks])
    axis.minorticks_off()
    axis.set_xlim((left if zero else least) / 1.6, most * 3)


def _devices(axis: Any, rows: Sequence[Row], every: Sequence[Row]) -> None:
    """Draw a line for each device along the top, with a dot where each policy stands: which is what below."""
    names, left = list(dict.fromkeys(row["device"] for row in rows)), _left(rows)
    for line, device in enumerate(reversed(names)):
        y, mine = 108 + 7 * line, [row for row in rows if row["device"] == device]
        times = [row["latency_ms"]["p99"] or left for row in mine]
        axis.plot([min(times), max(times)], [y, y], color=GREY, linewidth=0.6, zorder=1)
        for row, time in zip(mine, times, strict=True):
            axis.plot([time], [y], marker="o", markersize=3.5, color=_look(row, every)["color"], zorder=2)
        axis.annotate(device, (max(times), y), (6, 0), textcoords="offset points", va="center", fontsize=8, color=GREY)
    axis.set_ylim(-3, 108 + 7 * len(names))
    axis.set_yticks(range(0, 101, 20))


def _legend(figure: Any, axis: Any, rows: Sequence[Row]) -> None:
    """Say what colours, marks and the line are, below both panels."""
    first = {row["policy"]: _look(row, rows)["color"] for row in rows}
    handles = [axis.plot([], [], color=colour, linewidth=3, label=policy)[0] for policy, colour in first.items()]
    for late, execute in handlings(rows):
        row = next(row for row in rows if (row["late"], row["execute"]) == (late, execute))
        look = _look(row, rows) | {"color": GREY, "linestyle": "none"}
        look["markerfacecolor"] = GREY if execute == 1 else "white"
        label = late if execute == 1 else f"{late}, {execute} actions"
        handles.append(axis.plot([], [], label=label, **look)[0])
    handles.append(_ring(axis, [], [], label="front of a device"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, fontsize=8)


# ------------------------------------------------------------------------------------------ page


def render(result: Mapping[str, Any], picture: str | None) -> str:
    """The page as HTML text."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"percent": _percent, "points": _points, "ms": _ms}
    template = environment.from_string(assets.path("frontier.html.j2").read_text(encoding="utf-8"))
    return template.render(result, picture=picture, command=command(result["config"]), origins=origins(result["rows"]))


def origins(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Where the latencies of each policy on each device are from."""
    found = {(row["policy"], row["device"]): row for row in rows}
    return [{"policy": policy, "device": device, **row["latency"]} for (policy, device), row in found.items()]


def command(config: Mapping[str, Any]) -> str:
    """The command that makes this page again."""
    words = ["robotattn", "frontier", *config["checkpoints"]]
    for name in FLAGS:
        if (value := config[name]) is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _points(pairs: Mapping[str, Any] | None) -> str:
    """A paired difference in points with its interval."""
    if pairs is None:
        return ""
    return f"{100 * pairs['difference']:+.0f} ({100 * pairs['low']:+.0f} to {100 * pairs['high']:+.0f})"
