"""Measure a grid of policies, one row a point: `robotattn profile --sweep cameras=1:4 patch=8,16,32 policy=act`.

A point is a policy with random weights, timed with the same control step, warm-up and percentiles as a profile. Kinds
of policy take turns, so that a machine that gets slower does not look like a policy that is slower. A point that runs
out of memory is a row with its error. The rows are in `sweep_file`, the result beside them is `sweep.json`.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robotattn import checkpoint
from robotattn.checkpoint import replace_file
from robotattn.latency import devices
from robotattn.latency.card import card, checked
from robotattn.latency.curves import curves
from robotattn.latency.environment import environment, usable_clock
from robotattn.latency.grid import BASE, Candidate, described, grid
from robotattn.latency.inputs import RandomInputs
from robotattn.latency.measure import Clock, Spans, quiet, summary, warm_up
from robotattn.latency.modes import EXACT, Mode, Unavailable, parity, prepare
from robotattn.latency.stages import Act, ControlStep
from robotattn.latency.subject import Subject, of_policy, read_policy, resolve, written
from robotattn.latency.sweep_file import NAME, SCHEMA, Writer, digest, merge, paces, read
from robotattn.latency.sweep_result import result
from robotattn.policies import PolicyConfig

Progress = Callable[[str, int, int], None]
PICTURE, RESULT = "sweep.png", "sweep.json"
PARITY = 3  # batches whose actions are compared with eager ones
LEAST = 30  # samples of a point, however slow it is


@dataclass(frozen=True)
class SweepConfig:
    """Time a grid of policies with random weights, one row a point."""

    sweep: tuple[str, ...]
    """Axes: NAME=VALUE,VALUE or NAME=FIRST:LAST; a field of the policies, or policy, cameras (count), size, layers."""
    base: str | None = None
    """A checkpoint or a training configuration: its policy is what the axes change. Default: one made for sweeps."""
    out: Path = Path("runs/sweep")
    """Folder of sweep.jsonl, which is gone on with if it is there, of sweep.json and of the picture."""
    samples: int = 460
    """Timed steps of a point, over all repeats; p99 needs 459."""
    staged: int = 60
    """Of them, how many times the stages are timed one by one as well."""
    seconds: float = 20.0
    """At most so long for a point (s), over all repeats; but 30 samples each."""
    minutes: float | None = None
    """Stop after this time; what is missing comes when the same command is run again."""
    repeats: int = 1
    """Divide the samples of each point among so many passes over the grid, each in another order."""
    rest: float = 0.0
    """Sleep after each step for this share of its time: Linux stalls a real-time program that never waits (50 ms)."""
    instruction: int = 16
    """Tokens of the instruction."""
    batch: int = 1
    """Observations of one step."""
    mode: Mode = "eager"
    """How the policy is run; the stages are those of eager runs in any case."""
    seed: int = 0
    """Of weights, inputs, and the order of the points."""
    threads: int = 1
    """Threads of torch; 0: as they are."""
    device: str = "cpu"
    """Where the policies run: cpu, cuda, cuda:1 or mps."""

    def __post_init__(self) -> None:
        if not self.sweep:
            raise ValueError("sweep: give at least one axis, such as cameras=1:4")
        least = {"samples": LEAST, "staged": 1, "repeats": 1, "instruction": 1, "batch": 1, "seed": 0, "threads": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name}: {getattr(self, name)} is below {value}")
        if not 0 <= self.rest <= 10:
            raise ValueError(f"rest: {self.rest} is not in [0, 10]")
        if not self.seconds > 0 or not (self.minutes is None or self.minutes > 0):
            raise ValueError(f"seconds: {self.seconds}, minutes: {self.minutes}: both are above 0")


@dataclass(frozen=True)
class Task:
    """A point to measure: which candidate, for which time, under which name in the file."""

    candidate: Candidate
    repeat: int
    key: str


def sweep(config: SweepConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Measure what is not in the file yet; write and return what all of the file says (see `sweep_result`).

    Raises UsageError for a grid that is empty, a device that is missing, or a file begun on another machine.
    """
    candidates, left_out = grid(config.sweep, described(base_of(config.base), config.base))
    tasks = order(candidates, config)
    writer = _measured(tasks, config, progress)
    rows = read(writer.path)
    missing = sum(task.key not in writer.done for task in tasks)
    failed = [f"{row['label']}: {row['error']}" for row in rows.points if "error" in row]
    counts = {"points": len(rows.measured), "failed": failed, "missing": missing, "left_out": left_out}
    samples = merge(rows.points)
    found = {"schema": SCHEMA, "kind": "sweep_result", "file": NAME, "environment": rows.environment, **counts}
    pace = paces(rows.measured) or [1.0]
    found |= {"machine": rows.device, "pace": [min(pace), max(pace)], **result(samples)}
    picture = curves(samples, devices.Device(**rows.device)) if samples else None
    if picture is not None:
        replace_file(config.out / PICTURE, lambda file: file.write(picture))
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    replace_file(config.out / RESULT, lambda file: file.write(text.encode()))
    return found


def words(cls: type[Any], arguments: Sequence[str]) -> list[str]:
    """Read ``cameras=1:4 samples=50``: words with the name of a setting stay, all others become the sweep's axes."""
    settings = {field.name for field in fields(cls)}
    axes = [word for word in arguments if word.partition("=")[0].lstrip("-").replace("-", "_") not in settings]
    named = [f"sweep={json.dumps(axes)}"] if axes else []
    return [*named, *(word for word in arguments if word not in axes)]


def base_of(name: str | None) -> PolicyConfig:
    """The policy that the axes change: of a checkpoint or a training configuration, or the one made for sweeps."""
    if name is None:
        return BASE
    kind, path = resolve(name)
    return read_policy(checkpoint.locate(path) / checkpoint.CONFIG if kind == "checkpoint" else path)


