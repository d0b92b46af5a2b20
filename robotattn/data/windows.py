"""Training windows: a dataset folder in RAM, and batches of (what was seen up to t, the expert's next H targets).

Every frame of every episode is one window. Frames lie in a few large arrays (images as uint8), so a batch is one gather
per column. Targets in tool mode are relative to the tool pose at t; past the end of an episode the last target is
repeated and masked. The instruction is rendered anew from the templates each time, and so are sentences that name the
other objects in view: every frame can teach where each of them is. With a history, what was seen at the ticks before
comes too, oldest first; before an episode's start its first frame is repeated, with that frame's true age. With a
latency the targets are those from its arrival on (`robotattn.data.delays`); what was seen stays that of t.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from robotattn.config import UsageError
from robotattn.control.chunks import relative
from robotattn.data import delays, store
from robotattn.instructions import sentences
from robotattn.tokens.text import Tokenizer
from robotattn.types import COLOURS, ActionMode, tool_pose

Batch = dict[str, Any]
Progress = Callable[[str, int, int], None]
Part = tuple[Path, store.Line]
"""An episode: its folder, and its line in the manifest there."""

STATE, OBJECTS, IMAGES = "observations/state", "observations/objects", "observations/images/"
POSITION, PRESENT, COLOUR = "labels/position", "labels/present", "labels/colour"
TIME = "time/observation"
ALIKE = ("hz", "action_mode", "object_tokens", "cameras", "language")
"""What folders of one training must have in common; task, light, noise and seeds may differ."""


class Windows:
    """A dataset in RAM. `len` is the number of windows (frames); `batch` gathers some of them.

    folder: what `robotattn record` wrote. also: further ones, of the same rate, sensors and actions (`ALIKE`); the
    description is that of the first. chunk: H, actions of a window. cameras: which images to load. frames: F, ticks
    that a window has seen, the last one t, `frame_gap` apart; above 1, images, objects and the labels of each have an
    axis for them behind the batch's. episodes: only the first n of a folder. objects: give object tokens.
    permute_colours: rename the colours at random in each sample, in object tokens and instruction together. on_bad:
    whether a damaged file ends the loading or is left out. latency: by how much (ns) the targets of each window are
    later, drawn for each sample.
    """

    def __init__(
        self,
        folder: str | Path,
        chunk: int,
        cameras: Sequence[str],
        action_mode: ActionMode,
        *,
        tokenizer: Tokenizer,
        also: Sequence[str | Path] = (),
        frames: int = 1,
        frame_gap: int = 1,
        episodes: int | None = None,
        objects: bool = False,
        permute_colours: bool = False,
        on_bad: Literal["fail", "skip"] = "fail",
        latency: delays.Latency | None = None,
        progress: Progress | None = None,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"chunk: {chunk}, allowed is a positive number of actions")
        if frames < 1:
            raise ValueError(f"frames: {frames}, allowed is a positive number of ticks")
        if permute_colours and cameras:
            raise UsageError("permute_colours: only for object tokens without cameras: images keep their colours")
        self.folder, self.chunk, self.cameras, self.action_mode = Path(folder), chunk, tuple(cameras), action_mode
        self.permute_colours, self.on_bad = permute_colours, on_bad
        if frame_gap < 1:
            raise ValueError(f"frame_gap: {frame_gap}, allowed is a positive number of ticks")
        self.ticks = np.arange(1 - frames, 1) * frame_gap  # of each frame of a window, from t
        self.description = store.read_dataset(self.folder)
        self._columns = self._wanted(objects)
        self._load([part for each in (self.folder, *map(Path, also)) for part in self._lines(each, episodes)], progress)
        self.latency, self.empty = latency, 0.0
        self.delay = None if latency is None else self._typical(latency)
        language = str(self.description["env"].get("language", "both"))
        rendered = [sentences(colour, language) for colour in COLOURS]
        self.templates = len(rendered[0])
        self.sentences, self.sentences_mask = tokenizer.encode([text for texts in rendered for text in texts])

    # ------------------------------------------------------------------------------------------ loading

    def _wanted(self, objects: bool) -> list[str]:
        """Choose the columns with a row per frame; check that the dataset has them."""
        env = self.description["env"]
        recorded = [camera["name"] for camera in env["cameras"]]
        if missing := [name for name in self.cameras if name not in recorded]:
            raise UsageError(f"{self.folder}: cameras: no {', '.join(missing)}; recorded are {recorded}")
        if objects and not env["object_tokens"]:
            raise UsageError(f"{self.folder}: objects: recorded without object tokens (env.object_tokens)")
        if self.action_mode == "tool" and env["action_mode"] != "tool":
            raise UsageError(f"{self.folder}: action_mode: tool targets asked for, joint targets were recorded")
        self._target = "expert_action" if self.action_mode == env["action_mode"] else "expert_joint"
        per_camera = [name + camera for camera in self.cameras for name in (IMAGES, "labels/pixel/", "labels/visible/")]
        times = [TIME] if len(self.ticks) > 1 else []
        return [STATE, self._target, POSITION, *times, *([OBJECTS] if objects else []), *per_camera]

    def _lines(self, folder: Path, episodes: int | None) -> list[Part]:
        lines, asked = store.read_manifest(folder), self._check_alike(folder)["episodes"]
        wanted = asked if episodes is None else episodes
        if not 1 <= wanted <= asked:
            raise UsageError(f"{folder}: episodes: {wanted}, the dataset has 1 to {asked}")
        lines = [line for line in lines if line["index"] < wanted]
        if not lines or (len(lines) < wanted and self.on_bad == "fail"):
            raise UsageError(
                f"{folder}: {len(lines)} of {wanted} episodes are there; finish with the same record command"
            )
        return [(folder, line) for line in lines]

    def _check_alike(self, folder: Path) -> dict[str, Any]:
        """Return a folder's description; raises UsageError if its episodes do not go together with the first one's."""
        description, first = store.read_dataset(folder), self.description["env"]
        for name in ALIKE:
            if (found := description["env"].get(name)) != first.get(name):
                raise UsageError(f"{folder}: env.{name}: {found}, but {self.folder} has {first.get(name)}")
        return description

    def _load(self, lines: Sequence[Part], progress: Progress | None) -> None:
        """Read the episodes into arrays of one row a frame (`frames`) and one row an episode."""
        self.skipped: list[str] = []
        self.lines: list[store.Line] = []
        self.frames: dict[str, np.ndarray] = {}
        room, ends, about = sum(line["length"] for _, line in lines), [0], []
        for line, episode in self._episodes(lines, progress):
            start, end = ends[-1], ends[-1] + episode.length
            for name in self._columns:
                column = episode.columns[name]
                if name not in self.frames:
                    self.frames[name] = np.empty((room, *column.shape[1:]), column.dtype)
                self.frames[name][start:end] = column
            ends.append(end)
            about.append((episode.columns[PRESENT], episode.columns[COLOUR], episode.attributes["target"]))
            self.lines.append(line)
        if not about:
            raise UsageError(f"{self.folder}: no usable episode; first: {self.skipped[0]}")
        self.frames = {name: column[: ends[-1]] for name, column in self.frames.items()}
        self.present, self.colour, self.target = (np.array(column) for column in zip(*about, strict=True))
        self.episode = np.repeat(np.arange(len(about)), np.diff(ends))
        self.first = np.array(ends[:-1])[self.episode]  # of each frame: the first frame of its episode
        self.last = np.array(ends[1:])[self.episode] - 1  # and the last one
        self.hash = store.dataset_hash(self.lines)

    def _episodes(
        self, lines: Sequence[Part], progress: Progress | None
    ) -> Iterator[tuple[store.Line, store.StoredEpisode]]:
        wanted = {*self._columns, PRESENT, COLOUR}
        for done, (folder, line) in enumerate(lines):
            path = store.episode_path(folder, line["index"])
            try:
                yield line, self._complete(store.read_episode(path, line["sha256"], wanted.__contains__), wanted, path)
            except store.BadEpisode as error:
                if self.on_bad == "fail":
                    raise UsageError(
                        f"{error}. The same record command repairs it; on_bad=skip leaves it out"
                    ) from None
                self.skipped.append(str(error))
            if progress:
                progress("load", done + 1, len(lines))

    @staticmethod
    def _complete(episode: store.StoredEpisode, wanted: set[str], path: Path) -> store.StoredEpisode:
        if missing := sorted(wanted - set(episode.columns)):
            raise store.BadEpisode(f"{path}: episode {episode.attributes['index']}: lacks /{', /'.join(missing)}")
        return episode

    def _typical(self, latency: delays.Latency) -> delays.Delay:
        """Draw one delay for every window, always the same; check that a target is left inside the episodes."""
        drawn = delays.draw(latency, self.period, len(self), np.random.default_rng(0))
        starts = drawn.instants(np.arange(len(self))[:, None])[:, 0]
        self.empty = float(np.mean(starts > self.last))  # share of windows without any target
        if self.empty == 1.0:
            shortest = (drawn.rows + drawn.part).min() * self.period / 1e6
            longest = (self.last - self.first).max() * self.period / 1e6
            raise UsageError(
                f"{self.folder}: latency: {shortest:g} ms at least, but no target lies so long after an observation: "
                f"the longest episode has its last one at {longest:g} ms; allowed is a shorter latency"
            )
        return drawn

    # ------------------------------------------------------------------------------------------ batches

    def __len__(self) -> int:
        return len(self.last)

    @property
    def period(self) -> int:
        """Time between rows (ns)."""
        return round(1e9 / self.description["env"]["hz"])

    def batch(self, indices: np.ndarray, generator: np.random.Generator) -> Batch:
        """Gather windows ``[B]``; the generator draws sentences, colour permutations and, last, latencies.

        The same indices and generator state give the same batch.
        """
        indices = np.asarray(indices, dtype=np.int64)
        episode = self.episode[indices]
        target, present = self.target[episode], self.present[episode]
        order = self._colour_order(len(indices), generator)
        names = self._names(np.take_along_axis(order, self.colour[episode], axis=1), present, generator)
        spoken = np.take_along_axis(names, target[:, None], axis=1)[:, 0]
        delay = None if self.latency is None else delays.draw(self.latency, self.period, len(indices), generator)
        actions, actions_mask = self.actions(indices, delay)
        seen = self.seen(indices)
        batch: Batch = {
            "state": self.frames[STATE][indices],
            "text": self.sentences[spoken],
            "text_mask": self.sentences_mask[spoken],
            "actions": actions,
            "actions_mask": actions_mask,
            "images": {camera: self.frames[IMAGES + camera][seen] for camera in self.cameras},
            "labels": self._labels(seen, target, present, names),
        }
        if OBJECTS in self.frames:
            batch["objects"] = permute_one_hot(self.frames[OBJECTS][seen], order)
            batch["objects_mask"] = np.repeat(present[:, None], len(self.ticks), axis=1) if seen.ndim > 1 else present
        if seen.ndim > 1:
            batch["history"] = self.frames[STATE][seen[:, :-1]]
            batch["ages"] = (self.frames[TIME][indices][:, None] - self.frames[TIME][seen]).astype(np.float32)
        return _tensors(batch)

    def seen(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of the frames that windows have seen: ``[B, F]``, oldest first; ``[B]`` for one frame."""
        if len(self.ticks) == 1:
            return indices
        return np.maximum(indices[:, None] + self.ticks, self.first[indices][:, None])

    def actions(self, indices: np.ndarray, delay: delays.Delay | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets of windows, float32 ``[B, H, A]``, and which of them lie inside the episode ``[B, H]``."""
        rows, last = indices[:, None] + np.arange(self.chunk), self.last[indices][:, None]
        column = self.frames[self._target]
        if delay is None:
            targets, instants = column[np.minimum(rows, last)], rows
        else:
            targets, instants = delay.read(column, rows, last, self.action_mode), delay.instants(rows)
        if self.action_mode == "tool":
            pose = tool_pose(self.frames[STATE][indices].astype(np.float64))
            targets = relative(targets, pose[:, None])
        return targets.astype(np.float32), instants <= last

    def typical_actions(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `actions` with one fixed draw of each window's latency: what statistics are made of."""
        return self.actions(indices, None if self.delay is None else self.delay.of(indices))

    def _colour_order(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Return which colour each colour becomes, ``[B, 6]``."""
        order = np.tile(np.arange(len(COLOURS)), (count, 1))
        return generator.permuted(order, axis=1) if self.permute_colours else order

    def _names(self, colour: np.ndarray, present: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Draw for each object ``[B, 6]`` the row of a sentence that names it; absent slots get 0."""
        template = generator.integers(self.templates, size=colour.shape)
        return np.where(present, colour * self.templates + template, 0)

    def _labels(self, seen: np.ndarray, target: np.ndarray, present: np.ndarray, names: np.ndarray) -> Batch:
        return {
            "target": target,
            "position": self.frames[POSITION][seen],
            "present": present,
            "pixel": {camera: self.frames[f"labels/pixel/{camera}"][seen] for camera in self.cameras},
            "visible": {camera: self.frames[f"labels/visible/{camera}"][seen] for camera in self.cameras},
            "names": names,
            "sentences": self.sentences,
            "sentences_mask": self.sentences_mask,
        }


def permute_one_hot(objects: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rename colours in object tokens ``[B, ..., 6, 10]``: what was colour c becomes colour ``order[:, c]``."""
    origin = np.argsort(order, axis=1)  # of each new colour: the old one
    origin = origin.reshape(len(order), *[1] * (objects.ndim - 2), len(COLOURS))
    columns = np.broadcast_to(origin, (*objects.shape[:-1], len(COLOURS)))
    renamed = np.take_along_axis(objects[..., -len(COLOURS) :], columns, axis=-1)
    return np.concatenate([objects[..., : -len(COLOURS)], renamed], axis=-1)


def _tensors(batch: Mapping[str, Any]) -> Batch:
    return {k: _tensors(v) if isinstance(v, Mapping) else torch.from_numpy(v) for k, v in batch.items()}
