"""The reasons for which kernels of chunk_gla refuse calls, as `explain` shows them: without Triton or a GPU."""

import dataclasses
import random

import pytest
import torch

import gla_core as gla
from gla_core.cli.calls import describe_call
from gla_core.dispatch.backend import CHUNK, Layout, OpCall, contiguous_layout
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.workloads.inputs import gla_inputs
from gla_triton_kernels.gla import backward, forward, summary
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_kernels.gla.seen import seen_by_kernels
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import Architecture, Gpu

H200, A100, B200 = Gpu(Architecture.SM90, 132), Gpu(Architecture.SM80, 108), Gpu(Architecture.SM100, 148)
KEY_GATE_KERNELS = (sm90.STATES, sm90.FORWARD, sm90.FORWARD_WIDE, sm90.BACKWARD, sm90.BACKWARD_WIDE)
HEAD_GATE_KERNELS = (sm90.FORWARD_HEAD, sm90.BACKWARD_HEAD)
SM90_KERNELS = (*KEY_GATE_KERNELS, *HEAD_GATE_KERNELS)
GENERAL_KERNELS = (general.STATES, general.FORWARD, general.BACKWARD)
WIDE = (sm90.FORWARD_WIDE, sm90.BACKWARD_WIDE)
UNALIGNED = "needs tensors that TMA can address: addresses and strides are multiples of 16 bytes; {} is not one"

FLOAT32 = 'computes float32 in the precision of TF32; the matmul precision is "highest"'

bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32


def call_for(
    kernel,
    *,
    dtype=bfloat16,
    gate_dtype=float32,
    gate_form=None,
    layouts=None,
    precision="highest",
    pool=False,
    **changes,
):
    """Returns a call that a kernel computes on an H200, with changes. Rows of heads begin at multiples of 16 bytes."""
    dims = {
        "B": 2,
        "T": 300,
        "H": 4,
        "K": 256 if kernel in WIDE else 128,
        "V": 256 if kernel is sm90.BACKWARD_WIDE else 128,
    }
    dims |= changes
    dims = {"Hq": dims["H"], "Hv": dims["H"], "N": dims["B"], **dims}
    B, T, H, Hq, Hv, K, V = (dims[name] for name in ("B", "T", "H", "Hq", "Hv", "K", "V"))
    Ho = max(Hq, Hv)
    shapes = {"q": (Hq, K), "k": (H, K), "v": (Hv, V), "g": (Hv, K), "o": (Ho, V), "do": (Ho, V)}
    default_layouts = {
        name: Layout((B, T, *shape), (T * shape[0] * 512, shape[0] * 512, 512, 1), float32 if name == "g" else dtype)
        for name, shape in shapes.items()
    }
    op = "chunk_gla_bwd" if kernel in backward.KERNELS else "chunk_gla_fwd"
    gate_form = gate_form or ("head" if kernel in HEAD_GATE_KERNELS else "key")
    facts = {
        "dims": dims,
        "gate_dtype": gate_dtype,
        "gate_form": gate_form,
        "layouts": default_layouts | (layouts or {}),
        "given": frozenset({"pool"} if pool else ()),
    }
    return OpCall(op=op, device=torch.device("cuda"), dtype=dtype, float32_matmul_precision=precision, **facts)


def named(kernel):
    return getattr(kernel, "name", None)


@pytest.mark.parametrize("kernel", [*SM90_KERNELS, *GENERAL_KERNELS], ids=named)
def test_a_call_that_a_kernel_computes_is_not_refused(kernel):
    assert kernel.refusal(call_for(kernel), H200) is None


SHARED_REASONS = [
    (A100, {}, "needs Hopper (compute capability 9.0); the GPU is of the kind A100"),
    (B200, {}, "needs Hopper (compute capability 9.0); the GPU is of the kind Blackwell"),
    (H200, {"T": 0}, UNALIGNED.format("q")),
]


@pytest.mark.parametrize("kernel", SM90_KERNELS, ids=named)
@pytest.mark.parametrize(("gpu", "changes", "reason"), SHARED_REASONS, ids=str)
def test_refusals_that_kernels_for_sm90_share(kernel, gpu, changes, reason):
    assert kernel.refusal(call_for(kernel, **changes), gpu) == reason


