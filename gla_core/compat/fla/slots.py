"""Computes gated slot attention as `fla.ops.gsa` does, with the same arguments and results.

    P_t = P_{t-1} diag(exp(g_t)) + k_t^T s_t     p_t = softmax(scale q_t P_t)          P [K, M]
    S_t = diag(exp(g_t)) S_{t-1} + s_t^T v_t     o_t = p_t S_t                         S [M, V]

The second line is GLA. In the first one the gates are on the side of the values: the transpose of P is the state of GLA
with keys s and values k, and is read from the side of its values (gla_core/ops/gla/read_by_values.py).

Dimensions, dtypes and errors are as in `ops.chunk_gla`; M is the number of slots. Gates are natural logarithms.
Source: flash-linear-attention 0.6.0, fla/ops/gsa; Zhang et al., "Gated Slot Attention" (arXiv 2409.07146).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from gla_core.compat.fla.composed import Pair, additive_gate
from gla_core.compat.fla.ops import from_last_to_first, is_one_token, no_more, recurrent, wide_state
from gla_core.dispatch.tensors import wide
from gla_core.ops.fused import fused
from gla_core.ops.gla.read_by_values import read_by_values

KEYS = 64
"""The number of keys over which one part of a sum goes in a step."""


def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Pair]:
    """Computes gated slot attention, as `fla.ops.gsa.chunk_gsa` does.

    Args:
        s: writes into the slots [B, T, H, M].
        g: natural logarithm of the forget gate of the slots [B, T, H, M], at most 0. None means that s are logits, and
            s and g follow from them as the keys and gates of `chunk_lightnet`.
        scale: factor of the logits of the softmax; K^-1/2 by default.
        initial_state: a pair of states, [N, H, K, M] and [N, H, M, V].
        checkpoint_level: it has no effect.
        cu_seqlens_cpu: the offsets on the CPU; not used.
        kwargs: chunk_size, which has no effect. Another argument raises TypeError.

    The other arguments and the errors are as in `ops.chunk_gla`.

    Returns:
        o [B, T, Hq, V] and the pair of final states (each None unless output_final_state).
    """
    no_more("chunk_gsa", kwargs)
    return fused_recurrent_gsa(q, k, v, s, g, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Pair]:
    """Computes `chunk_gsa`; `reverse` is as in `ops.fused_recurrent_gla`, but gates that follow from s stay causal."""
    if g is None:
        s, g, _ = additive_gate(s, None, cu_seqlens)
        s = s.to(k.dtype)
    first, second = (None, None) if initial_state is None else initial_state
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if is_one_token(q, cu_seqlens, k, s, g, first):
        p, final = fused(_one_token, q, k, s, g, factor, wide_state(first, q))
        first = final if output_final_state else None
    else:

        def read(q: Tensor, k: Tensor, s: Tensor, g: Tensor | None, state: Any, offsets: Any) -> tuple[Tensor, Any]:
            return _logits(q, k, s, g, factor, state, output_final_state, offsets)

        call = from_last_to_first(read) if reverse else read
        logits, first = call(q, k, s, g, first, cu_seqlens)
        p = logits.softmax(-1, dtype=wide(logits.dtype)).to(q.dtype)
    o, second = recurrent(p, s, v, g, 1.0, second, output_final_state, reverse, False, cu_seqlens)
    return o, (first, second)


def _logits(
    q: Tensor, k: Tensor, s: Tensor, g: Tensor | None, scale: float, P: Tensor | None, has_final: bool, offsets: Any
) -> tuple[Tensor, Tensor | None]:
    """Returns scale q_t P_t [B, T, Hq, M] and the final P [N, H, K, M], None unless has_final."""
    P = wide_state(P, q)
    x = s.new_zeros(*s.shape[:2], q.shape[2], s.shape[3])
    final = recurrent(x, s, k, g, 1.0, P, True, False, True, offsets)[1] if has_final else None
    return read_by_values(q, s, k, g, scale, None if P is None else P.mT, offsets), final


def _one_token(
    q: Tensor, k: Tensor, s: Tensor, g: Tensor | None, scale: float, P: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns p of one token [B, 1, Hq, M] and P after it [B, H, K, M]; no P is one of zeros.

    Sums over keys begin with parts of at most `KEYS`: then a GPU has enough to do, and reads P in the order of memory.
    Gates are expanded before exp, and the parts are added one by one: then compiled code computes both in the kernels
    of the first sum and of the softmax.
    """
    (B, _, H, K), M, group, state_dtype = k.shape, s.shape[3], q.shape[2] // k.shape[2], wide(q.dtype)
    keys = math.gcd(K, KEYS)
    parts = (B * H, K // keys, keys, 1)
    write = s.reshape(B * H, 1, 1, M).to(state_dtype)
    after = k.reshape(parts) * write  # [B H, K / keys, keys, M]
    if P is not None:
        decay = 1 if g is None else g.reshape(write.shape).to(state_dtype).expand(-1, parts[1], -1, -1).exp()
        after = after + decay * P.reshape(after.shape)
    queries = (scale * q.to(state_dtype)).reshape(B * H, group, *parts[1:])
    read = torch.stack([(queries[:, i] * after).sum(2) for i in range(group)], 1)  # [B H, Hq / H, K / keys, M]
    p = functools.reduce(torch.add, read.unbind(2)).softmax(-1)  # [B H, Hq / H, M]
    return p.view(B, 1, H * group, M).to(q.dtype), after.view(B, H, K, M)
