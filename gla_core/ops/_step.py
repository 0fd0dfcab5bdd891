"""Checks the values of calls on single tokens, and defines their torch ops, one of which writes the state in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from gla_core.ops._torch_op import faker, runner, tell_autograd, torch_op
from gla_core.ops.spec import OpSpec


def reads(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows that are not skipped, and their states."""
    state, indices = args["state"], args["state_indices"]
    if indices is None:
        return {}
    used = [i for i in indices.tolist() if i >= 0]
    if any(i >= state.shape[0] for i in used):
        raise ValueError(f"slots holds {max(used)}; the pool has {state.shape[0]} states")
    if len(set(used)) < len(used):
        raise ValueError(f"slots is {used}; expected no state twice")
    return {"B": indices >= 0, "P": used}


def torch_ops(
    spec: OpSpec, backward: Callable[..., NoReturn], refuse_in_place: Callable[..., NoReturn]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Defines `gla::<name of the op>`, and the same with an underscore, which writes the state and returns o alone.

    Args:
        backward: raises the error about a gradient.
        refuse_in_place: raises the error about transforms of torch.func.
    """
    in_place, fake = runner(spec, True), faker(spec, False)

    def run_in_place(*args: Any) -> Tensor:
        o, state = in_place(*args)
        tell_autograd(state)
        return o

    schema = spec.schema(without=("inplace",))
    new = torch_op(schema, runner(spec, False), fake, backward=backward, flops=spec.flops, spec=spec)
    written = (
        schema.replace(f"{spec.name}(", f"{spec.name}_(")
        .replace("Tensor state", "Tensor(a!) state")
        .replace("(Tensor, Tensor)", "Tensor")
    )
    return new, torch_op(
        written, run_in_place, lambda *args: fake(*args)[0], vmap=refuse_in_place, flops=spec.flops, spec=spec
    )
