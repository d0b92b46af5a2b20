"""Draw what each handling makes of late chunks, from the events of the loop itself: docs/handlings.png.

python scripts/draw_handlings.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

from robotattn.control.chunks import ChunkOptions, Handling
from robotattn.control.clock import Fixed
from robotattn.loop import Timing, run_episodes
from robotattn.types import Observation, Plan, Running

MS, TICK, LENGTH, TICKS = 1_000_000, 50, 8, 14
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


class Still(gym.Env):
    """A world of 50 ms ticks in which nothing happens."""

    substeps = TICK // 2

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        return {"state": np.zeros(13, np.float32), "instruction": "", "time": np.array([self.steps * 0.002])}

    def tool_pose(self) -> np.ndarray:
        return np.zeros(4)

    def send(self, action: np.ndarray) -> None:
        """Nothing moves."""

    def advance(self, steps: int) -> None:
        self.steps += steps

    def end_tick(self) -> Any:
        info = {"success": False, "reason": "time_limit", "episode": {}}
        return False, self.steps >= TICKS * self.substeps, info


class Chunks:
    """Plans of eight actions, a tick apart."""

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def plan(self, rows: Sequence[int], observations: Sequence[Observation]) -> list[Plan]:
        return [Plan(np.zeros((LENGTH, 1)), seen.time, TICK / 1e3) for seen in observations]

    def plan_from(
        self, rows: Sequence[int], observations: Sequence[Observation], running: Sequence[Running | None]
    ) -> list[Plan]:
        return self.plan(rows, observations)


def events(handling: Handling, latency: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """One episode's events: time (ms), what, which."""
    log: list[tuple[int, str, tuple[int, ...]]] = []
    timing = Timing(Fixed(latency * MS), log=lambda seed, now, what, which: log.append((now // MS, what, which)))
    options = ChunkOptions(4 if handling in ("hold", "continue") else 1, handling=handling)
    list(run_episodes([Still()], Chunks(), [0], options, timing=timing))
    return log


def main(out: Path = Path("docs/handlings.png"), latency: int = 130) -> None:
    """Write the picture.

    Args:
        out: The PNG file.
        latency: Of every inference (ms).
    """
    shown = [handling for handling in get_args(Handling) if handling not in ("real-time", "ensemble")]
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(11, 1.15 * len(shown)), layout="constrained")
        axes = figure.subplots(len(shown), 1, sharex=True)
        for one, handling in zip(axes, shown, strict=True):
            _draw(one, events(handling, latency))
            one.set_ylabel(handling, rotation=0, ha="right", va="center")
        axes[-1].set_xlabel(
            f"ms; above: inferences, {latency} ms each, below: the action that runs (its number in the chunk; colour = "
            "chunk, hatched = the last one is held)"
        )
        figure.savefig(out, dpi=110)
    print(out)


def _draw(axes: Any, log: Sequence[tuple[int, str, tuple[int, ...]]]) -> None:
    end = TICKS * TICK
    begun = {which[0]: time for time, what, which in log if what == "observe"}
    come = {which[0]: time for time, what, which in log if what == "arrive"}
    for chunk, start in begun.items():
        until = come.get(chunk, end)
        axes.barh(1, until - start, left=start, height=0.5, color=COLOURS[chunk % len(COLOURS)], alpha=0.45)
    sent = [(time, *which) for time, what, which in log if what == "command"]
    for (time, chunk, action), (following, *_) in zip(sent, [*sent[1:], (end, 0, 0)], strict=True):
        runs = min(following, time + TICK)
        axes.barh(0, runs - time, left=time, height=0.6, color=COLOURS[chunk % len(COLOURS)], edgecolor="white")
        axes.text((time + runs) / 2, 0, str(action), ha="center", va="center", color="white", fontsize=8)
        if following > runs:
            colour = COLOURS[chunk % len(COLOURS)]
            axes.barh(0, following - runs, left=runs, height=0.6, color="white", edgecolor=colour, hatch="////")
    for tick in range(0, end + 1, TICK):
        axes.axvline(tick, color="black", linewidth=0.3, alpha=0.4, zorder=0)
    axes.set(xlim=(0, end), ylim=(-0.5, 1.5), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
