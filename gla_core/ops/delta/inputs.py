"""Computes the inputs of a delta rule from what a layer projects: unit queries and keys, log gates, and betas.

PyTorch's operations compute them before an abstract op runs, so gradients reach the projections and the parameters of
the gates. Everything is computed in float32 (float64 with float64 inputs).
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.dispatch.tensors import wide
from gla_core.ops import _sequences, checks
from gla_core.ops.fused import fused
from gla_core.ops.spec import OpSpec, Role

Gate = str | tuple[Any, ...] | None
"""Says how log gates are computed from g.

    None                                      g holds log gates
    "logsigmoid"                              log sigma(g) / gate_normalizer
    ("softplus", A_log, dt_bias)              -exp(A_log) softplus(g + dt_bias)
    ("bounded", A_log, dt_bias, bound)        bound sigma(exp(A_log) (g + dt_bias))

A_log is [Hv], dt_bias is [Hv] or, for gates per key, [Hv, K]; None stands for 0. bound is a negative number.
"""


class Inputs(NamedTuple):
    """The tokens as an abstract op takes them, and the gate_normalizer of their gates."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    gate_normalizer: int | None


def inputs(
    spec: OpSpec,
    tokens: tuple[Any, ...],
    cu_seqlens: Tensor | None,
    normalize: float | None,
    gate: Gate,
    gate_normalizer: int,
    beta_limit: float | None,
) -> Inputs:
    """Returns the inputs of an op from the arguments of its public function.

    Args:
        tokens: q, k, v, g and beta as they were passed.
        cu_seqlens: the offsets of packed sequences, if gradients are computed: rows of no sequence get none, whatever
            they hold.

    Raises:
        ValueError, TypeError: a token, an option, or a parameter of the gates is not as expected.
    """
    q, k, v, g, beta = tokens
    c = checks.normalizer(gate, gate_normalizer, g) if isinstance(gate, str) else None
    parameters = gate if isinstance(gate, tuple) else None
    if gate is not None and parameters is None and c is None:
        raise TypeError(f"gate is {type(gate).__name__}; expected None, a name, or a tuple of a name and parameters")
    if normalize is None and parameters is None and beta_limit is None:
        return Inputs(q, k, v, g, beta, c)
    sizes = _sizes(spec, dict(zip(spec.tokens, tokens, strict=True)))
    if normalize is not None:
        eps = _positive("normalize", normalize, "the eps of an l2 norm")
        q, k = (fused(_unit_rows, _sequences.rows_of_sequences(x, cu_seqlens), eps) for x in (q, k))
    if parameters is not None:
        A_log, dt_bias, bound = _parameters(parameters, g, sizes)
        argument = spec.has(Role.GATE)
        assert argument is not None
        form = argument.form(g)
        if dt_bias is not None and dt_bias.ndim == 2 and form != "key":
            raise ValueError("dt_bias has a bias for each key and g has none; expected [Hv]")
        g = g if form == "constant" else _sequences.rows_of_sequences(g, cu_seqlens)
        g = fused(_log_gates, g, A_log, dt_bias, bound, form == "key")
    if beta_limit is not None:
        limit = _positive("beta_limit", beta_limit, "the largest beta")
        beta = fused(_betas, _sequences.rows_of_sequences(beta, cu_seqlens), limit)
    return Inputs(q, k, v, g, beta, c)


def _unit_rows(x: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(sum of squares + eps) for each row [.., K], in the dtype of x."""
    rows = x.to(wide(x.dtype))
    return (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + eps)).to(x.dtype)


def _log_gates(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, by_key: bool) -> Tensor:
    """Returns log gates from logits [.., Hv], or [.., Hv, K] if `by_key`; without a bound those of softplus."""
    dtype = wide(x.dtype)
    x, rate = x.to(dtype), None
    if A_log is not None:
        rate = A_log.to(dtype).exp()
        rate = rate[:, None] if by_key else rate
    if dt_bias is not None:
        x = x + (dt_bias[:, None] if by_key and dt_bias.ndim == 1 else dt_bias).to(dtype)
    if bound is not None:
        return bound * torch.sigmoid(x if rate is None else rate * x)
    # finite, because a gate of -inf gives `rate` the gradient 0 and not 0 * inf
    g = F.logsigmoid(-x).clamp(min=torch.finfo(dtype).min)  # -softplus(x)
    return g if rate is None else rate * g


def _betas(x: Tensor, limit: float) -> Tensor:
    return limit * torch.sigmoid(x.to(wide(x.dtype)))


def _sizes(spec: OpSpec, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the shapes of tokens, and that they hold floating-point numbers; returns their sizes."""
    sizes: dict[str, Any] = {}
    for argument in spec.token_arguments:
        x = tokens[argument.name]
        if argument.forms is None or x is not None:
            shapes = (argument.shape or "",) if argument.forms is None else tuple(argument.forms.values())
            checks.tensor_of_any(argument.name, x, shapes, sizes)
            checks.dtype(argument.name, x, checks.FLOATS)
    return sizes


def _parameters(
    gate: tuple[Any, ...], g: Tensor | None, sizes: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None, float | None]:
    """Returns A_log, dt_bias and the bound of a gate, after their checks; the bound of softplus is None."""
    names = {"softplus": ("A_log", "dt_bias"), "bounded": ("A_log", "dt_bias", "bound")}
    name, *parameters = gate or ("",)
    if name not in names or len(parameters) != len(names[name]):
        raise ValueError(
            f"gate is {(name, *map(type, parameters))}; expected ('softplus', A_log, dt_bias) or "
            "('bounded', A_log, dt_bias, bound)"
        )
    if g is None:
        raise ValueError(f"gate is {name!r} and g is None; expected the logits of the gates as g")
    A_log, dt_bias, *bound = parameters
    for of, x, shapes in (("A_log", A_log, ("Hv",)), ("dt_bias", dt_bias, ("Hv", "Hv K"))):
        if x is not None:
            checks.tensor_of_any(of, x, shapes, sizes)
            checks.dtype(of, x, checks.FLOATS)
            checks.device(of, x, "g", g)
    if not bound:
        return A_log, dt_bias, None
    if not _is_number(bound[0]) or not bound[0] < 0:
        raise ValueError(f"the bound of the gates is {bound[0]!r}; expected a number below 0")
    return A_log, dt_bias, float(bound[0])


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _positive(name: str, x: Any, what: str) -> float:
    if not _is_number(x) or not x > 0:
        raise ValueError(f"{name} is {x!r}; expected {what}, a number above 0, or None")
    return float(x)
