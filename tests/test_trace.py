"""Traces: what is written is read, what was changed is refused, and a sample depends on (seed, number) alone."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from robotattn.config import UsageError
from robotattn.latency import trace
from robotattn.latency.trace import Trace, synthetic


@pytest.fixture
def recorded():
    return Trace(
        device="NVIDIA H200",
        policy={"act": {"chunk": 16, "cameras": {"front": [96, 96]}}},
        shape={"batch": 1, "cameras": 1, "prefix": 53, "actions": 16},
        mode="eager",
        hz=50.0,
        service=(8_000_000, 8_100_000, 150_000_000, 8_200_001),
        inputs_seed=3,
        environment={"torch_threads": 1, "device": "Grafikkarte für große Modelle"},
    )


@pytest.fixture
def path(tmp_path, recorded):
    trace.write(tmp_path / "trace.json", recorded)
    return tmp_path / "trace.json"


def test_what_is_written_is_read(path, recorded):
    assert trace.read(path) == recorded
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["schema"], data["kind"], data["unit"], data["hz"]) == (1, "trace", "ns", 50.0)
    assert data["service"] == [8_000_000, 8_100_000, 150_000_000, 8_200_001] and data["synthetic"] is False
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]


def test_the_hash_is_that_of_the_canonical_content(path, recorded):
    data = json.loads(path.read_text(encoding="utf-8"))
    stated = data.pop("sha256")
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert stated == recorded.sha256 == hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert replace(recorded, hz=None).sha256 != stated
    path.write_text(json.dumps(data | {"sha256": stated}, indent=4, sort_keys=True))  # laid out otherwise: the same
    assert trace.read(path) == recorded


def changed(path, **values):
    """Change the file and give it the right hash for its new content."""
    data = json.loads(path.read_text(encoding="utf-8")) | values
    content = {key: value for key, value in data.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    path.write_text(json.dumps(content | {"sha256": hashlib.sha256(text.encode("utf-8")).hexdigest()}))


def test_a_trace_that_was_edited_is_refused(path):
    path.write_text(path.read_text(encoding="utf-8").replace("150000000", "9000000"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"trace\.json: sha256: '\w{64}' is written, the content has '\w{64}'"):
        trace.read(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"service": []}, "service: is empty"),
        ({"service": [8, 0, 8]}, "service: 0 at 1, allowed are whole numbers from 1"),
        ({"service": [8, -5]}, "service: -5 at 1"),
        ({"service": [8, 8.5]}, "service: 8.5 at 1"),
        ({"service": [True]}, "service: True at 0"),
        ({"service": ["8"]}, "service: '8' at 0"),
        ({"service": 8}, "service: int, allowed is list"),
        ({"schema": 2}, "schema: 2, allowed is 1"),
        ({"schema": True}, "schema: True, allowed is 1"),
        ({"kind": "profile"}, "kind: 'profile', allowed is 'trace'"),
        ({"unit": "ms"}, "unit: 'ms', allowed is 'ns'"),
        ({"hz": 0}, "hz: 0, allowed is a positive rate"),
        ({"hz": "50"}, "hz: '50', allowed is a positive rate"),
        ({"device": ""}, "device: '', allowed is a text"),
        ({"mode": None}, "mode: None, allowed is a text"),
        ({"shape": {"batch": 1.5}}, "shape: 1.5 at 0"),
        ({"shape": None}, "shape: NoneType, allowed is dict"),
        ({"inputs_seed": -1}, "inputs_seed: -1 at 0"),
        ({"synthetic": True}, "source: None, allowed is a text"),
        ({"source": "somewhere"}, "source: 'somewhere', allowed with synthetic=False is another"),
        ({"comment": "hello"}, r"keys: missing \[\], unknown \['comment'\]"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_by_file_and_field(path, values, message):
    changed(path, **values)
    with pytest.raises(UsageError, match=rf"trace\.json: {message}"):
        trace.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"kind": "trace", "kind": "trace"}', "kind is there twice"),
        (b"[1, 2]", "kind: 'list'"),
        (b'{"kind": "trace", "schema": 1, "unit": "ns"}', r"keys: missing \['device', .*'sha256'"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content, message):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UsageError, match=rf"x\.json: .*{message}"):
        trace.read(tmp_path / "x.json")
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        trace.read(tmp_path / "none.json")


def test_a_sample_depends_on_seed_and_number_and_not_on_the_order_of_asking(recorded):
    for rule in ("offset", "draw"):
        forth = [recorded.sample(7, index, rule) for index in range(40)]
        assert forth == [recorded.sample(7, index, rule) for index in reversed(range(40))][::-1]
        assert set(forth) == set(recorded.service)
        assert any(forth != [recorded.sample(seed, index, rule) for index in range(40)] for seed in range(8))


def test_the_offset_rule_replays_in_order_around_the_end(recorded):
    starts = Counter()
    for seed in range(200):
        replayed = [recorded.sample(seed, index) for index in range(9)]
        first = recorded.service.index(replayed[0])
        assert replayed == [recorded.service[(first + index) % 4] for index in range(9)]
        starts[first] += 1
    assert sorted(starts) == [0, 1, 2, 3] and min(starts.values()) > 25


def test_the_draw_rule_draws_every_time_equally_often():
    drawn = Counter(
        Trace("x", {}, {}, "eager", tuple(range(1, 11))).sample(5, index, "draw") for index in range(10_000)
    )
    assert sorted(drawn) == list(range(1, 11)) and max(abs(count - 1000) for count in drawn.values()) < 120


def test_samples_never_change_from_one_version_to_the_next():
    """Results name a trace and seeds: what they replay must not depend on a library."""
    ranks = Trace("x", {}, {}, "eager", tuple(range(1, 1001)))
    offset = int(hashlib.sha256(b"offset 42").hexdigest(), 16) % 1000
    assert [ranks.sample(42, index) for index in (0, 1)] == [offset + 1, (offset + 1) % 1000 + 1]
    assert ranks.sample(42, 6, "draw") == int(hashlib.sha256(b"draw 42 6").hexdigest(), 16) % 1000 + 1
    with pytest.raises(ValueError, match="index=-1"):
        ranks.sample(0, -1)
    with pytest.raises(ValueError, match="rule='random'"):
        ranks.sample(0, 0, "random")


def test_a_synthetic_trace_has_the_published_percentiles_and_says_what_it_is(tmp_path):
    made = synthetic("Kim et al. (2024), OpenVLA, table 1", "RTX 4090", 166.0, 190.0, n=2000)
    assert made.synthetic and "OpenVLA" in made.source and len(made.service) == 2000
    milliseconds = np.array(made.service) / 1e6
    assert np.median(milliseconds) == pytest.approx(166, rel=1e-4)
    assert np.quantile(milliseconds, 0.99) == pytest.approx(190, rel=1e-3)
    assert (np.diff(milliseconds) > 0).mean() == pytest.approx(0.5, abs=0.05)  # in no order
    trace.write(tmp_path / "made.json", made)
    assert trace.read(tmp_path / "made.json") == made
    assert set(synthetic("x", "y", 73.0, n=5).service) == {73_000_000}
    with pytest.raises(ValueError, match=r"p50_ms=10, p99_ms=9"):
        synthetic("x", "y", 10, 9)
    with pytest.raises(ValueError, match=r"source: '', allowed"):
        synthetic("", "y", 10)


def test_reading_a_trace_needs_neither_torch_nor_scipy(path):
    program = "import sys; sys.modules.update(torch=None, scipy=None, yaml=__import__('yaml')); "
    program += f"from robotattn.latency import trace; print(trace.read({str(path)!r}).sample(0, 0))"
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert int(done.stdout) == trace.read(path).sample(0, 0)
