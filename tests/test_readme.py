"""What the README and CONTRIBUTING show is what works: commands are read by the real parsers, snippets are run."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from robotattn import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md")
STAGES = {  # where each command gets its work done
    "record": "robotattn.data.record",
    "verify": "robotattn.data.verify",
    "train": "robotattn.train",
    "evaluate": "robotattn.evaluate",
    "live": "robotattn.live",
    "profile": "robotattn.latency.profile",
    "plan": "robotattn.latency.plan",
    "frontier": "robotattn.frontier",
    "compare": "robotattn.compare",
    "report": "robotattn.report",
    "experiments": "robotattn.experiments.suite",
}


class Reached(Exception):
    """The command line was understood, and the work would start now."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def lines() -> list[str]:
    shown = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in shown if shlex.split(line, comments=True)]


def test_every_command_is_shown():
    shown = {shlex.split(line)[1] for line in lines() if line.startswith("robotattn ")}
    assert shown == set(cli.COMMANDS) == set(STAGES)
    assert any("--sweep" in line for line in lines())


@pytest.mark.parametrize("line", [line for line in lines() if line.startswith("robotattn ")])
def test_a_command_shown_is_understood(line: str, monkeypatch):
    def stage(*arguments, **named):
        raise Reached

    name = shlex.split(line)[1]
    monkeypatch.chdir(ROOT)
    where, function = ("robotattn.latency.sweep", "sweep") if "--sweep" in line else (STAGES[name], name)
    monkeypatch.setattr(importlib.import_module(where), function, stage)
    with pytest.raises(Reached):
        cli.main(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("line", [line for line in lines() if not line.startswith("robotattn ")])
def test_a_script_or_tool_shown_is_there_and_knows_its_flags(line: str):
    program, *arguments = shlex.split(line, comments=True)
    if program == "pip":
        assert "constraints.txt" in arguments
        assert (ROOT / "constraints.txt").is_file()
        return
    if program.startswith(".venv/"):
        assert f"{Path(program).name}>=" in (ROOT / "pyproject.toml").read_text()
        return
    script = ROOT / program
    assert os.access(script, os.X_OK), program
    for argument in arguments:
        if argument.startswith("--"):
            assert re.search(rf"(^|[\s|]){argument}\b", script.read_text(), re.MULTILINE), f"{program}: {argument}"
        elif argument.startswith("tests/"):
            assert (ROOT / argument).is_file()


@pytest.mark.parametrize("code", blocks("README.md", "python"))
def test_a_snippet_runs_in_a_fresh_process(code: str, tmp_path: Path):
    command = [sys.executable, "-W", "error", "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_a_script_explains_itself_without_installing_anything(script: str):
    said = subprocess.run(["bash", ROOT / "scripts" / script, "--help"], capture_output=True, text=True, timeout=20)
    assert said.returncode == 0
    assert f"./scripts/{script}" in said.stdout


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_named_exist(page: str):
    text = (ROOT / page).read_text()
    named = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("http")]
    named += [name for name in re.findall(r"`([\w./-]+/|[\w./-]+\.(?:txt|toml|py|sh))`", text) if "demos/" not in name]
    for name in named:
        places = [ROOT / name, ROOT / "robotattn" / name]
        assert any(place.exists() for place in places), f"{page}: {name}"


def test_contributing_stays_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 40
