"""The picture of a sweep: latency against tokens and against KV bytes, the closed form beside the measurement."""

import io
from collections.abc import Sequence
from typing import Any, cast

from robotattn.latency import bounds
from robotattn.latency.budget import Fit, fits
from robotattn.latency.devices import Device
from robotattn.latency.sweep_file import Sample

COLOURS = ("#1f5f8b", "#c8553d", "#588157", "#7b5ea7", "#b08900", "#5c6b73")
AXES = (("tokens of the prefix", "prefix"), ("keys and values (KiB)", "kv"))


def curves(samples: Sequence[Sample], device: Device, dtype: str = "float32") -> bytes | None:
    """Return the picture as PNG; None where matplotlib is not installed.

    Filled: the measured p50, with the fitted line's prediction through it; open: the closed form's floor on the
    device's constants. device: constants of the machine that was swept.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    found, _ = fits([sample.point() for sample in samples])
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (label, what) in zip(figure.subplots(1, 2), AXES, strict=True):
        for colour, group in zip(COLOURS, dict.fromkeys((s.kind, s.mode) for s in samples), strict=False):
            mine = sorted((s for s in samples if (s.kind, s.mode) == group), key=lambda sample: _at(sample, what))
            places, look = [_at(sample, what) for sample in mine], {"ms": 5, "color": colour}
            axes.plot(places, [s.milliseconds["p50"] for s in mine], "o", label=" ".join(group), **look)
            axes.plot(places, [floor(sample, device, dtype) for sample in mine], "o", mfc="none", **look)
            if group in found:
                axes.plot(places, [_line(found[group], s) for s in mine], "-", lw=0.9, color=colour, alpha=0.7)
        axes.set(xlabel=label, ylabel="control step, p50 (ms)", yscale="log", xscale="log")
        axes.grid(alpha=0.25, linewidth=0.6, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle("filled: measured   open: closed form (floor)   line: fitted", x=0.01, ha="left", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def _line(fit: Fit, sample: Sample) -> float:
    point = sample.point()
    return fit.predict(point.prefix, point.actions, point.kv_bytes)


def _at(sample: Sample, what: str) -> float:
    return sample.tokens["prefix"] if what == "prefix" else sample.kv["total"] / 1024


def floor(sample: Sample, device: Device, dtype: str = "float32") -> float:
    """The closed form's least time of a whole step (ms)."""
    works = {stage: bounds.Work(**cast("dict[str, Any]", one)) for stage, one in sample.work.items()}
    return bounds.bounds(works, device, dtype)["step"].floor_ms
