"""The kernels of recurrent_gla_layer_step on random calls, and of heads that fill a device, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.conformance.calls import oracle_results, run
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import GATES as FORMS
from gla_core.workloads.inputs import GATES, layer_step_inputs
from gla_core.workloads.named import Workload

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels


def check(device, dtype, state_dtype=torch.float32, **sizes):
    x = layer_step_inputs(Workload("", "recurrent_gla_layer_step", frozenset(), sizes), dtype=dtype, device=device)
    x["state"] = x["state"].to(state_dtype)
    expected = oracle_results("recurrent_gla_layer_step", x)
    actual = run("recurrent_gla_layer_step", x, "triton_fused")
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    budgets = {"o": FORWARD[dtype], "state": max(FORWARD[dtype], FORWARD[state_dtype])}
    assert {name: error for name, error in errors.items() if not error <= budgets[name]} == {}


# The error of fewer than 16 numbers is that of single sums, which may be small beside their terms.
@settings(max_examples=10)
@given(
    dtype=st.sampled_from([torch.float32, torch.float16]),
    state_dtype=st.sampled_from([torch.float32, torch.float16]),
    B=st.integers(2, 3),
    H=st.integers(1, 2),
    groups=st.sampled_from([{}, {"G": 3}, {"R": 2}]),
    K=st.integers(1, 40),
    V=st.integers(8, 150),
    gates=st.sampled_from(GATES),
    gate_form=st.sampled_from(list(FORMS)),
    activation=st.sampled_from(["silu", "sigmoid"]),
    without=st.sets(st.sampled_from(["output_gate", "norm_weight"])),
)
def test_any_call(device, dtype, state_dtype, groups, **sizes):
    check(device, dtype, state_dtype, **groups, **sizes)


@pytest.mark.parametrize("groups", [{"H": 2, "G": 2}, {"H": 1, "R": 2}])
def test_heads_that_fill_a_device(device, groups):
    """The values of a head are in two blocks; most rows are skipped."""
    check(device, torch.float32, B=80, K=5, V=100, rows=(2, -1, 0, 5, *[-1, 6] * 38), pool=6, **groups)
