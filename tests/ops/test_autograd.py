"""The gradient that gla_core derives from the descriptions of an op and of its backward."""

from types import SimpleNamespace

import pytest
import torch

from gla_core.ops._autograd import gradient
from gla_core.ops.spec import AS_INPUT, INPUT, WIDE, Argument, OpSpec, Result

FORWARD = OpSpec(
    name="product",
    public="product",
    arguments=(
        Argument("a", "Tensor", "B K", INPUT, differentiable=True),
        Argument("factor", "float", default=1.0),
        Argument("more", "bool", default=False),
        Argument("b", "Tensor?", "B K", AS_INPUT, None, differentiable=True),
    ),
    results=(Result("kept", "B V", WIDE), Result("y", "B V"), Result("sum", "B", when=lambda kwargs: kwargs["more"])),
    sizes={"B": "B", "K": "K", "V": "K"},
)
BACKWARD = OpSpec(
    name="product_bwd",
    public="product",
    arguments=(
        Argument("a", "Tensor", "B K", INPUT),
        Argument("dy", "Tensor", "B V", AS_INPUT),
        Argument("b", "Tensor?", "B K", AS_INPUT, None),
        Argument("kept", "Tensor", "B V", WIDE),
        Argument("dsum", "Tensor?", "B", AS_INPUT, None),
        Argument("factor", "float", default=1.0),
    ),
    results=(Result("db", like="b"), Result("da", like="a")),
    sizes={"B": "B", "K": "K", "V": "K"},
)
A, B, KEPT = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.ones(2, 4)
DY, DSUM = torch.full((2, 4), 3.0), torch.full((2,), 4.0)


class Context(SimpleNamespace):
    """The context of an autograd.Function."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *results):
        self.without_gradient = results

    def set_materialize_grads(self, value):
        self.materialize = value


def called(b, more, dy, dsum):
    """Returns the arguments of the backward by name, the request, the gradients, and the context."""
    calls = []

    def run_backward(*args):
        calls.append(args)
        return "db", "da"

    setup_context, backward = gradient(FORWARD, BACKWARD, run_backward)
    ctx = Context()
    setup_context(ctx, (A, 0.5, more, b, True, "reference"), (KEPT, torch.ones(2, 4), torch.empty(0)))
    actual = backward(ctx, None, dy, dsum)
    ((*args, request),) = calls
    return dict(zip(BACKWARD.parameters, args, strict=True)), request, actual, ctx


def test_arguments_and_gradients_go_by_name():
    args, request, actual, ctx = called(B, True, DY, DSUM)
    expected = {"a": A, "b": B, "factor": 0.5, "kept": KEPT, "dy": DY, "dsum": DSUM}
    assert args.keys() == expected.keys()
    assert all(args[name] is x for name, x in expected.items())
    assert request == "reference"
    assert actual == ("da", None, None, "db", None, None)
    assert ctx.without_gradient == (KEPT,)
    assert ctx.materialize is False


def test_what_is_absent_has_no_gradient():
    args, _, actual, _ = called(None, False, DY, DSUM)
    assert args["b"] is None
    assert args["dsum"] is None  # a gradient of a result that was not asked for
    assert actual == ("da", None, None, None, None, None)


@pytest.mark.parametrize("more", [False, True])
def test_a_required_gradient_that_is_missing_is_zero(more):
    args, *_ = called(B, more, None, DSUM)
    assert torch.equal(args["dy"], torch.zeros(2, 4))