@pytest.mark.parametrize("kernel", SM90_KERNELS, ids=named)
def test_dtypes_of_kernels_for_sm90(kernel):
    def refusal(dtype, **changes):
        return kernel.refusal(call_for(kernel, dtype=dtype, **changes), H200)

    assert refusal(float16) is None
    for precision in ("high", "medium"):
        assert refusal(float32, precision=precision) is None
    assert refusal(float32) == FLOAT32
    assert refusal(torch.float64) == "computes bfloat16, float16 and float32; q is float64"
    for K, V in ((100, 128), (128, 100)):
        reason = f"computes float32 for K and V that are multiples of 8; K is {K} and V is {V}"
        assert refusal(float32, precision="high", K=K, V=V) == reason


@pytest.mark.parametrize("kernel", SM90_KERNELS, ids=named)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "o"])
@pytest.mark.parametrize(
    "change",
    [
        {"aligned": False},
        {"strides": (300 * 4 * 512, 4 * 512, 511, 1)},
        {"strides": (300 * 4 * 512, 0, 512, 1)},  # it repeats
        {"strides": (300 * 4 * 512, 4 * 512 + 2, 512, 1)},
    ],
    ids=str,
)
def test_a_tensor_that_tma_cannot_address_is_named(kernel, name, change):
    if name == "o" and kernel in backward.KERNELS:
        name = "do"
    if name == "g" and kernel in HEAD_GATE_KERNELS:
        pytest.skip("TMA does not move its gates")
    layout = call_for(kernel).layouts[name]._replace(**change)
    assert kernel.refusal(call_for(kernel, layouts={name: layout}), H200) == UNALIGNED.format(name)


KEY_GATES = "computes gates for each key [B, T, Hv, K]; g has one for each"
POOL_HEADS = "computes as many query heads as key/value heads if states are in a pool; q has 8 and k has 4"
VALUE_HEADS = "computes value heads in groups if each key has a gate; v has 8 and k 4"
KERNEL_REASONS = [
    *(
        (kernel, *refusal)
        for kernel in (sm90.FORWARD, sm90.FORWARD_WIDE, sm90.BACKWARD, sm90.BACKWARD_WIDE)
        for refusal in (
            ({"gate_form": "head"}, f"{KEY_GATES} token and head [B, T, Hv]"),
            ({"gate_form": "constant"}, f"{KEY_GATES} head [Hv]"),
            ({"Hv": 8}, None),
            ({"Hv": 8, "gate_dtype": None}, VALUE_HEADS),
            ({"Hq": 8}, None),
        )
    ),
    *(
        (kernel, *refusal)
        for kernel in (sm90.FORWARD, sm90.FORWARD_WIDE, sm90.FORWARD_HEAD)
        for refusal in (({"V": 60}, "computes V that are multiples of 8; V is 60"),)
    ),
    (sm90.FORWARD_HEAD, {"Hq": 8}, None),
    *((kernel, {"Hq": 8, "pool": True}, POOL_HEADS) for kernel in (sm90.FORWARD, sm90.FORWARD_WIDE, sm90.FORWARD_HEAD)),
    *(
        (kernel, {"gate_form": "key"}, "computes one gate for each head, or none; g has one for each key [B, T, Hv, K]")
        for kernel in HEAD_GATE_KERNELS
    ),
    (sm90.BACKWARD_HEAD, {"K": 37}, "computes K and V that are multiples of 8; K is 37 and V is 128"),
    (sm90.FORWARD, {"K": 136}, "computes K up to 128; K is 136"),
    (sm90.FORWARD_WIDE, {"K": 128}, "computes K from 136 in steps of 8; K is 128"),
    (sm90.FORWARD_WIDE, {"K": 132}, "computes K from 136 in steps of 8; K is 132"),
    (sm90.FORWARD_WIDE, {"gate_dtype": None}, "computes calls with gates; there are none"),
    (sm90.BACKWARD, {"gate_dtype": None}, "computes calls with gates; there are none"),
    (sm90.BACKWARD, {"K": 37}, "computes K and V that are multiples of 8; K is 37 and V is 128"),
    (sm90.BACKWARD, {"V": 100}, "computes K and V that are multiples of 8; K is 128 and V is 100"),
    (sm90.BACKWARD_WIDE, {"V": 100}, "computes K and V that are multiples of 8; K is 256 and V is 100"),
    (sm90.BACKWARD_WIDE, {"V": 128}, "computes heads with V above 128; V is 128"),
]


@pytest.mark.parametrize(("kernel", "changes", "reason"), KERNEL_REASONS, ids=lambda x: getattr(x, "name", str(x)))
def test_refusals_of_one_kernel(kernel, changes, reason):
    assert kernel.refusal(call_for(kernel, **changes), H200) == reason


