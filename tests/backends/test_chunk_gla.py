"""The general kernels of chunk_gla_fwd against the float64 oracle: any width, length, gate, layout and packing.

They run in one pass, and on sequences that are cut into many segments.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.conformance import oracle
from gla_core.conformance.calls import gradients, heads_first, oracle_gradients
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.workloads.inputs import GATES, gla_inputs
from gla_triton_kernels.gla import forward as launcher
from gla_triton_kernels.gla.general import kernels as general
from tests.backends.prepared_calls import call_prepared
from tests.kernels import DTYPES, INTERPRETED

pytest.importorskip("triton")

CHUNK = 16 if INTERPRETED else 64  # tokens of the longest chunk, and of a segment
DTYPE = torch.float16 if INTERPRETED else torch.float32  # the interpreter is slow for float32, token by token
WIDTHS = [(1, 1, 1), (19, 37, 2), (256, 40, 1)]
WIDTHS += [(512, 20, 1), (20, 140, 1)] if INTERPRETED else [(16, 200, 1), (100, 64, 1), (128, 128, 3), (512, 512, 1)]
WIDTHS_AND_DTYPES = [
    pytest.param(
        *widths, dtype, marks=pytest.mark.thorough if INTERPRETED and max(widths) > 100 and dtype != DTYPE else ()
    )
    for widths, dtype in itertools.product(WIDTHS, DTYPES)
]
LENGTHS = [1, 15, 16, 17, 32] if INTERPRETED else [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128]
LENGTHS += [17 * CHUNK + 7]  # more segments than the scan loads at a time

pytestmark = pytest.mark.kernels


@pytest.fixture
def forward(backend, change_plans):
    """Returns the backend's chunk_gla_fwd by general kernels, with TMA wherever it is possible."""
    change_plans("TMA_ELEMENTS", 0)
    change_plans("segment_length", lambda *_: CHUNK)
    cut = {"triton_fused": False, "parallel_scan": True}[backend]

    def prepare(call):
        return launcher.prepare(call, cut, kernels=(general.FORWARD,))

    def forward(q, k, v, g=None, initial_state=None, cu_seqlens=None, scale=0.3, final=True):
        arguments = (q, k, v, g, scale, initial_state, final, cu_seqlens, None)
        return call_prepared("chunk_gla_fwd", prepare, *arguments)[:2]

    return forward


def oracle_forward(q, k, v, g=None, initial_state=None, cu_seqlens=None, scale=0.3):
    return oracle.chunk_gla(q, k, v, g, scale, initial_state, cu_seqlens)


def check(forward, q, k, v, *rest, scale=0.3):
    """Compares with the oracle."""
    o, state = forward(q, k, v, *rest, scale=scale)
    ref_o, ref_state = oracle_forward(q, k, v, *rest, scale=scale)
    assert relative_error(o, ref_o) <= FORWARD[q.dtype]
    assert relative_error(state, ref_state) <= FORWARD[q.dtype]
    assert o.is_contiguous()
    assert state.is_contiguous()
    assert o.dtype == v.dtype


