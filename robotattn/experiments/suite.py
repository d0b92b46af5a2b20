"""Run the experiments: names come in; a JSON file and a figure for each, and one page of all, go out."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro

from robotattn.experiments import (
    e1_look_up,
    e2_fetch,
    e3_scale,
    e4_positions,
    e5_depth,
    e6_masks,
    e7_tokens,
)
from robotattn.experiments.drawing import png
from robotattn.experiments.page import render
from robotattn.experiments.result import Progress, Result

Name = Literal["e1", "e2", "e3", "e4", "e5", "e6", "e7"]
EXPERIMENTS: dict[str, Callable[[Progress], Result]] = {
    "e1": e1_look_up.run,
    "e2": e2_fetch.run,
    "e3": e3_scale.run,
    "e4": e4_positions.run,
    "e5": e5_depth.run,
    "e6": e6_masks.run,
    "e7": e7_tokens.run,
}
PAGE = "experiments.html"


@dataclass(frozen=True)
class ExperimentsConfig:
    """Run the attention experiments and compare with published figures."""

    names: Annotated[tuple[Name, ...], tyro.conf.Positional] = ()
    """Which experiments; none named: all seven."""
    out: Path = Path("runs/experiments")
    """Folder for the JSON files, the figures and the page."""


def experiments(config: ExperimentsConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Run the named experiments, write `e1.json`, `e1.png`, ... and the page, and return what the page shows."""
    names = [name for name in get_args(Name) if name in config.names or not config.names]
    config.out.mkdir(parents=True, exist_ok=True)
    found = []
    with _apart():
        for name in names:
            result, seconds = _timed(EXPERIMENTS[name], progress or _silent)
            picture = png(result.figure)
            told = {"name": name, **result.plain(), "seconds": round(seconds, 2), "versions": versions()}
            _replace(config.out / f"{name}.png", picture)
            _replace(config.out / f"{name}.json", (json.dumps(told, ensure_ascii=False) + "\n").encode())
            found.append((told, picture))
    _replace(config.out / PAGE, render(found).encode())
    told_all = [told for told, _ in found]
    return {
        "page": str(config.out / PAGE),
        "agrees": all(told["agrees"] for told in told_all),
        "rows": sum(len(told["rows"]) for told in told_all),
        "differs": [f"{t['name']}: {r['quantity']}" for t in told_all for r in t["rows"] if r["verdict"] != "agrees"],
        "seconds": {told["name"]: told["seconds"] for told in told_all},
        "experiments": told_all,
    }


def versions() -> dict[str, str]:
    """Return what the numbers depend on besides this program."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def _timed(run: Callable[[Progress], Result], progress: Progress) -> tuple[Result, float]:
    began = time.monotonic()
    return run(progress), time.monotonic() - began


def _silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def _apart() -> Iterator[None]:
    """Leave torch's random numbers as they were, and compute on one thread: small tensors, sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(path)
