"""The Triton backends agree within the budget on every workload that a GPU is benchmarked with."""

import pytest
import torch

from gla_core.bench.suite import CUDA_TAGS, bound, make_arguments
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.named import WORKLOADS

pytest.importorskip("triton")

AT_SIZE = [w for w in WORKLOADS if w.tags.intersection(CUDA_TAGS) and "ci" not in w.tags]


@pytest.mark.gpu
@pytest.mark.parametrize("workload", AT_SIZE, ids=lambda w: f"{w.op}-{w.name}")
def test_agreement(workload):
    cuda = torch.device("cuda")
    arguments = make_arguments(workload, cuda)
    first, second = (bound(workload.op, name, arguments)() for name in ("triton_fused", "parallel_scan"))
    for x, y in zip(first, second, strict=True):
        assert relative_error(x, y) <= FORWARD[workload.sizes["dtype"]]
