"""Profile a policy: how long each stage of a control step takes, with its percentiles, on this machine.

In goes a checkpoint, or a configuration for a policy with random weights (which take as long); out comes one JSON
file. Neither simulator nor renderer is imported, so that a bare machine with torch can run it.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from robotattn import checkpoint
from robotattn.config import ONE_OF, UsageError, from_dict, parse, to_dict
from robotattn.instructions import sentences
from robotattn.latency.inputs import Batcher
from robotattn.latency.measure import Clock, Spans, WarmUp, quiet, summary, warm_up
from robotattn.latency.stages import (
    STAGES,
    ControlStep,
    count_parameters,
    random_observation,
    same_actions,
    token_counts,
)
from robotattn.policies import Policy, PolicyConfig, build
from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.tokens.text import Tokenizer, default_tokenizer
from robotattn.types import ACTION_SIZE, COLOURS, STATE_SIZE, Observation

SCHEMA = 1


@dataclass(frozen=True)
class ProfileConfig:
    """Time a checkpoint's control step, stage by stage."""

    checkpoint: Path | None = None
    """Checkpoint folder."""
    config: Path | None = None
    """Instead of a checkpoint: a training configuration, for its policy with random weights."""
    samples: int = 500
    """Timed steps; p99 needs 459, p99.9 needs 4603."""
    batch: int = 1
    """Observations of one step."""
    seed: int = 0
    """Of the random observations."""
    threads: int = 1
    """Threads of torch; 0: as they are."""
    device: str = "cpu"
    """Where the policy runs: cpu, cuda, cuda:1 or mps."""
    out: Path | None = None
    """Result file (.json) or a folder for it; default: profile.json in the run's folder."""

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.config is None):
            raise ValueError("checkpoint: give either a checkpoint folder or a config, not both and not neither")
        for name, least in (("samples", 1), ("batch", 1), ("seed", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")


@dataclass(frozen=True)
class _Subject:
    policy: Policy
    config: PolicyConfig
    tokenizer: Tokenizer
    fingerprint: dict[str, Any] | None
    load_seconds: float


def profile(config: ProfileConfig) -> dict[str, Any]:
    """Measure, write the result file and return what it holds.

    Raises UsageError for a checkpoint, configuration or device that cannot be used.
    """
    clock, threads = _clock(config.device), torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        result = _profile(config, _subject(config), clock)
    finally:
        torch.set_num_threads(threads)
    _write(result_path(config), result)
    return result


def result_path(config: ProfileConfig) -> Path:
    """The file that `profile` writes: by default beside the checkpoint, in the run's folder."""
    if config.out is not None:
        return config.out if config.out.suffix == ".json" else config.out / "profile.json"
    if config.checkpoint is None:
        assert config.config is not None
        return Path("runs") / config.config.stem / "profile.json"
    return checkpoint.results_folder(config.checkpoint) / "profile.json"


def _clock(device: str) -> Clock:
    try:
        clock = Clock(device)
        torch.zeros(1, device=clock.device)
    except (RuntimeError, ValueError, AssertionError) as error:  # torch raises each of them for a missing device
        raise UsageError(f"device: {device} cannot be used: {str(error).splitlines()[0]}") from None
    return clock


def _subject(config: ProfileConfig) -> _Subject:
    start = time.perf_counter()
    if config.checkpoint is not None:
        loaded = checkpoint.load(config.checkpoint, config.device)
        seconds = time.perf_counter() - start
        return _Subject(loaded.policy, loaded.config, loaded.tokenizer, loaded.fingerprint, seconds)
    assert config.config is not None
    chosen = read_policy(config.config)
    policy = build(chosen)
    policy.set_statistics(_unit_statistics(policy))
    policy = policy.to(config.device).eval()
    return _Subject(policy, chosen, default_tokenizer(), None, time.perf_counter() - start)


@dataclass(frozen=True)
class _Part:
    policy: Annotated[PolicyConfig, ONE_OF]


def read_policy(path: Path) -> PolicyConfig:
    """The policy of a training configuration; raises UsageError where the file has none."""
    try:
        data, _ = parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if not isinstance(data, dict) or "policy" not in data:
        raise UsageError(f"{path}: has no policy; allowed is a training configuration")
    return from_dict(_Part, {"policy": data["policy"]}, str(path)).policy


def _unit_statistics(policy: Policy) -> Statistics:
    sizes = {"state": STATE_SIZE, "action": ACTION_SIZE[policy.action_mode], "position": 4}
    return Statistics({key: _unit(key, size) for key, size in sizes.items()})


def _unit(key: str, size: int) -> Moments:
    return Moments(tuple(f"{key}_{index}" for index in range(size)), (0.0,) * size, (1.0,) * size, floor=1e-3)


def _profile(config: ProfileConfig, subject: _Subject, clock: Clock) -> dict[str, Any]:
    texts = [text for colour in COLOURS for text in sentences(colour)]
    batcher = Batcher(subject.tokenizer.encode, list(subject.config.cameras), clock.device, subject.config.frames)
    length = max(len(batcher.ids(text)) for text in texts)  # one shape for all: another length would be another case
    step = ControlStep(subject.policy, batcher, length)
    generator = np.random.default_rng(config.seed)

    def fresh() -> list[Observation]:
        return [random_observation(subject.config, generator, texts) for _ in range(config.batch)]

    with torch.inference_mode():
        warm = warm_up(lambda: step.whole(fresh()), clock)
        difference = same_actions(step, fresh(), Spans(clock))
        spans = _measure(step, fresh, config.samples, clock)
        counts = token_counts(step.tokens(fresh()))
        chunk = step.whole(fresh()).shape[1]
    return {
        "schema": SCHEMA,
        "kind": "profile",
        "config": to_dict(config),
        "policy": to_dict(_Part(subject.config))["policy"],
        "fingerprint": subject.fingerprint,
        "clock": clock.name,
        "stages": {name: summary(spans.samples[name]) for name in (*STAGES, "staged", "step")},
        "shares": _shares(spans),
        "tokens": {**counts, "actions": chunk},
        **count_parameters(subject.policy),
        "cold_start": _cold(subject, warm),
        "staged_equals_whole": {"largest_difference": difference},
        "environment": environment(clock.device),
    }


def _measure(step: ControlStep, fresh: Callable[[], list[Observation]], samples: int, clock: Clock) -> Spans:
    """Time staged and whole steps in turn (A B A B), so that both see the same machine."""
    spans = Spans(clock)
    with quiet():
        for _ in range(samples):
            first, second = fresh(), fresh()  # made outside every timed span
            spans.run("staged", partial(step.staged, first, spans))
            spans.run("step", partial(step.whole, second))
    return spans


def _shares(spans: Spans) -> dict[str, float]:
    """Median share of each stage in the staged step, what no stage accounts for, and the price of splitting."""
    staged = np.asarray(spans.samples["staged"], np.float64)
    parts = {name: np.asarray(spans.samples[name]) / staged for name in STAGES}
    shares = {name: float(np.median(part)) for name, part in parts.items()}
    shares["unaccounted"] = float(np.median(1 - sum(parts.values())))
    shares["staged_over_step"] = float(np.median(staged / np.asarray(spans.samples["step"])))
    return shares


def _cold(subject: _Subject, warm: WarmUp) -> dict[str, Any]:
    """What happens once, apart from the steady figures (ms)."""
    return {
        "load_ms": 1000 * subject.load_seconds,
        "first_calls_ms": [duration / 1e6 for duration in warm.durations[:3]],
        "warm_up_calls": warm.calls,
        "steady": warm.steady,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, as far as a latency depends on it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": name,
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": checkpoint.versions(),
        "cuda": torch.version.cuda,
    }


def _cpu() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = ()
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def _write(path: Path, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.replace_file(path, lambda file: file.write(text.encode()))
