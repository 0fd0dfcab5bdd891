"""Computes blocked softmax attention with its log-sum-exp: the ops softmax_attention and softmax_attention_bwd.

Per query head, over blocks j of keys, with m, z and o the running maximum, sum and unnormalised output:

    s = scale * q k_j^T        m' = max(m, rowmax s)
    z' = exp(m - m') z + rowsum exp(s - m')        o' = exp(m - m') o + exp(s - m') v_j
    o = o / z        lse = m + log z

and backwards, with p = exp(s - lse) and delta = rowsum(do * o) - dlse,

    dv = p^T do        ds = p * (do v^T - delta)        dq = scale * ds k        dk = scale * ds^T q

Source: Dao et al., "FlashAttention" (arXiv 2205.14135), on the online softmax of arXiv 1805.02867.

A backend's functions receive and return

    softmax_attention(q, k, v, scale, causal) -> (o, lse)
    softmax_attention_bwd(q, k, v, o, lse, scale, causal, do, dlse) -> (dq, dk, dv)

A query with no key, or with scores that are all -inf, has lse = -inf and o = NaN, like torch.softmax. Its weights p are
0 in the backward. If dlse is None, no gradient reaches lse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.request import current_request
from gla_core.ops import autocast
from gla_core.ops._autograd import gradient, in_pytorch
from gla_core.ops._run import bypasses_torch, plans_gradient, request_text, run
from gla_core.ops._torch_op import exportable, no_second_derivative, refuse_tangents, torch_op_of
from gla_core.ops.deprecated import backend_by_position
from gla_core.ops.spec import AS_INPUT, INPUT, WIDE, Argument, OpSpec, Result, plain_number, scale_or_default

_KEY_BLOCK = 512  # keys per step of the backward: bounds its memory at O(Tq * _KEY_BLOCK)


@exportable
class SoftmaxAttention(NamedTuple):
    """Holds the results of `softmax_attention` and `merge_attention`.

    Attributes:
        o: outputs [B, Tq, Hq, V], dtype of v.
        lse: the natural log-sum-exp of the scores [B, Tq, Hq], float32 (float64 with float64 inputs).
    """

    o: Tensor
    lse: Tensor


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    *rest: str | None,
    backend: str | None = None,
) -> SoftmaxAttention:
    """Computes softmax attention, differentiable in q, k and v through both results.

    Under autocast q, k and v are cast to the dtype of autocast, and o has that dtype. On a GPU, PyTorch's own kernels
    may compute the gradients of 16-bit inputs. The last bits of the gradient of q may then differ from call to call,
    unless `torch.use_deterministic_algorithms(True)` is in force.

    Args:
        q: queries [B, Tq, Hq, K], float64, float32, float16 or bfloat16. Query head i reads key/value head i // (Hq/H).
        k: keys [B, Tk, H, K], dtype of q.
        v: values [B, Tk, H, V], dtype of q.
        scale: factor of the scores; None means K^-1/2.
        causal: whether query i sees only keys 0 to i + Tk - Tq. The last query then sees every key.
        backend: a request such as "reference"; see `use_backend`.

    Returns:
        `o` [B, Tq, Hq, V] with the dtype of v, and `lse` [B, Tq, Hq], the natural log-sum-exp of the scores, float32
        (float64 with float64 inputs). A query that sees no key has o = NaN and lse = -inf.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.
        NoBackendError, UnknownBackendError: no backend can serve the request.
        NotImplementedError: an input carries a tangent of forward-mode AD.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> o, lse = gla.softmax_attention(q, k, v, causal=True)
    """
    if rest:
        backend = backend_by_position("softmax_attention", rest, backend)
    needs_grad = plans_gradient(q, k, v)
    if not needs_grad and bypasses_torch(q):
        args = (q, k, v, scale_or_default(q, scale), causal)
        return SoftmaxAttention(*run(ATTENTION, args, current_request(backend)))
    q, k, v = autocast.inputs(ATTENTION, q, k, v)
    refuse_tangents(q, k, v)
    args = (q, k, v, plain_number(scale), causal)
    return SoftmaxAttention(*_torch_attention(*args, needs_grad, request_text(backend)))


def merge_attention(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> SoftmaxAttention:
    """Merges attention over two disjoint sets of keys into attention over both; associative and differentiable.

    Args:
        o1: output [..., V] of `softmax_attention` for the first set of keys.
        lse1: log-sum-exp [...] for the first set of keys. A set with lse = -inf adds nothing, whatever its o.
        o2: output for the second set of keys and the same queries, same shape as o1.
        lse2: log-sum-exp for the second set of keys, same shape as lse1.

    Returns:
        `o` [..., V] with the dtype of o1, and `lse` [...], both for the union of the two sets.

    Raises:
        ValueError: the shapes do not agree.

    Example:
        >>> first = gla.softmax_attention(q, k1, v1)
        >>> second = gla.softmax_attention(q, k2, v2)
        >>> o, lse = gla.merge_attention(*first, *second)
    """
    if o1.shape != o2.shape or lse1.shape != lse2.shape or o1.shape[:-1] != lse1.shape:
        raise ValueError(
            f"o1 {list(o1.shape)} and o2 {list(o2.shape)}, lse1 {list(lse1.shape)} and lse2 {list(lse2.shape)} "
            "do not agree; expected o [..., V] and lse [...]"
        )
    lse = torch.logaddexp(lse1, lse2)
    o = _share(o1, lse1, lse) + _share(o2, lse2, lse)
    return SoftmaxAttention(torch.where(lse.isneginf()[..., None], torch.nan, o).to(o1.dtype), lse)


def _share(o: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    # An empty set of keys has o = NaN and lse = -inf: drop o before it is weighted, and do not subtract -inf.
    empty = lse.isneginf()
    weight = torch.exp(torch.where(empty, 0, lse) - torch.where(total.isneginf(), 0, total))
    return torch.where(empty[..., None], 0, o) * torch.where(empty, 0, weight)[..., None]


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    B, Tq, Hq, K = q
    return 2 * B * Hq * Tq * k[1] * (K + v[3])


def _backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    B, Tq, Hq, K = q
    return 2 * B * Hq * Tq * k[1] * (3 * K + 2 * v[3])


_SIZES = {"B": "B", "Tq": "T", "Tk": "T", "H": "H", "Hq": "H", "K": "K", "V": "V"}
_INPUTS = (
    Argument("q", "Tensor", "B Tq Hq K", INPUT, differentiable=True),
    Argument("k", "Tensor", "B Tk H K", AS_INPUT, differentiable=True),
    Argument("v", "Tensor", "B Tk H V", AS_INPUT, differentiable=True),
)
_OPTIONS = (Argument("scale", "float?", default=None, in_call=False), Argument("causal", "bool", default=False))
ATTENTION = OpSpec(
    name="softmax_attention",
    public="softmax_attention",
    arguments=(*_INPUTS, *_OPTIONS),
    results=(Result("o", "B Tq Hq V"), Result("lse", "B Tq Hq", WIDE)),
    sizes=_SIZES,
    flops=_flops,
    backward="softmax_attention_bwd",
)


def _attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk and dv in PyTorch over blocks of keys, for a backend that has no kernel for them."""
    B, Tq, Hq, _ = q.shape
    _, Tk, H, _ = k.shape
    dtype = lse.dtype
    groups = (B, Tq, H, Hq // H)
    qf, of, dof = (x.to(dtype).reshape(*groups, x.shape[-1]) for x in (q, o, do))
    kf, vf = k.to(dtype), v.to(dtype)
    # A query that saw no key has lse = -inf and o = NaN; with +inf its weights below are 0.
    empty = lse.isneginf()
    lse = torch.where(empty, torch.inf, lse).reshape(groups)
    of = torch.where(empty.reshape(*groups, 1), 0, of)
    delta = (dof * of).sum(-1) - (0 if dlse is None else dlse.reshape(groups))  # [B, Tq, H, G]

    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    last_key = torch.arange(Tq, device=q.device) + Tk - Tq  # [Tq], the last key a causal query sees
    for j in range(0, Tk, _KEY_BLOCK):
        block = slice(j, min(j + _KEY_BLOCK, Tk))
        scores = scale * torch.einsum("bihgk,bjhk->bihgj", qf, kf[:, block])
        p = torch.exp(scores - lse[..., None])
        if causal:
            hidden = torch.arange(block.start, block.stop, device=q.device) > last_key[:, None]
            p = p.masked_fill(hidden[:, None, None, :], 0)
        dp = torch.einsum("bihgv,bjhv->bihgj", dof, vf[:, block])
        ds = p * (dp - delta[..., None])
        dq += scale * torch.einsum("bihgj,bjhk->bihgk", ds, kf[:, block]).reshape(q.shape)
        dk[:, block] = scale * torch.einsum("bihgj,bihgk->bjhk", ds, qf)
        dv[:, block] = torch.einsum("bihgj,bihgv->bjhv", p, dof)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


BACKWARD = OpSpec(
    name="softmax_attention_bwd",
    public="softmax_attention",
    arguments=(
        *(dataclasses.replace(argument, differentiable=False) for argument in _INPUTS),
        Argument("o", "Tensor", "B Tq Hq V", AS_INPUT, None),
        Argument("lse", "Tensor", "B Tq Hq", WIDE, None),
        *_OPTIONS,
        Argument("do", "Tensor", "B Tq Hq V", AS_INPUT, None),
        Argument("dlse", "Tensor?", "B Tq Hq", WIDE, None),
    ),
    results=tuple(Result(f"d{name}", like=name) for name in ("q", "k", "v")),
    sizes=_SIZES,
    reads=None,  # a scaler of gradients has to see NaN in do
    flops=_backward_flops,
    forward=ATTENTION.name,
    lowering=in_pytorch(ATTENTION, _attention_bwd, forwards=3),
)

_torch_bwd = torch_op_of(BACKWARD, backward=no_second_derivative("softmax_attention"))
_torch_attention = torch_op_of(ATTENTION, *gradient(ATTENTION, BACKWARD, _torch_bwd))
