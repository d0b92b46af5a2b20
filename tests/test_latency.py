"""Measuring: the clock waits for the work, warm-up settles first, and what would spoil a window is seen and named."""

import gc
import time
from functools import partial
from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from robotattn.latency import measure
from robotattn.latency.measure import (
    Clock,
    ColdStart,
    Collections,
    Recompiled,
    Spans,
    import_time,
    quiet,
    summary,
    warm_up,
    window,
)
from robotattn.statistics import early_stopping, percentile

MS = 1_000_000


def test_known_slow_work_cannot_read_fast():
    _, duration = Clock("cpu").time(lambda: time.sleep(0.006))
    assert duration >= 6e6


def test_a_chain_of_products_reads_as_long_as_it_takes():
    matrix = torch.randn(400, 400)
    power = matrix

    def chain():
        nonlocal power
        for _ in range(10):
            power = torch.nn.functional.normalize(power @ matrix)
        return power

    inside, clock = Spans(Clock("cpu")), Clock("cpu")
    (_, duration), outside = Clock("cpu").time(lambda: clock.time(lambda: inside.run("chain", chain)))
    assert 0 < inside.samples["chain"][0] <= duration <= outside


class Queue:
    """A stand-in for a GPU: work returns at once, and only a synchronisation takes the time that it needs."""

    def __init__(self, monkeypatch):
        self.host, self.pending, self.done = 0, 0, 0
        self.launch = 0  # (ns) of the host for every piece of work
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter_ns=lambda: self.host))
        monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda device: self.wait())
        monkeypatch.setattr(measure.torch.cuda, "Event", lambda enable_timing: Event(self))

    def submit(self, ns: int) -> None:
        self.host += self.launch
        self.pending += ns

    def wait(self) -> None:
        self.host += self.pending
        self.done, self.pending = self.done + self.pending, 0


class Event:
    """Where the device will be once it has done what was queued before it."""

    def __init__(self, queue: Queue):
        self.queue, self.at = queue, 0

    def record(self) -> None:
        self.at = self.queue.done + self.queue.pending

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) / 1e6


def test_on_a_device_that_queues_work_both_readings_wait_for_it(monkeypatch):
    device, clock = Queue(monkeypatch), Clock("cuda")
    assert "synchronised" in clock.name
    device.submit(20 * MS)  # left over from before: must not be counted
    _, duration = clock.time(lambda: device.submit(5 * MS))
    assert duration == 5 * MS


def test_device_time_stands_beside_host_time_and_the_difference_is_the_hosts(monkeypatch):
    device = Queue(monkeypatch)
    device.launch = 1 * MS
    device.submit(20 * MS)
    spans = Spans(Clock("cuda"), events=True)
    spans.run("decode", lambda: [device.submit(2 * MS) for _ in range(3)])
    assert spans.samples["decode"].tolist() == [9 * MS] and spans.device["decode"].tolist() == [6 * MS]
    assert spans.host_overhead("decode").tolist() == [3 * MS]


def test_on_a_cpu_device_time_is_wall_time():
    spans = Spans(Clock("cpu"), events=True)
    spans.run("a", lambda: time.sleep(0.001))
    assert spans.samples == spans.device and spans.host_overhead("a").tolist() == [0]


def test_a_device_that_cannot_be_synchronised_is_refused():
    with pytest.raises(ValueError, match="meta, allowed are cpu, cuda, mps"):
        Clock("meta")


def test_stages_that_spin_for_known_times_are_reported_within_two_percent_and_add_up(monkeypatch):
    """The clock and the spin read this thread's processor time, which stands still in another program's turn."""
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter_ns=time.thread_time_ns))
    known, spans = {"vision": 3 * MS, "prefix": 2 * MS, "decode": 5 * MS}, Spans(Clock("cpu"))

    def spin(ns: int) -> None:
        end = time.thread_time_ns() + ns
        while time.thread_time_ns() < end:
            pass

    def step() -> None:
        for name, ns in known.items():
            spans.run(name, partial(spin, ns))

    for _ in range(9):
        spans.run("step", step)
    for name, ns in known.items():
        assert min(spans.samples[name]) >= ns  # never faster than it was, in any sample
        assert np.median(spans.samples[name]) <= 1.02 * ns
    stages = np.sum([spans.samples[name] for name in known], axis=0)
    assert (stages <= spans.samples["step"]).all()
    assert np.median(stages / np.asarray(spans.samples["step"])) >= 0.98


