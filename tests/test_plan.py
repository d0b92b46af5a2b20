"""Predictions from a sweep and from closed forms, and what they say to change (robotattn/latency/{plan,calibrate})."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robotattn.config import UsageError
from robotattn.latency import bounds
from robotattn.latency.calibrate import Calibration, calibrate, columns
from robotattn.latency.changes import changes
from robotattn.latency.devices import DEVICES
from robotattn.latency.grid import BASE, Candidate, as_kind, grid
from robotattn.latency.plan import (
    EXPLAINED,
    Analytic,
    Calibrated,
    PlanConfig,
    Prediction,
    first_changes,
    hardest,
    mark_front,
    plan,
    verdict,
)
from robotattn.latency.subject import written
from robotattn.latency.successes import successes
from robotattn.latency.sweep import facts
from robotattn.latency.sweep_file import Writer, merge

LAUNCH, FLOP, BYTE, HOST = 2e-3, 1e-8, 1e-7, 0.2  # milliseconds each, on a machine that does not exist
AXES = ("policy=act,autoregressive,blockwise", "cameras=1:4", "patch=16,32")


def truth(candidate: Candidate) -> dict[str, float]:
    """What a stage takes on that machine."""
    work = {name: asdict(one) for name, one in bounds.work(candidate.policy, 16).items()}
    stages = {name: float(np.dot(columns(one), (LAUNCH, FLOP, BYTE))) for name, one in work.items()}
    return stages | {"staged": sum(stages.values()) + HOST}


def made_up_rows(noise: float = 0.0, axes: tuple[str, ...] = AXES) -> list[dict[str, Any]]:
    generator, rows = np.random.default_rng(0), []
    for candidate in grid(axes)[0]:
        factor = math.exp(noise * generator.normal())
        stages = {name: factor * value for name, value in truth(candidate).items()}
        microseconds = stages["staged"] * 1e3 * (1 + 0.01 * generator.random(500))
        row = {"key": candidate.label, "label": candidate.label, "kind": candidate.kind, "mode": "eager", "repeat": 0}
        row |= {"policy": written(candidate.policy), **facts(candidate.policy, 16)}
        rows.append(row | {"stages": stages, "samples_us": microseconds.round().astype(int).tolist()})
    return rows


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """A sweep's file of that machine."""
    writer = Writer(tmp_path / "sweep.jsonl", {"device": "cpu", "cpu": "an abacus", "torch_threads": 1}, dict)
    for row in made_up_rows():
        writer.append(row)
    return tmp_path


# ------------------------------------------------------------------------------------------ calibration


def test_a_machine_that_obeys_the_model_is_predicted_exactly_and_beyond_the_sweep():
    varied = ("policy=act,autoregressive,blockwise", "cameras=1,3", "patch=16,32", "width=128,192", "chunk=4,8")
    found = calibrate(merge(made_up_rows(axes=varied)))
    assert found.held_out["worst"] < 0.01 and found.held_out["n"] == 48
    for text in ("cameras=6", "width=320", "layers=7", "chunk=13", "patch=8"):
        for kind in ("act", "autoregressive", "blockwise"):
            (one,), _ = grid([f"policy={kind}", text])
            known = facts(one.policy, 16)
            predicted = found.predict(kind, known["work"], known["image_bytes"])
            assert predicted == pytest.approx(truth(one)["staged"], rel=0.02), one.label


def test_the_held_out_error_is_about_the_noise_of_the_machine():
    noisy = calibrate(merge(made_up_rows(noise=0.05)))
    assert 0.01 < noisy.held_out["error"] < 0.12
    assert set(noisy.by_kind) == {"act", "autoregressive", "blockwise"}


def test_stages_add_up_to_the_prediction():
    found = calibrate(merge(made_up_rows()))
    known = facts(BASE, 16)
    stages = found.stages("autoregressive", known["work"], known["image_bytes"])
    assert sum(stages.values()) == found.predict("autoregressive", known["work"], known["image_bytes"])
    assert set(stages) == {"around", "vision", "prefix", "decode"} and min(stages.values()) >= 0


def test_the_tail_is_the_median_ratio_of_the_sweep():
    found = calibrate(merge(made_up_rows()))
    assert found.tail["p99"] == pytest.approx(1.0099 / 1.005, rel=1e-3) and found.tail["max"] > found.tail["p99"]


def test_what_the_sweep_did_not_vary_is_marked_as_beyond_it():
    """The held-out error says nothing of a width that no point had."""
    found = calibrate(merge(made_up_rows()))
    known = {text: facts(grid(["policy=act", text])[0][0].policy, 16)["work"] for text in ("cameras=2", "width=384")}
    assert found.covers("act", known["cameras=2"]) and not found.covers("act", known["width=384"])
    rows = first_changes(Candidate(BASE, (("kind", "base"),)), Calibrated(found, 16))
    beyond = {row["change"]: row["beyond"] for row in rows}
    assert beyond["width 192 → 144"] and not beyond["patch 16 → 32"]


