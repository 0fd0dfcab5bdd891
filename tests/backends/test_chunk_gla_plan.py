"""The kernels of chunk_gla by architecture; launcher and cost model read the same plan."""

import dataclasses
import itertools

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import heads_first
from gla_core.dispatch.backend import OpCall, contiguous_layout
from gla_core.workloads.inputs import gla_inputs
from gla_triton_kernels.chunks import cutting
from gla_triton_kernels.chunks.kernel import first_able
from gla_triton_kernels.cost import gpu_of_constants
from gla_triton_kernels.gla import cost, forward
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import Architecture, Gpu
from tests.backends.prepared_calls import described

H200 = Gpu(Architecture.SM90, 132)
OTHERS = [Gpu(a, 132) for a in Architecture if a is not Architecture.SM90]
bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32


def call_of(
    dtype=bfloat16, gate_dtype=float32, packed=False, precision="highest", aligned=True, gate_form="key", **changes
):
    """A call of 8 sequences of 4096 tokens and 16 heads, unless changed; Hq and Hv follow H, and N follows B."""
    dims = {"B": 8, "T": 4096, "H": 16, "K": 128, "V": 128, **changes}
    dims = {"Hq": dims["H"], "Hv": dims["H"], "N": dims["B"], **dims}
    form = None if gate_dtype is None else gate_form
    tensors = {"dtype": dtype, "gate_dtype": gate_dtype, "gate_form": form, "variable_length": packed}
    device = torch.device("cuda")
    if not aligned:
        shape = tuple(dims[name] for name in ("B", "T", "H", "K"))
        tensors["layouts"] = {"k": contiguous_layout(shape, dtype)._replace(aligned=False)}
    return OpCall(op="chunk_gla_fwd", device=device, dims=dims, float32_matmul_precision=precision, **tensors)


def one_pass(gpu=H200, **changes):
    call = call_of(**changes)
    ((planned, plan),) = forward.plan(call, gpu, cut=False)
    assert planned is call
    assert plan.segments is None
    return plan


def cut(call, gpu=H200):
    """Plans segments; all rows of the batch are treated alike."""
    return forward._segments(call, gpu, forward.KERNELS)


# ---- the kernel of a call


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, sm90.FORWARD),
        ({"K": 8, "V": 8}, sm90.FORWARD),
        ({"V": 512}, sm90.FORWARD),
        ({"gate_dtype": None}, sm90.FORWARD),
        ({"B": 1, "N": 1024, "packed": True}, sm90.FORWARD),  # 4 tokens on average, and some may be long
        ({"B": 1, "N": 128, "K": 256, "packed": True}, sm90.FORWARD_WIDE),
        ({"B": 1, "N": 129, "K": 256, "packed": True}, general.FORWARD),
        ({"B": 1, "N": 8, "packed": True}, sm90.FORWARD),
        ({"B": 1, "N": 2, "T": 96, "packed": True}, sm90.FORWARD),
        ({"B": 1, "N": 2, "T": 95, "packed": True}, general.FORWARD),
        ({"K": 136}, sm90.FORWARD_WIDE),
        ({"K": 256}, sm90.FORWARD_WIDE),
        ({"K": 256, "gate_dtype": None}, sm90.FORWARD_HEAD),
        ({"K": 256, "B": 1, "N": 8, "packed": True}, sm90.FORWARD_WIDE),
        ({"K": 132}, general.FORWARD),
        ({"K": 264}, sm90.FORWARD_WIDE),
        ({"V": 60}, general.FORWARD),
        ({"Hq": 32}, sm90.FORWARD),
        ({"Hq": 32, "K": 256}, sm90.FORWARD_WIDE),
        ({"Hq": 32, "gate_dtype": None}, sm90.FORWARD),
        ({"Hq": 32, "gate_form": "head"}, sm90.FORWARD_HEAD),
        ({"Hq": 32, "gate_form": "constant", "K": 256}, sm90.FORWARD_HEAD),
        ({"Hv": 32}, sm90.FORWARD),
        ({"Hv": 32, "K": 256}, sm90.FORWARD_WIDE),
        ({"Hv": 32, "dtype": float16}, sm90.FORWARD),
        ({"Hv": 32, "gate_dtype": None}, sm90.FORWARD_HEAD),
        ({"dtype": float16}, sm90.FORWARD),
        ({"dtype": float16, "K": 256}, sm90.FORWARD_WIDE),
        ({"dtype": float32, "precision": "high"}, sm90.FORWARD),
        ({"dtype": float32}, general.FORWARD),
        ({"aligned": False}, general.FORWARD),
        ({"T": 96}, sm90.FORWARD),
        ({"T": 95}, general.FORWARD),
        ({"T": 192, "K": 64}, sm90.FORWARD),
        ({"T": 191, "K": 64}, general.FORWARD),
        ({"T": 96, "K": 256}, sm90.FORWARD_WIDE),
        ({"T": 0}, general.FORWARD),
        ({"B": 64, "N": 64, "T": 95}, sm90.FORWARD),  # the blocks fill the GPU, so prices decide
        ({"B": 64, "N": 64, "T": 63}, general.FORWARD),
        ({"B": 64, "N": 64, "T": 17, "K": 256}, sm90.FORWARD_WIDE),
        ({"B": 64, "N": 64, "T": 16, "K": 256}, general.FORWARD),
        ({"B": 64, "N": 64, "T": 95, "K": 64, "V": 64}, general.FORWARD),
        ({"B": 64, "N": 64, "T": 95, "K": 64, "V": 256}, sm90.FORWARD),
        ({"B": 64, "N": 64, "T": 33, "K": 640}, sm90.FORWARD_WIDE),  # the general kernel has no matrix units there
        ({"B": 1, "N": 256, "K": 640, "packed": True}, sm90.FORWARD_WIDE),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_the_kernel_on_hopper(changes, kernel):
    assert one_pass(**changes).outputs is kernel


