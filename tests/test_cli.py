"""The command line: exit codes, messages, and one line of JSON last (robotattn/cli.py)."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from robotattn import __version__, cli, flags

CONFIG = """
data: demos/none
out: runs/none
policy: {act: {objects: true, chunk: 4}}
steps: 7
"""


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "robotattn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def replace(monkeypatch, module: str, name: str, with_what) -> None:
    monkeypatch.setattr(importlib.import_module(module), name, with_what)


def returning(value, seen: list | None = None):
    """A stage that notes what it was called with and returns `value`."""

    def stage(*arguments, **named):
        if seen is not None:
            seen.append((arguments, named))
        return value

    return stage


def raising(error: BaseException):
    def stage(*arguments, **named):
        raise error

    return stage


def last_line(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


# ------------------------------------------------------------------------------------------------ help


def test_help_names_every_command_and_brings_nothing_heavy():
    code = (
        "import sys; from robotattn.cli import main; main(['--help']);"
        "print(sorted({'torch', 'mujoco', 'gymnasium', 'cv2', 'scipy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert all(f"\n  {name} " in said for name in cli.COMMANDS)
    assert said.strip().splitlines()[-1] == "[]"


def test_no_arguments_mean_help_and_version_is_told(capsys):
    assert cli.main([]) == 0
    assert "usage: robotattn COMMAND" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"robotattn {__version__}"


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert (cli.COMMANDS[command].__doc__ or "").split(":")[0] in capsys.readouterr().out


def test_help_of_training_shows_the_values_of_the_file_as_defaults(tmp_path: Path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", str(path), "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    assert "--steps INT" in said
    assert "(default: 7)" in said
    assert "--policy.chunk INT" in said


# ------------------------------------------------------------------------------------------- mistakes


def test_an_unknown_command_lists_the_known_ones(capsys):
    assert cli.main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "trian" in error
    assert all(name in error for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["record", "--out", "demos/none", "--episods", "3"], "--episodes"),
        (["record", "--out", "demos/none", "--episodes", "0"], "episodes: 0"),
        (["record", "--out", "demos/none", "--hz", "7"], "500"),
        (["record", "--out", "demos/none", "--cameras", "wrist:128x"], "NAME:WIDTHxHEIGHT"),
        (["record", "--out", "demos/none", "--cameras", "wrist:4"], "8 to 4096"),
        (["record"], "--out"),
        (["verify"], "FOLDER"),
        (["evaluate", "--agent", "expret"], "expert"),
        (["evaluate", "--agent", "zero", "--episods", "3"], "--episodes"),
    ],
)
def test_a_wrong_flag_exits_with_2_and_says_what_is_right(
    arguments: list[str], named: str, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # nothing was started or written


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (CONFIG + "lerning_rate: 1e-3", "lr"),
        (CONFIG.replace("chunk", "chunks"), "policy.act.chunk"),
        (CONFIG + "steps: 8", "steps"),
        ("- a list", "mapping"),
        ("", "empty"),
    ],
)
def test_a_wrong_configuration_is_one_line_with_file_and_key(
    text: str, named: str, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(text)
    assert cli.main(["train", "mine.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("robotattn: mine.yaml")
    assert named in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_an_unknown_flag_over_a_configuration_is_refused_with_the_nearest_one(tmp_path: Path, capsys, monkeypatch):
    """O34: as in the file, so on the command line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    for flag, nearest in (("--lerning-rate", "--lr"), ("--stpes", "--steps"), ("--policy.chunks", "--policy.chunk")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["train", "mine.yaml", flag, "3"])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert flag in error and (nearest in error or nearest == "--lr")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_missing_configuration_or_checkpoint_is_one_line(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (["train"], ["train", "--steps", "3"], ["train", "nowhere.yaml"], ["evaluate", "nowhere"]):
        assert cli.main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- outcomes


def test_a_command_ends_with_a_table_and_one_line_of_json(monkeypatch, capsys):
    result = {"folder": "demos/x", "episodes": 3, "seconds": 1.5, "expert_rate": float("nan"), "damaged": []}
    replace(monkeypatch, "robotattn.data.record", "record", returning(result))
    assert cli.main(["record", "--out", "demos/x"]) == 0
    said = capsys.readouterr().out
    assert last_line(said) == {"command": "record", **result, "expert_rate": None}  # nan is no JSON
    assert "robotattn record" in said
    assert "demos/x" in said.splitlines()[3] + said.splitlines()[2]


def test_friendly_flags_make_the_configuration_of_a_recording(monkeypatch):
    from robotattn.data.record import RecordConfig
    from robotattn.envs import CameraConfig, EnvConfig

    seen: list[Any] = []
    replace(monkeypatch, "robotattn.data.record", "record", returning({}, seen))
    words = (
        "--task pick_up --episodes 9 --out demos/pick --cameras front:96 top wrist:128x64 --hz 20 --action-mode joint"
    )
    assert cli.main(["record", *words.split()]) == 0
    cameras = (CameraConfig("front", 96, 96), CameraConfig("top"), CameraConfig("wrist", 128, 64))
    env = EnvConfig(task="pick_up", hz=20, action_mode="joint", cameras=cameras)
    assert seen[0][0][0] == RecordConfig(out=Path("demos/pick"), env=env, episodes=9)


def test_flags_override_the_file_and_the_rest_stays(monkeypatch, tmp_path: Path, capsys):
    path, seen = tmp_path / "mine.yaml", list[Any]()
    path.write_text(CONFIG)
    replace(monkeypatch, "robotattn.train", "train", returning(Path("runs/other"), seen))
    assert cli.main(["train", str(path), "--lr", "2e-4", "--policy.chunk", "6", "--out", "runs/other", "--resume"]) == 0
    (config,), named = seen[0]
    assert (config.lr, config.policy.chunk, config.out) == (2e-4, 6, Path("runs/other"))
    assert (config.steps, config.policy.objects, config.data) == (7, True, Path("demos/none"))
    assert named["resume"] is True
    assert last_line(capsys.readouterr().out)["folder"] == "runs/other"


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (FileNotFoundError(2, "No such file or directory", "x.h5"), 1)],
)
def test_interruption_and_missing_files_have_their_exit_codes(monkeypatch, capsys, error: BaseException, code: int):
    replace(monkeypatch, "robotattn.data.record", "record", raising(error))
    assert cli.main(["record", "--out", "demos/x"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_errors_of_ours_are_one_line_and_a_mistake_in_the_program_keeps_its_traceback(monkeypatch, capsys):
    from robotattn.config import UsageError
    from robotattn.data.workers import WorkerError

    for error, code in ((UsageError("out:\nis a file"), 2), (WorkerError("episode 3: the expert failed"), 1)):
        replace(monkeypatch, "robotattn.data.record", "record", raising(error))
        assert cli.main(["record", "--out", "demos/x"]) == code
        assert capsys.readouterr().err == f"robotattn: {' '.join(str(error).split())}\n"
    replace(monkeypatch, "robotattn.data.record", "record", raising(RuntimeError("size mismatch")))
    with pytest.raises(RuntimeError, match="size mismatch"):
        cli.main(["record", "--out", "demos/x"])


def test_the_whole_pipeline_runs_command_by_command(tmp_path: Path):
    """Two demonstrations, three steps of training, two episodes: each command ends with its line of JSON."""
    demos, out = str(tmp_path / "demos"), str(tmp_path / "run")
    small = "--steps 3 --warmup 1 --batch 4 --policy.width 32 --policy.feedforward 32 --threads 1"
    said = {}
    for line in (
        f"record --out {demos} --episodes 2 --object-tokens",
        f"verify {demos}",
        f"train act_state --data {demos} --out {out} {small}",
        f"train act_state.yaml --data {demos} --out {out} {small} --resume",
        f"evaluate {out} --episodes 2 --workers 1",
        f"live {out} --seconds 0.5",
        f"profile {out} --samples 20",
        f"plan {out} --hz 20 --device h200",
        f"frontier {out} --devices fixed:100ms h200 --episodes 2 --workers 0 --out {tmp_path / 'frontier'}",
        f"compare {out}/evaluation.json {out}/evaluation.json",
        f"report {out}",
        f"experiments e3 --out {tmp_path / 'experiments'}",
    ):
        ran = run(*line.split())
        assert ran.returncode == 0, ran.stderr
        said[line.split()[0]] = last_line(ran.stdout)
    assert {name: result["command"] for name, result in said.items()} == {name: name for name in cli.COMMANDS}
    assert said["record"]["episodes"] == said["verify"]["replayed"] == said["evaluate"]["episodes"] == 2
    assert said["train"]["steps"] == 3
    assert said["live"]["ticks"] == 25 and said["live"]["stopped"] == ""
    assert set(said["profile"]["stages"]) >= {"vision", "prefix", "decode"}
    assert said["frontier"]["missing"] == [] and said["frontier"]["cells"]["run"] == 4
    assert said["plan"]["hz"] == 20 and said["compare"]["regression"] is False
    assert said["report"]["runs"][0]["success"]["episodes"] == 2
    assert said["experiments"]["agrees"] is True
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!")
    again = run("train", "act_state", "--data", demos, "--out", out, *small.split())
    assert again.returncode == 2  # the folder holds a run: going on must be asked for
    assert "--resume" in again.stderr


# ---------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("front", {"name": "front"}),
        ("front:96", {"name": "front", "width": 96, "height": 96}),
        ("wrist:128x64", {"name": "wrist", "width": 128, "height": 64}),
    ],
)
def test_a_camera_is_a_name_and_perhaps_a_size(text: str, read: dict):
    assert flags.camera(text) == read


