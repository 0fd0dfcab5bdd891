"""Fixtures for the tests of the Triton backends."""

import pytest
import torch


@pytest.fixture(params=["triton_fused", "parallel_scan"])
def backend(request):
    """The name of a backend of Triton kernels."""
    return request.param


@pytest.fixture
def random_cases(request):
    """The number of random cases without a GPU; None, which means few, unless `--random-cases` says how many."""
    return request.config.getoption("random_cases")


@pytest.fixture
def needs_sm90():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def poisoned():
    """Makes PyTorch fill new tensors with NaN, so that elements which a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
