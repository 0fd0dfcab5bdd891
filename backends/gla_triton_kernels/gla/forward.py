"""Plans a forward over sequences, and describes its launches.

    A_ts = sum over d of q_td k_sd exp(g_{s+1,d} + .. + g_td)  for s <= t      o_t = scale * sum over s of A_ts v_s

This is the output without an initial state; general/forward.py gives the chunked form. If sequences are cut into
segments, the first launches compute the states that enter segments. Then a kernel computes the outputs. Planning
imports no Triton; the functions that describe launches import it when they are first called.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   K, V key and value width
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import CHUNK, OpCall
from gla_core.dispatch.tensors import checkpoint_dtype, checkpoint_rows
from gla_triton_kernels.chunks.cutting import (
    INTERPRETED_SEGMENT,
    are_cheaper,
    by_rows,
    most_segments,
    segment_length,
    uncut_length,
)
from gla_triton_kernels.chunks.kernel import ForwardPlan, OutputKernel, Parameters, SegmentPlan, first_able, refusals
from gla_triton_kernels.chunks.results import with_copies
from gla_triton_kernels.gla.cost import forward_prices
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_kernels.gla.seen import (
    copied_for_invariance,
    forward_of_pool,
    seen_by_kernels,
    seen_shape,
    written_apart,
)
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import Architecture, Gpu, gpu_of_call

if TYPE_CHECKING:
    from gla_triton_kernels.chunks.slots import Slots
    from gla_triton_kernels.gla.tensors import Tensors
    from gla_triton_runtime.launch import Launch

KERNELS: Sequence[OutputKernel] = (sm90.FORWARD, sm90.FORWARD_WIDE, sm90.FORWARD_HEAD, general.FORWARD)
"""The kernels that compute outputs, best first."""

SM90_TOKENS = 96
"""The least number of tokens T for which the kernels for SM90 are faster even if blocks do not fill the GPU; up to
K = 64, the limit is twice this number. T counts the tokens of one sequence of a batch, or of all packed sequences
together. With few packed tokens, bfloat16 would also exceed the error that the conformance kit allows."""
FEW_TERMS = 16
"""Up to this number of tokens, errors of bfloat16 do not average out, so the general kernel multiplies TF32."""
SM90_WIDE_TOKENS = 32
"""The least mean length of packed sequences, in tokens, for which the kernels for SM90 are faster if K is above 128.

