"""A profile as tables of text: the same on a terminal with colours, on a bare machine, and in a page."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = tuple[object, ...]
PERCENTILES = ("p50", "p90", "p99", "max")
NOTHING = "–"


@dataclass(frozen=True)
class Sheet:
    """One table. kind: how its figures were come by: "measured here", "predicted" or "closed form"."""

    title: str
    kind: str
    titles: tuple[str, ...]
    rows: Sequence[Row]

    @property
    def text_columns(self) -> list[bool]:
        """Which columns hold words (to be aligned left) and not numbers."""
        columns = zip(*self.rows, strict=True) if self.rows else ()
        return [any(str(cell)[:1].isalpha() for cell in column) for column in columns] or [True] * len(self.titles)


def first(result: Mapping[str, Any]) -> list[Sheet]:
    """The tables that need no measurement of the policy: cost card and bounds."""
    return [_card(result["card"]), _bounds(result["card"]["work"], result["bounds"])]


def measured(result: Mapping[str, Any]) -> list[Sheet]:
    """The tables of what was measured: stages, modes, attention, and the paced run if there was one."""
    sheets = [_stages(result), _modes(result), _attention(result["attention"])]
    sheets += [_probe(result["chosen"])] if result["chosen"] else []
    return sheets + ([_paced(result["paced"])] if result["paced"] else [])


def verdict(result: Mapping[str, Any]) -> str | None:
    """The verdict in one line; None if no rate was asked for."""
    said = result["verdict"]
    if said is None:
        return None
    word = {True: "PASS", False: "FAIL", None: "UNDECIDED"}[said["pass"]]
    asked = f"{word} at {said['hz']:g} Hz in mode {said['mode']}, budget {said['budget_ms']:.4g} ms"
    if said["miss_bound"] is None:
        return f"{asked}: {said['why']}"
    counted = f"{said['misses']} of {said['ticks']} ticks missed, at most {said['miss_bound']:.2%} with 99 % confidence"
    return f"{asked}: {counted} (limit {said['limit']:.0%})" + (f"; {said['why']}" if said["why"] else "")


def short(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a profile that fit into one line of JSON (ms)."""
    kept = {name: {p: times[p] for p in PERCENTILES} for name, times in result["stages"].items()}
    step = result["step"] and {p: result["step"][p] for p in (*PERCENTILES, "n")}
    card = {name: result["card"][name] for name in ("tokens", "parameters", "kv")}
    return {"step": step, "stages": kept, **card}


def _card(card: Mapping[str, Any]) -> Sheet:
    tokens, kv = card["tokens"], card["kv"]
    rows: list[Row] = [(f"tokens: {name}", count) for name, count in tokens.items()]
    rows += [("parameters", f"{card['parameters']:,}"), ("weights", size(card["weight_bytes"]))]
    rows += [(f"KV bytes: {name.replace('_', ' ')}", size(count)) for name, count in kv.items()]
    flops = sum(work["flops"] * work["repeats"] for work in card["work"].values())
    return Sheet("cost card", "closed form", ("", ""), [*rows, ("FLOPs a step", f"{flops:,}")])


def _bounds(work: Mapping[str, Any], bounds: Mapping[str, Any]) -> Sheet:
    device, rows = bounds["device"], list[Row]()
    for name, bound in bounds["stages"].items():
        one = work.get(name)
        counts = (
            (number(one["flops"] / 1e6), size(one["weight_bytes"]), f"{one['kernels']} x {one['repeats']}")
            if one
            else (NOTHING, NOTHING, NOTHING)
        )
        times = (bound[f"{kind}_ms"] for kind in ("compute", "bandwidth", "roofline", "launch", "floor"))
        rows.append((name, *counts, *(number(time) for time in times), bound["label"]))
    here = "probed here" if device["measured"] else "from data sheets"
    title = (
        f"bounds on {device['name']} ({here}: {device['bandwidth'] / 1e9:.3g} GB/s, "
        f"{device['flops']['float32'] / 1e9:.4g} GFLOP/s float32, {1e6 * device['launch']:.3g} us a launch)"
    )
    titles = ("stage", "MFLOP", "weights", "kernels x repeats", "compute", "bandwidth", "roofline", "launch", "floor")
    return Sheet(title, "predicted", (*titles, "bound by"), rows)


def _stages(result: Mapping[str, Any]) -> Sheet:
    bounds, rows = result["bounds"]["stages"], list[Row]()
    for name, times in result["stages"].items():
        share = f"{result['shares'][name]:.1%}"
        rows.append((name, *_times(times), share, *_against(bounds.get(name))))
    once = result["pass"]
    if once["n"] and once["each_step"] > 1:
        rows.append((f"each of {once['each_step']} passes", *_times(once), "", *_against(None)))
    rows.append(
        ("sum of stages", *_times(result["staged"]), f"{1 - result['shares']['unaccounted']:.1%}", "", "", "", "")
    )
    if result["step"]:
        rows.append((f"whole step ({result['mode']})", *_times(result["step"]), "", *_against(bounds.get("step"))))
    titles = ("stage", *(f"{name} ms" for name in PERCENTILES), "n", "share", "floor ms", "MBU", "MFU", "bound by")
    return Sheet("a control step", "measured here", titles, rows)


