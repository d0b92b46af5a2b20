"""The audit finds what leaks and what is deaf (`test_policy_audit.py` runs it on every policy)."""

import pytest
import torch

from robotattn.attention import Transformer, TransformerConfig, audit_mask, reachable
from robotattn.attention.masks import Blocks, Causal, Everything, Padding, Prefix, Window

N = 6
MASKS = {
    "everything": Everything(),
    "causal": Causal(),
    "prefix": Prefix(3) | Causal(),
    "blocks": Blocks((3, 1, 2)),
    "window": Window(2) & Causal(),
    "wide window": Window(2),
}


def stack(layers=1, **changes):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(layers, 8, 2, 8, **changes)).eval()


def tokens(batch=2):
    return torch.randn(batch, N, 8, generator=torch.Generator().manual_seed(0))


def generator():
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_stack_reads_what_its_mask_allows_and_nothing_else(kernel, name, layers):
    net, mask = stack(layers, kernel=kernel), MASKS[name]
    allowed = reachable(mask.tensor(N, N), layers)
    audit = audit_mask(lambda x: net(x, mask), tokens(), allowed, tolerance=1e-6, generator=generator())
    audit.check()
    assert audit.ok and audit.pairs == 2 * N * N * 3


def test_padding_is_read_by_nobody():
    valid = torch.arange(N) >= torch.tensor([[0], [2]])
    net = stack(2)
    allowed = Padding(valid).tensor(N, N)[:, 0] & valid[:, :, None]
    audit = audit_mask(lambda x: net(x, valid=valid), tokens(), allowed, tolerance=1e-6, generator=generator())
    assert str(audit) == f"{2 * N * N * 3} pairs of output and token: 0 leaks, 0 deaf"


def test_what_is_reached_grows_with_the_layers():
    mask = (Window(2) & Causal()).tensor(5, 5)
    assert torch.equal(reachable(mask, 1), mask)
    assert torch.equal(reachable(mask, 3), (Window(4) & Causal()).tensor(5, 5))


def test_a_leak_and_a_deaf_output_are_named():
    def forward(x):
        out = x.clone()
        out[:, 0] += x[:, 5]  # reads what it must not
        out[:, 3] = 0.0  # does not read itself
        return out

    audit = audit_mask(forward, tokens(1), torch.eye(N, dtype=torch.bool), generator=generator())
    assert {(f.token, f.output) for f in audit.leaks} == {(5, 0)} and len(audit.leaks) == 3
    assert [(f.token, f.output, f.perturbation) for f in audit.deaf] == [(3, 3, "value")]
    assert "leak: row 0 token 5 (nan) -> output 0: moved by inf" in str(audit)
    with pytest.raises(AssertionError, match="3 leaks, 1 deaf"):
        audit.check()


def test_a_leak_into_another_row_is_named():
    audit = audit_mask(
        lambda x: x + x.flip(0), tokens(), torch.eye(N, dtype=torch.bool), values=("value",), generator=generator()
    )
    assert not audit.ok and all(f.output_row == 1 - f.row for f in audit.leaks)
    assert "output 0 of row 1" in str(audit)


def test_a_leak_of_nan_alone_is_found():
    """Weights of zero times NaN: invisible to finite values."""
    net = stack()
    mask = Causal().tensor(N, N)

    def forward(x):
        weights = net.layers[0].attention.weights(x.nan_to_num(0.0), mask=mask)
        return (weights @ x[:, None])[:, 0]

    kinds = {f.perturbation for f in audit_mask(forward, tokens(), mask, tolerance=1e-6, generator=generator()).leaks}
    assert kinds == {"nan"}


def test_an_unknown_perturbation_is_refused():
    with pytest.raises(ValueError, match=r"got \['inf'\]"):
        audit_mask(lambda x: x, tokens(), torch.eye(N, dtype=torch.bool), values=("inf",))
