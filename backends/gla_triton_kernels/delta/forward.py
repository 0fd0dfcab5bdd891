"""Plans a forward of the delta rule over sequences, and describes its launches.

On Hopper, one launch computes whole sequences (sm90/forward.py). Elsewhere, the first launch computes what all chunks
need beside the state (general/pairs.py). Then one pass over each sequence carries the state (general/forward.py). If
sequences are cut into segments, launches of the same kernel before it compute the states that segments reach from 0 and
their transitions, which are dense matrices, and a scan computes the states that enter segments. Planning imports no
Triton.

B batch   T tokens   N sequences   H heads of q and k   Hv value heads   K, V key and value width
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import checkpoint_dtype, checkpoint_rows
from gla_triton_kernels.chunks.results import copy_or_clear, with_copies
from gla_triton_kernels.delta import sm90
from gla_triton_kernels.delta.plan import PassParameters, in_segments, plan_pass
from gla_triton_kernels.gla.seen import forward_of_pool, written_apart
from gla_triton_runtime.architecture import gpu_of_call

if TYPE_CHECKING:
    from gla_triton_kernels.chunks.segments import Segments
    from gla_triton_kernels.chunks.slots import Slots
    from gla_triton_kernels.delta.general.pairs import Chunks
    from gla_triton_kernels.delta.tensors import Tensors
    from gla_triton_runtime.architecture import Gpu
    from gla_triton_runtime.launch import Launch


def explain(call: OpCall, cut: bool) -> list[str]:
    """Returns lines that name the kernels of a call, and give the reason why a better kernel refuses the call."""
    gpu = gpu_of_call(call)
    reason, (plan, _) = sm90.refusal(call, gpu), plan_forward(call, gpu, cut)
    segments = in_segments(plan.length)
    if reason is None:
        return [f"kernel delta.sm90.forward{segments}"]
    return [f"kernel delta.general.forward after delta.general.pairs{segments}", f"delta.sm90.forward {reason}"]


def plan_forward(call: OpCall, gpu: Gpu, cut: bool) -> tuple[PassParameters, sm90.Parameters | None]:
    """Returns the launch parameters of the general kernels of a forward, and those of the kernel for SM90.

    The second are None if the kernel for SM90 refuses the call.

    Args:
        cut: whether to cut sequences into segments if they do not fill the device.
    """
    plan = plan_pass(call, gpu, cut)
    if sm90.refusal(call, gpu) is not None:
        return plan, None
    plan = dataclasses.replace(plan, length=sm90.cut_length(call, gpu, cut))
    return plan, sm90.parameters(call, gpu, plan.length)


def prepare(call: OpCall, cut: bool) -> Callable[..., tuple]:
    """Plans a call, compiles its kernels, and returns the function that computes calls of the same signature.

    Args:
        cut: whether to cut sequences into segments if they do not fill the device.

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
    gpu = gpu_of_call(call)
    plan, kernel = plan_forward(call, gpu, cut)
    copied = frozenset() if kernel is None else sm90.copied(call)
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
                copy_or_clear(final_state, initial_state)
            # Tokens, if there are any, belong to no sequence.
            return o.zero_(), final_state, None if checkpoints is None else checkpoints.zero_()
        if final_state is not None and plan.length is not None and cu_seqlens is not None:
            copy_or_clear(final_state, initial_state)  # the final states of empty sequences, which have no segment
        x = Tensors(q, k, v, g, beta, initial_state, cu_seqlens, o, final_state, checkpoints)
        x = with_copies(x, copied) if copied else x
        if unrecorded := launched.replay(x, scale):
            unrecorded.start(launches(plan, kernel, x, scale, every, normalizer))
        return o, final_state, checkpoints

    return rehearsed(run, call)


def launches(
    plan: PassParameters,
    kernel: sm90.Parameters | None,
    x: Tensors,
    scale: float,
    every: int | None,
    normalizer: int | None,
    slots: Slots | None = None,
) -> list[Launch]:
    """Returns the launches that fill the results in x.

    Args:
        kernel: the parameters of the kernel for SM90; None if it refuses the call.
        every: tokens between checkpoints.
        normalizer: the number by which log sigma is divided if x.g holds logits; None if it holds log gates.
        slots: the slots that sequences read and write, if states are in a pool; sequences are then whole.
    """
    from gla_triton_kernels.chunks.padding import clear_unused_checkpoints
    from gla_triton_kernels.delta.general.forward import launch_outputs
    from gla_triton_kernels.delta.general.pairs import launch_chunks

    cleared = []
    if every is not None and x.checkpoints is not None and x.cu_seqlens is not None:
        cleared = clear_unused_checkpoints(x.checkpoints, x.cu_seqlens, every)
    segments = segments_of(plan.length, x.k, x.cu_seqlens, x.o, slots)
    if kernel is not None:
        from gla_triton_kernels.delta.sm90.forward import launch_outputs as launch_sm90

        return [*cleared, *segments.launches, *launch_sm90(kernel, x, segments, scale, every, normalizer)]
    chunks, computed = launch_chunks(plan.chunks, x, x.cu_seqlens, normalizer)
    entering, before = launch_entering(plan, x, chunks, segments)
    outputs = launch_outputs(plan.states, x._replace(entering=entering), chunks, segments, scale, every)
    return [*cleared, *computed, *segments.launches, *before, *outputs]


