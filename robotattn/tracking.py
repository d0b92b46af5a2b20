"""Where the numbers of a training go: always a JSON-lines file beside the checkpoint, and wandb when asked for.

The file needs no network. A tracker that is missing, cannot be reached or stops answering costs one warning and a few
seconds, never the training: it runs in a thread of its own, which is left behind at the end if it hangs.
"""

import json
import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robotattn.checkpoint import replace_file

log = logging.getLogger(__name__)
CONNECT, FINISH = 10.0, 10.0  # longest wait (s) for a tracker to start, and to take the last numbers


class Metrics:
    """A file of one JSON object per line; it goes on after the line of step `step` and drops what lies beyond."""

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = [line for line in _lines(path) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept).encode()
        replace_file(path, lambda file: file.write(text))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line; it is in the file when this returns."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Flush to disk, before a checkpoint that counts on these lines."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines that are whole: a killed writer may leave half of the last one."""
    result = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result.append(json.loads(line))
        except ValueError:
            break
    return result


class Wandb:
    """Sends metrics to wandb from a thread of its own; whatever goes wrong there is one warning here."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(dict(config), folder), daemon=True, name="wandb")
        self._thread.start()

    def write(self, values: Mapping[str, Any]) -> None:
        """Hand over one line of metrics; never waits."""
        if not self._failed.is_set():
            self._queue.put(dict(values))

    def flush(self) -> None:
        """Do nothing: the thread sends as it can."""

    def close(self) -> None:
        """Wait for the last numbers to be taken, FINISH seconds at most."""
        self._queue.put(None)
        self._thread.join(FINISH)
        if self._thread.is_alive():
            self._warn(f"no answer for {FINISH:g} s")

    def _warn(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            log.warning("wandb gets no metrics (%s); metrics.jsonl is complete", reason)

    def _run(self, config: dict[str, Any], folder: Path) -> None:
        try:
            import wandb

            settings = wandb.Settings(init_timeout=CONNECT, login_timeout=CONNECT, silent=True)
            run = wandb.init(project="robotattn", name=folder.name, dir=str(folder), config=config, settings=settings)
            while (values := self._queue.get()) is not None:
                run.log(values, step=values["step"])
            run.finish()
        except ImportError:
            self._warn("it is not installed: pip install 'robotattn[wandb]'")
        except Exception as error:  # no key, no network, no space, ...: training does not depend on any of it
            self._warn((str(error).splitlines() or [type(error).__name__])[0][:200])
