"""The kernel of recurrent_ssd_step on random calls, and of heads that fill a device, against float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gla_core.conformance.calls import oracle_results, run
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import ssd_step_inputs
from gla_core.workloads.named import Workload

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels


def check(device, dtype, state_dtype=torch.float32, v_first=True, **sizes):
    x = ssd_step_inputs(Workload("", "recurrent_ssd_step", frozenset(), sizes), dtype=dtype, device=device)
    x["state"] = x["state"].to(state_dtype)
    expected = oracle_results("recurrent_ssd_step", x)
    x["state"] = x["state"].mT.contiguous().mT if v_first else x["state"]
    actual = run("recurrent_ssd_step", x, "triton_fused")
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    budgets = {"o": FORWARD[dtype], "state": FORWARD[state_dtype]}
    assert {name: error for name, error in errors.items() if not error <= budgets[name]} == {}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from([torch.float32, torch.float16]),
    other_dtype=st.sampled_from([torch.float32, None]),
    state_dtype=st.sampled_from([torch.float32, torch.float16]),
    v_first=st.booleans(),
    B=st.integers(1, 3),
    H=st.integers(1, 2),
    R=st.integers(1, 3),
    K=st.integers(1, 150),
    V=st.integers(1, 70),
    dt_softplus=st.booleans(),
    A_is_log=st.booleans(),
    without=st.sets(st.sampled_from(["dt_bias", "D", "z"])),
)
def test_any_call(device, dtype, state_dtype, v_first, **sizes):
    check(device, dtype, state_dtype, v_first, **sizes)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize(("K", "V"), [(128, 64), (64, 20), (300, 2)])
def test_heads_that_fill_a_device(device, K, V, v_first, monkeypatch):
    """The values of a head are in several blocks of four warps; some rows are skipped."""
    from gla_triton_kernels.gla.step import plan

    monkeypatch.setattr(plan, "MIN_SSD_PROGRAMS_PER_SM", 0)
    check(device, torch.float32, v_first=v_first, B=3, H=1, R=2, K=K, V=V, rows=(2, -1, 0), pool=4, dt_softplus=True)


def test_small_time_steps_keep_their_precision(device):
    """softplus(-12) is 6e-6; log(1 + e) would round it to 1 %."""
    x = ssd_step_inputs(
        Workload("", "recurrent_ssd_step", frozenset(), {"B": 1, "H": 2, "K": 16, "V": 8}), device=device
    )
    x |= {"dt": torch.full_like(x["dt"], -12.0), "dt_bias": None, "dt_softplus": True, "state": 0 * x["state"]}
    expected = oracle_results("recurrent_ssd_step", x)["state"]
    run("recurrent_ssd_step", x, "triton_fused")
    torch.testing.assert_close(x["state"].double(), expected, rtol=1e-5, atol=1e-12)
