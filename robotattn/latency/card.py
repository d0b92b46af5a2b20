"""The cost card: what a policy is, in closed form, before anything is timed; and the bounds that follow on a device."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from robotattn.latency import bounds
from robotattn.latency.devices import Device
from robotattn.latency.stages import ControlStep, count_parameters, token_counts
from robotattn.latency.subject import Subject
from robotattn.policies import PolicyConfig


def card(config: PolicyConfig, instruction_tokens: int, batch: int = 1) -> dict[str, Any]:
    """Return tokens of each group, parameters, bytes of weights and of keys and values, and the work of each stage."""
    parameters = bounds.parameters(config)
    return {
        "tokens": bounds.tokens(config, instruction_tokens),
        "parameters": parameters,
        "weight_bytes": 4 * parameters,
        "kv": bounds.kv_bytes(config, instruction_tokens, batch=batch),
        "work": {name: asdict(work) for name, work in bounds.work(config, instruction_tokens, batch=batch).items()},
    }


def checked(found: Mapping[str, Any], subject: Subject, step: ControlStep, batch: int = 1) -> dict[str, Any]:
    """Compare the card with the policy itself: a closed form that is wrong must not pass for a fact."""
    tokens = token_counts(step.tokens(subject.inputs(batch, 0)()))
    parameters = count_parameters(subject.policy)["parameters"]
    differs = [
        f"{name}: {found['tokens'].get(name)} by the closed form, {count} in the policy"
        for name, count in tokens.items()
        if name != "total" and found["tokens"].get(name) != count
    ]
    if parameters != found["parameters"]:
        differs.append(f"parameters: {found['parameters']} by the closed form, {parameters} in the policy")
    return {"agrees": not differs, "differs": differs}


def bound_rows(
    config: PolicyConfig,
    instruction_tokens: int,
    device: Device,
    batch: int = 1,
    measured_ms: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Return the bounds of each stage and of the step on a device (float32, eager), with what was measured of them.

    measured_ms: medians by stage; with one come the label (compute, bandwidth, launch or host), MBU and MFU.
    """
    works = bounds.work(config, instruction_tokens, batch=batch)
    rows: dict[str, Any] = {}
    for name, bound in bounds.bounds(works, device).items():
        rows[name] = asdict(bound) | {"kind": "predicted"}
        time = (measured_ms or {}).get(name)
        if time is not None:
            rows[name] |= {"measured_ms": time, "bound_by": bounds.label(bound, time)}
            if name in works:
                rows[name] |= {
                    "mbu": bounds.mbu(works[name], time, device),
                    "mfu": bounds.mfu(works[name], time, device, "float32"),
                }
    return {"device": asdict(device), "stages": rows}
