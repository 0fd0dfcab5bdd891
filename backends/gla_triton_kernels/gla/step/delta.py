"""Computes what a delta rule has beside gated linear attention, for the kernels of one token and of several.

    u = beta (v - k diag(exp g) S)        S' = diag(exp g) S + k^T u

u takes the place of v. q, k, g and beta may be what a layer projects; the kernels then compute unit vectors, log gates
and betas of them. gla_core/ops/delta/inputs.py explains how.

B batch   T tokens   H key heads   Hv heads of values, states and gates   K, V key and value width
BK K rounded up to a power of two   BV values of a block
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import OpCall, has_raw_inputs
from gla_triton_runtime.gates import log_gates

LEAST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32. An infinite number times exp(A_log) = 0 would be NaN."""
FLOATS = ("eps", "limit", "bound")
"""The arguments of a kernel that are `Inputs.floats`."""


class Inputs(NamedTuple):
    """The inputs of a delta rule beside q, k, v and g, and what to compute of all of them.

    Attributes:
        beta: [B, Hv] or [B, T, Hv].
        floats: the eps of an l2 norm, the largest beta, and the bound of gates, each 0 if it is not used; empty if none
            of them may be used.
        normalize, limited: whether q and k are normalized, and whether beta holds logits.
        activation: "softplus" or "bounded" if g holds such logits, else None.
        A_log: [Hv]; None stands for 0.
        dt_bias: [Hv] or [Hv, K]; None stands for 0.
    """

    beta: Tensor
    floats: tuple[float, ...]
    normalize: bool
    limited: bool
    activation: str | None
    A_log: Tensor | None
    dt_bias: Tensor | None


def floats_of(call: OpCall) -> Callable[..., tuple[float, ...]]:
    """Returns a function that takes normalize, beta_limit and bound of a call, and returns `Inputs.floats`.

    Launches that are replayed take the floats of their call, so calls of one signature have equally many.
    """
    if not has_raw_inputs(call):
        return lambda *_: ()
    return lambda *options: tuple([x or 0.0 for x in options])


def inputs_of(
    beta: Tensor | None,
    floats: tuple[float, ...],
    normalize: float | None,
    beta_limit: float | None,
    gate_activation: str | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Inputs | None:
    """Returns the inputs of a call from its arguments and its `floats_of`; None for gated linear attention."""
    options = (normalize is not None, beta_limit is not None, gate_activation)
    return None if beta is None else Inputs(beta, floats, *options, A_log, dt_bias)


def delta_arguments(x: Inputs | None) -> dict[str, Any]:
    """Returns the arguments that kernels have for a delta rule, except the strides of beta."""
    if x is None:
        flags = dict.fromkeys(("KEY_BIAS", "NORMALIZE", "LIMITED"), False)
        return {**dict.fromkeys(("beta_ptr", "A_log_ptr", "bias_ptr", "bias_h", *FLOATS, "ACTIVATION")), **flags}
    return {
        "beta_ptr": x.beta,
        "A_log_ptr": x.A_log,
        "bias_ptr": x.dt_bias,
        **dict(zip(FLOATS, x.floats or (None,) * len(FLOATS), strict=True)),
        "bias_h": None if x.dt_bias is None else x.dt_bias.stride(0),
        "KEY_BIAS": x.dt_bias is not None and x.dt_bias.ndim == 2,
        "ACTIVATION": x.activation,
        "NORMALIZE": x.normalize,
        "LIMITED": x.limited,
    }


@triton.jit
def added(state, k, v, beta):
    """Returns u = beta (v - k S) [BV], what a token of a delta rule adds at its key to the decayed state [BK, BV]."""
    return beta.to(tl.float32) * (v.to(tl.float32) - tl.sum(k.to(tl.float32)[:, None] * state, axis=0))


@triton.jit
def load_bias(bias_ptr, bias_h, h, rows, in_k, KEY_BIAS: tl.constexpr):
    """Returns dt_bias of head h, a number, or [BK] if KEY_BIAS."""
    if KEY_BIAS:
        return tl.load(bias_ptr + h * bias_h + rows, mask=in_k, other=0.0)
    else:  # noqa: RET505 -- one branch is compiled
        return tl.load(bias_ptr + h * bias_h)


@triton.jit
def activated(x, A_log, bias, bound, ACTIVATION: tl.constexpr, NORMALIZER: tl.constexpr):
    """Returns log gates in float32 from what g holds; see `log_gates` if there is no ACTIVATION.

    Args:
        A_log, bias: A_log and dt_bias of the head; each may be None.
    """
    if ACTIVATION is None:
        return log_gates(x, NORMALIZER)
    else:  # noqa: RET505 -- one branch is compiled
        x = x.to(tl.float32)
        if bias is not None:
            x += bias.to(tl.float32)
        if ACTIVATION == "softplus":
            x = log_gates(-x, 1)  # -softplus(x)
        if A_log is not None:
            x = tl.exp(A_log.to(tl.float32)) * tl.maximum(x, LEAST, propagate_nan=tl.PropagateNan.ALL)
        return x if ACTIVATION == "softplus" else bound * tl.sigmoid(x)


@triton.jit
def learnt(beta, limit, LIMITED: tl.constexpr):
    """Returns beta, or limit sigma(beta) if LIMITED."""
    return limit * tl.sigmoid(beta.to(tl.float32)) if LIMITED else beta


@triton.jit
def unit(x, eps, NORMALIZE: tl.constexpr):
    """Returns x [BK], or x / sqrt(sum of squares + eps) in the dtype of x if NORMALIZE."""
    if NORMALIZE:
        y = x.to(tl.float32)
        return (y * tl.rsqrt(tl.sum(y * y, axis=0) + eps)).to(x.dtype)
    else:  # noqa: RET505 -- one branch is compiled
        return x
