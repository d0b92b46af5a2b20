"""A control step's stages: known times are found where they belong, the parts are the whole, inputs are fresh."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from robotattn.latency.inputs import Batcher, RandomInputs, random_instructions, random_observation
from robotattn.latency.measure import Clock, Spans
from robotattn.latency.stages import PASS, STAGED, STAGES, ControlStep, safe, same_actions, token_counts
from robotattn.latency.subject import of_policy
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig
from robotattn.types import Observation

SMALL = {
    "cameras": {"front": (32, 48), "wrist": (32, 32)}, "width": 32, "feedforward": 32, "text_width": 16,
    "stem_channels": 8,
}  # fmt: skip
POLICIES = [
    (ACTConfig(chunk=5, **SMALL), "decode", 1, True),
    (AutoregressiveConfig(chunk=2, layers=1, **SMALL), "decode", 10, False),
    (BlockwiseConfig(chunk=4, layers=1, steps=3, **SMALL), "denoise", 3, False),
    (BlockwiseConfig(chunk=4, layers=1, head="autoregressive", **SMALL), "decode", 4, False),
]


class FakeClock:
    """A clock that only work moves on (ns)."""

    def __init__(self):
        self.time_now = 0

    def now(self):
        return self.time_now

    def time(self, work):
        start = self.now()
        return work(), self.now() - start

    def pass_ms(self, milliseconds):
        self.time_now += round(1e6 * milliseconds)


class Units:
    def __init__(self, spend):
        self.spend = spend

    def denormalise(self):
        self.spend(0.5)


class Known(nn.Module):
    """A policy whose stages take known times on a clock (ms)."""

    action_mode = "tool"

    def __init__(self, spend):
        super().__init__()
        self.spend = spend
        self.normaliser = Units(spend)

    def tokenize(self, batch):
        self.spend(4)

    def prefill(self, tokens):
        self.spend(2)

    def act(self, batch):
        return self.decode(self.prefill(self.tokenize(batch)))

    def decode(self, memory):
        self.spend(3)
        self.normaliser.denormalise()
        return torch.zeros(1, 2, 5)


class KnownBatcher:
    def __init__(self, spend):
        self.spend = spend

    def stack(self, observations, length):
        self.spend(0.25)
        return {}

    def move(self, batch):
        self.spend(0.125)
        return batch


def seen():
    state = np.zeros(13, np.float32)
    state[8:11], state[12] = (0.5, 0.0, 0.2), 1.0
    return [Observation({}, state, "", None, 0.0)]


def test_known_times_are_found_under_their_names_and_add_up_to_the_wall():
    clock = FakeClock()

    def capture():
        clock.pass_ms(8)
        return seen()

    spans = Spans(clock)
    ControlStep(Known(clock.pass_ms), KnownBatcher(clock.pass_ms), 1, capture=capture).staged([], spans)
    found = {name: durations[0] / 1e6 for name, durations in spans.samples.items() if len(durations)}
    known = {"capture": 8, "preprocess": 0.25, "transfer": 0.125, "vision": 4, "prefix": 2, "decode": 3}
    assert found == known | {"postprocess": 0.5, "to_host": 0, "safety": 0, STAGED: sum(known.values()) + 0.5}


def test_stages_that_spin_are_never_reported_faster_and_their_sum_is_the_wall_time():
    clock = Clock("cpu")

    def spin(milliseconds):
        end = clock.now() + milliseconds * 1e5  # tenths of what the names say: 0.4 ms of vision, ...
        while clock.now() < end:
            pass

    spans, step = Spans(clock), ControlStep(Known(spin), KnownBatcher(spin), 1)
    for _ in range(30):
        step.staged(seen(), spans)
    for name, milliseconds in (("vision", 0.4), ("prefix", 0.2), ("decode", 0.3), ("postprocess", 0.05)):
        assert min(spans.samples[name]) >= 1e6 * milliseconds
    parts = sum(np.asarray(spans.samples[name]) for name in STAGES if name in spans.samples)
    assert np.median(parts / np.asarray(spans.samples[STAGED])) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("config", "decoding", "passes", "cross"), POLICIES)
def test_every_policy_is_split_into_its_stages_without_changing_its_actions(config, decoding, passes, cross):
    subject = of_policy("small", config, "cpu", 6)
    fresh, spans = subject.inputs(2, 0), Spans(Clock("cpu"))
    step = ControlStep(subject.policy, subject.batcher, subject.length)
    assert same_actions(step, fresh(), spans) == 0
    stages = {"preprocess", "transfer", "vision", "prefix", decoding, "postprocess", "to_host", "safety"}
    assert set(spans.samples) == stages | ({"cross_kv"} if cross else set()) | {PASS, STAGED}
    assert len(spans.samples[PASS]) == passes and min(spans.samples[PASS]) > 0
    assert sum(spans.samples[PASS]) <= spans.samples[decoding][0] + spans.samples["postprocess"][0]
    hidden = [m for m in subject.policy.modules() if {"forward", "remember", "actions", "denormalise"} & set(vars(m))]
    assert not hidden, "a stage's mark was left on the policy"


def test_the_first_action_is_kept_inside_the_workspace_and_must_be_finite():
    actions = np.zeros((1, 3, 5))
    actions[0, :, 2] = -1.0
    limited = safe(actions, seen(), "tool")
    assert limited[0, 0].tolist() == [0, 0, pytest.approx(0.014 - 0.2), 0, 0] and limited[0, 1, 2] == -1.0
    actions[0, 0, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        safe(actions, seen(), "tool")


def test_inputs_are_fresh_at_every_step_and_never_zero_and_the_same_for_a_seed():
    config = ACTConfig(cameras={"front": (32, 32)}, objects=True)
    inputs = RandomInputs(config, ["a", "b"], batch=2, seed=3)
    (first, other), (second, _) = inputs(), inputs()
    assert first.images["front"].std() > 50 and (first.images["front"] != second.images["front"]).mean() > 0.9
    assert (first.state != second.state).all() and (first.state != other.state).all()
    assert (first.objects[:, 4:].sum(0) == 1).all()
    again = RandomInputs(config, ["a", "b"], batch=2, seed=3)()[0]
    assert (again.images["front"] == first.images["front"]).all() and again.instruction == first.instruction


def test_a_policy_with_a_history_sees_frames_oldest_first():
    config = SimpleNamespace(cameras={"front": (16, 32)}, frames=3, objects=True)
    rows = RandomInputs(config, ["a"], batch=2)()
    assert [[seen.time for seen in row] for row in rows] == [[0, 0.05, 0.1]] * 2
    batcher = Batcher(lambda texts: (np.array([[5, 6]]), None), ["front"], frames=3)
    batch = batcher.batch(rows)
    assert batch["images"]["front"].shape == (2, 3, 16, 32, 3) and batch["objects"].shape[:2] == (2, 3)
    assert (batch["images"]["front"][1, 2].numpy() == rows[1][2].images["front"]).all()
    assert (batch["state"][0].numpy() == rows[0][2].state).all()
    assert (batch["history"][0, 1].numpy() == rows[0][1].state).all() and batch["history"].shape == (2, 2, 13)
    np.testing.assert_allclose(batch["ages"], [[0.1, 0.05, 0]] * 2, atol=1e-7)
    with pytest.raises(ValueError, match="oldest first"):
        batcher.batch([rows[0][::-1]])


def test_made_up_instructions_have_the_asked_number_of_real_tokens():
    encode, texts = random_instructions(vocabulary=40, tokens=7)
    ids, mask = encode(texts)
    assert ids.shape == (16, 7) and mask.all() and ids.min() >= 2 and ids.max() < 40
    assert len({tuple(row) for row in ids}) == 16
    assert (encode([texts[3]])[0] == ids[3]).all()


def test_batches_pad_texts_to_one_length_and_mark_absent_objects():
    def encode(texts):
        return np.array([[len(texts[0])] * len(texts[0])]), None

    config = ACTConfig(objects=True)
    observations = [random_observation(config, np.random.default_rng(0), [text]) for text in ("ab", "abc")]
    observations[0].objects[4:] = 0
    batch = Batcher(encode, []).batch(observations, length=4)
    assert batch["text"].tolist() == [[2, 2, 0, 0], [3, 3, 3, 0]]
    assert batch["text_mask"].tolist() == [[True, True, False, False], [True, True, True, False]]
    assert batch["objects_mask"].tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert batch["state"].shape == (2, 13) and batch["images"] == {}


def test_tokens_are_counted_by_group():
    subject = of_policy("small", POLICIES[0][0], "cpu", 6)
    step = ControlStep(subject.policy, subject.batcher, subject.length)
    counts = token_counts(step.tokens(subject.inputs(1, 0)()))
    assert counts == {"front": 6, "wrist": 4, "instruction": 6, "proprioception": 1, "target": 1, "total": 18}


@pytest.mark.parametrize("config", [POLICIES[0][0], POLICIES[2][0]])
def test_nothing_is_read_on_the_host_between_batch_and_actions(config, monkeypatch):
    """On tensors without values, a read raises: a step that needs none can be one CUDA graph."""
    subject = of_policy("small", config, "cpu", 6)
    batch = subject.batcher.batch(subject.inputs(1, 0)())
    empty = {name: _meta(value) for name, value in batch.items()}
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **named: nullcontext())  # there is none for such tensors
    assert subject.policy.to("meta").act(empty).shape == (1, config.chunk, 5)


def _meta(value):
    return {name: _meta(inner) for name, inner in value.items()} if isinstance(value, dict) else value.to("meta")
