"""The lines of the logger gla_core about the backends of calls."""

import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend, Prepared


def test_a_line_for_each_new_signature(logged):
    q, g, state = torch.randn(1, 7, 2, 8), -torch.rand(1, 7, 2), torch.zeros(1, 2, 8, 8)
    token = torch.randn(1, 2, 8)
    gla.reload_environment()  # forgets the signatures of other tests
    for _ in range(3):
        gla.chunk_gla(q, q, q, g, backend="reference")
    size = "H=2 Hq=2 Hv=2 K=8 V=8"
    assert logged == [f"chunk_gla_fwd  B=1 T=7 {size} N=1  float32 on cpu, gates per head: reference"]
    for _ in range(3):
        gla.recurrent_gla_step(token, token, token, None, state, backend="reference")
    assert logged[1:] == [f"recurrent_gla_step  B=1 {size} P=1  float32 on cpu: reference"]


def test_kernels_of_a_backend_are_named(logged, fresh_registry):
    op = Prepared(lambda call: torch.softmax, ("x", "dim"), kernels=lambda call: [f"rows: {call.dims['rows']}", "one"])
    with gla.register(Backend("mine", "1.0", {"online_softmax": op})):
        gla.online_softmax(torch.randn(3, 5), backend="mine")
    assert logged == ["online_softmax  rows=3 columns=5  float32 on cpu: mine; rows: 3; one"]
