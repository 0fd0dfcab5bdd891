"""Values and gradients of online_softmax against softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error


def check(x, dim=-1):
    x = x.detach().requires_grad_()
    y = gla.online_softmax(x, dim)
    ref_x = x.detach().double().requires_grad_()
    ref = oracle.softmax(ref_x, dim)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert relative_error(y, ref) <= FORWARD[x.dtype]
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    (ref_dx,) = torch.autograd.grad(ref, ref_x, dy.double())
    assert relative_error(dx, ref_dx) <= GRADIENT[x.dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 1023, 1024, 1025, 5000])
def test_values(columns, dtype, device):
    check(torch.randn(3, columns, device=device).to(dtype) * 5)


@settings(max_examples=60)
@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=4), data=st.data())
def test_any_shape_and_dimension(shape, data):
    check(torch.randn(shape, dtype=torch.float64), data.draw(st.integers(-len(shape), len(shape) - 1)))


def test_rows_that_torch_defines(device):
    """Rows with large values, tiles of -inf in a row with finite entries, rows of -inf, and rows with NaN."""
    x = torch.randn(6, 3000, device=device)
    x[0] += 1e4
    x[1] -= 1e30
    x[2, :2048] = -torch.inf
    x[3, 1024:] = -torch.inf
    x[4] = -torch.inf
    x[5, 7] = torch.nan
    y = gla.online_softmax(x)
    assert relative_error(y, torch.softmax(x.double(), -1)) < 1e-5
    assert bool(y[:4].isfinite().all())
    assert bool(y[4:].isnan().all())


def test_a_view_gives_the_same_as_a_copy(device):
    x = torch.randn(5, 7, 9, device=device).transpose(0, 1)
    assert relative_error(gla.online_softmax(x, 1), gla.online_softmax(x.contiguous(), 1)) < 1e-6


def test_gradcheck():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gla.online_softmax(x, 0), x)
    assert torch.autograd.gradgradcheck(lambda x: gla.online_softmax(x, 0), x)


def test_a_third_derivative():
    x = torch.randn(3, 5, dtype=torch.float64)
    function = lambda x: gla.online_softmax(x, 0).pow(3).sum()  # noqa: E731
    expected = lambda x: torch.softmax(x, 0).pow(3).sum()  # noqa: E731
    third = [torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f)))(x) for f in (function, expected)]
    torch.testing.assert_close(*third)
