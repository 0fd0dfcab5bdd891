"""Cuts sequences into segments that are computed in parallel, and sorts packed segments by length.

Every segment has `length` tokens, except for the last segment of a sequence, which may be shorter. The host can cut a
batch of B sequences of T tokens. For packed sequences, the host knows only the number N of sequences and the total
number T of tokens, so a kernel computes their segments on the device. Packed sequences of at most `uncut` tokens are
not cut. Sequence n has the rows from c_n = cu_seqlens[n] up to c_{n+1}, and its segment m has the number

    i = n + c_n // length + m

among N + T // length segments, some of which are empty. The numbers of two sequences never overlap, and the formula
needs no sum over sequences. Checkpoints are numbered in the same way.

A segment is `followed` if another segment of its sequence comes after it. Such a segment has `length` tokens.

If blocks started in the order of these numbers, a long segment could start last and run alone. So `order` sorts the
segments by length, the longest first. Followed segments come first, and the first segments of sequences come first
among them. A kernel that computes only followed segments, or one segment of each cut sequence, therefore takes the
first places of the order; `counts` holds the number of these places. A place holds all facts of its segment, so that a
block waits for memory only once (`segment_at`).

B batch   T tokens   N sequences   I segments   P slots of a pool
H key heads   Hq query heads   Hv value heads   Ho = max(Hq, Hv) heads of o   K, V key and value width
BI segments of a program   BN sequences read at once   D numbers of a token of o   BD numbers written at once
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.tensors import ceil_div, swapped
from gla_triton_kernels.chunks.cutting import most_segments
from gla_triton_kernels.chunks.padding import BLOCK, ROWS, clear_rows
from gla_triton_kernels.chunks.slots import Slots, find_slots, slot_arguments
from gla_triton_runtime.launch import Launch


class Recurrence(NamedTuple):
    """The tensors of a recurrence through sequences: of states S, or backwards of gradients dS.

        S  <-  diag(exp g_t) S + k_t^T v_t                      for t from first to last
        dS <-  diag(exp g_t) (dS + scale * q_t^T do_t)          for t from last to first

    The "first" and the "last" segment of a sequence are the first and the last that the recurrence reaches. With
    grouped queries, the dS of a value head sums the products of all query heads of its group. If value heads share a
    key head, all of them read the same head of k and of q.

    Attributes:
        left: k [B, T, H, K], or q [B, T, Hq, K].
        right: v [B, T, Hv, V], or do [B, T, Ho, V].
        g: log gates [B, T, Hv, K], [B, T, Hv] or [Hv]; None if there are no gates.
        before: the initial state, or the gradient of the final state, [N, Hv, K, V], with contiguous values or keys;
            None stands for 0.
        after: receives the final state, or the gradient of the initial state, [N, Hv, K, V], contiguous; None if it is
            not needed.
        scale: the factor of the products of a backward recurrence; a forward recurrence has none.
        backwards: whether the recurrence goes from the last token to the first.
        normalizer: the number by which log sigma is divided if g holds logits; None if it holds log gates.
        factor: factors of `right` [B, T, Hv], contiguous; None stands for 1. Only with one gate for each head.
        in_slots: whether `before` and `after` are a pool [P, Hv, K, V]; `Segments.slots` then names the slots.
    """

    left: Tensor
    right: Tensor
    g: Tensor | None
    before: Tensor | None
    after: Tensor | None
    scale: float = 1.0
    backwards: bool = False
    normalizer: int | None = None
    in_slots: bool = False
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of sequences, numbered as the module says.

    Attributes:
        length: tokens of a segment; the last segment of a sequence may have fewer.
        uncut: tokens of the longest packed sequence that stays one segment.
        count: number of segments; for packed sequences, it includes empty segments.
        per_sequence: number of segments of a sequence; 0 for packed sequences.
        cu_seqlens: offsets of packed sequences; None for a batch.
        order: the segments of packed sequences, the longest first, [count, 5] int32. A place holds the number i of its
            segment, the first row and the end of the segment, and the first row and the end of the sequence. The rows
            of an empty segment are all equal.
        counts: for packed sequences that are cut, [2] int32: the number of followed segments, and the number of
            sequences that have followed segments. It is written only if `order` has the longest segments first.
        slots: the slots of packed sequences whose states are in a pool, [N, 4] int32 (slots.py); otherwise None.
        most: an upper bound on the number of followed segments of packed sequences.
        launches: the launch that computes `order`, `counts` and `slots`; empty for a batch.
    """

    length: int
    uncut: int
    count: int
    per_sequence: int
    cu_seqlens: Tensor | None = None
    order: Tensor | None = None
    counts: Tensor | None = None
    slots: Tensor | None = None
    most: int = 0
    launches: tuple[Launch, ...] = ()


