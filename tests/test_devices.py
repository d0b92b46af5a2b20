"""Devices: constants with sources, and a probe of the machine that the tests run on."""

import pytest
import torch

from robotattn.latency import devices
from robotattn.latency.devices import DEVICES, probe
from robotattn.latency.published import PUBLISHED


def test_every_device_has_rates_and_a_source():
    assert list(DEVICES) == ["h200", "h100", "a100", "rtx4090", "orin", "thor"]
    for device in DEVICES.values():
        assert set(device.flops) == {"float32", "bfloat16", "float16", "int8"} and not device.measured
        assert device.flops["float32"] < device.flops["bfloat16"] < device.flops["int8"] and len(device.source) > 20
        assert 0 < device.graph_launch < device.launch < 1e-4
    assert DEVICES["h200"].bandwidth == 4.3e12 and DEVICES["h200"].rate("bfloat16") == 7.9e14


def test_an_unknown_number_format_is_refused_by_name():
    with pytest.raises(ValueError, match=r"dtype: float8 is not known for NVIDIA H100 SXM, allowed: float32, bfloat16"):
        DEVICES["h100"].rate("float8")


@pytest.fixture
def brief(monkeypatch):
    """Take an instant for each quantity."""
    monkeypatch.setattr(devices, "WINDOW", 0.01)
    monkeypatch.setattr(devices, "STREAM", {"cpu": 2**24})


def test_a_probe_measures_plausible_rates(brief):
    threads = torch.get_num_threads()
    device = probe("cpu", threads=1)
    assert device.measured and "1 thread" in device.name and torch.get_num_threads() == threads
    assert 1e8 < device.bandwidth < 1e13 and 1e-8 < device.launch < 1e-2
    assert 1e8 < device.rate("float32") < 1e14 and set(device.flops) <= {"float32", "bfloat16", "float16", "int8"}


def test_a_probe_of_one_number_format_knows_no_other(brief):
    assert list(probe("cpu", torch.float32, 1).flops) == ["float32"]


def test_a_number_format_that_a_device_cannot_multiply_is_left_out(brief, monkeypatch):
    def refuse(*arguments, **more):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(devices, "_integer_product", refuse)
    assert "int8" not in probe("cpu", threads=1).flops


def test_a_probe_counts_the_bytes_and_operations_that_it_times(brief, monkeypatch):
    """On a clock by which everything takes 1 ms: 4 MiB copied are 8 GiB/s, a product of side 512 0.27 TFLOP/s."""

    class Clock:
        now_ns = 0

        def __init__(self, device):
            self.device = torch.device(device)

        def now(self):
            self.now_ns += 10**6
            return self.now_ns

        def time(self, work):
            return work(), 10**6

    monkeypatch.setattr(devices, "Clock", Clock)
    device = probe("cpu", torch.float32, 1)
    assert device.bandwidth == pytest.approx(2 * 2**22 / 1e-3)
    assert device.rate("float32") == pytest.approx(2 * 512**3 / 1e-3)
    assert device.launch == device.graph_launch == pytest.approx(1e-3 / devices.CHAIN)


def test_a_device_that_cannot_be_synchronised_is_refused():
    with pytest.raises(ValueError, match="meta, allowed are cpu, cuda, mps"):
        probe("meta")


def test_published_latencies_have_devices_and_sources():
    assert len(PUBLISHED) >= 12
    for row in PUBLISHED:
        assert 1.0 < row.ms <= 1000.0 and row.name and row.device and row.what and row.source
    assert {row.ms for row in PUBLISHED} >= {166.0, 73.0, 27.3, 106.5, 43.5, 750.0, 63.9, 207.0, 49.0, 63.7, 3.2}