@pytest.mark.parametrize("gpu", OTHERS, ids=lambda gpu: gpu.architecture.name)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_other_gpus_take_the_general_kernels(gpu, K):
    assert one_pass(gpu, K=K).outputs is general.FORWARD
    plan = cut(call_of(B=1, T=65536, H=1, K=K), gpu)
    assert plan.outputs is general.FORWARD
    assert plan.segments.states is general.STATES


# ---- launch parameters


@pytest.mark.parametrize(
    ("changes", "BV"),
    [
        ({"B": 4}, 64),  # 128 blocks of 64 values, on 132 multiprocessors
        ({"B": 5}, 64),  # they share 160 jobs
        ({"B": 6}, 128),
        ({"B": 2, "V": 200}, 64),
        ({"B": 3, "V": 200}, 128),
        ({"V": 64}, 64),
        ({"B": 1, "H": 1, "K": 256}, 128),  # heads of this width have no narrower blocks
        ({"B": 1, "N": 4, "packed": True}, 64),
        ({"B": 1, "N": 5, "packed": True}, 128),
    ],
    ids=str,
)
def test_blocks_are_narrow_on_hopper_where_all_run_at_once(changes, BV):
    assert one_pass(**changes).parameters.BV == BV


@pytest.mark.parametrize(
    ("changes", "BV"),
    [
        ({"T": 57565, "H": 8, "V": 256, "N": 3, "packed": True}, 64),  # 8 segments at most, 256 blocks of 64 values
        ({"T": 8192, "H": 2, "V": 256}, 64),
        ({"T": 8192, "H": 2, "V": 256, "K": 128}, 128),  # each multiprocessor holds one block, whatever its width
        ({"T": 8192, "H": 2, "V": 64}, 64),
    ],
    ids=str,
)
def test_states_are_built_by_narrow_blocks_where_all_run_at_once(changes, BV):
    segments = cut(call_of(**{"B": 1, "K": 64, **changes})).segments
    assert (segments.states, segments.parameters.BV) == (sm90.STATES, BV)


@pytest.mark.parametrize(("tokens", "BV"), [(64, 128), (4096, 64)])
def test_many_segments_have_their_states_built_by_wide_blocks(tokens, BV):
    call = dataclasses.replace(call_of(B=8, T=8192, H=8, K=64, V=128), batch_invariant=tokens)
    assert cut(call).segments.parameters.BV == BV


@pytest.mark.parametrize("packed", [False, True])
def test_without_tokens_an_invariant_call_is_not_cut(packed):
    """A tensor map needs at least one row."""
    scalars = {"output_final_state": True}
    call = dataclasses.replace(call_of(B=1, T=0, packed=packed), batch_invariant=512, scalars=scalars)
    plan = cut(call)
    assert plan.segments is None
    assert not plan.parameters.tma
    assert plan.outputs is general.FORWARD


