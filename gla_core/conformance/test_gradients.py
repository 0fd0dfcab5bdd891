"""Gradients of every differentiable op, by autograd and by backward ops: values, inputs alone, layouts."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance import calls
from gla_core.conformance.calls import CHECKPOINT_EVERY
from gla_core.conformance.cases import BACKWARDS, DIFFERENTIATED, GATED_BACKWARDS, GRADIENTS_OF_STATES, over
from gla_core.conformance.tolerances import GRADIENT
from gla_core.ops import ABSTRACT_OPS

INPUTS = [[result.like for result in ABSTRACT_OPS[op].results] for op in GATED_BACKWARDS]
IN_EACH_FAMILY = [name for name in INPUTS[0] if all(name in inputs for inputs in INPUTS)]
"""The inputs that all ops with gates have."""
WITHOUT_GATES = tuple(op for op in GRADIENTS_OF_STATES if op not in GATED_BACKWARDS)


@over(DIFFERENTIATED, requires="gradients")
def test_gradients(backend, case, measure):
    """Extreme gates of float16 summaries are float32: float16 has no numbers as small as some of their gradients."""
    too_small = case.dtype == torch.float16 and case.workload.sizes.get("gates") == "extreme"
    is_summary = case.op == "chunk_gla_summary"
    x = calls.inputs(case, **({"gate_dtype": torch.float32} if too_small and is_summary else {}))
    if "x" in x:
        x["x"] = x["x"].clamp(min=-5)
    out = calls.gradients(case.op, x, calls.training_request(backend, case.op))
    calls.compare(case.op, x, out, calls.oracle_gradients(case.op, x), measure, GRADIENT)


@over(GRADIENTS_OF_STATES, at_size=True)
def test_gradients_at_size(backend, case, measure):
    """The reference in float64 gives the expected gradients, one row of the batch at a time.

    The backward runs without checkpoints, and then with the checkpoints of the reference.
    """
    x = calls.call_arguments(case)
    ref = calls.reference_results(case.op, x)
    calls.compare(case.op, x, calls.run(case.op, x, backend.name), ref, measure)
    every = {"checkpoint_every": CHECKPOINT_EVERY}
    states = calls.results(calls.public_op(case.op).name, calls.inputs(case), "reference", **every)["checkpoints"]
    calls.compare(case.op, x, calls.run(case.op, x, backend.name, checkpoints=states, **every), ref, measure)


@over("softmax_attention_bwd", at_size=True)
def test_gradients_of_attention_at_size(backend, case, measure):
    """The reference in float64 gives the expected gradients, one row of the batch at a time."""
    x = calls.call_arguments(case)
    calls.compare(case.op, x, calls.run(case.op, x, backend.name), calls.reference_results(case.op, x), measure)


@over("online_softmax_bwd", at_size=True)
def test_gradients_of_softmax_at_size(backend, case, measure):
    x = calls.call_arguments(case)
    calls.compare(case.op, x, calls.run(case.op, x, backend.name), calls.expected(case.op, x).results, measure)


@over(GATED_BACKWARDS, "grouped", "packed", "minus_infinity", "per_head_grouped", "constant", dtypes="one")
@pytest.mark.parametrize("name", IN_EACH_FAMILY)
def test_gradient_of_one_input(backend, case, name, measure):
    check_gradient_of(name, backend, case, measure)


@over(WITHOUT_GATES, "last_chunk_partial", "odd_widths", dtypes="one")
@pytest.mark.parametrize("name", dict.fromkeys(y.like for op in WITHOUT_GATES for y in ABSTRACT_OPS[op].results))
def test_gradient_of_one_input_without_gates(backend, case, name, measure):
    check_gradient_of(name, backend, case, measure)


def check_gradient_of(name, backend, case, measure):
    x = calls.inputs(case)
    if x[name] is None:
        x[name] = calls.inputs(case, initial_state=True)[name]
    ref = calls.oracle_gradients(case.op, x)
    out = calls.gradients(case.op, x, calls.training_request(backend, case.op), (name,))
    calls.compare(case.op, x, out, {f"d{name}": ref[f"d{name}"]}, measure)


@over(BACKWARDS, dtypes="rotating")
def test_gradient_layout(backend, case, layout):
    x = calls.call_arguments(case)
    like = {f"d{n}": (x[n].shape, x[n].dtype) for n in calls.differentiable(case.op, x)}
    layout(calls.run(case.op, x, backend.name), like, case.device, calls.tensors(x))


@over(GRADIENTS_OF_STATES, "short", "packed", "extreme", "constant", dtypes="rotating")
def test_gradients_without_final_state(backend, case, measure):
    """A missing gradient of the final state means a gradient of zeros."""
    x = calls.call_arguments(case)
    zeros = calls.run(case.op, {**x, "dstate": torch.zeros_like(x["dstate"])}, backend.name)
    calls.compare(
        case.op, x, calls.run(case.op, {**x, "dstate": None}, backend.name), zeros, measure, calls.twice(GRADIENT)
    )
