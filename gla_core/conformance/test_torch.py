"""Every op under PyTorch: opcheck, and torch.compile in one graph, static and dynamic, forward and backward."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import inputs, public_op, results, torch_op, training_request, with_gradients
from gla_core.conformance.cases import DIFFERENTIATED, EVERY_OP, FORWARDS, WRITING, over
from gla_core.conformance.tolerances import FORWARD, GRADIENT


@over(EVERY_OP, forms=True, dtypes="one")
def test_opcheck(backend, case):
    function, args = torch_op(case, backend.name)
    function(*args)  # a refusal is raised here, unchanged
    torch.library.opcheck(function, args)


@over(WRITING, forms=True, dtypes="one")
def test_opcheck_inplace(backend, case):
    function, args = torch_op(case, backend.name, inplace=True)
    function(*copied(args))
    torch.library.opcheck(function, args)


def copied(args):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


def amid_others(op, request, **options):
    """Returns a function of the arguments by name that multiplies the first by 1.0 and calls the public function.

    A graph of it also holds an operation that is not the op.
    """

    def function(arguments):
        first = next(iter(arguments))
        return results(op, {**arguments, first: arguments[first] * 1.0, **options}, request)

    return function


def compiled(function, dynamic):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


@over(FORWARDS, forms=True, dtypes="one")
def test_compiled(backend, case, measure):
    eager = amid_others(case.op, backend.name)
    measure(compiled(eager, True)(inputs(case)), eager(inputs(case)), 2 * FORWARD[case.dtype])


@over(WRITING, forms=True, dtypes="one")
def test_compiled_inplace(backend, case, measure):
    eager = amid_others(case.op, backend.name, inplace=True)
    measure(compiled(eager, True)(inputs(case)), eager(inputs(case)), 2 * FORWARD[case.dtype])


@over(DIFFERENTIATED, forms=True, dtypes="one", requires="gradients")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_with_backward(backend, case, dynamic, measure):
    eager = amid_others(public_op(case.op).name, training_request(backend, case.op))
    out, expected = (with_gradients(case.op, inputs(case), f) for f in (compiled(eager, dynamic), eager))
    measure(out, expected, 2 * GRADIENT[case.dtype])
