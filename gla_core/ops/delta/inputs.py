"""Computes the inputs of a delta rule from what a layer projects: unit queries and keys, log gates, and betas.

PyTorch's operations compute them before an abstract op runs, so gradients reach the projections and the parameters of
the gates. Everything is computed in float32 (float64 with float64 inputs).

The ops of one or a few tokens have no gradients. They take the projections themselves, and the arguments `OPTIONS`
that say what to compute of them, so that a kernel may do it. The core does it for functions that lack any of these:

    normalize           the eps of an l2 norm of q and k; None if they are used as they are
    beta_limit          the number in beta_limit sigma(beta); None if beta is used as it is
    gate_activation     "softplus" or "bounded", as in `Gate`; None if g holds log gates, or logits of log sigma
    bound               the number of a bounded gate; None for any other gate
    A_log, dt_bias      as in `Gate`
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.dispatch.backend import OpCall, RawInputs, contiguous_layout
from gla_core.dispatch.tensors import pairwise_sum, sigmoid, wide
from gla_core.ops import _sequences, checks
from gla_core.ops._invariant import needs_equal_bits
from gla_core.ops._run import bypasses_torch, needs_gradient
from gla_core.ops.fused import fused
from gla_core.ops.spec import INPUT, Argument, OpSpec, Role

Gate = str | tuple[Any, ...] | None
"""Says how log gates are computed from g.

    None                                      g holds log gates
    "logsigmoid"                              log sigma(g) / gate_normalizer
    ("softplus", A_log, dt_bias)              -exp(A_log) softplus(g + dt_bias)
    ("bounded", A_log, dt_bias, bound)        bound sigma(exp(A_log) (g + dt_bias))

A_log is [Hv], dt_bias is [Hv] or, for gates per key, [Hv, K]; None stands for 0. bound is a negative number.
"""


def inputs(
    spec: OpSpec,
    tokens: Mapping[str, Any],
    cu_seqlens: Tensor | None,
    normalize: float | None,
    gate: Gate,
    gate_normalizer: int,
    beta_limit: float | None,
    backend: str | None,
) -> dict[str, Any]:
    """Returns the tokens as an op takes them, by name, and behind them the gate_normalizer of their gates.

    Args:
        tokens: the tokens as they were passed to the public function of `spec`, in order.
        cu_seqlens: the offsets of packed sequences, if gradients are computed: rows of no sequence get none, whatever
            they hold.

    Raises:
        ValueError, TypeError: a token, an option, or a parameter of the gates is not as expected.
    """
    x, g = dict(tokens), tokens["g"]
    x["gate_normalizer"] = checks.normalizer(gate, gate_normalizer, g) if isinstance(gate, str) else None
    parameters = None if gate is None or isinstance(gate, str) else gate
    if normalize is None and parameters is None and beta_limit is None:
        return x
    sizes = _sizes(spec, tokens)
    eps = None if normalize is None else _positive("normalize", normalize, "the eps of an l2 norm")
    limit = None if beta_limit is None else _positive("beta_limit", beta_limit, "the largest beta")
    logits = None if parameters is None else _logits(spec, parameters, g, sizes)
    options = (eps, needs_equal_bits(backend), logits, limit)
    x["beta"], *others = fused(_computed, x["beta"], x.get("q"), x["k"], g, cu_seqlens, *options, backend=backend)
    return x | {name: y for name, y in zip(("q", "k", "g"), others, strict=True) if name in x}


Logits = tuple[Tensor | None, Tensor | None, float | None, str | None]
"""A_log, dt_bias, the bound, which is None for softplus, and the form of the gates."""


def _computed(
    beta: Tensor,
    q: Tensor | None,
    k: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    eps: float | None,
    exact: bool,
    logits: Logits | None,
    limit: float | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Returns beta, q, k and g, of which those are computed whose option is not None."""

    def rows(x: Tensor) -> Tensor:
        return _sequences.rows_of_sequences(x, cu_seqlens)

    if eps is not None:
        q, k = None if q is None else _unit_rows(rows(q), eps, exact), _unit_rows(rows(k), eps, exact)
    if logits is not None:
        assert g is not None
        g = _log_gates(g if logits[-1] == "constant" else rows(g), *logits, exact)
    if limit is not None:
        beta = limit * sigmoid(rows(beta).to(wide(beta.dtype)), exact)
    return beta, q, k, g


def _unit_rows(x: Tensor, eps: float, exact: bool) -> Tensor:
    """Returns x / sqrt(sum of squares + eps) for each row [.., K], in the dtype of x."""
    rows = x.to(wide(x.dtype))
    squares = rows * rows
    squares = pairwise_sum(squares)[..., None] if exact else squares.sum(-1, keepdim=True)
    return (rows * torch.rsqrt(squares + eps)).to(x.dtype)


