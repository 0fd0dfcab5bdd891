"""`chunk_gla` where each rank holds a shard of the tokens: forward and backward with one exchange each.

    forward     summary of own tokens -> exchange: the states that enter own pieces -> chunk_gla_fwd
    backward    summary of own q and do, backwards -> exchange: the gradients of the states that leave them
                -> chunk_gla_bwd

What a rank sends does not depend on what it receives, so that all ranks work at the same time.

A piece of a long sequence is cut into segments, as many as fill the device: the summary is then of each segment, and of
the piece by a scan over them; and chunk_gla_fwd, given what enters each, has nothing left to build. Otherwise it would
cut the piece itself and build the same states once more, which takes a third of its time.

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

from gla_core.dispatch.environment import environment
from gla_core.distributed import exchange
from gla_core.distributed.exchange import Summary
from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.distributed.shard import Layout, Packed, Shard, refuse_ranks_that_differ
from gla_core.distributed.shard import shard as make_shard
from gla_core.ops import autocast, checks
from gla_core.ops.calls import needs_gradient, refuse_tangents, request_text
from gla_core.ops.chunk_gla import CHUNK, FORWARD, ChunkGla, interval_for_backward, torch_bwd, torch_fwd
from gla_core.ops.chunk_gla_summary import chunk_gla_gradient_summary, chunk_gla_summary
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
    state_v_first: bool = False,
) -> ChunkGla:
    """Computes gated linear attention over sequences whose tokens are spread over ranks; every rank calls it.

    Differentiable in q, k, v, g and initial_state, with one gather forwards and one backwards; every rank has to go
    through both. What comes out is what `gla_core.chunk_gla` gives for the ranks' tokens put together.

    States are the same on every rank: each is given the same initial_state and gets the final states of all sequences.
    So are their gradients: that of the final state has to be complete and the same on every rank, and that of
    initial_state then is.

    Args:
        q: queries [B, T, Hq, K], float64, float32, float16 or bfloat16, of this rank's T tokens: of B sequences, all
            cut at the same places, or with cu_seqlens of one row, B = 1. T may be 0, and differ between ranks.
        k: keys [B, T, H, K], as q.
        v: values [B, T, H, V], as q.
        g: natural logarithm of the forget gate [B, T, H, K], as q or float32, in [-inf, 0]. None means no decay.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, H, K, V] float32 (float64 with float64), of all sequences.
        output_final_state: also return the states after the last tokens. Of packed sequences, giving or asking for
            states has those of all N gathered, not one a rank.
        cu_seqlens: [N+1] offsets of packed sequences in the row of all ranks' tokens; see `shard`.
        group: the ranks in the order of their shards; all ranks by default.
        layout: "contiguous" or "zigzag"; see `shard`.
        backend: a request such as "reference"; see `use_backend`.
        shard: what `shard` returned, in place of cu_seqlens, group and layout; else it is made for this call.
        state_v_first: states are [N, H, V, K], given and returned. None is copied: those returned are views.

    Returns:
        o [B, T, Hq, V] as v, and the final states [N, H, K, V] (None unless asked for), on every rank; by name
        `o` and `state`.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype or device, before anything is sent. The other ranks
            then wait in vain, and raise what torch.distributed does once the time-out of the group is over.
        NoBackendError, UnknownBackendError: nobody can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> torch.distributed.init_process_group("nccl")
        >>> cut = gla_core.distributed.shard(q.shape[1], cu_seqlens)  # once per batch
        >>> o, _ = gla_core.distributed.chunk_gla(q, k, v, g, shard=cut)  # in every layer
    """
    if shard is not None and (cu_seqlens is not None or group is not None or layout != "contiguous"):
        raise ValueError("shard is given; expected neither cu_seqlens nor group nor layout beside it: it has its own")
    if shard is not None and shard.packed is not None:
        cu_seqlens = shard.packed.cu_seqlens
    if state_v_first:
        initial_state = checks.transposed(initial_state)
    q, k, v, g = autocast.tokens(q, k, v, g)
    refuse_tangents(q, k, v, g, initial_state)
    # What a backend would refuse later, when the other ranks already wait.
    call = FORWARD.describe(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, None, None)
    B, T = q.shape[:2]
    shard = shard or make_shard(T, cu_seqlens, group, layout)
    if shard.tokens != T:
        raise ValueError(f"q has {T} tokens; expected {shard.tokens}, which its shard was made for")
    if environment().check_values:
        agreed = {name: size for name, size in call.dims.items() if name != "T"}
        agreed |= {"dtype": q.dtype, "g": g is not None, "initial_state": initial_state is not None}
        agreed |= {"output_final_state": output_final_state, "layout": shard.layout}
        refuse_ranks_that_differ(agreed, shard.group, "all but the number of tokens is the same on every rank")
    rows, segments = (q, k, v, g), 1
    if shard.packed is None:  # pieces of sequences, or segments of these, as rows of their own
        pieces = len(shard.places)
        segments = segments_of_a_piece(B * pieces * k.shape[2], T // pieces, q.device)
        each = (B * pieces * segments, T // (pieces * segments))
        rows = tuple(None if x is None else x.reshape(*each, *x.shape[2:]) for x in rows)
    every_state = initial_state is not None or output_final_state
    own = _Own(shard, segments, None if every_state else shard.packed)
    needs_grad = needs_gradient(q, k, v, g, initial_state)
    states = (initial_state, output_final_state)
    o, final = _chunk_gla_over_ranks.apply(
        *rows, scale_or_default(q, scale), *states, own, needs_grad, request_text(backend)
    )
    return ChunkGla(o.view(B, T, *o.shape[2:]), checks.transposed(final) if state_v_first else final)


LEAST_SEGMENT = 512
"""Tokens of a segment at least."""


def segments_of_a_piece(heads: int, tokens: int, device: torch.device) -> int:
    """How many segments of whole chunks a piece of so many tokens is cut into.

    Args:
        heads: of all pieces of this rank.
    """
    if device.type != "cuda" or heads == 0:
        return 1
    room = torch.cuda.get_device_properties(device).multi_processor_count // heads
    numbers = range(min(room, tokens // LEAST_SEGMENT), 1, -1)
    return next((n for n in numbers if tokens % (n * CHUNK) == 0), 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """The part of a call that this rank has.

    Attributes:
        segments: that each piece of a sequence is cut into; 1 of packed sequences.
        cut: says where packed sequences are cut, where only what passes there is passed on; None where the states of
            all parts are.
    """

    shard: Shard
    segments: int
    cut: Packed | None

    @property
    def offsets(self) -> Tensor | None:
        """Offsets of the parts of packed sequences that this rank has; None where each row is a sequence's."""
        return None if self.shard.packed is None else self.shard.packed.parts

    def summary(self, left: Tensor, right: Tensor, g: Tensor | None, backwards: bool, backend: str) -> Summary:
        """Returns the summaries of this rank's segments or parts.

        With `cut` they are those of the parts that are cut behind a piece, or backwards in front of one.

        Args:
            left, right: k and v, or backwards q and do.
        """
        summarized = chunk_gla_gradient_summary if backwards else chunk_gla_summary
        if self.cut is None:
            return summarized(left, right, g, self.offsets, backend)
        decay, state = summarized(left, right, g, self.cut.heads if backwards else self.cut.tails, backend)
        wanted = slice(0 if backwards else 1, None, 2)
        return decay[wanted], state[wanted]

    def passed_on(self, summary: Summary, start: Tensor | None, backwards: bool, to_end: bool) -> tuple[Tensor, Tensor]:
        """What enters each of this rank's segments or parts, or backwards leaves it, and what is left at the end.

        Args:
            summary: as `summary` gives it. start: [N, H, K, V] before the first piece; None is 0.
            to_end: whether what is left at the end is asked for.

        Returns:
            [segments or parts, H, K, V] and [N, H, K, V].
        """
        places, cut, upto = self.shard.places, self.cut, None
        if self.segments > 1:
            upto = exchange.up_to_each(summary, self.segments, backwards)
            summary = upto[0][:, -1], upto[1][:, -1]
        decay, state = summary
        by_row, passed = self.shard.packed is None, None if cut is None else cut.passed
        gathered = to_end or self.shard.ranks <= exchange.MOST_GATHERED
        wait = exchange.gather(self.shard, decay, state, by_row) if gathered else None
        # What needs nothing of the other ranks, while they send.
        before = None if upto is None else exchange.before_each(upto, backwards)
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
    """One function, not three that autograd joins: what is gathered needs no gradient of its own.

    Profilers show its name, which has the op's in it as those of the plain ops have.
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
        own: _Own,
        needs_grad: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor | None]:
        summary = own.summary(k, v, g, False, backend)
        entering, final = own.passed_on(summary, initial_state, False, output_final_state)
        every = interval_for_backward(backend) if needs_grad and q.is_cuda else None
        args = (q, k, v, g, scale, entering, False, own.offsets, every, None)
        o, _, checkpoints = torch_fwd(*args, needs_grad, backend)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, entering, None if every is None else checkpoints)
        ctx.scale, ctx.own, ctx.every, ctx.backend = scale, own, every, backend
        return o, final if output_final_state else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, g, entering, checkpoints = ctx.saved_tensors
        own, scale, backend = ctx.own, ctx.scale, ctx.backend
        do = v.new_zeros(*q.shape[:-1], v.shape[-1]) if do is None else do
        decay, state = own.summary(q, do, g, True, backend)
        if g is None:  # then each query head has its own; those of a group go into one state
            decay, state = (x.unflatten(1, (k.shape[2], -1)) for x in (decay, state))
            decay, state = decay[:, :, 0], state.sum(2)
        needs_initial = ctx.needs_input_grad[5]
        leaving, dinitial = own.passed_on((decay, scale * state), dfinal, True, needs_initial)
        args = (q, k, v, g, scale, entering, own.offsets, checkpoints, ctx.every, do, leaving)
        dq, dk, dv, dg, _ = torch_bwd(*args, None, backend)
        dg = None if g is None else dg
        return dq, dk, dv, dg, None, dinitial if needs_initial else None, None, None, None, None