def test_stages_that_sleep_are_never_reported_faster_than_they_slept():
    spans = Spans(Clock("cpu"))
    for _ in range(3):
        spans.run("capture", lambda: time.sleep(0.004))
    assert min(spans.samples["capture"]) >= 4 * MS


def test_percentiles_without_enough_samples_are_refused_with_the_number_needed():
    durations = list(range(1_000_000, 459_000_001, 1_000_000))  # 1 ms, 2 ms, ... 459 ms
    full, short = summary(durations), summary(durations[:458])
    assert (full["n"], full["p50"], full["max"], full["min"], full["mean"]) == (459, 230.0, 459.0, 1.0, 230.0)
    assert full["p99"] == pytest.approx(np.quantile(np.arange(1, 460), 0.99))
    assert short["p99"] is None and short["p95"] is not None and short["p90"] is not None
    assert short["refused"] == {"p99": "needs 459 samples, has 458", "p99.9": "needs 4603 samples, has 458"}
    few = summary(durations[:63])
    assert few["early_stopping_p90"] is None
    assert few["refused"]["early_stopping_p90"] == "needs 64 samples, has 63"
    assert summary(durations[:3])["p50"] is None and summary(durations[:3])["intervals"] == {}
    with pytest.raises(ValueError, match="0 durations"):
        summary([])


def test_every_percentile_has_its_interval_of_order_statistics():
    durations = np.random.default_rng(0).permutation(np.arange(1, 1001)) * MS
    found = summary(durations)
    assert sorted(found["intervals"]) == ["p50", "p90", "p95", "p99"]
    for name, p in (("p50", 0.5), ("p99", 0.99)):
        estimate = percentile(durations / MS, p)
        assert found["intervals"][name] == [estimate.low, estimate.high]
        assert found["intervals"][name][0] < found[name] == estimate.value < found["intervals"][name][1]
    assert found["early_stopping_p90"] == early_stopping(durations / MS) > found["p90"]


class FakeClock:
    """A clock on which the calls take the given times (ns)."""

    def __init__(self, durations):
        self.durations = iter(durations)

    def time(self, work):
        return work(), next(self.durations)


def test_warm_up_goes_on_until_two_windows_agree():
    falling = FakeClock([100, 50, 20] + [10] * 100)
    warm = warm_up(lambda: None, falling, window=3)
    assert (warm.calls, warm.steady) == (9, True) and warm.durations[:3] == (100, 50, 20)
    never = warm_up(lambda: None, FakeClock(2.0**-k for k in range(1000)), most=60)
    assert (never.calls, never.steady) == (60, False)


def test_a_spike_while_warming_up_does_not_move_p99():
    """The first call takes 3 s (it compiles); what is reported afterwards is as if it had not been."""
    steady = [8 * MS + 1000 * (k % 7) for k in range(1000)]
    clock = FakeClock([3000 * MS, 400 * MS, *steady])
    warm, spans = warm_up(lambda: None, clock), Spans(clock)
    for _ in range(600):
        spans.run("step", lambda: None)
    assert warm.steady and warm.durations[0] == 3000 * MS
    assert summary(spans.samples["step"])["p99"] == summary(spans.samples["step"])["max"] == 8.006
    cold = ColdStart()
    cold.warm = warm
    assert cold.to_dict()["first_calls_ms"][:2] == [3000.0, 400.0]


def test_the_garbage_collector_is_off_inside_the_window_and_back_on_after_it():
    with quiet():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError), quiet():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_garbage_collection_storm_is_seen_and_named():
    with window() as seen:
        rubbish = [[] for _ in range(50_000)]
        for item in rubbish:
            item.append(item)  # cycles: only the collector frees them
        del rubbish, item
        for _ in range(3):
            gc.collect()  # a policy that collects by itself, collector off or not
    found = seen.report()["garbage"]
    assert found["collections"] == 3 and found["generations"] == {"2": 3} and found["freed"] >= 50_000
    assert 0 < found["longest_ms"] <= found["total_ms"] <= 1e3 * seen.report()["seconds"]
    assert found["storm"].startswith("garbage collection: 3 collections took ")


