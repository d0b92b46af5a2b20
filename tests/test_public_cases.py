"""The table of public cases is complete, and every test that it, or the page on attention, names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IDS = [f"O{number:02}" for number in range(1, 39)]
LINE = re.compile(r"\| (O\d\d) \|(.*)\|")


def rows() -> dict[str, list[str]]:
    """Case → cells: area, report, what goes wrong, tests, what is not covered."""
    found = [match for line in (ROOT / "docs/public_cases.md").read_text().splitlines() if (match := LINE.match(line))]
    assert [match[1] for match in found] == IDS
    return {match[1]: [cell.strip() for cell in match[2].split("|")] for match in found}


@cache
def functions(path: str) -> frozenset[str]:
    """The test functions of a file, read without importing it."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


@pytest.mark.parametrize("case", IDS)
def test_every_test_that_a_case_names_exists(case):
    area, report, wrong, tests, _ = rows()[case]
    assert area and wrong.endswith(".") and re.fullmatch(r"github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", report)
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", tests)
    assert " ".join(f"`{path}::{name}`" for path, name in named) == tests  # nothing but names of tests
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []
    assert named


def test_every_case_that_a_test_cites_is_in_the_table():
    cited = {case for path in (ROOT / "tests").glob("*.py") for case in re.findall(r"\bO\d\d\b", path.read_text())}
    assert cited <= set(IDS) and len(cited) > 15


def test_every_test_that_the_page_on_attention_names_exists():
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (ROOT / "docs/attention.md").read_text(encoding="utf-8"))
    assert len(named) > 15 and [f"{path}::{name}" for path, name in named if name not in functions(path)] == []
