"""Reading a command's flags: dataclasses become flags, cameras are short words, shipped files are found by name."""

import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import tyro

from robotattn.config import UsageError

T = TypeVar("T")


def parse(
    kind: Callable[..., T], arguments: list[str], command: Callable[..., int], shown: str = "", markers: Any = ()
) -> T:
    """Read flags into a dataclass or a function's arguments; a mistake exits with 2 and the nearest valid names."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(cameras_rule)
    try:
        return tyro.cli(
            kind,
            prog=f"robotattn {command.__name__} {shown}".strip(),
            description=command.__doc__,
            args=arguments,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff, *markers),
            registry=registry,
        )
    except ValueError as error:  # from a dataclass that checks its values: tyro shows only its own mistakes
        raise UsageError(str(error)) from None


def with_checkpoint(arguments: list[str]) -> list[str]:
    """Read `CHECKPOINT ...` as `--checkpoint FOLDER ...`."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    return ["--checkpoint", str(find(arguments[0], "assets/checkpoints")), *arguments[1:]]


def find(name: str, group: str, suffix: str = "") -> Path:
    """The path of a file or folder: as given, or shipped with the package under `group` (`act_pixels` is enough).

    What is found nowhere is returned as given: who opens it says what is wrong.
    """
    given = Path(name)
    package, _, folder = group.partition("/")
    inside = Path(str(files(f"robotattn.{package}"))) / folder
    bare = given.name if given == Path(group) / given.name or given.name == name else None
    candidates = [given, *([inside / bare, inside / f"{bare}{suffix}"] if bare else [])]
    return next((path for path in candidates if path.exists()), given)


def shipped_configs() -> list[str]:
    return sorted(path.name for path in files("robotattn.configs").iterdir() if path.name.endswith(".yaml"))


def cameras_rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Let `--cameras front:96 wrist:128x96` make a tuple of camera configurations."""
    if "robotattn.envs" not in sys.modules:
        return None
    from robotattn.envs import CameraConfig

    if info.type != tuple[CameraConfig, ...]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[:WIDTH[xHEIGHT]] ...",
        instance_from_str=lambda texts: tuple(CameraConfig(**camera(text)) for text in texts),
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(one, CameraConfig) for one in value),
        str_from_instance=lambda cameras: [f"{one.name}:{one.width}x{one.height}" for one in cameras],
    )


def camera(text: str) -> dict[str, Any]:
    """Read `wrist:128x96` (width, height in pixels), `front:96` (a square) or `front`."""
    name, _, size = text.partition(":")
    numbers = size.split("x") if size else []
    if not name or len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"{text}: a camera is NAME, NAME:SIZE or NAME:WIDTHxHEIGHT, such as wrist:128x96")
    return {"name": name, **({"width": int(numbers[0]), "height": int(numbers[-1])} if numbers else {})}