@pytest.mark.parametrize("kernel", GENERAL_KERNELS, ids=named)
@pytest.mark.parametrize("gpu", [Gpu(architecture, 132) for architecture in Architecture], ids=lambda x: x[0].name)
def test_general_kernels_refuse_nothing(kernel, gpu):
    for changes in (x[-2] for x in (*SHARED_REASONS, *KERNEL_REASONS)):
        assert kernel.refusal(call_for(kernel, **changes), gpu) is None
    unaligned = {name: x._replace(aligned=False) for name, x in call_for(kernel).layouts.items()}
    assert kernel.refusal(call_for(kernel, layouts=unaligned), gpu) is None


# ---- no kernel for SM90 on another GPU


def drawn_call(draw, op):
    """Draws a call of any size. Sometimes TMA cannot address one of its tensors."""
    dims = {"B": draw.choice([1, 2, 8, 150]), "T": draw.choice([0, 5, 96, 300, 4096, 65536]), "H": draw.choice([1, 8])}
    dims |= {name: draw.choice([8, 20, 64, 128, 136, 256, 264, 512]) for name in ("K", "V")}
    packed = draw.random() < 0.3
    if packed:
        dims["B"] = 1
    groups, by_values = draw.choice([1, 1, 4]), draw.random() < 0.5
    dims |= {"Hq": dims["H"] * (1 if by_values else groups), "Hv": dims["H"] * (groups if by_values else 1)}
    dims["N"] = draw.choice([1, 7, 64]) if packed else dims["B"]
    scalars = {
        "chunk_gla_fwd": {"output_final_state": draw.random() < 0.5, "checkpoint_every": None},
        "chunk_gla_bwd": {"checkpoint_every": draw.choice([None, CHUNK])},
        "chunk_gla_summary": {"backwards": draw.random() < 0.5},
    }[op]
    layouts = {}
    if draw.random() < 0.2:
        name = "left" if op == "chunk_gla_summary" else "q"
        shape = (dims["B"], dims["T"], dims["Hq"], dims["K"])
        layouts[name] = contiguous_layout(shape, bfloat16)._replace(aligned=draw.random() < 0.5)
    return OpCall(
        op=op,
        device=torch.device("cuda"),
        dtype=draw.choice([bfloat16, bfloat16, bfloat16, float16, float32]),
        dims=dims,
        gate_dtype=draw.choice([None, bfloat16, float32]),
        gate_form=draw.choice(["key", "key", "head", "constant"]),
        state_dtype=draw.choice([None, float32]),
        variable_length=packed,
        scalars=scalars,
        layouts=layouts,
        batch_invariant=None if op == "chunk_gla_summary" else draw.choice([None, None, 64, 1024]),
    )


def kernels_of(call, gpu):
    """Returns the names of all kernels with which the two Triton backends compute a call."""
    if call.op == "chunk_gla_summary":
        return {planned.states.name for cut in (False, True) for _, planned in summary.plan(call, gpu, cut)}
    module, names = (forward, set()) if call.op == "chunk_gla_fwd" else (backward, set())
    for cut in (False, True):
        for _, plan in module.plan(seen_by_kernels(call, gpu), gpu, cut):
            if call.op == "chunk_gla_fwd":
                kernels = [plan.outputs, plan.segments and plan.segments.states]
            else:
                kernels = [plan.gradients, *(x and x.states for x in (plan.entering, plan.leaving))]
            names |= {kernel.name for kernel in kernels if kernel is not None}
    return names


@pytest.mark.parametrize("op", ["chunk_gla_fwd", "chunk_gla_bwd", "chunk_gla_summary"])
@pytest.mark.parametrize(
    "architecture", [a for a in Architecture if a is not Architecture.SM90], ids=lambda architecture: architecture.name
)
def test_no_kernel_for_sm90_is_chosen_on_another_gpu(op, architecture):
    draw = random.Random(0)
    calls = [drawn_call(draw, op) for _ in range(200)]
    chosen = set().union(*(kernels_of(call, Gpu(architecture, 148)) for call in calls))
    on_hopper = set().union(*(kernels_of(call, H200) for call in calls))
    kernels = {
        "chunk_gla_fwd": {"forward", "states"},
        "chunk_gla_bwd": {"backward", "states"},
        "chunk_gla_summary": {"states"},
    }[op]
    for_sm90 = kernels | {f"{name}_{more}" for name in kernels - {"states"} for more in ("wide", "head")}
    for_sm90 |= {"backward_group"} & {f"{name}_group" for name in kernels}
    by_chunks = architecture is not Architecture.INTERPRETED
    suffix = {"backward": "_chunks" if by_chunks else ""}
    assert chosen == {f"general.{name}{suffix.get(name, '')}" for name in kernels}
    assert on_hopper == {f"general.{name}" for name in kernels} | {f"sm90.{name}" for name in for_sm90}


