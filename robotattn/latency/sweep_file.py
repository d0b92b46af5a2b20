"""The file of a sweep, sweep.jsonl: one line about the machine, then one line a point, each written out at once.

A program that is killed loses at most the point in flight: half a line at the end is dropped by whoever goes on. Going
on is refused on another machine, or with other settings of it, because its rows would be of another distribution.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robotattn.config import UsageError
from robotattn.latency.budget import Point
from robotattn.statistics import percentile, samples_needed

SCHEMA = 1
NAME = "sweep.jsonl"
NEIGHBOURS = 4  # rows on either side whose slowness makes up the pace
LASTING = ("device", "cpu", "cpu_count", "torch_threads", "system", "versions", "cuda", "cudnn", "driver")
"""What of the environment must be equal for two rows to be of one machine; load and clocks come and go."""


@dataclass(frozen=True)
class Rows:
    """What a sweep's file holds. environment, device: of its first line; points: measured or failed, in order."""

    path: Path
    environment: Mapping[str, Any]
    device: Mapping[str, Any]
    points: tuple[Mapping[str, Any], ...]

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """The points that have figures."""
        return [row for row in self.points if "error" not in row]


@dataclass(frozen=True)
class Sample:
    """One configuration of a sweep, its repeats merged. stages and milliseconds (p50, p99, max) are in ms."""

    label: str
    kind: str
    mode: str
    work: Mapping[str, Mapping[str, float]]
    image_bytes: float
    stages: Mapping[str, float]
    milliseconds: Mapping[str, float]
    tokens: Mapping[str, int]
    kv: Mapping[str, float]
    config: Mapping[str, Any]
    key: str
    """What tells it from the others."""

    def point(self) -> Point:
        """The sample as a point of the budget's line."""
        sizes = (self.tokens["prefix"], self.tokens["actions"], int(self.kv["total"]))
        return Point(self.kind, self.mode, *sizes, self.milliseconds)


def digest(value: Any, length: int = 16) -> str:
    """A short hash of plain values, the same for equal ones."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment that does not change from one minute to the next."""
    return {name: environment[name] for name in LASTING if name in environment}


def read(path: Path) -> Rows:
    """Read a sweep's file (or a folder with one); raises UsageError naming the file, the line, and what is wrong."""
    path = path / NAME if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; allowed is what `robotattn profile --sweep` wrote") from None
    whole = [
        _parse(path, number, line) for number, line in enumerate(lines[:-1], 1)
    ]  # what follows the last \n is half
    if not whole or whole[0].get("kind") != "sweep":
        raise UsageError(f"{path}: is not a sweep: its first line must have kind sweep")
    head = whole[0]
    if head.get("schema") != SCHEMA:
        raise UsageError(f"{path}: schema {head.get('schema')}, this program reads {SCHEMA}")
    return Rows(path, head["environment"], head.get("machine", {}), tuple(whole[1:]))


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{path}:{number}: expected a mapping, got {str(row)[:60]}")
    return row


def merge(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Merge the repeats of each configuration, with p50 and stages at the machine's usual pace (see `paces`).

    p99 and max are of the samples as they were: a tail is not a matter of pace.
    """
    measured = [row for row in rows if "error" not in row]
    groups = dict[str, list[tuple[Mapping[str, Any], float]]]()
    for row, pace in zip(measured, paces(measured), strict=True):
        groups.setdefault(_name(row), []).append((row, pace))
    return [_merged(name, group) for name, group in groups.items()]


def paces(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """How slow the machine was around each row, in the file's order, against its usual pace (1).

    Another program can slow the machine for minutes. A row's p50 over the median of its configuration's repeats says
    how slow it was; the median over neighbouring rows, which are other configurations, is the pace. Without repeats
    nothing is known, and the pace is 1.
    """
    groups = dict[str, list[float]]()
    for row in rows:
        groups.setdefault(_name(row), []).append(float(np.median(row["samples_us"])))
    slow = [float(np.median(row["samples_us"]) / np.median(groups[_name(row)])) for row in rows]
    return [float(np.median(slow[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1])) for at in range(len(rows))]


def _name(row: Mapping[str, Any]) -> str:
    return repr((row["policy"], row["mode"], row["batch"], row["instruction"]))


def _merged(name: str, group: Sequence[tuple[Mapping[str, Any], float]]) -> Sample:
    first = group[0][0]
    samples = np.concatenate([row["samples_us"] for row, _ in group]) / 1e3
    usual = np.concatenate([np.asarray(row["samples_us"]) / pace for row, pace in group]) / 1e3
    times = {"max": float(samples.max())}
    times |= {
        f"p{100 * p:g}": percentile(values, p).value
        for p, values in ((0.5, usual), (0.99, samples))
        if len(values) >= samples_needed(p)
    }
    stages = {s: float(np.median([row["stages"][s] / pace for row, pace in group])) for s in first["stages"]}
    return Sample(
        label=first["label"],
        kind=first["kind"],
        mode=first["mode"],
        work=first["work"],
        image_bytes=first["image_bytes"],
        stages=stages,
        milliseconds=times,
        tokens=first["tokens"],
        kv=first["kv"],
        config=first["policy"][first["kind"]],
        key=name,
    )


class Writer:
    """Appends rows to a sweep's file, and knows which points it has already."""

    def __init__(self, path: Path, environment: Mapping[str, Any], probe: Callable[[], Mapping[str, Any]]) -> None:
        """Begin the file, or go on with it; raises UsageError if it was begun on another machine.

        probe: measures the device's constants for the closed form, once; they are kept with the rows.
        """
        self.path, self.hash = path, digest(lasting(environment))
        self.done: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._drop_half_a_line()
        if path.exists() and path.stat().st_size:
            self._go_on(environment)
        else:
            head = {"schema": SCHEMA, "kind": "sweep", "environment": dict(environment), "machine": dict(probe())}
            self._write(head)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row so that it survives the program, and the machine."""
        self._write({**row, "environment": self.hash})
        self.done.add(row["key"])

    def _write(self, row: Mapping[str, Any]) -> None:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        with self.path.open("ab") as file:
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _drop_half_a_line(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)

    def _go_on(self, environment: Mapping[str, Any]) -> None:
        rows = read(self.path)
        here, there = lasting(environment), lasting(rows.environment)
        if changed := sorted(name for name in {*here, *there} if here.get(name) != there.get(name)):
            said = "; ".join(f"{name}: {there.get(name)}, here {here.get(name)}" for name in changed)
            raise UsageError(f"{self.path}: was begun on another machine ({said}); name another folder with --out")
        self.done = {row["key"] for row in rows.points}
