"""The cells of a frontier: each combination of policy, device and handling, and which were evaluated already."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from robotattn import checkpoint
from robotattn.config import UsageError, to_dict
from robotattn.control.chunks import ChunkOptions, Handling
from robotattn.evaluate import EvaluateConfig
from robotattn.latency import sources, trace
from robotattn.latency.sources import Source
from robotattn.latency.subject import Subject, of_checkpoint
from robotattn.policies import Policy
from robotattn.policies.base import CANNOT_CONTINUE
from robotattn.timing import TimingConfig

SCHEMA = 1
ANYHOW = ("checkpoint", "out", "workers", "batch", "deadline")  # an evaluation's rows do not depend on these
COUNTING = ("hold", "continue")  # the handlings that execute several actions before they ask again
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class FrontierConfig:
    """Evaluate checkpoints under the latencies of devices; what is not named keeps what a checkpoint was trained on."""

    checkpoints: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint folders, or runs that hold one."""
    devices: tuple[str, ...] = ("fixed:0ms", "h200", "orin")
    """Where latencies are from: folders of traces that `robotattn profile` wrote, known devices (predicted from closed
    forms), or words such as fixed:80ms."""
    late: tuple[Handling, ...] = ("hold", "skip-executed")
    """What becomes of a chunk that comes late."""
    execute: tuple[int, ...] = (1,)
    """Actions executed of each chunk; only hold and continue count them, the others have one cell."""
    episodes: int = 100
    """Episodes of a cell, on the same seeds in all."""
    seed: int = 5000
    """Base seed of the stream of episode seeds."""
    out: Path = Path("runs/frontier")
    """Folder of the cells, the result, the picture and the page."""
    hz: int | None = None
    """Control rate (Hz)."""
    task: Literal["pick_up", "pick_moving", "pick_reversing", "pick_disturbed"] | None = None
    """Which task."""
    workers: int = 2
    """Processes; 0: this one alone."""
    batch: int = 32
    """Episodes that a process runs side by side: late chunks are asked for at different ticks, and planned together."""
    minutes: float | None = None
    """Begin no cell that would not be done by then, and make the table of what there is; run it again to go on."""

    def __post_init__(self) -> None:
        for name in ("checkpoints", "devices", "late", "execute"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: {' '.join(map(str, values)) or 'none'}, allowed is at least one, none twice")
        for name, least in (("episodes", 1), ("workers", 0), ("batch", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")
        if min(self.execute) < 1:
            raise ValueError(f"execute: {min(self.execute)} is below 1")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes: {self.minutes} is not above 0")


@dataclass(frozen=True)
class Cell:
    """One evaluation: a policy under the latencies of a source, handled in one way."""

    name: str
    policy: str
    subject: Subject
    source: Source
    config: EvaluateConfig

    @property
    def path(self) -> Path:
        """The file of its evaluation."""
        assert self.config.out is not None
        return self.config.out


# ------------------------------------------------------------------------------------------ planning


def planned(config: FrontierConfig) -> tuple[list[Cell], list[str]]:
    """The cells in their order, and of every combination that is no cell, why. Writes the traces to be replayed."""
    subjects = [of_checkpoint(folder, "cpu", None) for folder in config.checkpoints]
    devices = sources.devices(config.devices)
    cells, left_out = list[Cell](), list[str]()
    for folder, subject, policy in zip(config.checkpoints, subjects, names(config.checkpoints), strict=True):
        found = [device.latencies(subject.config, subject.length) for device in devices]
        left_out += [
            f"{policy}, {d.name}: {one}" for d, one in zip(devices, found, strict=True) if isinstance(one, str)
        ]
        for late in config.late:
            for execute in config.execute if late in COUNTING else (1,):
                if reason := contradiction(subject.policy, subject.config.chunk, late, execute):
                    left_out.append(f"{policy}, {late}: {reason}")
                    continue
                for source in found:
                    if not isinstance(source, str):
                        cells.append(_cell(config, folder, policy, subject, source, late, execute))
    if not cells:
        raise UsageError(f"frontier: no cell is left; {'; '.join(left_out)}")
    return cells, left_out


def contradiction(policy: Policy, chunk: int, late: Handling, execute: int) -> str | None:
    """Why a policy's chunks cannot be handled so; None if they can."""
    try:
        ChunkOptions(execute, None, late)
    except ValueError as error:
        return str(error)
    if execute > chunk:
        return f"execute: {execute} actions, the policy's chunk has {chunk}"
    if late == "real-time" and not policy.continues:
        return CANNOT_CONTINUE
    return None


def _cell(
    config: FrontierConfig, folder: Path, policy: str, subject: Subject, source: Source, late: Handling, execute: int
) -> Cell:
    name = slug(f"{policy}-{source.device}-{late}-{execute}")
    timing = TimingConfig(source.word, _written(source.trace_of, config.out, policy, source.device), late=late)
    evaluated = EvaluateConfig(
        checkpoint=folder,
        task=config.task,
        episodes=config.episodes,
        seed=config.seed,
        workers=config.workers,
        batch=min(config.batch, config.episodes),
        execute=execute,
        hz=config.hz,
        timing=timing,
        out=config.out / "cells" / f"{name}.json",
    )
    return Cell(name, policy, subject, source, evaluated)


def _written(one: trace.Trace | None, out: Path, policy: str, device: str) -> Path | None:
    """Put a trace beside the cells, under a name that changes with its content, so that no other is taken for it."""
    if one is None:
        return None
    path = out / "traces" / f"{slug(f'{policy}-{device}')}-{one.sha256[:8]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.write(path, one)
    return path


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", text)


def names(folders: Sequence[Path]) -> list[str]:
    """A short name for each checkpoint: its run's, with the folder above where two are called alike."""
    homes = [checkpoint.results_folder(folder).resolve() for folder in folders]
    for parts in range(1, max(len(home.parts) for home in homes)):
        short = ["/".join(home.parts[-parts:]) for home in homes]
        if len(set(short)) == len(short):
            return short
    raise UsageError(f"checkpoints: {' '.join(map(str, folders))}: one is there twice")


# ------------------------------------------------------------------------------------------ what is there


def finished(cell: Cell) -> dict[str, Any] | None:
    """A cell's evaluation if it is there; raises UsageError if it was made otherwise, naming what differs."""
    try:
        data = json.loads(cell.path.read_text(encoding="utf-8"))
        then = conditions(data["config"], data["fingerprint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{cell.path}: is no evaluation ({error}); remove it") from None
    now = conditions(to_dict(cell.config), cell.subject.fingerprint)
    differs = [
        f"{name} {then.get(name)}, now {now.get(name)}" for name in {**then, **now} if then.get(name) != now.get(name)
    ]
    if differs:
        raise UsageError(f"{cell.path}: was made with {'; '.join(differs)}; name another --out, or remove it")
    return dict(data)


def conditions(config: Mapping[str, Any], fingerprint: Mapping[str, Any] | None) -> dict[str, Any]:
    """What an evaluation's rows depend on: its configuration, the trace by its name, the checkpoint by its content."""
    kept = {name: value for name, value in config.items() if name not in ANYHOW and name != "timing"}
    kept |= {f"timing.{name}": value for name, value in config["timing"].items()}
    if kept["timing.latency_trace"] is not None:
        kept["timing.latency_trace"] = Path(kept["timing.latency_trace"]).name
    files = json.dumps((fingerprint or {}).get("sha256"), sort_keys=True)
    return kept | {"checkpoint": hashlib.sha256(files.encode()).hexdigest()[:8]}
