"""`chunk_delta` where each rank holds a shard of the tokens: over_ranks.py with the ops of delta rules.

The transition of a piece is dense, so a rank sends 4 H K (V + K) bytes for each state. Unit keys, gates and betas are
computed before the op runs, from this rank's tokens alone.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gla_core.dispatch.transitions import Summary
from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.distributed.over_ranks import OpOverRanks, OverRanks, Tokens, over_ranks
from gla_core.distributed.shard import Layout, Shard
from gla_core.ops.delta.chunk_delta import BACKWARD, FORWARD, torch_bwd, torch_fwd
from gla_core.ops.delta.chunk_delta_summary import chunk_delta_gradient_summary, chunk_delta_summary
from gla_core.ops.delta.inputs import Gate, inputs
from gla_core.ops.gla.chunk_gla import ChunkGla, interval_for_backward


@outside_graphs
def chunk_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
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
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
) -> ChunkGla:
    """Computes a delta rule over sequences whose tokens are spread over ranks; every rank calls it.

    The results equal `gla_core.chunk_delta` on the tokens of all ranks together. The call is differentiable in q, k, v,
    g, beta, initial_state and the parameters of `gate`, with one gather in the forward and one in the backward. Every
    rank has to run both. States are the same on every rank, as in `gla_core.distributed.chunk_gla`.

    A constant gate [Hv] and the parameters of `gate` are the same on every rank, but each rank receives only its own
    tokens' share of their gradients. The gradient is the sum over the ranks.

    Args:
        q: queries [B, T, H, K] of this rank's T tokens, float64, float32, float16 or bfloat16. All B sequences are cut
            at the same places. With cu_seqlens, B = 1 and the row holds packed sequences. T may be 0, and may differ
            between ranks.
        k: keys [B, T, H, K], dtype as q.
        v: values [B, T, Hv, V], dtype as q. Hv is a multiple of H.
        g: natural logarithm of the forget gate, dtype as q or float32, in [-inf, 0]: [B, T, Hv, K] for each key,
            [B, T, Hv] for each token and head, or [Hv] for each head. None means no decay. Every rank passes the same
            form.
        beta: which part of the difference to v_t is learnt [B, T, Hv], dtype as q or float32.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, Hv, K, V] float32 (float64 with float64 inputs), of all sequences. None means zeros.
        output_final_state: whether to return the states after the last tokens too; see
            `gla_core.distributed.chunk_gla` for what ranks then send.
        cu_seqlens: [N+1] offsets of packed sequences in the row of all ranks' tokens; see `shard`. Rows of no sequence
            have to be finite if gradients reach the parameters of `gate`; with `shard`, they may hold anything.
        group: the ranks in the order of their shards; all ranks by default.
        layout: "contiguous" or "zigzag"; see `shard`.
        backend: a request such as "reference"; see `use_backend`.
        shard: the value that `shard` returned, in place of cu_seqlens, group, layout and max_seqlen. By default the
            call makes one.
        max_seqlen: number of tokens of the longest packed sequence, or an upper bound; see `shard`.
        state_v_first: whether given and returned states are [N, Hv, V, K]. No copy is made: returned states are views.
        normalize: the eps of an l2 norm of q and k, or None; see `gla_core.chunk_delta`, also for the rest.
        gate: how log gates are computed from g; None if g holds log gates.
        gate_normalizer: the whole number by which log sigma is divided.
        beta_limit: None if beta holds betas; otherwise beta holds logits.

    Returns:
        o [B, T, Hv, V] with v's dtype, and the final states [N, Hv, K, V] (None unless output_final_state), on every
        rank, as the fields `o` and `state`.

    Raises:
        ValueError, TypeError, NoBackendError, UnknownBackendError, NotImplementedError: as in
            `gla_core.distributed.chunk_gla`.

    Example:
        >>> torch.distributed.init_process_group("nccl")
        >>> # Once per batch
        >>> cut = gla_core.distributed.shard(q.shape[1], cu_seqlens)
        >>> # In every layer
        >>> o, _ = gla_core.distributed.chunk_delta(
        ...     q, k, v, g, beta, shard=cut, normalize=1e-6
        ... )
    """
    parts = None if shard is None or shard.packed is None else shard.packed.parts
    passed = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    *tokens, number = inputs(FORWARD, passed, parts, normalize, gate, gate_normalizer, beta_limit, backend).values()
    states, cut = (initial_state, output_final_state, state_v_first), (shard, cu_seqlens, group, max_seqlen)
    gates = (None, 16) if number is None else ("logsigmoid", number)
    return ChunkGla(*over_ranks(_CHUNK_DELTA, tuple(tokens), scale, *states, *cut, layout, *gates, backend))


def _summary(tokens: Tokens, cu_seqlens: Tensor | None, backend: str) -> Summary:
    _, k, v, g, beta = tokens
    return chunk_delta_summary(k, v, g, beta, cu_seqlens, backend=backend)


def _gradient_summary(tokens: Tokens, scale: float, cu_seqlens: Tensor | None, do: Tensor, backend: str) -> Summary:
    q, k, _, g, beta = tokens
    transition, dstate = chunk_delta_gradient_summary(q, k, do, g, beta, cu_seqlens, backend=backend)
    return transition, scale * dstate


class _chunk_delta_over_ranks(OverRanks):
    """Profilers show its name, which contains the op's name."""


_CHUNK_DELTA = OpOverRanks(
    function=_chunk_delta_over_ranks,
    summary=_summary,
    gradient_summary=_gradient_summary,
    forward_spec=FORWARD,
    forward=torch_fwd,
    backward_spec=BACKWARD,
    backward=torch_bwd,
    interval=lambda backend: interval_for_backward(backend, FORWARD.name),
)
