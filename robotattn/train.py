"""Training: demonstrations and a policy's configuration in, a run's folder with checkpoint and metrics out.

The loop is in `robotattn.training_loop`; here are the configuration, the folder, and what is put together.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from robotattn import checkpoint, trained_delay
from robotattn.config import ONE_OF, UsageError, dumps, from_dict, load, to_dict
from robotattn.control.clock import parse
from robotattn.data.delays import Latency
from robotattn.data.normalise import statistics
from robotattn.data.windows import IMAGES, Windows
from robotattn.policies import PolicyConfig, build
from robotattn.tokens.text import Tokenizer, default_tokenizer
from robotattn.training_loop import METRICS, STATE, Progress, TrainingLoop, make_accelerator

log = logging.getLogger(__name__)
CONFIG = "config.yaml"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What one training is made of; everything else follows from the data set."""

    data: Path
    """Folder of demonstrations; the policy is evaluated in its environment."""
    out: Path
    """Folder of the run: checkpoint/, snapshots/, metrics.jsonl, config.yaml, training_state.pt."""
    policy: Annotated[PolicyConfig, ONE_OF]
    """The policy and its size."""
    also: tuple[Path, ...] = ()
    """Further folders, of the same rate, cameras and actions: other tasks, other light."""
    steps: int = 2000
    """Optimiser steps."""
    batch: int = 48
    """Samples a step, over all processes together."""
    lr: float = 1e-3
    """Highest learning rate."""
    warmup: int = 200
    """Steps in which the learning rate rises linearly; then it falls to 0 along a cosine."""
    weight_decay: float = 0.01
    """AdamW's, on matrices and convolutions (not on biases and norms)."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.998
    """Decay of the moving average of the weights, which is what is saved as the policy; 0: no average."""
    seed: int = 0
    """Of initial weights, sample order and augmentation."""
    episodes: int | None = None
    """Use the first so many episodes of each folder only."""
    permute_colours: bool = False
    """Permute colours in object tokens and instruction together."""
    on_bad: Literal["fail", "skip"] = "fail"
    """What to do about a damaged episode."""
    latency_trace: Path | None = None
    """Recorded latencies (.json): train for chunks that start when they arrive, each one drawn from these late."""
    latency: str | None = None
    """The same with a clock: fixed:80ms, or lognormal:80ms:200ms (median and 99th percentile)."""
    threads: int = 0
    """Threads of torch; 0: as they are. Use 1 when jobs share a machine."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPU if there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: mixed precision."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    snapshot_minutes: tuple[float, ...] = ()
    """Keep a checkpoint at these minutes of training time, in snapshots/MINUTES."""
    log_every: int = 20
    """Steps that one line of metrics sums up."""
    tracker: Literal["none", "wandb"] = "none"
    """Where metrics go beside metrics.jsonl."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "checkpoint_every", "log_every"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(self.episodes is None or self.episodes >= 1, "episodes", "at least 1, or null", self.episodes)
        for name in ("lr", "clip"):
            _require(0 < getattr(self, name) < math.inf, name, "above 0", getattr(self, name))
        for name in ("warmup", "threads", "seed"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _require(0 <= self.weight_decay < math.inf, "weight_decay", "at least 0", self.weight_decay)
        _require(0 <= self.ema < 1, "ema", "in [0, 1)", self.ema)
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", "in [0, 1)", self.betas)
        ascending = all(a < b for a, b in zip((0.0, *self.snapshot_minutes), self.snapshot_minutes, strict=False))
        _require(ascending, "snapshot_minutes", "above 0 and ascending", self.snapshot_minutes)
        only = self.latency is None or self.latency_trace is None
        _require(only, "latency", "absent where latency_trace names a trace", self.latency)
        if self.latency is not None:
            parse(self.latency)


def _require(condition: bool, name: str, allowed: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}, got {value}")


ELSEWHERE = {"out", "data", "also", "latency_trace"}
"""Where files lie may differ when a run is resumed: hashes of data and traces are compared."""
MAY_CHANGE = ELSEWHERE | {"steps", "checkpoint_every", "log_every", "snapshot_minutes", "tracker"}
"""Fields that may differ when a run is resumed: they do not decide a step."""


def train(
    config: TrainConfig,
    resume: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[Callable[[dict[str, Any]], None]] = (),
) -> Path:
    """Train a policy and return the run's folder; with `resume`, go on from its last checkpoint (if it has one).

    progress: called with (what, done, total). callbacks: called with each line of metrics. Raises UsageError if the
    folder holds another run, TrainingStopped if the loss is not finite, KeyboardInterrupt after Ctrl-C, when the
    checkpoint is written.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    accelerator = make_accelerator(config)
    state = open_run(config, resume)
    delay = trained_delay.read(config.latency_trace, config.latency)
    _check_same_delay(config, delay, state)
    tokenizer = default_tokenizer()
    windows = read_windows(config, tokenizer, progress, None if delay is None else delay.clock.latency)
    name = "+".join(folder.name for folder in (config.data, *config.also))
    dataset = windows.description | {"name": name, "used": len(windows.lines), "sha256": windows.hash}
    if state and state["dataset"] != dataset["sha256"]:
        raise UsageError(f"{config.data}: the episodes are not those that the run {config.out} was started with")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = build(config.policy)
    policy.set_statistics(statistics(windows, warn=log.warning))

    def write(folder: Path, averaged: Any, **training: Any) -> None:
        about = checkpoint.fingerprint(dataset, **training, **({} if delay is None else {"latency": delay.about}))
        checkpoint.save(folder, averaged, to_dict(config), tokenizer, about)

    accelerator.wait_for_everyone()  # all have looked at the folder before the first one writes there
    if accelerator.is_main_process:
        create_run(config)
    keep = {"dataset": dataset["sha256"], "latency": None if delay is None else delay.identity}
    TrainingLoop(config, policy, windows, write, keep, state, accelerator, progress, callbacks).run()
    return config.out


