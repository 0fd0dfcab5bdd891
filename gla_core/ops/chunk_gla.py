"""Gated linear attention over whole sequences: the abstract ops chunk_gla_fwd and chunk_gla_bwd, and `chunk_gla`.

Per head, with alpha_t = exp(g_t):

    S_t = diag(alpha_t) S_{t-1} + k_t^T v_t        S in R^{K x V}
    o_t = scale * q_t S_t

and, with dS_t the gradient that reaches the state after step t,

    dS_{t-1} = diag(alpha_t) dS_t                   dS_t also receives scale * q_t^T do_t before that
    dq_t = scale * S_t do_t        dk_t = dS_t v_t        dv_t = k_t dS_t
    dg_t = alpha_t * sum_V (S_{t-1} * dS_t)

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).

A backend's functions receive and return

    chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens) -> (o, final_state or None)
    chunk_gla_bwd(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate)
        -> (dq, dk, dv, dg or None, dinitial_state or None)

with dstate the gradient of the final state, or None; each gradient has its input's shape and dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.ops import _checks
from gla_core.ops._abstract_op import AbstractOp, bypasses_torch, library, needs_gradient, request_text


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, differentiable in q, k, v, g and initial_state.

    Args:
        q: queries [B, T, Hq, K], float64, float32, float16 or bfloat16. Query head i reads key/value head i // (Hq/H).
        k: keys [B, T, H, K], as q.
        v: values [B, T, H, V], as q.
        g: natural logarithm of the forget gate [B, T, H, K], as q or float32, in [-inf, 0]. None means no decay.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, H, K, V] float32 (float64 with float64), the state before the first token.
        output_final_state: also return the state after the last token.
        cu_seqlens: [N+1] int32 or int64 on q's device, B = 1: sequence i is rows cu_seqlens[i] to cu_seqlens[i+1].
            Empty sequences are legal. Without it N = B.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        o [B, T, Hq, V] as v, and the final state [N, H, K, V] as initial_state (None unless asked for).

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or layout.
        NoBackendError, UnknownBackendError: nobody can serve the request.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
        >>> o, state = gla.chunk_gla(q, k, v, g, output_final_state=True)
    """
    needs_grad = needs_gradient(q, k, v, g, initial_state)
    if not needs_grad and bypasses_torch(q):
        return _run_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, False, backend)
    o, state = torch.ops.gla.chunk_gla_fwd.default(
        q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, needs_grad, request_text(backend)
    )
    return o, state if output_final_state else None


