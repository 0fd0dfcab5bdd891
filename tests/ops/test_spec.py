"""The description of an op, and everything that is derived from it."""

from __future__ import annotations

import inspect

import pytest
import torch

import gla_core as gla
from gla_core.dispatch import registry
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities, Layout
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import AS_INPUT, INPUT, WIDE, Argument, OpSpec, Result

CPU = torch.device("cpu")
PLAIN = OpSpec(
    name="scaled_sum",
    public="scaled_sum",
    arguments=(
        Argument("x", "Tensor", "B K", INPUT, differentiable=True),
        Argument("weight", "Tensor?", "K", AS_INPUT, None),
        Argument("scale", "float?", default=None, in_call=False),
        Argument("squared", "bool", default=False),
    ),
    results=(Result("total", "B", WIDE), Result("dweight", like="weight")),
    sizes={"B": "B", "K": "K"},
)


def test_a_new_op_needs_its_description_alone():
    assert PLAIN.parameters == ("x", "weight", "scale", "squared")
    schema = "scaled_sum(Tensor x, Tensor? weight, float? scale, bool squared, bool needs_grad=False, str backend='')"
    assert PLAIN.schema() == f"{schema} -> (Tensor, Tensor)"
    assert PLAIN.command_line_sizes == ("B", "K")
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    call = PLAIN.describe(x, None, None, True)
    facts = {"layouts": {"x": Layout((3, 4), (4, 1), torch.bfloat16)}}
    assert call.given == {"squared"}
    assert call == PLAIN.call({"B": 3, "K": 4}, CPU, torch.bfloat16, scalars={"squared": True}, **facts)
    total, dweight = PLAIN.expected(x, None, None, True)
    assert (total.name, total.shape, total.dtype, dweight) == ("total", (3,), torch.float32, None)
    assert PLAIN.floor_bytes(call) == (2 * (12 + 4), 4 * 3 + 2 * 4)
    assert PLAIN.prepared((x, None, None, True)) == (x, None, 0.5, True)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((torch.zeros(3), None, None, False), ValueError, r"x has shape \[3\]; expected \[B, K\]"),
        ((torch.zeros(3, 4), torch.zeros(5), None, False), ValueError, r"weight has shape .* with K=4"),
        ((torch.zeros(3, 4), torch.zeros(4).double(), None, False), TypeError, "weight is float64; .* float32, as x"),
        ((torch.zeros(3, 4), None, "2", False), TypeError, "scale is str; expected a number or None"),
        ((torch.zeros(3, 4), None, None, 1), TypeError, "squared is int; expected True or False"),
        ((torch.zeros(3, 0), None, None, False), ValueError, "K is 0; expected at least 1"),
        ((torch.zeros(3, 4), torch.zeros(4, device="meta"), None, False), ValueError, "weight is on meta and x is on"),
    ],
)
def test_its_checks_name_the_argument(args, error, message):
    with pytest.raises(error, match=message):
        PLAIN.describe(*args)


def test_arguments_are_completed_as_a_function_completes_them():
    x = torch.zeros(3, 4)
    assert PLAIN.complete((x,), {"squared": True}) == (x, None, None, True)
    for args, kwargs, message in (
        ((), {}, "misses x"),
        ((x,), {"x": x}, "got x"),
        ((x,), {"wieght": x}, "got wieght"),
        ((x,) * 5, {}, "got 5 arguments"),
    ):
        with pytest.raises(TypeError, match=message):
            PLAIN.complete(args, kwargs)


@pytest.mark.parametrize("op", ABSTRACT_OPS)
def test_the_contract_is_the_description(op):
    spec = ABSTRACT_OPS[op]
    assert spec.contract == OP_PARAMETERS[op] == spec.parameters[: len(spec.contract)]
    assert tuple(inspect.signature(registry.get("reference").ops[op]).parameters) == spec.contract
    assert callable(getattr(gla, spec.public))


def test_capabilities_may_differ_by_op():
    narrow = Capabilities(dtypes=frozenset({torch.float64}))
    ops = {"online_softmax": torch_softmax, "softmax_attention": registry.get("reference").ops["softmax_attention"]}
    x, q = torch.zeros(2, 3), torch.zeros(1, 2, 1, 4)
    with gla.register(Backend("mine", "1", ops, op_capabilities={"online_softmax": narrow})):
        with pytest.raises(gla.NoBackendError, match="computes float64; x is float32"):
            gla.online_softmax(x, backend="mine")
        gla.softmax_attention(q, q, q, backend="mine")
    for wrong, message in (
        ({"online_sofmax": narrow}, "did you mean 'online_softmax'"),
        ({"online_softmax": {"cpu"}}, "capabilities is set; expected Capabilities"),
        ([narrow], "op_capabilities are list; expected a mapping"),
    ):
        with pytest.raises((gla.BackendError, gla.UnknownOpError), match=message):
            gla.register(Backend("mine", "1", ops, op_capabilities=wrong))


def torch_softmax(x, dim):
    return torch.softmax(x, dim)
