"""Hopper's kernel for the states of segments, and the op with it, against float64; only on compute capability 9.0."""

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.calls import heads_first
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import OpCall
from gla_core.workloads.inputs import GATES
from gla_triton_kernels.gla import forward
from gla_triton_kernels.gla.sm90 import kernels as sm90
from gla_triton_runtime.architecture import Architecture, Gpu
from tests.backends.prepared_calls import described
from tests.backends.test_chunk_gla_sm90 import each, inputs
from tests.grid import grid

BUDGET = FORWARD[torch.bfloat16]
DECAYS = 2e-4  # exp of a float32 sum of up to -100
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_sm90", "poisoned")]
KV = [(64, 64), (128, 128)]
LENGTHS = [(0, 65, 1, 0, 130, 300), (64, 64), (0, 0, 5), (200,)]
both_directions = pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])


def cut(B, T, length, cu_seqlens=None):
    """Returns the segments, and the rows of each one: (batch, first row, end)."""
    from gla_triton_kernels.chunks import segments as triton_segments
    from gla_triton_runtime.launch import start

    segments = triton_segments.cut(B, T, length, length, cu_seqlens)
    start(segments.launches)
    if segments.order is None:
        return segments, [(b, t, min(t + length, T)) for b in range(B) for t in range(0, T, length)]
    return segments, [(0, t, end) for _, t, end, *_ in sorted(segments.order.tolist())]


def state_from_zero(left, right, g, backwards=False):
    """Returns the state, or its gradient, [H, K, V] and the decay [H, K] of one segment, in float64."""
    left, right = left.double(), right.double()
    g = torch.zeros_like(left) if g is None else g.double()
    if backwards:
        decayed = 0.3 * left * g.cumsum(0).exp()
    else:
        decayed = left * torch.cat([g[1:], torch.zeros_like(g[:1])]).flip(0).cumsum(0).flip(0).exp()
    return torch.einsum("thk,thv->hkv", decayed, right), g.sum(0).exp()


def build(left, right, g, segments, backwards=False, skip_last=False, multiprocessors=132):
    from gla_triton_kernels.chunks.segments import Recurrence
    from gla_triton_runtime.launch import start

    B, T, H, K, V = *left.shape, right.shape[3]
    S = torch.empty(segments.count, H, K, V, device="cuda")
    D = None if g is None else torch.empty(segments.count, H, K, device="cuda")
    call = OpCall(
        op="chunk_gla_fwd",
        device=left.device,
        dtype=left.dtype,
        dims={"B": B, "T": T, "N": B, "H": H, "Hq": H, "Hv": H, "K": K, "V": V},
        gate_dtype=None if g is None else g.dtype,
        gate_form=None if g is None else "key",
    )
    gpu = Gpu(Architecture.SM90, multiprocessors)
    outputs = sm90.FORWARD.parameters(call, gpu, segments.count)
    plan = forward.segments_before(call, gpu, sm90.FORWARD, outputs, segments.length, segments.uncut)
    assert (plan.states, plan.overlap) == (sm90.STATES, True)
    after = None if skip_last else S  # only whether it is None matters here
    x = Recurrence(left, right, g, None, after, scale=0.3, backwards=backwards)
    start(plan.states.load()(plan, x, segments, S, D))
    return S, D


def check(left, right, g, length, cu_seqlens=None, backwards=False):
    segments, places = cut(*left.shape[:2], length, cu_seqlens)
    S, D = build(left, right, g, segments, backwards)
    again = build(left, right, g, segments, backwards)
    used = [i for i, (_, t, end) in enumerate(places) if end > t]  # empty ones are not built
    truth = [
        state_from_zero(*(None if x is None else x[b, t:end] for x in (left, right, g)), backwards)
        for b, t, end in (places[i] for i in used)
    ]
    assert relative_error(S[used], torch.stack([x[0] for x in truth])) <= BUDGET
    assert torch.equal(S[used], again[0][used])
    if g is not None:
        assert relative_error(D[used], torch.stack([x[1] for x in truth])) <= DECAYS
        assert torch.equal(D[used], again[1][used])


@both_directions
@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        *((192, sizes) for sizes in each(KV, T=500, gates=[*GATES], gate_dtype=[torch.float32, torch.bfloat16])),
        *((length, sizes) for length in (64, 256, 1024) for sizes in grid(T=[1, 63, 64, 65, 1000], K=128, V=128)),
        *((128, sizes) for sizes in grid(lengths=LENGTHS, K=[128, 200], V=128, gates=["none", "strong", "-inf"])),
    ],
    ids=str,
)
def test_sizes(length, sizes, backwards):
    _, k, v, g, _, offsets = inputs(**sizes)
    check(k, v, g, length, offsets, backwards)


@pytest.mark.parametrize(
    ("K", "V"), [(8, 8), (16, 64), (40, 200), (64, 512), (96, 72), (128, 24), (120, 256), (136, 72), (256, 256)]
)
@pytest.mark.parametrize("gates", ["none", "-inf"])
def test_widths(K, V, gates):
    _, k, v, g, *_ = inputs(T=200, H=3, K=K, V=V, gates=gates)
    check(k, v, g, 128)


