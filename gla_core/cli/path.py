"""Follows a call from the public function to its launches.

The call is a real one, on tensors without values. A profiler sees every function that the call enters. On its path are
the public function, the steps of the core (`gla_core.dispatch.steps`), the functions that the backend implements or
prepares, and its steps, which the docs of `Prepared` define. The call ends before a kernel is compiled or launched, or
when it enters a function that the backend did not prepare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import gla_core as gla
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, OpCall, Prepared
from gla_core.dispatch.request import current_request
from gla_core.dispatch.steps import STEPS
from gla_core.ops import ABSTRACT_OPS, RUNS, OpSpec
from gla_core.ops.calls import run
from gla_core.ops.spec import Argument, Role, dtype_in_call

_STEPS = ("prepare", "plan", "launches", "start")
"""The first words of the names of a backend's steps."""
_PUBLIC = tuple(name for name in RUNS if hasattr(gla, name))
_NOT_BACKENDS = sys.stdlib_module_names | {"gla_core", "torch", "triton"}


class Step(NamedTuple):
    """A function on the path. `does` is the first line of its docstring."""

    file: str
    function: str
    does: str

    def __str__(self) -> str:
        return f"  {self.file}  {self.function}" + f"\n      {self.does}" * bool(self.does)


class Launch(NamedTuple):
    """A launch of a kernel."""

    file: str
    kernel: str
    grid: tuple[int, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in {"grid": self.grid, **self.options}.items())
        return f"  {self.file}  {self.kernel}\n      {options}"


class CallPath(NamedTuple):
    """The functions on the path, in the order in which they are entered, and the launches, if they are known."""

    steps: list[Step]
    launches: list[Launch]

    def fields(self) -> dict[str, Any]:
        """Returns the path for JSON."""
        return {name: [x._asdict() for x in values] for name, values in zip(("path", "launches"), self, strict=True)}

    def __str__(self) -> str:
        none = ["  none: the last function computes in PyTorch, or describes no launches"]
        return "\n".join(map(str, ["path:", *self.steps, "launches:", *(self.launches or none)]))


def path_of(call: OpCall, backend: str | None, winner: str) -> CallPath:
    """Returns the path of a call.

    Args:
        backend: a request, as in a call.
        winner: the name of the backend that it selects.
    """
    follower, others = _Follower(registry.get(winner)), sys.getprofile()
    with _described_as(call):
        sys.setprofile(follower)
        try:
            _make(call, backend)
        except _Arrived:
            pass
        except Exception:
            if not follower.is_prepared:  # a function that was prepared may need values
                raise
        finally:
            sys.setprofile(others)
            registry.changed()  # forgets the plans of tensors without values
    return CallPath(follower.steps, follower.launches)


# ---- the call


def _make(call: OpCall, backend: str | None) -> None:
    """Makes a call on tensors without values, by its public function if it has one. A backward has none."""
    spec = ABSTRACT_OPS[call.op]
    args = tuple(_without_values(argument, spec, call) for argument in spec.arguments)
    for name, (op, fixed) in reversed(RUNS.items()):
        if op is spec and name in _PUBLIC and fixed.items() <= call.scalars.items():
            required, named = _as_passed(spec, args)
            getattr(gla, name)(*required, **{key: x for key, x in named.items() if key not in fixed}, backend=backend)
            return
    run(spec, spec.prepared(args), current_request(backend))


def _as_passed(spec: OpSpec, args: tuple) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of an op as its public function takes them: those that are required first, and others."""
    needed = spec.required - {"scale"}
    required = sum(1 for _ in itertools.takewhile(lambda name: name in needed, spec.parameters))
    named = {
        argument.public or argument.name: x
        for argument, x in zip(spec.arguments[required:], args[required:], strict=True)
        if x is not None and x is not argument.default
    }
    return args[:required], named | ({"gate": "logsigmoid"} if "gate_normalizer" in named else {})


def _without_values(argument: Argument, spec: OpSpec, call: OpCall) -> Any:
    """Returns an argument of a call; a tensor has no values."""
    if argument.hint:
        return call.longest
    if argument.dtype is None:
        return call.scalars.get(argument.name, argument.default)
    if argument.name in spec.places or (argument.is_optional_input and argument.name not in call.given):
        return None
    has_integers = {Role.OFFSETS: call.variable_length, Role.SLOTS: call.indexed}.get(argument.role, False)
    dtype = argument.dtype.allowed(call.dtype)[0] if has_integers else dtype_in_call(argument, call)
    return None if dtype is None else torch.empty(spec.shape(argument, call), dtype=dtype, device="meta")


@contextlib.contextmanager
def _described_as(call: OpCall) -> Iterator[None]:
    """Makes the core take calls on tensors without values for calls on the device of `call`."""
    describe = OpSpec.describe

    @functools.wraps(describe)
    def on_device(*args: Any, **options: Any) -> OpCall:
        return dataclasses.replace(describe(*args, **options), device=call.device, assumed=call.assumed)

    OpSpec.describe = on_device
    try:
        yield
    finally:
        OpSpec.describe = describe


# ---- its path


class _Arrived(Exception):
    """Ends a call whose path is known."""


class _Follower:
    """A profiler that notes the steps of a call of a backend, and ends the call when it arrives at the launches."""

    def __init__(self, backend: Backend) -> None:
        prepared = [op for op in backend.ops.values() if isinstance(op, Prepared)]
        self._prepares = {_code_of(op.prepare) for op in prepared}
        self._takes = {op.takes for op in prepared}
        self._computes = {_code_of(op) for op in backend.ops.values() if not isinstance(op, Prepared)}
        public = (getattr(gla, name) for name in _PUBLIC)
        self._known = {*STEPS, *map(_code_of, public), *self._prepares, *self._computes}
        self.steps: list[Step] = []
        self.launches: list[Launch] = []
        self.is_prepared = False

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "return" and code in self._prepares:
            self._known.add(_code_of(result))
            self.is_prepared |= result is not None
        if event != "call" or not (code in self._known or self._is_step_of_backend(frame)):
            return
        step = Step(_file_of(frame.f_globals), code.co_qualname.replace(".<locals>", ""), _does(frame))
        if step not in self.steps:
            self.steps.append(step)
        if code.co_name == "start":
            self.launches = [_launch(x) for x in frame.f_locals.get("launches", ())]
        if self.launches or code in self._computes:
            raise _Arrived

    def _is_step_of_backend(self, frame: FrameType) -> bool:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if name.partition(".")[0] in _NOT_BACKENDS:
            return False
        if "<locals>" in code.co_qualname:
            return code.co_varnames[: code.co_argcount] in self._takes
        return code.co_name.split("_")[0] in _STEPS


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None)


def _file_of(module: dict[str, Any]) -> str:
    """Returns the file of a module, whose global names are given, relative to where Python finds its package."""
    return module["__name__"].replace(".", "/") + ("/__init__.py" if "__path__" in module else ".py")


def _does(frame: FrameType) -> str:
    """Returns the first line of the docstring of the function of a frame; of a nested one, an empty line."""
    name, *attributes = frame.f_code.co_qualname.split(".")
    function = functools.reduce(lambda x, y: getattr(x, y, None), attributes, frame.f_globals.get(name))
    return (getattr(function, "__doc__", None) or "").partition("\n")[0]


def _launch(x: Any) -> Launch:
    """Returns a launch of a backend as it is printed."""
    function = x.kernel.fn
    return Launch(_file_of(function.__globals__), function.__name__, x.grid, dict(x.options))
