"""Summarises parts of a sequence by a decay and a state: the abstract op chunk_gla_summary, and two public functions.

Per value head, with alpha_t = exp(g_t), for the tokens 1 to T of a part:

    D = alpha_1 * .. * alpha_T
    S = sum over t of (k_t * alpha_{t+1} * .. * alpha_T)^T v_t        forwards: `chunk_gla_summary`
    S = sum over t of (q_t * alpha_1 * .. * alpha_t)^T do_t           backwards: `chunk_gla_gradient_summary`

Forwards, S is the state after the part if the state before it is 0. If the state before it is S_0, the state after it
is diag(D) S_0 + S. Backwards, the gradient of S_0 is diag(D) dS_T + scale * S, with dS_T the gradient of the state
after the part. Both rules are associative: the summaries of all parts give the state that enters each of them.
`gla_core.distributed` is built on this.

Both directions are one op, because a backend computes both with the same kernel. The backward of `chunk_gla` would
compute the second one too, at several times the cost. The op takes no scale: its caller multiplies the state by it,
instead of every token.

Source: Chou et al., "ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (arXiv 2507.01004).

A backend's function receives and returns

    chunk_gla_summary(left, right, g, cu_seqlens, backwards, gate_normalizer) -> (decay, state)

Forwards, left = k [B, T, H, K] and right = v [B, T, Hv, V]. Backwards, left = q [B, T, Hq, K] and right = do
[B, T, Ho, V], with the heads of `chunk_gla`; the products of the Hq/H query heads that share a state are summed. decay
is [N, Hv, K] for every form of gate. gate_normalizer is as in `chunk_gla`. Rows outside cu_seqlens[0] to cu_seqlens[N]
belong to no sequence; an empty sequence has decay 1 and state 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.request import current_request
from gla_core.dispatch.tensors import gradient_of_logits, wide
from gla_core.ops import autocast, checks
from gla_core.ops._run import bypasses_torch, needs_gradient, plans_gradient, request_text, run
from gla_core.ops._torch_op import exportable, refuse_tangents, torch_op_of
from gla_core.ops.deprecated import backend_by_position
from gla_core.ops.gla.chunk_gla import GATE_SHAPES, NORMALIZER, torch_bwd
from gla_core.ops.spec import AS_INPUT, INPUT, INTEGER, WIDE, Argument, OpSpec, Result, Role, gate

_NO_GRADIENT = "chunk_gla_gradient_summary has no gradient; call it under torch.no_grad()"


@exportable
class ChunkGlaSummary(NamedTuple):
    """Holds the results of `chunk_gla_summary`.

    Attributes:
        decay: the products of the gates of the sequences [N, Hv, K], float32 (float64 with float64 inputs).
        state: the states after the sequences [N, Hv, K, V], if those before them are 0; dtype of decay.
    """

    decay: Tensor
    state: Tensor


def chunk_gla_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *rest: str | None,
    backend: str | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
) -> ChunkGlaSummary:
    """Computes the decay and the state from zero of each sequence, differentiable in k, v and g.

    The state after a sequence is decay[..., None] * (state before it) + state. Under autocast k and v are
    cast to the dtype of autocast, and g keeps float32.

    Args:
        k: keys [B, T, H, K], float64, float32, float16 or bfloat16.
        v: values [B, T, Hv, V], dtype of k. Value head i reads key head i // (Hv/H).
        g: natural logarithm of the forget gate [B, T, Hv, K], [B, T, Hv] or [Hv], dtype of k or float32, in [-inf, 0].
            None means no decay.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64 on k's device; B is 1. Sequence i is rows
            cu_seqlens[i] to cu_seqlens[i+1]. Empty sequences are legal. Rows before the first offset and after the last
            one belong to no sequence. None means one sequence per row of the batch, N = B.
        backend: a request such as "reference"; see `use_backend`.
        state_v_first: whether to return the state as a view [N, Hv, V, K].
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.

    Returns:
        `decay` [N, Hv, K] and `state` [N, Hv, K, V], float32 (float64 with float64 inputs). An empty sequence has decay
        1 and state 0.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> k, v = torch.randn(2, 100, 4, 32), torch.randn(2, 100, 4, 32)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
        >>> # [2, 4, 32] and [2, 4, 32, 32]
        >>> decay, state = gla.chunk_gla_summary(k, v, g)
    """
    if rest:
        backend = backend_by_position("chunk_gla_summary", rest, backend)
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    decay, state = _summary({}, (k, v, g, cu_seqlens, False, c), backend)
    return ChunkGlaSummary(decay, checks.transposed(state) if state_v_first else state)


@exportable
class ChunkGlaGradientSummary(NamedTuple):
    """Holds the results of `chunk_gla_gradient_summary`.

    Attributes:
        decay: the products of the gates of the sequences [N, Hv, K], float32 (float64 with float64 inputs).
        dstate: the gradients of the states before the sequences [N, Hv, K, V], if those of the states after them are 0
            and `scale` is 1; dtype of decay.
    """

    decay: Tensor
    dstate: Tensor


def chunk_gla_gradient_summary(
    q: Tensor,
    do: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *rest: str | None,
    backend: str | None = None,
    state_v_first: bool = False,
    gate: str | None = None,
    gate_normalizer: int = 16,
) -> ChunkGlaGradientSummary:
    """Computes the decay of each sequence, and the gradient that the state before it gets from its outputs.

    The gradient of the state before a sequence is decay[..., None] * (gradient of the state after it) + scale *
    dstate, with the scale of `chunk_gla`. The function is not differentiable. Under autocast q and do are cast to the
    dtype of autocast, and g keeps float32.

    Args:
        q: queries [B, T, Hq, K], float64, float32, float16 or bfloat16.
        do: gradients of the outputs [B, T, Ho, V], dtype of q. Ho is the larger of Hq and Hv.
        g: natural logarithm of the forget gate [B, T, Hv, K], [B, T, Hv] or [Hv], dtype of q or float32, in [-inf, 0].
            None means no decay.
        cu_seqlens: offsets of packed sequences [N+1], int32 or int64 on q's device, as in `chunk_gla_summary`.
        backend: a request such as "reference"; see `use_backend`.
        state_v_first: whether to return dstate as a view [N, Hv, V, K].
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.

    Returns:
        `decay` [N, Hv, K] and `dstate` [N, Hv, K, V], float32 (float64 with float64 inputs). dstate is summed over the
        Hq/Hv query heads of each head of g; without g, Hv = Ho. An empty sequence has decay 1 and dstate 0.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input requires a gradient, or carries a tangent of forward-mode AD.

    Example:
        >>> q, do = torch.randn(2, 100, 4, 32), torch.randn(2, 100, 4, 32)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
        >>> # [2, 4, 32] and [2, 4, 32, 32]
        >>> decay, dstate = gla.chunk_gla_gradient_summary(q, do, g)
    """
    if rest:
        backend = backend_by_position("chunk_gla_gradient_summary", rest, backend)
    if needs_gradient(q, do, g):
        raise NotImplementedError(_NO_GRADIENT)
    c = None if gate is None else checks.normalizer(gate, gate_normalizer, g)
    decay, dstate = _summary({"k": "q", "v": "do"}, (q, do, g, cu_seqlens, True, c), backend)
    return ChunkGlaGradientSummary(decay, checks.transposed(dstate) if state_v_first else dstate)


def _summary(names: Mapping[str, str], args: tuple, backend: str | None) -> tuple[Tensor, Tensor]:
    """Runs the op. Error messages call k and v by their `names`, if they have others in the public function."""
    left, right, g, *rest = args
    needs_grad = plans_gradient(left, right, g)
    try:
        if not needs_grad and bypasses_torch(left):
            return run(SUMMARY, args, current_request(backend))
        left, right, g = autocast.inputs(SUMMARY, left, right, g)
        refuse_tangents(left, right, g)
        return _torch_summary(left, right, g, *rest, needs_grad, request_text(backend))
    except (TypeError, ValueError) as error:
        error.args = (re.sub(r"\b[kv]\b", lambda match: names.get(match[0], match[0]), str(error)),)
        raise


def _bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """Binds the numbers of heads.

    States have Hv heads: the heads of g, or of right without g. Hq and Hv are then checked as in `chunk_gla`.
    """
    left, right, states = sizes["Hq"], sizes["Ho"], sizes.setdefault("Hv", sizes["Ho"])
    owner = "v" if args["g"] is None else "g"
    sizes["H"] = min(left, states)
    if left > states and not args["backwards"]:
        raise ValueError(f"k has {left} heads; expected {states}, as {owner}, or a divisor of it")
    if left % sizes["H"] != 0 or states % sizes["H"] != 0:
        raise ValueError(f"k has {left} heads and {owner} has {states}; expected a multiple of one another")
    if right != max(left, states):
        raise ValueError(f"v has {right} heads; expected {max(left, states)}, with {left} of k and {states} of g")


def _reads(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows of sequences."""
    checks.offset_values(args["cu_seqlens"], args["left"].shape[1], None)
    return {"B T": checks.rows_of(args["cu_seqlens"])}


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Counts left^T right, which each token adds to the state of each of its heads."""
    B, T, K = left[0], left[1], left[3]
    return 2 * B * T * right[2] * K * right[3]


SUMMARY = OpSpec(
    name="chunk_gla_summary",
    public="chunk_gla_summary",
    arguments=(
        Argument("left", "Tensor", "B T Hq K", INPUT, differentiable=True, public="k"),
        Argument("right", "Tensor", "B T Ho V", AS_INPUT, differentiable=True, public="v"),
        gate(GATE_SHAPES, differentiable=True),
        Argument("cu_seqlens", "Tensor?", "N+1", INTEGER, None, role=Role.OFFSETS),
        Argument("backwards", "bool", default=False),
        NORMALIZER,
    ),
    results=(Result("decay", "N Hv K", WIDE), Result("state", "N Hv K V", WIDE)),
    sizes={"B": "B", "T": "T", "H": "H", "Hq": "H", "Hv": "H", "K": "K", "V": "V", "N": "B"},
    bind=_bind,
    reads=_reads,
    flops=_flops,
    tokens=("left", "right", "g"),
    backward="chunk_gla_bwd",
)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    k, v, g, cu_seqlens, ctx.backwards, ctx.gate_normalizer, _, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(k, v, g, cu_seqlens, output[0])


def _backward(ctx: Any, ddecay: Tensor | None, dstate: Tensor | None) -> tuple:
    """Computes the gradient by chunk_gla_bwd with q = 0 and do = 0.

    The gradient of the decay is then added to every gate of the sequence.
    """
    if ctx.backwards:
        raise NotImplementedError(_NO_GRADIENT)
    k, v, g, cu_seqlens, decay = ctx.saved_tensors
    dk = dv = dg = None
    rest = (None,) * 5  # of cu_seqlens and of what are no tensors
    # Both parts of the gradient of g are wide, so that only their sum is rounded.
    gates = g if g is None or ddecay is None else g.to(wide(k.dtype))
    if dstate is not None:
        silent = (torch.zeros_like(k), k, v, gates, 1.0, None, cu_seqlens, None, None, torch.zeros_like(v))
        _, dk, dv, dg, _ = torch_bwd(*silent, dstate, ctx.gate_normalizer, None, ctx.backend)
    if g is None:
        return dk, dv, None, *rest
    if ddecay is not None:
        by_decay = _gate_gradient(ddecay * decay, g, k.shape[1], cu_seqlens)
        by_decay = gradient_of_logits(by_decay, g, ctx.gate_normalizer)
        dg = by_decay.to(g.dtype) if dg is None else (by_decay + dg).to(g.dtype)
    return dk, dv, dg, *rest


def _gate_gradient(x: Tensor, g: Tensor, T: int, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the gradient of g, in its shape, from x = dD * D [N, Hv, K]: D is a product of the gates.

    Every gate of a sequence has the gradient x, summed over the keys and tokens that share the gate.
    """
    if g.ndim == 4:
        return _for_tokens(x, T, cu_seqlens)
    tokens = _for_tokens(x.sum(-1), T, cu_seqlens)  # [B, T, Hv]
    return tokens if g.ndim == 3 else tokens.sum((0, 1))


def _for_tokens(x: Tensor, T: int, cu_seqlens: Tensor | None) -> Tensor:
    """Returns a tensor [B, T, ...] with the row of x [N, ...] of each token's sequence; 0 for tokens of no sequence."""
    if cu_seqlens is None:
        return x[:, None].expand(-1, T, *x.shape[1:])
    sequence = torch.searchsorted(cu_seqlens, torch.arange(T, device=x.device, dtype=cu_seqlens.dtype), right=True)
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (1, 1))[sequence][None]


_torch_summary = torch_op_of(SUMMARY, _setup_context, _backward)
