"""Record demonstrations: the feedback expert, disturbed (DART), in several processes, strict successes only.

Episode i is a function of the configuration and i alone: its attempts draw their seeds from its own part of the seed
stream, so neither the number of workers nor a kill in between changes a byte. Running the same command again checks
what is there and records what is missing.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from robotattn.config import UsageError, to_dict
from robotattn.control.chunks import absolute
from robotattn.data import store
from robotattn.data.workers import WorkerError, run_tasks
from robotattn.envs import EnvConfig
from robotattn.loop import run_episodes
from robotattn.seeds import stream
from robotattn.types import Agent, Episode, Step, tool_pose

ATTEMPTS = 20  # of one episode, each with its own seed; more failures in a row mean that something is broken

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RecordConfig:
    """What to record, and where to."""

    out: Path
    """Dataset folder; an unfinished one is resumed."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The world: task, cameras, randomisation."""
    episodes: int = 100
    """Successful episodes in the folder when done."""
    seed: int = 0
    """Base seed; recordings with different ones share no episode."""
    noise: float = 1.0
    """Strength of the disturbances sent on top of the expert's commands (DART); 0 is an undisturbed expert."""
    fumble: float = 0.0
    """Share of the disturbances in which the gripper does the opposite, too: what to do when a grasp has failed."""
    workers: int = 2
    """Processes that record; the episodes do not depend on it."""
    deadline: float = 120.0
    """Seconds a worker may take to start, or for one episode, before the run is given up."""

    def __post_init__(self) -> None:
        for name, lowest in (("episodes", 1), ("seed", 0), ("noise", 0.0), ("workers", 1), ("deadline", 1e-3)):
            value = getattr(self, name)
            if not np.isfinite(value) or value < lowest:
                raise ValueError(f"{name}: {value} is not a finite number of at least {lowest:g}")
        if not 0 <= self.fumble <= 1:
            raise ValueError(f"fumble: {self.fumble} is not in [0, 1]")


World = Callable[[RecordConfig], tuple[gym.Env, Agent]]


def expert_world(config: RecordConfig) -> tuple[gym.Env, Agent]:
    """Make the environment of a recording and the expert that acts in it."""
    from robotattn.envs import make_env
    from robotattn.envs.experts import EXPERTS

    env = make_env(config.env)
    return env, EXPERTS[config.env.task]([env], noise=config.noise, fumble=config.fumble)


def record(config: RecordConfig, progress: Progress | None = None, world: World = expert_world) -> dict[str, Any]:
    """Record or resume a dataset; return what was done (episodes, attempts, expert_rate, damaged, ...).

    `world` makes environment and agent; it must be a module's function. Raises UsageError if the folder holds
    something else, WorkerError if a worker fails, dies or stalls, or if the expert keeps failing; what was recorded
    until then stays.
    """
    folder, began = Path(config.out), time.monotonic()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: out: is a file, not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with store.locked(folder):
        store.open_dataset(folder, describe(config))
        store.remove_temporary(folder)
        lines, damaged = _usable(config, folder)
        missing = [index for index in range(config.episodes) if index not in lines]
        found = len(lines)
        _report(progress, found, config.episodes)
        store.write_manifest(folder, lines)
        try:
            work = partial(opened, config, world)
            with closing(run_tasks(work, missing, config.workers, config.deadline)) as results:
                for line in results:
                    lines[line["index"]] = line
                    store.append_line(folder, line)
                    _report(progress, len(lines), config.episodes)
        finally:
            store.write_manifest(folder, lines)
            store.remove_temporary(folder)
    return _summary(config, lines, len(missing), damaged, time.monotonic() - began)


def describe(config: RecordConfig) -> dict[str, Any]:
    """Return the content of dataset.json."""
    return {
        "schema": store.SCHEMA,
        "env": to_dict(config.env),
        "seed": config.seed,
        "noise": config.noise,
        **({"fumble": config.fumble} if config.fumble else {}),
        "episodes": config.episodes,
        "versions": store.versions() | ({"renderer": renderer(config)} if config.env.cameras else {}),
    }


def renderer(config: RecordConfig) -> str:
    """Name the OpenGL renderer that draws here: images of another one differ in places.

    A worker is asked, because a driver may hang in its first image; then WorkerError says so after the deadline.
    """
    work: Any = partial(nullcontext, partial(_renderer, config.env))
    (name,) = run_tasks(work, [0], 1, config.deadline)
    return name


def _renderer(config: EnvConfig, task: int) -> str:
    from robotattn.envs import make_env
    from robotattn.envs.cameras import gl_renderer

    env = make_env(config)
    try:
        env.reset(seed=0)
        return gl_renderer()
    finally:
        env.close()


def attempt_seed(base: int, index: int, attempt: int) -> int:
    """Return the seed of an attempt (0, 1, ...) at an episode: each episode has its own piece of the stream."""
    return stream("record", base, 1, start=index * ATTEMPTS + attempt)[0]


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress:
        progress("record", done, total)


