"""The dataset folder: one HDF5 file per episode, `manifest.jsonl` with a line per file, `dataset.json` for the whole.

An episode file is built in memory, so its bytes are hashed before they touch the disk, then written under a temporary
name, flushed to the device and renamed: a killed recorder leaves whole files and at worst a temporary one. The bytes
depend on the content alone (fixed order, fixed format version, no time stamps). Layout, T rows, row t = what was seen
*before* action t: /observations/state, /observations/objects, /observations/images/<camera>, /action (sent),
/expert_action, /expert_joint, /time/observation, /labels/*, and /final/state, what was seen after the last action.
"""

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from robotattn.config import UsageError

SCHEMA = 1
MANIFEST, DATASET = "manifest.jsonl", "dataset.json"
FORMAT = ("earliest", "v108")  # the oldest HDF5 structures: they hold no times and every reader knows them
PER_EPISODE = ("final/state", "labels/present", "labels/colour")  # columns without a time axis
ATTRIBUTES = ("schema", "index", "attempt", "seed", "instruction", "success", "reason", "hz", "action_mode", "env")

Line = dict[str, Any]


class BadEpisode(UsageError):
    """An episode file that cannot be used; the message names the file, the episode and what is wrong with it."""


@dataclass(frozen=True)
class StoredEpisode:
    """An episode file in memory. columns: path inside the file → array; see the module's docstring."""

    columns: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]
    sha256: str

    @property
    def length(self) -> int:
        return len(self.columns["action"])


# ----------------------------------------------------------------------------------------- one episode


def episode_path(folder: str | Path, index: int) -> Path:
    """Name the file of an episode."""
    return Path(folder) / f"episode_{index:06d}.hdf5"