def _measured(tasks: Sequence[Task], config: SweepConfig, progress: Progress | None) -> Writer:
    """Measure the tasks that are not in the file, with the threads that are asked for, until time is up."""
    clock, threads = usable_clock(config.device), torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        machine = partial(devices.probe, clock.device)
        writer = Writer(config.out / NAME, environment(clock.device, config.seed), lambda: asdict(machine()))
        until = None if config.minutes is None else time.monotonic() + 60.0 * config.minutes
        for task in _remaining(tasks, writer, until, progress):
            writer.append(point(task, config, clock))
    finally:
        torch.set_num_threads(threads)
    return writer


def order(candidates: Sequence[Candidate], config: SweepConfig) -> list[Task]:
    """The points in the order they are measured: kinds take turns, each repeat shuffled anew, the same for one seed."""
    tasks = []
    for repeat in range(config.repeats):
        shuffler = random.Random(f"{config.seed} {repeat}")
        kinds = dict[str, list[Candidate]]()
        for candidate in candidates:
            kinds.setdefault(candidate.kind, []).append(candidate)
        for group in kinds.values():
            shuffler.shuffle(group)
        turns = (one for turn in zip_longest(*kinds.values()) for one in turn if one is not None)
        tasks += [Task(candidate, repeat, key(candidate.policy, config, repeat)) for candidate in turns]
    return tasks


def key(policy: PolicyConfig, config: SweepConfig, repeat: int = 0) -> str:
    """The name of a point in the file: equal for what takes equally long, whatever axes it came from."""
    return digest([written(policy), config.mode, config.instruction, config.batch, repeat])


def _remaining(tasks: Sequence[Task], writer: Writer, until: float | None, progress: Progress | None) -> Iterator[Task]:
    show = progress or (lambda what, done, total: None)
    for done, task in enumerate(tasks):
        show("sweep", done, len(tasks))
        if until is not None and time.monotonic() > until:
            return
        if task.key not in writer.done:
            yield task
    show("sweep", len(tasks), len(tasks))


def point(task: Task, config: SweepConfig, clock: Clock) -> dict[str, Any]:
    """Measure one point and return its row; what it raises for lack of memory or support is in the row."""
    policy, start = task.candidate.policy, time.monotonic()
    row = {
        "key": task.key,
        "label": task.candidate.label,
        "kind": task.candidate.kind,
        "mode": config.mode,
        "repeat": task.repeat,
        "policy": written(policy),
        **facts(policy, config.instruction, config.batch),
    }
    try:
        row |= measured(policy, config, clock, task.repeat)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
        _free(clock.device)
    return row | {"seconds": round(time.monotonic() - start, 3)}


def facts(policy: PolicyConfig, instruction: int, batch: int = 1) -> dict[str, Any]:
    """The card of a policy in closed form, and what of the step's size is not in it: the bytes of its images."""
    pixels = sum(height * width for height, width in policy.cameras.values())
    images = 3 * batch * pixels * getattr(policy, "frames", 1)
    return {"instruction": instruction, "batch": batch, "image_bytes": images, **card(policy, instruction, batch)}


def measured(policy: PolicyConfig, config: SweepConfig, clock: Clock, repeat: int = 0) -> dict[str, Any]:
    """Time a policy with random weights: the step whole and back to back, its stages now and then in between."""
    torch.manual_seed(config.seed)
    subject = of_policy("point", policy, str(clock.device), config.instruction, config.seed)
    fresh = subject.inputs(config.batch, config.seed + repeat)
    with torch.inference_mode():
        act, found = _in_mode(subject, config.mode, fresh)
        step = ControlStep(subject.policy, subject.batcher, subject.length, act)
        warm = warm_up(lambda: step.whole(fresh()), clock, window=5 if repeat else 10)
        step.staged(fresh(), Spans(clock))
        spans = _measure(step, fresh, config, clock)
    stages = {name: float(np.median(list(durations))) / 1e6 for name, durations in spans.samples.items() if durations}
    stages.pop("step")
    samples = [round(duration / 1e3) for duration in spans.samples["step"]]
    steady = {"calls": warm.calls, "steady": warm.steady}
    step_times = summary(list(spans.samples["step"]))
    agrees = checked(facts(policy, config.instruction, config.batch), subject, step, config.batch)
    return {"stages": stages, "step": step_times, "warm_up": steady, "card": agrees, **found, "samples_us": samples}


def _in_mode(subject: Subject, mode: Mode, fresh: RandomInputs) -> tuple[Act, dict[str, Any]]:
    """How the policy acts in a mode, and how far its actions are from eager ones; raises Unavailable if too far."""
    batches = [subject.batcher.batch(fresh(), subject.length) for _ in range(PARITY)]
    act = prepare(subject.policy, mode, batches[0])
    if mode == "eager":
        return act, {}
    found = parity(subject.policy, act, batches, mode in EXACT)
    if not found.ok:
        raise Unavailable(f"actions differ from eager ones by {found.relative:.2g} standard deviations: no figure")
    return act, {"parity": asdict(found)}


def _measure(step: ControlStep, fresh: RandomInputs, config: SweepConfig, clock: Clock) -> Spans:
    samples, every = max(LEAST, -(-config.samples // config.repeats)), max(1, config.samples // config.staged)
    spans, until = Spans(clock), time.monotonic() + config.seconds / config.repeats
    with quiet():
        for index in range(samples):
            spans.run("step", partial(step.whole, fresh()))
            if index % every == 0:
                step.staged(fresh(), spans)
            if config.rest:
                time.sleep(config.rest * spans.samples["step"][-1] / 1e9)
            if index + 1 >= LEAST and time.monotonic() > until:
                break
    return spans


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