def segments_of(
    length: int | None, k: Tensor, cu_seqlens: Tensor | None, o: Tensor | None = None, slots: Slots | None = None
) -> Segments:
    """Returns the segments of sequences; a launch of theirs clears the rows of o that belong to no sequence.

    Args:
        length: tokens of a segment; None if sequences stay whole.
        slots: the slots of a pool that whole sequences read and write; None without a pool.
    """
    from gla_triton_kernels.chunks.cutting import uncut_length
    from gla_triton_kernels.chunks.segments import cut, whole

    B, T = k.shape[:2]
    if length is None:
        return whole(B, T, cu_seqlens, o, slots)
    return cut(B, T, length, uncut_length(length), cu_seqlens, o)


def launch_entering(
    plan: PassParameters, x: Tensors, chunks: Chunks, segments: Segments
) -> tuple[Tensor | None, list[Launch]]:
    """Returns the states that enter segments, except first ones, and the launches; None if sequences are whole."""
    from gla_triton_kernels.chunks.scan import launch_scan
    from gla_triton_kernels.chunks.segments import Recurrence
    from gla_triton_kernels.delta.general.forward import launch_summaries

    if plan.length is None:
        return None, []
    states, transitions, made = launch_summaries(plan.states, x, chunks, segments)
    recurrence = Recurrence(x.k, x.v, x.g, x.initial_state, None)
    return states, made + launch_scan(False, recurrence, segments, states, transitions, states, skip_first=True)


# ---- states in a pool


def explain_pool(call: OpCall, cut: bool) -> list[str]:
    """Returns the line that names the kernels of a call whose states are in a pool; see `explain`."""
    return explain(forward_of_pool(call), cut)


def pool_refusal(call: OpCall, cut: bool) -> str | None:
    """Returns why kernels do not read and write the pool of a call themselves; None if they do."""
    if call.dims["N"] == 0 or call.dims["T"] == 0:
        return "there are no tokens"
    plan, _ = plan_forward(forward_of_pool(call), gpu_of_call(call), cut)
    if plan.length is not None:  # a last segment might write a slot before the first reads it
        return "sequences are cut into segments"
    return None


def prepare_pool(call: OpCall, cut: bool) -> Callable[..., Tensor]:
    """Prepares a forward whose kernels read and write states in slots of a pool; see `prepare`.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.chunks.slots import Slots
    from gla_triton_kernels.delta.tensors import Tensors
    from gla_triton_runtime.prepared import Launches, rehearsed

    forward, pad, normalizer = forward_of_pool(call), call.scalars["pad_slot"], call.scalars["gate_normalizer"]
    plan, kernel = plan_forward(forward, gpu_of_call(call), cut)
    copied = frozenset() if kernel is None else sm90.copied(forward)
    is_apart = kernel is not None and written_apart(call)
    launched, launched_in_place = Launches(call.device), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        pool: Tensor,
        cu_seqlens: Tensor,
        read_slots: Tensor,
        write_slots: Tensor | None,
        scale: float,
        has_state: Tensor | None,
        checkpoint_offsets: Tensor | None,
        checkpoint_slots: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
        o = v.new_empty(v.shape) if out is None or is_apart else out
        in_place = write_slots is None or write_slots is read_slots
        write_slots = None if in_place else write_slots  # a tensor passed twice prevents replays
        named = (read_slots, write_slots, has_state, checkpoint_offsets, checkpoint_slots)
        checkpoints = None if checkpoint_slots is None else pool
        x = Tensors(q, k, v, g, beta, None, cu_seqlens, o, None, checkpoints, pool=pool)
        x, calls = with_copies(x, copied) if copied else x, launched_in_place if in_place else launched
        if unrecorded := calls.replay((*x[:5], pool, cu_seqlens, *named, o), scale):
            slots = Slots(*named, len(pool), pad)
            unrecorded.start(launches(plan, kernel, x, scale, None, normalizer, slots))
        return out.copy_(o) if out is not None and is_apart else o

    return rehearsed(run, call)
