"""Computes the states that enter segments, by a scan over the segments of each sequence.

Let S_i be the state of segment i from a zero initial state, and D_i its transition. The scan goes through the segments
of a sequence in order and starts from the initial state:

    running, S_i = D_i running + S_i, running

so that S_i becomes the state that enters segment i. A transition is diagonal, a factor for each key, or a dense matrix
[K, K]. A scan of gradients goes from the last segment to the first and starts from the gradient of the final state. It
computes the gradients of the states that leave segments. It takes the transpose of dense transitions.

If packed sequences that stay whole need no result, only the sequences that are cut are scanned. The number of cut
sequences is known only on the device, so the grid is persistent: each program scans blocks of states in a loop.

B batch   T tokens   N sequences   I segments   Hv value heads   K, V key and value width
BK, BV keys and values of a block of a state   GROUP segments read at once
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.chunks.segments import Recurrence, Segments, cut_of, in_state, segment_at, state_strides
from gla_triton_runtime.architecture import interpreted
from gla_triton_runtime.launch import Launch, overlapping
from gla_triton_runtime.sizes import power_of_two

PROGRAMS = 528
"""The maximum number of programs that scan cut packed sequences: four for each multiprocessor of an H200, because the
registers suffice for four."""
BLOCK, GROUP = (1024, 4) if interpreted() else (256, 16)
"""Elements of a block of a state, and segments read at once. The interpreter's time counts blocks and segments."""
DENSE_VALUES = 16
"""Values of a block with dense transitions, the fewest of a matrix product. A block has all keys."""


