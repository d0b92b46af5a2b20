"""The command that joins success and latency: `robotattn frontier`; tables, a picture, a page and JSON come out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from robotattn.console import Progress, finish, table, warn
from robotattn.flags import find, parse

SIGNS = {"measured": "", "predicted": "°", "assumed": "'"}
"""After a latency: ° predicted, at least this; ' assumed."""
LATENCY = "p50, p99 ms (° predicted, ' assumed)"
TITLES = ("* = front", LATENCY, "late", "success", "3 s", "1st", "s", "missed", "age, p95", "held", "against 0 ms")


def frontier(arguments: list[str]) -> int:
    """Join success, tokens and latency in one table: robotattn frontier CHECKPOINT ... --devices h200 fixed:80ms."""
    from robotattn.frontier import frontier as run
    from robotattn.frontier_cells import FrontierConfig

    config = parse(FrontierConfig, arguments, frontier)
    config = replace(config, checkpoints=tuple(find(str(one), "assets/checkpoints") for one in config.checkpoints))
    with Progress() as shown:
        result = run(config, shown)
    warn(f"left out: {reason}" for reason in result["left_out"])
    warn(result["warnings"])
    missing = result["missing"]
    warn([f"{len(missing)} cells are not there yet ({missing[0]} ...); the same command goes on"] if missing else [])
    rows = result["rows"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        table(costs(mine[0]), [outcome(row) for row in mine], TITLES)
    short: dict[str, Any] = {"file": str(config.out / "frontier.json"), "page": str(config.out / "frontier.html")}
    short |= {name: result[name] for name in ("left_out", "missing", "cells")}
    short["front"] = [row["cell"] for row in rows if row["front"]]
    done = f"{len(rows)} of {len(rows) + len(result['missing'])}, {result['cells']['run']} of them run now"
    return finish("frontier", short, [("cells", done), ("file", short["file"]), ("page", short["page"])])


def costs(row: Mapping[str, Any]) -> str:
    """What one inference of a policy is, in a line."""
    tokens = row["tokens"]
    return (
        f"{row['policy']}: {row['cameras']} cameras, chunk {row['chunk']}, "
        f"{tokens['prefix']} + {tokens['actions']} tokens, KV {row['kv_bytes'] / 1024:.1f} KiB, "
        f"{row['flops'] / 1e6:.1f} MFLOP"
    )


def outcome(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """One row for every cell."""
    success, age, seconds = row["success"], row["age_ms"], row["time_to_success_s"]
    return (
        f"{'* ' if row['front'] else '  '}{row['device']}",
        f"{row['latency_ms']['p50']:.3g}, {p99(row)}",
        f"{row['late']} {row['execute']}",
        f"{success['rate']:.0%} ({100 * success['low']:.0f} to {100 * success['high']:.0f})",
        f"{row['success_within_3_s']['rate']:.0%}",
        f"{row['success_at_first_try']['rate']:.0%}",
        f"{seconds['mean']:.2f}" if seconds else "",
        f"{row['miss_rate']:.0%}",
        f"{age['mean']:.0f}, {age['p95']:.0f}" if age else "",
        f"{row['held']:.0%}",
        change(row["against_no_latency"]),
    )


def p99(row: Mapping[str, Any]) -> str:
    """The p99 of a row; the sign says why it is no measured one: too few samples, a floor, an assumption."""
    value, kind = row["latency_ms"]["p99"], row["latency"]["kind"]
    return "–" if value is None else f"{value:.3g}{SIGNS[kind]}"


def change(pairs: Mapping[str, Any] | None) -> str:
    """A paired difference in points with its interval."""
    if pairs is None:
        return ""
    return f"{100 * pairs['difference']:+.0f} ({100 * pairs['low']:+.0f} to {100 * pairs['high']:+.0f})"