def _times(times: Mapping[str, Any]) -> Row:
    return (*(number(times[name]) for name in PERCENTILES), times["n"])


def _against(bound: Mapping[str, Any] | None) -> Row:
    """Floor, MBU, MFU and label of a stage."""
    if bound is None:
        return ("", "", "", "")
    shares = (f"{bound[name]:.1%}" if bound.get(name) is not None else "" for name in ("mbu", "mfu"))
    return (number(bound["floor_ms"]), *shares, bound.get("bound_by", ""))


def _modes(result: Mapping[str, Any]) -> Sheet:
    eager, rows = (result["modes"].get("eager") or {}).get("step"), list[Row]()
    for name, mode in result["modes"].items():
        parity, step = mode["parity"] or {}, mode["step"] or {}
        ratio = f"{eager['p50'] / step['p50']:.2f}x" if eager and step.get("p50") and eager["p50"] else ""
        same = [parity.get("gripper"), parity.get("bins")]
        agreement = " / ".join(f"{share:.1%}" for share in same if share is not None)
        errors = (number(parity.get("error")), number(parity.get("relative")), agreement)
        times = (number(step.get(percentile)) for percentile in ("p50", "p99", "max"))
        rows.append((name, *times, ratio, *errors, mode["refused"] or "ok"))
    titles = ("mode", "p50 ms", "p99 ms", "max ms", "to eager", "action error", "in s.d.", "gripper / bins same", "")
    return Sheet("ways to run it", "measured here", titles, rows)


def _attention(audit: Sequence[Mapping[str, Any]]) -> Sheet:
    """One row for the same call in every layer of a stack."""
    found: dict[Row, int] = {}
    for row in audit:
        keys = str(row["kv"]) if row["kv"] == row["kv_least"] else f"{row['kv_least']} to {row['kv']}"
        mask = row["mask"] if not isinstance(row["mask"], list) else " x ".join(map(str, row["mask"]))
        site = re.sub(r"\.\d+\.", ".*.", row["site"])
        key = (row["mode"], site, row["backend"], row["dtype"], row["q"], keys, mask or "none", row["calls"])
        found[key] = found.get(key, 0) + 1
    titles = ("mode", "site", "backend", "type", "queries", "keys", "mask", "calls", "layers")
    return Sheet("which attention ran", "measured here", titles, [(*key, count) for key, count in found.items()])


def _probe(chosen: Mapping[str, Any]) -> Sheet:
    """What the start-up probe tried."""
    rows: list[Row] = []
    for one in chosen["candidates"]:
        way, default = (one["threads"], one["kernel"]), chosen["default"]
        marks = ["chosen"] if way == (chosen["threads"], chosen["kernel"]) else []
        marks += ["default of PyTorch"] if way == (default["threads"], default["kernel"]) else []
        marks += ["other actions, refused"] if one["p50_ms"] is None else []
        rows.append((str(one["threads"]), one["kernel"], number(one["p50_ms"]), ", ".join(marks)))
    return Sheet("start-up probe", "measured here", ("threads", "attention kernel", "policy p50 ms", ""), rows)


def _paced(paced: Mapping[str, Any]) -> Sheet:
    rows: list[Row] = [
        (name, *(number(paced[part][percentile]) for percentile in PERCENTILES), paced[part]["n"])
        for name, part in (("service time", "service"), ("response to the schedule", "response"))
    ]
    jitter = paced["jitter"]
    if jitter:
        rows.append(
            ("wake-up lateness (mean)", number(jitter["mean"] / 1e3), "", "", number(jitter["max"] / 1e3), jitter["n"])
        )
    missed = f"{paced['misses']} misses, {paced['longest_run']} in a row at most"
    title = f"paced at {paced['hz']:g} Hz: {missed}, drift {1e6 * paced['drift']:.3g} ppm"
    return Sheet(title, "measured here", ("", *(f"{name} ms" for name in PERCENTILES), "n"), rows)


def number(value: float | None) -> str:
    """A number with four digits; a dash for none."""
    return NOTHING if value is None else f"{value:.4g}"


def size(count: int) -> str:
    """Bytes with a unit."""
    if count < 10_000:
        return f"{count} B"
    return f"{count / 1e3:.4g} kB" if count < 1e6 else f"{count / 1e6:.4g} MB"


def text(sheets: Iterable[Sheet]) -> str:
    """Tables in plain text, an empty line after each: too wide for a drawn table on a common terminal."""
    return "".join(f"{plain(sheet)}\n\n" for sheet in sheets).removesuffix("\n")


def plain(sheet: Sheet) -> str:
    """A table in plain text, columns aligned with spaces."""
    rows = [tuple(map(str, row)) for row in (sheet.titles, *sheet.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(sheet.titles))]
    lines = [_aligned(row, widths, sheet.text_columns) for row in rows]
    head = [] if not any(sheet.titles) else [lines[0]]
    return "\n".join([f"{sheet.title} [{sheet.kind}]", *head, *lines[1:]])


def _aligned(row: Iterable[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    cells = zip(row, widths, left, strict=True)
    return ("  " + "  ".join(c.ljust(width) if text else c.rjust(width) for c, width, text in cells)).rstrip()
