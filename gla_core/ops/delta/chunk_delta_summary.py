"""Summarises parts of a sequence by a transition and a state: chunk_delta_summary and chunk_delta_gradient_summary.

Per value head, the tokens 1 to T of a part map the state before them to the state after them:

    S_T = P S_0 + R        P = A_T .. A_1,   A_t = (I - beta_t k_t^T k_t) diag(alpha_t)        in R^{K x K}
                           R is S_T with S_0 = 0                                               in R^{K x V}

and the gradient of S_T, with those of the outputs, to the gradient of S_0:

    dS_0 = P^T dS_T + scale * dR        dR is dS_0 with dS_T = 0 and scale 1

Both rules are associative: the summaries of all parts give the state that enters each of them. `chunk_gla_summary` has
a diagonal P. The columns of a state do not depend on each other, so a call of `chunk_delta_fwd` with the values [0 | v]
and the initial state [I | 0] gives [P | R], and a call of `chunk_delta_bwd` gives [P^T | dR]: the ops are lowered to
these.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484).

A backend's functions receive and return

    chunk_delta_summary(k, v, g, beta, cu_seqlens, gate_normalizer) -> (transition, state)
    chunk_delta_gradient_summary(q, k, do, g, beta, cu_seqlens, gate_normalizer) -> (transition, dstate)

transition is P [N, Hv, K, K], and P^T in the second op. gate_normalizer is as in `chunk_delta`. Rows outside
cu_seqlens[0] to cu_seqlens[N] belong to no sequence; an empty sequence has the transition I and the state 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.dispatch.backend import Lowering, OpCall, Parts, contiguous_layout
from gla_core.dispatch.request import current_request
from gla_core.dispatch.tensors import number_of_sequences, wide
from gla_core.ops import autocast, checks
from gla_core.ops._run import bypasses_torch, needs_gradient, plans_gradient, request_text, run
from gla_core.ops._torch_op import exportable, refuse_tangents, torch_op_of
from gla_core.ops.delta.chunk_delta import BACKWARD, FORWARD, torch_bwd
from gla_core.ops.delta.inputs import Gate, inputs
from gla_core.ops.spec import AS_INPUT, INPUT, WIDE, Argument, OpSpec, Result, arguments_of


@exportable
class ChunkDeltaSummary(NamedTuple):
    """Holds the results of `chunk_delta_summary`.

    Attributes:
        transition: the matrices P by which sequences map states [N, Hv, K, K], float32 (float64 with float64 inputs).
        state: the states after the sequences [N, Hv, K, V], if those before them are 0; dtype of transition.
    """

    transition: Tensor
    state: Tensor


@exportable
class ChunkDeltaGradientSummary(NamedTuple):
    """Holds the results of `chunk_delta_gradient_summary`.

    Attributes:
        transition: the matrices P^T by which sequences map gradients of states [N, Hv, K, K], float32 (float64 with
            float64 inputs).
        dstate: the gradients of the states before the sequences [N, Hv, K, V], if those of the states after them are 0
            and `scale` is 1; dtype of transition.
    """

    transition: Tensor
    dstate: Tensor


def chunk_delta_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
) -> ChunkDeltaSummary:
    """Computes the transition and the state from zero of each sequence, differentiable in k, v, g and beta.

    The state after a sequence is transition @ (state before it) + state. Under autocast k and v are cast to the dtype
    of autocast, and g and beta keep float32.

    Args:
        k: keys [B, T, H, K], float64, float32, float16 or bfloat16.
        v: values [B, T, Hv, V], dtype of k. Value head i reads key head i // (Hv/H).
        g: natural logarithm of the forget gate [B, T, Hv, K], [B, T, Hv] or [Hv], dtype of k or float32, in [-inf, 0].
            None means no decay.
        beta: which part of the difference to v_t is learnt [B, T, Hv], dtype of k or float32.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64 on k's device; B is 1. Rows before the first
            offset and after the last one belong to no sequence. None means one sequence per row of the batch, N = B.
        normalize: the eps of an l2 norm of k, as in `chunk_delta`; None means that k is used as it is.
        gate: None if g holds log gates; otherwise how they are computed from the logits g, as in `chunk_delta`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        beta_limit: None if beta holds betas. Otherwise beta holds logits, and beta_limit sigma(beta) is used.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        `transition` [N, Hv, K, K] and `state` [N, Hv, K, V], float32 (float64 with float64 inputs). An empty sequence
        has the transition I and the state 0.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or an option is out of range.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> k, v = torch.randn(2, 100, 4, 32), torch.randn(2, 100, 4, 32)
        >>> beta = torch.rand(2, 100, 4)
        >>> # [2, 4, 32, 32] and [2, 4, 32, 32]
        >>> transition, state = gla.chunk_delta_summary(
        ...     k, v, None, beta, normalize=1e-6
        ... )
    """
    options = (cu_seqlens, normalize, gate, gate_normalizer, beta_limit, backend)
    x = inputs(SUMMARY, {"k": k, "v": v, "g": g, "beta": beta}, *options)
    return ChunkDeltaSummary(*_call(SUMMARY, _torch_summary, x, cu_seqlens, backend))


def chunk_delta_gradient_summary(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
) -> ChunkDeltaGradientSummary:
    """Computes how sequences map gradients of states, and the gradients that states get from the outputs.

    The gradient of the state before a sequence is transition @ (gradient of the state after it) + scale * dstate, with
    the scale of `chunk_delta`. The function is not differentiable. Under autocast q, k and do are cast to the dtype of
    autocast, and g and beta keep float32.

    Args:
        q: queries [B, T, H, K], float64, float32, float16 or bfloat16.
        k: keys [B, T, H, K], dtype of q.
        do: gradients of the outputs [B, T, Hv, V], dtype of q.
        g: natural logarithm of the forget gate, as in `chunk_delta_summary`.
        beta: which part of the difference to v_t is learnt [B, T, Hv], dtype of q or float32.
        cu_seqlens: offsets of packed sequences [N+1], as in `chunk_delta_summary`.
        normalize: the eps of an l2 norm of q and k, as in `chunk_delta`; None means that they are used as they are.
        gate: None if g holds log gates; otherwise how they are computed from the logits g, as in `chunk_delta`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.
        beta_limit: None if beta holds betas. Otherwise beta holds logits, and beta_limit sigma(beta) is used.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        `transition` [N, Hv, K, K], the transpose of that of `chunk_delta_summary`, and `dstate` [N, Hv, K, V], float32
        (float64 with float64 inputs).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or an option is out of range.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input requires a gradient, or carries a tangent of forward-mode AD.

    Example:
        >>> q, k, do = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> beta = torch.rand(2, 100, 4)
        >>> transition, dstate = gla.chunk_delta_gradient_summary(
        ...     q, k, do, None, beta, normalize=1e-6
        ... )
    """
    if needs_gradient(q, k, do, g, beta):
        raise NotImplementedError("chunk_delta_gradient_summary has no gradient; call it under torch.no_grad()")
    options = (cu_seqlens, normalize, gate, gate_normalizer, beta_limit, backend)
    x = inputs(GRADIENT_SUMMARY, {"q": q, "k": k, "do": do, "g": g, "beta": beta}, *options)
    return ChunkDeltaGradientSummary(*_call(GRADIENT_SUMMARY, _torch_gradient_summary, x, cu_seqlens, backend))


def _call(
    spec: OpSpec, torch_op: Callable[..., Any], x: Mapping[str, Any], cu_seqlens: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    """Runs an op on its inputs."""
    *tokens, c = x.values()
    needs_grad = plans_gradient(*tokens)
    if not needs_grad and bypasses_torch(tokens[0]):
        return run(spec, (*tokens, cu_seqlens, c), current_request(backend))
    tokens = autocast.inputs(spec, *tokens)
    refuse_tangents(*tokens)
    options = (needs_grad, request_text(backend)) if spec.differentiable else (request_text(backend),)
    return torch_op(*tokens, cu_seqlens, c, *options)


# ---- by chunk_delta, with K more columns


def _widened(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the values [0 | v] [B, T, Hv, K+V], and states [I | 0] [N, Hv, K, K+V]."""
    K, V = k.shape[3], v.shape[3]
    N = number_of_sequences(len(k), cu_seqlens)
    unit = torch.eye(K, K + V, dtype=wide(k.dtype), device=k.device)
    return F.pad(v, (K, 0)), unit.expand(N, v.shape[2], K, K + V).contiguous()


