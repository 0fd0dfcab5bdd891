"""The way of every op: from its arguments to a backend's function and its checked results.

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
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, OpCall, new_state, swapped
from gla_core.dispatch.environment import environment
from gla_core.dispatch.request import Request, current_request, request_in_graph
from gla_core.dispatch.selection import is_launch_failure, remember_launch_failure, select
from gla_core.ops import _invariant, _memory, _results
from gla_core.ops import autocast as _autocast
from gla_core.ops.checks import as_backends_take
from gla_core.ops.spec import STATES, OpSpec

# Asked in every call, and so without PyTorch's wrappers.
_deterministic = torch._C._get_deterministic_algorithms
_precision = torch._C._get_float32_matmul_precision
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)

_MOST_PLANS = 8192  # a server that sees every sequence length must not grow without end
_Plan = tuple[Callable, int, Backend, OpCall, frozenset[int]]
"""What computes a call, how many arguments it takes, whose it is, the call, and which arguments are copied for it."""
_plans: dict[Hashable, _Plan] = {}


def _drop_plans() -> None:
    # A new dict: a plan made for the old set of backends, just now in another thread, is then stored into the old one.
    global _plans
    _plans = {}


registry.on_change.append(_drop_plans)


def run(spec: OpSpec, args: tuple, needs_grad: bool = False, backend: str | None = None) -> Any:
    """Run an op on all its arguments, in order, by the backend that the request in force selects."""
    plans = _plans
    request = current_request(backend)
    capturing = getattr(args[0], "is_cuda", False) and _capturing()
    signature: list[Hashable] = [spec.name, request.spec, needs_grad, capturing, _deterministic(), _precision()]
    for x in args:  # what decides whether a call is legal and who runs it: everything but values
        if x is None:
            signature.append(None)
            continue
        kind = type(x)
        signature.append(kind)  # 1, 1.0 and True are equal, and only one of them may be legal
        if kind is Tensor or isinstance(x, Tensor):
            signature += x.shape, x.dtype, x.device, x.is_contiguous() or x.stride()[-2:]
        elif kind is not float:
            signature.append(x)
    key = tuple(signature)
    try:
        known = plans.get(key)
    except TypeError:  # an argument that cannot be hashed has a wrong type; the description says which
        known = None
    plan = known or _plan(spec, args, needs_grad, capturing, request)
    function, number, chosen, call, copied = plan
    given = args
    if copied:
        args = tuple(x.contiguous() if i in copied else x for i, x in enumerate(args))
    if spec.check_values is not None and environment().check_values and call.device.type != "meta":
        spec.check_values(*args)
    try:
        found = function(*args[:number])
    except Exception as error:
        if request.choice(spec.name).names or not is_launch_failure(error):
            raise
        remember_launch_failure(chosen, call, error)
        _drop_plans()
        warnings.warn(f"{spec.name}: backend {chosen.name!r} could not launch and is skipped: {error}", stacklevel=2)
        return run(spec, given, needs_grad, backend)
    if known is None:
        _results.check(f"{spec.name}: backend {chosen.name!r}", found, spec.expected(*args), args)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = plan
    return _laid_out(spec, given, args, found) if copied else found


def _plan(spec: OpSpec, args: tuple, needs_grad: bool, capturing: bool, request: Request) -> _Plan:
    tokens = request.batch_invariant
    call = spec.describe(*args, needs_grad=needs_grad, capturing=capturing, batch_invariant=tokens)
    if call.device.type == "cpu":
        _memory.keep_freed()
    chosen = select(call, request)
    if needs_grad and spec.backward is not None:
        select(backward_of(call, spec.backward), request)  # so that its absence is found before a launch
    can = chosen.can(spec.name)
    copied = frozenset(
        i
        for i, (argument, x) in enumerate(zip(spec.arguments, args, strict=True))
        if isinstance(x, Tensor) and not as_backends_take(x, can.swapped_states and argument.dtype in STATES)
    )
    function = chosen.ops[spec.name]
    if tokens:
        function = _invariant.function_of(spec.name, chosen.ops, tokens, call.device.type in can.batch_invariant)
    return function, len(spec.contract), chosen, call, copied


def _laid_out(spec: OpSpec, given: tuple, args: tuple, found: Any) -> Any:
    """What a backend returned for copies of arguments, with states laid out as those that were given, or in them."""
    if not any(result.state for result in spec.results):
        return found
    results = list(found)
    for i, result in enumerate(spec.results):
        place = spec.parameters.index(result.like) if result.state and result.like else -1
        if place < 0 or given[place] is args[place]:
            continue
        if results[i] is args[place]:
            results[i] = given[place].copy_(results[i])
        elif swapped(given[place]):
            results[i] = new_state(given[place]).copy_(results[i])
    return tuple(results)


def backward_of(call: OpCall, op: str) -> OpCall:
    """The call that a gradient of this one will need, of the abstract op `op`."""
    return dataclasses.replace(call, op=op, checkpoints=False)


# ---- for the public functions

# Asked in every call: names of this module cost half of what attributes of torch's do.
transformed = torch._C._are_functorch_transforms_active  # by torch.func
_modes = torch._C._len_torch_dispatch_stack
_autocast_in_force = _autocast.in_force


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of any of `tensors`."""
    if not torch.is_grad_enabled():
        return False
    for x in tensors:
        if getattr(x, "requires_grad", False):
            return True
    return False


def bypasses_torch(x: Any) -> bool:
    """Whether the public function may call the backend itself: x is a plain tensor, and nothing else hears of ops."""
    if is_compiling() or _modes() or transformed():
        return False
    if _autocast_in_force() or forward_ad._current_level >= 0:
        return False
    return type(x) is Tensor or not isinstance(x, Tensor)


def request_text(backend: str | None) -> str:
    """The `backend` argument of a torch op.

    Eagerly it is the whole request in force, so that the backward runs under the forward's; a compiled graph holds
    only what the call itself and the blocks compiled with it name.
    """
    if is_compiling():
        return request_in_graph(backend)
    return current_request(backend).spec
