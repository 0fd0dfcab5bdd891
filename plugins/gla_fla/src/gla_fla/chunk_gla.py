"""GLA over whole sequences by FLA's chunk kernels.

The forward is FLA's public function. For its backward, FLA's autograd function saves the inputs, the scores A inside
the chunks and, for float32 gates, their cumulative sum; it computes the states again. A backend's chunk_gla_bwd does
not receive A or the cumulative sum. So the backward here computes them first, and then calls FLA's backward.

Sizes: B batch, T time, H heads, K key width, V value width, N sequences, C chunk length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_fla import native


def chunk_gla_fwd(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, H, V]
    g: Tensor | None,  # [B, T, H, K]
    scale: float,
    initial_state: Tensor | None,  # [N, H, K, V] float32
    output_final_state: bool,
    cu_seqlens: Tensor | None,  # [N+1]
    checkpoint_every: int | None,
) -> tuple[Tensor, Tensor | None, None]:
    """Computes the op; see gla_core/ops/gla/chunk_gla.py."""
    if not q.numel():
        final_state = _copy_or_zeros(initial_state, k, v, cu_seqlens) if output_final_state else None
        return v.new_empty(v.shape), final_state, None
    sequences = {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
    with torch.no_grad():
        o, final_state = native.chunk_gla(q, k, v, _gate(g, k), scale=scale, **sequences)
        _clear_padding(cu_seqlens, o)
        return o, final_state, None


def chunk_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    do: Tensor,  # [B, T, H, V]
    dstate: Tensor | None,  # [N, H, K, V] float32
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes the op; see gla_core/ops/gla/chunk_gla.py."""
    if not q.numel():
        dg = None if g is None else g.new_empty(g.shape)
        dinitial_state = None if initial_state is None else _copy_or_zeros(dstate, k, v, cu_seqlens)
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dg, dinitial_state
    with torch.no_grad(), torch.cuda.device_of(q):
        dq, dk, dv, dg, dinitial_state = _backward(
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            g=_gate(g, k).contiguous(),
            scale=scale,
            initial_state=None if initial_state is None else initial_state.contiguous(),
            cu_seqlens=cu_seqlens,
            do=do.contiguous(),
            dstate=None if dstate is None else dstate.contiguous(),
        )
        dq, dk, dv, dg = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None if g is None else dg.to(g.dtype)
        _clear_padding(cu_seqlens, dq, dk, dv, dg)
        return dq, dk, dv, dg, dinitial_state


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
) -> tuple[Tensor, ...]:
    """Calls FLA's backward on contiguous tensors.

    Returns:
        dq, dk, dv, dg, and dinitial_state or None. dv has the dtype of v; dq, dk and dg are float32.
    """
    fla = native.fla("ops.gla.chunk")
    C = min(64, max(16, 1 << (q.shape[1] - 1).bit_length()))  # as in FLA's forward
    packed = {"cu_seqlens": cu_seqlens, "chunk_size": C}
    # The same call as in FLA's forward: FLA finds the result in its cache and need not wait for the device.
    indices = None if cu_seqlens is None else fla.prepare_chunk_indices(cu_seqlens, C, cu_seqlens_cpu=None)
    g_cumsum = fla.chunk_local_cumsum(g, scale=fla.RCP_LN2, **packed)  # [B, T, H, K] float32, base-2 logarithms
    A = fla.chunk_gla_fwd_intra_gk(q=q, k=k, g=g_cumsum, scale=scale, chunk_indices=indices, **packed)  # [B, T, H, C]
    return fla.chunk_gla_bwd(
        q=q,
        k=k,
        v=v,
        g=g,
        g_cumsum=g_cumsum,
        scale=scale,
        initial_state=initial_state,
        h=None,
        A=A,
        do=do,
        dht=dstate,
        chunk_indices=indices,
        **packed,
    )


def _gate(g: Tensor | None, k: Tensor) -> Tensor:
    # FLA's chunk_gla has no ungated form.
    return k.new_zeros(k.shape, dtype=torch.float32) if g is None else g


def _clear_padding(cu_seqlens: Tensor | None, *results: Tensor | None) -> None:
    """Sets rows that belong to no sequence to 0, in place, because FLA does not write them."""
    if cu_seqlens is None:
        return
    for x in results:
        if x is not None:
            row = torch.arange(x.shape[1], device=x.device)
            x.masked_fill_(((row < cu_seqlens[0]) | (row >= cu_seqlens[-1]))[:, None, None], 0)


def _copy_or_zeros(state: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns a copy of `state`, or zeros [N, H, K, V] if it is None, as the result of a call without tokens.

    FLA is not called for it, because FLA's tuning would time empty launches.
    """
    if state is not None:
        return state.clone(memory_format=torch.contiguous_format)
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    return k.new_zeros(N, *k.shape[2:], v.shape[-1], dtype=torch.float32)
