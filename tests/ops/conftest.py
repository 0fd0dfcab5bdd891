import hypothesis
import pytest

import gla_core as gla

hypothesis.settings.register_profile("gla", derandomize=True, print_blob=True)  # as tests/conftest.py has the rest
hypothesis.settings.load_profile("gla")


@pytest.fixture
def fresh_graphs():
    """Makes Inductor generate code anew, because cached graphs are wrong on another kind of processor.

    AVX-512 code that is compiled for AVX2 reads uninitialised memory. This happens if two machines share the folder of
    the cache, or with another ATEN_CPU_CAPABILITY. Compiled binaries of the same code are still reused.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def check_values(monkeypatch):
    """Makes the ops check the values of their arguments."""
    monkeypatch.setenv("GLA_CHECK", "1")
    gla.reload_environment()
    yield
    monkeypatch.undo()
    gla.reload_environment()
