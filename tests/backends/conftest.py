"""What tests of the Triton backends share."""

from __future__ import annotations

import pytest
import torch

from gla_core.ops import ABSTRACT_OPS


@pytest.fixture(params=["triton_fused", "parallel_scan"])
def backend(request):
    """The name of a backend of Triton kernels."""
    return request.param


@pytest.fixture
def needs_sm90():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def poisoned():
    """New tensors are filled with NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def prepared():
    """Returns a function that prepares a call: `prepared("chunk_gla_fwd", prepare, *arguments)`.

    It takes the name of an abstract op, a function that prepares calls of it, and the arguments of the op that are not
    hints, and returns what the function makes of the call.
    """

    def prepared(op, prepare, *arguments):
        spec = ABSTRACT_OPS[op]
        return prepare(spec.describe(*spec.complete(arguments, {})))

    return prepared


@pytest.fixture
def compute(prepared):
    """Returns a function that computes an abstract op: `compute("chunk_gla_fwd", prepare, *arguments)`; see above."""
    return lambda op, prepare, *arguments: prepared(op, prepare, *arguments)(*arguments)
