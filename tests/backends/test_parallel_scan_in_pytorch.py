"""parallel_scan in PyTorch, on a CPU, against the float64 oracle: its scan, its segments and blocks, every op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.conformance import oracle
from gla_core.conformance.calls import heads_first
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import GATES, gla_inputs, normal
from gla_parallel_scan.pytorch.chunk_gla import chunk_gla_fwd
from gla_parallel_scan.pytorch.online_softmax import online_softmax
from gla_parallel_scan.pytorch.recurrent_gla_step import recurrent_gla_step
from gla_parallel_scan.pytorch.scan import scan_states
from gla_parallel_scan.pytorch.segments import Segments, packed
from gla_parallel_scan.pytorch.softmax_attention import softmax_attention

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes blocks small: one head and sequence at a time, and a few keys or columns at a time."""
    monkeypatch.setattr("gla_parallel_scan.pytorch.chunk_gla.BLOCK", 1)
    monkeypatch.setattr("gla_parallel_scan.pytorch.online_softmax.SPLIT", 7)
    monkeypatch.setattr("gla_parallel_scan.pytorch.online_softmax.BLOCK", 64)
    for name, size in (("BLOCK", 64), ("QUERIES", 5), ("SPLIT", 8)):
        monkeypatch.setattr(f"gla_parallel_scan.pytorch.softmax_attention.{name}", size)


# ---- the scan


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100])
def test_scan(n):
    decay, state = torch.rand(n, 2, 3, dtype=torch.float64), torch.randn(n, 2, 3, 4, dtype=torch.float64)
    expected = state.clone()
    for i in range(1, n):
        expected[i] += decay[i, ..., None] * expected[i - 1]
    scan_states(decay.clone(), state)
    torch.testing.assert_close(state, expected)


@settings(max_examples=30, deadline=None)
@given(opens=st.lists(st.booleans(), min_size=1, max_size=70), seed=st.integers(0, 1000))
def test_scan_of_several_sequences(opens, seed):
    """Nothing crosses the start of a sequence, not even NaN."""
    generator = torch.Generator().manual_seed(seed)
    decay = torch.rand(len(opens), 2, generator=generator, dtype=torch.float64)
    state = torch.randn(len(opens), 2, 3, generator=generator, dtype=torch.float64)
    first = [i for i, new in enumerate(opens) if new or i == 0]
    state[first[::2]] = torch.nan
    decay[first] = torch.nan
    expected = state.clone()
    for i in range(len(opens)):
        if i not in first:
            expected[i] += decay[i, :, None] * expected[i - 1]
    flags = torch.tensor(opens)
    scan_states(decay, state, flags)
    torch.testing.assert_close(state, expected, equal_nan=True)
    assert flags.tolist() == opens


# ---- chunk_gla


def arguments(**sizes):
    x = gla_inputs(**sizes)
    return [x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens]


def forward(q, k, v, g=None, initial_state=None, cu_seqlens=None, scale=0.3):
    return chunk_gla_fwd(q, k, v, g, scale, initial_state, True, cu_seqlens, None)[:2]


def check(q, k, v, g=None, initial_state=None, cu_seqlens=None, scale=0.3):
    actual = forward(q, k, v, g, initial_state, cu_seqlens, scale)
    expected = oracle.chunk_gla(q, k, v, g, scale, initial_state, cu_seqlens)
    for x, ref in zip(actual, expected, strict=True):
        assert relative_error(x, ref) <= FORWARD[q.dtype]
        assert x.is_contiguous()
    assert actual[0].dtype == q.dtype
    assert actual[1].dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    return actual


FORMS = ("key", "head", "constant")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates, dtype):
    check(*arguments(T=200, gates=gates, gate_dtype=torch.promote_types(dtype, torch.float32), dtype=dtype))


