"""Implementations of an op that compute some calls themselves, and all others by another op."""

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import call_arguments
from gla_core.conformance.cases import cases
from gla_core.dispatch.backend import Backend, Prepared
from gla_core.dispatch.lowering import lowered
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS

OP = "chunk_ssd_fwd"
MARK = 7.0


def direct(call):
    """Prepares a function whose outputs show who computed them."""

    def run(*args):
        x = dict(zip(ABSTRACT_OPS[OP].contract, args, strict=True))
        return torch.full_like(x["x"], MARK), None, None

    return run


def refusal(call):
    return "has one kernel, for 17 tokens" if call.dims["T"] != 17 else None


@pytest.fixture
def backend():
    reference = get("reference")
    part = reference.ops["chunk_gla_fwd"]
    op = lowered(OP, part, Prepared(direct, ABSTRACT_OPS[OP].contract, lambda call: ["kernel one"]), refusal)
    made = Backend("own", "0", {"chunk_gla_fwd": part, OP: op}, reference.capabilities, cost=lambda call: 3.0)
    with gla.register(made):
        yield made


def arguments(name):
    (case,) = (c for c in cases(get("reference"), "cpu", OP, name, dtypes="one"))
    return call_arguments(case) | {"output_final_state": False}


def test_a_call_is_computed_directly_or_by_the_part(backend):
    x, y = arguments("short"), arguments("last_chunk_partial")
    assert (gla.chunk_ssd(**x, backend="own").o == MARK).all()
    for _ in range(2):
        assert torch.equal(gla.chunk_ssd(**y, backend="own").o, gla.chunk_ssd(**y, backend="reference").o)


def test_it_says_who_computes_and_predicts_the_time_of_the_part(backend):
    explained = [gla.explain(OP, **arguments(name), backend="own").candidates[0] for name in ("short", "odd_widths")]
    assert [candidate.kernels for candidate in explained] == [
        ("kernel one",),
        ("by chunk_gla_fwd: has one kernel, for 17 tokens",),
    ]
    assert [candidate.seconds for candidate in explained] == [3.0, 3.0]