def _log_gates(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, form: str | None, exact: bool
) -> Tensor:
    """Returns log gates from logits [.., Hv, K] for each key, or [.., Hv]; without a bound those of softplus."""
    dtype, by_key = wide(x.dtype), form == "key"
    x, rate = x.to(dtype), None
    if A_log is not None:
        rate = A_log.to(dtype).exp()
        rate = rate[:, None] if by_key else rate
    if dt_bias is not None:
        x = x + (dt_bias[:, None] if by_key and dt_bias.ndim == 1 else dt_bias).to(dtype)
    # finite, because a logit of -inf, and a gate of -inf, give `rate` the gradient 0 and not 0 * inf
    least = torch.finfo(dtype).min
    if bound is not None:
        return bound * sigmoid(x if rate is None else rate * x.clamp(min=least), exact)
    g = F.logsigmoid(-x).clamp(min=least)  # -softplus(x)
    return g if rate is None else rate * g


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


def _logits(spec: OpSpec, gate: Any, g: Any, sizes: dict[str, Any]) -> Logits:
    """Returns what `gate` says of the logits g, after checks."""
    _, bound, A_log, dt_bias = _parameters(gate, g)
    argument = spec.has(Role.GATE)
    assert argument is not None
    form = argument.form(g)
    biases = ("Hv", "Hv K") if form == "key" else ("Hv",)
    for parameter, x, shapes in (("A_log", A_log, ("Hv",)), ("dt_bias", dt_bias, biases)):
        if x is not None:
            checks.tensor_of_any(parameter, x, shapes, sizes)
            checks.dtype(parameter, x, checks.FLOATS)
            checks.device(parameter, x, "g", g)
    return A_log, dt_bias, bound, form


def _parameters(gate: Any, g: Any) -> tuple[str, float | None, Tensor | None, Tensor | None]:
    """Returns the name of the function of the gates, its bound, A_log and dt_bias, after checks of all but tensors."""
    name: Any
    name, *parameters = gate if isinstance(gate, tuple) and gate else (None,)
    if (name, len(parameters)) not in (("softplus", 2), ("bounded", 3)):
        raise ValueError(
            f"gate is {gate if name is None else (name, '..')!r}; expected None, 'logsigmoid', "
            "('softplus', A_log, dt_bias) or ('bounded', A_log, dt_bias, bound)"
        )
    if g is None:
        raise ValueError(f"gate is {name!r} and g is None; expected the logits of the gates as g")
    A_log, dt_bias, *last = parameters
    if name == "softplus":
        return name, None, A_log, dt_bias
    (bound,) = last
    if not _is_number(bound) or not bound < 0:
        raise ValueError(f"the bound of the gates is {bound!r}; expected a number below 0")
    return name, float(bound), A_log, dt_bias


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _positive(name: str, x: Any, what: str) -> float:
    if not _is_number(x) or not x > 0:
        raise ValueError(f"{name} is {x!r}; expected {what}, a number above 0, or None")
    return float(x)


# ---- for ops of one or a few tokens, which take projections

OPTIONS = ("normalize", "beta_limit", "gate_activation", "bound", "A_log", "dt_bias")
ARGUMENTS = (
    Argument("normalize", "float?", default=None),
    Argument("beta_limit", "float?", default=None),
    Argument("gate_activation", "str?", default=None),
    Argument("bound", "float?", default=None),
    Argument("A_log", "Tensor?", "Hv", INPUT, None, role=Role.GATE_PARAMETER),
    Argument(
        "dt_bias",
        "Tensor?",
        "Hv K",
        INPUT,
        None,
        role=Role.GATE_PARAMETER,
        forms={"constant": "Hv", "head": "Hv", "key": "Hv K"},
    ),
)
"""The arguments `OPTIONS` of an op."""
_NO_OPTIONS = (None,) * len(OPTIONS)