def inputs(device, **sizes):
    """Returns inputs; by default one sequence if kernels are interpreted, else two."""
    x = gla_inputs(device=device, **{"B": 1 if INTERPRETED else 2, **sizes})
    return [x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_gates(forward, device, gates, dtype):
    T = CHUNK + 3 if INTERPRETED and dtype != DTYPE else 3 * CHUNK - 5
    sizes = {"T": T, "K": 32, "V": 32, "initial_state": True}
    check(forward, *inputs(device, **sizes, gates=gates, gate_dtype=torch.float32, dtype=dtype))


@pytest.mark.parametrize(("K", "V", "G", "dtype"), WIDTHS_AND_DTYPES, ids=str)
def test_widths(forward, device, K, V, G, dtype):
    T = CHUNK + 3 if INTERPRETED else 2 * CHUNK + 3
    check(forward, *inputs(device, B=1, T=T, H=1, K=K, V=V, G=G, dtype=dtype, gates="-inf", initial_state=True))
    check(forward, *inputs(device, B=1, T=T, H=1, K=K, V=V, G=G, dtype=dtype))


@pytest.mark.parametrize("gates", ["mild"] if INTERPRETED else GATES)
@pytest.mark.parametrize(("K", "V", "G"), [(19, 37, 2)] if INTERPRETED else [(32, 32, 1), (19, 37, 2), (256, 128, 1)])
def test_tf32(forward, device, K, V, G, gates, tf32_allowed):
    """Float32 is computed in chunks, with operands rounded to TF32."""
    x = inputs(device, T=3 * CHUNK + 3, K=K, V=V, G=G, gates=gates, initial_state=True)
    for actual, expected in zip(forward(*x), oracle_forward(*x), strict=True):
        assert relative_error(actual, expected) <= 1e-3


@pytest.mark.parametrize("T", LENGTHS)
def test_lengths(forward, device, T):
    check(forward, *inputs(device, T=T, gates="strong", dtype=DTYPE, initial_state=True))


@pytest.mark.parametrize(
    "lengths",
    [(0,), (0, 5, 0, 0), (2 * CHUNK + 3, 2, 0, CHUNK)]
    + ([] if INTERPRETED else [(1, 1, 1), (16, 0, 33), (32, 64), (70, 2)]),
)
@pytest.mark.parametrize(
    ("gates", "index_dtype"),
    [("none", torch.int32), ("-inf", torch.int64)]
    if INTERPRETED
    else itertools.product(("none", "mild", "-inf"), (torch.int32, torch.int64)),
    ids=str,
)
def test_packed(forward, device, lengths, gates, index_dtype):
    *x, offsets = inputs(device, lengths=lengths, gates=gates, dtype=DTYPE, initial_state=True)
    check(forward, *x, offsets.to(index_dtype))


@pytest.mark.parametrize("sizes", [{"T": 3 * CHUNK}, {"T": CHUNK + 1}, {"lengths": (2 * CHUNK, 0, 40, 3)}])
def test_no_final_state_is_asked_for(forward, device, sizes):
    x = inputs(device, **sizes, dtype=DTYPE, initial_state=True)
    o, state = forward(*x, final=False)
    assert torch.equal(o, forward(*x)[0])
    assert state is None


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_to_do(forward, device, B, T):
    q, k, v, g, state, _ = inputs(device, B=B, T=T, initial_state=True)
    o, final = forward(q, k, v, g, state)
    assert o.shape == v.shape
    assert torch.equal(final, state)
    assert torch.equal(forward(q, k, v, g)[1], torch.zeros_like(state))


@pytest.mark.parametrize("decay", [1.0, 59.0, 61.0, 300.0, 700.0])
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else DTYPES, ids=str)  # float32 goes token by token
def test_either_side_of_the_largest_decay_of_a_mild_chunk(forward, device, decay, dtype):
    """Some channels of chunks of 16, 32 and 64 tokens have this decay."""
    q, k, v, g, state, _ = inputs(device, T=2 * CHUNK, K=32, dtype=dtype, gate_dtype=torch.float32, initial_state=True)
    for C, channel in ((16, 3), (32, 7), (64, 20)):
        g[..., channel] = -decay / C
    check(forward, q, k, v, g, state)


@pytest.mark.parametrize("decay", [700.0, torch.inf] if INTERPRETED else [1.0, 59.0, 61.0, 700.0, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_that_forget_while_others_do_not(forward, device, decay, dtype):
    q, k, v, g, state, _ = inputs(device, T=3 * CHUNK, K=32, dtype=dtype, gate_dtype=torch.float32, initial_state=True)
    g[..., 3::5] = -decay / 16
    g[:, CHUNK + 5, :, 4::5] = -decay
    check(forward, q, k, v, g, state)


def test_mild_and_infinite_gates_in_one_row(forward, device):
    q, k, v, g, state, _ = inputs(device, T=CHUNK + 54, K=32, initial_state=True)
    g[:, 40, :, ::3] = -torch.inf
    g[:, 41, :, 1::3] = -300.0
    check(forward, q, k, v, g, state)


@pytest.mark.parametrize("tokens", sorted({CHUNK, 64}))
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float16], ids=str)
def test_large_values_in_a_mild_chunk_of_large_decay(forward, device, dtype, tokens):
    q, k, v, g, _, _ = inputs(device, T=2 * CHUNK, K=64, dtype=dtype, gate_dtype=torch.float32)
    g[:] = -58.0 / tokens
    check(forward, 1e4 * q, 1e4 * k, 1e4 * v, g)


def test_large_float16_values(forward, device):
    q, k, v, g, _, _ = inputs(device, T=2 * CHUNK, K=64, dtype=torch.float16, gates="strong")
    check(forward, 1e3 * q, 1e3 * k, v, g, scale=1e-6)


