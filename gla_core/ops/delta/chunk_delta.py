"""Computes the delta rule over sequences: the abstract ops chunk_delta_fwd and chunk_delta_bwd, and `chunk_delta`.

Per value head, with alpha_t = exp(g_t), a number for each key or one number, and beta_t a number:

    u_t = beta_t (v_t - k_t diag(alpha_t) S_{t-1})        S in R^{K x V}
    S_t = diag(alpha_t) S_{t-1} + k_t^T u_t
    o_t = scale * q_t S_t

The state forgets what it holds at the key k_t before it learns v_t there: this is the delta rule. With a gate for each
key it is Kimi delta attention (KDA), with one gate it is the gated delta rule (GDN), and without a gate DeltaNet.
Without the read, so that u_t = v_t, it is `chunk_gla`. With dS_t the gradient that reaches the state after step t,

    du_t = k_t dS_t                                 dS_t also receives scale * q_t^T do_t before that
    dv_t = beta_t du_t        dbeta_t = du_t . (v_t - k_t diag(alpha_t) S_{t-1})
    dR_t = dS_t - k_t^T dv_t                        the gradient of diag(alpha_t) S_{t-1}
    dq_t = scale * S_t do_t   dk_t = dS_t u_t - diag(alpha_t) S_{t-1} dv_t
    dg_t = alpha_t * sum_V (S_{t-1} * dR_t)         summed over the keys, or over keys and tokens, that share a gate
    dS_{t-1} = diag(alpha_t) dR_t

Value head i reads query and key head i // (Hv/H); Hv is a multiple of H.

Sources: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484)
and "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464); Kimi Team, "Kimi Linear: An Expressive,
Efficient Attention Architecture" (arXiv 2510.26692).

A backend's functions receive and return

    chunk_delta_fwd(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every,
                    gate_normalizer) -> (o, state or None, checkpoints or None)
    chunk_delta_bwd(q, k, v, g, beta, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate,
                    gate_normalizer) -> (dq, dk, dv, dg or None, dbeta, dinitial_state or None)

All of them are as in `chunk_gla`, checkpoints and rows that belong to no sequence too, and beta is [B, T, Hv]. beta may
be 0, so nothing may be divided by it. A gate of -inf erases the state exactly, and its gradient is 0. Keys need not
have unit length; the recurrence is bounded if beta |k|^2 is at most 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from gla_core.dispatch.request import current_request
from gla_core.ops import _invariant, _sequences, autocast, checks
from gla_core.ops._autograd import gradient
from gla_core.ops._run import bypasses_torch, plans_gradient, request_text, run
from gla_core.ops._torch_op import eager_op_of, no_second_derivative, refuse_tangents, torch_op_of
from gla_core.ops.delta.inputs import Gate, inputs
from gla_core.ops.gla.chunk_gla import BACKWARD as GLA_BACKWARD
from gla_core.ops.gla.chunk_gla import FORWARD as GLA_FORWARD
from gla_core.ops.gla.chunk_gla import GATE_SHAPES, ChunkGla, ChunkGlaWithCheckpoints, interval_for_backward
from gla_core.ops.spec import (
    AS_INPUT,
    AS_INPUT_OR_FLOAT32,
    INPUT,
    Argument,
    OpSpec,
    Result,
    arguments_of,
    gate,
    plain_number,
    scale_or_default,
)


@overload
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
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
    checkpoint_every: None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    recompute_states: bool = False,
) -> ChunkGla: ...


@overload
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
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
    checkpoint_every: int,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    recompute_states: bool = False,
) -> ChunkGlaWithCheckpoints: ...


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
    *,
    normalize: float | None = None,
    gate: Gate = None,
    gate_normalizer: int = 16,
    beta_limit: float | None = None,
    backend: str | None = None,
    checkpoint_every: int | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    recompute_states: bool = False,
) -> ChunkGla | ChunkGlaWithCheckpoints:
    """Computes a delta rule, differentiable in q, k, v, g, beta, initial_state and the parameters of `gate`.

    Per head, with a state S in R^{K x V}, which forgets what it holds at the key k_t before it learns v_t there:

        S_t = (I - beta_t k_t^T k_t) diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t
        o_t = scale * q_t S_t

    With a gate for each key it is Kimi delta attention, with a gate for each head the gated delta rule, and without a
    gate DeltaNet. The state is bounded if beta |k|^2 is at most 2; models normalise q and k.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g and beta keep float32.

    Args:
        q: queries [B, T, H, K], float64, float32, float16 or bfloat16.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, Hv, V], dtype of q. Value head i reads query and key head i // (Hv/H). Hv is a multiple of H.
        g: natural logarithm of the forget gate, dtype of q or float32, in [-inf, 0]. Its shape is its form:
            [B, T, Hv, K] for each key, [B, T, Hv] for each token and head, or [Hv] for each head, the same for all
            tokens. None means no decay. Only with GLA_CHECK=1 in the environment are the values read; values above 0
            then raise ValueError.
        beta: which part of the difference to v_t is learnt [B, T, Hv], dtype of q or float32. It is between 0 and 1 in
            most models, and between 0 and 2 in those whose transitions may have negative eigenvalues.
        scale: factor of the output; None means K^-1/2.
        initial_state: the state before the first token [N, Hv, K, V], float32 (float64 with float64 inputs). None means
            0.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64 on q's device, as in `chunk_gla`; B is 1.
        normalize: the eps of an l2 norm of q and k, which are divided by sqrt(sum of squares + eps) for each token and
            head, such as 1e-6. None means that they are used as they are.
        gate: None if g holds log gates. Otherwise g holds logits of any value, and the log gates are computed from
            them: log sigma(g) / gate_normalizer with "logsigmoid", -exp(A_log) softplus(g + dt_bias) with ("softplus",
            A_log, dt_bias), and bound sigma(exp(A_log) (g + dt_bias)) with ("bounded", A_log, dt_bias, bound). A_log is
            [Hv], dt_bias is [Hv] or, for gates per key, [Hv, K], both of any dtype of floating-point numbers; None
            stands for 0. bound is the smallest log gate, below 0.
        gate_normalizer: the whole number by which log sigma is divided, at least 1; used with "logsigmoid" alone.
        beta_limit: None if beta holds betas. Otherwise beta holds logits, and beta_limit sigma(beta) is used: 1, or 2
            for negative eigenvalues.
        backend: a request such as "reference"; see `use_backend`.
        checkpoint_every: L, a multiple of 64: also return the state before every L-th token of a sequence.
        max_seqlen: the number of tokens of the longest packed sequence, or an upper bound; a hint, as in `chunk_gla`.
        state_v_first: whether initial_state, the final state and the checkpoints have V before K: [N, Hv, V, K].
        recompute_states: whether the backward computes the states of all chunks again, as in `chunk_gla`.

    Returns:
        `o` [B, T, Hv, V] with the dtype of v, and `state`, the final state [N, Hv, K, V] with the dtype of
        initial_state (None unless asked for). With checkpoint_every also `checkpoints`, as `chunk_gla` returns them.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or an option is out of range.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
        >>> beta = torch.rand(2, 100, 4)
        >>> o, state = gla.chunk_delta(
        ...     q, k, v, g, beta, output_final_state=True, normalize=1e-6
        ... )
    """
    if state_v_first:
        initial_state = checks.transposed(initial_state)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = (normalize, gate, gate_normalizer, beta_limit, backend)
    q, k, v, g, beta, c = inputs(FORWARD, tokens, cu_seqlens, *options).values()
    needs_grad, every = plans_gradient(q, k, v, g, beta, initial_state), checkpoint_every
    request = current_request(backend) if bypasses_torch(q) else None  # None if PyTorch has to see the call
    if request is None:
        q, k, v, g, beta = autocast.inputs(FORWARD, q, k, v, g, beta)
        refuse_tangents(q, k, v, g, beta, initial_state)
        scale = plain_number(scale)
    else:
        scale = scale_or_default(q, scale)
    if every is None and needs_grad and q.is_cuda and not recompute_states:
        every = interval_for_backward(request or backend, FORWARD.name)
    args = (q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, every, c, max_seqlen)
    try:
        if request is None:
            o, state, checkpoints = torch_fwd(*args, needs_grad, request_text(backend))
        elif needs_grad:
            o, state, checkpoints = _eager_fwd(*args, True, request)
        else:
            o, state, checkpoints = run(FORWARD, args, request)
    except (ValueError, TypeError) as error:
        if not state_v_first:
            raise
        raise FORWARD.error_in_layout(error, args) from None
    state = state if output_final_state else None
    if state_v_first:
        state, checkpoints = checks.transposed(state), checks.transposed(checkpoints)
    return ChunkGla(o, state) if checkpoint_every is None else ChunkGlaWithCheckpoints(o, state, checkpoints)


TOKENS = (
    Argument("q", "Tensor", "B T H K", INPUT, differentiable=True),
    Argument("k", "Tensor", "B T H K", AS_INPUT, differentiable=True),
    Argument("v", "Tensor", "B T Hv V", AS_INPUT, differentiable=True),
    gate(GATE_SHAPES, differentiable=True),
    Argument("beta", "Tensor", "B T Hv", AS_INPUT_OR_FLOAT32, differentiable=True),
)
_SIZES = {name: size for name, size in GLA_FORWARD.sizes.items() if name != "Hq"}


def _forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Counts the products of k and the state, of k and u, and of q and the state for each value head."""
    B, T, _H, K = q
    return 6 * B * T * v[2] * K * v[3]


