"""Evaluate a checkpoint, or a baseline, by roll-outs: success with its interval, and one row for every episode.

In goes a checkpoint folder; out comes ``evaluation.json`` and a few videos. An episode's row depends on its seed alone:
it is the same for any batch size and any number of workers.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from robotattn import checkpoint, trained_delay
from robotattn.config import UsageError, from_dict, to_dict
from robotattn.data.workers import run_tasks
from robotattn.envs import CameraConfig, EnvConfig
from robotattn.policies.base import CANNOT_CONTINUE
from robotattn.rollouts import Block, Job, opened
from robotattn.scores import outcomes
from robotattn.seeds import stream
from robotattn.statistics import wilson
from robotattn.timing import TimingConfig, short, summary
from robotattn.types import MAX_OBJECTS

SCHEMA = 1
BLOCKS = 3  # given to each worker, at least: the last ones even out how long the workers take
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvaluateConfig:
    """Roll out a checkpoint (or a baseline) and count the successes. None keeps what the checkpoint was trained on."""

    checkpoint: Path | None = None
    """Checkpoint folder; not needed for a baseline."""
    agent: Literal["policy", "expert", "zero", "random"] = "policy"
    """What acts: the checkpoint's policy, the scripted expert, no motion, or uniformly random actions."""
    task: Literal["pick_up", "pick_moving", "pick_reversing", "pick_disturbed"] | None = None
    """Which task."""
    episodes: int = 100
    """Episodes; each has its own seed."""
    seed: int = 1000
    """Base seed of the stream of episode seeds."""
    batch: int = 8
    """Episodes that a worker runs side by side."""
    workers: int = 2
    """Processes; 0: this one alone, which spares the start of others."""
    objects: int | None = None
    """This many cubes in every episode."""
    other: bool = False
    """Same scenes, but another cube of each is named."""
    yaw: float | None = None
    """Cubes turned by up to this angle either way (rad)."""
    light: float | None = None
    """Strength of the light's variation, 0 to 1."""
    colour_jitter: float | None = None
    """Strength of the colours' variation, 0 to 1."""
    camera_jitter: float | None = None
    """Strength of the cameras' displacement, 0 to 1."""
    texture: bool | None = None
    """Random table textures."""
    language: Literal["en", "zh", "both"] | None = None
    """Language of the instructions."""
    phrases: Literal["train", "heldout"] | None = None
    """Sentences of the training templates, or of templates never trained on."""
    execute: int = 1
    """Actions executed of each chunk before planning again."""
    ensemble: float | None = None
    """Temporal ensembling: weight exp(-m i) for the i-th oldest prediction; needs execute = 1."""
    hz: int | None = None
    """Control rate (Hz)."""
    timing: Annotated[TimingConfig, tyro.conf.arg(name="")] = field(default_factory=TimingConfig)
    """What takes time, and how the loop deals with it."""
    videos: int = 0
    """Episodes filmed, the first ones."""
    out: Path | None = None
    """Result file (.json) or a folder for it; default: evaluation.json in the run's folder."""
    device: str = "cpu"
    """Where the policy runs: cpu, cuda or cuda:1."""
    deadline: float = 600.0
    """A worker that takes longer to start, or for a block of episodes, is given up and named (s)."""

    def __post_init__(self) -> None:
        if self.agent != "policy" and self.timing.late == "real-time":
            raise ValueError(
                f"late: real-time, allowed with {self.agent} is another: it does not plan on from anything"
            )
        if self.agent == "policy" and self.checkpoint is None:
            raise ValueError("checkpoint: missing; name a checkpoint folder, or a baseline with agent")
        for name, least in (("episodes", 1), ("batch", 1), ("workers", 0), ("execute", 1), ("videos", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")
        if self.objects is not None and not 1 + self.other <= self.objects <= MAX_OBJECTS:
            raise ValueError(f"objects: {self.objects}, allowed is {1 + self.other} to {MAX_OBJECTS}")
        if self.deadline <= 0:
            raise ValueError(f"deadline: {self.deadline} s is not above 0")
        self.timing.chunks(self.execute, self.ensemble)  # raises for options that contradict each other


OVERRIDES = ("task", "yaw", "light", "colour_jitter", "camera_jitter", "texture", "language", "phrases", "hz")


def evaluate(config: EvaluateConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Run the episodes, write the result file and return what it holds.

    Raises UsageError for what cannot be run, WorkerError naming a worker that failed.
    """
    source = _source(config)
    config.timing.clock()  # a trace that cannot be read is named before anything is built
    env, out = _environment(config, source), result_path(config)
    blocks = _run(_job(config, env, out), config, progress)
    result = _result(config, env, source, blocks)
    write_json(out, result)
    return result


@dataclass(frozen=True)
class _Source:
    """What is known about the thing that acts: the environment it was trained in, and its fingerprint if it has one."""

    env: EnvConfig
    fingerprint: dict[str, Any] | None


def _source(config: EvaluateConfig) -> _Source:
    if config.checkpoint is None:
        return _Source(EnvConfig(), None)
    loaded = checkpoint.load(config.checkpoint)
    if config.agent == "policy" and config.execute > loaded.config.chunk:
        raise UsageError(f"execute: {config.execute} actions, the policy's chunk has {loaded.config.chunk}")
    if config.timing.late == "real-time" and config.agent == "policy" and not loaded.policy.continues:
        raise UsageError(f"late: real-time with {config.checkpoint}: {CANNOT_CONTINUE}")
    env = from_dict(EnvConfig, loaded.env, f"{config.checkpoint}: env")
    # one recording serves policies of tool and of joint actions: the world takes what this one says
    return _Source(replace(env, action_mode=loaded.config.action_mode), loaded.fingerprint)


def _environment(config: EvaluateConfig, source: _Source) -> EnvConfig:
    """The environment of this evaluation: the checkpoint's, with the overrides."""
    changes: dict[str, Any] = {name: getattr(config, name) for name in OVERRIDES if getattr(config, name) is not None}
    if config.videos and not source.env.cameras:
        changes["cameras"] = (CameraConfig("front", 240, 240),)  # to film what needs no eyes itself
    try:
        return replace(source.env, **changes)
    except ValueError as error:
        raise UsageError(f"evaluate: {error}") from None


def result_path(config: EvaluateConfig) -> Path:
    """The file that `evaluate` writes: by default beside the checkpoint, in the run's folder."""
    if config.out is not None:
        return config.out if config.out.suffix == ".json" else config.out / "evaluation.json"
    if config.agent != "policy" or config.checkpoint is None:
        return Path("runs") / f"evaluate_{config.agent}" / "evaluation.json"
    return checkpoint.results_folder(config.checkpoint) / "evaluation.json"


def _job(config: EvaluateConfig, env: EnvConfig, out: Path) -> Job:
    options: dict[str, Any] = {} if config.objects is None else {"objects": config.objects}
    return Job(
        seeds=tuple(stream("evaluate", config.seed, config.episodes)),
        env=env,
        agent=config.agent,
        checkpoint=config.checkpoint,
        device=config.device,
        batch=config.batch,
        block=max(config.batch, -(-config.episodes // (BLOCKS * max(1, config.workers)))),
        chunks=config.timing.chunks(config.execute, config.ensemble),
        timing=config.timing,
        options=options | ({"other": True} if config.other else {}),
        videos=config.videos,
        folder=out.with_name(f"{out.stem}_videos"),
    )


def _run(job: Job, config: EvaluateConfig, progress: Progress | None) -> list[Block]:
    blocks: list[Block] = []
    if progress is not None:
        progress("evaluate", 0, config.episodes)
    starts = range(0, config.episodes, job.block)
    for block in _blocks(job, starts, config):
        blocks.append(block)
        if progress is not None:
            progress("evaluate", sum(len(block.rows) for block in blocks), config.episodes)
    return blocks


def _blocks(job: Job, starts: range, config: EvaluateConfig) -> Iterator[Block]:
    if config.workers:
        yield from run_tasks(partial(opened, job), starts, config.workers, config.deadline)
        return
    with opened(job) as work:
        yield from map(work, starts)


def _result(config: EvaluateConfig, env: EnvConfig, source: _Source, blocks: Sequence[Block]) -> dict[str, Any]:
    rows = sorted((row for block in blocks for row in block.rows), key=itemgetter("index"))
    films = sorted((film for block in blocks for film in block.films), key=itemgetter("index"))
    machine = blocks[0].machine
    return {
        "schema": SCHEMA,
        "kind": "evaluation",
        "config": to_dict(config),
        "env": to_dict(env),
        "fingerprint": source.fingerprint,
        "machine": machine,
        "warnings": _warnings(config, source, machine),
        **summarise(rows, env.hz),
        "videos": films,
        "rows": [row | {"timing": short(row["timing"])} for row in rows],
    }


def _warnings(config: EvaluateConfig, source: _Source, machine: dict[str, Any]) -> list[str]:
    if source.fingerprint is None or config.agent != "policy":
        return []
    drawn = {} if machine["renderer"] == "not used" else {"renderer": machine["renderer"]}
    found = checkpoint.differences(source.fingerprint, **drawn)
    timing, handling = config.timing, config.timing.chunks(config.execute, config.ensemble).kind
    delayed = timing.latency is not None or timing.latency_trace is not None
    found += trained_delay.mismatches(source.fingerprint, handling, delayed)
    if config.hz not in (None, source.env.hz):
        found.append(f"hz: evaluated at {config.hz} Hz, but the policy's actions are {1 / source.env.hz:g} s apart")
    return found


def summarise(rows: Sequence[dict[str, Any]], hz: float) -> dict[str, Any]:
    """Success with its Wilson 95 % interval, overall and broken down; reasons; steps to success."""
    steps = [row["steps"] for row in rows if row["success"]]
    return {
        **{name: _rate(met) for name, met in outcomes(rows).items()},
        "reasons": dict(sorted(Counter(row["reason"] for row in rows).items())),
        "failures": dict(sorted(Counter(row["failure"] for row in rows if not row["success"]).items())),
        "steps_to_success": _steps(steps, hz) if steps else None,
        "by": {key: _breakdown(rows, key) for key in ("objects", "colour", "language")},
        **({"timing": summary([row["timing"] for row in rows])} if all("timing" in row for row in rows) else {}),
    }


def _steps(steps: Sequence[int], hz: float) -> dict[str, float]:
    return {"mean": fmean(steps), "median": median(steps), "mean_seconds": fmean(steps) / hz}


def success_rate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count, rate and Wilson 95 % interval of the rows' successes."""
    return _rate([row["success"] for row in rows])


def _rate(met: Sequence[bool]) -> dict[str, Any]:
    interval = wilson(sum(met), len(met))
    low, high = interval.low, interval.high
    return {"successes": sum(met), "episodes": len(met), "rate": interval.value, "low": low, "high": high}


def _breakdown(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    values = sorted({row[key] for row in rows})
    return {str(value): success_rate([row for row in rows if row[key] == value]) for value in values}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON under a temporary name, then rename: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=_plain) + "\n", "utf-8")
    partial.replace(path)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a result cannot hold {value!r}")
