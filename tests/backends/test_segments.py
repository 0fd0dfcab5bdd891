"""Segments: the cuts of sequences, boundaries of packed sequences on the device, and the states before each segment."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import gla_inputs
from gla_triton_kernels.chunks.kernel import Parameters, SegmentPlan
from gla_triton_kernels.gla.general import kernels as general
from tests.kernels import DTYPES, INTERPRETED

pytest.importorskip("triton")

from gla_triton_kernels.chunks import scan, segments
from gla_triton_kernels.chunks.segments import Recurrence, cut
from gla_triton_runtime.launch import start

# ---- boundaries


def offsets_of(lengths, device, dtype=torch.int64, first=0):
    return torch.tensor([first, *lengths], device=device).cumsum(0).to(dtype)


@pytest.fixture
def check(device):
    """Compares with the definition, also with rows before the first sequence and behind the last."""

    def check(lengths, length, dtype=torch.int64, around=0, uncut=None):
        offsets, T = offsets_of(lengths, device, dtype, around), sum(lengths) + 2 * around
        uncut = uncut or length
        layout = segments.cut(1, T, length, uncut, offsets)
        start(layout.launches)
        assert layout.count == len(lengths) + T // length
        assert layout.order.dtype == torch.int32
        assert sorted(i for i, *_ in layout.order.tolist()) == list(range(layout.count))
        assert {i: rows for i, *rows in layout.order.tolist() if rows[0] < rows[1]} == expected(offsets, length, uncut)
        in_order = segments.cut(1, T, length, uncut, offsets, longest_first=False)
        start(in_order.launches)
        assert in_order.order.tolist() == sorted(layout.order.tolist())

    return check


def expected(offsets, length, uncut):
    """Returns the rows of each segment and of its sequence, by the number of the segment.

    Segment m of sequence n has the number n + c_n // length + m. Checkpoints have the same numbers.
    """
    places = {}
    for n, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        for m, (t, behind) in enumerate(rows_of(first, end, length, uncut)):
            i = n + first // length + m
            assert i not in places
            places[i] = [t, behind, first, end]
    return places


def rows_of(first, end, length, uncut):
    """Returns the rows of a sequence's segments."""
    step = length if end - first > uncut else max(end - first, 1)
    return [(t, min(t + step, end)) for t in range(first, end, step)]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [(0,), (0, 0, 5), (64,), (65, 64, 0, 63, 1), (1,) * 40, (300, 0, 0, 10)])
def test_boundaries_of_packed_sequences(check, lengths, dtype):
    check(lengths, 64, dtype)
    check(lengths, 64, dtype, around=70)
    check(lengths, 64, dtype, uncut=65)


@pytest.mark.thorough
@pytest.mark.kernels
def test_more_sequences_than_a_program_sees_at_a_time(check, device):
    lengths = [i * 37 % 101 for i in range(3000 if device == "cuda" else 300)]
    check(lengths, 1024)


@pytest.mark.kernels
@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=300 if torch.cuda.is_available() else 30),
    length=st.sampled_from([16, 64, 128]),
    around=st.sampled_from([0, 5, 300]),
    more=st.sampled_from([0, 1, 8, 100]),
)
def test_any_boundaries(check, lengths, length, around, more):
    check(lengths, length, around=around, uncut=length + more)


@pytest.mark.kernels
@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=700 if torch.cuda.is_available() else 300),
    length=st.sampled_from([64, None]),
    more=st.sampled_from([0, 32]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_the_longest_first(device, lengths, length, more, dtype):
    """The order has every segment of whole and of cut sequences once. Followed segments come first."""
    offsets, T = offsets_of(lengths, device, dtype, 3), sum(lengths) + 6
    layout = segments.cut(1, T, length, length + more, offsets) if length else segments.whole(1, T, offsets)
    start(layout.launches)
    places = expected(offsets, length or T + 1, length + more if length else T)
    followed = {i for i, (_, end, _, last) in places.items() if end < last}
    cut = {i for i in followed if places[i][0] == places[i][2]}
    tokens = {i: end - t for i, (t, end, _, _) in places.items()}
    longest_first = sorted(range(layout.count), key=lambda i: (i not in cut, i not in followed, -tokens.get(i, 0)))
    assert layout.order[:, 0].tolist() == longest_first
    if length:
        assert layout.counts.tolist() == [len(followed), len(cut)]
        assert len(followed) <= layout.most


def test_equal_sequences_are_cut_on_the_host():
    segments = cut(3, 130, 64, 64, None)
    assert (segments.per_sequence, segments.count, segments.order, segments.cu_seqlens) == (3, 9, None, None)


# ---- states before segments, forwards and backwards in time

H = 2
both_directions = pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])


