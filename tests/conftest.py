"""Shared fixtures. Tests marked `gpu` run where there is a CUDA device and are deselected elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():  # Triton's kernels then run on the CPU; to be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import gla_core as gla

# A kernel is interpreted or compiled for good when its module is imported, and some tests change the variable.
if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    for op in ("chunk_gla", "online_softmax", "softmax_attention"):
        importlib.import_module(f"gla_triton_fused.{op}")
        importlib.import_module(f"gla_parallel_scan.{op}")
    importlib.import_module("gla_triton_shared.recurrent_gla_step")


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_registry(monkeypatch, tmp_path):
    """No GLA_* variable is set, nothing was calibrated, and whatever the test changes is forgotten after it."""
    for name in [name for name in os.environ if name.startswith("GLA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLA_CACHE_DIR", str(tmp_path / "no_calibration"))
    gla.reload_environment()
    yield
    monkeypatch.undo()
    gla.reload_environment()


@pytest.fixture(scope="session")
def own_backends():
    """The names of the backends that gla-core carries, in the order in which they are discovered."""
    return ["parallel_scan", "reference", "triton_fused"]


@pytest.fixture
def only_reference(fresh_registry, monkeypatch, own_backends):
    """Of our own backends the reference alone is there, so that a test can name all that may run."""
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", ",".join(name for name in own_backends if name != "reference"))
    gla.reload_environment()


@pytest.fixture
def plain_terminal(monkeypatch):
    """A wide terminal without colours."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "250")


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


@pytest.fixture
def short_segments(monkeypatch):
    """parallel_scan cuts sequences of a hundred tokens too, on a GPU."""
    pytest.importorskip("triton")
    cut = importlib.import_module("gla_parallel_scan.chunk_gla")
    usual = cut._length
    monkeypatch.setattr(cut, "_length", lambda *call: min(128, usual(*call)))