# ---- explain


def lines_of(explanation, backend):
    (chosen,) = (candidate for candidate in explanation.candidates if candidate.name == backend)
    assert chosen.refusal is None
    return list(chosen.kernels)


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("op", "shape", "options", "lines"),
    [
        ("chunk_gla", "8,4096,16,128,128", {}, ["kernel sm90.forward"]),
        (
            "chunk_gla",
            "8,4096,16,128,128",
            {"query_heads": 32, "gate": "head"},
            [
                "kernel sm90.forward_head",
                *(
                    f"not sm90.{name}: computes gates for each key [B, T, Hv, K]; g has one for each token and head "
                    "[B, T, Hv]"
                    for name in ("forward", "forward_wide")
                ),
            ],
        ),
        *(
            ("chunk_gla", f"8,4096,16,{K},{V}", heads, [f"kernel sm90.{name}", *lines])
            for K, V, name, lines in (
                (128, 128, "forward", []),
                (256, 256, "forward_wide", ["not sm90.forward: computes K up to 128; K is 256"]),
            )
            for heads in ({"query_heads": 32}, {"value_heads": 48})
        ),
        (
            "chunk_gla_bwd",
            "8,4096,16,128,128",
            {"value_heads": 48},
            ["kernel sm90.backward", "not sm90.backward_wide: computes heads with V above 128; V is 128"],
        ),
        ("chunk_gla_bwd", "8,4096,16,256,256", {"value_heads": 48}, ["kernel sm90.backward_wide"]),
        ("chunk_gla_bwd", "4,4096,4,256,512", {"dtype": "float16"}, ["kernel sm90.backward_wide"]),
        (
            "chunk_gla",
            "8,4096,16,256,128",
            {},
            ["kernel sm90.forward_wide", "not sm90.forward: computes K up to 128; K is 256"],
        ),
        (
            "chunk_gla_bwd",
            "8,4096,16,128,128",
            {},
            ["kernel sm90.backward", "not sm90.backward_wide: computes heads with V above 128; V is 128"],
        ),
        (
            "chunk_gla_bwd",
            "8,4096,16,64,64",
            {"dtype": "float32"},
            [
                "kernel general.backward",
                *(
                    f"not sm90.{name}: {FLOAT32}"
                    for name in ("backward_wide", "backward", "backward_group", "backward_head")
                ),
                "not general.backward_chunks: multiplies narrow blocks, which Triton 3.6 and 3.7 miscompile on Hopper",
            ],
        ),
    ],
)
def test_explain_names_the_kernel_and_why_it_is_no_other(op, shape, options, lines):
    pytest.importorskip("triton")
    explanation = explain_call(describe_call(op, shape, **options, assume="NVIDIA H200"), current_request())
    assert lines_of(explanation, "triton_fused") == lines
    printed = str(explanation).splitlines()
    at = next(i for i, line in enumerate(printed) if "triton_fused" in line)
    assert [line.strip() for line in printed[at + 1 : at + 1 + len(lines)]] == lines


@pytest.mark.usefixtures("fresh_registry")
def test_explain_names_the_kernel_for_states_and_the_tokens_of_segments():
    pytest.importorskip("triton")
    explanation = explain_call(describe_call("chunk_gla", "1,65536,8,128,128", assume="H200"), current_request())
    segmented = "kernel sm90.forward after sm90.states, in segments of 4096 tokens"
    assert lines_of(explanation, "parallel_scan") == [segmented]
    assert lines_of(explanation, "triton_fused") == ["kernel sm90.forward"]
    call = dataclasses.replace(explanation.call, dtype=float32)
    lines = lines_of(explain_call(call, current_request()), "parallel_scan")
    assert lines[0].startswith("kernel general.forward after general.states, in segments of ")
    assert lines[1:] == [f"not sm90.{name}: {FLOAT32}" for name in ("forward", "forward_wide", "forward_head")]


@pytest.mark.kernels
def test_explain_of_a_call_on_tensors_names_the_kernel(backend, device):
    x = gla_inputs(B=1, T=20, K=16, V=16, dtype=float32, device=device)
    lines = lines_of(gla.explain("chunk_gla", x.q, x.k, x.v, x.g, backend=backend), backend)
    assert lines[0] == "kernel general.forward"
    assert [line.split(": ")[0] for line in lines[1:]] == [
        f"not sm90.{name}" for name in ("forward", "forward_wide", "forward_head")
    ]
    assert all("needs Hopper" in line or FLOAT32 in line for line in lines[1:])
