"""online_softmax: -inf, large values, and every dimension."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import call_arguments, check
from gla_core.conformance.cases import over

SOFTMAX = "online_softmax"


@over(SOFTMAX, "odd_columns")
@pytest.mark.parametrize("hidden", ["first half", "last half", "all but one"])
def test_minus_infinity_makes_no_other_entry_nan(backend, case, hidden, measure):
    x = call_arguments(case)
    n = x["x"].shape[-1]
    part = {"first half": slice(n // 2), "last half": slice(n // 2, None), "all but one": slice(1, None)}[hidden]
    x["x"][..., part] = -torch.inf
    check(SOFTMAX, x, backend.name, measure)


@over(SOFTMAX, "odd_columns")
def test_a_row_of_minus_infinity_is_nan(backend, case, measure):
    """A row of -inf gives NaN, as in torch.softmax; other rows do not change."""
    x = call_arguments(case)
    x["x"][1] = -torch.inf
    out = check(SOFTMAX, x, backend.name, measure)
    assert bool(out["y"][1].isnan().all())


@over(SOFTMAX, "small", "odd_columns")
@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_values(backend, case, shift, measure):
    x = call_arguments(case)
    check(SOFTMAX, {**x, "x": x["x"] + shift}, backend.name, measure)


@over(SOFTMAX, "other_dimension", dtypes="rotating")
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_every_dimension(backend, case, dim, measure):
    check(SOFTMAX, {**call_arguments(case), "dim": dim}, backend.name, measure)
