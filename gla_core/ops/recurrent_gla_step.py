"""One token of gated linear attention, for decoding: the abstract op recurrent_gla_step.

Per row and head, with alpha = exp(g):

    S' = diag(alpha) S + k^T v        o = scale * q S'

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).

A backend's function receives and returns

    recurrent_gla_step(q, k, v, g, state, scale, state_indices, inplace) -> (o, state)

Row b reads and writes state[state_indices[b]], or state[b] without indices. A row whose index is outside 0 to P-1 is
skipped: its o is 0 and no state is written. With `inplace` the state given is written and returned; without, it is
left alone and a new tensor of the same shape is returned, the rows nobody addressed copied.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.ops import _autocast, _checks
from gla_core.ops._abstract_op import AbstractOp, needs_gradient, request_text
from gla_core.ops._results import Result, Results, empty
from gla_core.ops._torch_op import bypasses_torch, refuse_in_place, refuse_tangents, torch_op, transformed


def recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance a state by one token per row. Not differentiable: train with `chunk_gla`.

    Under autocast q, k and v are cast to its dtype, which is then o's; g keeps float32, and the state its dtype.

    Args:
        q: queries [B, Hq, K], float64, float32, float16 or bfloat16. Query head i reads key/value head i // (Hq/H).
        k: keys [B, H, K], as q.
        v: values [B, H, V], as q.
        g: natural logarithm of the forget gate [B, H, K], as q or float32, in [-inf, 0]. None means no decay.
        state: [P, H, K, V] float32 or bfloat16 (float64 with float64). P = B, or a pool with state_indices.
        scale: factor of the output; K^-1/2 by default.
        state_indices: [B] int32 or int64, the row of the pool that each row of the batch reads and writes, no two
            alike. A row with a negative index is skipped: its o is 0.
        inplace: write the new state into `state` instead of returning a new tensor.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        o [B, Hq, V] as v, and the new state, shaped as `state` (the same tensor if `inplace`).

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or layout.
        RuntimeError: an input requires a gradient.
        NoBackendError, UnknownBackendError: nobody can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> state = torch.zeros(2, 4, 32, 32)
        >>> o, state = gla.recurrent_gla_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state)
    """
    if needs_gradient(q, k, v, g, state):
        _no_backward()
    if bypasses_torch(q):
        return _run(q, k, v, g, state, scale, state_indices, inplace, backend)
    q, k, v, g = _autocast.tokens(q, k, v, g)
    refuse_tangents(q, k, v, g, state)
    args = (q, k, v, g, state, _checks.plain_number(scale), state_indices, request_text(backend))
    if inplace:
        if transformed():
            refuse_in_place()
        return _torch_step_inplace(*args), state
    return _torch_step(*args)


def _describe(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    state: Any = None,
    scale: Any = None,
    state_indices: Any = None,
    inplace: Any = False,
) -> OpCall:
    """Check the arguments, reading no values, and describe the call."""
    dims = _checks.queries_keys_values(q, k, v, "B Hq K", "B H K", "B H V")
    _checks.gate(g, q, "B H K", dims)
    _checks.number_or_none("scale", scale)
    _checks.flag("inplace", inplace)
    if state_indices is None:
        dims["P"] = dims["B"]
    else:
        _checks.tensor("state_indices", state_indices, "B", dims)
        _checks.dtype("state_indices", state_indices, _checks.INDICES)
    _checks.tensor("state", state, "P H K V", dims)
    states = [torch.float64] if q.dtype == torch.float64 else [torch.float32, torch.bfloat16]
    _checks.dtype("state", state, states, f" with {q.dtype} inputs")
    _checks.same_device(q=q, k=k, v=v, g=g, state=state, state_indices=state_indices)
    _checks.last_dimension_contiguous(q=q, k=k, v=v, g=g, state=state, state_indices=state_indices)
    return OpCall(
        op="recurrent_gla_step",
        device=q.device,
        dtype=q.dtype,
        dims={name: dims[name] for name in ("B", "H", "Hq", "K", "V", "P")},
        gate_dtype=None if g is None else g.dtype,
        state_dtype=state.dtype,
        indexed=state_indices is not None,
    )


def _check_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    inplace: bool,
) -> None:
    _checks.no_nan(q=q, k=k, v=v, g=g, state=state)
    _checks.gate_values(g)
    if state_indices is not None:
        used = [i for i in state_indices.tolist() if i >= 0]
        if any(i >= state.shape[0] for i in used):
            raise ValueError(f"state_indices holds {max(used)}; the pool has {state.shape[0]} states")
        if len(set(used)) < len(used):
            raise ValueError(f"state_indices is {used}; expected no state twice")


def _results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float | None,
    state_indices: Tensor | None,
    inplace: bool = False,
) -> Results:
    o = Result("o", (*q.shape[:2], v.shape[2]), v.dtype)
    return o, Result("state", state.shape, state.dtype, written=state if inplace else None)


STEP = AbstractOp("recurrent_gla_step", _describe, _results, _check_values)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float | None,
    state_indices: Tensor | None,
    inplace: bool,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    scale = _checks.scale_or_default(q, scale)
    o, state = STEP.run((q, k, v, g, state, scale, state_indices, inplace), backend=backend)
    if inplace and not state.is_inference():
        # Kernels write behind autograd's back; whoever saved this state for a backward must be told.
        torch.autograd.graph.increment_version(state)
    return o, state


def _run_functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float | None,
    state_indices: Tensor | None,
    backend: str = "",
) -> tuple[Tensor, Tensor]:
    return _run(q, k, v, g, state, scale, state_indices, False, backend)


def _run_inplace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float | None,
    state_indices: Tensor | None,
    backend: str = "",
) -> Tensor:
    return _run(q, k, v, g, state, scale, state_indices, True, backend)[0]


def _fake_functional(q: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    described = args[:6]  # without backend
    _describe(q, *described)
    return empty(q, _results(q, *described))


def _fake_inplace(q: Tensor, *args: Any) -> Tensor | None:
    return _fake_functional(q, *args)[0]


def _no_backward(*_: Any) -> NoReturn:
    raise RuntimeError(
        "recurrent_gla_step has no backward and an input requires a gradient; "
        "train with chunk_gla, or decode under torch.no_grad()"
    )


_torch_step = torch_op(
    "recurrent_gla_step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor state, float? scale, "
    "Tensor? state_indices, str backend='') -> (Tensor, Tensor)",
    _run_functional,
    _fake_functional,
    backward=_no_backward,
)
_torch_step_inplace = torch_op(
    "recurrent_gla_step_(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor(a!) state, float? scale, "
    "Tensor? state_indices, str backend='') -> Tensor",
    _run_inplace,
    _fake_inplace,
    vmap=refuse_in_place,
)
