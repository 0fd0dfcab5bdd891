"""Runs every kernel of a backend once, in each of its configurations, on small inputs, for a checker to watch:

    python tests/every_kernel.py BACKEND [general_chunks] [hopper_chunks] [general_backwards] [hopper_backwards]
        [summaries] [steps] [softmaxes] [attentions]
    compute-sanitizer --tool memcheck python tests/every_kernel.py triton_fused
    compute-sanitizer --tool racecheck python tests/every_kernel.py triton_fused general_chunks steps softmaxes
    compute-sanitizer --tool memcheck python tests/every_kernel.py triton_fused hopper_backwards 0/8  # one of 8

Run it without a checker first, so that it compiles undisturbed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import gla_core as gla
from gla_core.conformance.calls import output_shape
from gla_core.dispatch import registry
from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.request import current_request
from gla_core.workloads.inputs import GlaInputs, gla_inputs
from gla_triton_kernels import chunk_gla
from gla_triton_kernels.chunk_gla import backward as gradients
from gla_triton_kernels.chunk_gla import forward, summary
from gla_triton_kernels.chunk_gla.general import kernels as general
from gla_triton_kernels.runtime.architecture import Architecture, Gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHARE = [0, 1]
"""The number of this process's share of the calls of chunk_gla, and the number of shares."""
WIDTHS = ((16, 16), (64, 64), (64, 136), (128, 128), (128, 256), (256, 128), (512, 64))


def general_chunks() -> None:
    """Runs the kernels for every GPU, with each row of their table."""
    with general_kernels():
        chunks()
    general.TMA_ELEMENTS = 0
    with general_kernels():
        chunk(gla_inputs(B=1, T=70, H=2, K=128, V=128, dtype=torch.bfloat16, device="cuda"))


def hopper_chunks() -> None:
    """Runs the kernels for compute capability 9.0."""
    with hopper_kernels():
        chunks()


@contextmanager
def general_kernels() -> Iterator[None]:
    """Makes only the kernels for every GPU compute chunk_gla, in place of the backend in force."""
    backend = registry.get(current_request().choice("chunk_gla_fwd").names[0])
    plan = {"triton_fused": "plan_whole", "parallel_scan": "plan_cut"}[backend.name]
    ops = {
        "chunk_gla_fwd": chunk_gla.chunk_gla_fwd(by_general_kernels(getattr(forward, plan))),
        "chunk_gla_bwd": chunk_gla.chunk_gla_bwd(by_general_kernels(getattr(gradients, plan), Architecture.SM100)),
        "chunk_gla_summary": chunk_gla.chunk_gla_summary(
            by_general_kernels(getattr(summary, plan), Architecture.SM100)
        ),
    }
    name = f"{backend.name}_general"
    with gla.register(replace(backend, name=name, ops={**backend.ops, **ops})), gla.use_backend(name):
        yield


def by_general_kernels(plan: Callable[..., Any], architecture: Architecture | None = None) -> Callable[..., Any]:
    """Wraps a planning function to take the last kernel of a role, which is general and refuses no call.

    Args:
        architecture: the architecture to plan for, in place of the GPU's own. States that another kernel reads are
            general only if this is not SM90.
    """

    def planned(call: OpCall, gpu: Gpu, *kernels: Any) -> Any:
        gpu = gpu if architecture is None else Gpu(architecture, gpu.multiprocessors)
        return plan(call, gpu, *(each[-1:] for each in kernels))

    return planned


@contextmanager
def hopper_kernels() -> Iterator[None]:
    """Makes the kernels for compute capability 9.0 compute chunk_gla, also for short sequences."""
    forward.SM90_TOKENS = 0
    registry.changed()  # calls that were prepared with other plans are forgotten
    yield


def chunks() -> None:
    for x in chunk_calls():
        chunk(x)


def chunk_calls() -> Iterator[GlaInputs]:
    """Yields calls with every width, dtype and kind of gate; packed and grouped at the widths of models."""
    first, step = SHARE
    combinations = itertools.product(WIDTHS, ("mild", "-inf", "none"), dtypes())
    for (K, V), gates, dtype in itertools.islice(combinations, first, None, step):
        sizes = {"K": K, "V": V, "gates": gates, "dtype": dtype, "device": "cuda", "initial_state": True}
        yield gla_inputs(B=1, T=70, H=2, gate_dtype=torch.float32, **sizes)
        if K in (128, 256):
            yield gla_inputs(lengths=(70, 0, 3), **sizes)
            yield gla_inputs(B=1, T=10, G=2, **sizes)
        if K <= 256 and gates != "none":
            yield gla_inputs(B=1, T=70, H=1, R=2, gate_form="head", **sizes)
            yield gla_inputs(lengths=(70, 0, 3), R=2, gate_form="constant", **sizes)


def dtypes() -> tuple[torch.dtype, ...]:
    """Returns the dtypes whose kernels depend on the float32 precision; "highest" comes first and takes all dtypes."""
    return DTYPES if torch.get_float32_matmul_precision() == "highest" else (torch.float32,)


