"""What a command shows: progress and warnings on standard error; a table and one line of JSON on standard output."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table

WIDE = 160  # columns of a table where there is no terminal that has fewer
LINE_SECONDS = 10.0  # between lines of progress where there is no terminal to draw a bar on


class Progress:
    """A bar with the time left for each kind of work, on standard error; plain lines where that is not a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        text = bars.TextColumn("{task.description}")
        self.bars = bars.Progress(text, *columns, console=self.console, disable=not self.console.is_terminal)
        self.tasks: dict[str, bars.TaskID] = {}
        self.began: dict[str, tuple[float, int]] = {}  # when, and how much was done already
        self.last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def __call__(self, what: str, done: int, total: int, part: str = "") -> None:
        """Show that `done` of `total` are done of what is going on. part: what of it is being done now."""
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total, completed=done)
            self.began[what] = time.monotonic(), done
        self.bars.update(self.tasks[what], completed=done, total=total, description=f"{what} {part}".strip())
        if not self.console.is_terminal and time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            left, now = self._left(what, done, total), f" ({part})" if part else ""
            print(f"{what}: {done} of {total}{left}{now}", file=sys.stderr, flush=True)

    def between(self, show: Callable[[], object]) -> None:
        """Show something else, with the bars out of its way."""
        self.bars.stop()
        show()
        self.bars.start()

    def _left(self, what: str, done: int, total: int) -> str:
        since, before = self.began[what]
        if done == before:
            return ""
        return f", {(time.monotonic() - since) / (done - before) * (total - done):.0f} s left"


def finish(command: str, result: Mapping[str, Any], rows: Iterable[Sequence[Any]], titles: Sequence[str] = ()) -> int:
    """Print the table and the line of JSON that end a command; return exit code 0."""
    table(f"robotattn {command}", rows, titles)
    print(json.dumps({"command": command, **finite(result)}, ensure_ascii=False, default=str), flush=True)
    return 0


def table(title: str, rows: Iterable[Sequence[Any]], titles: Sequence[str] = ()) -> None:
    """Print a table."""
    drawn = Table(title=title, title_justify="left", show_header=bool(titles))
    for heading in titles:
        drawn.add_column(heading)
    for row in rows:
        drawn.add_row(*(cell(value) for value in row))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    console.print(drawn)


def pick(result: Mapping[str, Any], names: str) -> list[tuple[str, Any]]:
    return [(name.replace("_", " "), result[name]) for name in names.split() if name in result]


def cell(value: Any) -> str:
    """A value as text of a table: numbers with four digits, lists by their length or content."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def finite(value: Any) -> Any:
    """The value with every number that JSON has no word for (nan, infinity) as null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def warn(messages: Iterable[str]) -> None:
    for message in messages:
        print(f"warning: {message}", file=sys.stderr)
