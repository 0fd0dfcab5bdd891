"""recurrent_gla_layer_step: the eps of its norm, and skipped rows."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import call_arguments, check, expected
from gla_core.conformance.cases import over

LAYER_STEP = "recurrent_gla_layer_step"


@over(LAYER_STEP, "small", "odd_widths", dtypes="rotating")
@pytest.mark.parametrize(("scale", "norm_eps"), [(1e-3, 1e-5), (-0.3, 1.0), (0.0, 1e-5)])
def test_scale_and_eps(backend, case, scale, norm_eps, measure):
    """The norm removes a factor of its input only as far as the mean square exceeds eps."""
    check(LAYER_STEP, {**call_arguments(case), "scale": scale, "norm_eps": norm_eps}, backend.name, measure)


@over(LAYER_STEP, "pool", dtypes="rotating")
@pytest.mark.parametrize("skipped", [-1, 6])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_skipped_rows(backend, case, skipped, index_dtype, measure):
    """The o of a skipped row is 0, even if its output gate is NaN; no state that no index addresses changes."""
    x = call_arguments(case)
    x["slots"] = x["slots"].to(index_dtype)
    x["slots"][1], x["output_gate"][1] = skipped, torch.nan
    ref = expected(LAYER_STEP, x)
    out = check(LAYER_STEP, x, backend.name, measure, ref)
    others = [i for i in range(6) if i not in x["slots"].tolist()]
    measure({"state of others": out["state"][others]}, {"state of others": ref.results["state"][others]}, 0)
