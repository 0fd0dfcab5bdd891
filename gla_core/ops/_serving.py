"""Calls of ops that read and write states in a pool: what their public functions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from gla_core.dispatch.request import current_request
from gla_core.ops import _overlap, autocast, checks
from gla_core.ops._run import bypasses_torch, needs_gradient, request_text, run, transformed
from gla_core.ops._torch_op import faker, refuse_in_place, refuse_tangents, runner, tell_autograd, torch_op
from gla_core.ops.spec import AS_INPUT, OpSpec, plain_number, scale_or_default


def serving(spec: OpSpec) -> Callable[[tuple, str | None, bool], Tensor]:
    """Defines `gla::<name of the op>`, and returns the function that calls the op.

    It takes the arguments, a request, and whether states have V before K. The arguments begin with q, k, v and g, and
    with the tensors that every call writes, states first; other tensors of floats follow them; the scale may be None.
    The function raises RuntimeError if an input requires a gradient, and NotImplementedError under transforms of
    torch.func.
    """
    out_of_op = (None,) if "out" in spec.parameters else ()
    of_torch = torch_op(  # a torch op returns no argument, so this one lacks `out`
        spec.schema(without=("out",)),
        runner(spec, *out_of_op),
        faker(spec, *out_of_op),
        vmap=refuse_in_place,
        flops=spec.flops,
        spec=spec,
    )
    scale_at = spec.parameters.index("scale")
    out_at = spec.parameters.index("out") if out_of_op else len(spec.parameters)
    memory_end = 4 + len(spec.written) - len(out_of_op)  # all that is written but `out`
    like_q = [i for i, a in enumerate(spec.arguments) if memory_end <= i < scale_at and a.dtype is AS_INPUT]

    def call(args: tuple, backend: str | None) -> Tensor:
        q, k, v, g, *others = args[:scale_at]
        memory, scale, out = args[4:memory_end], args[scale_at], args[out_at] if out_of_op else None
        if needs_gradient(q, k, v, g, *others):
            raise RuntimeError(
                f"{spec.public} has no backward and an input requires a gradient; "
                "train with chunk_gla, or serve under torch.no_grad()"
            )
        if bypasses_torch(q):
            args = (*args[:scale_at], scale_or_default(q, scale), *args[scale_at + 1 :])
            o = run(spec, args, current_request(backend))
            tell_autograd(*memory, out)
            return o
        q, k, v, g, *cast = autocast.tokens(q, k, v, g, *[args[i] for i in like_q])
        casts = dict(zip(like_q, cast, strict=True))
        others = [casts.get(i, args[i]) for i in range(4, scale_at)]
        refuse_tangents(q, k, v, g, *others)
        if transformed():
            refuse_in_place()
        if out is not None:
            _check_out(out, q, v, dict(zip(spec.parameters, args, strict=True)))
        rest = (*others, plain_number(scale), *args[scale_at + 1 : out_at], *args[out_at + 1 :])
        o = of_torch(q, k, v, g, *rest, request_text(backend))
        return o if out is None else out.copy_(o)

    def call_in_layout(args: tuple, backend: str | None, state_v_first: bool) -> Tensor:
        if not state_v_first:
            return call(args, backend)
        args = (*args[:4], checks.transposed(args[4]), *args[5:])
        try:
            return call(args, backend)
        except (ValueError, TypeError) as error:
            raise spec.error_in_layout(error, args) from None

    return call_in_layout


def _check_out(out: Any, q: Any, v: Any, given: Mapping[str, Any]) -> None:
    """Checks `out` for the torch op, which does not receive it and would write the pool. The op checks q and v.

    Args:
        given: all arguments by name, as the user gave them.
    """
    if isinstance(q, Tensor) and isinstance(v, Tensor) and q.ndim == v.ndim == 4:
        heads = max(q.shape[2], v.shape[2])
        checks.tensor("out", out, "B T Ho V", {"B": q.shape[0], "T": q.shape[1], "Ho": heads, "V": v.shape[3]})
        checks.dtype("out", out, (v.dtype,), ", as v")
        if not is_compiling():  # a compiler knows no addresses
            _overlap.check(given, ["out"])