def state_strides(prefix: str, x: Tensor | None) -> dict[str, int | None]:
    """Returns the strides of states x [N, Hv, K, V] as arguments of a kernel; their names begin with `prefix`.

    The stride of the contiguous axis, values or keys, is None. If x is None, the strides are 0 and None.
    """
    n, h, k, v = (0, 0, 0, 0) if x is None else x.stride()
    k, v = (None, v) if x is not None and swapped(x) else (k, None)
    return {f"{prefix}n": n, f"{prefix}h": h, f"{prefix}k": k, f"{prefix}v": v}


def lengths_of(T: int, segments: Segments) -> dict[str, int]:
    """Returns T, the tokens of a segment, and the segments of a sequence of a batch, as arguments of a kernel."""
    return {"T": T, "segment": segments.length, "segments": segments.per_sequence}


def are_cut(T: int, segments: Segments) -> bool:
    """Returns whether sequences are cut: `whole` makes segments of more than T tokens, which no sequence has."""
    return segments.length <= T


def whole(B: int, T: int, cu_seqlens: Tensor | None, o: Tensor | None = None, slots: Slots | None = None) -> Segments:
    """Returns each sequence as one segment, with a `length` above T; the arguments are the same as in `cut`."""
    if cu_seqlens is None:
        return Segments(T + 1, T, B, 1)
    N = len(cu_seqlens) - 1
    order, numbers = cu_seqlens.new_empty(N, 5, dtype=torch.int32), _new_slots(slots, cu_seqlens)
    arguments = {
        "cu_seqlens_ptr": cu_seqlens,
        "order_ptr": order,
        "o_ptr": o,
        **slot_arguments(slots, numbers),
        "T": T,
        "N": N,
        "D": _width(o),
        "BI": BI,
        "BN": BN,
        "BD": BLOCK,
    }
    launch = Launch(_order_kernel, (_programs(N, o), 1, 1), arguments, ONE_WARP)
    return Segments(T + 1, T, N, 0, cu_seqlens, order, slots=numbers, launches=(launch,))


def _new_slots(slots: Slots | None, cu_seqlens: Tensor) -> Tensor | None:
    """Returns memory [N, 4] that `find_slots` fills; None without a pool."""
    return None if slots is None else cu_seqlens.new_empty(len(cu_seqlens) - 1, 4, dtype=torch.int32)


