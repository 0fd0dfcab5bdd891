"""Launches name the arguments of their kernels, compiled and interpreted."""

import importlib
import os

import pytest
import torch

pytest.importorskip("triton")

from gla_triton_kernels.chunks.segments import state_strides
from gla_triton_runtime.launch import Launch, strides_of

interpreted = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["chunks.partials._sum_kernel", "gla.sm90.state_gradients._state_kernel"])
def kernel(request):
    """A kernel in Triton, and one in Gluon, which has no interpreter."""
    module, name = request.param.rsplit(".", 1)
    if interpreted and module.startswith("sm90"):
        pytest.skip("Gluon has no interpreter")
    return getattr(importlib.import_module(f"gla_triton_kernels.{module}"), name)


def test_arguments_are_kept_in_the_order_of_the_parameters(kernel):
    arguments = {name: i for i, name in enumerate(kernel.arg_names)}
    backwards = dict(reversed(arguments.items()))
    assert list(Launch(kernel, (1, 1, 1), backwards).arguments.items()) == list(arguments.items())


@pytest.mark.parametrize("named", ["missing", "unknown", "misspelt"])
def test_arguments_that_are_no_parameters_of_the_kernel_are_named(kernel, named):
    arguments, name = dict.fromkeys(kernel.arg_names), kernel.arg_names[1]
    said = []
    if named != "unknown":
        del arguments[name]
        said.append(f"missing: {name}")
    if named != "missing":
        arguments[f"{name}s"] = None
        said.append(f"unknown: {name}s")
    with pytest.raises(TypeError) as raised:
        Launch(kernel, (1, 1, 1), arguments)
    expected = f"arguments of {kernel.fn.__name__} do not match its parameters ({'; '.join(said)})"
    assert str(raised.value) == expected


def test_strides_of_tokens():
    x = torch.empty(2, 5, 4, 8)
    assert strides_of("q", x) == {"stride_qb": 160, "stride_qt": 32, "stride_qh": 8}
    assert strides_of("g", None) == {"stride_gb": 0, "stride_gt": 0, "stride_gh": 0}


def test_strides_of_states():
    """The dimension that is contiguous has the stride None."""
    x = torch.empty(3, 2, 8, 4)
    assert state_strides("state_", x) == {"state_n": 64, "state_h": 32, "state_k": 4, "state_v": None}
    assert state_strides("s_", x.mT.contiguous().mT) == {"s_n": 64, "s_h": 32, "s_k": None, "s_v": 8}
    assert state_strides("s_", None) == {"s_n": 0, "s_h": 0, "s_k": 0, "s_v": None}
