"""Profile a policy: what it costs, how long each stage of its control step takes here, and whether it keeps a rate.

In goes a checkpoint, or a configuration for a policy with random weights (which take as long); out come one JSON file,
traces of the single times, and a picture. Neither simulator nor renderer is imported, so that a bare machine with
torch, numpy and PyYAML can run it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robotattn import checkpoint
from robotattn.config import to_dict
from robotattn.latency import schedule, trace
from robotattn.latency.backends import audit
from robotattn.latency.card import bound_rows, card, checked
from robotattn.latency.devices import probe as probe_device
from robotattn.latency.environment import environment, load, peak_memory, usable_clock
from robotattn.latency.measure import Clock, Spans, WarmUp, summary, warm_up
from robotattn.latency.modes import Mode, probe
from robotattn.latency.pictures import draw
from robotattn.latency.runs import Progress, Run, paced_run, ready, timed, verdict
from robotattn.latency.stages import PASS, STAGED, STAGES, ControlStep, same_actions
from robotattn.latency.subject import Subject, of_checkpoint, of_config, written

SCHEMA = 2
FIRST_CALLS = 3
LEAST_WARM, MOST_WARM = 20, 200
"""Calls of warm-up: between these, and no more than are timed."""

Result = dict[str, Any]
Services = dict[str, Sequence[int]]
"""Name of a run → its service times (ns)."""


@dataclass(frozen=True)
class ProfileConfig:
    """Time a policy's control step, stage by stage, against its bounds and a control rate."""

    checkpoint: Path | None = None
    """Checkpoint folder."""
    config: Path | None = None
    """Instead of a checkpoint: a training configuration, for its policy with random weights."""
    device: str = "cpu"
    """Where the policy runs: cpu, cuda, cuda:1 or mps."""
    hz: float | None = None
    """Control rate: also run at this rate, and say whether it is kept."""
    io_ms: float = 0.0
    """Of each period, what capturing images and sending commands take (ms): the policy has the rest."""
    mode: tuple[Mode, ...] = ("eager",)
    """Ways to run the policy, side by side; the first one is the one that is paced, traced and judged."""
    samples: int = 500
    """Timed steps of each mode, and ticks of the paced run; p99 needs 459, p99.9 needs 4603."""
    threads: int = 0
    """Threads of torch; 0: what a start-up probe finds fastest (CPUs)."""
    instruction_tokens: int | None = None
    """Tokens of the instruction; default 16, or for a checkpoint the longest training sentence."""
    batch: int = 1
    """Observations of one step."""
    seed: int = 0
    """Of the random observations."""
    out: Path | None = None
    """Result file (.json) or a folder for it; default: profile.json in the run's folder."""

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.config is None):
            raise ValueError("checkpoint: give either a checkpoint folder or a config, not both and not neither")
        for name, least in (("samples", 1), ("batch", 1), ("seed", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")
        if self.instruction_tokens is not None and self.instruction_tokens < 1:
            raise ValueError(f"instruction_tokens: {self.instruction_tokens} is below 1")
        if not self.mode or len(set(self.mode)) != len(self.mode):
            raise ValueError(f"mode: {list(self.mode)}: name at least one, and each once")
        if self.hz is not None and not 0 < self.hz <= 1000:
            raise ValueError(f"hz: {self.hz} is not in (0, 1000]")
        if not 0 <= self.io_ms < 1000 / (self.hz or 1):
            raise ValueError(f"io_ms: {self.io_ms} ms are not in [0, the period)")


def profile(
    config: ProfileConfig,
    progress: Progress | None = None,
    first: Callable[[Result], object] | None = None,
    import_seconds: float | None = None,
) -> Result:
    """Measure, write the files and return what the result file holds.

    progress: told what is going on. first: given the cost card and the bounds before anything is measured.
    import_seconds: what importing this module took, for the account of a cold start.
    Raises UsageError for a checkpoint, configuration or device that cannot be used.
    """
    clock, threads = usable_clock(config.device), torch.get_num_threads()
    try:
        subject = _subject(config)  # outside of inference mode: what is made inside could not be audited or copied
        with torch.inference_mode():
            result, services, responses = _profile(config, subject, clock, progress or _silent, first or _silent)
    finally:
        torch.set_num_threads(threads)
    if import_seconds is not None:
        result["cold_start"] = {"import_ms": 1000 * import_seconds} | result["cold_start"]
    _write(config, result, services, responses)
    return result


def result_path(config: ProfileConfig) -> Path:
    """The file that `profile` writes: by default beside the checkpoint, in the run's folder."""
    if config.out is not None:
        return config.out if config.out.suffix == ".json" else config.out / "profile.json"
    if config.checkpoint is None:
        assert config.config is not None
        return Path("runs") / config.config.stem / "profile.json"
    return checkpoint.results_folder(config.checkpoint) / "profile.json"


def _silent(*told: object) -> None:
    """Show nothing."""


def _subject(config: ProfileConfig) -> Subject:
    if config.checkpoint is not None:
        return of_checkpoint(config.checkpoint, config.device, config.instruction_tokens)
    assert config.config is not None
    return of_config(config.config, config.device, config.instruction_tokens, config.seed)


def _profile(
    config: ProfileConfig, subject: Subject, clock: Clock, show: Progress, first: Callable[[Result], object]
) -> tuple[Result, Services, Sequence[int]]:
    fresh, before = subject.inputs(config.batch, config.seed), load()
    most = min(MOST_WARM, max(LEAST_WARM, config.samples))
    step = ControlStep(subject.policy, subject.batcher, subject.length)
    cold = [clock.time(lambda: step.whole(fresh()))[1] for _ in range(FIRST_CALLS)]
    chosen = _choose(config, step, [step.batch(fresh()) for _ in range(4)])
    facts = card(subject.config, subject.length, config.batch)
    facts["checked"] = checked(facts, subject, step, config.batch)
    machine = probe_device(clock.device)
    bounds = partial(bound_rows, subject.config, subject.length, machine, config.batch)
    first({"card": facts, "bounds": bounds()})
    warm = warm_up(lambda: step.whole(fresh()), clock, most=most)
    difference = same_actions(step, fresh(), Spans(clock))
    if not difference < 1e-4:
        raise RuntimeError(f"the stages' actions differ from the whole step's by {difference}: nothing was timed")
    runs = [ready(mode, step, fresh, clock, show, most) for mode in config.mode]
    spans, around = timed(step, runs, fresh, config.samples, clock, show)
    judged, paced = runs[0], None
    if config.hz is not None and judged.step is not None:
        paced = paced_run(config.hz, config.io_ms, config.samples, judged.step, fresh, clock, show)
    medians = {name: _median(spans.samples[name]) for name in STAGES if name in spans.samples}
    result = {
        "schema": SCHEMA,
        "kind": "profile",
        "config": to_dict(config),
        "name": subject.name,
        "policy": written(subject.config),
        "fingerprint": subject.fingerprint,
        "clock": clock.name,
        "mode": judged.mode,
        "card": facts,
        "bounds": bounds(measured_ms=medians | {"step": _median(judged.samples)}),
        **_times(config, spans, runs),
        "paced": None if paced is None else schedule.summary(paced),
        "modes": {run.mode: _mode(run) for run in runs},
        "attention": _attention(runs, step, fresh()),
        "verdict": verdict(config.hz, config.io_ms, judged, paced),
        "chosen": chosen,
        "cold_start": _cold(subject, cold, runs, warm),
        "recompiles": around["recompiles"],
        "window": around,
        "staged_equals_whole": {"largest_difference": difference},
        "memory": peak_memory(clock.device),
        "environment": environment(clock.device, config.seed) | {"load_before": before},
    }
    result["warnings"] = _warnings(result)
    services: Services = {"back to back": judged.samples} if len(judged.samples) else {}
    if paced is None:
        return result, services, ()
    return result, services | {"paced": paced.service_ns.tolist()}, paced.response_ns.tolist()


def _times(config: ProfileConfig, spans: Spans, runs: Sequence[Run]) -> Result:
    """What was timed back to back: the stages of a split step, the whole steps of the first mode, and shares."""
    judged = runs[0]
    return {
        "stages": {name: summary(spans.samples[name]) for name in STAGES if name in spans.samples},
        "pass": summary(spans.samples[PASS]) | {"each_step": len(spans.samples[PASS]) // config.samples},
        "staged": summary(spans.samples[STAGED]),
        "step": summary(judged.samples) if len(judged.samples) else None,
        "shares": _shares(spans, runs),
        "device_ms": {run.mode: _median(spans.device[run.mode]) for run in runs if len(run.samples)},
    }


def _choose(config: ProfileConfig, step: ControlStep, batches: Sequence[dict[str, object]]) -> Result | None:
    """Choose threads and attention kernel by a probe (CPUs), or set the threads that were asked for."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if step.policy.device.type != "cpu":
        return None
    here = torch.get_num_threads()
    return probe(step.policy, batches, [config.threads] if config.threads else sorted({1, here}))


def _warnings(result: Result) -> list[str]:
    """What makes the figures worth less than they look."""
    found = [f"the cost card is wrong: {what}" for what in result["card"]["checked"]["differs"]]
    storm = result["window"]["garbage"]["storm"]
    found += [storm] if storm else []
    found += [f"mode {name}: {mode['refused']}" for name, mode in result["modes"].items() if mode["refused"]]
    if not result["cold_start"]["steady"]:
        found.append("the step's time did not settle while warming up")
    machine = result["environment"]
    busy = max((machine["load"] or [0.0])[0], (machine["load_before"] or [0.0])[0])
    if busy > 1.2 * (machine["cpu_count"] or 1):
        found.append(f"the machine was busy with other work: load {busy:.1f} on {machine['cpu_count']} cores")
    return found


def _mode(run: Run) -> Result:
    return {
        "step": summary(run.samples) if len(run.samples) else None,
        "parity": run.parity,
        "refused": run.refused,
        "first_call_ms": run.first_call_ms,
    }


def _attention(runs: Sequence[Run], step: ControlStep, inputs: Any) -> list[Result]:
    """Audit the eager step and, if asked for, the one in bfloat16: other types get other kernels."""
    steps = {"eager": step} | {run.mode: run.step for run in runs if run.mode == "bf16" and run.step}
    with torch.inference_mode(False):  # in inference mode the dispatcher keeps fused calls whole
        batch = step.batch(inputs)
        ways = [(name, one.act, getattr(one.act, "policy", step.policy)) for name, one in steps.items()]
        rows = [(name, row) for name, act, policy in ways for row in audit(policy, partial(act, batch))]
    return [{"mode": name, **row} for name, row in rows]


def _shares(spans: Spans, runs: Sequence[Run]) -> dict[str, float]:
    """Median share of each stage in the staged step, what no stage accounts for, and the price of splitting."""
    wall = np.asarray(spans.samples[STAGED], np.float64)
    parts = {name: np.asarray(spans.samples[name]) / wall for name in STAGES if name in spans.samples}
    shares = {name: float(np.median(part)) for name, part in parts.items()}
    shares["unaccounted"] = float(np.median(1 - sum(parts.values())))
    eager = next((run.samples for run in runs if run.mode == "eager"), ())
    if len(eager):
        shares["staged_over_step"] = float(np.median(wall / np.asarray(eager)))
    return shares


def _median(durations: Sequence[int]) -> float | None:
    return float(np.median(np.asarray(durations))) / 1e6 if len(durations) else None


def _cold(subject: Subject, calls: Sequence[int], runs: Sequence[Run], warm: WarmUp) -> Result:
    """What happens once, apart from the steady figures (ms)."""
    return {
        **{f"{name}_ms": 1000 * seconds for name, seconds in subject.seconds.items()},
        "first_calls_ms": [duration / 1e6 for duration in calls],
        "modes_ms": {run.mode: run.first_call_ms for run in runs},
        "warm_up_calls": warm.calls,
        "steady": warm.steady,
    }


def _files(config: ProfileConfig) -> dict[str, Path]:
    """Where everything goes: the picture and the traces lie beside the result and are named after it."""
    path = result_path(config)
    names = {"picture": ".svg", "back to back": "_trace.json", "paced": "_trace_paced.json"}
    return {"result": path} | {name: path.with_name(path.stem + end) for name, end in names.items()}


def _trace(config: ProfileConfig, result: Result, name: str, service: Sequence[int]) -> trace.Trace:
    """The single times of one run, as the simulation replays them."""
    tokens, (policy,) = result["card"]["tokens"], result["policy"].values()
    cameras = len(policy["cameras"])
    shape = {"batch": config.batch, "cameras": cameras, "prefix": tokens["prefix"]}
    return trace.Trace(
        device=result["environment"]["device"],
        policy=result["policy"],
        shape=shape | {"actions": tokens["actions"], "chunk": tokens["chunk"]},
        mode=result["mode"],
        hz=config.hz if name == "paced" else None,
        service=tuple(int(duration) for duration in service),
        inputs_seed=config.seed,
        environment=result["environment"],
    )


def _write(config: ProfileConfig, result: Result, services: Services, responses: Sequence[int]) -> None:
    files = _files(config)
    files["result"].parent.mkdir(parents=True, exist_ok=True)
    picture = draw(result, services, responses)
    result["picture"] = None if picture is None else files["picture"].name
    result["traces"] = {name: files[name].name for name in services}
    for name, service in services.items():
        trace.write(files[name], _trace(config, result, name, service))
    if picture is not None:
        files["picture"].write_text(picture, encoding="utf-8")
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    checkpoint.replace_file(files["result"], lambda file: file.write(text.encode()))