@pytest.mark.parametrize(("B", "T", "BV"), [(4, 64, 64), (5, 64, 128), (1, 4 * 64, 64), (1, 5 * 64, 128)])
def test_segments_of_an_invariant_call_are_blocks_as_well(B, T, BV):
    call = dataclasses.replace(call_of(B=B, T=T), batch_invariant=64, scalars={"output_final_state": False})
    assert cut(call).parameters.BV == BV


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
    hopper, a100, rtx_3090 = (
        general.FORWARD.parameters(call_of(**changes), Gpu(Architecture[name], 132), call_of(**changes).dims["N"])
        for name in ("SM90", "SM80", "SM86")
    )
    assert (hopper.C, hopper.BV, hopper.warps, hopper.stages) == (C, BV, warps, stages)
    smaller = {"C": min(C, 32), "BV": min(BV, 64), "keys_first": False, "tma": False}
    assert a100 == dataclasses.replace(hopper, **smaller)
    assert rtx_3090 == dataclasses.replace(a100, stages=1)


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
    parameters = one_pass(Gpu(Architecture.SM80, 108), **changes).parameters
    assert (parameters.operand, parameters.tokenwise) == (operand, tokenwise)


@pytest.mark.parametrize(
    ("gpu", "changes", "tma"),
    [
        (Gpu(Architecture.SM100, 148), {}, True),
        (Gpu(Architecture.SM100, 148), {"aligned": False}, False),
        (Gpu(Architecture.SM100, 148), {"T": 255}, False),
        (Gpu(Architecture.SM100, 148), {"B": 1, "T": 32768, "N": 8, "packed": True}, False),
        (Gpu(Architecture.SM80, 108), {}, False),
        (H200, {"Hq": 32}, True),
        (H200, {}, True),
    ],
    ids=str,
)
def test_what_moves_tiles(gpu, changes, tma):
    assert one_pass(gpu, **changes).parameters.tma == tma


# ---- segments


def test_segments_on_hopper():
    plan, whole = cut(call_of(B=1, T=65536, H=8)), one_pass()
    assert (plan.outputs, plan.parameters) == (whole.outputs, whole.parameters)
    assert plan.segments.length == 4096
    assert plan.segments.states is sm90.STATES
    assert plan.segments.overlap


def test_segments_of_wide_heads_on_hopper():
    plan, whole = cut(call_of(B=1, T=65536, H=8, K=256)), one_pass(K=256)
    assert (plan.outputs, plan.parameters) == (whole.outputs, whole.parameters)
    assert plan.segments.states is sm90.STATES


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [({}, sm90.FORWARD), ({"K": 256}, sm90.FORWARD_WIDE), ({"gate_form": "head"}, sm90.FORWARD_HEAD)],
)
def test_query_heads_share_states_in_a_pool_if_sequences_are_cut(changes, kernel):
    """The scan reads and writes the pool. Whole sequences would write it while another query head reads it."""
    call = call_of(**{"B": 1, "N": 2, "T": 65536, "H": 4, "Hq": 16, "packed": True, **changes})
    call = dataclasses.replace(call, given=frozenset({"pool"}))
    plan = cut(call)
    assert plan.segments is not None
    assert plan.outputs is kernel
    ((_, whole),) = forward.plan(call, H200, cut=False)
    assert whole.outputs is general.FORWARD


def test_segments_without_the_kernels_for_hopper():
    for changes in ({"aligned": False}, {"K": 132}):
        plan = cut(call_of(**{"B": 1, "T": 65536, "H": 8, **changes}))
        assert (plan.outputs, plan.segments.states) == (general.FORWARD, general.STATES)
        assert plan.segments.overlap
    assert not cut(call_of(B=1, T=65536, H=8), Gpu(Architecture.SM80, 108)).segments.overlap


def test_the_gradient_of_a_state_that_query_heads_share_takes_the_general_kernel():
    """The kernel for Hopper does not sum over them. It computes the states, which no query head takes part in."""
    grouped = call_of(B=1, T=65536, H=8, Hq=32)
    assert forward.states_of_segments(grouped, H200, 64, 64).states is general.STATES
    plan = cut(grouped)
    assert (plan.outputs, plan.segments.states) == (sm90.FORWARD, sm90.STATES)


