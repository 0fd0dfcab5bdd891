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

with dstate the gradient of the final state, or None; each gradient has its input's shape and dtype. Rows outside
cu_seqlens[0] to cu_seqlens[N] belong to no sequence: whatever they hold, their o and their gradients are 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, overload

from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.ops import _autocast, _checks
from gla_core.ops._abstract_op import AbstractOp, needs_gradient, request_text
from gla_core.ops._results import Result, Results, empty
from gla_core.ops._torch_op import bypasses_torch, no_second_derivative, refuse_tangents, torch_op


@overload
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, None]: ...


@overload
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    *,
    output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
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
) -> tuple[Tensor, Tensor | None]: ...


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

    Under autocast q, k and v are cast to its dtype, which is then o's; g keeps float32.

    Args:
        q: queries [B, T, Hq, K], float64, float32, float16 or bfloat16. Query head i reads key/value head i // (Hq/H).
        k: keys [B, T, H, K], as q.
        v: values [B, T, H, V], as q.
        g: natural logarithm of the forget gate [B, T, H, K], as q or float32, in [-inf, 0]. None means no decay.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, H, K, V] float32 (float64 with float64), the state before the first token.
        output_final_state: also return the state after the last token.
        cu_seqlens: [N+1] int32 or int64 on q's device, B = 1: sequence i is rows cu_seqlens[i] to cu_seqlens[i+1].
            Empty sequences are legal. Rows behind the last offset belong to no sequence: their o, and every gradient
            of them, is 0. Without it N = B.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        o [B, T, Hq, V] as v, and the final state [N, H, K, V] as initial_state (None unless asked for).

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or layout.
        NoBackendError, UnknownBackendError: nobody can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
        >>> o, state = gla.chunk_gla(q, k, v, g, output_final_state=True)
    """
    needs_grad = needs_gradient(q, k, v, g, initial_state)
    if not needs_grad and bypasses_torch(q):
        return _run_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, False, backend)
    q, k, v, g = _autocast.tokens(q, k, v, g)
    refuse_tangents(q, k, v, g, initial_state)
    scale, request = _checks.plain_number(scale), request_text(backend)
    o, state = _torch_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, needs_grad, request)
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
    _checks.offset_values(cu_seqlens, q.shape[1])


def _results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> Results:
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = Result("o", (*q.shape[:3], v.shape[3]), v.dtype)
    state = Result("final_state", (N, *k.shape[2:], v.shape[3]), _checks.state_dtype(q))
    return o, state if output_final_state else None


def _results_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
) -> Results:
    inputs = {"dq": q, "dk": k, "dv": v, "dg": g, "dinitial_state": initial_state}
    return tuple(None if x is None else Result(name, x.shape, x.dtype) for name, x in inputs.items())


FORWARD = AbstractOp("chunk_gla_fwd", _describe, _results, _check_values, backward="chunk_gla_bwd")
BACKWARD = AbstractOp("chunk_gla_bwd", _describe_bwd, _results_bwd)


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


def _run_torch_fwd(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _without_none(q, _run_fwd(q, *args))


def _run_torch_bwd(
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
    scale = _checks.scale_or_default(q, scale)
    found = BACKWARD.run((q, k, v, g, scale, initial_state, cu_seqlens, do, dstate), backend=backend)
    return _without_none(q, found)


def _without_none(q: Tensor, results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    # A torch op cannot return None, so an empty tensor stands for it.
    return tuple(q.new_empty(0, dtype=_checks.state_dtype(q)) if x is None else x for x in results)


def _fake_fwd(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    described = args[:7]  # without needs_grad and backend
    _describe(q, *described)
    return _without_none(q, empty(q, _results(q, *described)))


def _fake_bwd(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    described = args[:8]  # without backend
    _describe_bwd(q, *described)
    return _without_none(q, empty(q, _results_bwd(q, *described)))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, _, backend = inputs
    ctx.save_for_backward(q, k, v, g, initial_state, cu_seqlens)
    ctx.scale, ctx.backend, ctx.has_final_state = scale, backend, output_final_state


def _backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple:
    q, k, v, g, initial_state, cu_seqlens = ctx.saved_tensors
    dfinal = _checks.with_contiguous_rows(dstate) if ctx.has_final_state else None
    dq, dk, dv, dg, dinitial = _torch_bwd(
        q, k, v, g, ctx.scale, initial_state, cu_seqlens, _checks.with_contiguous_rows(do), dfinal, ctx.backend
    )
    dg = None if g is None else dg
    dinitial = None if initial_state is None else dinitial
    return dq, dk, dv, dg, None, dinitial, None, None, None, None


_torch_fwd = torch_op(
    "chunk_gla_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, float? scale, Tensor? initial_state, "
    "bool output_final_state, Tensor? cu_seqlens, bool needs_grad=False, str backend='') -> (Tensor, Tensor)",
    _run_torch_fwd,
    _fake_fwd,
    _setup_context,
    _backward,
)
_torch_bwd = torch_op(
    "chunk_gla_bwd(Tensor q, Tensor k, Tensor v, Tensor? g, float? scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor do, Tensor? dstate, str backend='') -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_torch_bwd,
    _fake_bwd,
    backward=no_second_derivative("chunk_gla"),
)