def _apart(states: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Returns the first K columns of states [N, Hv, K, K+V], and the others."""
    whole = torch.contiguous_format
    return states[..., :K].clone(memory_format=whole), states[..., K:].clone(memory_format=whole)


def _by_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def chunk_delta_summary(
        k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None, gate_normalizer: int | None
    ) -> tuple[Tensor, Tensor]:
        values, unit = _widened(k, v, cu_seqlens)
        _, states, *_ = forward(
            q=torch.zeros_like(k, memory_format=torch.contiguous_format),
            k=k,
            v=values,
            g=g,
            beta=beta,
            scale=1.0,
            initial_state=unit,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            checkpoint_every=None,
            gate_normalizer=gate_normalizer,
        )
        return _apart(states, k.shape[3])

    return chunk_delta_summary


def _by_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    def chunk_delta_gradient_summary(
        q: Tensor,
        k: Tensor,
        do: Tensor,
        g: Tensor | None,
        beta: Tensor,
        cu_seqlens: Tensor | None,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor]:
        widened, unit = _widened(k, do, cu_seqlens)
        *_, states = backward(
            q=q,
            k=k,
            v=torch.zeros_like(widened),
            g=g,
            beta=beta,
            scale=1.0,
            initial_state=torch.zeros_like(unit),
            cu_seqlens=cu_seqlens,
            checkpoints=None,
            checkpoint_every=None,
            do=widened,
            dstate=unit,
            gate_normalizer=gate_normalizer,
        )
        return _apart(states, k.shape[3])

    return chunk_delta_gradient_summary


def _part(part: OpSpec, call: OpCall) -> Parts:
    """Returns the call of chunk_delta_fwd or chunk_delta_bwd by which a call is computed."""
    K, V = call.dims["K"], call.dims["V"]
    dims, dtype = {**call.dims, "V": K + V}, wide(call.dtype)
    layouts = {name: layout for name, layout in call.layouts.items() if name in part.contract}
    more = {"initial_state", "output_final_state" if part is FORWARD else "dstate"}
    scalars = {**part.scalars, "gate_normalizer": call.scalars.get("gate_normalizer")}
    if part is FORWARD:
        scalars["output_final_state"] = True
    whole = dataclasses.replace(
        call,
        op=part.name,
        dims={name: dims[name] for name in part.sizes},
        state_dtype=dtype,
        scalars=scalars,
        given=call.given.intersection(part.contract) | more,
    )
    if layouts:
        states = ("initial_state", "dstate")
        names = ("v", "do", *states, *(("q",) if part is FORWARD else ()))
        made = {a.name: a for a in part.arguments if a.name in names}
        layouts |= {
            name: contiguous_layout(part.shape(a, whole), dtype if name in states else call.dtype)
            for name, a in made.items()
        }
    return [(dataclasses.replace(whole, layouts=layouts), 1)]


def _reads(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows of sequences."""
    checks.offset_values(args["cu_seqlens"], args["k"].shape[1], None)
    return {"B T": checks.rows_of(args["cu_seqlens"])}


_SIZES = {name: FORWARD.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V", "N")}
SUMMARY = OpSpec(
    name="chunk_delta_summary",
    public="chunk_delta_summary",
    arguments=(
        Argument("k", "Tensor", "B T H K", INPUT, differentiable=True),
        *arguments_of(FORWARD, "v", "g", "beta", "cu_seqlens", "gate_normalizer"),
    ),
    results=(Result("transition", "N Hv K K", WIDE), Result("state", "N Hv K V", WIDE)),
    sizes=_SIZES,
    reads=_reads,
    flops=lambda k, v, *_, **__: 4 * k[0] * k[1] * v[2] * k[3] * (k[3] + v[3]),  # k S and k^T u, of K + V columns
    tokens=("k", "v", "g", "beta"),
    backward=BACKWARD.name,
    lowering=Lowering(FORWARD.name, lambda call: _part(FORWARD, call), _by_forward),
)
GRADIENT_SUMMARY = OpSpec(
    name="chunk_delta_gradient_summary",
    public="chunk_delta_gradient_summary",
    arguments=(
        *arguments_of(BACKWARD, "q", "k"),
        Argument("do", "Tensor", "B T Hv V", AS_INPUT),
        *arguments_of(BACKWARD, "g", "beta", "cu_seqlens", "gate_normalizer"),
    ),
    results=(Result("transition", "N Hv K K", WIDE), Result("dstate", "N Hv K V", WIDE)),
    sizes=_SIZES,
    reads=_reads,
    flops=lambda q, k, do, *_, **__: 6 * k[0] * k[1] * do[2] * k[3] * (k[3] + do[3]),  # as above, and q^T do
    tokens=("q", "k", "do", "g", "beta"),
    lowering=Lowering(BACKWARD.name, lambda call: _part(BACKWARD, call), _by_backward),
)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.gate_normalizer, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dtransition: Tensor, dstate: Tensor) -> tuple:
    """Computes the gradient by chunk_delta_bwd with K more columns, q = 0 and do = 0."""
    k, v, g, beta, cu_seqlens = ctx.saved_tensors
    values, unit = _widened(k, v, cu_seqlens)
    silent = (torch.zeros_like(k), k, values, g, beta, 1.0, unit, cu_seqlens, None, None, torch.zeros_like(values))
    dstates = torch.cat([dtransition, dstate], -1)
    _, dk, dv, dg, dbeta, _ = torch_bwd(*silent, dstates, ctx.gate_normalizer, None, ctx.backend)
    return (
        dk,
        dv[..., k.shape[3] :].clone(memory_format=torch.contiguous_format),
        None if g is None else dg,
        dbeta,
        *(None,) * 4,
    )


_torch_summary = torch_op_of(SUMMARY, _setup_context, _backward)
_torch_gradient_summary = torch_op_of(GRADIENT_SUMMARY)