@pytest.mark.parametrize("T", [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700])
def test_lengths(T):
    check(*arguments(B=1, T=T, H=1, gates="strong", initial_state=True))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 5), (1, 1, 1), (64, 0, 65), (300, 2, 129), (1,) * 70])
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
def test_packed(lengths, gates, small_blocks):
    check(*arguments(lengths=lengths, gates=gates, initial_state=True))


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("gates", ["none", "mild"])
def test_nothing_to_do(B, T, gates):
    q, k, v, g, state, _ = arguments(B=B, T=T, gates=gates, initial_state=True)
    o, final = forward(q, k, v, g, state)
    assert o.shape == v.shape
    assert torch.equal(final, state)
    assert torch.equal(forward(q, k, v, g)[1], torch.zeros_like(state))


def test_no_neighbour_in_a_pack_is_heard():
    """Infinities and NaN of a packed sequence do not reach the others."""
    q, k, v, g, state, offsets = arguments(lengths=(20, 130, 40), initial_state=True)
    ref = forward(q, k, v, g, state, offsets)
    for x in (q, k, v, g):
        x[:, 20:70], x[:, 70:150] = torch.nan, torch.inf
    state[1] = torch.nan
    o, final = forward(q, k, v, g, state, offsets)
    assert torch.equal(o[:, :20], ref[0][:, :20])
    assert torch.equal(o[:, 150:], ref[0][:, 150:])
    assert torch.equal(final[::2], ref[1][::2])


def test_infinite_gates_and_mild_ones_side_by_side():
    q, k, v, g, state, _ = arguments(T=200, K=32, initial_state=True)
    g[:, 40, :, ::3] = g[:, 63:66, :, 2::3] = -torch.inf
    g[:, 41, :, 1::3] = -300.0
    check(q, k, v, g, state)


def test_inputs_and_strides():
    """Tensors are heads-first, a slice of a wider tensor, or an expanded batch. No input is written."""
    x = arguments(T=70, G=2, K=32, V=32, initial_state=True)[:5]
    before = [y.clone() for y in x]
    ref = check(*x)
    assert all(map(torch.equal, x, before))
    q, k, v, g, state = x
    sliced = torch.nn.functional.pad(k, (3, 5))[..., 3:-5]
    wide = torch.nn.functional.pad(state, (0, 0, 1, 2))[:, :, 1:-2]
    for a, b in zip(forward(heads_first(q), sliced, heads_first(v), g, wide), ref, strict=True):
        torch.testing.assert_close(a, b)
    check(*(y[:1].expand(3, *y.shape[1:]) for y in x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [{"H": 3, "G": 2}, {"H": 2, "R": 3}], ids=str)
def test_blocks(heads, form, monkeypatch):
    """The result does not depend on the number of heads and sequences that are computed at once."""
    x = arguments(B=3, T=70, **heads, gate_form=form, initial_state=True)
    ref = check(*x)
    for most in (1, 70 * 16, 2 * 70 * 16, 4 * 70 * 16):
        monkeypatch.setattr("gla_parallel_scan.pytorch.chunk_gla.BLOCK", most)
        for a, b in zip(forward(*x), ref, strict=True):
            torch.testing.assert_close(a, b)


def test_positions_of_packed_tokens():
    """Each token has its own position, and each sequence starts a new segment."""
    lengths = torch.tensor([5, 0, 64, 65, 1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    cut = packed(64, offsets)
    x = torch.arange(1.0, 136).reshape(1, 135, 1, 1)
    rows = cut.cut(x, torch.float64)  # [n, 1, 1, 64, 1]
    assert (cut.n, cut.slots) == (5, 10)
    assert rows[:, 0, 0, 0, 0].tolist() == [1, 6, 70, 134, 135]
    assert torch.equal(rows.flatten()[rows.flatten() > 0], x.flatten().double())
    out = torch.empty_like(x)
    cut.join(rows, 2.0, out)
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("every", [64, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 0},
        {"T": 5},
        {"T": 400, "B": 2, "H": 3},
        {"lengths": ()},
        {"lengths": (0,)},
        {"lengths": (5, 0, 9), "padding": 3},
        {"lengths": (70, 0, 65, 1, 0, 330, 3), "padding": 300, "H": 2},
    ],
    ids=str,
)
def test_checkpoints(sizes, dtype, every, small_blocks):
    q, k, v, g, state, offsets = arguments(**{"G": 2, "K": 5, "V": 3, "dtype": dtype, **sizes}, initial_state=True)
    if offsets is not None:
        offsets += sizes.get("padding", 0) // 2  # rows before the first sequence as well
    *_, actual = chunk_gla_fwd(q, k, v, g, 0.3, state, False, offsets, every)
    ref = oracle.chunk_gla_checkpoints(q, k, v, g, state, offsets, every)
    assert relative_error(actual, ref) <= FORWARD[dtype]
    assert actual.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32))
    assert not actual[(ref == 0).flatten(2).all(2)].any()
    assert actual.is_contiguous()