def encode_episode(columns: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> bytes:
    """Return the bytes of an episode file; equal content gives equal bytes."""
    with h5py.File("episode", "w", driver="core", backing_store=False, libver=FORMAT) as file:
        for name in sorted(columns):
            file.create_dataset(name, data=columns[name], track_times=False)
        for name in sorted(attributes):
            file.attrs[name] = attributes[name]
        file.flush()
        return file.id.get_file_image()


def write_episode(
    folder: str | Path, index: int, columns: Mapping[str, np.ndarray], attributes: Mapping[str, Any]
) -> Line:
    """Write an episode file so that it is whole or absent whatever happens; return its manifest line."""
    content = encode_episode(columns, {"schema": SCHEMA, "index": index, **attributes})
    write_whole(episode_path(folder, index), content)
    return manifest_line(read_bytes(content, episode_path(folder, index), lambda name: name == "action"))


def read_episode(
    path: str | Path, sha256: str | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> StoredEpisode:
    """Read an episode file; `wanted` chooses columns, `sha256` is the hash it must have.

    Raises BadEpisode for a file that is missing, damaged, of another schema, or not the one that was recorded.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from None
    found = hashlib.sha256(content).hexdigest()
    if content and sha256 is not None and found != sha256:
        raise _bad(path, f"is damaged: {len(content)} bytes of sha256 {found[:12]}…, recorded as {sha256[:12]}…")
    return read_bytes(content, path, wanted)


def read_bytes(content: bytes, path: Path, wanted: Callable[[str], bool]) -> StoredEpisode:
    """Decode the bytes of an episode file; `path` is named in errors."""
    if not content:
        raise _bad(path, "is empty (0 bytes)")
    try:
        with h5py.File(h5py.h5f.open_file_image(content)) as file:
            attributes = {name: _plain(value) for name, value in file.attrs.items()}
            found = _datasets(file)
            _check_lengths(found, path)
            columns = {name: found[name][()] for name in found if wanted(name) or name == "action"}
    except BadEpisode:
        raise
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise _bad(path, f"cannot be opened as HDF5 ({' '.join(str(error).split())})") from None
    if missing := [name for name in ATTRIBUTES if name not in attributes]:
        raise _bad(path, f"lacks the attributes {', '.join(missing)}")
    if attributes["schema"] != SCHEMA:
        raise _bad(path, f"schema {attributes['schema']}, this version reads {SCHEMA}")
    return StoredEpisode(columns, attributes, hashlib.sha256(content).hexdigest())


def _datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    found: dict[str, h5py.Dataset] = {}
    file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    return found


def _check_lengths(found: Mapping[str, h5py.Dataset], path: Path) -> None:
    if "action" not in found or found["action"].shape[0] == 0:
        raise _bad(path, "holds no actions")
    length = found["action"].shape[0]
    for name, column in found.items():
        if name not in PER_EPISODE and column.shape[:1] != (length,):
            raise _bad(path, f"/{name} has the shape {column.shape}, /action has {length} rows")


def _bad(path: Path, reason: str) -> BadEpisode:
    number = path.stem.rpartition("_")[2]
    return BadEpisode(f"{path}: episode {int(number) if number.isdigit() else '?'}: {reason}")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def manifest_line(episode: StoredEpisode) -> Line:
    """Describe an episode file in one line: a function of its content, so that a lost manifest can be rebuilt."""
    about = episode.attributes
    return {
        "file": episode_path("", about["index"]).name,
        "index": about["index"],
        "length": episode.length,
        "seed": about["seed"],
        "instruction": about["instruction"],
        "outcome": about["reason"],
        "attempt": about["attempt"],
        "sha256": episode.sha256,
    }


# ------------------------------------------------------------------------------------------ the folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to the device, and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def remove_temporary(folder: Path) -> None:
    """Remove what a killed recorder left behind."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second recorder out of a folder; the lock dies with the process. Raises UsageError if it is taken."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(f"{folder}: another recording is running in this folder") from None
    try:
        yield
    finally:
        os.close(handle)


def append_line(folder: Path, line: Line) -> None:
    """Add a line to the manifest. A line torn by a kill is dropped when the recording is resumed."""
    with (folder / MANIFEST).open("a", encoding="utf-8") as file:
        file.write(_json(line) + "\n")


def write_manifest(folder: Path, lines: Mapping[int, Line]) -> None:
    """Replace the manifest by these lines, in the order of their index."""
    text = "".join(_json(lines[index]) + "\n" for index in sorted(lines))
    write_whole(folder / MANIFEST, text.encode("utf-8"))


def read_manifest(folder: str | Path, torn: bool = False) -> list[Line]:
    """Read the manifest, sorted by index; `torn` drops unreadable lines instead of raising UsageError."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        if torn:
            return []
        raise UsageError(f"{path}: not found; a dataset folder is what `robotattn record` writes")
    lines: dict[int, Line] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
            lines[line["index"]] = {"file": str(line["file"]), "sha256": str(line["sha256"]), **line}
        except (ValueError, KeyError, TypeError):
            if not torn:
                raise UsageError(f"{path}:{number}: not a manifest line; the same record command repairs it") from None
    return [lines[index] for index in sorted(lines)]


def read_dataset(folder: str | Path) -> dict[str, Any]:
    """Read dataset.json: schema, env, seed, noise, episodes, versions. Raises UsageError if there is none."""
    path = Path(folder) / DATASET
    try:
        description = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a dataset folder is what `robotattn record` writes") from None
    except ValueError:
        raise UsageError(f"{path}: is not JSON") from None
    if not isinstance(description, dict) or description.get("schema") != SCHEMA:
        raise UsageError(f"{path}: not a dataset of schema {SCHEMA}, the one this version reads")
    return description


def open_dataset(folder: Path, description: Mapping[str, Any]) -> None:
    """Create dataset.json, or check that the one there asks for the same episodes (or fewer).

    Raises UsageError naming each field that differs: episodes of two configurations never share a folder.
    """
    if not (folder / DATASET).exists():
        if foreign := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
            raise UsageError(f"{folder}: has no {DATASET} but holds {', '.join(foreign[:3])}; record to a new folder")
    else:
        there = read_dataset(folder)
        compare_descriptions(folder, there, description)
        if there["episodes"] == description["episodes"]:
            return
    write_whole(folder / DATASET, (json.dumps(description, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


def compare_descriptions(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UsageError naming the fields in which a folder differs from what is asked for now."""
    old, new = dict(_flat(_identity(there))), dict(_flat(_identity(here)))
    names = [name for name in {**old, **new} if old.get(name, "absent") != new.get(name, "absent")]
    if names:
        shown = "; ".join(
            f"{name}: {old.get(name, 'absent')!r} there, {new.get(name, 'absent')!r} now" for name in names
        )
        raise UsageError(f"{folder}: was recorded with another configuration ({shown}); record to a new folder")
    if there["episodes"] > here["episodes"]:
        raise UsageError(
            f"{folder}: episodes: holds {there['episodes']}, {here['episodes']} asked for; a dataset can only grow"
        )


def _identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what decides the content of an episode."""
    return {
        **{name: description.get(name, "absent") for name in ("schema", "env", "seed", "noise")},
        "fumble": description.get("fumble", 0.0),
        "versions": {"mujoco": description.get("versions", {}).get("mujoco")},
    }


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    if not items:
        yield at, [] if isinstance(value, list | tuple) else value
    for key, item in items:
        yield from _flat(item, f"{at}.{key}" if at else str(key))


def versions() -> dict[str, str]:
    """Name what the bits of an episode depend on beside its configuration."""
    found = {"cpu": _cpu()}
    for name in ("robotattn", "mujoco", "numpy", "h5py", "gymnasium"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def dataset_hash(lines: list[Line]) -> str:
    """Name a set of episodes by its content: sha256 over the hashes of its files."""
    return hashlib.sha256("\n".join(line["sha256"] for line in lines).encode()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
