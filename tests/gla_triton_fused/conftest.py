"""Fixtures of the kernels' tests."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def where_kernels_run(device):
    """Skip where they do not: compiled they need a GPU, and interpreted nothing is learnt on one."""
    if (device == "cpu") != (os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("kernels run compiled on cuda, and with TRITON_INTERPRET=1 on cpu")


@pytest.fixture
def tf32_allowed():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)
