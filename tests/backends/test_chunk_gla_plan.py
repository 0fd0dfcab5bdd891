"""Which kernels chunk_gla takes, by architecture; launcher and cost model read the same plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import heads_first
from gla_core.dispatch.backend import OpCall
from gla_core.workloads.inputs import gla_inputs
from gla_triton_kernels.chunk_gla import cost
from gla_triton_kernels.chunk_gla.plan import Kernel, plan_one_pass, plan_rows, plan_segments
from gla_triton_kernels.cost import gpu_of_constants
from gla_triton_kernels.runtime.architecture import Architecture, Gpu

H200 = Gpu(Architecture.SM90, 132)
OTHERS = [Gpu(a, 132) for a in Architecture if a is not Architecture.SM90]
bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32


def call_of(dtype=bfloat16, gate_dtype=float32, packed=False, precision="highest", **changes):
    """A call of 8 sequences of 4096 tokens and 16 heads, unless changed; Hq follows H, and N follows B."""
    dims = {"B": 8, "T": 4096, "H": 16, "K": 128, "V": 128, **changes}
    dims = {**dims, "Hq": dims.get("Hq", dims["H"]), "N": dims.get("N", dims["B"])}
    tensors = {"dtype": dtype, "gate_dtype": gate_dtype, "variable_length": packed}
    device = torch.device("cuda")
    return OpCall(op="chunk_gla_fwd", device=device, dims=dims, float32_matmul_precision=precision, **tensors)


def one_pass(gpu=H200, aligned=True, **changes):
    plan = plan_one_pass(call_of(**changes), gpu, aligned)
    assert plan.segments is None
    return plan.outputs


# ---- the kernel


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, Kernel.FORWARD_SM90),
        ({"K": 8, "V": 8}, Kernel.FORWARD_SM90),
        ({"V": 512}, Kernel.FORWARD_SM90),
        ({"gate_dtype": None}, Kernel.FORWARD_SM90),
        ({"B": 1, "N": 1024, "packed": True}, Kernel.FORWARD_SM90),  # 4 tokens on average, and some may be long
        ({"B": 1, "N": 128, "K": 256, "packed": True}, Kernel.FORWARD_SM90_WIDE),
        ({"B": 1, "N": 129, "K": 256, "packed": True}, Kernel.FORWARD),
        ({"B": 1, "N": 8, "packed": True}, Kernel.FORWARD_SM90),
        ({"B": 1, "N": 2, "T": 96, "packed": True}, Kernel.FORWARD_SM90),
        ({"B": 1, "N": 2, "T": 95, "packed": True}, Kernel.FORWARD),
        ({"K": 136}, Kernel.FORWARD_SM90_WIDE),
        ({"K": 256}, Kernel.FORWARD_SM90_WIDE),
        ({"K": 256, "gate_dtype": None}, Kernel.FORWARD),
        ({"K": 256, "B": 1, "N": 8, "packed": True}, Kernel.FORWARD_SM90_WIDE),
        ({"K": 132}, Kernel.FORWARD),
        ({"K": 264}, Kernel.FORWARD),
        ({"V": 60}, Kernel.FORWARD),
        ({"Hq": 32}, Kernel.FORWARD),
        ({"dtype": float16}, Kernel.FORWARD),
        ({"dtype": float32}, Kernel.FORWARD),
        ({"aligned": False}, Kernel.FORWARD),
        ({"T": 96}, Kernel.FORWARD_SM90),
        ({"T": 95}, Kernel.FORWARD),
        ({"T": 192, "K": 64}, Kernel.FORWARD_SM90),
        ({"T": 191, "K": 64}, Kernel.FORWARD),
        ({"T": 96, "K": 256}, Kernel.FORWARD_SM90_WIDE),
        ({"T": 0}, Kernel.FORWARD),
    ],
    ids=str,
)
def test_the_kernel_on_hopper(changes, kernel):
    assert one_pass(**changes).kernel is kernel


@pytest.mark.parametrize("gpu", OTHERS, ids=lambda gpu: gpu.architecture.name)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_other_gpus_take_the_general_kernels(gpu, K):
    assert one_pass(gpu, K=K).kernel is Kernel.FORWARD
    plan = plan_segments(call_of(B=1, T=65536, H=1, K=K), gpu, True)
    assert plan.outputs.kernel is Kernel.FORWARD
    assert plan.segments.states.kernel is Kernel.STATES


# ---- launch parameters


@pytest.mark.parametrize(
    ("changes", "BV"),
    [
        ({"B": 4}, 64),  # 128 blocks of 64 values, on 132 multiprocessors
        ({"B": 5}, 128),
        ({"B": 2, "V": 200}, 64),
        ({"B": 3, "V": 200}, 128),
        ({"V": 64}, 64),
        ({"B": 1, "H": 1, "K": 256}, 128),  # of heads this wide blocks are not narrower
        ({"B": 1, "N": 4, "packed": True}, 64),
        ({"B": 1, "N": 5, "packed": True}, 128),
    ],
    ids=str,
)
def test_blocks_are_narrow_on_hopper_where_all_run_at_once(changes, BV):
    assert one_pass(**changes).BV == BV


@pytest.mark.parametrize(
    ("changes", "BV"),
    [
        ({"T": 57565, "H": 8, "V": 256, "N": 3, "packed": True}, 64),  # 8 segments at most, 256 blocks of 64 values
        ({"T": 8192, "H": 2, "V": 256}, 64),
        ({"T": 8192, "H": 2, "V": 256, "K": 128}, 128),  # a block to a multiprocessor, whichever its values
        ({"T": 8192, "H": 2, "V": 64}, 64),
    ],
    ids=str,
)
def test_states_are_built_by_narrow_blocks_where_all_run_at_once(changes, BV):
    segments = plan_segments(call_of(**{"B": 1, "K": 64, **changes}), H200, True).segments
    assert (segments.states.kernel, segments.states.BV) == (Kernel.STATES_SM90, BV)


@pytest.mark.parametrize(("tokens", "BV"), [(64, 128), (4096, 64)])
def test_many_segments_have_their_states_built_by_wide_blocks(tokens, BV):
    call = dataclasses.replace(call_of(B=8, T=8192, H=8, K=64, V=128), batch_invariant=tokens)
    assert plan_segments(call, H200, True).segments.states.BV == BV


@pytest.mark.parametrize("packed", [False, True])
def test_without_tokens_an_invariant_call_is_not_cut(packed):
    """No tensor map can be made of no rows."""
    scalars = {"output_final_state": True}
    call = dataclasses.replace(call_of(B=1, T=0, packed=packed), batch_invariant=512, scalars=scalars)
    plan = plan_segments(call, H200, True)
    assert plan.segments is None
    assert not plan.outputs.tma
    assert plan.outputs.kernel is Kernel.FORWARD


@pytest.mark.parametrize(("B", "T", "BV"), [(4, 64, 64), (5, 64, 128), (1, 4 * 64, 64), (1, 5 * 64, 128)])
def test_segments_of_an_invariant_call_are_blocks_as_well(B, T, BV):
    call = dataclasses.replace(call_of(B=B, T=T), batch_invariant=64, scalars={"output_final_state": False})
    assert plan_segments(call, H200, True).outputs.BV == BV


@pytest.mark.parametrize(
    ("changes", "C", "BV", "warps", "stages"),
    [
        ({"H": 1}, 32, 32, 4, 3),  # 16 blocks of 64 values
        ({"H": 4}, 32, 32, 4, 3),  # 64
        ({"H": 5}, 64, 64, 4, 2),  # 80
        ({"H": 31}, 64, 64, 4, 2),  # 496
        ({"H": 32}, 32, 128, 4, 2),  # 512
        ({"K": 64, "H": 1}, 64, 32, 4, 3),
        ({"K": 64, "H": 32}, 64, 64, 4, 3),
        ({"K": 256}, 16, 128, 8, 3),
        ({"K": 512}, 16, 32, 8, 2),
        ({"dtype": float16}, 16, 32, 4, 2),
        ({"dtype": float16, "K": 256}, 16, 32, 8, 2),
        ({"dtype": float16, "K": 512}, 16, 16, 8, 1),
        ({"T": 33}, 64, 64, 4, 2),
        ({"T": 20}, 32, 64, 4, 2),
        ({"V": 16}, 64, 16, 4, 2),
    ],
    ids=str,
)
def test_parameters_of_the_general_kernel(changes, C, BV, warps, stages):
    found = one_pass(Gpu(Architecture.SM80, 108), **changes)
    assert (found.C, found.BV, found.warps, found.stages) == (C, BV, warps, stages)
    little = one_pass(Gpu(Architecture.SM86, 84), **changes)
    assert little == dataclasses.replace(found, C=min(C, 32), stages=1)


@pytest.mark.parametrize(
    ("changes", "operand", "tokenwise"),
    [
        ({}, bfloat16, False),
        ({"K": 33}, bfloat16, False),
        ({"K": 32}, float32, False),
        ({"T": 16}, float32, False),
        ({"T": 16, "K": 256}, bfloat16, False),
        ({"dtype": float16}, float32, False),
        ({"dtype": float32, "precision": "high"}, float32, False),
        ({"dtype": float32}, float32, True),
    ],
    ids=str,
)
def test_what_is_multiplied(changes, operand, tokenwise):
    found = one_pass(Gpu(Architecture.SM80, 108), **changes)
    assert (found.operand, found.tokenwise) == (operand, tokenwise)


@pytest.mark.parametrize(
    ("gpu", "aligned", "changes", "tma"),
    [
        (Gpu(Architecture.SM100, 148), True, {}, True),
        (Gpu(Architecture.SM100, 148), False, {}, False),
        (Gpu(Architecture.SM100, 148), True, {"T": 255}, False),
        (Gpu(Architecture.SM100, 148), True, {"B": 1, "T": 32768, "N": 8, "packed": True}, False),
        (Gpu(Architecture.SM80, 108), True, {}, False),
        (H200, True, {"Hq": 32}, True),
        (H200, True, {}, True),
    ],
    ids=str,
)
def test_what_moves_tiles(gpu, aligned, changes, tma):
    assert one_pass(gpu, aligned, **changes).tma == tma


# ---- segments


def test_segments_on_hopper():
    plan = plan_segments(call_of(B=1, T=65536, H=8), H200, True)
    assert plan.outputs == one_pass()
    assert plan.segments.length == 4096
    assert plan.segments.states.kernel is Kernel.STATES_SM90
    assert plan.segments.overlap


def test_segments_of_wide_heads_on_hopper():
    plan = plan_segments(call_of(B=1, T=65536, H=8, K=256), H200, True)
    assert plan.outputs == one_pass(K=256)
    assert plan.segments.states.kernel is Kernel.STATES_SM90


def test_segments_without_the_kernels_for_hopper():
    for changes in ({"Hq": 32}, {"dtype": float16}, {"K": 264}):
        plan = plan_segments(call_of(**{"B": 1, "T": 65536, "H": 8, **changes}), H200, True)
        assert (plan.outputs.kernel, plan.segments.states.kernel) == (Kernel.FORWARD, Kernel.STATES)
        assert plan.segments.overlap
    assert not plan_segments(call_of(B=1, T=65536, H=8), Gpu(Architecture.SM80, 108), True).segments.overlap


@pytest.mark.parametrize(
    "changes", [{}, {"K": 256}, {"dtype": float32}, {"T": 64, "B": 1}, {"T": 0}, {"B": 0}], ids=str
)
def test_sequences_that_stay_whole_take_one_pass(changes):
    assert plan_segments(call_of(**changes), H200, True) == plan_one_pass(call_of(**changes), H200, True)


def test_packed_sequences_of_about_the_mean_stay_whole_where_they_half_fill_the_device():
    def length(N, H):
        return plan_segments(call_of(B=1, T=65536, N=N, H=H, packed=True), H200, True).segments.length

    for N, H in ((8, 32), (4, 32), (16, 8), (9, 8)):  # equal ones are not cut, twice as long ones are
        assert 1.5 * 65536 / N <= length(N, H) < 2 * 65536 / N
    assert length(8, 8) == 64 * 63  # 64 blocks for 132 multiprocessors: the share of one
    assert length(32, 16) == 64 * 125  # by their share longer than that anyway


@pytest.mark.parametrize("packed", [False, True])
def test_interpreted_sequences_are_cut(packed):
    gpu = Gpu(Architecture.INTERPRETED, 1)
    for T in (33, 100, 1000):
        assert plan_segments(call_of(B=1, T=T, packed=packed), gpu, False).segments.length == 32
    assert plan_segments(call_of(B=1, T=32, packed=packed), gpu, False).segments is None


# ---- who reads plans


class Planned(Exception):
    """Holds what a launcher would have planned with."""


def launcher_plans_with(monkeypatch, gpu, *tensors):
    """The OpCall, GPU and alignment that the launcher makes of a call's tensors."""
    pytest.importorskip("triton")
    from gla_triton_kernels.chunk_gla import call

    def way(*args):
        raise Planned(*args[:3])

    monkeypatch.setattr(call, "gpu_of", lambda device: gpu)
    with pytest.raises(Planned) as planned:
        call.forward(way, *tensors[:4], 1.0, tensors[4], True, tensors[5], None)
    return planned.value.args


