"""The training loop: one for every policy, on CPU, one GPU or several (accelerate).

Everything random derives from (seed, step, process): which samples a step sees, their augmentation, dropout. So a run
that was killed goes on from its last checkpoint to the same weights as if it had not been; on the CPU to the same bits.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import send_to_device
from torch import Tensor, nn

from robotattn import checkpoint
from robotattn.config import UsageError, to_dict
from robotattn.ema import Average
from robotattn.tracking import Metrics, Wandb
from robotattn.train_config import TrainConfig

Progress = Callable[[str, int, int], None]
STATE, METRICS = "training_state.pt", "metrics.jsonl"


class TrainingStopped(RuntimeError):
    """Training cannot go on; the last checkpoint is kept."""

    exit_code = 1


class Data(Protocol):
    """A source of samples: stateless, so that a batch depends on its arguments alone."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, generator: np.random.Generator) -> Mapping[str, Any]:
        """Return the samples of these indices as one batch of tensors."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of step 0, 1, ...: a linear rise over `warmup` steps, then a cosine that ends at 0."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * share))


def sample_order(seed: int, step: int, batch: int, count: int) -> np.ndarray:
    """Return the samples of a step, int64 ``[batch]``: every epoch shuffles all, and batches run across epochs."""
    first = step * batch
    epochs = range(first // count, (first + batch - 1) // count + 1)
    order = np.concatenate([np.random.default_rng([seed, 1, epoch]).permutation(count) for epoch in epochs])
    return order[first - epochs[0] * count :][:batch]


class _Loss(nn.Module):
    """The loss as a forward pass: what accelerate wraps for several processes and for mixed precision."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return self.policy.loss(batch)


