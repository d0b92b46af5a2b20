"""Training: demonstrations and a policy's configuration in, a run's folder with checkpoint and metrics out.

The loop is in `robotattn.training_loop`; here are the configuration, the folder, and what is put together.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from robotattn import checkpoint, trained_delay
from robotattn.config import UsageError, dumps, from_dict, load, to_dict
from robotattn.data.delays import Latency
from robotattn.data.normalise import statistics
from robotattn.data.windows import IMAGES, Windows
from robotattn.policies import build
from robotattn.tokens.text import Tokenizer, default_tokenizer
from robotattn.train_config import MAY_CHANGE, TrainConfig
from robotattn.training_loop import METRICS, STATE, Progress, TrainingLoop, make_accelerator

log = logging.getLogger(__name__)
CONFIG = "config.yaml"


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
