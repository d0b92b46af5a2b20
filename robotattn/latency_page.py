"""The latency part of the report: profiles and sweeps as what the page shows, and what others have published."""

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from robotattn.latency import tables
from robotattn.latency.pictures import COLOURS
from robotattn.latency.published import PUBLISHED
from robotattn.latency.tables import Sheet, number

NARROW = 5
ONCE = ("import_ms", "load_ms", "build_ms")
OUTCOME = {True: "pass", False: "fail", None: "undecided"}


def profiled(run: str, profile: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of one profile."""
    file, said = profile["file"], profile["verdict"]
    sheets = [*tables.first(profile), *tables.measured(profile)]
    shares = {name: share for name, share in profile["shares"].items() if name in profile["stages"]}
    return {
        "title": run if file.name == "profile.json" else f"{run}: {file.stem}",
        "target": profile["name"],
        "facts": _facts(profile),
        "verdict": tables.verdict(profile),
        "outcome": OUTCOME[said["pass"]] if said else "",
        "rated": said is not None,
        "warnings": profile["warnings"],
        "picture": inlined(file.parent / profile["picture"], "image/svg+xml") if profile["picture"] else None,
        "drawn": profile["picture"],
        "sheets": sorted(sheets, key=lambda sheet: len(sheet.titles) >= NARROW),  # the narrow ones side by side
        "shares": shares,
        "colours": COLOURS,  # of the picture
        "notes": _notes(profile),
    }


def swept(run: str, sweep: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of one sweep."""
    picture = sweep["file"].with_suffix(".png")
    rows = [_budget(row) for row in sweep["budgets"]]
    titles = ("policy and mode", "within", "Hz", "prefix tokens at most", "cameras of n tokens at most")
    fits = [
        (f"{statistic}, {name}", fit["n"], number(fit["r2_held_out"]), f"{fit['error']:.1%}")
        for statistic, found in sweep["fits"].items()
        for name, fit in found.items()
    ]
    return {
        "title": f"{run}: sweep",
        "picture": inlined(picture, "image/png"),
        "sheets": [
            Sheet(
                "what fits a control rate, by the fitted line (* beyond what was measured)", "predicted", titles, rows
            ),
            Sheet("fitted lines", "measured here", ("", "points", "R2 held out", "median error"), fits),
        ],
    }


def _budget(row: Mapping[str, Any]) -> tables.Row:
    tokens = "any" if row["tokens"] is None else f"{row['tokens']}{'*' if row['extrapolated'] else ''}"
    cameras = ", ".join(f"{'any' if n is None else n} of {size}" for size, n in row["cameras"].items())
    return f"{row['kind']} {row['mode']}", row["statistic"], f"{row['hz']:g}", tokens, cameras


def beside(profiles: Sequence[Mapping[str, Any]]) -> Sheet | None:
    """Our measured and predicted steps beside published latencies, each labelled; None without a profile."""
    if not profiles:
        return None
    rows: list[tables.Row] = []
    for profile in profiles:
        name, device, mode = profile["name"], _device(profile["environment"]), profile["mode"]
        if profile["step"]:
            rows.append(
                (name, device, number(profile["step"]["p50"]), "measured here", f"p50 of a control step, {mode}")
            )
        floor = profile["bounds"]["stages"]["step"]["floor_ms"]
        rows.append((name, device, number(floor), "predicted", "closed form, float32 eager: at least this"))
    rows += [(p.name, p.device, number(p.ms), "published", f"{p.what}; {p.source}") for p in PUBLISHED]
    return Sheet("latency of a step or chunk", "each labelled", ("policy", "device", "ms", "", "what"), rows)


def inlined(path: Path, kind: str, most: float = math.inf) -> str | None:
    """A file as a data URL; None if it is not there or is larger than `most` bytes."""
    if not path.is_file() or path.stat().st_size > most:
        return None
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _facts(profile: Mapping[str, Any]) -> str:
    machine, config = profile["environment"], profile["config"]
    threads = machine["torch_threads"]
    how = f"{threads} thread{'' if threads == 1 else 's'}, batch {config['batch']}"
    weights = "random weights" if profile["fingerprint"] is None else "a trained checkpoint"
    return f"{profile['card']['parameters']:,} parameters ({weights}) on {_device(machine)}, {how}."


def _device(machine: Mapping[str, Any]) -> str:
    return str(machine["cpu"] if machine["device"] == "cpu" else machine["device"])


def _notes(profile: Mapping[str, Any]) -> list[str]:
    """How it was measured, what percentiles were refused, and what happened once."""
    cold, unaccounted = profile["cold_start"], profile["shares"]["unaccounted"]
    notes = [
        f"Clock: {profile['clock']}. Stages are timed one by one and the whole step by itself, in turn; "
        f"{unaccounted:.1%} of the staged step belongs to no stage. Graphs compiled: {profile['recompiles']}.",
    ]
    refused = (profile["step"] or {}).get("refused") or {}
    if refused:
        notes.append(
            "A dash means too few samples: " + "; ".join(f"{name} {why}" for name, why in refused.items()) + "."
        )
    once = ", ".join(f"{name.removesuffix('_ms')} {number(cold[name])} ms" for name in ONCE if name in cold)
    calls = ", ".join(number(ms) for ms in cold["first_calls_ms"])
    warm = f"{cold['warm_up_calls']} calls of warm-up{'' if cold['steady'] else ', which did not settle'}"
    notes.append(f"Apart from these: {once}; first calls {calls} ms; {warm}.")
    return notes
