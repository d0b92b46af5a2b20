"""Runs to make frontiers of, whose policies have random weights and whose episodes last for four ticks."""

import dataclasses
import sys
from pathlib import Path

import torch

from robotattn import checkpoint
from robotattn.config import to_dict
from robotattn.envs import EnvConfig
from robotattn.frontier_cells import FrontierConfig
from robotattn.latency import trace
from robotattn.latency.subject import written
from robotattn.policies import ACTConfig, BlockwiseConfig, build
from robotattn.tokens.text import default_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from batches import statistics

SMALL = {"objects": True, "width": 32, "heads": 2, "feedforward": 32, "text_width": 16, "stem_channels": 8, "chunk": 4}
ACT, FLOW = ACTConfig(**SMALL), BlockwiseConfig(layers=1, **SMALL)
BINS = dataclasses.replace(FLOW, head="autoregressive")
TOKENS = 13  # of an instruction
WORDS = ("fixed:0ms", "fixed:150ms")


def save(folder: Path, config) -> Path:
    """A run with a checkpoint of random weights, whose episodes last for four ticks."""
    torch.manual_seed(0)
    policy = build(config).eval()
    policy.set_statistics(statistics(config.action_mode))
    about = checkpoint.fingerprint() | {"env": to_dict(EnvConfig(time_limit=0.4, object_tokens=True))}
    checkpoint.save(folder / "checkpoint", policy, {"policy": written(config)}, default_tokenizer(), about)
    return folder


def two(folder: Path) -> tuple[Path, Path]:
    """The folders of two runs, one of each kind of policy."""
    return save(folder / "act", ACT), save(folder / "flow", FLOW)


def asked(runs, out: Path, **changes) -> FrontierConfig:
    return FrontierConfig(
        runs, **({"devices": WORDS, "late": ("hold",), "episodes": 2, "workers": 0, "out": out} | changes)
    )


def recorded(folder: Path, name: str, config, *milliseconds: float, **changes) -> Path:
    """Write a trace of a policy."""
    times = tuple(round(1e6 * one) for one in milliseconds)
    folder.mkdir(exist_ok=True)
    values = {"device": "cpu", "policy": written(config), "shape": {"batch": 1}, "mode": "eager", "service": times}
    trace.write(folder / name, trace.Trace(**(values | changes)))
    return folder / name
