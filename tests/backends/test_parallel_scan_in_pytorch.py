"""parallel_scan in PyTorch, on a CPU, against the float64 oracle: steps and softmaxes, in blocks."""

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import heads_first
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import gla_inputs, normal
from gla_parallel_scan.pytorch.online_softmax import online_softmax
from gla_parallel_scan.pytorch.softmax_attention import softmax_attention
from gla_parallel_scan.pytorch.step import step as recurrent_gla_step

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes blocks small: a few keys or columns at a time."""
    monkeypatch.setattr("gla_parallel_scan.pytorch.online_softmax.SPLIT", 7)
    monkeypatch.setattr("gla_parallel_scan.pytorch.online_softmax.BLOCK", 64)
    for name, size in (("BLOCK", 64), ("QUERIES", 5), ("SPLIT", 8)):
        monkeypatch.setattr(f"gla_parallel_scan.pytorch.softmax_attention.{name}", size)


# ---- chunk_gla


def test_chunks_need_a_gpu():
    x = gla_inputs(B=1, T=2)
    with pytest.raises(gla.NoBackendError, match="parallel_scan: needs a cuda device; q is on cpu"):
        gla.chunk_gla(x.q, x.k, x.v, x.g, backend="parallel_scan")
    assert gla.explain("chunk_gla_fwd", x.q, x.k, x.v, x.g).winner == "reference"


# ---- recurrent_gla_step


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
def test_steps_in_a_pool(inplace, gates):
    """Rows that are skipped give 0 and write nothing. Rows of the pool that no index selects stay, including NaN."""
    x = gla_inputs(B=4, T=1, H=2, G=2, gates=gates)
    q, k, v, g = (None if y is None else y[:, 0] for y in (x.q, x.k, x.v, x.g))
    pool = torch.randn(6, 2, 16, 16)
    pool[3] = torch.nan
    before, gate = pool.clone(), None if g is None else g.clone()
    o, state = recurrent_gla_step(q, k, v, g, pool, 0.3, torch.tensor([5, -1, 0, 6]), None, None, inplace)
    assert (state is pool) == inplace
    assert torch.equal(before[[1, 2, 4]], state[[1, 2, 4]])
    assert inplace or torch.equal(before.nan_to_num(), pool.nan_to_num())
    assert bool(state[3].isnan().all())
    assert g is None or torch.equal(g, gate)
    assert torch.equal(o[[1, 3]], torch.zeros_like(o[[1, 3]]))
    alpha = torch.ones_like(k) if g is None else g.exp()
    ref = oracle.recurrent_gla_step(*(x[[0, 2]].double() for x in (q, k, v, alpha)), before[[5, 0]].double(), 0.3)
    torch.testing.assert_close(o[[0, 2]].double(), ref[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[[5, 0]].double(), ref[1], rtol=1e-5, atol=1e-5)


def test_nobody_steps():
    x = gla_inputs(B=0, T=1, initial_state=True)
    o, new = recurrent_gla_step(
        x.q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0], x.initial_state, 0.3, None, None, None, False
    )
    assert (o.shape, new.shape) == (x.v[:, 0].shape, x.initial_state.shape)
    none, x = torch.empty(0, 2, 16, 16), gla_inputs(B=1, T=1)
    row = [y[:, 0] for y in (x.q, x.k, x.v, x.g)]
    o, new = recurrent_gla_step(*row, none, 0.3, torch.tensor([0]), None, None, True)
    assert new is none
    assert torch.equal(o, torch.zeros_like(o))


# ---- softmaxes


def draw(dtype, *shape, seed=0):
    return normal(shape, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 6, 7, 8, 50, 64, 100])
def test_softmax(columns, dtype, small_blocks):
    x = draw(dtype, 3, columns, 4)
    for dim, y in ((1, x), (2, x.transpose(1, 2)), (0, x.transpose(0, 1))):
        actual = online_softmax(y, dim)
        assert relative_error(actual, oracle.softmax(y, dim)) <= FORWARD[dtype]
        assert actual.is_contiguous()


def test_softmax_of_minus_infinities(small_blocks):
    x = draw(torch.float32, 4, 40)
    x[0], x[1, :30], x[2, 9:], x[3] = -torch.inf, -torch.inf, -torch.inf, x[3] - 500
    assert relative_error(online_softmax(x, 1), oracle.softmax(x, 1)) <= FORWARD[torch.float32]
    assert online_softmax(x[:, :0], 1).shape == (4, 0)


def check_attention(q, k, v, causal, scale=0.3):
    arguments = (q, k, v, scale, causal)
    for x, ref in zip(softmax_attention(*arguments), oracle.softmax_attention(*arguments), strict=True):
        assert relative_error(x, ref) <= FORWARD[q.dtype]
        assert x.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Tq", "Tk"), [(1, 1), (1, 40), (5, 8), (6, 9), (30, 30), (13, 41), (41, 13)])
def test_attention(Tq, Tk, causal, dtype, small_blocks):
    x = draw(dtype, 2, Tq, 6, 16), draw(dtype, 2, Tk, 2, 16, seed=1), draw(dtype, 2, Tk, 2, 8, seed=2)
    check_attention(*x, causal)
    check_attention(*map(heads_first, x), causal)


@pytest.mark.parametrize("Tk", [0, 3])
def test_queries_without_keys(Tk, small_blocks):
    q, k, v = draw(torch.float32, 1, 12, 2, 16), *(draw(torch.float32, 1, Tk, 2, 16, seed=i) for i in (1, 2))
    o, lse = softmax_attention(q, k, v, 0.3, True)
    assert bool(o[:, : 12 - Tk].isnan().all())
    assert bool(lse[:, : 12 - Tk].isneginf().all())
    if Tk:
        check_attention(q, k, v, True)


def test_keys_of_minus_infinity(small_blocks):
    q, k, v = (draw(torch.float32, 1, 20, 2, 16, seed=i) for i in range(3))
    q, k[:, 3:15, :, 0] = q.abs(), -torch.inf
    check_attention(q, k, v, False)
    check_attention(q, k[:, 3:15], v[:, 3:15], False)


@pytest.mark.parametrize(("B", "Tq"), [(0, 5), (1, 0)])
def test_no_queries(B, Tq):
    q, k = torch.ones(B, Tq, 2, 4), torch.ones(B, 5, 2, 4)
    o, lse = softmax_attention(q, k, k, 0.3, True)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])