def cut(
    B: int,
    T: int,
    length: int,
    uncut: int,
    cu_seqlens: Tensor | None,
    o: Tensor | None = None,
    longest_first: bool = True,
    slots: Slots | None = None,
) -> Segments:
    """Cuts sequences into segments of `length` tokens.

    Args:
        length: tokens of a segment.
        uncut: as in `Segments`; at least `length`.
        o: output of packed sequences, [1, T, ...], contiguous. The same launch writes 0 to the rows of o that belong to
            no sequence. None leaves these rows to another launch.
        longest_first: whether packed segments are sorted by length. If not, they keep the order of their numbers, which
            suits blocks that all take equally long.
        slots: the slots of a pool that packed sequences read and write; None without a pool.
    """
    if cu_seqlens is None:
        return Segments(length, length, most_segments(B, T, length, False), most_segments(1, T, length, False))
    N = len(cu_seqlens) - 1
    count = most_segments(N, T, length, True)
    order, counts = (cu_seqlens.new_empty(shape, dtype=torch.int32) for shape in ((count, 5), (2,)))
    numbers = _new_slots(slots, cu_seqlens)
    arguments = {
        "cu_seqlens_ptr": cu_seqlens,
        "order_ptr": order,
        "counts_ptr": counts,
        "o_ptr": o,
        **slot_arguments(slots, numbers),
        "T": T,
        "N": N,
        "count": count,
        "length": length,
        "uncut": uncut,
        "D": _width(o),
        "LONGEST_FIRST": longest_first,
        "BI": BI,
        "BN": BN,
        "BD": BLOCK,
    }
    launch = Launch(_lay_out_kernel, (_programs(count, o), 1, 1), arguments, ONE_WARP)
    return Segments(length, uncut, count, 0, cu_seqlens, order, counts, numbers, max(T - 1, 0) // length, (launch,))


BI, BN = 4, 64
"""Segments, or sequences, of a program, and sequences that a program reads at once."""
ONE_WARP = {"num_warps": 1}
"""With a single warp, sums over sequences need no barrier."""


def _programs(places: int, o: Tensor | None) -> int:
    """Returns the number of programs that fill `places` places of an order and clear the padding of o."""
    return max(ceil_div(places, BI), 0 if o is None else ceil_div(o.shape[1], ROWS))


def _width(o: Tensor | None) -> int:
    """Returns the number of elements of a token of o [1, T, ...]; 0 without o."""
    return 0 if o is None else o[0, 0].numel()


ENGINE_TENSORS = ["cu_seqlens_ptr", "read_ptr", "write_ptr", "has_state_ptr", "before_ptr", "kept_ptr"]
"""Tensors that serving engines cut out of larger ones, so their addresses need not be multiples of 16 bytes."""
SLOT_SIZES = ["P", "PAD", "stride_read", "stride_write", "stride_has_state", "stride_before", "stride_kept"]
"""Scalar arguments of `find_slots`."""


@triton.jit(do_not_specialize=["T", "N", "D", *SLOT_SIZES], do_not_specialize_on_alignment=ENGINE_TENSORS)
def _order_kernel(
    cu_seqlens_ptr,  # [N+1]
    order_ptr,  # [N, 5]
    o_ptr,  # [T, D] or None
    read_ptr,  # [N], or None without a pool, and so are the next five
    write_ptr,  # [N] or None
    has_state_ptr,  # [N] or None
    before_ptr,  # [N] or None
    kept_ptr,  # [N] or None
    numbers_ptr,  # [N, 4]
    P,  # slots of the pool
    PAD,  # the slot that is never used
    stride_read,
    stride_write,
    stride_has_state,
    stride_before,
    stride_kept,
    T,
    N,
    D,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Writes BI whole sequences to their places in the order. Sequences of equal length keep their order."""
    if o_ptr is not None:
        clear_rows(o_ptr, D, tl.load(cu_seqlens_ptr), tl.load(cu_seqlens_ptr + N), T, BD)
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    if tl.program_id(0) * BI >= N:
        return
    start, end = _rows(cu_seqlens_ptr, i, N)  # [BI]
    if numbers_ptr is not None:
        pointers = (read_ptr, write_ptr, has_state_ptr, before_ptr, kept_ptr)
        strides = (stride_read, stride_write, stride_has_state, stride_before, stride_kept)
        find_slots(pointers, strides, numbers_ptr, P, PAD, i, end - start, N)
    tokens = (end - start)[:, None]  # [BI, 1]
    before = tl.zeros([BI, BN], tl.int32)  # counts of sequences that precede sequence i in the order
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)  # [BN]
        others_start, others_end = _rows(cu_seqlens_ptr, n, N)  # [BN]
        others = (others_end - others_start)[None, :]  # [1, BN]
        as_long = (others == tokens) & (n[None, :] < i[:, None])  # [BI, BN]
        before += ((others > tokens) | as_long).to(tl.int32)
    _put(order_ptr, tl.sum(before, 1), i, start, end, start, end, N)


@triton.jit
def _rows(cu_seqlens_ptr, n, N):
    """Returns the first row and the end of sequences n [BI or BN], int32; 1 and 0, a length of -1, if n >= N."""
    start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=1)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0)
    return start.to(tl.int32), end.to(tl.int32)


@triton.jit
def _put(order_ptr, place, i, start, end, origin, last, count):
    """Writes five numbers of segments i < count to their places; see `Segments.order`. All tensors are [BI]."""
    row = order_ptr + place * 5
    tl.store(row, i, mask=i < count)
    tl.store(row + 1, start, mask=i < count)
    tl.store(row + 2, end, mask=i < count)
    tl.store(row + 3, origin, mask=i < count)
    tl.store(row + 4, last, mask=i < count)


@triton.jit(
    do_not_specialize=["T", "N", "count", "length", "uncut", "D", *SLOT_SIZES],
    do_not_specialize_on_alignment=ENGINE_TENSORS,
)
def _lay_out_kernel(
    cu_seqlens_ptr,  # [N+1]
    order_ptr,  # [I, 5]
    counts_ptr,  # [2]
    o_ptr,  # [T, D] or None
    read_ptr,  # [N], or None without a pool, and so are the next five
    write_ptr,  # [N] or None
    has_state_ptr,  # [N] or None
    before_ptr,  # [N] or None
    kept_ptr,  # [N] or None
    numbers_ptr,  # [N, 4]
    P,  # slots of the pool
    PAD,  # the slot that is never used
    stride_read,
    stride_write,
    stride_has_state,
    stride_before,
    stride_kept,
    T,
    N,
    count,
    length,
    uncut,
    D,
    LONGEST_FIRST: tl.constexpr,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Writes BI segments to their places in the order."""
    if o_ptr is not None:
        clear_rows(o_ptr, D, tl.load(cu_seqlens_ptr), tl.load(cu_seqlens_ptr + N), T, BD)
    i = tl.program_id(0) * BI + tl.arange(0, BI)  # [BI]
    if tl.program_id(0) * BI >= count:
        return
    if numbers_ptr is not None:
        from_row, to_row = _rows(cu_seqlens_ptr, i, N)  # [BI], of sequences i
        pointers = (read_ptr, write_ptr, has_state_ptr, before_ptr, kept_ptr)
        strides = (stride_read, stride_write, stride_has_state, stride_before, stride_kept)
        find_slots(pointers, strides, numbers_ptr, P, PAD, i, to_row - from_row, N)
    zero = tl.zeros([BI, BN], tl.int32)  # sums over sequences; their columns are summed after the loop
    start, end, origin, last = zero, zero, zero, zero
    for n0 in range(0, N, BN):
        start_n, end_n, first, followed, rest = cut_of(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length, uncut)  # [BN]
        m = i[:, None] - first[None, :]  # [BI, BN], the index that segment i would have in a sequence
        here = (m >= 0) & (m < (followed + (rest > 0).to(tl.int32))[None, :])  # [BI, BN], whether it belongs to n
        start_i = start_n[None, :] + m * length  # [BI, BN]
        start += tl.where(here, start_i, 0)
        end += tl.where(here, tl.where(m < followed[None, :], start_i + length, end_n[None, :]), 0)
        origin += tl.where(here, start_n[None, :], 0)
        last += tl.where(here, end_n[None, :], 0)
    place = _longest_first(cu_seqlens_ptr, counts_ptr, i, N, length, uncut, BN) if LONGEST_FIRST else i
    _put(order_ptr, place, i, tl.sum(start, 1), tl.sum(end, 1), tl.sum(origin, 1), tl.sum(last, 1), count)


@triton.jit
def _longest_first(cu_seqlens_ptr, counts_ptr, i, N, length, uncut, BN: tl.constexpr):
    """Returns the places [BI] of segments i [BI] in the order. The first program also writes `counts`.

    The order has four parts: the first segments of cut sequences, the other followed segments, the last segments of
    sequences from the longest to the shortest, and the empty segments. Equally long segments of one part keep the order
    of their numbers.
    """
    zero = tl.zeros([i.shape[0], BN], tl.int32)  # sums over sequences; their columns are summed after the loop
    kind, tokens, followed_before, cut_before, not_empty_before = zero, zero, zero, zero, zero
    followed, cut, not_empty = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)
    for n0 in range(0, N, BN):
        _, _, first, followed_n, rest = cut_of(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length, uncut)  # [BN]
        m = i[:, None] - first[None, :]  # [BI, BN], the index that segment i would have in a sequence
        segments = followed_n + (rest > 0).to(tl.int32)  # [BN]
        is_cut = (followed_n > 0).to(tl.int32)  # [BN]
        # 2 for the first segment of a cut sequence, 1 for any other followed segment, 0 for all other segments.
        kind += tl.where((m >= 0) & (m < followed_n[None, :]), tl.where(m == 0, 2, 1), 0)
        tokens += tl.where(m == followed_n[None, :], rest[None, :], 0)  # 0 unless i is the last of a sequence
        followed_before += tl.minimum(tl.maximum(m, 0), followed_n[None, :])
        cut_before += tl.where(m > 0, is_cut[None, :], 0)
        not_empty_before += tl.minimum(tl.maximum(m, 0), segments[None, :])
        followed += followed_n
        cut += is_cut
        not_empty += segments
    all_followed, all_cut, last_tokens = tl.sum(followed), tl.sum(cut), tl.sum(tokens, 1)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, all_followed)
        tl.store(counts_ptr + 1, all_cut)
    before = zero  # counts of last segments of sequences that precede segment i in the order
    for n0 in range(0, N, BN):
        _, _, first, followed_n, rest = cut_of(cu_seqlens_ptr, n0 + tl.arange(0, BN), N, length, uncut)  # [BN]
        as_long = (rest[None, :] == last_tokens[:, None]) & ((first + followed_n)[None, :] < i[:, None])  # [BI, BN]
        before += ((rest[None, :] > last_tokens[:, None]) | as_long).to(tl.int32)
    kind, cut_before = tl.sum(kind, 1), tl.sum(cut_before, 1)  # [BI]
    place_of_followed = tl.where(kind == 2, cut_before, all_cut + tl.sum(followed_before, 1) - cut_before)
    place_of_empty = tl.sum(not_empty) + i - tl.sum(not_empty_before, 1)
    place_of_last = tl.where(last_tokens > 0, all_followed + tl.sum(before, 1), place_of_empty)
    return tl.where(kind > 0, place_of_followed, place_of_last)


@triton.jit
def cut_of(cu_seqlens_ptr, n, N, length, uncut):
    """Returns five numbers of each of the sequences n [BN].

    They are the first row, the end, the number of the first segment, the count of followed segments, and the tokens of
    the last segment.
    """
    start = tl.load(cu_seqlens_ptr + n, mask=n < N, other=0).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0).to(tl.int32)
    followed = tl.where(end - start > uncut, (end - start - 1) // length, 0)
    return start, end, n + start // length, followed, end - start - followed * length


@triton.jit
def in_state(key, value, stride_k, stride_v):
    """Returns the offsets of elements of a state from its first element; the stride of the contiguous axis is None."""
    return value.to(tl.int64) * stride_v + key if stride_k is None else key.to(tl.int64) * stride_k + value


@triton.jit
def segment_at(order_ptr, place):
    """Returns (number, first row, end, first row of its sequence, end of its sequence) of a segment.

    Args:
        order_ptr: the segments in the order in which programs start, [I, 5]; see `Segments`.
        place: the row of the segment in the order.
    """
    row = order_ptr + tl.cast(place, tl.int64) * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