def test_what_cannot_be_calibrated_is_refused_by_name():
    rows = made_up_rows(axes=("policy=act", "cameras=1:4", "patch=16,32"))
    with pytest.raises(ValueError, match="act has 5 points, a calibration needs 6"):
        calibrate(merge(rows[:5]))
    with pytest.raises(ValueError, match="one mode"):
        calibrate(merge([*rows, {**rows[0], "mode": "int8"}]))
    with pytest.raises(ValueError, match="blockwise: around is not in the calibration"):
        calibrate(merge(rows)).predict("blockwise", {}, 0.0)


# ------------------------------------------------------------------------------------------ changes


def test_every_change_is_a_smaller_policy_that_can_be_built():
    for kind in ("act", "autoregressive", "blockwise"):
        (one,), _ = grid([f"policy={kind}", "cameras=2", "patch=8"])
        found = dict(changes(one.policy))
        assert all(policy != one.policy for policy in found.values())
        assert {name.split(" ")[0] for name in found} >= {"one", "patch", "chunk", "width", "layers"}
        before = one.policy.build()
        for name, policy in found.items():
            sizes = [sum(p.numel() for p in each.parameters()) for each in (policy.build(), before)]
            assert sizes[0] <= sizes[1] or name.startswith("patch")  # a larger patch has more weights, and fewer tokens
    assert "integration steps 10 → 5" in dict(changes(as_kind(BASE, "blockwise")))


def test_a_change_that_does_not_fit_is_not_offered():
    smallest = replace(BASE, cameras={"front": (32, 32)}, patch=32, chunk=1, layers=1, width=8, heads=8, kv_heads=1)
    assert list(changes(smallest)) == []
    conv = replace(BASE, stem="conv")
    assert not any(name.startswith("patch") for name, _ in changes(conv))


# ------------------------------------------------------------------------------------------ planning


def test_an_analytic_prediction_is_the_bound_over_what_bounds_explain():
    model = Analytic(DEVICES["h200"], "bfloat16", False, 16)
    floor = bounds.bounds(bounds.work(BASE, 16, 2), DEVICES["h200"], "bfloat16")["step"].floor_ms
    found = model(BASE)
    assert (found.low, found.high) == pytest.approx((floor / 0.83, floor / 0.57))
    assert found.low < found.p50 < found.high and found.p99 is None and found.worst == found.high
    assert sum(model.stages(BASE).values()) == pytest.approx(found.p50)
    assert EXPLAINED == (0.57, 0.83) and "57-83 %" in model.label and "predicted" in model.label
    assert Analytic(DEVICES["h200"], "bfloat16", True, 16)(BASE).p50 < found.p50  # a graph launches faster


def test_a_verdict_is_yes_only_if_the_worst_prediction_fits():
    found = Prediction(p50=10.0, low=9.0, high=12.0, p99=15.0)
    assert found.worst == pytest.approx(18.0)
    assert [verdict(found, budget) for budget in (18.0, 17.9, 9.0, 8.9)] == ["yes", "perhaps", "perhaps", "no"]


def test_the_front_is_what_nothing_beats():
    rows = [
        {"kind": "act", "tokens": tokens, "p50": ms, "success": rate}
        for tokens, ms, rate in ((10, 1.0, 0.5), (20, 2.0, 0.4), (20, 3.0, 0.9), (30, 2.5, 0.9))
    ]
    mark_front(rows, "tokens")
    assert [row["front"] for row in rows] == [True, True, False, True]
    mark_front(rows, "success")
    assert [row["front"] for row in rows] == [True, False, False, True]


def test_the_configuration_to_work_on_is_the_cheapest_that_fails_or_else_the_largest():
    candidates = [Candidate(BASE, (("n", n),)) for n in range(3)]
    rows = [
        {"kind": "autoregressive", "p50": float(n), "fits": fits} for n, fits in enumerate(("yes", "no", "perhaps"))
    ]
    assert hardest(rows, candidates)[0].label == "n=1"
    assert hardest([row | {"fits": "yes"} for row in rows], candidates)[0].label == "n=2"


