from __future__ import annotations

import hypothesis
import pytest

hypothesis.settings.register_profile("gla", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("gla")


@pytest.fixture
def fresh_graphs():
    """Inductor writes its code anew: graphs that it keeps on the disk are wrong on a processor of another kind.

    Code for AVX-512 that is compiled for AVX2 reads memory that nobody has written, of a cache in a folder that two
    machines share, or with another ATEN_CPU_CAPABILITY. What was compiled of the same code is still taken.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