def recurrence(backwards, *, G=1, around=0, carried=True, **sizes):
    """Returns a random recurrence, and offsets. Packed sequences have rows of NaN around them.

    If `carried`, there are initial and final states, and the initial ones are strided.
    """
    if "lengths" in sizes:
        sizes["lengths"] = (around, *sizes["lengths"], around)
    x = gla_inputs(**sizes, H=H, G=G if backwards else 1, gate_dtype=torch.float32, initial_state=True)
    offsets, state = x.cu_seqlens, x.initial_state
    if offsets is not None:
        offsets, state = offsets[1:-1].contiguous(), state[1:-1]
        for y in (x.q, x.k, x.v, *([] if x.g is None else [x.g])):
            y[:, : offsets[0]] = y[:, offsets[-1] :] = torch.nan
    ends = (state.transpose(0, 1).contiguous().transpose(0, 1), torch.full_like(state, torch.nan))
    ends = ends if carried else (None, None)
    if backwards:
        do = x.v.repeat_interleave(G, 2).roll(1, 2)
        return Recurrence(x.q, do, x.g, *ends, scale=0.3, backwards=True), offsets
    return Recurrence(x.k, x.v, x.g, *ends), offsets


def planned(x, length, uncut):
    """Returns a plan of the general kernel: several blocks per state, and chunks of 16 tokens or token by token."""
    operand = torch.bfloat16 if x.left.dtype == torch.bfloat16 else torch.float32
    tokenwise = x.left.dtype == torch.float32
    parameters = Parameters(C=16, BK=16, BV=16, operand=operand, tokenwise=tokenwise)
    return SegmentPlan(length, uncut, general.STATES, parameters, overlap=False)


def own_states(x, length, uncut, offsets):
    """Returns the segments, their states from zero, and their decays. Elements that were not written are NaN."""
    B, T, _, K = x.left.shape
    cut, plan = segments.cut(B, T, length, uncut, offsets), planned(x, length, uncut)
    S = torch.full((cut.count, H, K, x.right.shape[3]), torch.nan, device=x.left.device)
    D = None if x.g is None else torch.full((cut.count, H, K), torch.nan, device=x.left.device)
    start([*cut.launches, *plan.states.load()(plan, x, cut, S, D)])
    return cut, S, D


