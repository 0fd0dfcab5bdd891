"""benchmarks/serving.py: batches, and the calls of other engines, whose functions are recurrences here."""

from types import SimpleNamespace

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.tolerances import relative_error


@pytest.fixture
def serving(script, monkeypatch):
    loaded = script("serving")
    monkeypatch.setattr(loaded, "H", 2)
    return loaded


def lightning_attention(q, k, v, slopes, block, state):
    """Takes q, k, v [1, H, T, 128] and the state [1, H, K, V]; returns outputs, and states of which the last counts."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, after = oracle.chunk_gla(q, k, v, -slopes, 1.0, state)
    return o.transpose(1, 2).to(v.dtype), after.float()[:, :, None]


def linear_decode_forward_triton(q, k, v, pool, slopes, slots, block):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [N, 1, H, 128]
    o, after = oracle.chunk_gla(q, k, v, -slopes.flatten(), 1.0, pool[slots])
    pool[slots] = after.float()
    return o[:, 0].flatten(1).to(v.dtype)


def test_a_mixed_batch_of_vllm_is_ours(serving):
    torch.manual_seed(0)
    x = serving.batch(torch.device("cpu"), 3, 2, 70)
    assert x.cu_seqlens.tolist() == [0, 1, 2, 3, 73, 143]
    other = x._replace(pool=x.pool.clone())
    functions = SimpleNamespace(
        lightning_attention=lightning_attention, linear_decode_forward_triton=linear_decode_forward_triton
    )
    o, theirs = serving.Ours().mixed(x)[0].flatten(1), serving.Vllm(functions).mixed(other)
    assert relative_error(o * 128**0.5, theirs) < 1e-2  # vLLM's functions take q that is scaled
    assert relative_error(x.pool, other.pool) < 1e-5


def test_verification_counts_the_state_that_is_read_once(serving):
    x = serving.batch(torch.device("cpu"), 4 * serving.DRAFTS)
    assert serving.Ours().verify(x).shape == (4, serving.DRAFTS, 2, 128)
    state, token = 2 * 128 * 128 * 4, 2 * 128 * 2
    assert serving.floor_bytes("verify", x) == 16 * (4 * token + state) + 4 * state
    assert serving.floor_bytes("decode", x) == 16 * (4 * token + 2 * state)
    y = serving.drafts(torch.device("cpu"), 4)
    y = y._replace(q=x.q, k=x.k, v=x.v)  # from states of 0, and rings of 0
    torch.testing.assert_close(serving.Ours().replay(y), serving.Ours().verify(x._replace(pool=0 * x.pool)))
    assert serving.floor_bytes("replay", y) == 16 * 4 * token + 8 * state


def test_every_batch_is_measured_beside_the_engines_that_have_it(serving, monkeypatch, tmp_path):
    functions = SimpleNamespace(
        lightning_attention=lightning_attention, linear_decode_forward_triton=linear_decode_forward_triton
    )
    monkeypatch.setattr(serving, "others", lambda folder: {"vllm": serving.Vllm(functions)} if folder else {})
    monkeypatch.setattr(serving, "DECODES", (2,))
    monkeypatch.setattr(serving, "PREFILLS", ((1, 5),))
    monkeypatch.setattr(serving, "MIXED", ())
    jobs = serving.jobs(torch.device("cpu"), 4e9, tmp_path)
    assert [job.rows for job in jobs] == [
        [("decode: 2 sequences", "vllm", None), ("decode: 2 sequences", "gla-core", "vllm")],
        [("verify: 2 sequences", "gla-core", None)],
        [("replay: 2 sequences", "gla-core", None)],
        [("prefill: 1 sequence, 5 tokens", "vllm", None), ("prefill: 1 sequence, 5 tokens", "gla-core", "vllm")],
    ]
    monkeypatch.setattr(serving, "measured", lambda what, make, run, device: serving.measure.Timing(1e-3, 1, 0.0))
    assert [row["seconds"] for row in jobs[0].measure()] == [1e-3] * 2
