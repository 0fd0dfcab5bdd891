"""`chunk_gla` where each rank holds a shard of the tokens: one exchange in the forward and one in the backward.

    forward     summaries of this rank's pieces -> exchange: the states that enter the pieces -> chunk_gla_fwd
    backward    summaries of q and do, backwards -> exchange: the gradients of the states that leave the pieces
                -> chunk_gla_bwd

The data that a rank sends do not depend on the data that it receives, so all ranks work at the same time.

A piece of a long sequence is cut into segments, enough of them to fill the device. Each segment then has a summary, and
a scan over the segments gives the summary of the piece. chunk_gla_fwd receives the state that enters each segment, so
it builds no states of its own. Without segments it would cut the piece itself and build the same states a second time.
That takes a third of the time of chunk_gla_fwd.

Sources: Chou et al., "ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (arXiv 2507.01004),
which pipelines the exchange; Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid"
(arXiv 2502.07563), which gathers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.environment import environment
from gla_core.dispatch.tensors import gradient_of_logits, log_gates, wide
from gla_core.distributed import exchange
from gla_core.distributed.exchange import Summary
from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.distributed.shard import Layout, Packed, Shard, refuse_ranks_that_differ
from gla_core.distributed.shard import shard as make_shard
from gla_core.ops import autocast, checks
from gla_core.ops.calls import needs_gradient, refuse_tangents, request_text
from gla_core.ops.gla.chunk_gla import FORWARD, ChunkGla, interval_for_backward, torch_bwd, torch_fwd
from gla_core.ops.gla.chunk_gla_summary import chunk_gla_gradient_summary, chunk_gla_summary
from gla_core.ops.spec import scale_or_default


@outside_graphs
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: Layout = "contiguous",
    backend: str | None = None,
    *,
    shard: Shard | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
) -> ChunkGla:
    """Computes gated linear attention over sequences whose tokens are spread over ranks; every rank calls it.

    The results equal `gla_core.chunk_gla` on the tokens of all ranks together. The call is differentiable in
    q, k, v, g and initial_state, with one gather in the forward and one in the backward. Every rank has to run both.

    States are the same on every rank: every rank passes the same initial_state and receives the final states of all
    sequences. The same holds for their gradients: every rank has to pass the complete gradient of the final states, and
    every rank then receives the complete gradient of initial_state.

    A constant gate [Hv] is the same on every rank, too, but each rank receives only its own tokens' share of the
    gradient. The gradient is the sum over the ranks, as for every parameter of which each rank has a copy.

    Args:
        q: queries [B, T, Hq, K] of this rank's T tokens, float64, float32, float16 or bfloat16. All B sequences are cut
            at the same places. With cu_seqlens, B = 1 and the row holds packed sequences. T may be 0, and may differ
            between ranks.
        k: keys [B, T, H, K], dtype as q.
        v: values [B, T, Hv, V], dtype as q. Hq and Hv are H, or one of them is a multiple of H.
        g: natural logarithm of the forget gate, dtype as q or float32, in [-inf, 0]: [B, T, Hv, K] for each key,
            [B, T, Hv] for each token and head, or [Hv] for each head. None means no decay. Every rank passes the same
            form.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, Hv, K, V] float32 (float64 with float64 inputs), of all sequences. None means zeros.
        output_final_state: whether to return the states after the last tokens too. With packed sequences, a
            rank sends the states of all N sequences per piece if initial_state or output_final_state is given, and
            otherwise one state per piece.
        cu_seqlens: [N+1] offsets of packed sequences in the row of all ranks' tokens; see `shard`.
        group: the ranks in the order of their shards; all ranks by default.
        layout: "contiguous" or "zigzag"; see `shard`.
        backend: a request such as "reference"; see `use_backend`.
        shard: the value that `shard` returned, in place of cu_seqlens, group, layout and max_seqlen. By default the
            call makes one.
        max_seqlen: number of tokens of the longest packed sequence, or an upper bound; see `shard`.
        state_v_first: whether given and returned states are [N, Hv, V, K]. No copy is made: returned states are views.
        gate: None, or "logsigmoid" if g holds logits, as in `gla_core.chunk_gla`. Here a tensor of log gates is
            computed from them, because both the summaries and the outputs read it.
        gate_normalizer: the whole number by which log sigma of the logits is divided.

    Returns:
        o [B, T, Ho, V] with v's dtype, where Ho is the larger of Hq and Hv, and the final states [N, Hv, K, V] (None
        unless output_final_state), on every rank, as the fields `o` and `state`.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device. The error comes before anything is sent;
            the other ranks wait until the group's timeout and then raise torch.distributed's error.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> torch.distributed.init_process_group("nccl")
        >>> # Once per batch
        >>> cut = gla_core.distributed.shard(q.shape[1], cu_seqlens)
        >>> # In every layer
        >>> o, _ = gla_core.distributed.chunk_gla(q, k, v, g, shard=cut)
    """
    cut_otherwise = any(x is not None for x in (cu_seqlens, group, max_seqlen)) or layout != "contiguous"
    if shard is not None and cut_otherwise:
        raise ValueError(
            "shard is given; expected neither cu_seqlens nor group, layout or max_seqlen beside it: it has its own"
        )
    if shard is not None and shard.packed is not None:
        cu_seqlens = shard.packed.cu_seqlens
    if state_v_first:
        initial_state = checks.transposed(initial_state)
    q, k, v, g = autocast.inputs(FORWARD, q, k, v, g)
    number = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    refuse_tangents(q, k, v, g, initial_state)
    # Check before anything is sent: a backend would refuse the call only while the other ranks already wait.
    given = (q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    args = FORWARD.complete(given, {"gate_normalizer": number})
    try:
        call = FORWARD.describe(*args)
    except (ValueError, TypeError) as error:
        if not state_v_first:
            raise
        raise FORWARD.error_in_layout(error, args) from None
    B, T = q.shape[:2]
    shard = shard or make_shard(T, cu_seqlens, group, layout, max_seqlen=max_seqlen)
    if shard.tokens != T:
        raise ValueError(f"q has {T} tokens; expected {shard.tokens}, which its shard was made for")
    if environment().check_values:
        agreed = {name: size for name, size in call.dims.items() if name != "T"}
        agreed |= {"dtype": q.dtype, "form of g": call.gate_form, "initial_state": initial_state is not None}
        agreed |= {"output_final_state": output_final_state, "layout": shard.layout, "gate_normalizer": number}
        refuse_ranks_that_differ(
            agreed, shard.group, "everything but the number of tokens has to be the same on every rank"
        )
    rows, segments = (q, k, v, g), 1
    if shard.packed is None:  # each piece, or each segment of a piece, becomes a row of its own
        pieces = len(shard.places)
        segments = segments_of_a_piece(B * pieces * v.shape[2], T // pieces, q.device)
        each = (B * pieces * segments, T // (pieces * segments))
        rows = tuple(x if x is None or x.ndim == 1 else x.reshape(*each, *x.shape[2:]) for x in rows)
    every_state = initial_state is not None or output_final_state
    own = _Own(shard, segments, None if every_state else shard.packed)
    needs_grad = needs_gradient(q, k, v, g, initial_state)
    states = (initial_state, output_final_state)
    o, final = _chunk_gla_over_ranks.apply(
        *rows, scale_or_default(q, scale), *states, number, own, needs_grad, request_text(backend)
    )
    return ChunkGla(o.view(B, T, *o.shape[2:]), checks.transposed(final) if state_v_first else final)


LEAST_SEGMENT = 512
"""Minimum number of tokens of a segment."""


def segments_of_a_piece(heads: int, tokens: int, device: torch.device) -> int:
    """Returns the number of segments that a piece is cut into; each of them is a whole number of chunks.

    Args:
        heads: number of value heads, summed over all pieces of this rank.
        tokens: number of tokens of the piece.
    """
    if device.type != "cuda" or heads == 0:
        return 1
    room = torch.cuda.get_device_properties(device).multi_processor_count // heads
    numbers = range(min(room, tokens // LEAST_SEGMENT), 1, -1)
    return next((n for n in numbers if tokens % (n * CHUNK) == 0), 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """The share of a call that this rank computes.

    Attributes:
        segments: number of segments that each piece is cut into; 1 for packed sequences.
        cut: the layout of packed sequences if the ranks exchange only the states of sequences that are cut; None if
            they exchange the states of all sequences.
    """

    shard: Shard
    segments: int
    cut: Packed | None

    @property
    def offsets(self) -> Tensor | None:
        """Returns the offsets of packed sequences' parts in this rank's row; None without packed sequences."""
        return None if self.shard.packed is None else self.shard.packed.parts

    @property
    def longest(self) -> int | None:
        """Returns an upper bound on the tokens of this rank's part of a packed sequence; None if there is none."""
        longest = None if self.shard.packed is None else self.shard.packed.longest
        return None if longest is None else min(longest, self.shard.tokens)

    def summary(self, left: Tensor, right: Tensor, g: Tensor | None, backwards: bool, backend: str) -> Summary:
        """Returns the summaries of this rank's segments, or of its parts of packed sequences.

        If `cut` is given, it returns one summary per piece: the summary of its tail, or backwards of its head.

        Args:
            left, right: k and v, or backwards q and do.
        """
        summarized = chunk_gla_gradient_summary if backwards else chunk_gla_summary
        if self.cut is None:
            return summarized(left, right, g, self.offsets, backend)
        decay, state = summarized(left, right, g, self.cut.heads if backwards else self.cut.tails, backend)
        return decay[::2], state[::2]  # the others are of the rows between

    def passed_on(self, summary: Summary, start: Tensor | None, backwards: bool, to_end: bool) -> tuple[Tensor, Tensor]:
        """Exchanges summaries; returns the state that enters each of this rank's segments or parts, and the last state.

        Backwards, these are the gradients of the states that leave the segments or parts, and of the initial states.

        Args:
            summary: the result of the method `summary`.
            start: [N, Hv, K, V] before the first piece; None means 0.
            to_end: whether the last state is needed; without it the second result is undefined.

        Returns:
            [segments or parts, Hv, K, V] and [N, Hv, K, V].
        """
        places, cut, before = self.shard.places, self.cut, None
        if self.segments > 1:
            before, summary = exchange.before_each(summary, self.segments, backwards)
        decay, state = summary
        by_row, passed = self.shard.packed is None, None if cut is None else cut.passed
        gathered = to_end or self.shard.ranks <= exchange.MOST_GATHERED
        wait = exchange.gather(self.shard, decay, state, by_row) if gathered else None
        if start is None:
            start = state.new_zeros(len(state) // len(places), *state.shape[1:])
        parts = None if cut is None else state.new_zeros(len(cut.parts) - 1, *state.shape[1:])
        if wait is None:
            found, final = exchange.scan(self.shard, decay, state, start, passed, backwards, by_row), start
        else:
            summaries = list(enumerate(wait()))
            found, final = exchange.fold(reversed(summaries) if backwards else summaries, start, places, passed, to_end)
        own = [found[place] for place in places]
        if cut is not None and parts is not None:
            return parts.index_copy_(0, cut.left if backwards else cut.entered, torch.cat(own)), final
        entering = own[0] if len(own) == 1 else torch.stack(own, 1 if by_row else 0).flatten(0, 1)
        if before is not None:
            decay, state = before
            entering = torch.addcmul(state, decay[..., None], entering[:, None]).flatten(0, 1)
        return entering, final


class _chunk_gla_over_ranks(torch.autograd.Function):
    """One autograd function for summary, exchange and op, so that the gathered tensors need no gradient.

    Profilers show its name. Like the names of the other ops' autograd functions, it contains the op's name.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        number: int | None,
        own: _Own,
        needs_grad: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor | None]:
        given, g = g, _log_gates(g, number, q.dtype)
        summary = own.summary(k, v, g, False, backend)
        entering, final = own.passed_on(summary, initial_state, False, output_final_state)
        every = interval_for_backward(backend) if needs_grad and q.is_cuda else None
        args = (q, k, v, g, scale, entering, False, own.offsets, every, None, own.longest)
        o, _, checkpoints = torch_fwd(*args, needs_grad, backend)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, given, entering, None if every is None else checkpoints)
        ctx.scale, ctx.number, ctx.own, ctx.every, ctx.backend = scale, number, own, every, backend
        return o, final if output_final_state else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, given, entering, checkpoints = ctx.saved_tensors
        own, scale, backend = ctx.own, ctx.scale, ctx.backend
        g = _log_gates(given, ctx.number, q.dtype)
        do = v.new_zeros(*v.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3]) if do is None else do
        decay, state = own.summary(q, do, g, True, backend)
        if g is None:  # each head of o has a summary of its own; the query heads of a group share one state
            decay, state = (x.unflatten(1, (v.shape[2], -1)) for x in (decay, state))
            decay, state = decay[:, :, 0], state.sum(2)
        needs_initial = ctx.needs_input_grad[5]
        leaving, dinitial = own.passed_on((decay, scale * state), dfinal, True, needs_initial)
        args = (q, k, v, g, scale, entering, own.offsets, checkpoints, ctx.every, do, leaving)
        dq, dk, dv, dg, _ = torch_bwd(*args, None, own.longest, backend)
        dg = None if given is None else gradient_of_logits(dg, given, ctx.number).to(given.dtype)
        return dq, dk, dv, dg, None, dinitial if needs_initial else None, None, None, None, None, None


def _log_gates(g: Tensor | None, number: int | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the log gates of tokens of this dtype: g itself, or log sigma(g) / number if `number` is given."""
    return g if g is None or number is None else log_gates(g, number, wide(dtype))