def test_a_gate_of_a_head_is_not_expanded(monkeypatch):
    """It has one column wherever it is held, and so have the decays of segments."""
    widths = []
    cut = Segments.cut
    monkeypatch.setattr(Segments, "cut", lambda *args: widths.append(args[1].shape[-1]) or cut(*args))
    scan = Segments.scan
    monkeypatch.setattr(Segments, "scan", lambda *args: widths.append(args[1].shape[-1]) or scan(*args))
    for form, D in (("constant", 1), ("head", 1), ("key", 5)):
        widths.clear()
        check(*arguments(T=70, K=5, V=7, gate_form=form))
        assert widths == [5, 5, 7, D, D]  # q, k, v and g, and the decays


@settings(max_examples=25, deadline=None)
@given(
    K=st.integers(1, 40),
    V=st.integers(1, 40),
    groups=st.sampled_from([{"G": 1}, {"G": 3}, {"R": 2}]),
    form=st.sampled_from(FORMS),
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    is_packed=st.booleans(),
    gates=st.sampled_from(GATES),
    dtype=st.sampled_from(DTYPES),
    initial_state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_anything(K, V, groups, form, lengths, is_packed, gates, dtype, initial_state, seed):
    sizes = {"lengths": tuple(lengths)} if is_packed else {"B": len(lengths), "T": lengths[0]}
    sizes |= {"K": K, "V": V, **groups, "gates": gates, "gate_form": form, "dtype": dtype}
    check(*arguments(initial_state=initial_state, seed=seed, **sizes))


# ---- recurrent_gla_step


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
def test_steps_in_a_pool(inplace, gates):
    """Rows that are skipped give 0 and write nothing. Rows of the pool that no index selects stay, including NaN."""
    q, k, v, g, _, _ = arguments(B=4, T=1, H=2, G=2, gates=gates)
    q, k, v, g = (None if x is None else x[:, 0] for x in (q, k, v, g))
    pool = torch.randn(6, 2, 16, 16)
    pool[3] = torch.nan
    before, gate = pool.clone(), None if g is None else g.clone()
    o, state = recurrent_gla_step(q, k, v, g, pool, 0.3, torch.tensor([5, -1, 0, 6]), None, inplace)
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
    q, k, v, g, state, _ = arguments(B=0, T=1, initial_state=True)
    o, new = recurrent_gla_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state, 0.3, None, None, False)
    assert (o.shape, new.shape) == (v[:, 0].shape, state.shape)
    none = torch.empty(0, 2, 16, 16)
    row = [x[:1, 0] for x in arguments(B=1, T=1)[:4]]
    o, new = recurrent_gla_step(*row, none, 0.3, torch.tensor([0]), None, True)
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
    for x, ref in zip(
        softmax_attention(q, k, v, scale, causal), oracle.softmax_attention(q, k, v, scale, causal), strict=True
    ):
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
