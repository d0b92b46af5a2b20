"""An audit of who reads whom: change one token, and see which outputs move that should not, and which do not move.

A mask that is right on paper may be transposed, dropped where a cache begins, or leak through a zero times NaN. The
audit needs nothing but the function from tokens to outputs and what each output is meant to depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

PERTURBATIONS = ("value", "nan", "1e30")


@dataclass(frozen=True)
class Finding:
    """One output that behaved wrongly when a token changed. row, token: what was changed; output_row, output: where."""

    row: int
    token: int
    output_row: int
    output: int
    perturbation: str
    change: float

    def __str__(self) -> str:
        where = f"output {self.output}" + ("" if self.row == self.output_row else f" of row {self.output_row}")
        return f"row {self.row} token {self.token} ({self.perturbation}) -> {where}: moved by {self.change:.3g}"


@dataclass(frozen=True)
class Audit:
    """What was found. leaks: moved although they should not; deaf: did not move although they should."""

    pairs: int
    leaks: list[Finding] = field(default_factory=list)
    deaf: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every output moved exactly where it should."""
        return not self.leaks and not self.deaf

    def __str__(self) -> str:
        lines = [f"{self.pairs} pairs of output and token: {len(self.leaks)} leaks, {len(self.deaf)} deaf"]
        for name, findings in (("leak", self.leaks), ("deaf", self.deaf)):
            lines += [f"  {name}: {finding}" for finding in findings[:10]]
            lines += [f"  ... and {len(findings) - 10} more"] if len(findings) > 10 else []
        return "\n".join(lines)

    def check(self) -> None:
        """Raise AssertionError with the report unless all is well."""
        if not self.ok:
            raise AssertionError(str(self))


@torch.no_grad()
def audit_mask(
    forward: Callable[[Tensor], Tensor],
    x: Float[Tensor, "b n d"],
    allowed: Bool[Tensor, "*b m n"],
    *,
    values: Sequence[str] = PERTURBATIONS,
    tolerance: float = 0.0,
    generator: torch.Generator | None = None,
) -> Audit:
    """Perturb each token of each row in turn and compare all outputs with the undisturbed ones.

    forward: tokens ``[B, N, D]`` → outputs ``[B, M, ...]``, always the same for the same tokens. allowed: ``[M, N]`` or
    ``[B, M, N]``, True = output m depends on token n (over several layers, see `reachable`). A token never moves
    another row. values: "value" adds normal noise and is judged both ways; "nan" and "1e30" replace the token and are
    judged for leaks alone, since an output may saturate. tolerance: changes up to it count as none.
    """
    unknown = set(values) - set(PERTURBATIONS)
    if unknown:
        raise ValueError(f"perturbations are {PERTURBATIONS}, got {sorted(unknown)}")
    rows, tokens = x.shape[:2]
    before = forward(x).flatten(2)
    allowed = allowed.to(before.device).expand(rows, before.shape[1], tokens)
    audit = Audit(rows * tokens * before.shape[1] * len(values))
    for name in values:
        for row in range(rows):
            for token in range(tokens):
                spoilt = x.clone()
                spoilt[row, token] = _perturbed(x[row, token], name, generator)
                moved = _change(forward(spoilt).flatten(2), before)  # [B, M]
                should = torch.zeros_like(moved, dtype=torch.bool)
                should[row] = allowed[row, :, token]
                _report(audit, moved, should, tolerance, row, token, name)
    return audit


def reachable(mask: Bool[Tensor, "n n"], layers: int) -> Bool[Tensor, "n n"]:
    """Return which token each output depends on after layers with residuals: what is read of those that are read."""
    step = (mask | torch.eye(len(mask), dtype=torch.bool, device=mask.device)).float()
    return torch.linalg.matrix_power(step, layers) > 0


def _perturbed(token: Tensor, name: str, generator: torch.Generator | None) -> Tensor:
    if name == "value":
        return token + torch.randn(token.shape, generator=generator, dtype=token.dtype).to(token.device)
    return torch.full_like(token, torch.nan if name == "nan" else 1e30)


def _change(after: Tensor, before: Tensor) -> Tensor:
    """Return the largest change of each output; to or from NaN is infinite."""
    change = (after - before).abs()
    change = change.masked_fill(after.isnan() & before.isnan(), 0.0)
    return change.masked_fill(change.isnan(), torch.inf).amax(dim=-1)


def _report(audit: Audit, moved: Tensor, should: Tensor, tolerance: float, row: int, token: int, name: str) -> None:
    for findings, wrong in ((audit.leaks, (moved > tolerance) & ~should), (audit.deaf, (moved <= tolerance) & should)):
        if findings is audit.deaf and name != "value":
            continue
        for output_row, output in wrong.nonzero().tolist():
            findings.append(Finding(row, token, output_row, output, name, moved[output_row, output].item()))
