"""What every abstract op shares: from checked arguments to a backend's function and its checked results.

A call is checked and its backend chosen once per signature (shapes, dtypes, devices, request); after that the way to
the function is one dictionary look-up.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, OpCall
from gla_core.dispatch.environment import environment
from gla_core.dispatch.request import Request, current_request, request_in_graph
from gla_core.dispatch.selection import is_launch_failure, remember_launch_failure, select
from gla_core.ops import _results

_deterministic = torch.are_deterministic_algorithms_enabled
_precision = torch.get_float32_matmul_precision

_MOST_PLANS = 8192  # a server that sees every sequence length must not grow without end
_plans: dict[Hashable, tuple[Callable, Backend, OpCall]] = {}


def _drop_plans() -> None:
    # A new dict: a plan made for the old set of backends, just now in another thread, is then stored into the old one.
    global _plans
    _plans = {}


registry.on_change.append(_drop_plans)


class AbstractOp:
    """An abstract op: how its arguments are described and checked, and the way to the backend that runs it.

    Args:
        name: as in `gla_core.dispatch.backend.OP_PARAMETERS`.
        describe: takes the op's arguments; raises ValueError or TypeError for bad ones, else returns an `OpCall`.
        results: takes the op's arguments; returns what a backend has to return for them.
        check_values: takes the op's arguments under GLA_CHECK=1; raises ValueError for values no op is defined on.
        backward: the abstract op that a gradient will need.
    """

    def __init__(
        self,
        name: str,
        describe: Callable[..., OpCall],
        results: Callable[..., _results.Results],
        check_values: Callable[..., None] | None = None,
        backward: str | None = None,
    ) -> None:
        self.name = name
        self.describe = describe
        self.results = results
        self._check_values = check_values
        self.backward = backward

    def call(self, *args: Any, needs_grad: bool = False, capturing: bool = False, **kwargs: Any) -> OpCall:
        """Check the arguments and describe the call, the circumstances included."""
        return dataclasses.replace(
            self.describe(*args, **kwargs),
            needs_grad=needs_grad,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            capturing=capturing,
            float32_matmul_precision=torch.get_float32_matmul_precision(),
        )

    def run(self, args: tuple, needs_grad: bool = False, backend: str | None = None) -> Any:
        """Run the op on `args` (in the order of `OP_PARAMETERS`) by the backend that the request in force selects."""
        plans = _plans
        request = current_request(backend)
        capturing = getattr(args[0], "is_cuda", False) and torch.cuda.is_current_stream_capturing()
        key = _signature([self.name, request.spec, needs_grad, capturing, _deterministic(), _precision()], args)
        try:
            known = plans.get(key)
        except TypeError:  # an argument that cannot be hashed has a wrong type; describe() says which
            known = None
        plan = known or self._plan(self.call(*args, needs_grad=needs_grad, capturing=capturing), request)
        function, chosen, call = plan
        if self._check_values is not None and environment().check_values and call.device.type != "meta":
            self._check_values(*args)
        try:
            found = function(*args)
        except Exception as error:
            if request.choice(self.name).names or not is_launch_failure(error):
                raise
            remember_launch_failure(chosen, call, error)
            _drop_plans()
            warnings.warn(
                f"{self.name}: backend {chosen.name!r} could not launch and is skipped: {error}", stacklevel=2
            )
            return self.run(args, needs_grad, backend)
        if known is None:
            _results.check(f"{self.name}: backend {chosen.name!r}", found, self.results(*args), args)
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[key] = plan
        return found

    def _plan(self, call: OpCall, request: Request) -> tuple[Callable, Backend, OpCall]:
        if call.needs_grad and self.backward is not None:
            select(dataclasses.replace(call, op=self.backward), request)  # so that its absence is found before a launch
        chosen = select(call, request)
        return chosen.ops[self.name], chosen, call


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of any of `tensors`."""
    if not torch.is_grad_enabled():
        return False
    for x in tensors:
        if getattr(x, "requires_grad", False):
            return True
    return False


def request_text(backend: str | None) -> str:
    """The `backend` argument of a torch op.

    Eagerly it is the whole request in force, so that the backward runs under the forward's; a compiled graph holds
    only what the call itself and the blocks compiled with it name.
    """
    if torch.compiler.is_compiling():
        return request_in_graph(backend)
    return current_request(backend).spec


def _signature(key: list[Hashable], args: tuple) -> tuple[Hashable, ...]:
    """The circumstances in `key`, and what decides whether a call is legal and who runs it: everything but values."""
    for x in args:
        kind = type(x)
        key.append(kind)  # 1, 1.0 and True are equal, and only one of them may be legal
        if kind is Tensor or isinstance(x, Tensor):
            key += x.shape, x.dtype, x.device, x.is_contiguous() or x.stride()[-1:]
        elif kind is not float:
            key.append(x)
    return tuple(key)
