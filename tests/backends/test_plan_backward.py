"""Which kernels a backward of chunk_gla takes, and with which launch parameters: without Triton or a GPU."""

from __future__ import annotations

import pytest
import torch

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunk_gla.plan import Kernel
from gla_triton_kernels.chunk_gla.plan_backward import CHUNK, plan_segments_backward, plan_whole_sequences
from gla_triton_kernels.runtime.architecture import Architecture, Gpu

H200, A100 = Gpu(Architecture.SM90, 132), Gpu(Architecture.SM80, 108)


def call(*, dtype=torch.bfloat16, every=CHUNK, precision="highest", **dims):
    dims = {"B": 1, "T": 4096, "H": 4, "K": 128, "V": 128, **dims}
    dims = {"Hq": dims["H"], "N": dims["B"], **dims}
    return OpCall(
        op="chunk_gla_bwd",
        device=torch.device("cuda"),
        dtype=dtype,
        dims=dims,
        gate_dtype=torch.float32,
        scalars={"checkpoint_every": every},
        float32_matmul_precision=precision,
    )


@pytest.mark.parametrize(
    ("sizes", "gpu", "aligned"),
    [
        ({"dtype": torch.float16}, H200, True),
        ({}, H200, False),
        ({"K": 37}, H200, True),  # rows of 16 bytes in q, with gaps between them, are none in dq
        ({"V": 100}, H200, True),
        ({}, A100, True),
    ],
)
def test_the_general_kernel_takes_what_the_one_for_sm90_does_not(sizes, gpu, aligned):
    for heads in (4, 8):
        assert plan_whole_sequences(call(Hq=heads), H200, True).gradients.kernel is Kernel.BACKWARD_SM90
    gradients = plan_whole_sequences(call(**sizes), gpu, aligned).gradients
    assert gradients.kernel is Kernel.BACKWARD
    assert gradients.BK >= 64 <= gradients.BV


@pytest.mark.parametrize(
    ("K", "V", "kernel"),
    [
        (128, 128, Kernel.BACKWARD_SM90),
        (128, 256, Kernel.BACKWARD_SM90_WIDE),
        (256, 64, Kernel.BACKWARD_SM90_WIDE),
        (256, 512, Kernel.BACKWARD_SM90_WIDE),
        (512, 512, Kernel.BACKWARD_SM90),  # which adds up what its blocks give
    ],
)
def test_heads_of_several_blocks_take_the_kernel_for_wide_ones(K, V, kernel):
    assert plan_whole_sequences(call(K=K, V=V), H200, True).gradients.kernel is kernel


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
    assert plan_whole_sequences(call(dtype=dtype, precision=precision), A100, False).gradients.precision == parts


@pytest.mark.parametrize("every", [None, CHUNK, 2 * CHUNK])
def test_states_are_built_unless_checkpoints_hold_them(every):
    entering = plan_whole_sequences(call(every=every), H200, True).entering
    assert (entering is None) == (every == CHUNK)
    assert entering is None or entering.length == CHUNK


def test_few_heads_are_cut_and_many_are_not():
    few, many = (plan_segments_backward(call(B=B), H200, True).leaving for B in (1, 64))
    assert many is None
    assert few is not None
    assert few.length % CHUNK == 0
    assert 100 <= 4 * 4096 / few.length <= 264  # blocks: about one for each multiprocessor
