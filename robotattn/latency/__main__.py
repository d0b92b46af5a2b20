"""`python -m robotattn.latency profile CONFIG key=value ...`: a machine with torch, numpy and PyYAML is enough.

The same work as `robotattn profile`, without the libraries that draw tables and read flags. A value is written as in
YAML: ``device=cuda hz=50 mode=eager,graph samples=500``.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar, get_origin, get_type_hints

from robotattn.config import UsageError, loads

T = TypeVar("T")
SECONDS = 10.0  # between lines of progress


def profile(arguments: Sequence[str]) -> int:
    """Profile a configuration or checkpoint."""
    began = time.perf_counter()
    from robotattn.latency import tables
    from robotattn.latency.profile import ProfileConfig, result_path
    from robotattn.latency.profile import profile as run
    from robotattn.latency.subject import resolve

    imported, named = time.perf_counter() - began, list[str]()
    if arguments and "=" not in arguments[0]:
        kind, path = resolve(arguments[0])
        named, arguments = [f"{kind}={path}"], arguments[1:]
    config = read(ProfileConfig, [*named, *arguments])
    result = run(config, Lines(), lambda first: print(tables.text(tables.first(first)), flush=True), imported)
    print(tables.text(tables.measured(result)))
    if line := tables.verdict(result):
        print(line)
    short = {"file": str(result_path(config)), "verdict": result["verdict"], **tables.short(result)}
    print(json.dumps({"command": "profile", **short}))
    return 0


def sweep(arguments: Sequence[str]) -> int:
    """Time a grid of policies: words that are no settings are axes, such as ``cameras=1:4``."""
    from robotattn.latency.sweep import SweepConfig, words
    from robotattn.latency.sweep import sweep as run

    config = read(SweepConfig, words(SweepConfig, arguments))
    result = run(config, Lines())
    kept = ("points", "missing", "failed", "left_out", "pooled", "calibration", "budgets", "refused")
    print(json.dumps({"command": "sweep", "folder": str(config.out), **{name: result[name] for name in kept}}))
    return 0


def plan(arguments: Sequence[str]) -> int:
    """Predict what fits a control rate, as one line of JSON: ``hz=50 device=h200 cameras=1:4``."""
    from robotattn.latency.plan import PlanConfig
    from robotattn.latency.plan import plan as run
    from robotattn.latency.sweep import words

    print(json.dumps({"command": "plan", **run(read(PlanConfig, words(PlanConfig, arguments)))}))
    return 0


def read(cls: type[T], arguments: Sequence[str]) -> T:
    """Read ``key=value`` words into a dataclass; lists are ``a,b`` or ``[a, b]``. Raises UsageError naming the word."""
    lists = {name for name, kind in get_type_hints(cls).items() if get_origin(kind) is tuple}
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    lines = []
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word}: expected KEY=VALUE with one of the keys {', '.join(known)}")
        key = key.lstrip("-").replace("-", "_")
        lines.append(f"{key}: {value if key not in lists or value.startswith('[') else f'[{value}]'}")
    return loads("\n".join(lines) or "{}", cls, "arguments")


class Lines:
    """Progress as lines on standard error, not too many."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say that `done` of `total` are done, if it is time to."""
        if time.monotonic() - self.last > SECONDS:
            self.last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)


COMMANDS = {"profile": profile, "sweep": sweep, "plan": plan}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a request that cannot be carried out is one line and exit code 2."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see robotattn.cli
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name not in COMMANDS:
        print(f"usage: python -m robotattn.latency {'|'.join(COMMANDS)} CONFIG key=value ...", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](rest)
    except UsageError as error:
        print(f"robotattn: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
