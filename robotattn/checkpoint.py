"""Checkpoints: a folder that is everything a policy needs to act, and nothing that can run code.

``model.safetensors`` weights · ``config.yaml`` the resolved configuration of the run · ``normalisation.json``
statistics · ``tokenizer.json`` · ``fingerprint.json`` hashes of the others, versions, data set, training time. A folder
is written beside its destination, flushed and renamed: a reader sees the old one or the new one. Loading is strict.
What training needs to go on (optimiser, counters) is one file apart, `save_state` and `load_state`.
"""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch

from robotattn import config as configuration
from robotattn.config import ONE_OF, UsageError
from robotattn.policies import Policy, PolicyConfig, build
from robotattn.tokens.normaliser import Statistics

if TYPE_CHECKING:  # a bare machine times policies without these libraries; who saves or loads has them
    from robotattn.tokens.text import Tokenizer

FORMAT = 1
WEIGHTS, CONFIG, STATISTICS, TOKENIZER = "model.safetensors", "config.yaml", "normalisation.json", "tokenizer.json"
FINGERPRINT = "fingerprint.json"
FILES = (WEIGHTS, CONFIG, STATISTICS, TOKENIZER, FINGERPRINT)
PACKAGES = ("robotattn", "torch", "numpy", "mujoco")


@dataclass(frozen=True)
class Loaded:
    """A policy in evaluation mode with its statistics, and what is known about its training.

    env: the environment of its demonstrations (plain dict). training: the resolved training configuration.
    """

    policy: Policy
    config: PolicyConfig
    tokenizer: "Tokenizer"
    fingerprint: dict[str, Any]
    env: dict[str, Any]
    training: dict[str, Any]


