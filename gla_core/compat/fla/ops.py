"""The functions of `fla.ops.gla`, with the same arguments and results, computed by `gla_core`.

Dimensions and dtypes are as in `gla_core.chunk_gla`; a state may have any dtype. g and gk are natural logarithms of
forget gates.
Source: flash-linear-attention 0.6.0, fla/ops/gla.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from gla_core.dispatch.backend import wide
from gla_core.ops import chunk_gla as _chunk_gla
from gla_core.ops import recurrent_gla_step as _recurrent_gla_step
from gla_core.ops.calls import needs_gradient


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes gated linear attention over sequences, as `fla.ops.gla.chunk_gla` does.

    Args:
        q: queries [B, T, Hq, K].
        k: keys [B, T, H, K].
        v: values [B, T, H, V].
        g: natural logarithm of the forget gate [B, T, H, K], at most 0. None means no decay.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, H, K, V], or [N, H, V, K] with state_v_first.
        output_final_state: whether to return the final state too, in the layout of initial_state.
        state_v_first: whether states are [N, H, V, K], both given and returned.
        cu_seqlens: [N+1] offsets of packed sequences, B = 1.
        cu_seqlens_cpu: the same offsets on the CPU. They give the longest sequence without waiting for the device.

    Returns:
        o [B, T, Hq, V] and the final state (None unless output_final_state).

    Raises:
        ValueError, TypeError, NoBackendError, UnknownBackendError, NotImplementedError: as in `gla_core.chunk_gla`.
    """
    longest = None
    if cu_seqlens_cpu is not None and len(cu_seqlens_cpu) > 1:
        longest = int(cu_seqlens_cpu.diff().max())
    found = _chunk_gla(
        q,
        k,
        v,
        g,
        scale,
        _wide(initial_state, q),
        output_final_state,
        cu_seqlens,
        max_seqlen=longest,
        state_v_first=state_v_first,
    )
    return found[0], found[1]


def fused_chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_gla` without packed sequences. The original function raises NotImplementedError."""
    return chunk_gla(q, k, v, g, scale, initial_state, output_final_state)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_gla` with gates gk, as `fla.ops.gla.fused_recurrent_gla` does.

    A call with one token and no gradients is computed as a decoding step.

    Raises:
        NotImplementedError: gv or reverse is given; no op here computes these.
        TypeError: an argument is unknown. Other errors are as in `gla_core.chunk_gla`.
    """
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(
                "both state_v_first and transpose_state_layout, its former name, are given; pass the first"
            )
        warnings.warn("transpose_state_layout is deprecated; pass state_v_first", DeprecationWarning, stacklevel=2)
        state_v_first = kwargs.pop("transpose_state_layout")
    if kwargs:
        raise TypeError(f"fused_recurrent_gla takes no argument {', '.join(map(repr, kwargs))}")
    if gv is not None or reverse:
        what = "gates of values (gv)" if gv is not None else "reverse"
        raise NotImplementedError(f"{what}: not computed here; call flash-linear-attention's own fused_recurrent_gla")
    if q.shape[1] == 1 and cu_seqlens is None and not needs_gradient(q, k, v, gk, initial_state):
        o, state = _step(q, k, v, gk, scale, initial_state, state_v_first)
        return o, state if output_final_state else None
    return chunk_gla(q, k, v, gk, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, 1, Hq, V] of one token [B, 1, ...], and the state after it."""
    B, _, H, K = k.shape
    state = _wide(initial_state, q)
    if state is None:
        sizes = (v.shape[3], K) if state_v_first else (K, v.shape[3])
        state = q.new_zeros(B, H, *sizes, dtype=wide(q.dtype))
    token = (q[:, 0], k[:, 0], v[:, 0], None if gk is None else gk[:, 0])
    o, state = _recurrent_gla_step(*token, state, scale, state_v_first=state_v_first)
    return o[:, None], state


def _wide(state: Tensor | None, q: Tensor) -> Tensor | None:
    return None if state is None else state.to(wide(q.dtype))