@pytest.mark.parametrize("changes", [{}, {"K": 256}, {"dtype": float32}, {"T": 64, "B": 1}, {"T": 0}, {"B": 0}])
def test_sequences_that_stay_whole_take_one_pass(changes):
    assert cut(call_of(**changes)) == one_pass(**changes)


def length_of(N, H, T=65536, longest=None):
    """Returns the tokens of a segment of N packed sequences of T tokens; T if they stay whole."""
    call = dataclasses.replace(call_of(B=1, T=T, N=N, H=H, packed=True), longest=longest)
    plan = cut(call)
    return T if plan.segments is None else plan.segments.length


def test_packed_sequences_of_about_the_mean_stay_whole_where_they_fill_the_device():
    for N, H in ((8, 32), (4, 32), (16, 8)):  # equal sequences are not cut, sequences of twice the mean are
        assert 1.5 * 65536 / N <= length_of(N, H) < 2 * 65536 / N
    assert length_of(8, 8) == 64 * 63  # 64 blocks for 132 multiprocessors: T * 8 / 132 tokens, in whole chunks
    assert length_of(32, 16) == 64 * 125  # T * 16 / 132 tokens are more than 1.5 times the mean


def test_packed_sequences_of_known_lengths_are_cut_only_if_one_is_long():
    assert length_of(16, 8, longest=4096) == 65536
    assert length_of(16, 8, longest=32768) < 32768
    assert length_of(2000, 8, longest=100) == 65536
    assert length_of(2000, 8) == 64 * 63  # one sequence may have nearly all tokens


