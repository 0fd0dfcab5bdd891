"""`chunk_gla` where each rank holds a shard of the tokens: over_ranks.py with the ops of gated linear attention."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gla_core.dispatch.transitions import Summary
from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.distributed.over_ranks import OpOverRanks, OverRanks, Tokens, over_ranks
from gla_core.distributed.shard import Layout, Shard
from gla_core.ops.gla.chunk_gla import BACKWARD, FORWARD, ChunkGla, interval_for_backward, torch_bwd, torch_fwd
from gla_core.ops.gla.chunk_gla_summary import chunk_gla_gradient_summary, chunk_gla_summary


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
    states, cut = (initial_state, output_final_state, state_v_first), (shard, cu_seqlens, group, max_seqlen)
    tokens, gates = (q, k, v, g), (gate, gate_normalizer)
    return ChunkGla(*over_ranks(_CHUNK_GLA, tokens, scale, *states, *cut, layout, *gates, backend))


def _summary(tokens: Tokens, cu_seqlens: Tensor | None, backend: str) -> Summary:
    _, k, v, g = tokens
    return chunk_gla_summary(k, v, g, cu_seqlens, backend=backend)


def _gradient_summary(tokens: Tokens, scale: float, cu_seqlens: Tensor | None, do: Tensor, backend: str) -> Summary:
    q, _, v, g = tokens
    decay, dstate = chunk_gla_gradient_summary(q, do, g, cu_seqlens, backend=backend)
    if g is None:  # each head of o has a summary of its own; the query heads of a group share one state
        decay, dstate = (x.unflatten(1, (v.shape[2], -1)) for x in (decay, dstate))
        decay, dstate = decay[:, :, 0], dstate.sum(2)
    return decay, scale * dstate


class _chunk_gla_over_ranks(OverRanks):
    """Profilers show its name. Like the names of the other ops' autograd functions, it contains the op's name."""


_CHUNK_GLA = OpOverRanks(
    function=_chunk_gla_over_ranks,
    summary=_summary,
    gradient_summary=_gradient_summary,
    forward_spec=FORWARD,
    forward=torch_fwd,
    backward_spec=BACKWARD,
    backward=torch_bwd,
    interval=interval_for_backward,
)
