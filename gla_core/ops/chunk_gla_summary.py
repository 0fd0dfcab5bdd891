"""What passes from one part of a sequence to the next: the abstract op chunk_gla_summary, and its public function.

Per head, with alpha_t = exp(g_t), the decay of a sequence of tokens 1 to T, its state from zero, and backwards the
gradient from zero that its queries (in the place of k) and output gradients (in that of v) give the state before it:

    D = alpha_1 * .. * alpha_T
    S = sum over t of (k_t * alpha_{t+1} * .. * alpha_T)^T v_t
    S = sum over t of (k_t * alpha_1 * .. * alpha_t)^T v_t          backwards

so that the state after a sequence is diag(D) S_0 + S, with S_0 the state before it, and the gradient of S_0 is
diag(D) dS_T + scale * S backwards, with dS_T that of the state after it. This is associative: who holds the summaries
of all parts of a sequence knows what enters each of them. `gla_core.distributed` is made of it.

Both directions are one op, with one description, because a backend builds both with the same kernel; a backward of
`chunk_gla` for the same number would cost several times as much. It has no factor: its caller multiplies, in place of
every token, one state.

Source: Chou et al., "ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (arXiv 2507.01004).

A backend's function receives and returns

    chunk_gla_summary(k, v, g, cu_seqlens, backwards) -> (decay, state)

Rows outside cu_seqlens[0] to cu_seqlens[N] belong to no sequence; an empty sequence has decay 1 and state 0. Backwards,
k and v may have more heads than g, and the products of a group are summed: the queries of a group share a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_core.ops import autocast, checks
from gla_core.ops._run import bypasses_torch, needs_gradient, request_text, run
from gla_core.ops._torch_op import refuse_tangents, torch_op_of
from gla_core.ops.chunk_gla import torch_bwd
from gla_core.ops.spec import AS_INPUT, GATE, INPUT, OFFSETS, WIDE, Argument, OpSpec, Result

_NO_GRADIENT = "chunk_gla_summary has no gradient backwards; call it under torch.no_grad()"


def chunk_gla_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    *,
    backwards: bool = False,
) -> tuple[Tensor, Tensor]:
    """The decay and the state from zero of each sequence, differentiable in k, v and g.

    The state after a sequence is decay[..., None] * (state before it) + state. Under autocast k and v are cast to its
    dtype; g keeps float32.

    Args:
        k: keys [B, T, H, K], float64, float32, float16 or bfloat16.
        v: values [B, T, H, V], as k.
        g: natural logarithm of the forget gate [B, T, H, K], as k or float32, in [-inf, 0]. None means no decay.
        cu_seqlens: [N+1] int32 or int64 on k's device, B = 1: sequence i is rows cu_seqlens[i] to cu_seqlens[i+1].
            Empty sequences are legal. Rows behind the last offset belong to no sequence. Without it N = B.
        backend: a request such as "reference"; see `use_backend`.
        backwards: k holds queries [B, T, Hq, K] and v gradients of outputs [B, T, Hq, V]: the state is then the
            gradient of the state before the sequence that these outputs give, but for their scale, summed over the
            Hq/H query heads of each head of g (without g, H = Hq). It has no gradient itself.

    Returns:
        decay [N, H, K] and state [N, H, K, V], float32 (float64 with float64). Of an empty sequence 1 and 0.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype or device.
        NoBackendError, UnknownBackendError: nobody can serve the request.
        NotImplementedError: backwards where a gradient is needed, or an input with a tangent of forward-mode AD.

    Example:
        >>> k, v = torch.randn(2, 100, 4, 32), torch.randn(2, 100, 4, 32)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
        >>> decay, state = gla.chunk_gla_summary(k, v, g)  # [2, 4, 32], [2, 4, 32, 32]
    """
    needs_grad = needs_gradient(k, v, g)
    if backwards and needs_grad:
        raise NotImplementedError(_NO_GRADIENT)
    if not needs_grad and bypasses_torch(k):
        return run(SUMMARY, (k, v, g, cu_seqlens, backwards), False, backend)
    _, k, v, g = autocast.tokens(k, k, v, g)
    refuse_tangents(k, v, g)
    return _torch_summary(k, v, g, cu_seqlens, backwards, needs_grad, request_text(backend))


def _bind(given: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """How many sequences there are, and heads of states: those of the gates, or all where there are none."""
    sizes["N"] = sizes["B"]
    sizes.setdefault("H", sizes["Hq"])
    if sizes["Hq"] != sizes["H"] and not given["backwards"]:
        raise ValueError(f"k has {sizes['Hq']} heads; expected {sizes['H']}, as g")
    if given["cu_seqlens"] is not None:
        checks.packed(sizes, of="k")


def _check_values(k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, backwards: bool) -> None:
    checks.no_nan(k=k, v=v, g=g)
    checks.gate_values(g)
    checks.offset_values(cu_seqlens, k.shape[1], None)


def _flops(k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """A token adds k^T v to the state of each of its heads."""
    B, T, Hq, K = k
    return 2 * B * T * Hq * K * v[3]


SUMMARY = OpSpec(
    name="chunk_gla_summary",
    public="chunk_gla_summary",
    arguments=(
        Argument("k", "Tensor", "B T Hq K", INPUT, differentiable=True),
        Argument("v", "Tensor", "B T Hq V", AS_INPUT, differentiable=True),
        Argument("g", "Tensor?", "B T H K", GATE, None, differentiable=True, without_last="one gate a head"),
        Argument("cu_seqlens", "Tensor?", "N+1", OFFSETS, None),
        Argument("backwards", "bool", default=False),
    ),
    results=(Result("decay", "N H K", WIDE), Result("state", "N H K V", WIDE)),
    sizes={"B": "B", "T": "T", "H": "H", "Hq": "H", "K": "K", "V": "V", "N": "B"},
    bind=_bind,
    check_values=_check_values,
    flops=_flops,
    backward="chunk_gla_bwd",
)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    k, v, g, cu_seqlens, backwards, _, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(k, v, g, cu_seqlens, output[0])
    ctx.backwards, ctx.backend = backwards, backend


def _backward(ctx: Any, ddecay: Tensor | None, dstate: Tensor | None) -> tuple:
    """That of chunk_gla where nobody asks: q = 0 and do = 0; the decay adds the same to every gate of a sequence."""
    if ctx.backwards:
        raise NotImplementedError(_NO_GRADIENT)
    k, v, g, cu_seqlens, decay = ctx.saved_tensors
    dk = dv = dg = None
    if dstate is not None:
        silent = (torch.zeros_like(k), k, v, g, 1.0, None, cu_seqlens, None, None, torch.zeros_like(v))
        _, dk, dv, dg, _ = torch_bwd(*silent, dstate, None, ctx.backend)
    if g is None:
        return dk, dv, None, None, None, None, None
    if ddecay is not None:
        own = _of_tokens(ddecay * decay, g.shape[1], cu_seqlens)  # D is a product of the gates: dD / dg_t = D
        dg = own.to(g.dtype) if dg is None else (own + dg).to(g.dtype)
    return dk, dv, dg, None, None, None, None


def _of_tokens(x: Tensor, T: int, cu_seqlens: Tensor | None) -> Tensor:
    """For each token the row of x [N, ...] that is its sequence's [B, T, ...]; 0 where it has none."""
    if cu_seqlens is None:
        return x[:, None].expand(-1, T, *x.shape[1:])
    sequence = torch.searchsorted(cu_seqlens, torch.arange(T, device=x.device, dtype=cu_seqlens.dtype), right=True)
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (1, 1))[sequence][None]


_torch_summary = torch_op_of(SUMMARY, _setup_context, _backward)
