"""What is profiled: a checkpoint, or the policy of a configuration with random weights, which take as long."""

import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from robotattn.config import ONE_OF, UsageError, from_dict, parse, to_dict
from robotattn.instructions import sentences
from robotattn.latency.inputs import Batcher, RandomInputs, frames, random_instructions
from robotattn.policies import Policy, PolicyConfig, build
from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.types import ACTION_SIZE, COLOURS, STATE_SIZE

INSTRUCTION_TOKENS = 16
CHECKPOINTS, CONFIGS = "assets/checkpoints", "configs"


@dataclass(frozen=True)
class Subject:
    """A policy in evaluation mode and what it is fed with.

    name: of the run or file. length: tokens that every instruction is padded to. seconds: building and loading apart.
    fingerprint: of a checkpoint, None for random weights.
    """

    name: str
    policy: Policy
    config: PolicyConfig
    batcher: Batcher
    texts: tuple[str, ...]
    length: int
    fingerprint: dict[str, Any] | None
    seconds: dict[str, float]

    def inputs(self, batch: int, seed: int) -> RandomInputs:
        """A source of fresh observations."""
        return RandomInputs(self.config, self.texts, batch, seed)


def resolve(name: str) -> tuple[Literal["checkpoint", "config"], Path]:
    """Say what a name means and where it is: a folder is a checkpoint, a file a configuration, or what ships.

    ``act_pixels`` is the shipped checkpoint and ``act_pixels.yaml`` the shipped configuration. A path to nothing is
    taken for a checkpoint that is not there yet. Raises UsageError for a name that means nothing.
    """
    given = Path(name)
    if given.is_dir():
        return "checkpoint", given
    if given.is_file():
        return "config", given
    assets, configs = Path(str(files("robotattn.assets"))), Path(str(files("robotattn.configs")))
    shipped = assets / "checkpoints" / given.name
    if given in (Path(given.name), Path(CHECKPOINTS) / given.name) and shipped.is_dir():
        return "checkpoint", shipped
    if given in (Path(given.name), Path(CONFIGS) / given.name):
        for file in (configs / given.name, configs / f"{given.name}.yaml"):
            if file.is_file():
                return "config", file
    if given.suffix in (".yaml", ".yml"):
        raise UsageError(f"{name}: no such file; shipped configurations: {_names(configs, '*.yaml')}")
    if len(given.parts) > 1:
        return "checkpoint", given  # who opens it says what is missing
    raise UsageError(
        f"{name}: no such checkpoint folder or configuration file; shipped checkpoints: "
        f"{_names(assets / 'checkpoints', '*')}; configurations: {_names(configs, '*.yaml')}"
    )


def _names(folder: Path, pattern: str) -> str:
    return ", ".join(sorted(path.name for path in folder.glob(pattern) if not path.name.startswith((".", "_"))))


def of_checkpoint(folder: Path, device: str, instruction_tokens: int | None) -> Subject:
    """Load a checkpoint; its texts are the training sentences, padded to the longest or to `instruction_tokens`.

    Raises UsageError for a checkpoint that cannot be loaded, and for fewer tokens than the longest sentence has.
    """
    from robotattn import checkpoint  # with safetensors and tokenizers, which a bare machine lacks

    start = time.perf_counter()
    loaded = checkpoint.load(folder, device)
    seconds = {"load": time.perf_counter() - start}
    texts = tuple(text for colour in COLOURS for text in sentences(colour))
    batcher = Batcher(loaded.tokenizer.encode, list(loaded.config.cameras), device, *frames(loaded.config))
    longest = max(len(batcher.ids(text)) for text in texts)
    length = longest if instruction_tokens is None else instruction_tokens
    if length < longest:
        raise UsageError(f"instruction_tokens: {length}, but the longest training sentence has {longest} tokens")
    name = checkpoint.results_folder(folder).resolve().name
    return Subject(name, loaded.policy, loaded.config, batcher, texts, length, loaded.fingerprint, seconds)


def of_config(path: Path, device: str, instruction_tokens: int | None, seed: int = 0) -> Subject:
    """Build the policy of a training configuration; raises UsageError where the file has none."""
    return of_policy(path.stem, read_policy(path), device, instruction_tokens, seed)


def of_policy(
    name: str, config: PolicyConfig, device: str, instruction_tokens: int | None = None, seed: int = 0
) -> Subject:
    """Build a policy with random weights, unit statistics and instructions of random ids."""
    length = INSTRUCTION_TOKENS if instruction_tokens is None else instruction_tokens
    start = time.perf_counter()
    policy = build(config)
    policy.set_statistics(_unit_statistics(policy))
    policy = policy.to(device).eval()
    seconds = {"build": time.perf_counter() - start}
    encode, texts = random_instructions(config.vocabulary, length, seed)
    batcher = Batcher(encode, list(config.cameras), device, *frames(config))
    return Subject(name, policy, config, batcher, tuple(texts), length, None, seconds)


@dataclass(frozen=True)
class _Part:
    policy: Annotated[PolicyConfig, ONE_OF]


def read_policy(path: Path) -> PolicyConfig:
    """The policy of a training configuration; raises UsageError where the file has none."""
    try:
        data, _ = parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if not isinstance(data, dict) or "policy" not in data:
        raise UsageError(f"{path}: has no policy; allowed is a training configuration")
    return of_written(data["policy"], str(path))


def of_written(policy: Any, source: str = "policy") -> PolicyConfig:
    """Read a policy's configuration as `written` gives it; raises UsageError for what is none."""
    return from_dict(_Part, {"policy": policy}, source).policy


def written(config: PolicyConfig) -> dict[str, Any]:
    """A policy's configuration as it is written in YAML, with the policy's name."""
    return to_dict(_Part(config))["policy"]


def _unit_statistics(policy: Policy) -> Statistics:
    sizes = {"state": STATE_SIZE, "action": ACTION_SIZE[policy.action_mode], "position": 4}
    return Statistics({key: _unit(key, size) for key, size in sizes.items()})


def _unit(key: str, size: int) -> Moments:
    return Moments(tuple(f"{key}_{index}" for index in range(size)), (0.0,) * size, (1.0,) * size, floor=1e-3)
