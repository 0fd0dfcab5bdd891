"""Plans a forward of the delta rule over sequences, and describes its launches.

The first launch computes what all chunks need beside the state (general/pairs.py). Then one pass over each sequence
carries the state (general/forward.py). Planning imports no Triton.

B batch   T tokens   N sequences   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import checkpoint_dtype, checkpoint_rows
from gla_triton_kernels.delta.plan import PassParameters, plan_pass
from gla_triton_runtime.architecture import gpu_of_call

if TYPE_CHECKING:
    from gla_triton_kernels.delta.tensors import Tensors
    from gla_triton_runtime.launch import Launch


def explain(call: OpCall) -> list[str]:
    """Returns the line that names the kernels of a call."""
    return ["kernel delta.general.forward after delta.general.pairs"]


def prepare(call: OpCall) -> Callable[..., tuple]:
    """Plans a call, compiles its kernels, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.delta.tensors import Tensors
    from gla_triton_runtime.prepared import Launches, rehearsed

    B, T, Hv, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "K", "V", "N"))
    every, normalizer = call.scalars["checkpoint_every"], call.scalars["gate_normalizer"]
    n = None if every is None else checkpoint_rows(T, N, every, call.variable_length)
    checkpoints_dtype = checkpoint_dtype(call.dtype)
    empty = N == 0 or T == 0
    plan = plan_pass(call, gpu_of_call(call))
    launched = Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        scale: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        checkpoint_every: int | None,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        o = v.new_empty(B, T, Hv, V)
        final_state = v.new_empty(N, Hv, K, V, dtype=torch.float32) if output_final_state else None
        checkpoints = None if n is None else v.new_empty(B, n, Hv, K, V, dtype=checkpoints_dtype)
        if empty:
            if final_state is not None:
                final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
            # Tokens, if there are any, belong to no sequence.
            return o.zero_(), final_state, None if checkpoints is None else checkpoints.zero_()
        x = Tensors(q, k, v, g, beta, initial_state, cu_seqlens, o, final_state, checkpoints)
        if not launched.replay(x, scale):
            launched.start(launches(plan, x, scale, every, normalizer), x, scale)
        return o, final_state, checkpoints

    return rehearsed(run, call)


def launches(plan: PassParameters, x: Tensors, scale: float, every: int | None, normalizer: int | None) -> list[Launch]:
    """Returns the launches that fill the results in x.

    Args:
        every: tokens between checkpoints.
        normalizer: the number by which log sigma is divided if x.g holds logits; None if it holds log gates.
    """
    from gla_triton_kernels.chunks.padding import clear_unused_checkpoints
    from gla_triton_kernels.chunks.segments import whole
    from gla_triton_kernels.delta.general.forward import launch_outputs
    from gla_triton_kernels.delta.general.pairs import launch_chunks

    B, T = x.k.shape[:2]
    cleared = []
    if every is not None and x.checkpoints is not None and x.cu_seqlens is not None:
        cleared = clear_unused_checkpoints(x.checkpoints, x.cu_seqlens, every)
    chunks, computed = launch_chunks(plan.chunks, x, x.cu_seqlens, normalizer)
    segments = whole(B, T, x.cu_seqlens, x.o)
    return [*cleared, *computed, *segments.launches, *launch_outputs(plan.states, x, chunks, segments, scale, every)]