def chunk(x: GlaInputs) -> None:
    gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, True, x.cu_seqlens)


def general_backwards() -> None:
    """Computes gradients of the same calls with the kernels for every GPU."""
    with general_kernels():
        backwards()


def hopper_backwards() -> None:
    """Computes gradients of the same calls with the kernels for compute capability 9.0."""
    with hopper_kernels():
        backwards()


def backwards() -> None:
    """Computes gradients from checkpoints and from states built again.

    Calls with checkpoints have an initial and a final state, the others have neither.
    """
    for every in (64, 128):
        for x in chunk_calls():
            backward(x, every)
            if x.g is not None and x.k.shape[3] == 256:
                backward(x, every, "logsigmoid")


def backward(x: GlaInputs, checkpoint_every: int, gate: str | None = None) -> None:
    initial_state = x.initial_state if checkpoint_every == 64 else None
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, initial_state) if y is not None]
    states = (initial_state, initial_state is not None)
    given = {"gate": gate, "checkpoint_every": checkpoint_every}
    o, state, *_ = gla.chunk_gla(x.q, x.k, x.v, x.g, None, *states, x.cu_seqlens, **given)
    results = [y for y in (o, state) if y is not None]
    torch.autograd.grad(results, leaves, [torch.randn_like(y) for y in results])


def summaries() -> None:
    """Computes states from zero of the same calls in both directions, with both kinds of kernels."""
    for kernels in (general_kernels, hopper_kernels):
        with kernels():
            for x in chunk_calls():
                do = torch.randn(output_shape(x.q, x.v), device="cuda").to(x.q.dtype)
                for k, v, reverse in ((x.k, x.v, False), (x.q, do, True)):
                    function = gla.chunk_gla_gradient_summary if reverse else gla.chunk_gla_summary
                    function(k, v, x.g, x.cu_seqlens)


def steps() -> None:
    """Runs steps of few states and many, narrow and wide, in both dtypes."""
    for B, K, state_dtype in itertools.product((1, 40), (64, 128, 256, 512), (torch.float32, torch.bfloat16)):
        x = gla_inputs(B=B, T=1, H=4, K=K, V=K, dtype=torch.bfloat16, device="cuda", initial_state=True)
        rows = torch.arange(B, device="cuda") - 1
        token = (x.q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0])
        state = x.initial_state.to(state_dtype)
        gla.recurrent_gla_step(*token, state)
        gla.recurrent_gla_step(*token[:3], x.g[:, 0, :, 0], state)
        gla.recurrent_gla_step(*token, state, state_indices=rows, inplace=True)
        gla.recurrent_gla_layer_step(*token, state.clone(), x.v[:, 0], x.v[0, 0, 0], state_indices=rows)
        gla.recurrent_gla_steps(x.q, x.k, x.v, x.g, state.clone(), rows)
        rings = [y.expand(-1, 3, -1, -1).contiguous() for y in (x.k, x.v, x.g.float())]
        gla.recurrent_gla_replay(x.q, x.k, x.v, x.g, state.clone(), *rings, rows, rows % 3, rows % 2)


def softmaxes() -> None:
    """Runs softmaxes on chip and in two sweeps, along either dimension, of few and many rows, aligned or not."""
    for columns, dim, dtype in itertools.product((7, 1000, 16384, 20000, 20001, 40001), (0, 1), dtypes()):
        x = torch.randn(5, columns, device="cuda").to(dtype)
        gla.online_softmax(x if dim else x.reshape(columns, 5), dim)
    for columns, dtype in itertools.product((256, 1024), dtypes()):
        gla.online_softmax(torch.randn(2048, columns, device="cuda").to(dtype))


def attentions() -> None:
    """Runs softmax attention by the kernel for Hopper and by the general kernel, with TMA and with pointers."""
    for width, tokens, dtype, causal in itertools.product((16, 64, 128, 256), (3, 130), dtypes(), (True, False)):
        q = torch.randn(1, tokens, 2, width, device="cuda").to(dtype)
        k = torch.randn(1, tokens, 1, width + 1, device="cuda").to(dtype)[..., :-1]
        gla.softmax_attention(q, q, q, causal=causal)
        gla.softmax_attention(q, k, k, causal=causal)


KINDS = (
    general_chunks,
    hopper_chunks,
    general_backwards,
    hopper_backwards,
    summaries,
    steps,
    softmaxes,
    attentions,
)
PARTS = {run.__name__: run for run in KINDS}


if __name__ == "__main__":
    backend, *names = sys.argv[1:]
    if names and "/" in names[-1]:
        SHARE[:] = map(int, names.pop().split("/"))
    for module in (forward, gradients, summary):
        module.segment_length = lambda *sizes: 64  # else so few tokens would be one segment
    with gla.use_backend(backend):
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for name in names or PARTS:
                PARTS[name]()
                torch.cuda.synchronize()
    print("ran:", backend, *(names or PARTS))