def _usable(config: RecordConfig, folder: Path) -> tuple[dict[int, store.Line], list[str]]:
    """Check the files that are there: the lines of the good ones by index, and what is wrong with the others."""
    hashes = {line["index"]: line["sha256"] for line in store.read_manifest(folder, torn=True)}
    lines: dict[int, store.Line] = {}
    damaged: list[str] = []
    for index in range(config.episodes):
        path = store.episode_path(folder, index)
        if not path.exists() and index not in hashes:
            continue
        try:
            episode = store.read_episode(path, hashes.get(index), lambda name: False)
            _check_origin(config, index, episode, path)
            lines[index] = store.manifest_line(episode)
        except store.BadEpisode as error:
            damaged.append(str(error))
    return lines, damaged


def _check_origin(config: RecordConfig, index: int, episode: store.StoredEpisode, path: Path) -> None:
    about = episode.attributes
    seed = attempt_seed(config.seed, index, about["attempt"] - 1)
    if (about["index"], about["seed"], about["env"]) != (index, seed, _json(to_dict(config.env))):
        raise store.BadEpisode(f"{path}: episode {index}: belongs to another dataset (seed {about['seed']})")


def _summary(
    config: RecordConfig, lines: Mapping[int, store.Line], recorded: int, damaged: Sequence[str], seconds: float
) -> dict[str, Any]:
    attempts = sum(line["attempt"] for line in lines.values())
    return {
        "folder": str(config.out),
        "episodes": len(lines),
        "recorded": recorded,
        "frames": sum(line["length"] for line in lines.values()),
        "attempts": attempts,
        "expert_rate": len(lines) / attempts,
        "seconds": seconds,
        "episodes_per_second": recorded / seconds,
        "damaged": list(damaged),
    }


# ------------------------------------------------------------------------------------ inside a worker


@contextmanager
def opened(config: RecordConfig, world: World) -> Iterator[Callable[[int], store.Line]]:
    """Open the world; give the function that records episode i, writes its file and returns its manifest line."""
    env, agent = world(config)
    try:
        yield partial(_record_episode, config, env, agent)
    finally:
        env.close()


def _record_episode(config: RecordConfig, env: gym.Env, agent: Agent, index: int) -> store.Line:
    """Try seed after seed until the expert succeeds, and write that episode."""
    for attempt in range(ATTEMPTS):
        seed = attempt_seed(config.seed, index, attempt)
        (episode,) = run_episodes([env], agent, [seed], keep=lambda seed: True)
        if episode.success:
            last: Any = env.unwrapped  # where the episode ended: its rows are what was seen before commands
            columns = columns_of(episode, config.env.action_mode, last.observe()["state"])
            if config.env.task == "pick_up":  # nothing moves by itself; its files keep the bytes they always had
                columns.pop("labels/velocity", None)
            return store.write_episode(config.out, index, columns, _attributes(config, episode, attempt + 1))
    last = f"seed {seed}: {episode.reason}"
    raise WorkerError(f"the expert failed {ATTEMPTS} times in a row (last: {last}); none of the attempts was kept")


def _attributes(config: RecordConfig, episode: Episode, attempt: int) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "seed": episode.seed,
        "instruction": episode.instruction,
        "success": episode.success,
        "reason": episode.reason,
        "hz": config.env.hz,
        "action_mode": config.env.action_mode,
        "env": _json(to_dict(config.env)),
        "episode": _json(_told(config.env.task, episode.info)),
        "target": int(episode.rows[0].labels["target"]),
        "sim": True,
    }


def _told(task: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what is kept of an episode's info: for pick_up what was always kept, so that its files stay the same."""
    kept = ("objects", "colour", "language", "failure") if task == "pick_up" else tuple(info)
    return {name: info[name] for name in kept if name in info}


def columns_of(episode: Episode, action_mode: str, final_state: np.ndarray) -> dict[str, np.ndarray]:
    """Turn an episode's rows into the columns of its file."""
    rows, seen = episode.rows, [row.observation for row in episode.rows]
    labels = rows[0].labels
    columns = {
        "observations/state": np.stack([one.state for one in seen]),
        "action": np.stack([row.command.action for row in rows]).astype(np.float64),
        "expert_action": np.stack([_expert_target(row, action_mode) for row in rows]).astype(np.float64),
        "time/observation": np.array([one.time for one in seen], dtype=np.float64),
        "labels/position": np.stack([row.labels["position"] for row in rows]),
        "labels/present": np.array(labels["present"], dtype=bool),
        "labels/colour": np.array(labels["colour"], dtype=np.int64),
        "final/state": final_state,
    }
    if "velocity" in labels:
        columns["labels/velocity"] = np.stack([row.labels["velocity"] for row in rows])
    if seen[0].objects is not None:
        columns["observations/objects"] = np.stack([np.asarray(one.objects) for one in seen])
    for camera in seen[0].images:
        columns[f"observations/images/{camera}"] = np.stack([one.images[camera] for one in seen])
    for name in ("pixel", "visible"):
        for camera in labels.get(name, {}):
            columns[f"labels/{name}/{camera}"] = np.stack([row.labels[name][camera] for row in rows])
    if "expert_joint" in labels:
        columns["expert_joint"] = np.stack([row.labels["expert_joint"] for row in rows]).astype(np.float64)
    return columns


def _expert_target(row: Step, action_mode: str) -> np.ndarray:
    """Return the clean absolute target of a row: the expert's, or what was sent where nothing was added to it."""
    if row.command.expert is not None:
        return row.command.expert
    anchor = tool_pose(row.observation.state.astype(np.float64)) if action_mode == "tool" else None
    return absolute(row.command.action, anchor)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