def test_changes_are_sorted_by_what_they_save_and_the_cache_is_priced():
    known = calibrate(merge(made_up_rows()))
    rows = first_changes(Candidate(BASE, (("kind", "base"),)), Calibrated(known, 16))
    assert [row["saves"] for row in rows] == sorted((row["saves"] for row in rows), reverse=True)
    cache = rows[-1]
    stages = known.stages("autoregressive", facts(BASE, 16)["work"], facts(BASE, 16)["image_bytes"])
    assert cache["change"].startswith("without the KV cache")
    assert -cache["saves"] == pytest.approx((8 * 5 - 1) * stages["prefix"])  # again for each of the other action tokens
    half = next(row for row in rows if row["change"] == "chunk 8 → 4")
    assert half["saves"] > 0 and half["share"] == pytest.approx(half["saves"] / (half["p50"] + half["saves"]))


def test_a_plan_for_a_named_device_needs_no_measurement():
    found = plan(PlanConfig(hz=50.0, device="orin", sweep=("policy=act,autoregressive", "cameras=1:2", "chunk=8")))
    assert found["budget_ms"] == 20.0 and found["device"] == DEVICES["orin"].name
    assert {row["fits"] for row in found["rows"]} <= {"yes", "perhaps", "no"} and len(found["rows"]) == 4
    assert found["predicted"].startswith("predicted (analytic") and found["budgets"] == []
    for row in found["rows"]:
        assert row["low"] < row["p50"] < row["high"] and row["ticks"] == math.ceil(row["high"] / 20.0)


def test_a_plan_from_a_sweep_carries_the_sweeps_error(swept: Path):
    found = plan(PlanConfig(hz=100.0, calibrate=swept, sweep=("policy=act", "cameras=1:8")))
    assert found["predicted"].startswith("predicted (calibrated; held-out error") and "abacus" in found["device"]
    times = [row["p50"] for row in found["rows"]]
    assert times == sorted(times) and all(row["p99"] > row["p50"] for row in found["rows"])
    assert {row["statistic"] for row in found["budgets"]} == {"p99", "max"}
    assert {row["hz"] for row in found["budgets"]} == {10.0, 20.0, 30.0, 50.0, 100.0}
    with pytest.raises(UsageError, match=r"device: h200, but .* is of cpu an abacus"):
        plan(PlanConfig(calibrate=swept, device="h200"))


def test_known_successes_make_the_front(swept: Path, tmp_path):
    kinds = {kind: as_kind(BASE, kind) for kind in ("act", "autoregressive")}
    rows = [{"name": kind, "policy": written(policy), "success": 0.9} for kind, policy in kinds.items()]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(rows))
    found = plan(PlanConfig(calibrate=swept, success=path))
    assert [(row["label"], row["success"]) for row in found["rows"]] == [
        ("name=act", 0.9),
        ("name=autoregressive", 0.9),
    ]
    assert [row["front"] for row in found["rows"]] == [True, False]  # as good and slower


def test_successes_come_from_evaluations_too(tmp_path):
    folder = Path(__file__).parents[1] / "assets/checkpoints/act_pixels"
    data = {"kind": "evaluation", "config": {"checkpoint": str(folder)}, "success": {"rate": 0.75}}
    (tmp_path / "a.json").write_text(json.dumps(data))
    (tmp_path / "other.json").write_text('{"kind": "study"}')
    ((candidate, rate),) = successes(tmp_path)
    assert rate == 0.75 and candidate.kind == "act" and candidate.label == "evaluation=a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "neither an evaluation nor a list"),
        ("[]", "has no success rates"),
        ('[{"policy": {"act": {"objects": true}}, "success": 1.5}]', "success: 1.5, allowed is a rate"),
        ('[{"policy": {"act": {"objects": true}}}]', "success: None"),
        ('[{"policy": {"acts": {}}, "success": 1}]', "acts: unknown; nearest: act"),
    ],
)
def test_a_file_without_successes_is_refused(tmp_path, text: str, message: str):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        successes(path)


def test_impossible_plans_are_refused():
    for wrong in ({"hz": 0.0}, {"share": 1.5}, {"dtype": "float8"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PlanConfig(**wrong)
    with pytest.raises(UsageError, match=r"device: abacus, allowed: .*h200.*, or here"):
        plan(PlanConfig(device="abacus"))


def test_a_calibration_without_a_tail_judges_by_p50():
    held_out = {"r2": 1.0, "error": 0.1, "worst": 0.2, "n": 6}
    terms = {("autoregressive", stage): (1.0, 0.0, 0.0) for stage in ("vision", "prefix", "decode")}
    ranges = dict.fromkeys(terms, ((0.0,) * 3, (math.inf,) * 3))
    known = Calibration(
        terms | {("autoregressive", "around"): (1.0, 0.0)}, {"autoregressive": 1.0}, {}, held_out, {}, ranges
    )
    found = Calibrated(known, 16)(BASE)
    assert found.p99 is None and found.worst == pytest.approx(1.2 * found.p50)
