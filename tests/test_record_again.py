"""Recording goes on where it was broken off: neither workers nor kills nor damaged files change a byte."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from robotattn.config import UsageError
from robotattn.data import store
from robotattn.data.record import RecordConfig, record
from robotattn.envs import EnvConfig


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


SCRIPT = """
import sys
from pathlib import Path
from robotattn.data.record import RecordConfig, record
record(RecordConfig(out=Path(sys.argv[1]), episodes=12, workers=2))
"""


def kill_after(folder: Path, count: int) -> None:
    """Record in another process and kill it -9 as soon as this many episodes are written."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)])
    limit = time.monotonic() + 60
    while len(list(folder.glob("*.hdf5"))) < count and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = listing.read_text().split() if listing.exists() else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(_running(child) for child in children):
        assert time.monotonic() < limit, "the workers outlived their parent"
        time.sleep(0.01)


def _running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twelve episodes recorded by one worker without a break."""
    folder = tmp_path_factory.mktemp("whole") / "demos"
    told = []
    summary = record(RecordConfig(out=folder, episodes=12, workers=1), lambda *news: told.append(news))
    assert told == [("record", done, 12) for done in range(13)]
    assert summary["episodes"] == summary["recorded"] == 12 <= summary["attempts"]
    assert summary["expert_rate"] == 12 / summary["attempts"] and summary["damaged"] == []
    return folder


def test_kills_and_workers_do_not_change_a_byte(whole, tmp_path):
    folder = tmp_path / "demos"
    for count in (1, 4, 9):
        kill_after(folder, count)
        assert len(list(folder.glob("*.hdf5"))) >= count
    summary = record(RecordConfig(out=folder, episodes=12, workers=2))
    assert summary["episodes"] == 12 and summary["recorded"] < 12 and summary["damaged"] == []
    assert digests(folder) == digests(whole)


def copy_of(whole: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in whole.iterdir():
        os.link(path, folder / path.name)
    return folder


def replace_file(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def test_damaged_and_missing_files_are_recorded_again(whole, tmp_path):
    folder = copy_of(whole, tmp_path / "demos")
    content = (folder / "episode_000003.hdf5").read_bytes()
    replace_file(folder / "episode_000003.hdf5", content[:-1024])
    replace_file(folder / "episode_000005.hdf5", b"")
    replace_file(folder / "episode_000006.hdf5", content)
    (folder / "episode_000008.hdf5").unlink()
    (folder / "manifest.jsonl").unlink()
    summary = record(RecordConfig(out=folder, episodes=12, workers=1))
    assert summary["recorded"] == 4
    named = "episode 3: cannot be opened", "episode 5: is empty", "episode 6: belongs to another dataset"
    assert len(summary["damaged"]) == 3 and all(n in d for n, d in zip(named, summary["damaged"], strict=True))
    assert digests(folder) == digests(whole)


def test_interrupting_stops_the_workers_and_keeps_what_is_done(whole, tmp_path):
    def interrupt(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    folder = tmp_path / "demos"
    with pytest.raises(KeyboardInterrupt):
        record(RecordConfig(out=folder, episodes=12, workers=1), interrupt)
    kept = {name: digest for name, digest in digests(folder).items() if name.endswith(".hdf5")}
    assert 2 <= len(kept) < 12 and kept.items() <= digests(whole).items()
    assert len(store.read_manifest(folder)) == 2 and not list(folder.glob(".*"))


def test_another_configuration_is_refused_and_changes_nothing(whole):
    before = digests(whole)
    for config, message in (
        (RecordConfig(out=whole, episodes=12, env=EnvConfig(hz=20)), "env.hz: 10 there, 20 now"),
        (RecordConfig(out=whole, episodes=12, seed=1), "seed: 0 there, 1 now"),
        (RecordConfig(out=whole, episodes=11), "episodes: holds 12, 11 asked for"),
        (RecordConfig(out=whole / "dataset.json"), "is a file, not a folder"),
    ):
        with pytest.raises(UsageError, match=message):
            record(config)
    assert digests(whole) == before
