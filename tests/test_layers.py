"""Who may import whom (the table of the design, section 2): every import of every file, lazy ones too."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("robotattn", "envs", "policies", "assets", "configs", "scripts")

# Lowest first. A layer is a set of modules by prefix; a module belongs to the layer of its longest prefix.
LOW = ("types", "config", "instructions", "seeds")
WORLD = {"mujoco", "gymnasium", "cv2", "OpenGL"}
NUMBERS = {"numpy", "scipy"}
LEARNING = {"torch", "numpy", "jaxtyping", "safetensors", "tokenizers"}

# layer: (modules of ours it may import, packages of others it may import); None means any
LAYERS: dict[str, tuple[tuple[str, ...] | None, set[str] | None]] = {
    "assets": ((), set()),
    "configs": ((), set()),
    "": ((), set()),  # robotattn/__init__.py: importing the package alone stays light
    "types": ((), {"numpy"}),
    "config": (("types",), {"numpy", "yaml", "tyro"}),
    "instructions": (("types",), {"numpy"}),
    "seeds": ((), {"numpy"}),
    "statistics": (LOW, NUMBERS),
    "control": (LOW, NUMBERS),
    "envs": ((*LOW, "assets", "control.safety"), WORLD | {"numpy"}),
    "attention": ((), {"torch", "jaxtyping"}),
    "tokens": ((*LOW, "attention"), LEARNING),
    "policies": ((*LOW, "attention", "tokens"), LEARNING),
    "checkpoint": ((*LOW, "attention", "tokens", "policies"), LEARNING),
    # (matplotlib inside functions alone: a bare machine has none, see test_bare_machine)
    "latency": (
        (*LOW, "statistics", "control", "attention", "tokens", "policies", "checkpoint"),
        LEARNING | {"matplotlib"},
    ),
    "experiments": (
        (*LOW, "attention", "tokens", "assets"),
        {"torch", "numpy", "scipy", "matplotlib", "jinja2", "tyro"},
    ),
    "sight": ((*LOW, "control"), set()),
    "guard": ((*LOW, "control"), {"numpy"}),
    "loop": ((*LOW, "control", "sight", "guard"), {"numpy", "gymnasium"}),
    "data": ((*LOW, "control", "envs", "loop", "tokens", "workers"), LEARNING | {"gymnasium", "h5py", "cv2"}),
    "flags": ((*LOW, "envs"), {"tyro"}),
    "console": (LOW, {"rich"}),
    "cli": (None, None),
    "commands_frontier": (None, None),
    "commands_latency": (None, None),
    "commands_live": (None, None),
    "__main__": (None, None),
    "report": (None, None),
    "scripts": (None, None),
}
# Everything else of ours (train, evaluate, ...) may import all of the above but the ones that only show results.
MIDDLE_NEVER = ("cli", "commands_frontier", "commands_latency", "commands_live", "console", "report", "scripts")
# Whatever the table allows, these never go together.
NEVER = {
    "policies": WORLD | {"wandb"},
    "latency": WORLD,
    "experiments": WORLD,
    "checkpoint": WORLD,
    "envs": {"torch"},
    "control": {"torch", "mujoco"},
    "statistics": {"torch", "mujoco"},
}


def sources() -> list[Path]:
    """Every source file once, by its real place (not through the links inside robotattn/)."""
    files = [path for top in OURS for path in sorted((ROOT / top).rglob("*.py"))]
    return [path for path in files if path == path.resolve()]


def module(path: Path) -> str:
    """The module's name without `robotattn.`: envs/base.py is envs.base, robotattn/train.py is train."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "robotattn" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, name: str, package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever in the file; relative imports are resolved."""
    base = f"robotattn.{name}".rstrip(".").split(".")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = base[: len(base) - node.level + (1 if package else 0)] if node.level else []
            origin = ".".join([*up, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes if prefix)


def layer_of(name: str) -> str:
    return next((layer for layer in LAYERS if name == layer or (layer and inside(name, (layer,)))), "middle")


def offences(text: str, name: str, package: bool = False) -> list[str]:
    """What a module imports against the table, as `line: name`."""
    layer, bad = layer_of(name), []
    ours, theirs = LAYERS.get(layer, (None, None))
    for line, imported in imports(text, name, package):
        top, _, rest = imported.partition(".")
        if top == "robotattn":
            allowed = inside(rest, (layer,)) if ours is not None else True
            allowed = allowed or (ours is not None and inside(rest, ours)) or rest in ("", "__version__")
            allowed = allowed and not (layer == "middle" and inside(rest, MIDDLE_NEVER))
        elif top in sys.stdlib_module_names:
            continue
        else:
            allowed = (theirs is None or top in theirs) and top not in NEVER.get(layer, ())
        if not allowed:
            bad.append(f"{line}: {imported}")
    return bad


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_the_layers_below(path: Path):
    found = offences(path.read_text(), module(path), path.name == "__init__.py")
    assert not found, f"{path.relative_to(ROOT)} ({layer_of(module(path))}) must not import {found}"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("policies.act", "def f():\n    import mujoco", ["2: mujoco"]),
        ("policies.act", "from ..envs import make_env", ["1: robotattn.envs.make_env"]),
        ("latency.profile", "if True:\n    from robotattn.envs import base", ["2: robotattn.envs.base"]),
        ("latency.profile", "from robotattn import evaluate", ["1: robotattn.evaluate"]),
        ("latency.profile", "import gymnasium as gym", ["1: gymnasium"]),
        ("attention.layers", "from robotattn.types import STATE", ["1: robotattn.types.STATE"]),
        ("attention.layers", "from .masks import causal\nimport torch.nn as nn", []),
        ("envs.base", "from robotattn.control.safety import LIMITS\nimport mujoco", []),
        ("envs.base", "from robotattn.control.chunks import ChunkQueue", ["1: robotattn.control.chunks.ChunkQueue"]),
        ("control.chunks", "import torch", ["1: torch"]),
        ("train", "from robotattn.report import report", ["1: robotattn.report.report"]),
        ("train", "from robotattn.policies import build\nimport torch", []),
        ("report", "from robotattn.evaluate import evaluate", []),
        ("data.windows", "from robotattn.policies import Policy", ["1: robotattn.policies.Policy"]),
    ],
)
def test_the_check_itself_tells_good_from_bad(name: str, text: str, found: list[str]):
    assert offences(text, name) == found


def test_relative_imports_of_a_package_are_resolved_from_the_package_itself():
    assert list(imports("from .base import Policy", "policies", package=True)) == [
        (1, "robotattn.policies.base.Policy")
    ]
    assert list(imports("from . import base", "policies.act", package=False)) == [(1, "robotattn.policies.base")]


def test_no_module_of_ours_is_imported_by_its_folder_name():
    """`import envs` would be a second copy of the module, or somebody else's package."""
    for path in [*sources(), *(ROOT / "tests").glob("*.py")]:
        tops = {name.split(".")[0] for _, name in imports(path.read_text(), module(path), path.name == "__init__.py")}
        assert not tops & {"envs", "policies", "assets", "configs"}, path