class TrainingLoop:
    """The loop: steps, averages, metrics, checkpoints.

    policy: a module with ``loss(batch) -> {"loss": to be minimised, other numbers to log}``. write: called as
    ``write(folder, averaged policy, steps=, minutes=)`` for checkpoint/ and snapshots/. about: plain values to
    keep in the training state. state: the one to go on from, {} at the start.
    """

    def __init__(
        self,
        config: TrainConfig,
        policy: Any,
        data: Data,
        write: Callable[..., None],
        about: Mapping[str, Any],
        state: Mapping[str, Any],
        accelerator: Accelerator,
        progress: Progress | None = None,
        callbacks: Sequence[Callable[[dict[str, Any]], None]] = (),
    ) -> None:
        self.config, self.data, self.write, self.progress, self.callbacks = config, data, write, progress, callbacks
        self.about, self.accelerator = about, accelerator
        self.policy = policy.to(self.accelerator.device).train()
        self.average = Average(policy, config.ema)
        self.optimizer = torch.optim.AdamW(_groups(policy, config.weight_decay), config.lr, config.betas, fused=True)
        self.step, self.minutes = state.get("step", 0), state.get("minutes", 0.0)
        self.sums: dict[str, float] = dict(state.get("sums", {}))  # over the steps since the last line of metrics
        if state:
            policy.load_state_dict(state["policy"])
            self.average.model.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.model, self.stepper = self.accelerator.prepare(_Loss(policy), self.optimizer)
        self.writers: list[Metrics | Wandb] = []
        self.interrupted = 0  # number of the signal

    def run(self) -> None:
        """Train until the last step or a signal (then KeyboardInterrupt or SystemExit, with the checkpoint written)."""
        with self._writers(), self._signals(), torch.random.fork_rng(devices=[]):
            while self.step < self.config.steps and not self._stop():
                before = self.minutes
                self._log(self._advance())
                for mark in self.config.snapshot_minutes:
                    if before < mark <= self.minutes:
                        self._write(self.config.out / "snapshots" / f"{mark:g}")
                if self.step % self.config.checkpoint_every == 0 and self.step < self.config.steps:
                    self.save()
            self.save()
        if self.interrupted == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.interrupted:
            raise KeyboardInterrupt

    def save(self) -> None:
        """Write the training state, then the checkpoint: each is whole at any moment; the state alone is resumed."""
        if not self.accelerator.is_main_process:
            return
        for writer in self.writers:
            writer.flush()
        state = {
            **self.about,
            "config": to_dict(self.config),
            "step": self.step,
            "minutes": self.minutes,
            "sums": self.sums,
            "policy": self.policy.state_dict(),
            "average": self.average.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        checkpoint.save_state(self.config.out / STATE, state)
        self._write(self.config.out / "checkpoint")

    def _write(self, folder: Path) -> None:
        if self.accelerator.is_main_process:
            self.write(folder, self.average.model, steps=self.step, minutes=self.minutes)

    def _advance(self) -> dict[str, float]:
        """Do one optimiser step and return its numbers."""
        started = time.perf_counter()
        batch = self._batch()
        rate = learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = self.model(batch)
        values = {name: value.item() for name, value in losses.items()}
        self._check(values)
        self.accelerator.backward(losses["loss"])
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip))
        self._check(values | {"gradient_norm": norm})
        self.stepper.step()
        self.stepper.zero_grad()
        self.average.update(self.policy, self.step)
        self.step += 1
        seconds = time.perf_counter() - started
        self.minutes += seconds / 60
        return values | {"gradient_norm": norm, "seconds": seconds}

    def _batch(self) -> Mapping[str, Any]:
        """Make this process's share of the step's batch; seeds torch for augmentation and dropout."""
        config, rank, world = self.config, self.accelerator.process_index, self.accelerator.num_processes
        indices = sample_order(config.seed, self.step, config.batch, len(self.data))[rank::world]
        seeds = np.random.SeedSequence([config.seed, 2, self.step, rank])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
        return send_to_device(self.data.batch(indices, np.random.default_rng(seeds)), self.accelerator.device)

    def _check(self, values: Mapping[str, float]) -> None:
        if all(math.isfinite(value) for value in values.values()):
            return
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        kept = "an earlier step's checkpoint is kept" if (self.config.out / STATE).exists() else "no checkpoint yet"
        raise TrainingStopped(
            f"step {self.step + 1}: not finite: {shown}. Nothing was updated; {kept} in {self.config.out}. "
            f"Try a lower lr (it is {self.config.lr:g}) or a longer warmup, or look at the data"
        )

    def _log(self, values: Mapping[str, float]) -> None:
        """Sum up; at every `log_every`th step hand one line of means to the writers."""
        for name, value in {**values, "count": 1.0}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if self.accelerator.is_main_process and self.progress:
            self.progress("train", self.step, self.config.steps)
        if self.step % self.config.log_every and self.step < self.config.steps:
            return
        count, seconds = self.sums.pop("count"), self.sums.pop("seconds")
        line = {
            "step": self.step,
            "minutes": self.minutes,
            "lr": learning_rate(self.config, self.step - 1),
            **{name: total / count for name, total in self.sums.items()},
            "samples_per_second": self.config.batch * count / seconds,
        }
        self.sums.clear()
        if self.accelerator.is_main_process:
            for write in (*(writer.write for writer in self.writers), *self.callbacks):
                write(line)

    def _stop(self) -> bool:
        """Tell whether a signal asks to stop; all processes stop at the same step."""
        if self.accelerator.num_processes == 1:
            return bool(self.interrupted)
        flag = torch.tensor(float(self.interrupted), device=self.accelerator.device)
        self.interrupted = int(self.accelerator.reduce(flag, "sum").item()) and (self.interrupted or signal.SIGINT)
        return bool(self.interrupted)

    @contextmanager
    def _writers(self) -> Iterator[None]:
        if self.accelerator.is_main_process:
            self.writers.append(Metrics(self.config.out / METRICS, self.step))
            if self.config.tracker == "wandb":
                self.writers.append(Wandb(to_dict(self.config), self.config.out))
        try:
            yield
        finally:
            for writer in self.writers:
                writer.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM finish the step in flight and save; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: object) -> None:
            self.interrupted = number
            signal.signal(number, earlier[signal.Signals(number)])

        earlier = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Choose device and precision; raises UsageError if the batch cannot be shared out over the processes."""
    if "WORLD_SIZE" not in os.environ:  # accelerate keeps its first settings for the whole process otherwise
        AcceleratorState._reset_state(reset_partial_state=True)
    precision = {"fp32": "no", "bf16": "bf16"}[config.precision]
    accelerator = Accelerator(mixed_precision=precision, cpu=config.device == "cpu")
    if config.batch % accelerator.num_processes:
        raise UsageError(f"batch={config.batch}: must be a multiple of the {accelerator.num_processes} processes")
    return accelerator


def _groups(policy: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Split the parameters: matrices and convolutions decay, biases, norms and scalars do not."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [(decay, [p for p in parameters if p.dim() > 1]), (0.0, [p for p in parameters if p.dim() <= 1])]
    return [{"params": members, "weight_decay": value} for value, members in groups if members]
