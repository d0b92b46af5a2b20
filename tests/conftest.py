"""What all tests share: no window is opened, and `--table` sums the run up by file before pytest's own last line."""

import json
import os
from collections import defaultdict

import pytest

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("LP_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes: the same bits, and the same time, on any machine


def pytest_addoption(parser):
    parser.addoption("--table", action="store_true", help="end with a table by file and one JSON line")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Write the table and the JSON line; pytest's summary line still comes last."""
    if not config.getoption("--table"):
        return
    counts, seconds = _by_file(terminalreporter.stats)
    width = max((len(name) for name in counts), default=10)
    terminalreporter.section("by file")
    terminalreporter.write_line(f"{'file':{width}} passed failed skipped  time (s)")
    for name, row in sorted(counts.items()):
        cells = f"{row['passed']:6d} {row['failed'] + row['error']:6d} {row['skipped']:7d}"
        terminalreporter.write_line(f"{name:{width}} {cells} {seconds[name]:9.1f}")
    total = {kind: sum(row[kind] for row in counts.values()) for kind in ("passed", "failed", "error", "skipped")}
    line = {"command": "test", "exit": int(exitstatus), **total, "seconds": round(sum(seconds.values()), 1)}
    terminalreporter.write_line(json.dumps(line))


def _by_file(stats):
    """Count outcomes and add up seconds for each test file."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    seconds: dict[str, float] = defaultdict(float)
    for kind in ("passed", "failed", "error", "skipped"):
        for report in stats.get(kind, ()):
            name = report.nodeid.split("::")[0]
            counts[name][kind] += 1
            seconds[name] += getattr(report, "duration", 0.0)
    return counts, seconds


@pytest.fixture
def no_picture(monkeypatch):
    """Draw no picture and no page of a frontier where nobody looks at them: they take most of the time."""
    monkeypatch.setattr("robotattn.frontier_page.write", lambda folder, result: None)
