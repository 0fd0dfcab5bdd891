"""online_softmax: values, -inf, every dimension, gradients, layouts, memory."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import poisoned, softmax, three_runs
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT
from gla_core.workloads.inputs import normal

SOFTMAX = "online_softmax"


def run(x, dim, backend):
    return {"y": gla.online_softmax(x, dim, backend=backend.name)}


def expected(x, dim):
    return {"y": oracle.softmax(x, dim)}


@over(SOFTMAX)
def test_values(backend, case, measure, layout):
    x, dim = softmax(case)
    out = run(x, dim, backend)
    measure(out, expected(x, dim), FORWARD[case.dtype])
    layout(out, {"y": (x.shape, x.dtype)}, case.device, {"x": x})


@over(SOFTMAX, "small", "other_dimension", "nothing", dtypes="one", requires="gradients")
def test_results_can_be_changed_in_place(backend, case):
    """In-place changes work with autograd, too."""
    x, dim = softmax(case)
    run(x.requires_grad_(), dim, backend)["y"].mul_(2)


@over(SOFTMAX, at_size=True)
def test_values_at_size(backend, case, measure):
    x, dim = softmax(case)
    measure(run(x, dim, backend), expected(x, dim), FORWARD[case.dtype])


@over(SOFTMAX, "odd_columns")
@pytest.mark.parametrize("hidden", ["first half", "last half", "all but one"])
def test_minus_infinity_makes_no_other_entry_nan(backend, case, hidden, measure):
    x, dim = softmax(case)
    n = x.shape[-1]
    part = {"first half": slice(n // 2), "last half": slice(n // 2, None), "all but one": slice(1, None)}[hidden]
    x[..., part] = -torch.inf
    measure(run(x, dim, backend), expected(x, dim), FORWARD[case.dtype])


@over(SOFTMAX, "odd_columns")
def test_a_row_of_minus_infinity_is_nan(backend, case, measure):
    """A row of -inf gives NaN, as in torch.softmax; other rows do not change."""
    x, dim = softmax(case)
    x[1] = -torch.inf
    out = run(x, dim, backend)
    assert bool(out["y"][1].isnan().all())
    measure(out, expected(x, dim), FORWARD[case.dtype])


@over(SOFTMAX, "small", "odd_columns")
@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_values(backend, case, shift, measure):
    x, dim = softmax(case)
    x = x + shift
    measure(run(x, dim, backend), expected(x, dim), FORWARD[case.dtype])


@over(SOFTMAX, "other_dimension", dtypes="in_turn")
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_every_dimension(backend, case, dim, measure):
    x, _ = softmax(case)
    measure(run(x, dim, backend), expected(x, dim), FORWARD[case.dtype])


@over(SOFTMAX, "small", "odd_columns", "other_dimension", dtypes="in_turn")
def test_strided_views(backend, case, measure):
    x, dim = softmax(case)
    view = torch.nn.functional.pad(x, (3, 2))[..., 3:-2]
    measure(run(view, dim, backend), expected(x, dim), FORWARD[case.dtype])


@over(SOFTMAX, requires="gradients")
def test_gradients(backend, case, measure):
    x, dim = softmax(case)
    if bool(x.isneginf().any()):
        x = x.clamp(min=-5)
    dy = normal(x.shape, x.dtype, torch.Generator(case.device).manual_seed(1))
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    (dx,) = torch.autograd.grad(gla.online_softmax(leaf, dim, backend=backend.name), leaf, dy)
    (ref,) = torch.autograd.grad(oracle.softmax(wide, dim), wide, dy.double())
    measure({"dx": dx}, {"dx": ref}, GRADIENT[case.dtype])


@over(SOFTMAX, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    x, dim = softmax(case)
    with poisoned(backend.can(case.op), case.device):
        out = run(x, dim, backend)
    measure(out, expected(x, dim), FORWARD[case.dtype])


@over(SOFTMAX, dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    x, dim = softmax(case)
    first, *again = three_runs(lambda: run(x, dim, backend), case.device)
    for out in again:
        measure(out, first, 0)


@over(SOFTMAX, dtypes="in_turn")
def test_inputs_unchanged(backend, case, measure):
    x, dim = softmax(case)
    run(x, dim, backend)
    measure({"x": x}, {"x": softmax(case)[0]}, 0)