def pieces(N, T, H):
    """Returns the number of segments of each sequence of a batch."""
    plan = cut(call_of(B=N, T=T, H=H))
    return 1 if plan.segments is None else -(-T // plan.segments.length)


def test_few_heads_fill_the_device_in_one_wave():
    assert pieces(1, 65536, 8) == 16
    assert pieces(1, 8192, 16) == 8
    assert 64 <= pieces(1, 65536, 1) <= 132


def test_many_heads_stay_whole():
    assert pieces(8, 4096, 16) == 1
    assert pieces(1, 65536, 100) == 1


def test_heads_that_keep_the_memory_busy_stay_whole():
    assert pieces(4, 4096, 16) == 1  # 64 blocks for 132 multiprocessors; segments would read k, v and g twice


def test_short_sequences_stay_whole():
    assert pieces(1, 64, 1) == 1
    assert pieces(2, 128, 4) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_the_cut_does_not_depend_on_what_else_is_returned(packed):
    """Then o has the same bits with and without a final state."""
    for T, H, N in itertools.product((100, 300, 2000, 65536), (1, 4, 11), (1, 13)):
        call = call_of(B=1 if packed else N, T=T, H=H, N=N, packed=packed)
        scalars = {"output_final_state": True, "checkpoint_every": 64}
        more = dataclasses.replace(call, scalars=scalars, checkpoints=True, state_dtype=float32)
        assert plans_of(forward.plan(call, H200, True)) == plans_of(forward.plan(more, H200, True))


def test_a_segment_is_whole_chunks_or_all():
    tokens = [0, 1, 63, 64, 65, 2048, 8192, 65536]
    for N, T, H, packed in itertools.product([0, 1, 2, 64], tokens, [0, 1, 8, 33, 512], [False, True]):
        plan = cut(call_of(B=1 if packed else N, N=N, T=T, H=H, packed=packed))
        assert plan.segments is None or (plan.segments.length % 64 == 0 and plan.segments.length < T)


@pytest.mark.parametrize("packed", [False, True])
def test_interpreted_sequences_are_cut(packed):
    gpu = Gpu(Architecture.INTERPRETED, 1)
    for T in (33, 100, 1000):
        assert cut(call_of(B=1, T=T, packed=packed), gpu).segments.length == 32
    assert cut(call_of(B=1, T=32, packed=packed), gpu).segments is None


# ---- the launcher's plans


class Planned(Exception):
    """Holds the arguments of a request for a plan."""


def asks_for(*arguments):
    """Stands in for a function that plans, and raises its arguments."""
    raise Planned(*arguments)


@pytest.fixture
def launcher_plans_with(monkeypatch):
    """Returns a function from a call's tensors to the arguments with which the launcher asks for a plan."""
    pytest.importorskip("triton")

    def plans_with(gpu, cut, q, k, v, g, initial_state=None, cu_seqlens=None):
        monkeypatch.setattr(forward, "gpu_of_call", lambda call: gpu)
        monkeypatch.setattr(forward, "plan", asks_for)
        call_arguments = (q, k, v, g, 1.0, initial_state, True, cu_seqlens, None, None)
        with pytest.raises(Planned) as planned:
            forward.prepare(described("chunk_gla_fwd", *call_arguments), cut)
        return planned.value.args

    return plans_with


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
@pytest.mark.parametrize("cut", [False, True])
def test_launcher_and_cost_model_have_the_same_plan(cut, gpu, sizes, launcher_plans_with):
    x = gla_inputs(**{"dtype": bfloat16, "gate_dtype": float32, **sizes})
    tensors = (x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens)
    plan = forward.plan
    launched = launcher_plans_with(gpu, cut, *tensors)
    described = gla.explain("chunk_gla_fwd", *tensors[:4], 1.0, x.initial_state, True, x.cu_seqlens).call
    capability = {Architecture.SM90: 9.0, Architecture.SM80: 8.0}[gpu.architecture]
    facts = {"multiprocessors": float(gpu.multiprocessors), "compute_capability": capability}
    with pytest.raises(Planned) as priced:
        cost.predictor(asks_for, cost.forward_prices)(described, {**cutting.H200, **facts})
    assert gpu_of_constants(facts) == priced.value.args[1] == launched[1] == gpu
    assert plans_of(plan(*priced.value.args, cut)) == plans_of(plan(*launched))


def plans_of(rows):
    return [(call.dims, plan) for call, plan in rows]


def test_the_launcher_knows_what_tma_can_address(launcher_plans_with):
    x = gla_inputs(B=2, T=10, H=3, K=64, V=64, dtype=bfloat16, gate_dtype=float32)
    q, k, v, g = x.q, x.k, x.v, x.g

    def aligned(*tensors, gpu=H200):
        call, gpu, _, kernels = launcher_plans_with(gpu, False, *tensors)
        assert kernels == forward.KERNELS
        return first_able(kernels, call, gpu) is sm90.FORWARD

    assert aligned(q, k, v, g)
    assert aligned(q, k, v, None)
    assert aligned(*(heads_first(y) for y in (q, k, v, g)))
    assert aligned(q, k, v[..., :60].contiguous(), g)  # a copy with zeros behind its columns is aligned: see widths.py
    assert not aligned(q[..., 1:-7], k[..., 1:-7], v, g[..., 1:-7])
    assert not aligned(q, k, v, g[:, :, :1].expand_as(g))
    assert not aligned(q, k, v, g, gpu=Gpu(Architecture.SM80, 108))


# ---- rows of a batch


def rows_of(**changes):
    """Returns, for each plan of a batch, B, N, and whether the plan cuts sequences."""
    return [
        (call.dims["B"], call.dims["N"], plan.segments is not None)
        for call, plan in forward.plan(call_of(**changes), H200, cut=True)
    ]


def test_rows_that_do_not_fit_beside_the_others_are_cut():
    assert rows_of(B=18, H=8, K=256, V=256, T=8192) == [(16, 16, False), (2, 2, True)]  # 288 blocks


def test_rows_are_not_cut_where_blocks_share_chunks():
    assert rows_of(B=13, H=11) == [(13, 13, False)]  # 143 jobs on 132 multiprocessors
    assert rows_of(B=142, H=1, T=1408) == [(142, 142, False)]
    assert rows_of(B=18, H=8, V=256, T=8192) == [(18, 18, False)]


@pytest.mark.parametrize(
    "changes",
    [
        {},  # 128 blocks
        {"B": 2},  # they do not fill the device
        {"B": 1, "H": 143},
        {"B": 13, "H": 11, "T": 256},  # further launches would take longer
        {"B": 15, "H": 16},  # 240 blocks, nearly two waves
        {"B": 1, "N": 13, "H": 11, "packed": True},
        {"B": 0},
    ],
    ids=str,
)
def test_all_rows_go_one_way(changes):
    call = call_of(**changes)
    assert forward.plan(call, H200, cut=True) == [(call, cut(call))]
    invariant = dataclasses.replace(call_of(B=13, H=11), batch_invariant=4096, scalars={"output_final_state": False})
    assert len(forward.plan(invariant, H200, cut=True)) == 1
