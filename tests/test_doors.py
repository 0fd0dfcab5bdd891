"""The way of a call to its launches: the functions on the stack, those that a repeated call enters, and the doors.

A door is a call of a function that a value holds, as in `kernel.refusal(call, gpu)`. In an editor, "go to definition"
ends there: it leads to the field of the value, and not to the function. The calls are for a GPU that is not here. No
launch is made.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

import gla_core as gla
from gla_core.dispatch import registry
from gla_core.dispatch.calibration import KNOWN_DEVICES
from gla_core.ops import OpSpec
from tests.backends import fake_driver

pytest.importorskip("triton")
prepared = pytest.importorskip("gla_triton_runtime.prepared")
replay = pytest.importorskip("gla_triton_runtime.replay")

OWN = ("gla_core", "gla_triton_fused", "gla_triton_kernels", "gla_triton_runtime")


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    """Makes calls on tensors without values calls on an H200, whose kernels are neither compiled nor launched."""
    describe = OpSpec.describe

    @functools.wraps(describe)
    def describe_on_device(*args, **options):
        device = {"device": torch.device("cuda", 0), "assumed": KNOWN_DEVICES["NVIDIA H200"]}
        return dataclasses.replace(describe(*args, **options), **device)

    monkeypatch.setattr(OpSpec, "describe", describe_on_device)
    monkeypatch.setattr(prepared, "on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(prepared, "compile_launches", lambda launches: None)
    yield
    registry.changed()  # forgets the plans of tensors without values


def inputs(requires_grad: bool = False) -> list[torch.Tensor]:
    """Returns q, k, v and g without values."""
    shape = {"size": (8, 4096, 16, 128), "device": "meta", "requires_grad": requires_grad}
    return [torch.empty(**shape, dtype=dtype) for dtype in (*[torch.bfloat16] * 3, torch.float32)]


def is_own(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in OWN and Path(frame.f_code.co_filename).exists()


# ---- frames


@pytest.fixture
def stacks(monkeypatch):
    """Returns a list of the names of the functions on the stack at each launch, innermost first."""
    seen = []

    def start(*_):
        frame, names = sys._getframe(1), ["start"]
        while frame is not None:
            names += [frame.f_code.co_name] if is_own(frame) else []
            frame = frame.f_back
        seen.append(names)

    monkeypatch.setattr(prepared.UnrecordedCall, "start", start)
    return seen


def test_functions_on_the_stack_at_the_launch(stacks):
    for _ in range(2):
        gla.chunk_gla(*inputs(), backend="triton_fused")
    assert stacks[-1] == ["start", "run", "run", "chunk_gla"]


def test_functions_on_the_stack_at_the_launch_of_a_call_with_gradient(stacks):
    for _ in range(2):
        gla.chunk_gla(*inputs(requires_grad=True), backend="triton_fused")
    assert stacks[-1] == ["start", "run", "run", "forward", "call", "chunk_gla"]


def test_functions_on_the_stack_at_the_launch_of_a_backward(stacks):
    for _ in range(2):
        o, _ = gla.chunk_gla(*inputs(requires_grad=True), backend="triton_fused")
        o.backward(torch.empty_like(o))
    assert stacks[-1] == ["start", "run", "run", "compute", "backward_of_all"]


# ---- functions that a repeated call enters


@pytest.fixture
def replays(monkeypatch):
    """Makes calls on tensors of a CPU record launches of a fake device, and replay them."""
    gpu = fake_driver.install(monkeypatch)

    def start(launches):
        for each in launches:
            types = ["tensordesc<bf16[1,1,8,8]>" if hasattr(x, "base") else "" for x in each.arguments.values()]
            each.compiled = fake_driver.compiled(gpu, *types)

    monkeypatch.setattr(prepared, "start", start)
    return gpu


def test_functions_that_a_repeated_pair_enters(replays):
    """Their number does not depend on the version of Python or PyTorch.

    Functions of replay.py do not count, because more of them are entered for addresses that are new.
    """
    q, k, v, g, do = torch.zeros(5, 1, 64, 2, 64, dtype=torch.bfloat16).unbind()
    q.requires_grad_()
    entered: list[str] = []

    def note(frame, event, _):
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if event == "call" and is_own(frame) and module != replay.__name__ and not name.startswith("<"):
            entered.append(name)

    earlier = sys.getprofile()
    for _ in range(4):  # the first ones plan, record, and remember the plan
        entered.clear()
        replays.launched.clear()
        sys.setprofile(note)
        try:
            gla.chunk_gla(q, k, v, g, checkpoint_every=64, backend="triton_fused").o.backward(do)
        finally:
            sys.setprofile(earlier)
    assert len(replays.launched) == 3
    assert len(entered) <= 20, entered


# ---- doors


def test_the_doors_of_a_first_forward():
    inputs_without_values = inputs()
    registry.installed()
    doors = doors_of(lambda: gla.chunk_gla(*inputs_without_values, backend="triton_fused"))
    assert doors == {
        # the backend
        ("gla_triton_kernels", "refusal"),
        ("gla_triton_kernels.gla.forward", "prepare"),
        ("gla_triton_kernels.gla.forward", "prepare.run"),
        # the kernel, as a value
        ("gla_triton_kernels.gla.sm90.kernels", "_forward_refusal"),
        ("gla_triton_kernels.gla.sm90.kernels", "_forward"),
        ("gla_triton_kernels.gla.sm90.kernels", "_load_forward"),
    }


def doors_of(call) -> set[tuple[str, str]]:
    """Returns module and name of each function that a call enters by a door.

    Lambdas do not count: one reads them where the value is made. Nor does a function that a function behind a door
    returns to be called at once.
    """
    doors = set()

    def note(frame, event, _):
        caller = frame.f_back
        if event == "call" and is_own(frame) and is_own(caller) and not frame.f_code.co_name.startswith("<"):
            node = node_of(caller)
            if node is not None and not isinstance(node.func, ast.Call) and not leads_to(node.func, caller, frame):
                doors.add((frame.f_globals["__name__"], frame.f_code.co_qualname.replace(".<locals>", "")))

    earlier = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(earlier)
    return doors


def leads_to(function: ast.expr, caller: FrameType, frame: FrameType) -> bool:
    """Returns whether an editor finds the function of a frame by the expression with which its caller calls it."""
    code = frame.f_code
    if isinstance(function, ast.Name):
        return function.id in static_names(caller) or not is_local(function.id, caller)
    if not isinstance(function, ast.Attribute):
        return False
    owners = [caller.f_globals.get(ast.unparse(function.value))]  # a module, or a class
    if code.co_argcount:
        first = frame.f_locals[code.co_varnames[0]]
        owners += [first, type(first)]
    return any(code_of(inspect.getattr_static(owner, function.attr, None)) is code for owner in owners)


def code_of(x: object) -> CodeType | None:
    for name in ("__wrapped__", "__func__", "func"):
        x = getattr(x, name, x)
    return getattr(x, "__code__", None)


def is_local(name: str, frame: FrameType) -> bool:
    return frame.f_locals is not frame.f_globals and name in frame.f_locals


def static_names(frame: FrameType) -> set[str]:
    """Returns the names that imports and definitions bind in the function of a frame and in those around it."""
    line = frame.f_lineno
    return {
        name
        for function in ast.walk(tree_of(frame.f_code.co_filename))
        if isinstance(function, ast.FunctionDef) and function.lineno <= line <= (function.end_lineno or line)
        for statement in ast.walk(function)
        for name in bound_by(statement)
    }


def bound_by(statement: ast.AST) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)


def node_of(frame: FrameType) -> ast.Call | None:
    """Returns the call that a frame is making."""
    position = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return calls_of(frame.f_code.co_filename).get(position)


@functools.cache
def calls_of(file: str) -> dict[tuple, ast.Call]:
    calls = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
    return {(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset): node for node in calls}


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))