def _backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Counts two products for each of the forward, and the two by which it computes the states, once more."""
    B, T, _H, K = q
    return 16 * B * T * v[2] * K * v[3]


FORWARD = OpSpec(
    name="chunk_delta_fwd",
    public="chunk_delta",
    arguments=(*TOKENS, *GLA_FORWARD.arguments[len(GLA_FORWARD.tokens) :]),
    results=(Result("o", "B T Hv V"), *GLA_FORWARD.results[1:]),
    sizes=_SIZES,
    reads=_sequences.reads,
    flops=_forward_flops,
    tokens=tuple(argument.name for argument in TOKENS),
    backward="chunk_delta_bwd",
    by_segments=_invariant.forward,
)
BACKWARD = OpSpec(
    name="chunk_delta_bwd",
    public="chunk_delta",
    arguments=(
        *(dataclasses.replace(argument, differentiable=False) for argument in TOKENS),
        *arguments_of(GLA_BACKWARD, "scale", "initial_state", "cu_seqlens", "checkpoints", "checkpoint_every"),
        Argument("do", "Tensor", "B T Hv V", AS_INPUT, None),
        *arguments_of(GLA_BACKWARD, "dstate", "gate_normalizer", "max_seqlen"),
    ),
    results=tuple(Result(f"d{name}", like=name) for name in (*FORWARD.tokens, "initial_state")),
    sizes=_SIZES,
    reads=None,
    flops=_backward_flops,
    tokens=(*FORWARD.tokens, "do"),
    forward=FORWARD.name,
    by_segments=_invariant.backward,
)


torch_bwd = torch_op_of(BACKWARD, backward=no_second_derivative("chunk_delta"))
_gradient = gradient(FORWARD, BACKWARD, torch_bwd)
torch_fwd = torch_op_of(FORWARD, *_gradient)
_eager_fwd = eager_op_of(FORWARD, *_gradient)
