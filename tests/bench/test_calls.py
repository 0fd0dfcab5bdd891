"""Calls of abstract ops: the tensors match their OpCall."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.bench import calls
from gla_core.dispatch.backend import OP_PARAMETERS
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import Role
from gla_core.workloads.calibration import shapes
from gla_core.workloads.inputs import random_arguments

CPU = torch.device("cpu")
size = st.integers(1, 4)


@st.composite
def op_calls(draw):
    spec = ABSTRACT_OPS[draw(st.sampled_from(list(OP_PARAMETERS)))]
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = {name: draw(size) for name in spec.command_line_sizes} | {"T": draw(st.integers(0, 9))}
    facts, scalars = {}, {}
    if "Hq" in spec.sizes:
        sizes["Hq"] = sizes["H"] * draw(size)
    if "Hv" in spec.sizes and draw(st.booleans()):
        sizes |= {"Hq": sizes["H"], "Hv": sizes["H"] * draw(size)}
    if "Tq" in spec.sizes:
        sizes |= {"Tq": draw(size), "Tk": draw(size)}
        scalars["causal"] = draw(st.booleans())
    if "g" in spec.parameters:
        gate, none = spec.has(Role.GATE), [] if spec.requires(Role.GATE) else [None]
        facts["gate_dtype"] = draw(st.sampled_from([*none, dtype, torch.float32]))
        facts["gate_form"] = draw(st.sampled_from(list(gate.forms))) if facts["gate_dtype"] is not None else None
    if "backwards" in spec.parameters:
        scalars["backwards"] = draw(st.booleans())
        if not scalars["backwards"] or facts["gate_dtype"] is None:  # heads share gates only backwards
            sizes["Hq"] = sizes["H"]
    if "state_indices" in spec.parameters and draw(st.booleans()):
        facts["indexed"], sizes["P"] = True, draw(size)
    if "initial_state" in spec.parameters:
        facts["state_dtype"] = draw(st.sampled_from([None, wide]))
    if "cu_seqlens" in spec.parameters and (spec.requires(Role.OFFSETS) or draw(st.booleans())):
        facts["variable_length"], sizes["B"], sizes["N"] = True, 1, draw(size)
        facts["longest"] = draw(st.sampled_from([None, sizes["T"]])) if "max_seqlen" in spec.parameters else None
    if "slots" in spec.parameters:
        most = draw(st.integers(1, 8))
        sizes |= {"S": most, "L": 2 * most}
        sizes["T"] = sizes["T"] if "N" in sizes else min(sizes["T"], most)
    if "checkpoint_every" in spec.parameters:
        scalars["checkpoint_every"] = draw(st.sampled_from([None, 64]))
        facts["checkpoints"] = spec.name.endswith("_fwd") and scalars["checkpoint_every"] is not None
    return spec.call(sizes, CPU, dtype, scalars=scalars, **facts)


def described(call, arguments):
    """Returns the call of these arguments as a description by sizes gives it: without layouts, and with dim = -1."""
    call_of_tensors = ABSTRACT_OPS[call.op].describe(*arguments)
    scalars = {name: -1 if name == "dim" else value for name, value in call_of_tensors.scalars.items()}
    return dataclasses.replace(call_of_tensors, layouts={}, scalars=scalars)


@settings(max_examples=100)
@given(op_calls())
def test_arguments_are_what_the_call_says(call):
    arguments = random_arguments(call)
    assert described(call, arguments) == call
    assert len(arguments) == len(ABSTRACT_OPS[call.op].parameters)


@settings(max_examples=30)
@given(op_calls())
def test_the_reference_runs_them_and_leaves_them(call):
    arguments = random_arguments(call)
    (run,) = calls.calls_for("reference", call, arguments)
    run()
    again = random_arguments(call)
    assert all(a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(arguments, again, strict=True))


GROWING = {"B", "T", "N", "P", "Tq", "Tk", "rows", "columns"}


# Delta rules are measured at the sizes of the like ops of GLA.
@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.thorough if "recurrent_delta" in op else ()) for op in OP_PARAMETERS]
)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_calibration_shapes_are_legal_and_distinct(op, kind):
    shape_calls = shapes(op, torch.device(kind))
    assert len({str(call) for call in shape_calls}) == len(shape_calls) >= 5
    for call in shape_calls:
        # Large sizes are cut so that the test fits; only the shapes are compared.
        smaller = {name: min(size, 8) if name in GROWING else size for name, size in call.dims.items()}
        small = dataclasses.replace(call, device=CPU, dims=smaller, capturing=False)
        assert described(small, random_arguments(small)) == small
    assert {call.capturing for call in shape_calls} == ({False, True} if kind == "cuda" else {False})


def test_chunk_shapes_reach_what_users_run():
    dims = [call.dims for call in shapes("chunk_gla_fwd", torch.device("cuda"))]
    assert {1, 131072} <= {d["T"] for d in dims}
    assert {1, 512} <= {d["B"] * d["H"] for d in dims}
    assert {64, 128, 256} == {d["K"] for d in dims} == {d["V"] for d in dims}
    assert {d["N"] > d["B"] for d in dims} == {True, False}


def test_backward_shapes_reach_every_kernel():
    shape_calls = shapes("chunk_gla_bwd", torch.device("cuda"))
    assert {call.dtype for call in shape_calls} == {torch.bfloat16, torch.float16, torch.float32}
    dims = [call.dims for call in shape_calls]
    assert {1, 131072} <= {d["T"] for d in dims}
    assert {1, 512} <= {d["B"] * d["H"] for d in dims}
    assert {(64, 64), (128, 128), (256, 512)} <= {(d["K"], d["V"]) for d in dims}
    assert {d["N"] > d["B"] for d in dims} == {d["Hq"] > d["H"] for d in dims} == {True, False}


def test_packed_sequences_differ_in_length_and_cover_all_tokens():
    sizes = {"B": 1, "T": 1000, "H": 1, "K": 1, "V": 1, "N": 10}
    call = ABSTRACT_OPS["chunk_gla_fwd"].call(sizes, CPU, torch.float32, variable_length=True)
    offsets = random_arguments(call)[7]
    lengths = offsets.diff().tolist()
    assert (offsets[0], offsets[-1], sum(lengths)) == (0, 1000, 1000)
    assert 30 < min(lengths) < max(lengths) < 250
    assert random_arguments(call, seed=1)[7].tolist() != offsets.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("op", OP_PARAMETERS)
def test_times_on_a_gpu(op, capturing):
    cuda = torch.device("cuda", 0)
    call = next(c for c in shapes(op, cuda) if c.capturing == capturing)
    backend = gla.explain(op, *random_arguments(call), capturing=capturing).winner
    assert 0 < calls.time_call(backend, call, 0.01).seconds < 0.1
