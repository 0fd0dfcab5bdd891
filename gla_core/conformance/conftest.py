"""The pytest side of the kit: its cases, its fixtures, and its report."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gla_core as gla
from gla_core.conformance.cases import Case, cases, refusals, short
from gla_core.conformance.divergence import divergence
from gla_core.conformance.subject import subject
from gla_core.conformance.tolerances import number, relative_error
from gla_core.dispatch.backend import Backend
from gla_core.ops import ABSTRACT_OPS

Measure = Callable[..., None]
KEPT = 2**30
"""Bytes of a device's memory that PyTorch may keep for later cases; other processes of a run may need the rest."""
EXAMINED = 2**20
"""Largest number of elements of a wrong result that is examined element by element.

For larger results, start with smaller cases.
"""

_backend = pytest.StashKey[Backend]()
_device = pytest.StashKey[str]()
_precision = pytest.StashKey[str]()
_HERE = Path(__file__).parent
_ELEMENTARY = (torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt, torch.sin, torch.cos, torch.tanh, torch.erf)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "over(op, *workloads, **conditions): the cases that a test runs on")
    prepare_threads()
    config.stash[_backend], config.stash[_device] = subject(config)
    config.stash[_precision] = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")


def prepare_threads() -> None:
    """Makes results on a CPU independent of the threads of PyTorch.

    If several threads make the first call of an elementary function, one of them may compute it in low precision, with
    errors of 1e-4. So one thread calls each of them first. Source: https://github.com/pytorch/pytorch/issues/188792.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # else each worker starts a thread a core, and the oracle takes many times as long
    for dtype, function in itertools.product((torch.float32, torch.float64), _ELEMENTARY):
        function(torch.ones(1, dtype=dtype, device="cpu"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _precision in config.stash:
        torch.set_float32_matmul_precision(config.stash[_precision])


# ---- cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    backend, device = metafunc.config.stash[_backend], metafunc.config.stash[_device]
    if "declared_op" in metafunc.fixturenames:
        here = [op for op in backend.ops if (devices := backend.can(op).devices) is None or device in devices]
        metafunc.parametrize("declared_op", here)
    if "case" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("over")
    if marker is None:
        chosen = refusals(backend, device)
        ids = [f"{case}-{number}" for number, case in enumerate(chosen)]
    else:
        ops, *names = marker.args
        chosen = [case for op in ops for case in cases(backend, device, op, *names, **marker.kwargs)]
        ids = list(map(str, chosen))
    metafunc.parametrize("case", chosen, ids=ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops tests without a case, which pytest would report as skipped, and puts the kit into the order of a report."""
    items[:] = [item for item in items if not _is_of_the_kit(item) or "NOTSET" not in item.name]
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, bool]:
    """Returns a key that sorts the kit's cases by op, those of values first, and keeps the order of all else."""
    if not _is_of_the_kit(item) or not isinstance(item, pytest.Function):
        return -1, False
    parameters: dict[str, Any] = dict(item.callspec.params)
    op = parameters["case"].op if "case" in parameters else parameters["declared_op"]
    return list(ABSTRACT_OPS).index(op), item.path.name != "test_values.py"


def _is_of_the_kit(item: pytest.Item) -> bool:
    return item.path.parent == _HERE


# ---- fixtures


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Backend:
    return pytestconfig.stash[_backend]


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return pytestconfig.stash[_device]


@pytest.fixture
def measure(record_property: Callable[[str, object], None], request: pytest.FixtureRequest) -> Measure:
    """Returns a function that compares tensors with expected ones, records each error, and fails above the budget."""
    case = request.node.callspec.params.get("case")

    def measure(out: dict[str, Tensor], expected: dict[str, Tensor], budget: float) -> None:
        over = []
        for name, ref in expected.items():
            error = relative_error(out[name], ref)
            record_property("error", {"quantity": name, "error": error, "budget": budget})
            if not error <= budget:
                over.append(f"{name}: {_complaint(out[name], ref, error, budget)}")
                if ref.numel() <= EXAMINED:
                    record_property("wrong", divergence(name, out[name], ref, budget, case))
        assert not over, "; ".join(over)

    return measure


def _complaint(out: Tensor, ref: Tensor, error: float, budget: float) -> str:
    if math.isfinite(error):
        return f"relative error {number(error)}, allowed {number(budget)}"
    if (ref.isfinite() & ~out.isfinite()).any():
        return "NaN or infinity where a number is expected"
    return "a number where NaN or infinity is expected"


@pytest.fixture
def layout() -> Callable[..., None]:
    """Returns a function that checks the shape, dtype, device and contiguity of results, and that each owns its memory.

    Call it last, because it changes the results.
    """

    def layout(
        out: dict[str, Tensor],
        like: dict[str, tuple[tuple[int, ...], torch.dtype]],
        device: str,
        inputs: dict[str, Tensor],
    ) -> None:
        memory = {y.untyped_storage().data_ptr(): f"the input {name}" for name, y in inputs.items() if y.numel()}
        for name, (shape, dtype) in like.items():
            x = out[name]
            got, wanted = (tuple(x.shape), short(x.dtype), x.device.type), (tuple(shape), short(dtype), device)
            assert got == wanted, f"{name} has shape, dtype and device {got}; expected {wanted}"
            assert x.is_contiguous(), f"{name} has strides {x.stride()}; expected a contiguous tensor"
            is_view = x._is_view()
            assert not is_view, f"{name} is a view of another tensor; expected a tensor of its own"
            if x.numel():
                owner = memory.setdefault(x.untyped_storage().data_ptr(), name)
                assert owner == name, f"{name} shares memory with {owner}"
            x.mul_(2)

    return layout


# ---- outcomes and the report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Marks a case as open, neither passed nor failed, if `supports` refuses it."""
    try:
        return (yield)
    except gla.NoBackendError as refusal:
        pytest.skip(f"not supported: {str(refusal).splitlines()[-1].strip()}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Frees memory that a large case has left, for the other processes of a parallel run."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    report = yield
    shown = call.when == "call" or report.failed
    if shown and _is_of_the_kit(item) and isinstance(item, pytest.Function):
        report.user_properties.append(("case", _about(item)))
    return report


def _about(item: pytest.Function) -> dict[str, Any]:
    parameters = item.callspec.params
    case = parameters.get("case")
    about = {"test": f"{item.path.name}::{item.originalname}", "id": item.name}
    if not isinstance(case, Case):
        nothing = {"workload": None, "dtype": None, "size": 0, "facts": []}
        return {**about, "op": parameters.get("declared_op"), **nothing}
    others = {name: x for name, x in parameters.items() if x is not case}
    facts = [*case.facts(), *(f"with {name}={getattr(x, '__name__', x)}" for name, x in others.items())]
    size = math.prod(case.describe().dims.values())
    named = {"op": case.op, "workload": case.workload.name, "dtype": short(case.dtype)}
    return {**about, **named, "size": size, "facts": facts}
