"""The rows of the joined table: what a cell costs, what it achieves, how late it is, and what beats what.

The front is of one device at a time, since the device is given and the policy is chosen: a row is on it if no other row
of its device is at least as good in at most its p99 latency, one of them strictly. Better is more success; of equal
success, more within 3 s; of equal again, the shorter mean time to success. Differences are paired, over the same seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from robotattn.config import name_of
from robotattn.frontier_cells import Cell
from robotattn.latency import bounds
from robotattn.latency.plan import mark_front
from robotattn.latency.sources import told
from robotattn.latency.subject import Subject
from robotattn.statistics import paired_difference

Row = dict[str, Any]
SAME = ("policy", "late", "execute")  # of the row that a row is compared with at no latency


def row(cell: Cell, data: Mapping[str, Any], out: Path) -> Row:
    """One row of the table. data: the cell's evaluation. out: the folder that files are named in."""
    source, timing = cell.source, data["timing"]
    seconds = [one["time"] for one in data["rows"] if one["success"]]
    trace = cell.config.timing.latency_trace
    return {
        "cell": cell.name,
        "policy": cell.policy,
        "device": source.device,
        "late": cell.config.timing.late,
        "execute": cell.config.execute,
        "hz": data["env"]["hz"],
        **costs(cell.subject),
        "success": data["success"],
        **{name: data[name] for name in ("success_within_3_s", "success_at_first_try")},
        "time_limit": data["env"]["time_limit"],
        "time_to_success_s": {"mean": fmean(seconds), "median": median(seconds)} if seconds else None,
        "latency_ms": {"p50": source.p50, "p99": source.p99},
        "latency": told(source) | {"trace": None if trace is None else str(trace.relative_to(out))},
        "zero": source.is_zero,
        "miss_rate": timing["miss_rate"],
        "inferences": timing["inferences"],
        "age_ms": timing["age_ms"] and {name: timing["age_ms"][name] for name in ("mean", "p95", "max")},
        "held": timing["held"],
        "cold": timing["cold"],
        "file": str(cell.path.relative_to(out)),
        "outcomes": {one["seed"]: bool(one["success"]) for one in data["rows"]},
    }


def costs(subject: Subject) -> Row:
    """What one inference of a policy is, in closed form: tokens, bytes of keys and values (float32), FLOPs."""
    config, length = subject.config, subject.length
    tokens, work = bounds.tokens(config, length), bounds.work(config, length)
    return {
        "kind": name_of(type(config)),
        "cameras": len(config.cameras),
        "chunk": config.chunk,
        "parameters": bounds.parameters(config),
        "tokens": {"prefix": tokens["prefix"], "actions": tokens["actions"]},
        "kv_bytes": bounds.kv_bytes(config, length)["total"],
        "flops": sum(stage.all_flops for stage in work.values()),
    }


def rows(found: Sequence[Row]) -> list[Row]:
    """The rows with the front marked and the paired differences; what single episodes came to is left out."""
    mark_fronts(found)
    for one in found:
        against = next((other for other in found if other["zero"] and all(other[k] == one[k] for k in SAME)), None)
        best = max(
            (o for o in found if (o["policy"], o["device"]) == (one["policy"], one["device"])),
            key=worth,
        )
        one["against_no_latency"] = difference(against, one)
        one["against_best_handling"] = difference(best, one)
    return [{name: value for name, value in one.items() if name != "outcomes"} for one in found]


def mark_fronts(found: Sequence[Row]) -> None:
    """Mark each device's front in "front"; a row whose p99 is not known is on none."""
    for one in found:
        one["front"] = False
    for device in dict.fromkeys(one["device"] for one in found):
        mine = [one for one in found if one["device"] == device and one["latency_ms"]["p99"] is not None]
        views = [{"success": worth(one), "p99": one["latency_ms"]["p99"]} for one in mine]
        mark_front(views, "success", "p99")
        for one, view in zip(mine, views, strict=True):
            one["front"] = view["front"]


def worth(one: Row) -> tuple[float, float, float]:
    """What makes a row better, the first difference deciding: success, success within 3 s, a short time to success."""
    seconds = one["time_to_success_s"]
    return one["success"]["rate"], one["success_within_3_s"]["rate"], -seconds["mean"] if seconds else -math.inf


def difference(a: Row | None, b: Row) -> Row | None:
    """Success of b minus success of a over the same seeds; None without an a, or where both are one row."""
    if a is None or a is b:
        return None
    seeds = list(b["outcomes"])
    pairs = paired_difference([a["outcomes"][seed] for seed in seeds], [b["outcomes"][seed] for seed in seeds])
    return {"cell": a["cell"], **asdict(pairs)}