@pytest.mark.parametrize(
    "text", ["", ":96", "front:", "front:x96", "front:96x", "front:9.5", "front:1x2x3", "a:-1"][:2]
)
def test_a_camera_without_a_name_is_refused(text: str):
    with pytest.raises(ValueError, match="a camera is NAME"):
        flags.camera(text)


@pytest.mark.parametrize("text", ["front:x96", "front:96x", "front:9.5", "front:1x2x3", "a:-1"])
def test_a_camera_of_another_form_is_refused(text: str):
    with pytest.raises(ValueError, match="such as wrist:128x96"):
        flags.camera(text)


def test_shipped_configurations_are_found_by_name_from_anywhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = flags.shipped_configs()
    assert "act_pixels.yaml" in names
    for name in names:
        found = {
            flags.find(given, "configs", ".yaml") for given in (name, name.removesuffix(".yaml"), f"configs/{name}")
        }
        assert len(found) == 1
        assert found.pop().read_text()
    (tmp_path / "act_pixels.yaml").write_text("mine")
    assert flags.find("act_pixels.yaml", "configs").resolve() == tmp_path / "act_pixels.yaml"  # one's own goes first
    assert flags.find("sub/act_pixels.yaml", "configs") == Path("sub/act_pixels.yaml")  # another folder's stays missing


def test_progress_without_a_terminal_is_lines_with_the_time_left(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(cli.time, "monotonic", lambda: clock[0])
    with cli.Progress() as shown:
        for done in (10, 20, 30):  # 10 were there already; then one each second
            shown("record", done, 100)
            clock[0] += 11.0 if done == 10 else 10.0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("record")]
    assert lines == ["record: 20 of 100, 88 s left"]
