"""Mamba-2's scan on Triton's kernels: its time steps, and which calls the kernel that reads them computes."""

import dataclasses

import pytest
import torch

from gla_core.cli.calls import describe_call
from gla_core.ops.gla.ssd import time_steps

pytest.importorskip("triton")
from gla_triton_kernels.gla import ssd
from gla_triton_kernels.gla.shared.time_steps import launch_time_steps
from gla_triton_runtime.launch import start


def call(shape="4,4096,1,128,64", dtype="bfloat16", **changes):
    described = describe_call("chunk_ssd_fwd", shape, dtype=dtype, value_heads=80, assume="NVIDIA H200")
    return dataclasses.replace(described, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": "float16"}, None),
        ({"shape": "4,4096,1,256,128"}, None),
        ({"dtype": "float32"}, "reads time steps with bfloat16 or float16; q is float32"),
        ({"batch_invariant": 64}, "computes no batch invariance"),
        ({"shape": "4,0,1,128,64"}, "there are no tokens"),
        ({"shape": "4,4096,1,128,60"}, "copies x to a width that TMA can move"),
        ({"shape": "1,64,1,128,64"}, "computes by general.forward, which reads no time steps"),
        ({"shape": "4,64,1,128,64"}, None),  # its blocks fill the GPU
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", [False, True])
def test_calls_of_the_kernel_that_reads_time_steps(changes, reason, cut):
    assert ssd.refusal(call(**changes), cut) == reason


@pytest.mark.kernels
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_time_steps(device, softplus, bias):
    shape, heads = (2, 70, 5), torch.randn(2, 5, device=device)
    dt = torch.cat([5 * torch.randn(2, 69, 5), torch.tensor([-60.0, -20.0, 0.0, 19.0, 90.0]).expand(2, 1, 5)], 1)
    dt = dt.to(device).transpose(0, 1).contiguous().transpose(0, 1)
    A, bias = -heads[0].abs(), heads[1] if bias else None
    delta, g = (torch.empty(shape, device=device) for _ in range(2))
    start(launch_time_steps(dt, A, bias, delta, g, 1e-30, 60.0, softplus))
    expected = time_steps(dt, bias, softplus, torch.float64).clamp(1e-30, 60.0)
    torch.testing.assert_close(delta, expected.float(), rtol=2e-6, atol=0)
    torch.testing.assert_close(g, (expected * A).float(), rtol=2e-6, atol=0)
