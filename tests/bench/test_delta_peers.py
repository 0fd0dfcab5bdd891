"""benchmarks/delta_peers.py: inputs, and calls of ours and of peers, whose functions are recurrences here."""

import os
import sys
from types import ModuleType

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.tolerances import relative_error

CPU = torch.device("cpu")


@pytest.fixture
def peers(script, monkeypatch):
    loaded = script("delta_peers")
    for name in ("FLA_FLASH_QLA", "FLA_TILELANG"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(loaded.measure, "time_calls", lambda *_: loaded.measure.Timing(1e-3, 1, 0.0))
    return loaded


def delta(q, k, v, g, beta, offsets=None):
    return oracle.chunk_delta(q, k, v, g, beta, cu_seqlens=offsets)[0].to(v.dtype)


def install(monkeypatch, **functions):
    """Puts modules of functions in the place of packages; a name is written with __ for dots."""
    for name, function in functions.items():
        module, _, attribute = name.replace("__", ".").rpartition(".")
        if module not in sys.modules or not isinstance(sys.modules[module], ModuleType):
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.setattr(sys.modules[module], attribute, function, raising=False)


def test_every_peer_is_measured_with_its_error(peers, monkeypatch):
    def flat(q, k, v, g, beta, offsets, **_):
        return delta(*(x[None] for x in (q, k, v, g, beta)), offsets)[0], None

    def rows(q, k, v, g, beta, cu_seqlens, **_):
        assert os.environ["FLA_FLASH_QLA"] == "0"
        return delta(q, k, v, g, beta, cu_seqlens), None

    for module in ("attn_gym", "cudnn", "flashinfer", "flash_qla", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    install(
        monkeypatch,
        fla__ops__gated_delta_rule__chunk_gated_delta_rule=rows,
        attn_gym__linear__chunk_gdn=rows,
        cudnn__linear_attention__gated_delta_net=flat,
        flashinfer__gdn_prefill__chunk_gated_delta_rule=lambda q, k, v, alpha, beta, cu_seqlens, **_: flat(
            q, k, v, alpha.log(), beta, cu_seqlens
        ),
        flash_qla__chunk_gated_delta_rule_fwd=lambda *x, cu_seqlens, **_: (None, None, rows(*x, cu_seqlens)[0]),
    )
    jobs = [job for job in peers.jobs(CPU, 1e10, 1e-3) if job.rows[0][0].startswith("GDN")][:6]
    assert [job.rows[0][1] for job in jobs] == ["fla", "attn_gym", "cudnn", "flashinfer", "flash_qla", "gla-core"]
    for job in jobs:
        ((_, who, base),), (row,) = job.rows, job.measure()
        assert base == (None if who == "fla" else "fla")
        assert row["facts"]["error"] < 4e-3, who
        assert row["facts"]["eager"]


def test_a_peer_that_is_not_there_has_the_reason(peers):
    jobs = peers.jobs(CPU, 1e10, 1e-3)[: len(peers.WHO["KDA"])]
    assert {job.rows[0][0] for job in jobs} == {"KDA: 2 x 40 tokens, 2 heads, -5 sigmoid"}
    by_who = {job.rows[0][1]: job.measure()[0] for job in jobs}
    assert by_who["cudnn"]["error"] == "ModuleNotFoundError: No module named 'cudnn'"
    assert by_who["gla-core"]["facts"]["error"] < 4e-3


def test_alternating_gates_lose_nothing_that_a_bound_by_keys_says_is_lost(peers):
    shape = peers.Shape(1, 64, 1, 1)
    x = peers.inputs("KDA", shape, "alternating", CPU)
    first, second = x.g[0, :8, 0], x.g[0, 8:16, 0]
    assert (first[:, :64] == 0).all()
    assert (first[:, 64:] == -5).all()
    torch.testing.assert_close(second, first.flip(1))
    assert x.g[0, :16, 0].sum(0).max() == -40  # every key forgets within 16 tokens ..
    o = delta(*x[:5])
    v = x.v.clone()
    v[:, :16] = 0
    assert relative_error(delta(x.q, x.k, v, x.g, x.beta)[:, 32:], o[:, 32:]) > 1e-2  # .. but the state does not


def test_gates_are_those_that_the_names_say(peers):
    shape = peers.Shape(1, 512, 2, 4, 3)
    x = peers.inputs("GDN", shape, "-5 sigmoid", CPU)
    assert x.g.shape == x.beta.shape == (1, 512, 4)
    assert (x.cu_seqlens[0], x.cu_seqlens[-1], len(x.cu_seqlens)) == (0, 512, 4)
    assert x.longest == x.cu_seqlens.diff().max()
    assert -5 < x.g.min() < -4 < -1 < x.g.max() < 0
    assert -2e-2 < peers.inputs("GDN", shape, "softplus", CPU).g.max() < 0
    assert torch.equal(peers.inputs("GDN", shape, "-5 sigmoid", CPU).v, x.v)
