"""The stages of a control step, each timed under its name: host, tokenize, prefill, decode.

host: observations → batch on the policy's device (text ids looked up, arrays stacked and copied). The other three are
the policy's own methods. The step can also be run whole, without a synchronisation between its stages.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from robotattn.latency.inputs import Batcher
from robotattn.latency.measure import Spans
from robotattn.policies import Policy, PolicyConfig
from robotattn.tokens.sequence import Tokens
from robotattn.types import COLOURS, MAX_OBJECTS, OBJECT_SIZE, STATE_SIZE, Observation

STAGES = ("host", "tokenize", "prefill", "decode")


class ControlStep:
    """One observation batch in, actions ``[B, H, A]`` on the host out. length: every text is padded to it (tokens)."""

    def __init__(self, policy: Policy, batcher: Batcher, length: int) -> None:
        self.policy, self.batcher, self.length = policy, batcher, length

    def whole(self, observations: Sequence[Observation]) -> Tensor:
        """Run the step as the control loop does."""
        return self.policy.act(self.batcher.batch(observations, self.length)).cpu()

    def staged(self, observations: Sequence[Observation], spans: Spans) -> Tensor:
        """Run the same step with every stage timed; the copy of the actions back to the host belongs to decode."""
        batch = spans.run("host", lambda: self.batcher.batch(observations, self.length))
        tokens = spans.run("tokenize", lambda: self.policy.tokenize(batch))
        memory = spans.run("prefill", lambda: self.policy.prefill(tokens))
        return spans.run("decode", lambda: self.policy.decode(memory).cpu())

    def tokens(self, observations: Sequence[Observation]) -> Tokens:
        """The tokens of these observations, for counting."""
        return self.policy.tokenize(self.batcher.batch(observations, self.length))


def token_counts(tokens: Tokens) -> dict[str, int]:
    """Tokens of each group and in all."""
    counts = {name: part.stop - part.start for name, part in tokens.slices.items()}
    return {**counts, "total": tokens.values.shape[1]}


def random_observation(config: PolicyConfig, generator: np.random.Generator, texts: Sequence[str]) -> Observation:
    """An observation of the policy's shapes with fresh values: zeros would be faster than anything a camera sees."""
    images = {name: generator.integers(0, 256, (*size, 3), np.uint8) for name, size in config.cameras.items()}
    state = generator.normal(0, 0.5, STATE_SIZE).astype(np.float32)
    objects = _objects(generator) if config.objects else None
    return Observation(images, state, texts[int(generator.integers(len(texts)))], objects, 0.0)


def _objects(generator: np.random.Generator) -> np.ndarray:
    """Six objects in random places, every colour once."""
    objects = np.zeros((MAX_OBJECTS, OBJECT_SIZE), np.float32)
    objects[:, :4] = generator.normal(0, 0.3, (MAX_OBJECTS, 4))
    objects[np.arange(MAX_OBJECTS), 4 + generator.permutation(len(COLOURS))] = 1.0
    return objects


def count_parameters(policy: Policy) -> dict[str, int]:
    """Number of parameters, and the bytes of parameters and buffers."""
    tensors = [*policy.parameters(), *policy.buffers()]
    return {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


def same_actions(step: ControlStep, observations: Sequence[Observation], spans: Spans) -> float:
    """The largest difference between the staged and the whole step's actions: no speed figure without it."""
    with torch.inference_mode():
        return float((step.whole(observations) - step.staged(observations, spans)).abs().max())
