"""recurrent_gla_layer_step: autocast, and the step of a backend. tests/ops/test_serving.py has what others share."""

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.registry import get
from tests.ops.serving import LAYER_STEP, arguments, call

STEP_OP = get("reference").ops["recurrent_gla_step"]


def test_the_weight_keeps_its_dtype_under_autocast():
    """The output gate is cast, as q is."""
    x = arguments(LAYER_STEP)
    half = {name: x[name].bfloat16() for name in ("q", "k", "v", "output_gate")}
    o = call(LAYER_STEP, {**x, **half, "state": x["state"].clone()})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(LAYER_STEP, x), o)


def test_a_backend_refuses_it_as_it_refuses_the_step():
    def step(q, k, v, g, state, scale, inplace):
        return STEP_OP(q, k, v, g, state, scale, None, None, inplace)

    def supports(call):
        return "not today" if call.op == "recurrent_gla_step" and call.dims["B"] == 3 else None

    x = arguments(LAYER_STEP)
    with gla.register(Backend("mine", "1", {"recurrent_gla_step": step}, Capabilities(), supports)):
        with pytest.raises(gla.NoBackendError, match="takes no state_indices; call it without"):
            call(LAYER_STEP, x | {"slots": torch.tensor([0, 1])}, backend="mine")
        three = {name: y.repeat(2, *[1] * (y.ndim - 1))[:3] for name, y in x.items() if isinstance(y, torch.Tensor)}
        with pytest.raises(gla.NoBackendError, match="not today"):
            call(LAYER_STEP, three | {"norm_weight": None, "slots": None}, backend="mine")
    with (
        gla.register(Backend("mine", "1", {"online_softmax": lambda x, dim: x})),
        pytest.raises(gla.NoBackendError, match="does not implement recurrent_gla_layer_step"),
    ):
        call(LAYER_STEP, x, backend="mine")
