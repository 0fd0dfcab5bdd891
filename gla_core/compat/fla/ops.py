"""The functions of `fla.ops.gla`, with the same arguments and results, computed by `gla_core`.

Dimensions and dtypes are as in `gla_core.chunk_gla`; a state may have any dtype. g and gk are natural logarithms of
forget gates.
Source: flash-linear-attention 0.6.0, fla/ops/gla.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gla_core.dispatch.tensors import wide
from gla_core.ops.calls import needs_gradient
from gla_core.ops.gla import chunk_gla as _chunk_gla
from gla_core.ops.gla import recurrent_gla_step as _recurrent_gla_step


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

    The backward computes the states of chunks again, as the original's does, so that it takes no more memory.

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
    rest = (scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    return over_sequences(_chunk_gla, (q, k, v, g), *rest)


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

    A call with one token and no gradients is computed as a decoding step. With `reverse` the tokens of each sequence
    are read from the last to the first, and the final state is the state after the first.

    Raises:
        NotImplementedError: gv is given; no op here computes it.
        TypeError: an argument is unknown. Other errors are as in `gla_core.chunk_gla`.
    """
    state_v_first = layout("fused_recurrent_gla", state_v_first, kwargs)
    if gv is not None:
        raise NotImplementedError(
            "gates of values (gv): not computed here; call flash-linear-attention's own fused_recurrent_gla"
        )
    return recurrent(q, k, v, gk, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens)


def layout(function: str, state_v_first: bool, rest: dict[str, Any]) -> bool:
    """Returns whether states have V first, by that argument or its former name in `rest`; refuses all other names."""
    former = "transpose_state_layout"
    if former in rest:
        if state_v_first:
            raise ValueError(f"both state_v_first and {former}, its former name, are given; pass the first")
        warnings.warn(f"{former} is deprecated; pass state_v_first", DeprecationWarning, stacklevel=3)
        state_v_first = rest.pop(former)
    no_more(function, rest)
    return state_v_first


def no_more(function: str, rest: dict[str, Any]) -> None:
    """Refuses the keyword arguments of a function that it does not have; chunk_size is ignored."""
    rest.pop("chunk_size", None)
    if rest:
        raise TypeError(f"{function} takes no argument {', '.join(map(repr, rest))}")


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_gla` with gates of any form, and as a decoding step if there is one token and no gradient."""
    if is_one_token(q, cu_seqlens, k, v, g, initial_state):
        rest = (scale, initial_state, output_final_state, state_v_first)
        return one_token(_recurrent_gla_step, (q, k, v, g), *rest)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Any, offsets: Any) -> tuple[Tensor, Any]:
        return chunk_gla(q, k, v, g, scale, state, output_final_state, state_v_first, offsets)

    call = from_last_to_first(run) if reverse else run
    return call(q, k, v, g, initial_state, cu_seqlens)


def from_last_to_first(run: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Wraps a function of tokens [B, T, ...], a state and offsets so that it reads the tokens in the opposite order.

    Packed sequences change places too, so that their states are taken and returned in the opposite order.
    """

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Any, offsets: Any) -> tuple[Tensor, Any]:
        tokens = [x.flip(1) for x in (q, k, v)]
        gate = g if g is None or g.ndim == 1 else g.flip(1)
        if offsets is None:
            o, final = run(*tokens, gate, state, None)
            return o.flip(1), final
        state = None if state is None else state.flip(0)
        o, final = run(*tokens, gate, state, q.shape[1] - offsets.flip(0))
        return o.flip(1), None if final is None else final.flip(0)

    return call


def over_sequences(
    op: Callable[..., tuple],
    tokens: tuple[Any, ...],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    recompute_states: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls a public op of sequences, such as `gla_core.chunk_gla`, with an initial state of any dtype.

    Args:
        op: the op.
        tokens: its tokens [B, T, ...], q first.
        options: further arguments of the op by keyword.
    """
    options |= {"state_v_first": state_v_first, "recompute_states": recompute_states, "max_seqlen": None}
    if cu_seqlens_cpu is not None and len(cu_seqlens_cpu) > 1:
        options["max_seqlen"] = int(cu_seqlens_cpu.diff().max())
    state = wide_state(initial_state, tokens[0])
    o, state = op(*tokens, scale, state, output_final_state, cu_seqlens, **options)
    return o, state


def is_one_token(q: Tensor, cu_seqlens: Tensor | None, *others: Tensor | None) -> bool:
    """Returns whether a call has one token in each row, and no gradient of q or of the others is asked for."""
    return q.shape[1] == 1 and cu_seqlens is None and not needs_gradient(q, *others)


def one_token(
    op: Callable[..., tuple],
    tokens: tuple[Any, ...],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls a public op of one token, such as `gla_core.recurrent_gla_step`; arguments are as in `over_sequences`."""
    q, _, v, *_ = tokens
    state = wide_state(initial_state, q)
    if state is None:
        sizes = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
        state = q.new_zeros(len(v), v.shape[2], *sizes, dtype=wide(q.dtype))
    rows = [x if x is None or x.ndim == 1 else x[:, 0] for x in tokens]  # a gate [H] is the same for all tokens
    o, state = op(*rows, state, scale, state_v_first=state_v_first, **options)
    return o[:, None], state if output_final_state else None


def wide_state(state: Tensor | None, q: Tensor) -> Tensor | None:
    """Casts a state to the dtype of states of q."""
    return None if state is None else state.to(wide(q.dtype))
