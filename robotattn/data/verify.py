"""Check a dataset: are the files whole, do they say what happened, and does replaying them succeed again.

For every episode: hash, schema, lengths and manifest line; time stamps; the action is not a copy of the measured state
(a policy trained on that stands still); and a replay: reset to the seed, send the recorded actions, compare every state
and judge success anew. Nothing is repaired here: the record command does that.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from robotattn.config import from_dict
from robotattn.data import store
from robotattn.envs import EnvConfig, make_env
from robotattn.types import tool_pose, wrap_angle

TOLERANCE = 0.01  # of a replayed state (m, rad) where version or processor differ; on the same ones it is 0
MOVING = 1e-3  # change in one tick (m, rad) from which the arm moves
COPIED = 0.02  # a command this close to a measured position, as a share of the motion, was not a command

Progress = Callable[[str, int, int], None]
MakeEnv = Callable[[EnvConfig], gym.Env]


def verify(
    folder: str | Path, progress: Progress | None = None, replay: bool = True, make: MakeEnv = make_env
) -> dict[str, Any]:
    """Check a dataset folder; return a report whose `bad` lists what is wrong, by file.

    replay: also send the recorded actions again, without cameras. Raises UsageError if the folder is no dataset.
    """
    folder = Path(folder)
    description = store.read_dataset(folder)
    env_config = from_dict(EnvConfig, description["env"], f"{folder / store.DATASET}: env")
    lines = store.read_manifest(folder, torn=True)
    bad = list(_folder_problems(folder, description["episodes"], lines))
    env = make(replace(env_config, cameras=())) if replay else None
    exact = store.versions().items() <= description["versions"].items()
    frames, replayed, largest = 0, 0, 0.0
    try:
        for done, line in enumerate(lines, 1):
            problems, difference = _check(folder, line, description, env, exact)
            bad += [f"{folder / line['file']}: {problem}" for problem in problems]
            frames, replayed = frames + line.get("length", 0), replayed + (difference is not None)
            largest = max(largest, difference or 0.0)
            if progress:
                progress("verify", done, len(lines))
    finally:
        if env is not None:
            env.close()
    return {
        "folder": str(folder),
        "episodes": len(lines),
        "frames": frames,
        "replayed": replayed,
        "same_versions": exact,
        "largest_difference": largest,
        "bad": bad,
    }


def _folder_problems(folder: Path, episodes: int, lines: list[store.Line]) -> Iterator[str]:
    """Compare what is listed, what is there, and what was asked for."""
    listed, path = {line["index"] for line in lines}, folder / store.MANIFEST
    written = len(path.read_bytes().splitlines()) if path.exists() else 0
    if written != len(lines):
        yield f"{path}: {written} lines, {len(lines)} of them name an episode of their own"
    if missing := [index for index in range(episodes) if index not in listed]:
        shown = ", ".join(str(index) for index in missing[:10])
        yield f"{path}: {len(missing)} of {episodes} episodes are not listed: {shown}{', …' if missing[10:] else ''}"
    names = {line["file"] for line in lines}
    yield from (f"{found}: not listed" for found in sorted(folder.glob("*.hdf5")) if found.name not in names)


def _check(
    folder: Path, line: store.Line, description: dict[str, Any], env: gym.Env | None, exact: bool
) -> tuple[list[str], float | None]:
    """Return what is wrong with an episode, and the largest difference of its replay (None: not replayed)."""
    path = folder / line["file"]
    try:
        episode = store.read_episode(path, line["sha256"])
    except store.BadEpisode as error:
        return [str(error).removeprefix(f"{path}: ")], None
    problems = list(content_problems(episode, line, description))
    if env is None or problems:
        return problems, None
    replayed, difference = replay_problems(episode, env, exact)
    return replayed, difference


def content_problems(episode: store.StoredEpisode, line: store.Line, description: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a file that can be read, without replaying it."""
    columns, about = episode.columns, episode.attributes
    for name, value in store.manifest_line(episode).items():
        if line.get(name) != value:
            yield f"{name}: {value!r} in the file, {line.get(name)!r} in the manifest"
    if json.loads(about["env"]) != description["env"]:
        yield f"was recorded with another env than {store.DATASET} says"
    if not about["success"] or about["reason"] != "success":
        yield f"is no success but {about['reason']!r}"
    if missing := [name for name in ("observations/state", "expert_action", "final/state") if name not in columns]:
        yield f"lacks /{', /'.join(missing)}"
        return
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            yield f"/{name} holds values that are not finite"
    if not np.allclose(columns["time/observation"], np.arange(episode.length) / about["hz"], atol=1e-9):
        yield f"/time/observation is not a clock of {about['hz']} Hz that starts at 0"
    if copied := copied_state(_states(episode), columns["action"], about["action_mode"]):
        yield copied


def copied_state(states: np.ndarray, actions: np.ndarray, action_mode: str) -> str | None:
    """Say so if actions ``[T, A]`` are (nearly) the measured positions in states ``[T + 1, 13]``, and None if not."""
    seen, sent = states[:, :7].astype(np.float64), actions[:, :7]
    targets = [sent]
    if action_mode == "tool":
        seen, sent = tool_pose(states.astype(np.float64)), actions[:, :4]
        targets = [sent, seen[:-1] + sent]  # the position itself, or no way to go from it
    motion = np.abs(wrap_angle(np.diff(seen, axis=0)))
    moving = motion.max(axis=1) > MOVING
    if not moving.any():
        return "the arm never moves"
    for target in targets:
        for shift, when in ((0, "before"), (1, "after")):
            gap = np.abs(wrap_angle(target - seen[shift : shift + len(target)]))[moving].mean()
            if gap < COPIED * motion[moving].mean():
                return f"/action is the position measured {when} each step, not the command sent (mean gap {gap:.1e})"
    return None


def replay_problems(episode: store.StoredEpisode, env: gym.Env, exact: bool) -> tuple[list[str], float]:
    """Send the recorded actions again; return what came out differently and the largest difference of a state.

    exact: every bit must be the same.
    """
    raw, info = env.reset(seed=episode.attributes["seed"])
    problems, seen, ended = [], [raw["state"]], False
    if raw["instruction"] != episode.attributes["instruction"]:
        problems.append(f"replay: the instruction is {raw['instruction']!r}, not {episode.attributes['instruction']!r}")
    for action in episode.columns["action"]:
        if ended:
            break
        raw, _, terminated, truncated, info = env.step(action)
        seen.append(raw["state"])
        ended = terminated or truncated
    if len(seen) <= episode.length or not info["success"]:
        problems.append(f"replay: ended after {len(seen) - 1} of {episode.length} actions with {info['reason']!r}")
    gaps = np.abs(np.array(seen) - _states(episode)[: len(seen)]).max(axis=1)
    if gaps.max() > (0.0 if exact else TOLERANCE):
        row = int(np.argmax(gaps > (0.0 if exact else TOLERANCE)))
        problems.append(f"replay: the state differs from row {row} on, by up to {gaps.max():.1e}")
    return problems, float(gaps.max())


def _states(episode: store.StoredEpisode) -> np.ndarray:
    """Return every state of an episode, the one after the last action too: ``[T + 1, 13]``."""
    return np.concatenate([episode.columns["observations/state"], episode.columns["final/state"][None]])
