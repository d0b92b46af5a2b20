"""The command that joins success and latency: `robotattn frontier`; two tables, a picture, a page and JSON come out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from robotattn.console import Progress, finish, table, warn
from robotattn.flags import find, parse


def frontier(arguments: list[str]) -> int:
    """Join success, tokens and latency in one table: robotattn frontier CHECKPOINT ... --devices h200 fixed:80ms."""
    from robotattn.frontier import FrontierConfig
    from robotattn.frontier import frontier as run

    config = parse(FrontierConfig, arguments, frontier)
    config = replace(config, checkpoints=tuple(find(str(one), "assets/checkpoints") for one in config.checkpoints))
    with Progress() as shown:
        result = run(config, shown)
    warn(f"left out: {reason}" for reason in result["left_out"])
    warn(result["warnings"])
    if result["missing"]:
        warn(
            [f"{len(result['missing'])} cells are not there yet; the same command goes on: {result['missing'][0]}, ..."]
        )
    rows = result["rows"]
    titles = ("", "cams", "tokens", "KV KiB", "MFLOP", "p50 ms", "p99 ms", "")
    table("what an inference costs (° every one alike: no p99 is known)", costs(rows), titles)
    short = {"file": str(config.out / "frontier.json"), "page": str(config.out / "frontier.html")}
    short |= {name: result[name] for name in ("left_out", "missing", "cells")}
    short["front"] = [row["cell"] for row in rows if row["front"]]
    titles = ("* = front", "late", "success", "3 s", "1st", "s", "missed", "age ms", "held", "no latency")
    return finish("frontier", short, [outcome(row) for row in rows], titles)


def costs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """One row for every policy on every device."""
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    for row in rows:
        tokens, ms = row["tokens"], row["latency_ms"]
        found[row["policy"], row["device"]] = (
            f"{row['policy']} on {row['device']}",
            row["cameras"],
            f"{tokens['prefix']} + {tokens['actions']}",
            f"{row['kv_bytes'] / 1024:.1f}",
            f"{row['flops'] / 1e6:.1f}",
            f"{ms['p50']:.3g}",
            p99(row),
            row["latency"]["kind"],
        )
    return list(found.values())


def p99(row: Mapping[str, Any]) -> str:
    """The p99 of a row in words; one without a tail is marked."""
    value = row["latency_ms"]["p99"]
    alike = row["latency"]["kind"] == "predicted" and not row["latency"]["tail"]
    return "–" if value is None else f"{value:.3g}{'°' if alike else ''}"


def outcome(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """One row for every cell."""
    success, age, seconds = row["success"], row["age_ms"], row["time_to_success_s"]
    return (
        f"{'* ' if row['front'] else '  '}{row['policy']} on {row['device']}",
        f"{row['late']} {row['execute']}",
        f"{success['rate']:.0%} ({success['low']:.0%} to {success['high']:.0%})",
        f"{row['success_within_3_s']['rate']:.0%}",
        f"{row['success_at_first_try']['rate']:.0%}",
        f"{seconds['mean']:.2f}" if seconds else "",
        f"{row['miss_rate']:.0%}",
        f"{age['mean']:.0f}, p95 {age['p95']:.0f}" if age else "",
        f"{row['held']:.0%}",
        change(row["against_no_latency"]),
    )


def change(pairs: Mapping[str, Any] | None) -> str:
    """A paired difference in points with its interval."""
    if pairs is None:
        return ""
    return f"{100 * pairs['difference']:+.0f} ({100 * pairs['low']:+.0f} to {100 * pairs['high']:+.0f})"
