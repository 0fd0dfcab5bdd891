"""recurrent_ssd_step: skipped rows."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import call_arguments, check, expected
from gla_core.conformance.cases import over

SSD_STEP = "recurrent_ssd_step"


@over(SSD_STEP, "pool", dtypes="rotating")
@pytest.mark.parametrize("skipped", [-1, 6])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_skipped_rows(backend, case, skipped, index_dtype, measure):
    """The o of a skipped row is 0, even if its v and z are NaN; no state that no index addresses changes."""
    x = call_arguments(case)
    x["slots"] = x["slots"].to(index_dtype)
    x["slots"][1], x["v"][1], x["z"][1] = skipped, torch.nan, torch.nan
    ref = expected(SSD_STEP, x)
    out = check(SSD_STEP, x, backend.name, measure, ref)
    others = [i for i in range(6) if i not in x["slots"].tolist()]
    measure({"state of others": out["state"][others]}, {"state of others": ref.results["state"][others]}, 0)