def launch_scan(
    overlap: bool,
    x: Recurrence,
    segments: Segments,
    S: Tensor,
    D: Tensor | None,
    out: Tensor | None,
    skip_first: bool = False,
    decay: Tensor | None = None,
) -> list[Launch]:
    """Returns the launch that computes entering states from the states S of segments, and fills x.after.

    It does not write the states of empty segments.

    Args:
        overlap: whether the scan may start while its predecessor ends.
        S: states of the segments from a zero initial state, [I, Hv, K, V].
        D: transitions of the segments, [I, Hv, K] or [I, Hv, K, K]; None without gates.
        out: receives the entering states, in any dtype; it may be S. None if only x.after is needed.
        skip_first: if True, the state that enters the first segment of a sequence is not written; it is x.before, or 0.
        decay: receives the transition of each sequence, [N, Hv, K] or [N, Hv, K, K]: D composed over its segments. It
            requires D.
    """
    _, Hv, K, V = S.shape
    dense = D is not None and D.ndim == 4
    N = x.left.shape[0] if segments.cu_seqlens is None else len(segments.cu_seqlens) - 1
    BV = DENSE_VALUES if dense else min(128, power_of_two(V))
    BK = power_of_two(K, 16) if dense else min(BLOCK // BV, power_of_two(K))
    blocks = ceil_div(K, BK) * ceil_div(V, BV) * Hv  # blocks of the states of a sequence
    only_cut = skip_first and x.after is None and segments.order is not None
    programs = min(PROGRAMS, segments.most * blocks) if only_cut else N * blocks
    if programs == 0:
        return []
    arguments = {
        "S_ptr": S,
        "D_ptr": D,
        "out_ptr": out,
        "cu_seqlens_ptr": segments.cu_seqlens,
        "order_ptr": segments.order if only_cut else None,
        "counts_ptr": segments.counts if only_cut else None,
        "before_ptr": x.before,
        "after_ptr": x.after,
        "slots_ptr": segments.slots if x.in_slots else None,
        "decay_ptr": decay,
        "segment": segments.length,
        "uncut": segments.uncut,
        "segments": segments.per_sequence,
        **state_strides("before_", x.before),
        **state_strides("after_", x.after),
        "N": N,
        "Hv": Hv,
        "K": K,
        "V": V,
        "BK": BK,
        "BV": BV,
        "GROUP": 1 if dense else min(GROUP, power_of_two(segments.per_sequence or GROUP)),
        "DENSE": dense,
        "PRECISION": "ieee" if interpreted() else "bf16x6",  # of products with dense transitions
        "BACKWARDS": x.backwards,
        "SKIP_FIRST": skip_first,
        "OVERLAPS": overlap,
    }
    # A dense transition of 128 keys takes 64 KiB, so none is loaded ahead.
    options = {"num_warps": 8, "num_stages": 1} if dense else {"num_warps": 4}
    return [Launch(_scan_kernel, (programs, 1, 1), arguments, {**options, **overlapping(overlap)})]


@triton.jit
def apply(transition, state, DENSE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns a state [BK, BV] after a transition, [BK, BK] if DENSE, else [BK]."""
    if DENSE:
        return tl.dot(transition, state, input_precision=PRECISION)
    else:  # noqa: RET505 -- one branch is compiled
        return state * tl.expand_dims(transition, 1)


@triton.jit
def compose(later, earlier, DENSE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the transition that is `earlier` followed by `later`, all [BK, BK] if DENSE, else [BK]."""
    if DENSE:
        return tl.dot(later, earlier, input_precision=PRECISION)
    else:  # noqa: RET505 -- one branch is compiled
        return earlier * later


@triton.jit
def _elements(i_k, K: tl.constexpr, DENSE: tl.constexpr):
    """Returns the offsets of the elements of a transition, whether they exist, and the identity.

    Args:
        i_k: keys [BK], all keys if DENSE.
    """
    if DENSE:
        row, column = i_k[:, None], i_k[None, :]
        return row * K + column, (row < K) & (column < K), (row == column).to(tl.float32)
    else:  # noqa: RET505 -- one branch is compiled
        return i_k, i_k < K, tl.full(i_k.shape, 1.0, tl.float32)


@triton.jit(
    do_not_specialize=["segment", "uncut", "segments", "N", "Hv"], do_not_specialize_on_alignment=["cu_seqlens_ptr"]
)
def _scan_kernel(
    S_ptr,  # [I, Hv, K, V]
    D_ptr,  # [I, Hv, K], [I, Hv, K, K] if DENSE, or None
    out_ptr,  # [I, Hv, K, V] or None
    cu_seqlens_ptr,  # [N+1] or None
    order_ptr,  # [I, 5], or None if all sequences are scanned
    counts_ptr,  # [2], or None if order is None
    before_ptr,  # [N, Hv, K, V], or [P, Hv, K, V] with slots, or None
    after_ptr,  # like before_ptr
    slots_ptr,  # [N, 4], or None if state n belongs to sequence n
    decay_ptr,  # [N, Hv, K], [N, Hv, K, K] if DENSE, or None
    segment,  # tokens of a segment
    uncut,  # tokens of the longest packed sequence that is not cut
    segments,  # segments of a sequence of a batch
    before_n,
    before_h,
    before_k,
    before_v,
    after_n,
    after_h,
    after_k,
    after_v,
    N,
    Hv,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    DENSE: tl.constexpr,
    PRECISION: tl.constexpr,
    BACKWARDS: tl.constexpr,
    SKIP_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Scans blocks [BK, BV] of the states of one head of one sequence, and reads the states of GROUP segments at once.

    If `order_ptr` is given, only cut sequences are scanned; the order begins with their first segments.
    """
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    SIZE: tl.constexpr = K * K if DENSE else K  # pyright: ignore  # elements of a transition
    if OVERLAPS:  # the results of the previous kernel are complete only after the wait
        gdc_launch_dependents()
        gdc_wait()
    sequences = N if counts_ptr is None else tl.load(counts_ptr + 1)
    for item in range(tl.program_id(0), sequences * Hv * (blocks_k * blocks_v), tl.num_programs(0)):
        nh = item // (blocks_v * blocks_k)
        n, h = nh // Hv, nh % Hv
        v0 = item % blocks_v * BV  # pyright: ignore
        i_v = v0 + tl.arange(0, BV)  # [BV]
        i_k = item // blocks_v % blocks_k * BK + tl.arange(0, BK)  # [BK]
        inside = (i_k < K)[:, None] & (i_v < V)[None, :]  # [BK, BV]
        element, exists, identity = _elements(i_k, K, DENSE)  # [BK], or [BK, BK] if DENSE
        block = i_k[:, None] * V + i_v[None, :]  # [BK, BV]
        if cu_seqlens_ptr is None:
            first, count = n * segments, segments
        elif order_ptr is not None:
            first, start, _, _, end = segment_at(order_ptr, n)
            n = first - start // segment
            nh, count = n * Hv + h, tl.cdiv(end - start, segment)
        else:
            _, _, first, followed, rest = cut_of(cu_seqlens_ptr, n, N, segment, uncut)
            count = followed + (rest > 0).to(tl.int32)
        step: tl.constexpr = -1 if BACKWARDS else 1  # pyright: ignore
        if BACKWARDS:
            first += count - 1
        built = count if after_ptr is not None else count - 1  # only x.after needs the state of the last segment
        read, write = n, n
        if slots_ptr is not None:
            read, write = tl.load(slots_ptr + n * 4), tl.load(slots_ptr + n * 4 + 1)
        running = tl.zeros([BK, BV], tl.float32)
        if before_ptr is not None:
            states = before_ptr + read.to(tl.int64) * before_n + h.to(tl.int64) * before_h
            place = in_state(i_k[:, None], i_v[None, :], before_k, before_v)  # [BK, BV]
            running = tl.load(states + place, mask=inside & (read >= 0), other=0.0).to(tl.float32)
        decay = identity  # D, composed so far
        for m in range(0, count, GROUP):
            S, D = (), ()
            for j in tl.static_range(GROUP):  # pyright: ignore
                ih = tl.cast(first + (m + j) * step, tl.int64) * Hv + h
                there = m + j < built
                S += (tl.load(S_ptr + ih * (K * V) + block, mask=inside & there, other=0.0),)  # [BK, BV]
                if D_ptr is not None:
                    # Beyond the last segment, a diagonal D is 1. A dense D is loaded only where it is needed.
                    D += (tl.load(D_ptr + ih * SIZE + element, mask=exists & there, other=0.0 if DENSE else 1.0),)
            for j in tl.static_range(GROUP):  # pyright: ignore
                ih = tl.cast(first + (m + j) * step, tl.int64) * Hv + h
                if out_ptr is not None:
                    before = running.to(out_ptr.dtype.element_ty)
                    asked = (m + j < count) & (m + j > 0) if SKIP_FIRST else m + j < count
                    tl.store(out_ptr + ih * (K * V) + block, before, mask=inside & asked)
                if D_ptr is not None:
                    running = apply(D[j], running, DENSE, PRECISION)
                    decay = compose(D[j], decay, DENSE, PRECISION)
                running += S[j]
        if after_ptr is not None:
            states = after_ptr + write.to(tl.int64) * after_n + h.to(tl.int64) * after_h
            place = in_state(i_k[:, None], i_v[None, :], after_k, after_v)  # [BK, BV]
            tl.store(states + place, running.to(after_ptr.dtype.element_ty), mask=inside & (write >= 0))
        if decay_ptr is not None:
            tl.store(decay_ptr + nh.to(tl.int64) * SIZE + element, decay, mask=exists & (v0 == 0))