def test_blocks_of_fewer_columns_give_the_same_bits():
    """On a device with one multiprocessor, not all narrow blocks run at once, so blocks are wide."""
    _, k, v, g, *_ = inputs(T=500, K=64, V=256)
    segments, _ = cut(2, 500, 192)
    narrow, wide = (build(k, v, g, segments, multiprocessors=number) for number in (132, 1))
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize(("backwards", "last"), [(False, 4), (True, 0)], ids=["forwards", "backwards"])
def test_the_last_segment_is_left_out(backwards, last):
    _, k, v, g, *_ = inputs(B=2, T=300, K=64, V=64)
    segments, _ = cut(2, 300, 64)
    left_out = torch.arange(10) % 5 == last
    check_left_out(k, v, g, segments, backwards, left_out)


@pytest.mark.parametrize(("backwards", "last"), [(False, (3, 5)), (True, (1, 4))], ids=["forwards", "backwards"])
def test_the_last_segment_of_a_packed_sequence_is_left_out(backwards, last):
    """The segments of one sequence have numbers 1 to 3. The other sequence has 4 and 5, and ends with a whole chunk."""
    _, k, v, g, _, offsets = inputs(lengths=(0, 150, 128), K=64, V=64)
    segments, places = cut(1, 278, 64, offsets)
    left_out = torch.tensor([i in last or t == end for i, (_, t, end) in enumerate(places)])
    check_left_out(k, v, g, segments, backwards, left_out)


def check_left_out(k, v, g, segments, backwards, left_out):
    whole, part = (build(k, v, g, segments, backwards, skip_last) for skip_last in (False, True))
    assert torch.equal(part[0][~left_out], whole[0][~left_out])
    assert part[0][left_out].isnan().all()


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("gates", ["none", "mild", "extreme", "-inf"])
@pytest.mark.parametrize("sizes", [{"B": 2, "T": 700}, {"lengths": (0, 300, 1, 0, 130, 500)}], ids=str)
def test_outputs_of_segments(sizes, gates, final, change_plans):
    """Three kernels run one after the other. Each may start before the kernel before it has ended."""
    change_plans("segment_length", lambda *_: 128)
    q, k, v, g, state, offsets = inputs(K=128, V=128, gates=gates, initial_state=True, **sizes)
    ref_o, ref_state = oracle.chunk_gla(q, k, v, g, 0.3, state, offsets)
    arguments = (q, k, v, g, 0.3, state, final, offsets, None, None)
    run = forward.prepare(described("chunk_gla_fwd", *arguments), True, (sm90.FORWARD,))
    o, end, _ = run(*arguments)
    assert relative_error(o, ref_o) <= BUDGET
    if final:
        assert relative_error(end, ref_state) <= BUDGET
    for _ in range(20):
        again = run(*arguments)[:2]
        assert torch.equal(o, again[0])
        assert not final or torch.equal(end, again[1])


@both_directions
def test_a_packed_sequence_sees_nothing_of_the_next(backwards):
    _, k, v, g, _, offsets = inputs(lengths=(70, 70), K=128, V=128)
    for x in (k, v, g):
        x[:, 70:] = torch.nan
    segments, _ = cut(1, 140, 64, offsets)
    S, D = build(k, v, g, segments, backwards)
    for i, rows in enumerate([slice(0, 64), slice(64, 70)]):
        ref_S, ref_D = state_from_zero(k[0, rows], v[0, rows], g[0, rows], backwards)
        assert relative_error(S[i], ref_S) <= BUDGET
        assert relative_error(D[i], ref_D) <= DECAYS


@both_directions
@pytest.mark.parametrize(("K", "V"), [(64, 64), (72, 256), (128, 128)])
def test_segments_that_forget(K, V, backwards):
    """Tokens that gates decay to 0 are not read, but for a few chunks."""
    _, k, v, g, *_ = inputs(T=2000, K=K, V=V)
    g.fill_(-1.0)
    check(k, v, g, 1024, backwards=backwards)
    segments, _ = cut(2, 2000, 1024)
    S, D = build(k, v, g, segments, backwards)
    k[:, 384:640], v[:, 384:640] = torch.nan, torch.nan
    again, decay = build(k, v, g, segments, backwards)
    assert torch.equal(S[0], again[0])
    assert torch.equal(D[0], decay[0])


@both_directions
@pytest.mark.parametrize("key", [0, 71])
def test_segments_that_one_key_does_not_forget(key, backwards):
    _, k, v, g, *_ = inputs(T=2000, K=72, V=128)
    g.fill_(-3.0)[..., key] = -0.01
    check(k, v, g, 1024, backwards=backwards)


@both_directions
@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_large_and_small_inputs(factor, backwards):
    _, k, v, g, *_ = inputs(T=200, K=128, V=128, gates="strong")
    check(k * factor, v * factor, g, 128, backwards=backwards)


def test_strided():
    q, k, v, g, *_ = inputs(T=150, H=3, K=64, V=64)
    check(*(heads_first(x) for x in (k, v, g)), 64)
    wide = torch.cat([q, k, v], -1)
    check(*wide.split(64, -1)[1:], g, 64)


def test_more_than_2_to_the_31_elements():
    """The last segment of a tensor of more than 2^31 elements."""
    T = 2**20 + 100
    k, v, g = (torch.randn(1, T, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g.abs_().mul_(-0.05)
    segments, places = cut(1, T, 2**16)
    S, _ = build(k, v, g, segments)
    _, t, end = places[-1]
    assert relative_error(S[-1], state_from_zero(k[0, t:end], v[0, t:end], g[0, t:end])[0]) <= BUDGET
