"""Where the latencies of a policy on a device come from: measured, predicted or assumed, and labelled so.

In goes a word: a folder with traces that `robotattn profile` wrote (or one trace), a known device, or what a clock
takes (``fixed:80ms``). For a known device the latency is made from closed forms: the floors of all stages, each the
longer of roofline and launches, added up. No program is faster, and most are slower; nothing says how its p99 would be,
so that every inference takes the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from robotattn.config import UsageError
from robotattn.control import clock
from robotattn.latency import bounds
from robotattn.latency.devices import DEVICES, Device
from robotattn.latency.subject import of_written, written
from robotattn.latency.trace import Trace, read, synthetic
from robotattn.policies import PolicyConfig
from robotattn.statistics import samples_needed

DTYPE, DTYPE_BYTES = "float32", 4  # what policies are run in
ALLOWED = f"a folder of traces or a trace (.json), a known device ({', '.join(DEVICES)}), or {clock.ALLOWED}"

Kind = Literal["measured", "predicted", "assumed"]


@dataclass(frozen=True)
class Source:
    """The latencies of one policy on one device. p50, p99: in ms; p99 is None where too few samples say it."""

    device: str
    """Short name."""
    kind: Kind
    text: str
    """Where the figures are from, in words."""
    p50: float
    p99: float | None
    tail: bool
    """Whether latencies differ at all: without a tail, p99 is but p50."""
    trace_of: Trace | None = None
    word: str | None = None
    """Of a clock, where there is no trace."""

    @property
    def is_zero(self) -> bool:
        """Whether nothing takes time."""
        return self.p50 == 0 and self.p99 == 0


@dataclass(frozen=True)
class Named:
    """A device that latencies are asked of. word: as given. name: short, of tables and files."""

    word: str
    name: str
    find: Callable[[PolicyConfig, int], Source | str]
    """A policy's configuration and the tokens of its instruction → its latencies, or why there are none."""

    def latencies(self, config: PolicyConfig, instruction_tokens: int) -> Source | str:
        """The latencies of this policy, or why there are none."""
        found = self.find(config, instruction_tokens)
        return found if isinstance(found, str) else replace(found, device=self.name)


def devices(words: Sequence[str]) -> list[Named]:
    """Read the words; names are distinct. Raises UsageError naming a word that means nothing, or a bad trace."""
    twice = next((word for index, word in enumerate(words) if word in words[:index]), None)
    if twice is not None:
        raise UsageError(f"devices: {twice} is there twice")
    found = [_device(word) for word in words]
    names = [one.name for one in found]
    return [
        one if names.count(one.name) == 1 else replace(one, name=f"{one.name} ({Path(one.word).resolve().name})")
        for one in found
    ]


def _device(word: str) -> Named:
    if word in DEVICES:  # a folder of that name is ./h200
        return Named(word, word, lambda config, tokens: predicted(DEVICES[word], config, tokens))
    if Path(word).exists():
        return _recorded(Path(word))
    try:
        assumed = _assumed(word, clock.parse(word))
    except ValueError:
        raise UsageError(f"devices: {word}: no such file or folder; allowed is {ALLOWED}") from None
    return Named(word, word, lambda config, tokens: assumed)


# ------------------------------------------------------------------------------------------ measured


def _recorded(path: Path) -> Named:
    files = sorted(path.glob("*_trace*.json")) if path.is_dir() else [path]
    traces = {file: read(file) for file in files}
    if not traces:
        raise UsageError(f"devices: {path}: no *_trace.json in it; robotattn profile writes them")
    names = {one.device for one in traces.values()}
    name = names.pop() if len(names) == 1 else path.resolve().name
    return Named(str(path), name, lambda config, tokens: _matching(path, traces, config))


def _matching(path: Path, traces: Mapping[Path, Trace], config: PolicyConfig) -> Source | str:
    """The one trace of this very policy, one observation at a time; of several, the one that ran back to back."""
    fitting = {file: one for file, one in traces.items() if _is_of(one, config) and one.shape.get("batch", 1) == 1}
    if not fitting:
        return f"{path}: none of {len(traces)} traces is of this policy; robotattn profile records it"
    unpaced = {file: one for file, one in fitting.items() if one.hz is None} or fitting
    if len(unpaced) > 1:
        return f"{path}: {', '.join(file.name for file in unpaced)} are all of this policy; name one of them"
    ((file, one),) = unpaced.items()
    return of_trace(one, file.name)


def _is_of(one: Trace, config: PolicyConfig) -> bool:
    """Whether a trace is of this policy; fields that came later have their defaults."""
    try:
        return of_written(one.policy) == config
    except UsageError:
        return False


def of_trace(one: Trace, file: str) -> Source:
    """A trace as a source; its file is named."""
    times = np.array(one.service) / 1e6
    enough = len(times) >= samples_needed(0.99)
    p50, p99 = (float(value) for value in np.quantile(times, (0.5, 0.99)))
    machine = one.environment.get("cpu") if one.device == "cpu" else None
    device = f"{one.device} ({machine})" if machine else one.device
    text = one.source or f"measured on {device}, {one.mode}, n = {len(times)} ({file})"
    constant = bool(times.min() == times.max())
    kind: Kind = "predicted" if one.synthetic else "measured"
    return Source(one.device, kind, text, p50, p99 if enough or constant else None, not constant, one)


# ------------------------------------------------------------------------------------------ predicted


def predicted(device: Device, config: PolicyConfig, instruction_tokens: int) -> Source:
    """Make the latencies of a policy on a known device from closed forms."""
    text = (
        f"predicted from the roofline and launch floor of {device.name} ({DTYPE}, eager; at least this), every "
        f"inference alike, for no p99 is published; constants: {device.source}"
    )
    milliseconds = floor_ms(device, config, instruction_tokens)
    tokens = bounds.tokens(config, instruction_tokens)
    shape = {"batch": 1, "cameras": len(config.cameras)} | {key: tokens[key] for key in ("prefix", "actions", "chunk")}
    made = synthetic(text, device.name, milliseconds, policy=written(config), shape=shape, mode="eager floor")
    return Source(device.name, "predicted", text, milliseconds, milliseconds, False, made)


def floor_ms(device: Device, config: PolicyConfig, instruction_tokens: int) -> float:
    """Return the sum over the stages of the longer of roofline and launches (ms)."""
    works = bounds.work(config, instruction_tokens, DTYPE_BYTES)
    return sum(bounds.bound(work, device, DTYPE).floor_ms for work in works.values())


# ------------------------------------------------------------------------------------------ assumed


def _assumed(word: str, found: clock.Fixed | clock.LogNormal) -> Source:
    p50, p99 = (found.nanoseconds,) * 2 if isinstance(found, clock.Fixed) else (found.median, found.p99)
    kind = "fixed" if isinstance(found, clock.Fixed) else "log-normal"
    text = f"assumed {kind} ({word}), of no device"
    return Source(word, "assumed", text, p50 / 1e6, p99 / 1e6, p99 > p50, word=word)


def told(source: Source) -> dict[str, Any]:
    """The source as a result file holds it."""
    return {"kind": source.kind, "text": source.text, "tail": source.tail}
