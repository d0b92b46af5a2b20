"""The study of what is faster on a CPU: its reference without a cache, its rows, and what it calls a win."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import cpu_wins_table
import study_cpu_wins
from study_cpu_wins import Case, Study

from robotattn.latency.subject import of_policy
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig

SMALL = {"objects": True, "width": 32, "feedforward": 32, "text_width": 16}
CONFIGS = {
    "act": ACTConfig(chunk=3, **SMALL),
    "autoregressive": AutoregressiveConfig(chunk=2, layers=2, **SMALL),
    "flow": BlockwiseConfig(chunk=3, layers=2, steps=4, **SMALL),
}
STUDY = Study(rounds=3, seconds=0.0)


def case(name):
    torch.manual_seed(0)
    subject = of_policy(name, CONFIGS[name], "cpu", 6)
    fresh = subject.inputs(1, 0)
    batches = [subject.batcher.batch(fresh(), subject.length) for _ in range(3)]
    return Case(name, "random", subject.policy, batches)


@torch.no_grad()
@pytest.mark.parametrize("name", ["autoregressive", "flow"])
def test_decoding_without_a_cache_gives_the_policys_actions_from_one_prefix_a_token_or_step(name):
    one = case(name)
    policy, counted = one.policy, []
    prefill = policy.prefill
    policy.prefill = lambda tokens: counted.append(1) or prefill(tokens)
    found = study_cpu_wins.uncached(policy, policy.tokenize(one.batches[0]))
    torch.testing.assert_close(found, policy.act(one.batches[0]), rtol=0, atol=1e-5)
    assert len(counted) - 1 == {"autoregressive": 10, "flow": 4}[name]


@torch.no_grad()
@pytest.mark.parametrize(("name", "kept"), [("act", 0), ("autoregressive", 1), ("flow", 1)])
def test_every_policy_has_the_rows_that_concern_it(name, kept):
    threads, one = torch.get_num_threads(), case(name)
    try:
        (probed,) = study_cpu_wins.probed(STUDY, one, threads)
    finally:
        torch.set_num_threads(threads)
    assert probed["before"] == f"{threads} thread{'s' * (threads > 1)}, sdpa" and len(probed["candidates"]) >= 2
    cached, rounded = study_cpu_wins.kept(STUDY, one), study_cpu_wins.rounded(STUDY, one)
    assert len(cached) == kept and all(row["actions"]["ok"] for row in cached)
    assert [(row["before"], row["measured"]) for row in rounded] == [
        ("float32", "decode"), ("float32", "step"), ("float32, fused", "decode"),
    ]  # fmt: skip
    for row in [probed, *cached, *rounded]:
        assert row["ratio"]["median"] > 0 and row["before_ms"]["n"] == 3
        assert len(cpu_wins_table.cells(row | {"verdict": "holds"})) == len(cpu_wins_table.TITLES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "holds"),
        ({"ratio": {"low": 0.9, "high": 1.2}}, "no: not surely faster"),
        ({"ratio": {"low": 0.8, "high": 0.9}}, "no: slower"),
        ({"after": "float32"}, "the defaults stay"),
        ({"actions": {"ok": False}}, "faster, but other actions"),
        ({"success": {"difference": {"high": -0.01}}}, "faster, but fewer successes"),
        ({"success": {"difference": {"high": 0.01}}}, "holds"),
    ],
)
def test_a_win_is_surely_faster_with_the_same_actions_and_no_drop_of_success(changes, said):
    row = {"before": "float32", "after": "int8", "ratio": {"low": 1.1, "high": 1.3}, "actions": {"ok": True}}
    assert cpu_wins_table.verdict(row | {"success": None} | changes) == said


def test_the_study_writes_a_row_a_line_and_ends_in_json_without_folders_of_the_machine(monkeypatch, tmp_path, capsys):
    outcomes = {("autoregressive", "float32"): [True] * 12, ("autoregressive", "int8"): [True] * 11 + [False]}
    monkeypatch.setattr(study_cpu_wins, "episodes", lambda study, bars: outcomes)
    monkeypatch.setattr(study_cpu_wins, "cases", lambda study: [case("autoregressive")])
    threads = torch.get_num_threads()
    try:
        study_cpu_wins.main(Study(out=tmp_path, trained=(), rounds=2, seconds=0.0))
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "wins.json").read_text())
    assert [row["win"] for row in result["rows"]] == ["probe", "int8", "int8", "int8", "cache"]
    found = result["rows"][1]["success"]
    assert found["int8"]["successes"] == 11 and found["difference"]["difference"] == pytest.approx(-1 / 12)
    assert result["rows"][0]["success"] is None and all(row["verdict"] for row in result["rows"])
    table = (tmp_path / "wins.md").read_text()
    assert len(table.splitlines()) == 2 + 5 and "11 of 12" in table
    assert str(tmp_path) not in table + json.dumps(result)