def test_no_neighbour_in_a_pack_is_heard(forward, device):
    """Infinities and NaN of a packed sequence do not reach the others."""
    q, k, v, g, state, offsets = inputs(device, lengths=(20, 13, 70), dtype=DTYPE, initial_state=True)
    ref = forward(q, k, v, g, state, offsets)
    for x in (q, k, v, g):
        x[:, 20:30], x[:, 30:33] = torch.nan, torch.inf
    o, final = forward(q, k, v, g, state, offsets)
    assert torch.equal(o[:, :20], ref[0][:, :20])
    assert torch.equal(o[:, 33:], ref[0][:, 33:])
    assert torch.equal(final[::2], ref[1][::2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(forward, device, dtype):
    """Tensors are heads-first, a slice of a wider tensor, an expanded batch, or a state with gaps between its rows."""
    T = 3 * CHUNK + 2 if not INTERPRETED else CHUNK + 1 if dtype == DTYPE else 9
    q, k, v, g, state, _ = inputs(device, B=2, T=T, H=2, G=2, K=32, V=32, dtype=dtype, initial_state=True)
    ref = forward(q, k, v, g, state)
    wide = torch.nn.functional.pad(state, (0, 0, 1, 2))[:, :, 1:-2]
    for padding in (8, 3):  # rows at multiples of 16 bytes, and at other addresses
        sliced = torch.nn.functional.pad(k, (padding, padding))[..., padding:-padding]
        for a, b in zip(forward(heads_first(q), sliced, heads_first(v), g, wide), ref, strict=True):
            assert torch.equal(a, b)
    q, k, v, g, state = (x[:1].expand(2, *x.shape[1:]) for x in (q, k, v, g, state))
    check(forward, q, k, v, g, state)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_every_run(forward, gates, dtype):
    x = inputs("cuda", T=2 * CHUNK + 2, K=64, V=64, gates=gates, dtype=dtype)
    first = forward(*x)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(forward(*x), first, strict=True))


@settings(max_examples=4 if INTERPRETED else 15)
@given(
    K=st.integers(1, 40 if INTERPRETED else 70),
    V=st.integers(1, 40 if INTERPRETED else 70),
    G=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 20 if INTERPRETED else 4 * CHUNK), min_size=1, max_size=3),
    packed=st.booleans(),
    gates=st.sampled_from(GATES),
    dtype=st.sampled_from(DTYPES),
    float32_gates=st.booleans(),
    initial_state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_anything(forward, device, K, V, G, lengths, packed, gates, dtype, float32_gates, initial_state, seed):
    sizes = {"lengths": tuple(lengths)} if packed else {"B": len(lengths), "T": lengths[0]}
    gate_dtype = torch.float32 if float32_gates else None
    options = {"dtype": dtype, "gate_dtype": gate_dtype, "initial_state": initial_state, "seed": seed, "gates": gates}
    check(forward, *inputs(device, H=1 if INTERPRETED else 2, G=G, K=K, V=V, **options, **sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 65])
def test_more_than_2_to_the_31_elements(forward, K):
    """Heads lie 2^31 elements apart. Kernels read them in tiles and through pointers. The test needs 13 GiB."""
    x = gla_inputs(B=1, T=140, H=2, K=K, V=K, dtype=torch.bfloat16, gate_dtype=torch.float32, device="cuda")
    check(forward, *(far_apart(y) for y in (x.q, x.k, x.v)), x.g)


def far_apart(x):
    """Returns the values of x [1, T, 2, K] in a tensor whose two heads are 2^31 elements apart."""
    far = x.new_zeros(2**31 + x.numel()).as_strided(x.shape, (0, x.shape[3], 2**31, 1))
    return far.copy_(x)


@pytest.mark.parametrize("backend", ["parallel_scan"])
def test_rows_of_a_batch_in_one_pass_and_others_cut(forward, device, change_plans):
    change_plans("_rows_in_one_pass", lambda *_: 2)
    change_plans("are_cheaper", lambda *_: True)
    check(forward, *inputs(device, B=3, T=2 * CHUNK + 3, K=20, V=9, gates="mild", dtype=DTYPE, initial_state=True))


def test_gradients_of_rows_in_one_pass_and_of_others(device, change_plans):
    change_plans("_rows_in_one_pass", lambda *_: 2)
    change_plans("are_cheaper", lambda *_: True)
    x = gla_inputs(B=3, T=131, H=2, K=20, V=9, gates="mild", dtype=DTYPE, initial_state=True, device=device)
    expected = oracle_gradients("chunk_gla", x)
    for name, gradient in gradients("chunk_gla", x, "parallel_scan").items():
        assert relative_error(gradient, expected[name]) <= GRADIENT[DTYPE], name