def segments_of(x, length, uncut, offsets):
    """Yields for each sequence its segments in the direction of x, as (number, batch, rows)."""
    B, T = x.left.shape[:2]
    sequences = [(b, 0, T, b * -(-T // length)) for b in range(B)]
    if offsets is not None:
        bounds = itertools.pairwise(offsets.tolist())
        sequences = [(0, first, end, n + first // length) for n, (first, end) in enumerate(bounds)]
    for b, first, end, number in sequences:
        rows = rows_of(first, end, length, length if offsets is None else uncut)
        numbered = [(i, b, range(*each)) for i, each in enumerate(rows, number)]
        yield numbered[::-1] if x.backwards else numbered


def through(x, b, rows, state):
    """Returns the state [H, K, V] behind these rows, computed token by token in float64."""
    for t in reversed(rows) if x.backwards else rows:
        left, right = (y[b, t].double().unflatten(0, (H, -1)) for y in (x.left, x.right))
        product = torch.einsum("hgk,hgv->hkv", left, right)
        decay = 1.0 if x.g is None else x.g[b, t].double().exp()[..., None]
        state = decay * (state + x.scale * product) if x.backwards else decay * state + product
    return state


def check_states(backwards, length=32, more=0, skip_first=False, **sizes):
    """Compares the state before each segment, and the state after the last one, with the recurrence in float64.

    Args:
        more: packed sequences of up to length + more tokens are not cut.
        skip_first: whether the state before each sequence is left out.
    """
    x, offsets = recurrence(backwards, **sizes)
    cut, S, D = own_states(x, length, length + more, offsets)
    start(scan.launch_scan(planned(x, length, length + more).overlap, x, cut, S, D, S, skip_first))
    for n, numbered in enumerate(segments_of(x, length, length + more, offsets)):
        state = torch.zeros(S.shape[1:], dtype=torch.float64, device=S.device)
        if x.before is not None:
            state += x.before[n]
        for m, (i, b, rows) in enumerate(numbered):
            if m > 0 or not skip_first:
                assert relative_error(S[i], state) <= FORWARD[x.left.dtype]
            state = through(x, b, rows, state)
        if x.after is not None:
            assert relative_error(x.after[n], state) <= FORWARD[x.left.dtype]


@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("gates", ["none", "-inf"] if INTERPRETED else ["none", "mild", "-inf"])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *(({"lengths": (0, 40, 32, 0, 1), "around": 40}, dtype) for dtype in DTYPES),
        ({"B": 2, "T": 40}, torch.float16),
        *(pytest.param({"B": 2, "T": 40}, x, marks=pytest.mark.thorough) for x in DTYPES if x != torch.float16),
    ],
    ids=str,
)
def test_states(device, sizes, gates, dtype, backwards):
    check_states(backwards, **sizes, K=20, V=9, gates=gates, dtype=dtype, device=device)


@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("sizes", [{"B": 2, "T": 70}, {"lengths": (0, 70, 32, 0, 1), "around": 40}], ids=str)
def test_states_that_start_from_zero_and_end_nowhere(device, sizes, backwards):
    check_states(backwards, **sizes, carried=False, dtype=torch.float16, device=device)


@pytest.mark.thorough
@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("ends", [{}, {"carried": False, "skip_first": True}], ids=["carried", "from zero"])
def test_packed_sequences_that_are_a_little_longer_than_a_segment_stay_whole(device, ends, backwards):
    lengths = (0, 48, 49, 33, 1, 130, 32)
    check_states(backwards, more=16, lengths=lengths, around=40, **ends, K=4, V=9, device=device)


@pytest.mark.thorough
@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("programs", [1, pytest.param(5, marks=pytest.mark.thorough)])
def test_a_few_programs_scan_all_that_is_cut(device, programs, backwards, monkeypatch):
    monkeypatch.setattr(scan, "PROGRAMS", programs)
    lengths = (0, 70, 5, 0, 33, 32, 1, 129)
    check_states(backwards, lengths=lengths, around=40, carried=False, skip_first=True, K=4, V=70, device=device)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", ["none", "-inf"] if INTERPRETED else ["none", "mild", "-inf"])
def test_gradients_of_grouped_queries(device, gates, dtype):
    check_states(True, B=1, T=40, G=3, K=9, V=20, gates=gates, dtype=dtype, device=device)


@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("sizes", [{"B": 1, "T": 17 * 16 + 3}, {"lengths": (17 * 16 + 3, 5)}], ids=str)
def test_more_segments_than_are_scanned_at_a_time(device, sizes, backwards):
    check_states(backwards, length=16, **sizes, K=4, V=4, gates="strong", dtype=torch.float16, device=device)


@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("lengths", [(0,), (0, 0, 5)])
def test_empty_sequences_pass_their_states_through(device, lengths, backwards):
    check_states(backwards, lengths=lengths, device=device)


@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("sizes", [{"B": 2, "T": 64}, {"lengths": (64, 0, 70, 1), "around": 40}], ids=str)
def test_states_that_nobody_reads_are_not_built(device, sizes, backwards):
    x, offsets = recurrence(backwards, **sizes, carried=False, dtype=torch.float16, device=device)
    _, S, D = own_states(x, 32, 32, offsets)
    read = {i for numbered in segments_of(x, 32, 32, offsets) for i, *_ in numbered[:-1]}
    for i in range(len(S)):
        assert S[i].isnan().all() == D[i].isnan().all() == (i not in read)


@pytest.mark.kernels
@both_directions
@pytest.mark.parametrize("sizes", [{"B": 2, "T": 70}, {"lengths": (0, 70, 32, 0, 1), "around": 40}], ids=str)
def test_dense_transitions(device, sizes, backwards):
    """A transition [K, K] mixes keys, so the order of products matters; no kernel builds such transitions yet."""
    x, offsets = recurrence(backwards, **sizes, K=20, V=19, device=device)
    cut = segments.cut(*x.left.shape[:2], 32, 32, offsets)
    S = torch.randn(cut.count, *x.before.shape[1:], device=device)
    D = torch.randn(cut.count, H, 20, 20, device=device) / 20**0.5
    entering, composed = torch.full_like(S, torch.nan), torch.full((len(x.before), H, 20, 20), torch.nan, device=device)
    scanned = scan.launch_scan(planned(x, 32, 32).overlap, x, cut, S, D, entering, decay=composed)
    start([*cut.launches, *scanned])
    for n, numbers in enumerate(segments_of(x, 32, 32, offsets)):
        state, product = x.before[n].double(), torch.eye(20, dtype=torch.float64, device=device).expand(H, 20, 20)
        for i, _, _ in numbers:
            assert relative_error(entering[i], state) <= FORWARD[torch.float32]
            state, product = D[i].double() @ state + S[i], D[i].double() @ product
        assert relative_error(x.after[n], state) <= FORWARD[torch.float32]
        assert relative_error(composed[n], product) <= FORWARD[torch.float32]
