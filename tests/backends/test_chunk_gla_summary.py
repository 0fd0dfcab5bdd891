"""chunk_gla_summary by the kernels that build states, on whole sequences and on segments of them."""

from dataclasses import replace

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import OpCall, contiguous_layout
from gla_core.dispatch.tensors import log_gates
from gla_core.workloads.inputs import gla_inputs
from gla_triton_kernels.gla import summary
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import Architecture, Gpu

H200 = Gpu(Architecture.SM90, 132)


def check(backend, backwards, gate_normalizer=None, **sizes):
    x = gla_inputs(**sizes, gate_dtype=torch.float32)
    if gate_normalizer is not None:
        x = replace(x, g=3 * torch.randn_like(x.g))
    elif x.g is not None:  # the decay of a long sequence would be 0
        x = replace(x, g=x.g * min(1.0, 512 / x.g.shape[1]))
    G = x.q.shape[2] // x.k.shape[2]
    left, right = (x.q, x.v.repeat_interleave(G, 2).roll(1, 1)) if backwards else (x.k, x.v)
    function = gla.chunk_gla_gradient_summary if backwards else gla.chunk_gla_summary
    options = {} if gate_normalizer is None else {"gate": "logsigmoid", "gate_normalizer": gate_normalizer}
    actual = function(left, right, x.g, x.cu_seqlens, backend=backend, **options)
    g = None if x.g is None else log_gates(x.g, gate_normalizer, torch.float64)
    expected = oracle.chunk_gla_summary(left, right, g, x.cu_seqlens, backwards)
    for name, y, ref in zip(("decay", "state"), actual, expected, strict=True):
        assert relative_error(y, ref) <= FORWARD[left.dtype], name


@pytest.mark.kernels
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
@pytest.mark.parametrize("sizes", [{"B": 2, "T": 70}, {"lengths": (0, 40, 33, 0, 1), "padding": 5}], ids=str)
def test_both_layouts(backend, device, sizes, gates, backwards):
    check(backend, backwards, **sizes, K=20, V=9, gates=gates, dtype=torch.float16, device=device)


@pytest.mark.kernels
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("form", ["constant", "head", "key"])
def test_logits(backend, device, form, backwards):
    sizes = {"lengths": (0, 40, 33, 0, 1), "padding": 5, "K": 20, "V": 9, "gate_form": form}
    check(backend, backwards, 16, **sizes, dtype=torch.float16, device=device)


@pytest.mark.kernels
@pytest.mark.parametrize("gates", ["none", "mild"])
def test_grouped_queries_token_by_token(backend, device, gates):
    G = 3 if gates == "mild" else 1  # without gates, each query head would have its own state
    check(backend, True, B=1, T=40, G=G, K=9, V=20, gates=gates, dtype=torch.float32, device=device)


@pytest.mark.kernels
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("sizes", [{"B": 1, "T": 17 * 32 + 3}, {"lengths": (17 * 32 + 3, 5)}], ids=str)
def test_more_segments_than_are_scanned_at_a_time(device, sizes, backwards):
    check("parallel_scan", backwards, **sizes, H=1, K=4, V=4, gates="strong", dtype=torch.float16, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("T", [128, 5000])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_for_hopper(backend, needs_sm90, packed, T, backwards):
    sizes = {"lengths": (0, T - 37, 0, 100), "padding": 5} if packed else {"B": 2, "T": T}
    check(backend, backwards, **sizes, K=128, V=128, dtype=torch.bfloat16, device="cuda")


def call(T, H, B=1, K=128, N=None, dtype=torch.bfloat16):
    dims = {"B": B, "T": T, "H": H, "Hq": H, "Hv": H, "K": K, "V": 128, "N": N or B}
    gate = {
        "gate_dtype": torch.float32,
        "gate_form": "key",
        "scalars": {"backwards": False},
        "variable_length": N is not None,
    }
    return OpCall(op="chunk_gla_summary", device=torch.device("cuda"), dtype=dtype, dims=dims, **gate)


def plan_cut(call):
    ((_, plan),) = summary.plan(call, H200, cut=True)
    return plan


def plan_whole(call):
    ((_, plan),) = summary.plan(call, H200, cut=False)
    return plan


def test_few_heads_are_cut_and_many_stay_whole():
    few, many = call(65536, 8), call(4096, 32, B=8)
    assert plan_cut(few).length == 65536 // 16
    assert plan_cut(many) == plan_whole(many)
    assert plan_whole(few).length == 65536


def test_the_kernel_follows_the_forward():
    left = contiguous_layout((1, 65536, 8, 128), torch.bfloat16)._replace(aligned=False)
    unaligned = replace(call(65536, 8, N=4), layouts={"left": left})
    assert plan_cut(call(65536, 8, N=4)).states is sm90.STATES
    for plan in (plan_cut, plan_whole):
        assert plan(call(65536, 8)).states is sm90.STATES
        assert plan(call(65536, 8, K=264)).states is sm90.STATES
        assert plan(call(65536, 8, dtype=torch.float16)).states is sm90.STATES
        assert plan(call(65536, 8, dtype=torch.float32)).states is general.STATES
        assert plan(unaligned).states is general.STATES
