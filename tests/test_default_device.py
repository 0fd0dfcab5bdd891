"""Another default device of PyTorch changes nothing: memory that the library makes for itself has a device by name."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

import gla_core as gla
from gla_core.ops import PUBLIC_OPS
from gla_core.workloads.inputs import arguments
from gla_core.workloads.named import select

ROOT = Path(__file__).parents[1]
FOLDERS = ("gla_core", "gla_tools", "backends", *(str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/src")))
FACTORIES = {factory.__name__ for factory in _device_constructors()}
"""The functions of torch that make tensors on the default device."""


def without_a_device(source):
    """Yields the line of every call of a factory without `device`, unless it makes a parameter, as `nn.Linear` does."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    parameters = {id(call.args[0]) for call in calls if ast.unparse(call.func) == "nn.Parameter"}
    for call in calls:
        module, _, name = ast.unparse(call.func).rpartition(".")
        is_given = any(keyword.arg in ("device", None) for keyword in call.keywords)
        if module == "torch" and name in FACTORIES and not is_given and id(call) not in parameters:
            yield call.lineno


def test_every_factory_is_given_a_device():
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    lines = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in without_a_device(path.read_text("utf-8"))]
    assert lines == [], "PyTorch's default device may be another one than that of the arguments"


def test_a_factory_without_a_device_would_be_found():
    source = "\n".join(
        [
            "torch.empty(2, device=x.device)",
            "torch.empty(2)",
            "x.new_empty(2)",
            "torch.arange(torch.ones(3).numel(), **where)",
            "nn.Parameter(torch.zeros(2))",
            "nn.Parameter(2 * torch.zeros(2))",
        ]
    )
    assert sorted(without_a_device(source)) == [2, 4, 6]


REQUESTS = ("reference", "parallel_scan,reference", "batch_invariant=64")


def equal_on_any_default_device(call, *args):
    """Calls a function for two default devices, and compares the tensors among all that it returns."""
    outcomes = []
    for device in (torch.device("cpu"), torch.device("meta")):
        outcomes.append([x for x in tree_leaves(call(device, *args)) if isinstance(x, torch.Tensor)])
    torch.testing.assert_close(*outcomes, rtol=0, atol=0, equal_nan=True)


def with_each_request(op):
    """Yields an op with each request; lowered ops of delta rules are quick with the first one alone."""
    is_alike = "delta" in op and PUBLIC_OPS[op].lowering is not None
    for requested in REQUESTS:
        marks = pytest.mark.thorough if is_alike and requested != REQUESTS[0] else ()
        yield pytest.param(op, requested, marks=marks, id=f"{op}-{requested}")


@pytest.mark.parametrize(("op", "requested"), [each for op in PUBLIC_OPS for each in with_each_request(op)])
def test_ops(op, requested):
    def run(device, workload):
        x = arguments(workload)
        with device, gla.use_backend(requested), contextlib.suppress(NotImplementedError):  # under batch_invariant
            return getattr(gla, op)(**x), x

    for workload in select(op, ["ci"]):
        equal_on_any_default_device(run, workload)


@pytest.mark.parametrize(
    "requested", [REQUESTS[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in REQUESTS[1:])]
)
@pytest.mark.parametrize("name", sorted(set(gla.nn.__all__) - {"GLAState"}))
def test_layers(name, requested):
    options = {"headdim": 8, "d_state": 4} if name == "Mamba2" else {"use_short_conv": True, "num_heads": 2}
    layer, x = getattr(gla.nn, name)(16, **options, backend=requested), torch.randn(1, 9, 16)

    def run(device, masks):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with device:
            y, state = layer(leaf, output_final_state=True, **masks)
            y.square().sum().backward()
            after = layer.step(x[0, : len(state.recurrent)], state)
        return y, state, after, leaf.grad, [parameter.grad for parameter in layer.parameters()]

    for masks in ({}, {"attention_mask": torch.ones(1, 9)}, {"cu_seqlens": torch.tensor([0, 3, 3, 9])}):
        equal_on_any_default_device(run, masks)
