"""Spawned worker processes that are watched: a worker that fails, dies or stalls ends the run with its name.

Spawned, because a rendering context does not survive a fork. The parent never waits without a deadline (a renderer
that hangs in its first pixel read says nothing), and a worker ends as soon as its parent is gone.
"""

import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

Work = Callable[[int], Any]
Open = Callable[[], AbstractContextManager[Work]]
GONE = (EOFError, OSError)  # what a pipe raises when the process at its other end has died


class WorkerError(RuntimeError):
    """A worker process could not do its task; the message names the worker, the task and the reason."""


@dataclass
class _Worker:
    number: int
    process: BaseProcess
    connection: Connection
    since: float  # when it was last given something to do (s, time.monotonic)
    task: int | None = None

    def give(self, task: int | None) -> None:
        """Send a task, or None: there are no more."""
        self.task, self.since = task, time.monotonic()
        try:
            self.connection.send(task)
        except GONE:
            raise self.error(self._death()) from None

    def take(self) -> tuple[str, Any]:
        """Receive ("ready", None) or ("done", result)."""
        try:
            kind, value = self.connection.recv()
        except GONE:
            raise self.error(self._death()) from None
        if kind == "failed":
            raise self.error(value)
        return kind, value

    def error(self, reason: str) -> WorkerError:
        place = "while starting" if self.task is None else f"in episode {self.task}"
        return WorkerError(f"worker {self.number} (pid {self.process.pid}) {place}: {reason}")

    def _death(self) -> str:
        self.process.join(5)
        hint = "; a script that starts workers needs `if __name__ == '__main__':`" if self.task is None else ""
        return f"died with exit code {self.process.exitcode}{hint}"

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join(2)
        if self.process.is_alive():  # hung inside a driver: SIGTERM is not enough
            self.process.kill()
            self.process.join(2)


def run_tasks(open_work: Open, tasks: Iterable[int], workers: int, deadline: float) -> Generator[Any, None, None]:
    """Yield the result of each task as it is done, in any order, computed by up to `workers` spawned processes.

    open_work: picklable; called in each worker, its context gives the function that does a task. deadline: seconds a
    worker may take to start or to do one task. Raises WorkerError; the other workers are stopped however this ends.
    """
    waiting = deque(tasks)
    pool: list[_Worker] = []
    try:
        for number in range(min(workers, len(waiting))):
            pool.append(_launch(number, open_work))
        busy = list(pool)
        while busy:
            for worker in _answered(busy, deadline):
                kind, value = worker.take()
                if waiting:
                    worker.give(waiting.popleft())
                else:
                    worker.give(None)
                    busy.remove(worker)
                if kind == "done":
                    yield value
        for worker in pool:
            worker.process.join(5)  # let it close its renderer
    finally:
        for worker in pool:
            worker.stop()


def _launch(number: int, open_work: Open) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, open_work), daemon=True)
    process.start()
    theirs.close()  # so that the death of the worker closes the pipe
    return _Worker(number, process, ours, time.monotonic())


def _answered(busy: list[_Worker], deadline: float) -> list[_Worker]:
    """Wait for answers; raise WorkerError when the first deadline passes before one comes."""
    oldest = min(busy, key=lambda worker: worker.since)
    left = oldest.since + deadline - time.monotonic()
    answered = wait([worker.connection for worker in busy], max(left, 0.0))
    if oldest.connection not in answered and time.monotonic() - oldest.since > deadline:
        backend = os.environ.get("MUJOCO_GL", "not set")
        raise oldest.error(
            f"silent for {deadline:g} s (rendering backend: MUJOCO_GL is {backend}); "
            "try another backend, fewer workers, or a longer deadline"
        )
    return [worker for worker in busy if worker.connection in answered]


def _serve(connection: Connection, open_work: Open) -> None:
    """Do tasks until told to stop; runs in the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with open_work() as work:
            connection.send(("ready", None))
            while (task := connection.recv()) is not None:
                connection.send(("done", work(task)))
    except WorkerError as error:
        connection.send(("failed", str(error)))
    except Exception:
        with suppress(OSError):  # the parent is gone
            connection.send(("failed", traceback.format_exc().strip()))


def _end_with_parent() -> None:
    """End this process with the one that started it: an orphan must not write into a folder that is being resumed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
