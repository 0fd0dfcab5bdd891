"""The kernels for every GPU on all forms of gates, and on value heads in groups, against the float64 oracle."""

import dataclasses

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import gradients, oracle_gradients, oracle_results, run
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch.backend import OpCall, contiguous_layout
from gla_core.workloads.inputs import gla_inputs, token_of
from gla_triton_kernels.gla import backward
from gla_triton_kernels.gla.seen import copied_for_invariance, not_addressable, seen_by_kernels
from gla_triton_runtime.architecture import Architecture, Gpu

pytest.importorskip("triton")

from gla_triton_kernels.chunks.partials import launch_sum_of_rows
from gla_triton_runtime.launch import start

H200 = Gpu(Architecture.SM90, 132)
QUERIES, VALUES = {"H": 1, "G": 2}, {"H": 1, "R": 2}
PACKED = {"lengths": (0, 18, 1), "padding": 3}


def check(backend, device, dtype=torch.float16, **sizes):
    """Compares outputs, final states and gradients."""
    x = gla_inputs(device=device, dtype=dtype, gate_dtype=torch.float32, **sizes)
    for computed, expected, budgets in (
        (run("chunk_gla", x, backend), oracle_results("chunk_gla", x), FORWARD),
        (gradients("chunk_gla", x, backend), oracle_gradients("chunk_gla", x), GRADIENT),
    ):
        for name, ref in expected.items():
            assert computed[name].shape == ref.shape
            assert relative_error(computed[name], ref) <= budgets[dtype], name


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("heads", "gates"),
    [
        (QUERIES, "-inf"),
        (VALUES, "mild"),
        pytest.param(QUERIES, "mild", marks=pytest.mark.thorough),
        pytest.param(VALUES, "-inf", marks=pytest.mark.thorough),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["head", "constant"])
def test_packed_sequences(backend, device, form, heads, gates):
    sizes = {**PACKED, **heads, "K": 19, "V": 37, "initial_state": gates == "mild"}
    check(backend, device, gate_form=form, gates=gates, **sizes)


@pytest.mark.thorough
@pytest.mark.kernels
@pytest.mark.parametrize("form", ["head", "constant"])
def test_segments_of_a_batch(backend, device, short_segments, form):
    check(backend, device, B=2, T=70, H=1, K=8, V=8, gate_form=form, gates="extreme", initial_state=True)


@pytest.mark.kernels
@pytest.mark.parametrize(("form", "heads"), [("head", VALUES), ("constant", QUERIES), ("key", VALUES)], ids=str)
def test_token_by_token(device, form, heads):
    """Products of float32 split their operands, and the forward uses none."""
    check("triton_fused", device, torch.float32, B=1, T=9, **heads, K=19, V=16, gate_form=form, gates="-inf")


@pytest.mark.thorough
@pytest.mark.kernels
@pytest.mark.parametrize("form", ["head", "constant"])
def test_several_blocks_of_keys_and_values(device, form):
    check("triton_fused", device, B=2, T=10, H=1, R=2, K=130, V=140, gate_form=form)


@pytest.mark.kernels
def test_a_group_of_many_value_heads(device):
    check("triton_fused", device, B=1, T=5, H=1, R=20, K=4, V=4, gate_form="head")


@pytest.mark.kernels
def test_gates_that_are_not_contiguous(backend, device):
    x = gla_inputs(B=2, T=20, H=2, K=16, V=16, gate_form="head", dtype=torch.float16, device=device)
    assert x.g is not None
    wide = torch.cat([x.g, x.g], -1)
    y = dataclasses.replace(x, g=wide[..., : x.g.shape[-1]])
    for actual, expected in zip(*(run("chunk_gla", z, backend).values() for z in (y, x)), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.kernels
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(("form", "heads"), [("head", VALUES), ("constant", {"H": 2}), ("key", VALUES)], ids=str)
def test_summaries(backend, device, form, heads, backwards):
    x = gla_inputs(**PACKED, **heads, K=20, V=9, gate_form=form, dtype=torch.float16, device=device)
    left, right = (x.q, x.v.roll(1, 1)) if backwards else (x.k, x.v)
    function = gla.chunk_gla_gradient_summary if backwards else gla.chunk_gla_summary
    actual = function(left, right, x.g, x.cu_seqlens, backend=backend)
    for y, ref in zip(actual, oracle.chunk_gla_summary(left, right, x.g, x.cu_seqlens, backwards), strict=True):
        assert y.shape == ref.shape
        assert relative_error(y, ref) <= FORWARD[torch.float16]


@pytest.mark.kernels
@pytest.mark.parametrize("heads", [QUERIES, VALUES], ids=str)
@pytest.mark.parametrize("form", ["head", "constant", "key"])
def test_steps(backend, device, form, heads):
    x = gla_inputs(B=3, T=1, **heads, K=19, V=7, gate_form=form, gates="-inf", initial_state=True, device=device)
    q, k, v, g = (token_of(y, 0) for y in (x.q, x.k, x.v, x.g))
    assert x.initial_state is not None
    o, state = gla.recurrent_gla_step(q, k, v, g, x.initial_state, backend=backend)
    expected = oracle_results("chunk_gla", x)
    assert relative_error(o, expected["o"][:, 0]) <= FORWARD[torch.float32]
    assert relative_error(state, expected["state"]) <= FORWARD[torch.float32]


@pytest.mark.kernels
def test_sums_of_many_rows(device):
    parts, actual = torch.randn(2500, 40, device=device), torch.empty(40, device=device)
    start([launch_sum_of_rows(parts, actual)])
    assert relative_error(actual, parts.double().sum(0)) <= 1e-6


# ---- plans


def call_of(op="chunk_gla_fwd", form="head", **changes):
    facts = {"gate_dtype": torch.float32, "gate_form": form, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    dims = {"B": 3, "T": 4096, "H": 16, "Hq": 16, "Hv": 16, "K": 100, "V": 128, "N": 3} | changes.pop("dims", {})
    scalars = {"checkpoint_every": 64} | ({"output_final_state": False} if op == "chunk_gla_fwd" else {})
    return OpCall(op=op, dims=dims, scalars=scalars, **(facts | changes))


@pytest.mark.parametrize(("form", "width"), [("head", (3, 4096, 15)), ("constant", (15,))])
def test_gates_without_a_key_axis_are_read_as_they_are(form, width):
    """They are neither copied to wider heads nor moved by TMA, which could not address them."""
    gates = contiguous_layout(width, torch.float32)
    call = call_of(form=form, dims={"H": 15, "Hq": 15, "Hv": 15}, layouts={"g": gates}, batch_invariant=64)
    seen = seen_by_kernels(call, H200)
    assert (seen.dims["K"], seen.layouts["g"]) == (104, gates)
    assert not_addressable(seen) is None
    assert copied_for_invariance(call) == frozenset()


def test_one_plan_computes_the_gradients_of_a_constant_gate():
    """The rows of a batch have one sum."""
    dims = {"B": 17, "N": 17}
    assert len(backward.plan(call_of("chunk_gla_bwd", dims=dims), H200, cut=True)) == 2
    assert len(backward.plan(call_of("chunk_gla_bwd", "constant", dims=dims), H200, cut=True)) == 1