def projections(
    spec: OpSpec,
    tokens: Mapping[str, Any],
    normalize: float | None,
    gate: Gate,
    gate_normalizer: int,
    beta_limit: float | None,
    backend: str | None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the tokens as an op with `ARGUMENTS` takes them, and its arguments gate_normalizer and `OPTIONS`.

    Where PyTorch has to see every operation, or the op would refuse a dtype, PyTorch's operations compute the inputs
    here, and all options are None. Arguments and errors are those of `inputs`.
    """
    parameters = None if gate is None or isinstance(gate, str) else gate
    is_raw = not (normalize is None and parameters is None and beta_limit is None)
    if not is_raw or not _are_taken(tokens, parameters):
        *taken, c = inputs(spec, tokens, None, normalize, gate, gate_normalizer, beta_limit, backend).values()
        return tuple(taken), (c, *_NO_OPTIONS)
    g = tokens["g"]
    c = checks.normalizer(gate, gate_normalizer, g) if isinstance(gate, str) else None
    eps = None if normalize is None else _positive("normalize", normalize, "the eps of an l2 norm")
    limit = None if beta_limit is None else _positive("beta_limit", beta_limit, "the largest beta")
    gates = _NO_OPTIONS[2:] if parameters is None else _parameters(parameters, g)
    return tuple(tokens.values()), (c, eps, limit, *gates)


def _are_taken(tokens: Mapping[str, Any], parameters: Any) -> bool:
    """Returns whether an op with `ARGUMENTS` takes these tokens and the parameters of their gates as they are."""
    q, others = tokens["q"], (tokens["g"], tokens["beta"])
    if type(q) is not Tensor or not bypasses_torch(q):
        return False
    if any(x is not None and getattr(x, "dtype", None) not in (q.dtype, torch.float32) for x in others):
        return False
    return not (isinstance(parameters, tuple) and needs_gradient(*parameters))


def with_projections(spec: OpSpec) -> OpSpec:
    """Returns the description of an op that has `ARGUMENTS`, with their checks and with what they mean."""

    def bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
        spec.bind(args, sizes)
        _check_options(args)

    return dataclasses.replace(spec, bind=bind, raw_inputs=RawInputs(OPTIONS, _plain_call, _plain))


def _check_options(args: Mapping[str, Any]) -> None:
    """Raises ValueError for options that do not fit together."""
    activation, bias = args["gate_activation"], args["dt_bias"]
    if activation not in (None, "softplus", "bounded"):
        raise ValueError(f"gate_activation is {activation!r}; expected None, 'softplus' or 'bounded'")
    if activation is None and (args["A_log"] is not None or bias is not None):
        raise ValueError("A_log or dt_bias is given and gate_activation is None; expected the name of an activation")
    if activation is not None and args["g"] is None:
        raise ValueError(f"gate_activation is {activation!r} and g is None; expected the logits of the gates as g")
    if activation is not None and args["gate_normalizer"] is not None:
        raise ValueError(f"gate_activation is {activation!r} and gate_normalizer is given; expected one of them")
    if (activation == "bounded") != (args["bound"] is not None):
        raise ValueError(f"gate_activation is {activation!r} and bound is {args['bound']}; 'bounded' takes a bound")
    if bias is not None and bias.ndim == 2 and not _by_key(args):
        raise ValueError(
            f"dt_bias has shape {list(bias.shape)}; expected [Hv], because all keys of a head share a gate"
        )


def _by_key(x: Mapping[str, Any]) -> bool:
    """Returns whether each key has a gate of its own, from the arguments of a call by name."""
    return x["g"] is not None and x["g"].ndim == x["q"].ndim


def _plain(x: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an op by name with computed inputs and without options."""
    eps, limit, activation, bound, A_log, dt_bias = (x[name] for name in OPTIONS)
    logits = None if activation is None else (A_log, dt_bias, bound, "key" if _by_key(x) else "head")
    options = (eps, needs_equal_bits(), logits, limit)
    results = fused(_computed, x["beta"], x["q"], x["k"], x["g"], None, *options)
    named = dict(zip(("beta", "q", "k", "g"), results, strict=True))
    contiguous = {name: y.contiguous() for name, y in named.items() if y is not x[name]}
    return {**x, **contiguous, **dict.fromkeys(OPTIONS)}


def _plain_call(call: OpCall) -> OpCall:
    """Returns the call of an op with computed inputs and without options."""
    computed = {"normalize": ("q", "k"), "gate_activation": ("g",), "beta_limit": ("beta",)}
    names = {name for option, each in computed.items() if option in call.given for name in each}
    layouts = {name: layout for name, layout in call.layouts.items() if name not in OPTIONS}
    for name in names.intersection(layouts):
        shape, dtype = layouts[name].shape, layouts[name].dtype
        layouts[name] = contiguous_layout(shape, wide(dtype) if name in ("g", "beta") else dtype)
    gate_dtype = call.gate_dtype
    return dataclasses.replace(
        call,
        gate_dtype=wide(gate_dtype) if "g" in names and gate_dtype is not None else gate_dtype,
        scalars={name: None if name in OPTIONS else x for name, x in call.scalars.items()},
        given=call.given.difference(OPTIONS),
        layouts=layouts,
    )
