"""Functions of `fla.ops` with one gate for each head or none, with the same arguments and results, computed here.

They are those of `simple_gla`, `retention`, `lightning_attn` and `linear_attn`. Dimensions, dtypes, states and errors
are as in `ops.chunk_gla`, with as many heads in q as in k and v; gates are natural logarithms, at most 0.

    simple_gla       g[b, t, h], or a constant g_gamma[h]
    retention        g[h] = log(1 - 2^(-5 - h))
    lightning_attn   g[h] = -8 h / H * (1 - layer_idx / num_layers)
    linear_attn      no gate; if normalized, o_t = scale q_t S_t / (scale q_t z_t + 1e-10) with z_t = z_{t-1} + k_t

The functions of a model differ in nothing but their arguments. A call with one token and no gradients is computed as a
decoding step.
Source: flash-linear-attention 0.6.0, fla/ops; Sun et al., "Retentive Network" (arXiv 2307.08621); Qin et al.,
"Lightning Attention-2" (arXiv 2401.04658); Katharopoulos et al., "Transformers are RNNs" (arXiv 2006.16236).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.compat.fla.ops import chunk_gla, is_one_token, layout, no_more, recurrent
from gla_core.dispatch.tensors import wide
from gla_core.ops.fused import fused

Normalized = tuple[Tensor | None, Tensor | None]
"""The state of normalized linear attention: [N, H, K, V], and the sum of the keys [N, 1, H, K]."""


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes GLA with one gate for each head, as `fla.ops.simple_gla.chunk_simple_gla` does.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, H, V].
        g: natural logarithm of the forget gate [B, T, H], at most 0.
        g_gamma: natural logarithm of a gate that is the same for all tokens [H]. Without both there is no decay. Its
            gradient is computed; flash-linear-attention gives it none.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, H, K, V], or [N, H, V, K] with state_v_first.
        output_final_state: whether to return the final state too, in the layout of initial_state.
        state_v_first: whether states are [N, H, V, K], both given and returned.
        cu_seqlens: [N+1] offsets of packed sequences, B = 1.
        cu_seqlens_cpu: the same offsets on the CPU.
        kwargs: chunk_size, which has no effect.

    Returns:
        o [B, T, H, V] and the final state (None unless output_final_state).

    Raises:
        ValueError: g and g_gamma are both given.
        TypeError: an argument is unknown. Other errors are as in `gla_core.chunk_gla`.
    """
    no_more("chunk_simple_gla", kwargs)
    gate = _one_gate(g, g_gamma)
    return chunk_gla(q, k, v, gate, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_simple_gla`."""
    return chunk_gla(q, k, v, _one_gate(g, g_gamma), scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_simple_gla`; `reverse` is as in `ops.fused_recurrent_gla`."""
    state_v_first = layout("fused_recurrent_simple_gla", state_v_first, kwargs)
    gate = _one_gate(g, g_gamma)
    return recurrent(q, k, v, gate, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens)


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Computes `chunk_simple_gla` without states.

    Returns:
        o [B, T, H, V] and None.

    Raises:
        NotImplementedError: output_attentions is set; the matrix of attentions is never computed here.
    """
    _no_attentions("parallel_simple_gla", output_attentions)
    return chunk_gla(q, k, v, g, scale, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)[0], None


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes multi-scale retention, as `fla.ops.retention.chunk_retention` does.

    Arguments, results and errors are as in `chunk_simple_gla`; states are [N, H, K, V].
    """
    no_more("chunk_retention", kwargs)
    return recurrent(q, k, v, _retention_gate(q), scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_retention`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_retention`; `reverse` and `state_v_first` are as in `ops.fused_recurrent_gla`."""
    state_v_first = layout("fused_recurrent_retention", state_v_first, kwargs)
    gate = _retention_gate(q)
    return recurrent(q, k, v, gate, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens)


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Computes `chunk_retention` without states.

    Returns:
        o [B, T, H, V] and None.

    Raises:
        NotImplementedError: output_attentions is set; the matrix of attentions is never computed here.
    """
    _no_attentions("parallel_retention", output_attentions)
    return chunk_gla(q, k, v, _retention_gate(q), scale, cu_seqlens=cu_seqlens)[0], None


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes lightning attention, as `fla.ops.lightning_attn.chunk_lightning_attn` does.

    The first head does not decay. Models such as MiniMax-Text-01 have other gates: pass these to `gla_core.chunk_gla`.

    Args:
        layer_idx: the index of the layer, from 0.
        num_layers: the number of layers of the model.

    The other arguments, the results and the errors are as in `chunk_simple_gla`; states are [N, H, K, V].
    """
    no_more("chunk_lightning_attn", kwargs)
    gate = _lightning_gate(q, layer_idx, num_layers)
    return recurrent(q, k, v, gate, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_lightning_attn`; `reverse` is as in `ops.fused_recurrent_gla`."""
    gate = _lightning_gate(q, layer_idx, num_layers)
    return recurrent(q, k, v, gate, scale, initial_state, output_final_state, reverse, cu_seqlens=cu_seqlens)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | Normalized | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Normalized | None]:
    """Computes linear attention of q and k to which a feature map is already applied, as `fla.ops.linear_attn` does.

    Args:
        scale: factor of q; K^-1/2 by default. If normalized, the output depends on it only through the 1e-10.
        initial_state: [N, H, K, V]; if normalized, also a pair of it and the sum of the keys [N, 1, H, K], either of
            which may be None.
        normalize: whether to divide by scale q_t z_t + 1e-10.

    The other arguments are as in `chunk_simple_gla`.

    Returns:
        o [B, T, H, V] and the final state (None unless output_final_state). If normalized, the second is a pair of the
        final state and the sum of the keys [N, 1, H, K], float32 (float64 with float64 inputs), which is never None.

    Raises:
        TypeError: initial_state is a pair without normalize. Other errors are as in `gla_core.chunk_gla`.
    """
    return _linear_attn(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | Normalized | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Normalized | None]:
    """Computes `chunk_linear_attn`, by default not normalized; `reverse` is as in `ops.fused_recurrent_gla`."""
    return _linear_attn(q, k, v, scale, initial_state, output_final_state, reverse, normalize, cu_seqlens)


def _one_gate(g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma are both given; expected one of them, or their sum as g")
    return g_gamma if g is None else g


def _no_attentions(function: str, asked_for: bool) -> None:
    if asked_for:
        raise NotImplementedError(f"output_attentions: not computed here; call flash-linear-attention's own {function}")


def _retention_gate(q: Tensor) -> Tensor:
    """Returns log(1 - 2^(-5 - h)) [H]."""
    return (1 - 2.0 ** (-5 - _heads(q))).log()


def _lightning_gate(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """Returns -8 h / H * (1 - layer_idx / num_layers) [H]."""
    return _heads(q) * (-8 / q.shape[2] * (1 - layer_idx / num_layers))


def _heads(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], dtype=wide(q.dtype), device=q.device)


def _linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | Normalized | None,
    output_final_state: bool,
    reverse: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | Normalized | None]:
    """Computes linear attention; the sum of the keys is one more column of the state, for values that are always 1.

    There are as many such columns as make the width of the values a multiple of 8, which kernels need not pad. A step
    adds to the sum by itself, so that the state is not copied.
    """
    if not normalize:
        if isinstance(initial_state, tuple):
            raise TypeError("initial_state is a pair; expected [N, H, K, V], or normalize=True")
        return recurrent(q, k, v, None, scale, initial_state, output_final_state, reverse, cu_seqlens=cu_seqlens)
    state, keys = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if is_one_token(q, cu_seqlens, k, v, state, keys):
        o, final = recurrent(q, k, v, None, scale, state, output_final_state)
        o, keys = fused(_divided, o, q, k, q.shape[3] ** -0.5 if scale is None else scale, keys)
        return o, (final, keys)
    V, columns = v.shape[3], 8 - v.shape[3] % 8
    ones, state = F.pad(v, (0, columns), value=1.0), _with_sum(state, keys, q, v, columns)
    o, final = recurrent(q, k, ones, None, scale, state, True, reverse, cu_seqlens=cu_seqlens)
    assert final is not None
    return fused(_over_sum, o, V), (final[..., :V] if output_final_state else None, final[..., V].unsqueeze(1))


def _over_sum(o: Tensor, V: int) -> Tensor:
    """Returns the first V columns of o, divided by the next one + 1e-10."""
    return (o[..., :V] / (o[..., V : V + 1].to(wide(o.dtype)) + 1e-10)).to(o.dtype)


def _divided(o: Tensor, q: Tensor, k: Tensor, scale: float, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns o of one token divided by scale q z + 1e-10, and z [B, 1, H, K], the sum of `keys` and k."""
    total = k.to(wide(q.dtype))
    if keys is not None:
        total = total + keys.to(total.dtype)
    return (o / (scale * (q * total).sum(-1, keepdim=True) + 1e-10)).to(o.dtype), total


def _with_sum(state: Tensor | None, keys: Tensor | None, q: Tensor, v: Tensor, columns: int) -> Tensor | None:
    """Returns the state [N, H, K, V + columns] from a state [N, H, K, V] and a sum of keys [N, 1, H, K]."""
    either = state if state is not None else keys
    if either is None:
        return None
    N, H, K, V, dtype = either.shape[0], v.shape[2], q.shape[3], v.shape[3], wide(q.dtype)
    state = q.new_zeros(N, H, K, V, dtype=dtype) if state is None else state.to(dtype)
    keys = q.new_zeros(N, 1, H, K, dtype=dtype) if keys is None else keys.to(dtype)
    return torch.cat([state, keys[:, 0, ..., None].expand(N, H, K, columns)], -1)