def test_a_window_that_leaves_the_collector_on_counts_what_it_does():
    with window(collect=True) as seen:
        kept = [[] for _ in range(100_000)]
    assert seen.report()["garbage"]["collections"] > 0 and len(kept) == 100_000


def test_a_quiet_window_sees_no_collection_and_stops_watching():
    watchers = len(gc.callbacks)
    with window() as seen:
        kept = [[] for _ in range(100_000)]
    assert len(kept) == 100_000 and len(gc.callbacks) == watchers
    garbage = seen.report()["garbage"]
    assert (garbage["collections"], garbage["total_ms"], garbage["storm"]) == (0, 0, None)
    assert seen.report()["recompiles"] == 0 and seen.report()["seconds"] > 0


@pytest.mark.parametrize(
    ("pauses", "length", "named"),
    [([500_000], 100 * MS, False), ([500_000] * 2, 100 * MS, True), ([118 * MS], 10**12, True), ([], 0, False)],
)
def test_collections_are_named_by_their_share_of_the_window_or_a_long_pause(pauses, length, named):
    readings = iter([value for pause in pauses for value in (1, 1 + pause)])
    collections = Collections(clock=lambda: next(readings))
    for _ in pauses:
        for phase in ("start", "stop"):
            collections._called(phase, {"generation": 0, "collected": 2, "uncollectable": 0})
    found = collections.report(length)
    assert (found["storm"] is not None) is named and found["freed"] == 2 * len(pauses)
    assert found["total_ms"] == sum(pauses) / 1e6


def test_a_compilation_inside_the_window_is_an_error_and_one_before_it_is_not():
    torch._dynamo.reset()
    step = torch.compile(lambda x: 2 * x + 1, backend="eager", dynamic=False)
    step(torch.ones(2))
    with window() as seen:
        step(torch.ones(2))
    assert seen.recompiles == 0
    with pytest.raises(Recompiled, match="1 graphs were compiled in the timed window, allowed are 0"), window() as seen:
        step(torch.ones(3))
    assert seen.report()["recompiles"] == 1 and gc.isenabled()
    with window(strict=False) as seen:
        step(torch.ones(4))
    assert seen.recompiles == 1


def test_warm_up_is_not_steady_while_anything_compiles(monkeypatch):
    calls = []
    monkeypatch.setattr(measure, "compiled_graphs", lambda: int(len(calls) >= 7))  # the 7th call compiles
    warm = warm_up(lambda: calls.append(None), FakeClock([10] * 100), window=5)
    assert (warm.calls, warm.steady) == (15, True)


def test_the_cold_start_keeps_its_parts_apart():
    cold = ColdStart()
    with cold.stage("build"):
        time.sleep(0.002)
    with cold.stage("build"):
        time.sleep(0.002)
    found = cold.to_dict()
    assert found["build_ms"] >= 4 and found["load_ms"] is found["compile_ms"] is found["import_ms"] is None
    with pytest.raises(ValueError, match="warm: allowed are import, build, load, compile"), cold.stage("warm"):
        pass


def test_import_time_is_that_of_a_fresh_interpreter():
    assert 0 < import_time("json") < 60e9
    assert import_time("a_module_that_does_not_exist") is None


def test_spans_collect_by_name_and_return_the_result():
    spans = Spans(FakeClock([5, 6, 7]))
    assert [spans.run(name, name.upper) for name in "aba"] == ["A", "B", "A"]
    spans.add("b", 8)
    assert {name: samples.tolist() for name, samples in spans.samples.items()} == {"a": [5, 7], "b": [6, 8]}


def test_ten_thousand_steps_keep_eight_bytes_a_sample_and_no_object():
    spans = Spans(FakeClock(repeat(5)))
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(10_000):
        spans.run("step", int)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert spans.samples["step"].itemsize == 8 and spans.samples["step"].buffer_info()[1] == 10_000
