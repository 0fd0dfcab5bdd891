"""Calls of ops that read and write states in a pool: what their public functions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.compiler import is_compiling

from gla_core.dispatch.request import current_request
from gla_core.ops import _overlap, autocast, checks
from gla_core.ops._run import bypasses_torch, needs_gradient, request_text, run, transformed
from gla_core.ops._torch_op import faker, refuse_tangents, runner, tell_autograd, torch_op
from gla_core.ops.spec import OpSpec, plain_number, scale_or_default


def serving(
    spec: OpSpec, *, train_with: OpSpec | None = None, refuse_in_place: Callable[..., NoReturn]
) -> Callable[[tuple, str | None, bool], Tensor]:
    """Defines `gla::<name of the op>`, and returns the function that calls the op.

    It takes the arguments, a request, and whether states have V before K. The arguments begin with the tokens and with
    the tensors that every call writes, states first; other tensors of floats follow them; the scale may be None. The
    function raises RuntimeError if an input requires a gradient, and NotImplementedError under transforms of
    torch.func.

    Args:
        train_with: the op that the error about a gradient names; None if the family has no gradients.
        refuse_in_place: raises the error about transforms.
    """
    out_of_op = (None,) if "out" in spec.parameters else ()
    as_torch_op = torch_op(  # a torch op returns no argument, so this one lacks `out`
        spec.schema(without=("out",)),
        runner(spec, *out_of_op),
        faker(spec, *out_of_op),
        vmap=refuse_in_place,
        flops=spec.flops,
        spec=spec,
    )
    advice = "serve under torch.no_grad()"
    if train_with is not None:
        advice = f"train with {train_with.public}, or {advice}"
    scale_at = spec.parameters.index("scale")
    out_at = spec.parameters.index("out") if out_of_op else len(spec.parameters)
    tokens = len(spec.tokens)
    written = slice(tokens, tokens + len(spec.written) - len(out_of_op))  # all that is written but `out`

    def call(args: tuple, backend: str | None) -> Tensor:
        tensors, scale, out = args[:scale_at], args[scale_at], args[out_at] if out_of_op else None
        if needs_gradient(*tensors):
            raise RuntimeError(f"{spec.public} has no backward and an input requires a gradient; {advice}")
        if bypasses_torch(args[0]):
            args = (*tensors, scale_or_default(args[0], scale), *args[scale_at + 1 :])
            o = run(spec, args, current_request(backend))
            tell_autograd(*args[written], out)
            return o
        tensors = autocast.inputs(spec, *tensors)
        refuse_tangents(*tensors)
        if transformed():
            refuse_in_place()
        if out is not None:
            _check_out(spec, out, dict(zip(spec.parameters, (*tensors, *args[scale_at:]), strict=True)))
        rest = (plain_number(scale), *args[scale_at + 1 : out_at], *args[out_at + 1 :])
        o = as_torch_op(*tensors, *rest, request_text(backend))
        return o if out is None else out.copy_(o)

    def call_in_layout(args: tuple, backend: str | None, state_v_first: bool) -> Tensor:
        if not state_v_first:
            return call(args, backend)
        args = (*args[:tokens], checks.transposed(args[tokens]), *args[tokens + 1 :])
        try:
            return call(args, backend)
        except (ValueError, TypeError) as error:
            raise spec.error_in_layout(error, args) from None

    return call_in_layout


def _check_out(spec: OpSpec, out: Any, x: Mapping[str, Any]) -> None:
    """Checks `out` for the torch op, which does not receive it and would write the pool. The op checks q and v.

    Args:
        x: all arguments by name.
    """
    q, v = x["q"], x["v"]
    if isinstance(q, Tensor) and isinstance(v, Tensor) and q.ndim == v.ndim == 4:
        (B, T, Hq, _), (Hv, V) = q.shape, v.shape[2:]
        sizes = {"B": B, "T": T, "Ho": max(Hq, Hv), "Hv": Hv, "V": V}
        checks.tensor("out", out, spec.results[0].shape, sizes)
        checks.dtype("out", out, (v.dtype,), ", as v")
        if not is_compiling():  # a compiler knows no addresses
            _overlap.check(x, ["out"])
