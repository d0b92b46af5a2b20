"""Time the environment: control steps with three cameras, the expert's success, and recording.

    python scripts/bench_env.py [--expert-seeds 500] [--record-episodes 100]

One core for the control steps (medians over alternating blocks), as many processes as asked for recording.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from robotattn.data.record import RecordConfig, record
from robotattn.envs import CameraConfig, EnvConfig, make_env
from robotattn.envs.experts import PickUpExpert
from robotattn.loop import run_episodes
from robotattn.seeds import stream
from robotattn.statistics import wilson

CAMERAS = ("front", "top", "wrist")


@dataclass(frozen=True)
class Bench:
    """What to measure."""

    expert_seeds: int = 500
    """Episodes of the expert at each control rate."""
    record_episodes: int = 200
    """Episodes recorded in each mode."""
    steps: int = 400
    """Control steps timed at each image size."""
    workers: int = 2
    """Recording processes."""


def main(bench: Bench) -> None:
    result: dict[str, dict[str, Any]] = {
        "control_step_ms": control_steps(bench.steps),
        "expert": {str(hz): expert(hz, bench.expert_seeds) for hz in (10, 20, 50)},
        "recording": {name: recording(name, bench) for name in ("state", "three cameras")},
    }
    table = Table("quantity", "measured")
    for size, value in result["control_step_ms"].items():
        table.add_row(f"20 Hz control step, 3 cameras at {size} px, median (ms)", f"{value:.2f}")
    for hz, row in result["expert"].items():
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        table.add_row(
            f"expert at {hz} Hz", f"{row['successes']} of {row['episodes']} ({interval}), {row['steps']:.1f} steps"
        )
    for name, rate in result["recording"].items():
        table.add_row(f"recording, {name} (episodes/s)", f"{rate:.1f}")
    Console().print(table)
    print(json.dumps({"script": "bench_env", **result}))


def control_steps(steps: int) -> dict[str, float]:
    """Median time (ms) of a 20 Hz step with three cameras; the sizes alternate in blocks of 20 steps."""
    envs = {}
    for size in (0, 96, 224):
        cameras = tuple(CameraConfig(name, size, size) for name in CAMERAS) if size else ()
        envs[size] = make_env(EnvConfig(hz=20, cameras=cameras))
        envs[size].reset(seed=0)
    times: dict[int, list[float]] = {size: [] for size in envs}
    for block in range(steps // 20):
        action = np.array([0.03, 0.02, -0.02, 0.1, 1.0]) * (1 if block % 2 else -1)
        for size, env in envs.items():
            for _ in range(20):
                began = time.perf_counter()
                env.step(action)
                times[size].append(time.perf_counter() - began)
    return {str(size): 1e3 * statistics.median(values) for size, values in times.items()}


def expert(hz: int, episodes: int) -> dict[str, float]:
    """Success of the undisturbed expert at one control rate."""
    env = make_env(EnvConfig(hz=hz))
    runs = run_episodes([env], PickUpExpert([env]), stream("validate", hz, episodes))
    done = list(track(runs, f"expert at {hz} Hz", total=episodes))
    successes = sum(episode.success for episode in done)
    interval = wilson(successes, episodes)
    steps = float(np.mean([episode.steps for episode in done]))
    return {"successes": successes, "episodes": episodes, "low": interval.low, "high": interval.high, "steps": steps}


def recording(name: str, bench: Bench) -> float:
    """Episodes a second that `robotattn record` writes, the start of its processes included."""
    cameras = tuple(CameraConfig(camera) for camera in CAMERAS) if name == "three cameras" else ()
    with tempfile.TemporaryDirectory() as folder:
        env = EnvConfig(cameras=cameras, object_tokens=True)
        config = RecordConfig(
            out=Path(folder) / "demos", env=env, episodes=bench.record_episodes, workers=bench.workers
        )
        began = time.perf_counter()
        record(config)
        return bench.record_episodes / (time.perf_counter() - began)


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
