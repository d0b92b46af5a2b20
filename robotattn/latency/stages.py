"""The stages of a control step, each timed under its name, and the step run whole, as the control loop runs it.

capture (only where an environment gives it) · preprocess (stack, look up text ids) · transfer (host to device) ·
vision (images, text and state → tokens) · prefix (encode) · cross_kv (keys and values of the context, ACT) · decode
(tokens or queries) or denoise (integration steps) · postprocess (to physical units) · to_host · safety (limits).
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robotattn.attention import Transformer
from robotattn.control.safety import Workspace, require_finite
from robotattn.latency.inputs import Batcher, Row, newest
from robotattn.latency.measure import Clock, Spans
from robotattn.policies import Policy
from robotattn.tokens.sequence import Tokens
from robotattn.types import ACTION_SIZE, ActionMode, tool_pose

STAGES = (
    "capture", "preprocess", "transfer", "vision", "prefix", "cross_kv", "decode", "denoise", "postprocess", "to_host",
    "safety",
)  # fmt: skip
STAGED = "staged"
"""Name of the wall time of a step that was run stage by stage."""
PASS = "pass"
"""Name of the time of one pass through the decoder: a token, all queries, or an evaluation of the velocity."""

WORKSPACE = Workspace()

Act = Callable[[dict[str, object]], Tensor]
"""A batch on the policy's device → actions ``[B, H, A]`` in physical units, on the device."""


class Laps:
    """Divide a stretch of time among names. Neighbours share one reading of the clock: the parts add up exactly."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.totals, self.running = clock, dict[str, int](), ""
        self._since = 0

    def to(self, name: str) -> str:
        """End what is running, begin `name` ("": nothing), and return what was running."""
        now = self.clock.now()
        if self.running:
            self.totals[self.running] = self.totals.get(self.running, 0) + now - self._since
        previous, self.running, self._since = self.running, name, now
        return previous


class ControlStep:
    """One observation batch in, safe actions ``[B, H, A]`` float64 on the host out.

    length: every text is padded to it (tokens). act: how the policy is run; default eagerly. capture: takes what the
    sensors see (not part of the policy; a simulator's renderer, a camera's driver).
    """

    def __init__(
        self,
        policy: Policy,
        batcher: Batcher,
        length: int,
        act: Act | None = None,
        capture: Callable[[], Sequence[Row]] | None = None,
    ) -> None:
        self.policy, self.batcher, self.length, self.capture = policy, batcher, length, capture
        self.act: Act = policy.act if act is None else act
        self.decoding = "denoise" if getattr(policy, "flow", None) is not None else "decode"
        self._stacks = [module for module in policy.modules() if isinstance(module, Transformer)]

    def whole(self, observations: Sequence[Row]) -> np.ndarray:
        """Run the step as the control loop does, without a synchronisation between its stages."""
        observations = observations if self.capture is None else self.capture()
        actions = to_host(self.act(self.batcher.batch(observations, self.length)))
        return safe(actions, observations, self.policy.action_mode)

    def staged(self, observations: Sequence[Row], spans: Spans) -> np.ndarray:
        """Run the same step with every stage timed (the policy's own stages, not `act`), and its wall time, `STAGED`.

        Every stage starts and ends with the device idle, so the stages' sum is what a step costs without overlap.
        """
        laps, passes = Laps(spans.clock), list[int]()
        with self._marked(laps, passes):
            actions, wall = spans.clock.time(lambda: self._staged(observations, laps))
        for name, duration in {**laps.totals, STAGED: wall}.items():
            spans.samples.setdefault(name, array("q")).append(duration)
        spans.samples.setdefault(PASS, array("q")).extend(np.diff(passes).tolist())
        return actions

    def batch(self, observations: Sequence[Row]) -> dict[str, object]:
        """The batch of these observations, on the policy's device."""
        return self.batcher.batch(observations, self.length)

    def tokens(self, observations: Sequence[Row]) -> Tokens:
        """The tokens of these observations, for counting."""
        return self.policy.tokenize(self.batch(observations))

    def _staged(self, observations: Sequence[Row], laps: Laps) -> np.ndarray:
        if self.capture is not None:
            laps.to("capture")
            observations = self.capture()
        laps.to("preprocess")
        stacked = self.batcher.stack(observations, self.length)
        laps.to("transfer")
        batch = self.batcher.move(stacked)
        laps.to("vision")
        tokens = self.policy.tokenize(batch)
        laps.to("prefix")
        memory = self.policy.prefill(tokens)
        laps.to(self.decoding)
        decoded = self.policy.decode(memory)
        laps.to("to_host")
        actions = to_host(decoded)
        laps.to("safety")
        actions = safe(actions, observations, self.policy.action_mode)
        laps.to("")
        return actions

    @contextmanager
    def _marked(self, laps: Laps, passes: list[int]) -> Iterator[None]:
        """Note, inside the policy's methods, where cross-KV, post-processing and each pass of decoding begin."""

        def to(name: str, during: str) -> Callable[[], str]:
            return lambda: laps.to(name) if laps.running == during else ""

        def back(previous: str) -> None:
            if previous:
                laps.to(previous)

        def note() -> str:
            if laps.running == self.decoding:
                passes.append(laps.clock.now())
            return ""

        def finish() -> str:
            note()
            return to("postprocess", self.decoding)()

        with ExitStack() as patches:
            for stack in self._stacks:
                patches.enter_context(_around(stack, "remember", to("cross_kv", "prefix"), back))
                patches.enter_context(_around(stack, "forward", note, back))
            units = getattr(self.policy, "units", None)
            owner, name = (self.policy.normaliser, "denormalise") if units is None else (units, "actions")
            patches.enter_context(_around(owner, name, finish, back))
            yield


@contextmanager
def _around(owner: Any, name: str, before: Callable[[], str], after: Callable[[str], None]) -> Iterator[None]:
    """Call something before and after a method of one object, for as long as the context lasts."""
    method = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        previous = before()
        result = method(*arguments, **named)
        after(previous)
        return result

    setattr(owner, name, call)  # an attribute of the object hides the method of its class
    try:
        yield
    finally:
        delattr(owner, name)


def to_host(actions: Tensor) -> np.ndarray:
    """Actions as float64 in the host's memory."""
    return actions.detach().to("cpu", torch.float64).numpy()


def safe(actions: np.ndarray, observations: Sequence[Row], mode: ActionMode) -> np.ndarray:
    """Refuse a first action that is not finite, and keep the tool inside the workspace; the rest is left alone.

    Raises ValueError for NaN or infinity.
    """
    for row, observation in zip(actions, observations, strict=True):
        action = require_finite(row[0], ACTION_SIZE[mode])
        if mode == "tool":
            here = tool_pose(newest(observation).state)[:3]
            row[0, :3] = WORKSPACE.clip(here + action[:3]) - here
    return actions


def token_counts(tokens: Tokens) -> dict[str, int]:
    """Tokens of each group and in all."""
    counts = {name: part.stop - part.start for name, part in tokens.slices.items()}
    return {**counts, "total": tokens.values.shape[1]}


def count_parameters(policy: Policy) -> dict[str, int]:
    """Number of parameters, and the bytes of parameters and buffers."""
    tensors = [*policy.parameters(), *policy.buffers()]
    return {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


def same_actions(step: ControlStep, observations: Sequence[Row], spans: Spans) -> float:
    """The largest difference between the staged and the whole step's actions: no speed figure without it."""
    with torch.inference_mode():
        return float(np.abs(step.whole(observations) - step.staged(observations, spans)).max())