Up to K = 128 there is no such limit: short sequences take the same kernel as the long sequences of their call. The
general kernel would take several times as long for a long sequence among short ones. For short sequences it is seldom
faster: by up to 1.6 times at K = V = 64 with at least 1,000 blocks of 48 tokens, and elsewhere by a few per cent at
most.
"""

Plans = list[tuple[OpCall, ForwardPlan]]
"""The plans of the rows of a batch, in order, each with the call of its rows."""


# ---- plans


def plan(call: OpCall, gpu: Gpu, cut: bool, kernels: Sequence[OutputKernel] = KERNELS) -> Plans:
    """Plans the rows of a batch: which kernels compute them, and in which segments.

    Args:
        cut: whether to cut sequences into segments, unless this takes longer on the device. If not, sequences stay
            whole, and one pass computes them.
        kernels: the kernels to choose from, best first.
    """
    if not cut:
        return [(call, _whole(call, gpu, kernels))]
    return by_rows(
        call,
        gpu,
        *first_able(kernels, call, gpu).blocks(call, gpu),
        lambda rows: _whole(rows, gpu, kernels),
        lambda rows: _segments(rows, gpu, kernels),
        forward_prices,
    )


def _whole(call: OpCall, gpu: Gpu, kernels: Sequence[OutputKernel]) -> ForwardPlan:
    """Plans sequences that stay whole. If they are short, the general kernel computes them, or the cheaper of two."""
    able = _by(first_able(kernels, call, gpu), call, gpu)
    if not _are_short(call):
        return able
    general = _by(kernels[-1], call, gpu)
    decides = _prices_decide(call) and call.dims["N"] * able.outputs.blocks(call, gpu)[0] >= gpu.multiprocessors
    return able if decides and are_cheaper([(call, able)], [(call, general)], gpu, forward_prices) else general


def _by(kernel: OutputKernel, call: OpCall, gpu: Gpu) -> ForwardPlan:
    """Returns the plan by which a kernel computes whole sequences."""
    return ForwardPlan(kernel, kernel.parameters(call, gpu, call.dims["N"]))


def _prices_decide(call: OpCall) -> bool:
    """Returns whether prices tell which kernel is faster for short sequences whose blocks fill the GPU.

    Measurements contradict them for packed sequences with K up to 256, for K = V = 64, where the general kernel is up
    to 1.7 times as fast, and for less than a chunk of up to 128 keys, where it is up to 1.8 times as fast.
    """
    T, K, V = (call.dims[name] for name in ("T", "K", "V"))
    few = FEW_TERMS if K > 128 else CHUNK - 1
    return K > 256 or (few < T and max(K, V) > 64 and not call.variable_length)


def _are_short(call: OpCall) -> bool:
    """Returns whether sequences have so few tokens that the general kernel may be faster than those for SM90.

    With more than 128 keys, the general kernel is slower for any number of tokens, unless each key has its own gate.
    For query heads that share a state, it is slower once it multiplies bfloat16, too.
    """
    T, K, N = (call.dims[name] for name in ("T", "K", "N"))
    if call.dims["Hq"] > call.dims["H"] and not call.variable_length:
        return T <= FEW_TERMS
    if K > 128 and (call.gate_form in ("constant", "head") or call.gate_dtype is None):
        return False
    if SM90_TOKENS * (1 if K > 64 else 2) > T:
        return True
    return call.variable_length and K > 128 and T / max(N, 1) < SM90_WIDE_TOKENS


def _segments(call: OpCall, gpu: Gpu, kernels: Sequence[OutputKernel]) -> ForwardPlan:
    if call.batch_invariant is not None and call.dims["T"] > 0:
        return _invariant(call, gpu, kernels, call.batch_invariant)
    # Where sequences are cut, the scan reads and writes the pool, so kernels that refuse it can compute the outputs.
    kernel = first_able(kernels, replace(call, given=call.given - {"pool"}), gpu)
    if call.variable_length and _are_short(call):  # most segments are short sequences
        kernel = _whole(call, gpu, kernels).outputs

    def plan_segments(length: int) -> ForwardPlan:
        return _in_segments(call, gpu, kernels, kernel, length)

    length = segment_length(call, gpu, *kernel.blocks(call, gpu), plan_segments, forward_prices)
    return plan_segments(min(length, INTERPRETED_SEGMENT) if gpu.architecture is Architecture.INTERPRETED else length)


def _in_segments(
    call: OpCall, gpu: Gpu, kernels: Sequence[OutputKernel], kernel: OutputKernel, length: int
) -> ForwardPlan:
    """Plans segments of `length` tokens. If `length` is T or more, sequences stay whole."""
    T, N = call.dims["T"], call.dims["N"]
    if length >= T:
        return _whole(call, gpu, kernels)
    parameters = kernel.parameters(call, gpu, most_segments(N, T, length, call.variable_length))
    return ForwardPlan(kernel, parameters, segments_before(call, gpu, kernel, parameters, length, uncut_length(length)))


def _invariant(call: OpCall, gpu: Gpu, kernels: Sequence[OutputKernel], tokens: int) -> ForwardPlan:
    """Plans a call whose results must not depend on the batch. Segments have `tokens` tokens.

    A user may divide a sequence into calls at multiples of `tokens` and must get the same bits. The state that leaves
    one call is the state that enters the next segment of the undivided sequence, which a scan computes. So a scan
    computes every final state as well.
    """
    kernel, T, N = first_able(kernels, call, gpu), call.dims["T"], call.dims["N"]
    whole = tokens >= T and not call.scalars["output_final_state"]
    segments = N if whole else most_segments(N, T, tokens, call.variable_length)
    parameters = kernel.parameters(call, gpu, segments)
    before = None if whole else segments_before(call, gpu, kernel, parameters, tokens, tokens)
    return ForwardPlan(kernel, parameters, before)


def segments_before(
    call: OpCall, gpu: Gpu, kernel: OutputKernel, parameters: Parameters, length: int, uncut: int
) -> SegmentPlan:
    """Plans the states that enter segments. `kernel` computes the outputs from them; see `SegmentPlan`."""
    states = kernel.states
    overlap = gpu.facts.overlaps_kernels
    return SegmentPlan(length, uncut, states, states.parameters(call, gpu, length, parameters), overlap)


def states_of_segments(call: OpCall, gpu: Gpu, length: int, uncut: int) -> SegmentPlan:
    """Plans the states of segments, or the gradients of these states, for a call that computes no outputs.

    The gradient of a state that query heads share is a sum over them, which only the general kernel computes.
    """
    kernel = general.FORWARD if call.dims["Hq"] > call.dims["H"] else first_able(KERNELS, call, gpu)
    return segments_before(call, gpu, kernel, kernel.parameters(call, gpu, call.dims["N"]), length, uncut)


def plan_checkpoints(call: OpCall, gpu: Gpu) -> ForwardPlan | None:
    """Plans a forward that computes the checkpoints of a backward; None if states of chunks take less time.

    The kernels for SM90 write checkpoints as they compute the chunks of a sequence. A scan of the states of all chunks
    would move each state three times in float32. But its bits depend neither on the batch nor on other segments, and it
    computes a state that query heads share once.
    """
    if call.batch_invariant is not None or call.dims["Hq"] > call.dims["H"]:
        return None
    if _whole(call, gpu, KERNELS).outputs is general.FORWARD:
        return None
    return _segments(call, gpu, KERNELS)


def explain(call: OpCall, cut: bool) -> list[str]:
    """Returns lines that name the kernels of a call, and give the reasons why better kernels refuse the call."""
    gpu = gpu_of_call(call)
    seen = seen_by_kernels(call, gpu)
    chosen = plan(seen, gpu, cut)[0][1]
    line = f"kernel {chosen.outputs.name}"
    if chosen.segments is not None:
        line += f" after {chosen.segments.states.name}, in segments of {chosen.segments.length} tokens"
    return [line, *refusals(KERNELS, chosen.outputs, seen, gpu)]


def explain_pool(call: OpCall, cut: bool) -> list[str]:
    """Returns the lines of the forward between a read and a write of the pool; see `explain`."""
    return explain(forward_of_pool(call), cut)


# ---- launches


def prepare(call: OpCall, cut: bool, kernels: Sequence[OutputKernel] = KERNELS) -> Callable[..., tuple]:
    """Plans a call, compiles its kernels, and returns the function that computes calls of the same signature.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.chunks.widths import widened
    from gla_triton_kernels.gla.tensors import WRITTEN, Tensors, plans_with_rows
    from gla_triton_runtime.prepared import Launches, rehearsed

    gpu = gpu_of_call(call)
    seen, copied = seen_by_kernels(call, gpu), copied_for_invariance(call)
    B, T, Hq, Hv, K, V, N = (call.dims[name] for name in ("B", "T", "Hq", "Hv", "K", "V", "N"))
    Ho = max(Hq, Hv)
    every, normalizer = call.scalars["checkpoint_every"], call.scalars["gate_normalizer"]
    n = None if every is None else checkpoint_rows(T, N, every, call.variable_length)
    checkpoints_dtype = checkpoint_dtype(call.dtype)
    empty = N == 0 or (T == 0 and not call.scalars["output_final_state"])
    plans = [] if empty else plan(seen, gpu, cut, kernels)
    same_widths = (seen.dims["K"], seen.dims["V"]) == (K, V)
    shape_of = functools.partial(seen_shape, K=seen.dims["K"], V=seen.dims["V"])

    def describe(tensors: tuple[Any, ...], scale: float) -> list[Launch]:
        x = Tensors(*tensors)
        wide, before, after = (x, [], []) if same_widths else widened(x, shape_of, WRITTEN)
        plans_of_rows = plans_with_rows(plans, wide)
        computed = [each for plan, rows in plans_of_rows for each in launches(plan, rows, scale, every, normalizer)]
        return [*before, *computed, *after]

    launched = Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        checkpoint_every: int | None,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        o = v.new_empty(B, T, Ho, V)
        final_state = v.new_empty(N, Hv, K, V, dtype=torch.float32) if output_final_state else None
        checkpoints = None if n is None else v.new_empty(B, n, Hv, K, V, dtype=checkpoints_dtype)
        if empty:
            # Tokens, if there are any, belong to no sequence.
            return o.zero_(), final_state, None if checkpoints is None else checkpoints.zero_()
        x = (q, k, v, g, initial_state, cu_seqlens, o, final_state, checkpoints)
        x = with_copies(Tensors(*x), copied) if copied else x
        if unrecorded := launched.replay(x, scale):
            unrecorded.start(describe(x, scale))
        return o, final_state, checkpoints

    return rehearsed(run, call)


