"""The kernels of a backward of chunk_gla and their launch parameters, without Triton or a GPU."""

from dataclasses import replace

import pytest
import torch

from gla_core.dispatch.backend import CHUNK, Layout, OpCall, contiguous_layout
from gla_triton_kernels.gla import backward
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_kernels.gla.seen import not_addressable
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import Architecture, Gpu

H200, A100 = Gpu(Architecture.SM90, 132), Gpu(Architecture.SM80, 108)


def call(*, dtype=torch.bfloat16, every=CHUNK, precision="highest", aligned=True, **dims):
    dims = {"B": 1, "T": 4096, "H": 4, "K": 128, "V": 128, **dims}
    dims = {"Hq": dims["H"], "Hv": dims["H"], "N": dims["B"], **dims}
    do = contiguous_layout((dims["B"], dims["T"], max(dims["Hq"], dims["Hv"]), dims["V"]), dtype)
    return OpCall(
        op="chunk_gla_bwd",
        device=torch.device("cuda"),
        dtype=dtype,
        dims=dims,
        gate_dtype=torch.float32,
        gate_form="key",
        scalars={"checkpoint_every": every},
        float32_matmul_precision=precision,
        layouts={} if aligned else {"do": do._replace(aligned=False)},
    )


def whole(call, gpu=H200):
    ((planned, plan),) = backward.plan(call, gpu, cut=False)
    assert planned is call
    return plan


@pytest.mark.parametrize(
    ("changes", "gpu"),
    [
        ({"dtype": torch.float32}, H200),
        ({"aligned": False}, H200),
        ({"K": 37}, H200),  # rows of q may be padded to multiples of 16 bytes, rows of dq are not
        ({"V": 100}, H200),
    ],
)
def test_the_general_kernel_takes_what_the_one_for_sm90_does_not(changes, gpu):
    for heads in ({}, {"Hq": 8}, {"Hv": 8}):
        assert whole(call(**heads)).gradients is sm90.BACKWARD
    plan = whole(call(**changes), gpu)
    assert plan.gradients is general.BACKWARD
    assert plan.parameters.BK >= 64 <= plan.parameters.BV


@pytest.mark.parametrize("changes", [{}, {"dtype": torch.float32}, {"Hq": 8}, {"K": 512, "V": 512}], ids=str)
@pytest.mark.parametrize(
    "architecture", [a for a in Architecture if a.name not in ("SM90", "INTERPRETED")], ids=lambda a: a.name
)
def test_chunks_side_by_side_where_products_take_operands_from_registers(architecture, changes):
    described, gpu = call(**changes), Gpu(architecture, 108)
    plan = whole(described, gpu)
    assert plan.gradients is general.BACKWARD_CHUNKS
    assert plan.leaving.length == CHUNK  # the gradient of the state that leaves each chunk is in memory
    assert backward.plan(described, gpu, cut=True) == [(described, plan)]
    assert max(plan.parameters.BK, plan.parameters.BV) <= general.CHUNK_BLOCK


@pytest.mark.parametrize("width", ["K", "V"])
def test_rows_of_16_bytes_with_gaps_between_them_are_none_in_a_gradient(width):
    """TMA could move such inputs, but not their gradients, which are contiguous."""
    changed = call(**{width: 37})
    layouts = {}
    for name in ("q", "k", "g", "v", "do"):
        B, T, H, size = (changed.dims[x] for x in ("B", "T", "H", "K" if name in "qkg" else "V"))
        strides = (T * H * 128, H * 128, 128, 1)
        layouts[name] = Layout((B, T, H, size), strides, torch.float32 if name == "g" else torch.bfloat16)
    changed = replace(changed, layouts=layouts)
    assert not_addressable(changed) is None
    assert whole(changed).gradients is general.BACKWARD


@pytest.mark.parametrize(
    ("K", "V", "kernel"),
    [
        (128, 128, sm90.BACKWARD),
        (128, 256, sm90.BACKWARD_WIDE),
        (64, 136, sm90.BACKWARD_WIDE),
        (256, 64, sm90.BACKWARD),
        (136, 128, sm90.BACKWARD),
        (256, 512, sm90.BACKWARD_WIDE),
        (512, 512, sm90.BACKWARD_WIDE),
    ],
    ids=lambda x: getattr(x, "name", None),
)
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, "highest"), (torch.float16, "highest"), (torch.float32, "high")], ids=str
)
def test_heads_of_several_blocks_take_the_kernel_for_wide_ones(K, V, kernel, dtype, precision):
    assert whole(call(K=K, V=V, dtype=dtype, precision=precision)).gradients is kernel
    assert whole(call(K=K, V=V, Hv=12, dtype=dtype, precision=precision)).gradients is kernel


@pytest.mark.parametrize(
    ("dtype", "precision", "parts"),
    [
        (torch.bfloat16, "highest", "bf16"),
        (torch.float16, "highest", "bf16x3"),
        (torch.float32, "high", "bf16x3"),
        (torch.float32, "highest", "bf16x6"),
    ],
)
def test_precision(dtype, precision, parts):
    assert whole(call(dtype=dtype, precision=precision), A100).parameters.precision == parts


@pytest.mark.parametrize("every", [None, CHUNK, 2 * CHUNK])
@pytest.mark.parametrize(
    ("changes", "gpu", "by_forward"),
    [
        ({}, H200, True),
        ({"Hv": 8}, H200, True),
        ({"Hq": 8}, H200, False),  # each query head would compute the states again
        ({"batch_invariant": 4096}, H200, False),
        ({"float32_matmul_precision": "highest", "dtype": torch.float32}, H200, False),
        ({}, A100, False),
    ],
    ids=str,
)
def test_states_are_computed_unless_checkpoints_hold_them(changes, gpu, by_forward, every):
    dims = {name: changes[name] for name in ("Hq", "Hv") if name in changes}
    facts = {name: x for name, x in changes.items() if name not in dims}
    plan = whole(replace(call(every=every, **dims), **facts), gpu)
    if every == CHUNK:
        assert plan.entering is plan.forward is None
    elif by_forward:
        assert plan.entering is None
        assert plan.forward.outputs is sm90.FORWARD
    else:
        assert plan.forward is None
        assert plan.entering.length == CHUNK


def test_few_heads_are_cut_and_many_are_not():
    few, many = (backward._segments(call(B=B), H200, backward.KERNELS).leaving for B in (1, 64))
    assert many is None
    assert few is not None
    assert few.length % CHUNK == 0
    assert 100 <= 4 * 4096 / few.length <= 264  # blocks: about one for each multiprocessor


def test_few_wide_heads_take_small_blocks_and_stay_whole():
    few, many = (call(B=B, T=8192, H=8, V=256) for B in (2, 16))
    assert (whole(few).parameters.BV, whole(many).parameters.BV) == (64, 128)
    assert backward.plan(few, H200, cut=True) == [(few, whole(few))]
