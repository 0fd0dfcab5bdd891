"""An op on sequences whose tokens are spread over ranks: one exchange in the forward and one in the backward.

    forward     summaries of this rank's pieces -> exchange: the states that enter the pieces -> forward of the op
    backward    summaries of q and do, backwards -> exchange: the gradients of the states that leave the pieces
                -> backward of the op

The op is an `OpOverRanks`: any op whose state a piece of a sequence changes by a transition and an update
(gla_core/dispatch/transitions.py). The data that a rank sends do not depend on the data that it receives, so all ranks
work at the same time.

A piece of a long sequence is cut into segments, enough of them to fill the device. Each segment then has a summary, and
a scan over the segments gives the summary of the piece. The op's forward receives the state that enters each segment,
so it builds no states of its own. Without segments it would cut the piece itself and build the same states a second
time. That takes a third of the time of `chunk_gla`'s forward.

Sources: Chou et al., "ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (arXiv 2507.01004),
which pipelines the exchange; Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid"
(arXiv 2502.07563), which gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.environment import environment
from gla_core.dispatch.tensors import gradient_of_logits, log_gates, wide
from gla_core.dispatch.transitions import Summary, apply
from gla_core.distributed import exchange
from gla_core.distributed.shard import Layout, Packed, Shard, refuse_ranks_that_differ
from gla_core.distributed.shard import shard as make_shard
from gla_core.ops import autocast, checks
from gla_core.ops.calls import needs_gradient, refuse_tangents, request_text
from gla_core.ops.spec import OpSpec, scale_or_default

Tokens = tuple[Any, ...]
"""The tensors of a call that have a row for each token: q, k, v and g, which may be None, and others that an op has."""


@dataclass(frozen=True, slots=True, eq=False)
class OpOverRanks:
    """An op as the functions that run before and after an exchange.

    Attributes:
        function: a subclass of `OverRanks` whose name profilers show.
        summary: maps the tokens, cu_seqlens and a request to the summary of each sequence.
        gradient_summary: maps the tokens, scale, cu_seqlens, do and a request to the summary of each sequence
            backwards: it takes the gradient of the state behind a sequence to that of the state before it.
        forward_spec: describes the forward. Its first arguments are the tokens, scale, initial_state,
            output_final_state and cu_seqlens; its results are o, the final state and the checkpoints.
        forward: the torch op; takes the arguments of forward_spec, whether a gradient is needed, and a request.
        backward_spec: describes the backward. Its first arguments are the tokens; its results are the gradients of the
            tokens and of the initial state.
        backward: the torch op; takes the arguments of backward_spec and a request.
        interval: maps a request to the interval of the checkpoints that a forward on a GPU keeps, or None.
    """

    function: type[OverRanks]
    summary: Callable[[Tokens, Tensor | None, str], Summary]
    gradient_summary: Callable[[Tokens, float, Tensor | None, Tensor, str], Summary]
    forward_spec: OpSpec
    forward: Callable[..., tuple[Tensor, ...]]
    backward_spec: OpSpec
    backward: Callable[..., tuple[Tensor, ...]]
    interval: Callable[[str], int | None]


def over_ranks(
    op: OpOverRanks,
    tokens: Tokens,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    shard: Shard | None,
    cu_seqlens: Tensor | None,
    group: dist.ProcessGroup | DeviceMesh | None,
    max_seqlen: int | None,
    layout: Layout,
    gate: str | None,
    gate_normalizer: int,
    backend: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs an op on this rank's tokens; see `gla_core.distributed.chunk_gla` for the other arguments and the errors.

    Returns:
        o [B, T, Ho, V], and the final states [N, Hv, K, V] of all sequences (None unless output_final_state).
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
    tokens = autocast.inputs(op.forward_spec, *tokens)
    q, _, v, g, *_ = tokens
    number = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    refuse_tangents(*tokens, initial_state)
    # Check before anything is sent: a backend would refuse the call only while the other ranks already wait.
    passed = (*tokens, scale, initial_state, output_final_state, cu_seqlens)
    args = op.forward_spec.complete(passed, {"gate_normalizer": number})
    try:
        call = op.forward_spec.describe(*args)
    except (ValueError, TypeError) as error:
        if not state_v_first:
            raise
        raise op.forward_spec.error_in_layout(error, args) from None
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
    segments = 1
    if shard.packed is None:  # each piece, or each segment of a piece, becomes a row of its own
        pieces = len(shard.places)
        segments = segments_of_a_piece(B * pieces * v.shape[2], T // pieces, q.device)
        rows = (B * pieces * segments, T // (pieces * segments))
        tokens = tuple(x if x is None or x.ndim == 1 else x.reshape(*rows, *x.shape[2:]) for x in tokens)
    every_state = initial_state is not None or output_final_state
    share = _Share(op, shard, segments, None if every_state else shard.packed)
    needs_grad = needs_gradient(*tokens, initial_state)
    options = (scale_or_default(q, scale), output_final_state, number, needs_grad, request_text(backend))
    o, final = op.function.apply(share, options, initial_state, *tokens)
    return o.view(B, T, *o.shape[2:]), checks.transposed(final) if state_v_first else final


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
class _Share:
    """The share of a call that this rank computes.

    Attributes:
        segments: number of segments that each piece is cut into; 1 for packed sequences.
        cut: the layout of packed sequences if the ranks exchange only the states of sequences that are cut; None if
            they exchange the states of all sequences.
    """

    op: OpOverRanks
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

    def summary(self, tokens: Tokens, backend: str) -> Summary:
        """Returns the summaries of this rank's segments, or of its parts of packed sequences.

        If `cut` is set, it returns one summary per piece: the summary of its tail.
        """
        if self.cut is None:
            return self.op.summary(tokens, self.offsets, backend)
        return _without_gaps(self.op.summary(tokens, self.cut.tails, backend))

    def gradient_summary(self, tokens: Tokens, scale: float, do: Tensor, backend: str) -> Summary:
        """Returns `summary` backwards; if `cut` is set, the summary of the head of each piece."""
        if self.cut is None:
            return self.op.gradient_summary(tokens, scale, self.offsets, do, backend)
        return _without_gaps(self.op.gradient_summary(tokens, scale, self.cut.heads, do, backend))

    def arguments(self, scale: float, entering: Tensor, every: int | None) -> dict[str, Any]:
        """Returns the arguments that the op's forward and backward share, by name."""
        offsets = {"cu_seqlens": self.offsets, "max_seqlen": self.longest}
        return {"scale": scale, "initial_state": entering, "checkpoint_every": every, **offsets}

    def exchange(self, summary: Summary, start: Tensor | None, backwards: bool, to_end: bool) -> tuple[Tensor, Tensor]:
        """Exchanges summaries; returns the state that enters each of this rank's segments or parts, and the last state.

        Backwards, these are the gradients of the states that leave the segments or parts, and of the initial states.

        Args:
            summary: the result of `summary` or `gradient_summary`.
            start: [N, Hv, K, V] before the first piece; None means 0.
            to_end: whether the last state is needed; without it the second result is undefined.

        Returns:
            [segments or parts, Hv, K, V] and [N, Hv, K, V].
        """
        places, cut, before = self.shard.places, self.cut, None
        if self.segments > 1:
            before, summary = exchange.before_each(summary, self.segments, backwards)
        state = summary[1]
        by_row, passed = self.shard.packed is None, None if cut is None else cut.passed
        gathered = to_end or self.shard.ranks <= exchange.MOST_GATHERED
        wait = exchange.gather(self.shard, summary, by_row) if gathered else None
        if start is None:
            start = state.new_zeros(len(state) // len(places), *state.shape[1:])
        parts = None if cut is None else state.new_zeros(len(cut.parts) - 1, *state.shape[1:])
        if wait is None:
            at_place, final = exchange.scan(self.shard, summary, start, passed, backwards, by_row), start
        else:
            summaries = list(enumerate(wait()))
            order = reversed(summaries) if backwards else summaries
            at_place, final = exchange.fold(order, start, places, passed, to_end)
        pieces = [at_place[place] for place in places]
        if cut is not None and parts is not None:
            return parts.index_copy_(0, cut.left if backwards else cut.entered, torch.cat(pieces)), final
        entering = pieces[0] if len(pieces) == 1 else torch.stack(pieces, 1 if by_row else 0).flatten(0, 1)
        if before is not None:
            entering = apply(before[0], entering[:, None], before[1]).flatten(0, 1)
        return entering, final


def _without_gaps(summary: Summary) -> Summary:
    """Returns the summaries of the parts: even rows are the parts, and odd rows are the gaps between them."""
    transition, state = summary
    return transition[::2], state[::2]


class OverRanks(torch.autograd.Function):
    """One autograd function for summary, exchange and op, so that the gathered tensors need no gradient."""

    @staticmethod
    def forward(
        ctx: Any, share: _Share, options: tuple, initial_state: Tensor | None, *tokens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        scale, output_final_state, number, needs_grad, backend = options
        op, used = share.op, _with_log_gates(tokens, number)
        entering, final = share.exchange(share.summary(used, backend), initial_state, False, output_final_state)
        every = op.interval(backend) if needs_grad and entering.is_cuda else None
        args = share.arguments(scale, entering, every)
        o, _, checkpoints = op.forward(*op.forward_spec.complete(used, args), needs_grad, backend)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(entering, None if every is None else checkpoints, *tokens)
        ctx.share, ctx.options, ctx.every, ctx.heads = share, options, every, o.shape[2:]
        return o, final if output_final_state else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        entering, checkpoints, *tokens = ctx.saved_tensors
        share, (scale, _, number, _, backend) = ctx.share, ctx.options
        op, used, v = share.op, _with_log_gates(tokens, number), tokens[2]
        do = v.new_zeros(*v.shape[:2], *ctx.heads) if do is None else do
        needs_initial = ctx.needs_input_grad[2]
        leaving, dinitial = share.exchange(
            share.gradient_summary(used, scale, do, backend), dfinal, True, needs_initial
        )
        args = share.arguments(scale, entering, ctx.every) | {"checkpoints": checkpoints, "do": do, "dstate": leaving}
        dq, dk, dv, dg, *others, _ = op.backward(*op.backward_spec.complete(used, args), backend)
        g = tokens[3]
        dg = None if g is None else gradient_of_logits(dg, g, number).to(g.dtype)
        return None, None, dinitial if needs_initial else None, dq, dk, dv, dg, *others


def _with_log_gates(tokens: Sequence[Any], number: int | None) -> Tokens:
    """Returns the tokens with log gates in place of logits: g itself, or log sigma(g) / number if there is one."""
    q, k, v, g, *others = tokens
    return q, k, v, g if g is None or number is None else log_gates(g, number, wide(q.dtype)), *others
