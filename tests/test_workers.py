"""Watched worker processes; what they do here is a function of the standard library, so that they can import it."""

import math
import multiprocessing
import os
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from robotattn.data.workers import WorkerError, run_tasks


def doing(function: Any) -> Any:
    """A worker's opening, whose context gives this function."""
    return partial(nullcontext, function)


broken: Any = partial(int, "x")


def test_every_task_is_done_once():
    results = run_tasks(doing(math.factorial), range(8), workers=2, deadline=60)
    assert sorted(results) == [math.factorial(n) for n in range(8)]
    assert not multiprocessing.active_children()


def test_no_task_needs_no_worker():
    assert list(run_tasks(doing(math.factorial), [], workers=2, deadline=60)) == []


def test_a_worker_that_stalls_is_named_with_its_backend_and_the_run_ends(monkeypatch):
    """O01. Its clock is put forward: how fast a worker starts here plays no part."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    results = run_tasks(doing(time.sleep), [0, 1000], workers=1, deadline=500)
    assert next(results) is None  # and now it sleeps for 1000 s
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + 501)
    monkeypatch.setattr("robotattn.data.workers.time", late)
    with pytest.raises(WorkerError, match=r"worker 0 \(pid \d+\) in episode 1000: silent for 500 s .*MUJOCO_GL is egl"):
        next(results)
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_is_named_with_its_exit_code():
    with pytest.raises(WorkerError, match=r"in episode 7: died with exit code 7"):
        list(run_tasks(doing(os._exit), [7], workers=1, deadline=60))


def test_a_worker_that_fails_shows_its_error():
    with pytest.raises(WorkerError, match=r"(?s)in episode -1: Traceback.*ValueError"):
        list(run_tasks(doing(math.sqrt), [-1], workers=1, deadline=60))


def test_a_worker_that_cannot_start_is_named():
    with pytest.raises(WorkerError, match=r"(?s)while starting: Traceback.*ValueError"):
        list(run_tasks(broken, [0], workers=1, deadline=60))


def test_stopping_early_stops_the_workers():
    results = run_tasks(doing(time.sleep), [0, 1000], workers=1, deadline=1000)
    assert next(results) is None
    results.close()
    assert not multiprocessing.active_children()