def _describe(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    cu_seqlens: Any = None,
    op: str = "chunk_gla_fwd",
) -> OpCall:
    """Check the arguments, reading no values, and describe the call."""
    dims = _checks.queries_keys_values(q, k, v, "B T Hq K", "B T H K", "B T H V")
    _checks.gate(g, q, "B T H K", dims)
    _checks.number_or_none("scale", scale)
    _checks.flag("output_final_state", output_final_state)
    if cu_seqlens is None:
        dims["N"] = dims["B"]
    else:
        _checks.cu_seqlens(cu_seqlens, dims)
    if initial_state is not None:
        _checks.tensor("initial_state", initial_state, "N H K V", dims)
        _checks.dtype("initial_state", initial_state, [_checks.state_dtype(q)], f" with {q.dtype} inputs")
    _checks.same_device(q=q, k=k, v=v, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    _checks.last_dimension_contiguous(q=q, k=k, v=v, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return OpCall(
        op=op,
        device=q.device,
        dtype=q.dtype,
        dims={name: dims[name] for name in ("B", "T", "H", "Hq", "K", "V", "N")},
        gate_dtype=None if g is None else g.dtype,
        state_dtype=None if initial_state is None else initial_state.dtype,
        variable_length=cu_seqlens is not None,
    )


def _describe_bwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    do: Any = None,
    dstate: Any = None,
) -> OpCall:
    call = _describe(q, k, v, g, scale, initial_state, False, cu_seqlens, op="chunk_gla_bwd")
    dims = dict(call.dims)
    if do is not None:
        _checks.tensor("do", do, "B T Hq V", dims)
        _checks.dtype("do", do, [q.dtype], ", as v")
    if dstate is not None:
        _checks.tensor("dstate", dstate, "N H K V", dims)
        _checks.dtype("dstate", dstate, [_checks.state_dtype(q)], f" with {q.dtype} inputs")
    _checks.same_device(q=q, do=do, dstate=dstate)
    _checks.last_dimension_contiguous(do=do, dstate=dstate)
    return call


def _check_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> None:
    _checks.no_nan(q=q, k=k, v=v, g=g, initial_state=initial_state)
    _checks.gate_values(g)
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != q.shape[1] or offsets != sorted(offsets):
            raise ValueError(f"cu_seqlens is {offsets}; expected offsets that rise from 0 to T = {q.shape[1]}")


FORWARD = AbstractOp("chunk_gla_fwd", _describe, _check_values, backward="chunk_gla_bwd")
BACKWARD = AbstractOp("chunk_gla_bwd", _describe_bwd)


def _run_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    needs_grad: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    scale = _checks.scale_or_default(q, scale)
    return FORWARD.run((q, k, v, g, scale, initial_state, output_final_state, cu_seqlens), needs_grad, backend)


def _torch_fwd(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    o, state = _run_fwd(q, *args)
    return o, _no_state(q) if state is None else state


def _torch_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
    backend: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    scale = _checks.scale_or_default(q, scale)
    dq, dk, dv, dg, dinitial = BACKWARD.run((q, k, v, g, scale, initial_state, cu_seqlens, do, dstate), backend=backend)
    return dq, dk, dv, _no_state(q) if dg is None else dg, _no_state(q) if dinitial is None else dinitial


def _no_state(q: Tensor) -> Tensor:
    # A torch op cannot return None, so an empty tensor stands for it.
    return q.new_empty(0, dtype=_checks.state_dtype(q))


def _fake_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    needs_grad: bool = False,
    backend: str = "",
) -> tuple[Tensor, Tensor]:
    dims = _describe(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens).dims
    o = v.new_empty([dims[name] for name in ("B", "T", "Hq", "V")])
    if not output_final_state:
        return o, _no_state(q)
    return o, q.new_empty([dims[name] for name in ("N", "H", "K", "V")], dtype=_checks.state_dtype(q))


def _fake_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
    backend: str = "",
) -> tuple[Tensor, ...]:
    _describe_bwd(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate)
    return tuple(x.new_empty(x.shape) if x is not None else _no_state(q) for x in (q, k, v, g, initial_state))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, _, backend = inputs
    ctx.save_for_backward(q, k, v, g, initial_state, cu_seqlens)
    ctx.scale, ctx.backend, ctx.has_final_state = scale, backend, output_final_state


def _backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple:
    q, k, v, g, initial_state, cu_seqlens = ctx.saved_tensors
    dfinal = _checks.with_contiguous_rows(dstate) if ctx.has_final_state else None
    dq, dk, dv, dg, dinitial = torch.ops.gla.chunk_gla_bwd.default(
        q, k, v, g, ctx.scale, initial_state, cu_seqlens, _checks.with_contiguous_rows(do), dfinal, ctx.backend
    )
    dg = None if g is None else dg
    dinitial = None if initial_state is None else dinitial
    return dq, dk, dv, dg, None, dinitial, None, None, None, None


def _no_second_derivative(ctx: Any, *grads: Tensor) -> tuple:
    raise RuntimeError("chunk_gla has no second derivative; do not pass create_graph=True through it")


library.define(
    "chunk_gla_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, float? scale, Tensor? initial_state, "
    "bool output_final_state, Tensor? cu_seqlens, bool needs_grad=False, str backend='') -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "chunk_gla_bwd(Tensor q, Tensor k, Tensor v, Tensor? g, float? scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor do, Tensor? dstate, str backend='') -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.impl("chunk_gla_fwd", _torch_fwd, "CompositeExplicitAutograd")
library.impl("chunk_gla_bwd", _torch_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("gla::chunk_gla_fwd", _fake_fwd, lib=library)
torch.library.register_fake("gla::chunk_gla_bwd", _fake_bwd, lib=library)
torch.library.register_autograd("gla::chunk_gla_fwd", _backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd("gla::chunk_gla_bwd", _no_second_derivative, lib=library)
