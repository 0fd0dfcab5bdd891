"""online_softmax: -inf, large values, every dimension, and gradients of views."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import call_arguments, check, repeated
from gla_core.conformance.cases import over

SOFTMAX, GRADIENT = "online_softmax", "online_softmax_bwd"


@over((SOFTMAX, GRADIENT), "odd_columns")
@pytest.mark.parametrize("hidden", ["first half", "last half", "all but one"])
def test_minus_infinity_makes_no_other_entry_nan(backend, case, hidden, measure):
    x = call_arguments(case)
    n = x["x"].shape[-1]
    part = {"first half": slice(n // 2), "last half": slice(n // 2, None), "all but one": slice(1, None)}[hidden]
    x["x"][..., part] = -torch.inf
    check(case.op, x, backend.name, measure)


@over((SOFTMAX, GRADIENT), "odd_columns")
def test_a_row_of_minus_infinity_is_nan(backend, case, measure):
    """A row of -inf gives NaN, as in torch.softmax; other rows do not change."""
    x = call_arguments(case)
    x["x"][1] = -torch.inf
    (y,) = check(case.op, x, backend.name, measure).values()
    assert bool(y[1].isnan().all())


@over((SOFTMAX, GRADIENT), "small", "odd_columns")
@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_values(backend, case, shift, measure):
    x = call_arguments(case)
    check(case.op, {**x, "x": x["x"] + shift}, backend.name, measure)


@over((SOFTMAX, GRADIENT), "other_dimension", dtypes="rotating")
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_every_dimension(backend, case, dim, measure):
    check(case.op, {**call_arguments(case), "dim": dim}, backend.name, measure)


@over(GRADIENT, "small", "odd_columns", "other_dimension", dtypes="rotating")
def test_gradients_of_a_softmax_of_views(backend, case, measure):
    """Both x and dy may be strided views, also with stride 0. If dy does not vary along dim, dx is 0."""
    x = call_arguments(case)
    others = [i for i in range(x["dy"].ndim) if i != x["dim"] % x["dy"].ndim]
    x["x"] = x["x"].transpose(0, -1).contiguous().transpose(0, -1)
    for dy in (x["dy"].transpose(0, -1).contiguous().transpose(0, -1), repeated(x["dy"], *others)):
        check(GRADIENT, {**x, "dy": dy}, backend.name, measure)
