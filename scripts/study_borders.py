"""How roughly the arm is sent from one chunk to the next: jerk of the commanded tool at chunk borders, by handling.

    python scripts/study_borders.py CHECKPOINT --latency fixed:200ms --episodes 20

A flow policy; at every control tick the tool target in force is read. A border's jerk is the largest third difference
of the target (mm a tick^3) over the ticks around it; elsewhere every third difference is
read for comparison.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from robotattn import checkpoint
from robotattn.config import from_dict
from robotattn.control.chunks import Handling
from robotattn.control.clock import parse
from robotattn.envs import EnvConfig, make_env
from robotattn.evaluate import EvaluateConfig, write_json
from robotattn.loop import Timing, run_episodes
from robotattn.rollouts import Job, make_agent
from robotattn.seeds import stream
from robotattn.timing import TimingConfig

SHOWN: tuple[Handling, ...] = ("naive", "skip-executed", "ensemble", "real-time")


@dataclass(frozen=True)
class Study:
    """What to measure."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A flow policy's checkpoint."""
    latency: str = "fixed:200ms"
    """Of every inference."""
    episodes: int = 20
    """Of each handling, on the same seeds."""
    seed: int = 2000
    """Base seed."""
    out: Path | None = None
    """JSON file of the figures."""


def main(study: Study) -> None:
    rows = {handling: measured(study, handling) for handling in SHOWN}
    table = Table("handling", "borders", "jerk at borders", "p90", "jerk elsewhere", "success", title="mm a tick^3")
    for handling, row in rows.items():
        table.add_row(
            handling, str(row["borders"]), f"{row['jerk']:.1f}", f"{row['p90']:.1f}", f"{row['elsewhere']:.1f}",
            f"{row['successes']} of {study.episodes}",
        )  # fmt: skip
    Console().print(table)
    result = {
        "schema": 1,
        "kind": "borders",
        "checkpoint": checkpoint.results_folder(study.checkpoint).name,
        "latency": study.latency,
    }
    result |= {"episodes": study.episodes, "seed": study.seed, "rows": rows}
    if study.out is not None:
        write_json(study.out, result)
    print(json.dumps({"script": "study_borders", **result}))


def measured(study: Study, handling: Handling) -> dict[str, Any]:
    """Run one handling's episodes and read the targets."""
    config = EvaluateConfig(study.checkpoint, timing=TimingConfig(late=handling))
    trained = from_dict(EnvConfig, checkpoint.load(study.checkpoint).env, str(study.checkpoint))
    env, seeds = make_env(trained), tuple(stream("evaluate", study.seed, study.episodes))
    chunks = config.timing.chunks(1, None)
    agent = make_agent(Job(seeds, trained, checkpoint=study.checkpoint, chunks=chunks), [env])
    noted = Targets(env.unwrapped)
    timing = Timing(parse(study.latency), log=noted.event)
    successes = 0
    for episode in run_episodes([env], agent, seeds, chunks, timing=timing):
        successes += episode.success
        noted.end()
    env.close()
    borders, elsewhere = (np.concatenate(part) for part in (noted.borders, noted.others))
    return {
        "borders": len(borders), "jerk": float(borders.mean()), "p90": float(np.quantile(borders, 0.9)),
        "elsewhere": float(elsewhere.mean()), "successes": successes,
    }  # fmt: skip


class Targets:
    """Reads the tool target in force at every control tick of an episode, and where chunks changed."""

    def __init__(self, env: Any) -> None:
        self.env, self.borders, self.others = env, list[np.ndarray](), list[np.ndarray]()
        self._send, self._end_tick = env.send, env.end_tick
        env.send, env.end_tick = self.send, self.end_tick
        self.begin()

    def begin(self) -> None:
        self.now: np.ndarray | None = None
        self.path, self.changed, self.chunk, self.fresh = list[np.ndarray](), list[int](), -1, False

    def send(self, action: np.ndarray) -> None:
        self.now = self.env.tool_pose()[:3] + action[:3]
        self._send(action)

    def end_tick(self) -> Any:
        if self.now is not None:
            self.path.append(self.now)
        return self._end_tick()

    def event(self, seed: int, now: int, what: str, which: tuple[int, ...]) -> None:
        if what == "command" and which[0] != self.chunk:
            if self.chunk >= 0:
                self.changed.append(len(self.path))
            self.chunk = which[0]

    def end(self) -> None:
        """Sort the third differences of the episode by whether a border lies in them."""
        if len(self.path) > 3:
            jerk = 1e3 * np.linalg.norm(np.diff(np.array(self.path), n=3, axis=0), axis=1)
            around = np.zeros(len(jerk), bool)
            largest = []
            for tick in self.changed:
                window = slice(max(0, tick - 3), min(len(jerk), tick + 1))
                if window.stop > window.start:
                    largest.append(jerk[window].max())
                    around[window] = True
            self.borders.append(np.array(largest))
            self.others.append(jerk[~around])
        self.begin()


if __name__ == "__main__":
    main(tyro.cli(Study, description=__doc__))
