from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gla_core.nn.recompute import recomputed


def gated(x, y, gate):
    return x * F.silu(gate) if y is None else (x + y) * F.silu(gate)


@pytest.fixture
def inputs():
    return [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_values_and_derivatives(inputs):
    """Values, first and second derivatives are right."""
    assert torch.equal(recomputed(gated, *inputs), gated(*inputs))
    assert torch.autograd.gradcheck(lambda *x: recomputed(gated, *x), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: recomputed(gated, *x), inputs)


def test_a_tensor_that_depends_on_another(inputs):
    """Each tensor's gradient is that of the function, and does not pass through the other tensors."""
    x, gate = inputs[0], inputs[2]

    def derivative(function):
        (first,) = torch.autograd.grad(function(gate.exp() * x, None, gate).sum(), gate, create_graph=True)
        return first, torch.autograd.grad(first.sum(), gate)[0]

    torch.testing.assert_close(derivative(lambda *y: recomputed(gated, *y)), derivative(gated))
    (found,) = torch.autograd.grad(recomputed(gated, gate.exp(), None, gate).sum(), gate)
    torch.testing.assert_close(found, torch.autograd.grad(gated(gate.exp(), None, gate).sum(), gate)[0])


def test_what_needs_no_gradient_gets_none(inputs):
    x, y, gate = inputs[0], inputs[1].detach(), inputs[2]
    expected = torch.autograd.grad(gated(x * 2, y, gate).sum(), [x, gate])
    assert all(map(torch.equal, torch.autograd.grad(recomputed(gated, x * 2, y, gate).sum(), [x, gate]), expected))
    (dx,) = torch.autograd.grad(recomputed(gated, x, None, gate.detach()).sum(), [x])
    torch.testing.assert_close(dx, F.silu(gate.detach()))
    assert not recomputed(gated, x.detach(), y, gate.detach()).requires_grad


def test_the_arguments_alone_are_kept(inputs):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        recomputed(gated, *inputs)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]


def test_under_transforms_and_compiled(inputs):
    x, y, gate = (z.detach() for z in inputs)
    expected = torch.func.vmap(torch.func.grad(lambda *z: gated(*z).sum()))(x, y, gate)
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda *z: recomputed(gated, *z).sum()))(x, y, gate), expected)
    compiled = torch.compile(lambda *z: recomputed(gated, *z), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), gated(*inputs))
