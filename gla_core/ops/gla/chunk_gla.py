"""Computes gated linear attention over sequences: the abstract ops chunk_gla_fwd and chunk_gla_bwd, and `chunk_gla`.

Per value head, with alpha_t = exp(g_t), a number for each key or one number:

    S_t = diag(alpha_t) S_{t-1} + k_t^T v_t        S in R^{K x V}
    o_t = scale * q_t S_t

and, with dS_t the gradient that reaches the state after step t,

    dS_{t-1} = diag(alpha_t) dS_t                   dS_t also receives scale * q_t^T do_t before that
    dq_t = scale * S_t do_t        dk_t = dS_t v_t        dv_t = k_t dS_t
    dg_t = alpha_t * sum_V (S_{t-1} * dS_t)         summed over the keys, or over keys and tokens, that share a gate

Query head i reads key/value head i // (Hq/H), or value head i reads query and key head i // (Hv/H): one of Hq and Hv
may be a multiple of H, and Ho, the heads of o, is the larger one.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).

A backend's functions receive and return

    chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every, gate_normalizer)
        -> (o, state or None, checkpoints or None)
    chunk_gla_bwd(q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate,
                  gate_normalizer)
        -> (dq, dk, dv, dg or None, dinitial_state or None)

Here state is the final state, and dstate is its gradient or None. Each gradient has the shape and dtype of its input.
Rows outside cu_seqlens[0] to cu_seqlens[N] belong to no sequence: whatever they hold, their o and gradients are 0.
If gate_normalizer is None, g holds log gates. Otherwise it holds logits x, the log gates are
log sigma(x) / gate_normalizer, and dg is the gradient of the logits.

**Checkpoints** [B, n, Hv, K, V] are the states before the tokens 0, L, 2 L, .. of a sequence. L = checkpoint_every is a
multiple of 64. The first is the initial state of the sequence, or 0 without one.

    n = ceil(T / L)       checkpoint j of sequence b is [b, j]
    n = N + T // L        with cu_seqlens c: checkpoint j of sequence i is [0, i + c_i // L + j]

No two sequences share a row, and the rows of a sequence depend only on its index and offset. Unused rows are 0.
Checkpoints are bfloat16 with bfloat16 inputs; otherwise they have the dtype of the final state. One backend may make
them and another use them. A backward that gets None, or cannot use them, computes the states that it needs.

On a GPU a forward whose inputs require a gradient keeps checkpoints every 64 tokens, if the backends of the request can
make them. A backward without checkpoints computes them again: this takes longer, and the same memory during the
backward. `recompute_states` turns the checkpoints of a call off, and GLA_CHECKPOINTS=0 those of all calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.environment import environment
from gla_core.dispatch.request import Request, current_request, request_of
from gla_core.dispatch.selection import makes_checkpoints
from gla_core.ops import _invariant, _sequences, autocast, checks
from gla_core.ops._autograd import gradient
from gla_core.ops._run import bypasses_torch, plans_gradient, request_text, run
from gla_core.ops._torch_op import eager_op_of, exportable, no_second_derivative, refuse_tangents, torch_op_of
from gla_core.ops.deprecated import backend_by_position
from gla_core.ops.spec import (
    AS_INPUT,
    CHECKPOINT,
    INPUT,
    INTEGER,
    LONGEST,
    WIDE,
    Argument,
    OpSpec,
    Result,
    Role,
    gate,
    plain_number,
    scale_or_default,
)


@exportable
class ChunkGla(NamedTuple):
    """Holds the results of `chunk_gla`.

    Attributes:
        o: outputs [B, T, Ho, V], dtype of v.
        state: the final state [N, Hv, K, V]; None unless asked for. Its type is `Tensor | Any`, so that a caller that
            asks for it needs no assertion for a type checker.
    """

    o: Tensor
    state: Tensor | Any


@exportable
class ChunkGlaWithCheckpoints(NamedTuple):
    """Holds the results of `chunk_gla` with checkpoint_every.

    Attributes:
        o: outputs [B, T, Ho, V], dtype of v.
        state: the final state [N, Hv, K, V]; None unless asked for.
        checkpoints: the states at every checkpoint_every-th token [B, n, Hv, K, V]; `chunk_gla` describes their rows.
    """

    o: Tensor
    state: Tensor | Any
    checkpoints: Tensor


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
    *,
    backend: str | None = None,
    checkpoint_every: None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
    recompute_states: bool = False,
) -> ChunkGla: ...


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
    *,
    backend: str | None = None,
    checkpoint_every: int,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
    recompute_states: bool = False,
) -> ChunkGlaWithCheckpoints: ...


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *rest: str | None,
    backend: str | None = None,
    checkpoint_every: int | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
    recompute_states: bool = False,
) -> ChunkGla | ChunkGlaWithCheckpoints:
    """Computes gated linear attention, differentiable in q, k, v, g and initial_state.

    Per head, with a state S in R^{K x V}:

        S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t
        o_t = scale * q_t S_t

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype; g keeps float32.

    Args:
        q: queries [B, T, Hq, K], float64, float32, float16 or bfloat16. Query head i reads key/value head i // (Hq/H).
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, Hv, V], dtype of q. Value head i reads query and key head i // (Hv/H). Hv is H, or a multiple
            of H if Hq is H.
        g: natural logarithm of the forget gate, dtype of q or float32, in [-inf, 0]. Its shape is its form:
            [B, T, Hv, K] for each key, [B, T, Hv] for each token and head, or [Hv] for each head, the same for all
            tokens. None means no decay. Only with GLA_CHECK=1 in the environment are the values read; values above 0
            then raise ValueError.
        scale: factor of the output; None means K^-1/2.
        initial_state: the state before the first token [N, Hv, K, V], float32 (float64 with float64 inputs). None means
            0.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64 on q's device; B is 1. Sequence i is rows
            cu_seqlens[i] to cu_seqlens[i+1]. Empty sequences are legal. Rows before the first offset and after the last
            one belong to no sequence: their o and their gradients are 0, whatever they hold. None means one sequence
            per row of the batch, N = B.
        backend: a request such as "reference"; see `use_backend`.
        checkpoint_every: L, a multiple of 64: also return the state before every L-th token of a sequence.
        max_seqlen: the number of tokens of the longest packed sequence, or an upper bound. It is a hint: `auto`
            chooses a backend by it, and a backend chooses its kernels. Results differ only by rounding. Without it the
            lengths are unknown, because they are on the device.
        state_v_first: whether initial_state, the final state and the checkpoints have V before K: [N, Hv, V, K]. The
            returned ones are views of memory in which K comes first. This adds no copy if the backend takes states
            with their last two dimensions swapped.
        gate: None if g holds log gates. "logsigmoid" if g holds logits x, such as the output of a projection, of any
            value: the log gates are then log sigma(x) / gate_normalizer, and the gradient of g is that of the logits.
            No tensor of log gates is written.
        gate_normalizer: the whole number by which log sigma is divided, at least 1; not used without `gate`. The
            default is that of the paper.
        recompute_states: whether the backward computes the states of all chunks again, also on a GPU. Otherwise the
            forward on a GPU keeps them, which takes 2 K V / 64 bytes a token and head with bfloat16 inputs.

    Returns:
        `o` [B, T, Ho, V] with the dtype of v, where Ho is the larger of Hq and Hv, and `state`, the final state
        [N, Hv, K, V] with the dtype of initial_state (None unless asked for). With checkpoint_every = L also
        `checkpoints` [B, n, Hv, K, V], bfloat16 with bfloat16 inputs, else with the dtype of the final state. Row
        [b, j] is the state that enters token j L of sequence b; n = ceil(T / L). With cu_seqlens, row
        [0, i + cu_seqlens[i] // L + j] is the state that enters token j L of sequence i; n = N + T // L, and all other
        rows are 0. Checkpoints carry no gradient.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
        >>> o, state = gla.chunk_gla(q, k, v, g, output_final_state=True)
        >>> logits = torch.randn(2, 100, 4, 32)
        >>> o, _ = gla.chunk_gla(q, k, v, logits, gate="logsigmoid")
        >>> # checkpoints: [2, 2, 4, 32, 32]
        >>> o, _, checkpoints = gla.chunk_gla(q, k, v, g, checkpoint_every=64)
    """
    if rest:
        backend = backend_by_position("chunk_gla", rest, backend)
    if state_v_first:
        initial_state = checks.transposed(initial_state)
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    needs_grad, every = plans_gradient(q, k, v, g, initial_state), checkpoint_every
    request = current_request(backend) if bypasses_torch(q) else None  # None if PyTorch has to see the call
    if request is None:
        q, k, v, g = autocast.inputs(FORWARD, q, k, v, g)
        refuse_tangents(q, k, v, g, initial_state)
        scale = plain_number(scale)
    else:
        scale = scale_or_default(q, scale)
    if every is None and needs_grad and q.is_cuda and not recompute_states:
        every = interval_for_backward(request or backend)
    args = (q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, every, c, max_seqlen)
    try:
        if request is None:
            o, state, checkpoints = torch_fwd(*args, needs_grad, request_text(backend))
        elif needs_grad:
            o, state, checkpoints = eager_fwd(*args, True, request)
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


def interval_for_backward(backend: str | Request | None, op: str = "chunk_gla_fwd") -> int | None:
    """Returns the interval of the checkpoints that a forward on a GPU keeps for its backward; None if it keeps none."""
    if environment().checkpoints and makes_checkpoints(op, request_of(backend).spec):
        return CHUNK
    return None


# torch.compiler.assume_constant_result sets this too, but imports the compiler. A graph then contains the result.
interval_for_backward._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


_SIZES = {"B": "B", "T": "T", "H": "H", "Hq": "H", "Hv": "H", "K": "K", "V": "V", "N": "B"}
GATE_SHAPES = {"constant": "Hv", "head": "B T Hv", "key": "B T Hv K"}
"""The shape of each form of a gate."""
TOKENS = (
    Argument("q", "Tensor", "B T Hq K", INPUT, differentiable=True),
    Argument("k", "Tensor", "B T H K", AS_INPUT, differentiable=True),
    Argument("v", "Tensor", "B T Hv V", AS_INPUT, differentiable=True),
    gate(GATE_SHAPES, differentiable=True),
)
_SEQUENCES = (
    *TOKENS,
    Argument("scale", "float?", default=None, in_call=False),
    Argument("initial_state", "Tensor?", "N Hv K V", WIDE, None, role=Role.STATE, differentiable=True),
)
_OFFSETS = Argument("cu_seqlens", "Tensor?", "N+1", INTEGER, None, role=Role.OFFSETS)
_INTERVAL = Argument("checkpoint_every", "int?", default=None)
NORMALIZER = Argument("gate_normalizer", "int?", default=None)


def _forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Counts k^T v for each value head, and the product of q and the state for each head of o."""
    B, T, Hq, K = q
    return 2 * B * T * (max(Hq, v[2]) + v[2]) * K * v[3]


def _backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Counts dq and q^T do for each head of o, and dk, dv and the states once more for each value head."""
    B, T, Hq, K = q
    return 2 * B * T * (2 * max(Hq, v[2]) + 3 * v[2]) * K * v[3]


FORWARD = OpSpec(
    name="chunk_gla_fwd",
    public="chunk_gla",
    arguments=(
        *_SEQUENCES,
        Argument("output_final_state", "bool", default=False),
        _OFFSETS,
        _INTERVAL,
        NORMALIZER,
        LONGEST,
    ),
    results=(
        Result("o", "B T Ho V"),
        Result("state", "N Hv K V", WIDE, Role.STATE, when=lambda args: args["output_final_state"]),
        Result(
            "checkpoints",
            "B n Hv K V",
            CHECKPOINT,
            Role.CHECKPOINTS,
            when=lambda args: args["checkpoint_every"] is not None,
        ),
    ),
    sizes=_SIZES,
    reads=_sequences.reads,
    flops=_forward_flops,
    tokens=tuple(argument.name for argument in TOKENS),
    backward="chunk_gla_bwd",
    by_segments=_invariant.forward,
)
BACKWARD = OpSpec(
    name="chunk_gla_bwd",
    public="chunk_gla",
    arguments=(
        *(dataclasses.replace(argument, differentiable=False) for argument in _SEQUENCES),
        _OFFSETS,
        Argument("checkpoints", "Tensor?", "B n Hv K V", CHECKPOINT, None, role=Role.CHECKPOINTS),
        _INTERVAL,
        Argument("do", "Tensor", "B T Ho V", AS_INPUT, None),
        Argument("dstate", "Tensor?", "N Hv K V", WIDE, None, role=Role.STATE),
        NORMALIZER,
        LONGEST,
    ),
    results=tuple(Result(f"d{name}", like=name) for name in ("q", "k", "v", "g", "initial_state")),
    sizes=_SIZES,
    reads=None,  # the forward checked its inputs, and a scaler of gradients has to see NaN in those of the outputs
    flops=_backward_flops,
    tokens=(*FORWARD.tokens, "do"),
    forward=FORWARD.name,
    by_segments=_invariant.backward,
)


torch_bwd = torch_op_of(BACKWARD, backward=no_second_derivative("chunk_gla"))
_gradient = gradient(FORWARD, BACKWARD, torch_bwd)
torch_fwd = torch_op_of(FORWARD, *_gradient)
eager_fwd = eager_op_of(FORWARD, *_gradient)
