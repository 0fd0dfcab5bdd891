"""Executes every op: from its arguments to the function of a backend and its checked results.

Once per signature, a call is checked, its backend is selected, and the call is planned. The signature holds shapes,
strides, dtypes, devices, alignment, and request. For later calls one comparison with the latest signature of the op
finds the function, or one dictionary look-up.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from gla_core.dispatch import registry
from gla_core.dispatch.backend import (
    ALIGNMENT,
    OP_PARAMETERS,
    Backend,
    Op,
    OpCall,
    Prepared,
    arguments_of,
    as_received,
    by_keyword,
    contiguous_layout,
    has_raw_inputs,
    prepared,
    takes_raw_inputs,
)
from gla_core.dispatch.environment import environment
from gla_core.dispatch.errors import BackendError
from gla_core.dispatch.lowering import with_plain_inputs
from gla_core.dispatch.request import Request, current_request, request_in_graph
from gla_core.dispatch.selection import is_launch_failure, log_selection, remember_launch_failure, select
from gla_core.dispatch.steps import step
from gla_core.dispatch.tensors import new_state, swapped
from gla_core.ops import _invariant, _logits, _memory, _results, _values, autocast
from gla_core.ops.checks import as_backends_take
from gla_core.ops.spec import OpSpec, Role, picker

# Called for every op: PyTorch's wrappers would take longer.
_deterministic = torch._C._get_deterministic_algorithms
_precision = torch._C._get_float32_matmul_precision
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)

_MOST_PLANS = 8192  # a server that sees every sequence length must not grow without end


class _Plan(NamedTuple):
    """Holds how the calls of one signature are executed.

    Attributes:
        function: computes a call; takes all arguments of the contract, in order.
        copied: positions of the arguments that are copied first, because the backend does not take their strides.
    """

    function: Callable[..., Any]
    backend: Backend
    call: OpCall
    copied: frozenset[int]


class _Plans(NamedTuple):
    """Holds the plans that were made.

    Attributes:
        all: the plans by signature.
        latest: for each op, the signature of the latest call and its plan. Most calls have the signature of the call
            before. To compare two signatures takes a third of the time of a hash and a look-up.
    """

    all: dict[Hashable, _Plan]
    latest: dict[str, tuple[list[Hashable], _Plan]]


_plans = _Plans({}, {})


def _drop_plans() -> None:
    # New dicts: another thread that is planning for the old set of backends stores its plan in the old ones.
    global _plans
    _plans = _Plans({}, {})


registry.on_change.append(_drop_plans)


@step
def run(spec: OpSpec, args: tuple, request: Request, needs_grad: bool = False, is_part: bool = False) -> Any:
    """Runs an op with the backend that a request selects. `args` are all its arguments, in order.

    Args:
        is_part: whether the call is a part of another one, which checked its values if they are to be checked.
    """
    plans = _plans
    capturing = getattr(args[0], "is_cuda", False) and _capturing()
    signature: list[Hashable] = [spec.name, request.spec, needs_grad, capturing, _deterministic(), _precision()]
    signature += map(type, args)  # 1, 1.0 and True are equal, and only one of them may be legal
    for x in args:  # everything but values decides whether a call is legal and how it runs
        if x is None:
            continue
        if type(x) is Tensor or isinstance(x, Tensor):
            signature += x.shape, x.dtype, x.device, x.stride(), x.data_ptr() % ALIGNMENT == 0
        elif type(x) is not float:
            signature.append(x)
    latest = plans.latest.get(spec.name)
    known = latest[1] if latest is not None and latest[0] == signature else _look_up(plans, spec.name, signature)
    if known is None:
        if (plain := spec.plain(args)) is not args:
            return run(spec, plain, request, needs_grad, is_part)
        registry.installed()  # the first use discovers plugins, which drops all plans
        plans = _plans
    plan = known or _plan(spec, args, needs_grad, capturing, request)
    if plan is None:
        return run(spec, args, request, needs_grad, is_part)
    passed = args
    if plan.copied:
        args = tuple(x.contiguous() if i in plan.copied else x for i, x in enumerate(args))
    if not is_part and environment().check_values and plan.call.device.type != "meta":
        _values.check(spec, args)
    try:
        results = plan.function(*args[: len(spec.contract)])
    except Exception as error:
        if not _is_passed_over(error, plan.backend, plan.call, request):
            raise
        return run(spec, passed, request, needs_grad, is_part)
    if known is None:
        _results.check(f"{spec.name}: backend {plan.backend.name!r}", results, spec.expected(*args), args)
        log_selection(plan.backend, plan.call)
        if len(plans.all) >= _MOST_PLANS:
            plans.all.clear()
        plans.all[tuple(signature)] = plan
    return _laid_out(spec, passed, args, results) if plan.copied else results


def _look_up(plans: _Plans, op: str, signature: list[Hashable]) -> _Plan | None:
    """Returns the plan of a signature, and remembers it as the latest plan of the op. Returns None if there is none."""
    try:
        known = plans.all.get(tuple(signature))
    except TypeError:  # an argument that cannot be hashed has a wrong type; spec.describe says which
        return None
    if known is not None:
        plans.latest[op] = signature, known
    return known


def _plan(spec: OpSpec, args: tuple, needs_grad: bool, capturing: bool, request: Request) -> _Plan | None:
    """Checks and describes a call, selects its backend, and has the backend prepare it.

    Returns:
        The plan; None if the backend could not launch and is passed over. Another call of `run` then selects the next
        backend and keeps its plan.
    """
    tokens = request.batch_invariant
    call = spec.describe(*args, needs_grad=needs_grad, capturing=capturing, batch_invariant=tokens)
    if call.device.type == "cpu":
        _memory.keep_freed()
    chosen = select(call, request)
    if needs_grad and spec.backward is not None:
        select(backward_of(call, spec.backward), request)  # a missing backward is found before a launch
    can = chosen.can(spec.name)
    copied = frozenset(
        i
        for i, (argument, x) in enumerate(zip(spec.arguments, args, strict=True))
        if isinstance(x, Tensor) and not as_backends_take(x, can.swapped_states and argument.role is Role.STATE)
    )
    copies = {spec.parameters[i]: contiguous_layout(tuple(args[i].shape), args[i].dtype) for i in copied}
    taken = dataclasses.replace(call, layouts={**call.layouts, **copies}) if copied else call
    native, by_segments = can.batch_invariant, tokens is not None and call.device.type not in can.batch_invariant
    try:
        if has_raw_inputs(taken) and (by_segments or not takes_raw_inputs(chosen.ops[spec.name], spec.name)):
            function = with_plain_inputs(taken, lambda plain: _function_of(spec, chosen, plain, native))
        else:
            function = _function_of(spec, chosen, taken, native)
        function = function if tokens is None else _invariant.inside(function)
    except Exception as error:
        if not _is_passed_over(error, chosen, call, request, stacklevel=5):
            raise
        return None
    return _Plan(function, chosen, call, copied)


def _function_of(spec: OpSpec, backend: Backend, call: OpCall, native: frozenset[str]) -> Callable[..., Any]:
    """Returns the function that computes a call, from log gates if the backend takes no logits.

    It takes all arguments of the contract in order. `native` is as in `_function_for`.
    """
    received = as_received(backend.ops[spec.name], call)
    function = _function_for(spec, backend, received, native)
    return function if received is call else _logits.with_log_gates(spec, function)


def _function_for(spec: OpSpec, backend: Backend, call: OpCall, native: frozenset[str]) -> Callable[..., Any]:
    """Returns the function that computes a call as the backend receives it; see `_function_of`.

    Args:
        native: device types on which the backend honours `batch_invariant` itself.
    """
    op: Op = backend.ops[spec.name]
    if call.batch_invariant is not None:
        by_segments = _invariant.function_of(spec, backend, call, run)  # raises if the op cannot be batch-invariant
        if call.device.type not in native:
            return by_segments
    try:
        function, takes = prepared(op, call) if isinstance(op, Prepared) else op, arguments_of(op)
    except BackendError as error:
        raise BackendError(f"backend {backend.name!r}: {error}") from error.__cause__
    if takes == spec.contract:
        return function
    picked = [spec.contract.index(name) for name in takes]
    if isinstance(op, Prepared) or not by_keyword(op):
        in_order = picker(picked)
        return lambda *args: function(*in_order(args))
    return lambda *args: function(**{spec.contract[i]: args[i] for i in picked})


def _is_passed_over(error: Exception, backend: Backend, call: OpCall, request: Request, stacklevel: int = 4) -> bool:
    """Returns whether `auto` passes over a backend that could not launch; if so, warns and remembers the failure.

    Args:
        stacklevel: the stack level of the line that calls the op, for the warning.
    """
    if request.choice(call.op).names or not is_launch_failure(error):
        return False
    remember_launch_failure(backend, call, error)
    _drop_plans()
    warnings.warn(
        f"{call.op}: backend {backend.name!r} could not launch and is skipped: {error}", stacklevel=stacklevel
    )
    return True


def _laid_out(spec: OpSpec, passed: tuple, args: tuple, computed: Any) -> Any:
    """Returns results that were computed from copies of arguments.

    A state that was written into a copy is written into the state that was passed. A new state gets the layout of that
    one.
    """
    if not any(result.state for result in spec.results):
        return computed
    results = list(computed)
    for i, result in enumerate(spec.results):
        place = spec.parameters.index(result.like) if result.state and result.like else -1
        if place < 0 or passed[place] is args[place]:
            continue
        if results[i] is args[place]:
            results[i] = passed[place].copy_(results[i])
        elif swapped(passed[place]):
            results[i] = new_state(passed[place]).copy_(results[i])
    return tuple(results)


def backward_of(call: OpCall, op: str) -> OpCall:
    """Returns the call of the abstract op `op` that a gradient of this call needs."""
    passed = call.given & set(OP_PARAMETERS[op])
    return dataclasses.replace(call, op=op, checkpoints=False, given=passed)


# ---- for the public functions

# Looked up in every call: names of this module take half the time of attributes of torch.
transformed = torch._C._are_functorch_transforms_active  # by torch.func
tracing = torch._C._get_tracing_state  # None unless torch.jit.trace runs; sizes are then tensors
_modes = torch._C._len_torch_dispatch_stack
_autocast_in_force = autocast.in_force


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd will ask for the gradient of any of `tensors`."""
    if not torch.is_grad_enabled():
        return False
    for x in tensors:
        if getattr(x, "requires_grad", False):
            return True
    return False


def plans_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether a call is planned for a gradient of any of `tensors`.

    A call under torch.jit.trace is not, because PyTorch compares its trace with another one that it makes without
    gradients. Its gradient is computed all the same.
    """
    return needs_gradient(*tensors) and not tracing()


def bypasses_torch(x: Any) -> bool:
    """Returns whether the public function may call the backend directly, without PyTorch's dispatcher.

    It may if x is a plain tensor, and no compiler, tracer, mode, transform or autocast has to see the op.
    """
    if is_compiling() or _modes() or transformed() or tracing():
        return False
    if _autocast_in_force() or forward_ad._current_level >= 0:
        return False
    return type(x) is Tensor or not isinstance(x, Tensor)


def request_text(backend: str | None) -> str:
    """Returns the `backend` argument of a torch op.

    In eager mode it is the whole request in force, so that the backward runs under the request of its forward. A
    compiled graph contains only the request of the call and of the blocks that are compiled with it.
    """
    if is_compiling():
        return request_in_graph(backend)
    return current_request(backend).spec