def fingerprint(dataset: Mapping[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    """Describe what a checkpoint was made with and from; `save` adds the hashes of its files.

    dataset: what ``dataset.json`` says (env, versions, ...), with the data set's name and sha256. training: plain
    values to keep (steps, minutes, ...).
    """
    about = dict(dataset or {})
    return {
        "format": FORMAT,
        "versions": versions(),
        "recorded_with": about.pop("versions", {}),
        "env": about.pop("env", {}),
        "dataset": about,
        "training": training,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a policy does."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def differences(fingerprint: Mapping[str, Any], **here: str) -> list[str]:
    """List what differs between the machine here and the one that recorded or trained; empty if nothing does.

    here: further facts, as ``renderer="llvmpipe"``, compared with those of the recording if it has them.
    """
    mine = versions() | here
    result = []
    for stage, theirs in (("trained", fingerprint["versions"]), ("recorded", fingerprint["recorded_with"])):
        changed = (name for name in mine if name in theirs and theirs[name] != mine[name])
        result += [f"{name} is {mine[name]} here, {stage} with {theirs[name]}" for name in changed]
    return result


def save(
    folder: str | Path,
    policy: Policy,
    config: Mapping[str, Any],
    tokenizer: "Tokenizer",
    fingerprint: Mapping[str, Any],
) -> None:
    """Write a checkpoint folder, replacing an older one as a whole; config: resolved, with the key ``policy``."""
    import safetensors.torch

    if policy.statistics is None:
        raise ValueError(f"{folder}: a policy without statistics cannot be saved: it could not act")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in policy.state_dict().items()}
    files = {
        WEIGHTS: safetensors.torch.save(tensors),
        CONFIG: configuration.dumps(dict(config)).encode(),
        STATISTICS: policy.statistics.to_json().encode(),
        TOKENIZER: tokenizer.to_json().encode(),
    }
    hashes = {name: _hash(name, content) for name, content in files.items()}
    files[FINGERPRINT] = (json.dumps({**fingerprint, "sha256": hashes}, indent=1) + "\n").encode()
    _replace_folder(Path(folder), files)


def load(folder: str | Path, device: str | torch.device = "cpu") -> Loaded:
    """Load a checkpoint folder, or the checkpoint in a run's folder.

    Raises UsageError with one line about what is missing, damaged, newer than this program, or does not fit together.
    """
    from robotattn.tokens.text import Tokenizer

    folder = locate(folder)
    content = _read(folder)
    about = _parse_json(folder / FINGERPRINT, content[FINGERPRINT])
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise UsageError(f"{folder / FINGERPRINT}: has no format number: not a checkpoint of robotattn")
    if about["format"] > FORMAT:
        raise UsageError(f"{folder}: format {about['format']} is newer than this program, which reads up to {FORMAT}")
    training, _ = configuration.parse(content[CONFIG].decode(), str(folder / CONFIG))
    config = _policy_config(training, str(folder / CONFIG))
    policy = build(config)
    _load_weights(policy, _tensors(folder / WEIGHTS, content[WEIGHTS]), folder / WEIGHTS)
    for name in (STATISTICS, TOKENIZER, CONFIG, WEIGHTS):
        if about.get("sha256", {}).get(name) != _hash(name, content[name]):
            raise UsageError(f"{folder / name}: was changed after the checkpoint was written (its sha256 differs)")
    try:
        policy.set_statistics(Statistics.from_json(content[STATISTICS].decode()))
        tokenizer = Tokenizer.from_json(content[TOKENIZER].decode(), str(folder / TOKENIZER))
    except ValueError as error:
        raise UsageError(f"{folder}: {error}") from None
    return Loaded(policy.to(device).eval(), config, tokenizer, about, about.get("env", {}), training)


def locate(folder: str | Path) -> Path:
    """Find the checkpoint meant by a folder: itself, or ``checkpoint/`` in a run; raises UsageError."""
    folder = Path(folder)
    for candidate in (folder, folder / "checkpoint"):
        for found in (candidate, _previous(candidate)):  # the older one, if a writer was killed between two renames
            if (found / FINGERPRINT).is_file() or (found / WEIGHTS).is_file():
                return found
    raise UsageError(f"{folder}: no checkpoint here (expected {', '.join(FILES)}, or a folder checkpoint/ with them)")


def results_folder(folder: str | Path) -> Path:
    """Where results about a checkpoint go by default: beside it in its run, or runs/NAME for a shipped one."""
    found = locate(folder)
    home = found.parent if found.name == "checkpoint" else found
    shipped = (Path(__file__).parent / "assets").resolve()
    return Path("runs") / home.name if home.resolve().is_relative_to(shipped) else home


def _read(folder: Path) -> dict[str, bytes]:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"{folder}: incomplete checkpoint, missing {', '.join(missing)}")
    return {name: (folder / name).read_bytes() for name in FILES}


def _policy_config(training: Any, source: str) -> PolicyConfig:
    @dataclass(frozen=True)
    class Part:
        policy: Annotated[PolicyConfig, ONE_OF]

    if not isinstance(training, dict) or "policy" not in training:
        raise UsageError(f"{source}: has no policy")
    return configuration.from_dict(Part, {"policy": training["policy"]}, source).policy


def _tensors(path: Path, content: bytes) -> dict[str, torch.Tensor]:
    import safetensors.torch

    try:
        return safetensors.torch.load(content)
    except Exception as error:  # SafetensorError is no subclass of anything narrower
        raise UsageError(f"{path}: damaged, or not a safetensors file: {error}") from None


def _load_weights(policy: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy tensors into the policy if names and shapes agree in full; otherwise list every disagreement."""
    wanted = policy.state_dict()
    shapes = {name: (list(wanted[name].shape), list(tensors[name].shape)) for name in wanted.keys() & tensors.keys()}
    parts = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - wanted.keys()),
        "of another shape": sorted(f"{n} (needs {w}, has {h})" for n, (w, h) in shapes.items() if w != h),
        "of another type": sorted(n for n in shapes if wanted[n].dtype != tensors[n].dtype),
    }
    if any(parts.values()):
        found = "; ".join(f"{len(names)} {what}: {', '.join(names)}" for what, names in parts.items() if names)
        raise UsageError(f"{path}: the weights do not fit the policy in {CONFIG}: {found}")
    policy.load_state_dict(dict(tensors))


def _parse_json(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise UsageError(f"{path}: damaged: {error}") from None


def _hash(name: str, content: bytes) -> str:
    """Hash the meaning of a text file, not its line ends (a version control system may change those)."""
    if name != WEIGHTS:
        content = content.replace(b"\r\n", b"\n")
    return hashlib.sha256(content).hexdigest()


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a new folder beside `folder`, flush them to disk, and put it in its place."""
    new, previous = folder.with_name(f".{folder.name}.writing"), _previous(folder)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, content in files.items():
        with open(new / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    _sync(new)
    if folder.exists():  # a folder cannot be renamed over another: step aside first; `locate` knows both names
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    new.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def replace_file(path: str | Path, write: Callable[[Any], None]) -> None:
    """Write a file through ``write(binary file)`` so that `path` always holds the old content or the new one."""
    path = Path(path)
    new = path.with_name(f".{path.name}.writing")
    with open(new, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Flush a rename to disk, where folders can be opened for that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save_state(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write a training state (tensors and plain Python values only) in one piece."""
    replace_file(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load_state(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a training state; a file that is damaged, newer, or holds code is refused with one line (UsageError)."""
    path = Path(path)
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such training state") from None
    except Exception as error:  # half a file, no zip, a pickle that would run code: all kinds of exceptions
        raise UsageError(f"{path}: damaged or unsafe, refused ({type(error).__name__})") from None
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise UsageError(f"{path}: has no format number: not a training state of robotattn")
    if state["format"] > FORMAT:
        raise UsageError(f"{path}: format {state['format']} is newer than this program, which reads up to {FORMAT}")
    return state
