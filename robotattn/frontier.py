"""The frontier: policies x cameras x chunks x handlings x devices, success and latency of all in one joined table.

In go checkpoints and devices; every cell is one `evaluate` under the latencies of a device, on the same seeds. Out come
``frontier.json``, a picture and a page. Cells lie in a folder: one that is there is not run again, so that a run that
was killed goes on where it stopped.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from robotattn import frontier_page, frontier_table
from robotattn.config import to_dict
from robotattn.evaluate import evaluate, write_json
from robotattn.frontier_cells import Cell, FrontierConfig, finished, planned

SCHEMA = 1
ANYHOW = ("checkpoint", "out", "workers", "batch", "deadline")  # an evaluation's rows do not depend on these
COUNTING = ("hold", "continue")  # the handlings that execute several actions before they ask again
Progress = Callable[[str, int, int, str], None]


def frontier(config: FrontierConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Run the cells that are missing, write the joined table, the picture and the page; return the table.

    Raises UsageError for what cannot be run, and for a cell that is there but was made otherwise.
    """
    began = time.monotonic()
    cells, left_out = planned(config)
    found = {cell.name: data for cell in cells if (data := finished(cell)) is not None}
    there = len(found)
    waiting = [cell for cell in cells if cell.name not in found]
    for cell, data in _run(waiting, there, config, began, progress):
        found[cell.name] = data
    done = [cell for cell in cells if cell.name in found]
    result = {
        "schema": SCHEMA,
        "kind": "frontier",
        "config": to_dict(config),
        "rows": frontier_table.rows([frontier_table.row(cell, found[cell.name], config.out) for cell in done]),
        "left_out": left_out,
        "missing": [cell.name for cell in cells if cell.name not in found],
        "warnings": sorted({warning for cell in done for warning in found[cell.name]["warnings"]}),
        "cells": {"there": there, "run": len(found) - there, "seconds": time.monotonic() - began},
    }
    write_json(config.out / "frontier.json", result)
    frontier_page.write(config.out, result)
    return result


def _run(
    cells: Sequence[Cell], there: int, config: FrontierConfig, began: float, progress: Progress | None
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run cells one after the other, as long as the time allows that is left for them. there: cells done before."""
    for index, cell in enumerate(cells):
        spent = time.monotonic() - began
        if config.minutes is not None and index and spent * (index + 1) / index > 60 * config.minutes:
            return
        first, total = (there + index) * config.episodes, (there + len(cells)) * config.episodes

        def shown(what: str, done: int, of: int, cell: Cell = cell, first: int = first, total: int = total) -> None:
            if progress is not None:
                progress("frontier", first + done, total, cell.name)

        yield cell, evaluate(cell.config, shown)