@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 2, "T": 300, "H": 2, "K": 128, "V": 128},
        {"B": 1, "T": 2000, "H": 1, "K": 64, "V": 64, "gates": "none"},
        {"B": 1, "T": 300, "H": 2, "K": 256, "V": 16},
        {"B": 1, "T": 100, "H": 2, "K": 19, "V": 37, "G": 3, "initial_state": True},
        {"lengths": (2000, 0, 65), "H": 1, "K": 128, "V": 128},
        {"B": 1, "T": 2000, "H": 1, "K": 32, "V": 64, "dtype": float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("gpu", [H200, Gpu(Architecture.SM80, 108)], ids=lambda gpu: gpu.architecture.name)
@pytest.mark.parametrize("plan", [plan_one_pass, plan_segments])
def test_launcher_and_cost_model_have_the_same_plan(plan, gpu, sizes, monkeypatch):
    x = gla_inputs(**{"dtype": bfloat16, "gate_dtype": float32, **sizes})
    tensors = (x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens)
    call, found_gpu, aligned = launcher_plans_with(monkeypatch, gpu, *tensors)
    described = gla.explain("chunk_gla_fwd", *tensors[:4], 1.0, x.initial_state, True, x.cu_seqlens).call
    capability = {Architecture.SM90: 9.0, Architecture.SM80: 8.0}[gpu.architecture]
    facts = {"multiprocessors": float(gpu.multiprocessors), "compute_capability": capability}
    assert gpu_of_constants(facts) == found_gpu
    assert plan(described, gpu_of_constants(facts), cost._aligned(described)) == plan(call, gpu, aligned)


def test_the_launcher_knows_what_tma_can_address(monkeypatch):
    x = gla_inputs(B=2, T=10, H=3, K=64, V=64, dtype=bfloat16, gate_dtype=float32)
    q, k, v, g = x.q, x.k, x.v, x.g

    def aligned(*tensors, gpu=H200):
        return launcher_plans_with(monkeypatch, gpu, *tensors, None, None)[2]

    assert aligned(q, k, v, g)
    assert aligned(q, k, v, None)
    assert aligned(*(heads_first(y) for y in (q, k, v, g)))
    assert aligned(q, k, v[..., :60].contiguous(), g)  # with zeros behind them: see widths.py
    assert not aligned(q[..., 1:-7], k[..., 1:-7], v, g[..., 1:-7])
    assert not aligned(q, k, v, g[:, :, :1].expand_as(g))
    assert not aligned(q, k, v, g, gpu=Gpu(Architecture.SM80, 108))


# ---- rows of a batch


def rows_of(**changes):
    """How many rows each plan of a batch is for, and whether it cuts them."""
    return [
        (call.dims["B"], call.dims["N"], plan.segments is not None)
        for call, plan in plan_rows(call_of(**changes), H200, True)
    ]


def test_rows_that_do_not_fit_beside_the_others_are_cut():
    assert rows_of(B=13, H=11) == [(12, 12, False), (1, 1, True)]  # 143 blocks for 132 multiprocessors
    assert rows_of(B=142, H=1, T=1408) == [(132, 132, False), (10, 10, True)]
    assert rows_of(B=18, H=8, V=256, T=8192) == [(16, 16, False), (2, 2, True)]  # 288 blocks


@pytest.mark.parametrize(
    "changes",
    [
        {},  # 128 blocks
        {"B": 2},  # which do not fill the device
        {"B": 1, "H": 143},
        {"B": 13, "H": 11, "T": 256},  # launches take longer
        {"B": 15, "H": 16},  # 240 blocks, nearly two waves
        {"B": 1, "N": 13, "H": 11, "packed": True},
        {"B": 0},
    ],
    ids=str,
)
def test_all_rows_go_one_way(changes):
    call = call_of(**changes)
    assert plan_rows(call, H200, True) == [(call, plan_segments(call, H200, True))]
    invariant = dataclasses.replace(call_of(B=13, H=11), batch_invariant=4096, scalars={"output_final_state": False})
    assert len(plan_rows(invariant, H200, True)) == 1