def read_windows(
    config: TrainConfig, tokenizer: Tokenizer, progress: Progress | None = None, latency: Latency | None = None
) -> Windows:
    """Load the demonstrations that the policy needs; raises UsageError if they do not fit it."""
    policy = config.policy
    if tokenizer.size > policy.vocabulary:
        raise UsageError(f"policy vocabulary={policy.vocabulary}: the tokenizer has {tokenizer.size} tokens")
    windows = Windows(
        config.data,
        also=config.also,
        chunk=policy.chunk,
        cameras=tuple(policy.cameras),
        action_mode=policy.action_mode,
        frames=policy.frames,
        frame_gap=policy.frame_gap,
        episodes=config.episodes,
        objects=policy.objects,
        permute_colours=config.permute_colours,
        on_bad=config.on_bad,
        latency=latency,
        tokenizer=tokenizer,
        progress=progress,
    )
    if windows.skipped:
        log.warning("%d damaged episodes are left out, the first: %s", len(windows.skipped), windows.skipped[0])
    if windows.empty > 0.1:
        log.warning("%.0f %% of the windows have no target left inside their episode", 100 * windows.empty)
    for name, size in policy.cameras.items():
        if (found := windows.frames[IMAGES + name].shape[1:3]) != tuple(size):
            raise UsageError(f"policy cameras: {name}: {list(size)} (height, width), but recorded are {list(found)}")
    return windows


def open_run(config: TrainConfig, resume: bool) -> dict[str, Any]:
    """Check that the run's folder is free, or holds this run; return its training state ({} at the start)."""
    out = config.out
    if (out / CONFIG).exists():
        if not resume:
            raise UsageError(f"{out}: already holds a run; --resume goes on with it, --out names another folder")
        _check_same(config, load(out / CONFIG, TrainConfig), out)
    elif found := [name for name in ("manifest.jsonl", "dataset.json", METRICS, STATE) if (out / name).exists()]:
        raise UsageError(f"{out}: holds {', '.join(found)} but no {CONFIG}: not a run; --out names another folder")
    if not (out / STATE).exists():
        return {}
    state = checkpoint.load_state(out / STATE)
    _check_same(config, from_dict(TrainConfig, state["config"], str(out / STATE)), out)
    if config.steps < state["step"]:
        raise UsageError(f"{out}: steps={config.steps}, but the run has done {state['step']} steps")
    return state


def create_run(config: TrainConfig) -> None:
    """Create the run's folder with its resolved configuration; raises UsageError if that is not possible."""
    text = dumps(config).encode()
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        checkpoint.replace_file(config.out / CONFIG, lambda file: file.write(text))
    except OSError as error:
        raise UsageError(f"out={config.out}: cannot write there: {error.strerror}") from None


def _check_same(config: TrainConfig, earlier: TrainConfig, out: Path) -> None:
    for field in dataclasses.fields(config):
        old, new = getattr(earlier, field.name), getattr(config, field.name)
        if old != new and field.name not in MAY_CHANGE:
            raise UsageError(f"{out}: cannot resume with another {field.name}: was {old}, is {new}")


def _check_same_delay(config: TrainConfig, delay: trained_delay.TrainedDelay | None, state: dict[str, Any]) -> None:
    """Refuse to go on with other latencies; where the trace lies may have changed."""
    was, now = state.get("latency"), None if delay is None else delay.identity
    if state and was != now:
        raise UsageError(
            f"{config.out}: cannot resume with another latency_trace: the run was started with sha256 {was or 'none'}, "
            f"latency_trace={config.latency_trace} has {now or 'none'}"
        )
