"""The commands that ask how long a policy takes: `profile --sweep`, `plan`, `compare`; a table and JSON come out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from robotattn.console import Progress, finish, table, warn
from robotattn.flags import parse

SLOW = 1.1  # times the usual: something else was running
SHOWN = 40  # rows of a table on the screen; the JSON has all


def sweep(arguments: list[str]) -> int:
    """Time a grid of policies: robotattn profile [CONFIG] --sweep cameras=1:4 patch=8,16 policy=act,blockwise."""
    from robotattn.latency.sweep import SweepConfig
    from robotattn.latency.sweep import sweep as run

    config = parse(SweepConfig, based(arguments), sweep)
    with Progress() as shown:
        result = run(config, shown)
    warn([*result["failed"], *(f"left out: {reason}" for reason in result["left_out"])])
    warn(f"{what}: {why}" for what, why in result["refused"].items())
    if result["pace"][1] > SLOW:
        warn(
            [f"the machine's pace varied by a factor of {result['pace'][1] / result['pace'][0]:.2f}; p50 allows for it"]
        )
    budget_table(result["budgets"])
    titles = ("", "n", "R2 held out", "median error", "largest error")
    short = {name: result[name] for name in ("points", "missing", "failed", "left_out", "pooled", "calibration")}
    return finish("sweep", {"folder": str(config.out), **short}, list(_fits(result)), titles)


def _fits(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The fitted lines, all kinds together, and the calibrated model: how wrong each is on held-out points."""
    rows: list[tuple[Any, ...]] = []
    for statistic, found in result["fits"].items():
        rows += [
            (f"{statistic} line, {name}", fit["n"], fit["r2_held_out"], f"{fit['error']:.1%}", f"{fit['worst']:.1%}")
            for name, fit in found.items()
        ]
    rows += [_agreement(f"{statistic} lines, all", found) for statistic, found in result["pooled"].items()]
    for mode, found in result["calibration"].items():
        rows.append(_agreement(f"p50 calibrated, all {mode}", found["held_out"]))
        rows += [_agreement(f"p50 calibrated, {kind} {mode}", one) for kind, one in found["by_kind"].items()]
    return rows


def _agreement(name: str, found: Mapping[str, float]) -> tuple[Any, ...]:
    return name, found["n"], found["r2"], f"{found['error']:.1%}", f"{found['worst']:.1%}"


def plan(arguments: list[str]) -> int:
    """Predict which policies fit a control rate: robotattn plan [CONFIG] --hz 50 --device h200 [--calibrate FILE]."""
    from robotattn.latency.plan import PlanConfig
    from robotattn.latency.plan import plan as run

    config = parse(PlanConfig, based(arguments), plan)
    result = run(config)
    warn(f"left out: {reason}" for reason in result["left_out"])
    budget_table(result["budgets"])
    same, name = _names(row["label"] for row in result["rows"])
    changes = [
        (name(row["of"]), row["change"], f"{row['p50']:.3g}{'°' if row['beyond'] else ''}", f"{row['share']:+.0%}")
        for row in result["changes"]
    ]
    table(
        "what to change first (predicted; ° beyond what the model was fitted to)",
        changes,
        ("configuration", "one change", "p50 (ms)", "saves"),
    )
    best = sorted(result["rows"], key=lambda row: (not row["front"], row["p50"]))[:SHOWN]
    rows = [(f"{'* ' if row['front'] else '  '}{name(row['label'])}", *_planned(row)) for row in best]
    title = f"{result['hz']:g} Hz leave {result['budget_ms']:.4g} ms {same}; every time is {result['predicted']}"
    worth = "success" if config.success else "tokens"
    table(title, rows, ("* = Pareto front", worth, "KV (KiB)", "p50 (ms)", "p99", "fits"))
    fitting = sum(row["fits"] == "yes" for row in result["rows"])
    summary = [("configurations", len(result["rows"])), ("fit", fitting), ("device", result["device"])]
    return finish("plan", result, summary)


def _names(labels: Iterable[str]) -> tuple[str, Callable[[str], str]]:
    """What all labels say, and a function that gives what one says beside that."""
    words = [label.split() for label in labels]
    shared = [word for word in words[0] if all(word in one for one in words)] if len(words) > 1 else []
    short = {" ".join(one): " ".join(word for word in one if word not in shared) for one in words}
    return f"({' '.join(shared)})" if shared else "", lambda label: short.get(label) or label


def _planned(row: Mapping[str, Any]) -> tuple[Any, ...]:
    p50 = f"{row['p50']:.3g}{'°' if row['beyond'] else ''} ({row['low']:.3g} to {row['high']:.3g})"
    p99 = "" if row["p99"] is None else f"{row['p99']:.3g}"
    return row.get("success", row["tokens"]), f"{row['kv_bytes'] / 1024:.0f}", p50, p99, row["fits"]


def budget_table(budgets: Sequence[Mapping[str, Any]]) -> None:
    """Print the headline table: the most tokens, and the most cameras of so many tokens each, at every rate."""
    if not budgets:
        return
    rows = []
    for row in budgets:
        tokens = "any" if row["tokens"] is None else f"{row['tokens']}{'*' if row['extrapolated'] else ''}"
        cameras = ", ".join(f"{'any' if n is None else n} of {size}" for size, n in row["cameras"].items())
        rows.append((f"{row['kind']} {row['mode']}", row["statistic"], row["hz"], tokens, cameras, row["r2_held_out"]))
    titles = ("", "within", "Hz", "prefix tokens", "cameras of n tokens", "R2 held out")
    table("largest budgets, by the fitted line (predicted; * beyond what was measured)", rows, titles)


def compare(arguments: list[str]) -> int:
    """Compare two evaluations, profiles or traces: robotattn compare A.json B.json; exit code 1 is a regression."""
    from robotattn.compare import CompareConfig
    from robotattn.compare import compare as run

    config = parse(CompareConfig, arguments, compare)
    result = run(config)
    warn([*result["differs"], *result["notes"][:SHOWN]])
    rows = [
        (row["quantity"], *(row.get(name, "") for name in ("a", "b", "change", "low", "high")), row["verdict"])
        for row in result["rows"]
    ]
    change = "B - A" if result["kind"] == "evaluation" else "B / A"
    finish("compare", result, rows, ("", "A", "B", change, "95 % from", "to", "verdict"))
    return 1 if result["regression"] else 0


def based(arguments: list[str]) -> list[str]:
    """Read `CONFIG ...` as `--base CONFIG ...`."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    return ["--base", *arguments]
