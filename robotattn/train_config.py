"""What one training is made of, and which of it may differ when a run is resumed."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

from robotattn.config import ONE_OF
from robotattn.control.clock import parse
from robotattn.policies import PolicyConfig


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
