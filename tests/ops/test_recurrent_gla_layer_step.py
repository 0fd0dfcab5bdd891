"""recurrent_gla_layer_step as a public function: messages, checks of values, PyTorch, and backends of others."""

from __future__ import annotations

import re

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import oracle_results
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import Backend, Capabilities, Prepared, arguments_of, step_of_layer_step
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import layer_step_inputs
from gla_core.workloads.named import Workload

STEP_OP = get("reference").ops["recurrent_gla_step"]


def arguments(dtype=torch.float32, **changes):
    sizes = {"B": 2, "H": 2, "G": 2, "K": 4, "V": 3}
    workload = Workload("", "recurrent_gla_layer_step", frozenset(), sizes)
    return {**layer_step_inputs(workload, dtype=dtype), **changes}


def assert_computed(o, x, expected, budget=FORWARD[torch.float32]):
    assert relative_error(o, expected["o"]) <= budget
    assert relative_error(x["state"], expected["state"]) <= budget


ones = torch.ones
BAD = [
    ({"v": ones(2, 2, 3).half()}, TypeError, "v is float16; expected float32, as q"),
    ({"state": ones(3, 2, 4, 3)}, ValueError, "state has shape [3, 2, 4, 3]; expected [P, Hv, K, V] with P=2"),
    ({"state": ones(2, 2, 4, 1).expand(-1, -1, -1, 3)}, ValueError, "state has stride 0 along dimension 3 of size 3"),
    ({"output_gate": ones(2, 2, 3)}, ValueError, "output_gate has 2 heads; expected 4, as o"),
    ({"output_gate": ones(2, 4, 5)}, ValueError, "output_gate has shape [2, 4, 5]; expected [B, Ho, V] with B=2, V=3"),
    ({"output_gate": ones(2, 4, 3).half()}, TypeError, "output_gate is float16; expected float32, as q"),
    ({"norm_weight": ones(12)}, ValueError, "norm_weight has shape [12]; expected [V] with V=3"),
    ({"norm_weight": ones(3).double()}, TypeError, "norm_weight is float64; expected float32, as q or float32"),
    ({"norm_eps": "1e-5"}, TypeError, "norm_eps is str; expected a number"),
    ({"activation": "relu"}, ValueError, "activation is 'relu'; expected 'silu' or 'sigmoid'"),
    ({"activation": None}, TypeError, "activation is NoneType; expected a name"),
    ({"gate": "sigmoid"}, ValueError, "gate is 'sigmoid'; expected 'logsigmoid'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_refused_before_the_state_is_written(changes, error, message):
    x = arguments(**changes)
    before = x["state"].clone()
    with pytest.raises(error, match=re.escape(message)):
        gla.recurrent_gla_layer_step(**x)
    assert torch.equal(x["state"], before)


BAD_VALUES = [
    ({"norm_weight": torch.full((3,), torch.nan)}, "norm_weight holds NaN in 3 of 3 places"),
    ({"g": ones(2, 2, 4)}, "g has values up to 1.0; expected the log of a forget gate"),
    ({"state_indices": torch.tensor([1, 1])}, "state_indices is [1, 1]; expected no state twice"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES)
def test_values_are_checked_on_request(changes, message, check_values):
    with pytest.raises(ValueError, match=re.escape(message)):
        gla.recurrent_gla_layer_step(**arguments(**changes))


# ---- PyTorch


@pytest.mark.parametrize("name", ["v", "state", "output_gate", "norm_weight"])
def test_it_has_no_backward(name):
    x = arguments()
    x[name].requires_grad_()
    with pytest.raises(RuntimeError, match="recurrent_gla_layer_step has no backward and an input requires a gradient"):
        gla.recurrent_gla_layer_step(**x)
    with torch.no_grad():
        gla.recurrent_gla_layer_step(**x)


def test_the_state_that_it_writes_is_seen_by_autograd():
    x = arguments()
    loss = (torch.ones(1, requires_grad=True) * x["state"]).sum()
    gla.recurrent_gla_layer_step(**x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_vmap_is_refused():
    x = arguments()
    with pytest.raises(NotImplementedError, match="transforms no op that writes a pool or a state"):
        torch.vmap(lambda q: gla.recurrent_gla_layer_step(**{**x, "q": q}))(x["q"][None])


def test_the_weight_keeps_its_dtype_under_autocast():
    """The output gate is cast, as q is."""
    x = arguments()
    half = {name: x[name].bfloat16() for name in ("q", "k", "v", "output_gate")}
    expected = gla.recurrent_gla_layer_step(**{**x, **half, "state": x["state"].clone()})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gla.recurrent_gla_layer_step(**x), expected)


# ---- backends


def plain(q, k, v, g, state, scale, state_indices, inplace):
    """Computes recurrent_gla_step without an optional argument, as a third party's backend may."""
    return STEP_OP(q, k, v, g, state, scale, state_indices, None, inplace)


def keyword_only(q, k, v, *, scale, g, state, state_indices, inplace):
    return plain(q, k, v, g, state, scale, state_indices, inplace)


@pytest.mark.parametrize("step", [plain, keyword_only, Prepared(lambda call: plain, arguments_of(plain))])
def test_a_backend_with_a_step_serves_it(step):
    with gla.register(Backend("mine", "1", {"recurrent_gla_step": step}, Capabilities())):
        for options in ({}, {"gate": "logsigmoid", "gate_normalizer": 4}):
            x = arguments()
            expected = oracle_results("recurrent_gla_layer_step", x, gate_normalizer=options.get("gate_normalizer"))
            assert_computed(gla.recurrent_gla_layer_step(**x, **options, backend="mine"), x, expected)
        x = arguments()
        expected = oracle_results("recurrent_gla_layer_step", x)
        with gla.batch_invariant(64):
            assert_computed(gla.recurrent_gla_layer_step(**x, backend="mine"), x, expected)


def test_a_backend_refuses_it_as_it_refuses_the_step():
    def step(q, k, v, g, state, scale, inplace):
        return STEP_OP(q, k, v, g, state, scale, None, None, inplace)

    def supports(call):
        return "not today" if call.op == "recurrent_gla_step" and call.dims["B"] == 3 else None

    x = arguments()
    with gla.register(Backend("mine", "1", {"recurrent_gla_step": step}, Capabilities(), supports)):
        with pytest.raises(gla.NoBackendError, match="takes no state_indices; call it without"):
            gla.recurrent_gla_layer_step(**x | {"state_indices": torch.tensor([0, 1])}, backend="mine")
        three = {name: y.repeat(2, *[1] * (y.ndim - 1))[:3] for name, y in x.items() if isinstance(y, torch.Tensor)}
        with pytest.raises(gla.NoBackendError, match="not today"):
            gla.recurrent_gla_layer_step(**three | {"norm_weight": None, "state_indices": None}, backend="mine")
    with (
        gla.register(Backend("mine", "1", {"online_softmax": lambda x, dim: x})),
        pytest.raises(gla.NoBackendError, match="does not implement recurrent_gla_layer_step"),
    ):
        gla.recurrent_gla_layer_step(**x, backend="mine")


def test_a_prepared_step_is_described_as_its_own_call_would_be():
    spec, step = ABSTRACT_OPS["recurrent_gla_layer_step"], ABSTRACT_OPS["recurrent_gla_step"]
    x = arguments(torch.float16)
    call = spec.describe(*spec.complete((), {**x, "scale": 1.0, "gate_normalizer": 16}))
    named = {name: x[name] for name in (*"qkvg", "state", "state_indices")}
    given = {**named, "scale": 1.0, "gate_normalizer": 16, "inplace": True}
    assert step_of_layer_step(call) == step.describe(*step.complete((), given))