def prepare_pool(call: OpCall, cut: bool, kernels: Sequence[OutputKernel] = KERNELS) -> Callable[..., Tensor]:
    """Prepares a forward whose kernels read and write states in slots of a pool; see `prepare`.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.chunks.slots import Slots
    from gla_triton_kernels.gla.tensors import Tensors
    from gla_triton_runtime.prepared import Launches, rehearsed

    forward = forward_of_pool(call)
    copied, pad, normalizer = copied_for_invariance(forward), call.scalars["pad_slot"], call.scalars["gate_normalizer"]
    plans = [] if call.dims["N"] == 0 else plan(forward, gpu_of_call(call), cut, kernels)
    is_apart = written_apart(call) and plans != []

    def describe(tensors: tuple[Any, ...], scale: float) -> list[Launch]:
        q, k, v, g, pool, cu_seqlens, read, write, has_state, before, kept, o = tensors
        slots = Slots(read, write, has_state, before, kept, len(pool), pad)
        x = Tensors(q, k, v, g, None, cu_seqlens, o, None, None if kept is None else pool, pool=pool)
        ((_, planned),) = plans
        return launches(planned, x, scale, None, normalizer, slots)

    launched, launched_in_place = Launches(call.device), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
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
        shape = (*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3])
        o = v.new_empty(shape) if out is None or is_apart else out
        if not plans:
            return o.zero_()  # tokens, if there are any, belong to no sequence
        in_place = write_slots is None or write_slots is read_slots
        write_slots = None if in_place else write_slots  # a tensor passed twice prevents replays
        if copied:
            q, k, v, g, *_ = with_copies(Tensors(q, k, v, g, None, cu_seqlens, o, None), copied)
        slots = (read_slots, write_slots, has_state, checkpoint_offsets, checkpoint_slots)
        x, calls = (q, k, v, g, pool, cu_seqlens, *slots, o), launched_in_place if in_place else launched
        if unrecorded := calls.replay(x, scale):
            unrecorded.start(describe(x, scale))
        return out.copy_(o) if out is not None and is_apart else o

    return rehearsed(run, call)


def launches(
    plan: ForwardPlan,
    x: Tensors,
    scale: float,
    every: int | None,
    normalizer: int | None = None,
    slots: Slots | None = None,
) -> list[Launch]:
    """Returns the launches that fill the results in x.

    Args:
        every: tokens between checkpoints.
        normalizer: the number by which log sigma is divided if x.g holds logits; None if it holds log gates.
        slots: the slots that sequences read and write, if states are in a pool.
    """
    from gla_triton_kernels.chunks.entering import launch_entering
    from gla_triton_kernels.chunks.padding import clear_unused_checkpoints
    from gla_triton_kernels.chunks.segments import Recurrence, whole

    B, T = x.q.shape[:2]
    o = x.o if T > 0 else None
    cleared = []
    if every is not None and x.checkpoints is not None and x.cu_seqlens is not None:
        cleared = clear_unused_checkpoints(x.checkpoints, x.cu_seqlens, every)
    if plan.segments is None:
        segments = whole(B, T, x.cu_seqlens, o, slots)
        before, each = [*segments.launches], x
    else:
        in_slots = x.pool is not None
        ends = (x.pool, x.pool) if in_slots else (x.initial_state, x.final_state)
        states = Recurrence(x.k, x.v, x.g, *ends, normalizer=normalizer, in_slots=in_slots, factor=x.v_factor)
        entering, segments, before = launch_entering(
            plan.segments, states, x.v.shape[2], x.cu_seqlens, skip_first=not in_slots, o=o, slots=slots
        )
        each = x._replace(entering=entering, final_state=None)
    return cleared + before + plan.outputs.load()(plan, each, segments, scale, every, normalizer)
