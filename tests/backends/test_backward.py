"""The general kernel of chunk_gla_bwd against the reference in float64: any width, length, gate, layout and packing.

The kernel receives the states that enter chunks. For segments, it also receives the gradients of the states that leave
them.
"""

import dataclasses

import pytest
import torch

from gla_core.conformance.calls import heads_first, output_shape, with_room
from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_core.dispatch.backend import CHUNK
from gla_core.workloads.inputs import GATES, GlaInputs, gla_inputs
from gla_reference.chunk_gla import chunk_gla_bwd, chunk_gla_fwd
from gla_triton_kernels.chunks.kernel import GradientParameters
from gla_triton_kernels.gla import backward, forward
from gla_triton_kernels.gla.general import kernels as general
from tests.backends.prepared_calls import call_prepared
from tests.grid import grid, thorough
from tests.kernels import DTYPES, INTERPRETED

pytest.importorskip("triton")

from gla_triton_kernels.chunks import partials
from gla_triton_kernels.chunks.segments import cut, whole
from gla_triton_kernels.gla import groups
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.launch import start

PRECISIONS = {torch.float32: "bf16x6", torch.float16: "bf16x3", torch.bfloat16: "bf16"}
SCALE = 0.3
TOKENS = [1, 2, 63, 64, 65, 129]

pytestmark = pytest.mark.kernels


@dataclasses.dataclass(frozen=True)
class Case(GlaInputs):
    """Holds inputs of the forward, and the gradients of its results."""

    do: torch.Tensor
    dstate: torch.Tensor | None


def case(device, *, dstate=True, offset=0, **sizes):
    """Returns a random case; the first packed sequence begins at row `offset`."""
    x = gla_inputs(device=device, **{"B": 1, "H": 1, "gate_dtype": torch.float32, **sizes})
    arguments = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    (N, K), (H, V) = x.q.shape[::3], x.v.shape[2:]
    do = torch.randn(output_shape(x.q, x.v), device=device).to(x.q.dtype)
    if x.cu_seqlens is not None:
        arguments["cu_seqlens"], N = x.cu_seqlens + offset, len(x.cu_seqlens) - 1
    return Case(**arguments, do=do, dstate=torch.randn(N, H, K, V, device=device) if dstate else None)


def change(x, how, *names):
    return dataclasses.replace(x, **{name: how(getattr(x, name)) for name in names if getattr(x, name) is not None})


def wide(x):
    return change(x, torch.Tensor.double, "q", "k", "v", "g", "initial_state", "do", "dstate")


def states(x):
    """Returns the states that enter chunks, in float64."""
    x = wide(x)
    return chunk_gla_fwd(x.q, x.k, x.v, x.g, SCALE, x.initial_state, False, x.cu_seqlens, CHUNK)[2]


def expected(x, entering):
    """Returns the reference's gradients in float64."""
    x = wide(x)
    arguments = (x.initial_state, x.cu_seqlens, entering.double(), CHUNK, x.do, x.dstate)
    return chunk_gla_bwd(x.q, x.k, x.v, x.g, SCALE, *arguments)


def gradients(x, entering, *, precision=None, BK=16, BV=16, warps=4, segments=None, leaving=None):
    """Returns the gradients that the kernel computes.

    Before the launch, the results and the inputs' rows of no sequence are filled with NaN. In the gradients that are
    returned, rows of no sequence are set to 0.
    """
    if not INTERPRETED:  # as plans choose them for compiled kernels
        BK, BV = max(BK, general.LEAST_BLOCK), max(BV, general.LEAST_BLOCK)
        warps = 8 if x.q.dtype == torch.bfloat16 else 4
    parameters = GradientParameters(BK=BK, BV=BV, warps=warps, precision=precision or PRECISIONS[x.q.dtype])
    inputs = (x.q, x.k, x.v, x.g, x.initial_state)
    results = [None if y is None else torch.full(y.shape, torch.nan, dtype=y.dtype, device=y.device) for y in inputs]
    for y in (*inputs[:4], x.do):
        fill_padding(y, x.cu_seqlens, torch.nan)
    tensors = BackwardTensors(*inputs, x.cu_seqlens, None, x.do, x.dstate, *results)
    if segments is None:
        segments, leaving = whole(*x.q.shape[:2], x.cu_seqlens), x.dstate
        start(segments.launches)
    else:
        tensors = tensors._replace(dinitial_state=None)
    start(general.BACKWARD.load()(parameters, tensors, entering.contiguous(), leaving, segments, SCALE))
    for y in results[:4]:
        fill_padding(y, x.cu_seqlens, 0)
    return results


def fill_padding(y, offsets, value):
    if y is not None and offsets is not None:
        y[:, : offsets[0]] = value
        y[:, offsets[-1] :] = value


def check(x, *, budget=None, entering_dtype=torch.float32, **options):
    """Compares with the reference, and returns the gradients."""
    entering = states(x).to(entering_dtype)
    ref = expected(x, entering)
    actual = gradients(x, entering, **options)
    for y, expected_y in zip(actual[:4] if "segments" in options else actual, ref, strict=False):
        if y is not None:
            seen = expected_y.abs() >= torch.finfo(torch.float32).tiny  # else out of float32's normal range
            assert relative_error(torch.where(seen, y, 0), expected_y * seen) <= (
                budget or max(GRADIENT[x.q.dtype], GRADIENT[y.dtype])
            )
    return actual


@pytest.mark.parametrize(
    "sizes",
    [
        *grid(T=150, gates=[*GATES], dtype=DTYPES, initial_state=True),
        *grid(T=70, H=2, G=3, gates=["none", "mild", "-inf"], dtype=DTYPES, initial_state=True),
        *grid(B=2, T=TOKENS, gates="-inf", initial_state=False, dstate=False),
        *grid(B=2, T=TOKENS, gates="-inf", initial_state=True, dstate=True),
        *thorough(grid(B=2, T=TOKENS, gates="-inf", initial_state=False, dstate=True)),
        *thorough(grid(B=2, T=TOKENS, gates="-inf", initial_state=True, dstate=False)),
    ],
    ids=str,
)
def test_gradients(device, sizes):
    check(case(device, **sizes))


@pytest.mark.parametrize("gates", GATES)
def test_tf32(device, gates):
    """Float32 values are split into two bfloat16 parts, as when TF32 is allowed."""
    check(case(device, T=150, gates=gates, initial_state=True), precision="bf16x3", budget=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", ["none", "-inf"])
@pytest.mark.parametrize(
    ("K", "V", "BK", "BV"),
    [(7, 5, 16, 16), (37, 19, 32, 32), (19, 37, 16, 16)] if INTERPRETED else [(37, 19, 64, 64), (100, 200, 64, 64)],
)
def test_widths(device, K, V, BK, BV, gates, dtype):
    """Blocks are wider than a head, or a head has several blocks."""
    check(case(device, T=70, K=K, V=V, gates=gates, dtype=dtype, initial_state=True), BK=BK, BV=BV)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", GATES)
def test_wide_blocks(gates):
    x = case("cuda", T=200, H=2, K=128, V=256, gates=gates, dtype=torch.bfloat16, initial_state=True)
    check(x, BK=128, BV=128, warps=8)


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 5), (130, 0, 1, 64, 70)])
@pytest.mark.parametrize(
    ("gates", "initial_state", "index_dtype"),
    [("none", True, torch.int32), ("-inf", False, torch.int32), ("-inf", True, torch.int64)],
)
def test_packed(device, lengths, gates, initial_state, index_dtype):
    x = case(device, lengths=lengths, padding=12, offset=5, gates=gates, initial_state=initial_state)
    check(change(x, lambda offsets: offsets.to(index_dtype), "cu_seqlens"))


@pytest.mark.parametrize("gate", [-8.0, -80.0, -100.0, -torch.inf])
def test_every_gate_forgets(device, gate):
    x = case(device, T=70, initial_state=True)
    x.g[:] = gate
    dg = check(x)[3]
    if gate > -87:
        assert dg.any()
    elif gate == -torch.inf:  # for gates in between, exp(gate) is a subnormal float32, which may be 0 on a GPU
        assert not dg.any()


@pytest.mark.parametrize("decay", [1.0, 59.0, 61.0, 300.0, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_either_side_of_the_largest_decay_of_a_mild_chunk(device, decay, dtype):
    x = case(device, T=140, dtype=dtype, initial_state=True)
    x.g[..., 3::5] = -decay / CHUNK
    x.g[:, CHUNK + 5, :, 4::5] = -decay
    check(x)
    if dtype == torch.float32:
        check(x, precision="bf16x3", budget=1e-3)


@pytest.mark.parametrize("precision", ["bf16x3", "bf16x6"])
@pytest.mark.parametrize("sizes", [{"T": 140}, {"lengths": (140, 0, 3)}])
def test_gates_whose_gradient_is_exactly_0(device, sizes, precision):
    """These are gates that forget everything, and gates of a first token without an initial state."""
    x = case(device, **sizes)
    x.g[:, 70, :, ::3] = -torch.inf
    x.g[:, 71, :, 1::3] = -300.0
    dg = check(x, precision=precision, budget=1e-3)[3]
    zero = x.g <= -120
    zero[:, [0] if x.cu_seqlens is None else [0, 140]] = True
    assert torch.equal(dg == 0, zero)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_in_bfloat16(device, dtype):
    check(case(device, T=140, dtype=dtype, initial_state=True), entering_dtype=torch.bfloat16)


@pytest.mark.parametrize("initial_state", [True] if INTERPRETED else [False, True])
@pytest.mark.parametrize(("gates", "dstate"), [("none", True), ("mild", False), ("-inf", True)])
@pytest.mark.parametrize(
    "sizes", [{"B": 2, "T": 150}, {"B": 2, "T": 128}, {"lengths": (130, 0, 1, 128, 70), "padding": 12, "offset": 5}]
)
@pytest.mark.parametrize(("length", "uncut"), [pytest.param(64, 64, marks=pytest.mark.thorough), (64, 128), (128, 128)])
def test_segments(device, sizes, length, uncut, gates, dstate, initial_state):
    x = case(device, **sizes, gates=gates, dstate=dstate, initial_state=initial_state)
    segments = cut(*x.q.shape[:2], length, uncut, x.cu_seqlens)
    start(segments.launches)
    leaving = torch.cat([leaving_gradient(wide(x), segments, i) for i in range(segments.count)]).float()
    dinitial = check(x, segments=segments, leaving=leaving)[4]
    assert dinitial is None or dinitial.isnan().all()  # the scan writes it, not this kernel


def leaving_gradient(x, segments, i):
    """Returns the gradient [1, H, K, V] of the state that leaves segment i.

    It is computed as the gradient of the initial state of all later tokens of the sequence.
    """
    if x.cu_seqlens is None:
        n, m = divmod(i, segments.per_sequence)
        row, begin, end = n, (m + 1) * segments.length, x.q.shape[1]
    else:
        (start, begin, _, end), row = next(rows for j, *rows in segments.order.tolist() if j == i), 0
        n = min(i - start // segments.length, len(x.cu_seqlens) - 2)  # an empty segment may take any sequence
    rest = change(x, lambda y: y[row : row + 1, begin:end], "q", "k", "v", "g", "do")
    dstate = None if x.dstate is None else x.dstate[n : n + 1]
    zero = x.q.new_zeros(1, x.v.shape[2], x.q.shape[3], x.v.shape[3])
    return chunk_gla_bwd(rest.q, rest.k, rest.v, rest.g, SCALE, zero, None, None, None, rest.do, dstate)[4]


def test_strides(device):
    """Tensors are heads-first, a slice of a wider tensor, expanded, or have gaps between their rows."""
    x = case(device, B=2, T=70, H=2, G=2, initial_state=True)
    x = dataclasses.replace(x, g=x.g[:1, :1].expand_as(x.g), do=x.do[:1, :1, :1].expand_as(x.do))
    ref = check(x)
    x = change(change(x, heads_first, "q", "v"), lambda y: torch.nn.functional.pad(y, (3, 3))[..., 3:-3], "k")
    x = change(x, with_room, "dstate")
    assert all(torch.equal(a, b) for a, b in zip(gradients(x, states(x).float()), ref, strict=True))


def test_partial_results_are_summed_in_order(device):
    parts, out = torch.randn(3, 5, 700, device=device), torch.empty(5, 700, dtype=torch.float16, device=device)
    start(partials.launch_sum(parts, out, 1))
    assert torch.equal(out, (parts[0] + parts[1] + parts[2]).half())


@pytest.mark.parametrize("sizes", [{"G": 2}, {"lengths": (70, 0, 64, 3), "padding": 9}, {"gate_form": "head"}], ids=str)
def test_a_forward_computes_the_checkpoints(device, sizes, monkeypatch):
    """Gradients have the bits that they have with the checkpoints of the same forward."""
    heads = 1 if INTERPRETED else 2
    x = case(device, **{"T": 150, "H": heads, "K": 16, "V": 16, "initial_state": True} | sizes)

    plan = backward.plan

    def plan_again(call, gpu, cut, kernels):
        ((_, planned),) = plan(call, gpu, cut, kernels)
        ((_, forwards),) = forward.plan(call, gpu, cut)
        return [(call, dataclasses.replace(planned, entering=None, forward=forwards))]

    def gradients(checkpoints, every):
        arguments = (SCALE, x.initial_state, x.cu_seqlens, checkpoints, every, x.do, x.dstate)
        return call_prepared("chunk_gla_bwd", lambda c: backward.prepare(c, cut=False), x.q, x.k, x.v, x.g, *arguments)

    arguments = (x.q, x.k, x.v, x.g, SCALE, x.initial_state, False, x.cu_seqlens, CHUNK)
    _, _, kept = call_prepared("chunk_gla_fwd", lambda c: forward.prepare(c, cut=False), *arguments)
    expected = gradients(kept, CHUNK)
    monkeypatch.setattr(backward, "plan", plan_again)
    assert all(torch.equal(y, wanted) for y, wanted in zip(gradients(None, None), expected, strict=True))


@pytest.mark.parametrize("initial_state", [False, True])
def test_gradients_of_query_heads_are_summed_over_groups(device, initial_state):
    x = case(device, B=2, T=7, H=2, G=3, K=16, V=24, initial_state=initial_state)
    inputs = (x.q, x.k, x.v, x.g, x.initial_state)
    results = [None if y is None else torch.empty_like(y) for y in inputs]
    tensors = BackwardTensors(*inputs, None, None, x.do, None, *results)
    each = groups.for_query_heads(tensors)
    assert each.dq is tensors.dq
    for name, dim in (("dk", 2), ("dv", 2), ("dg", 2), ("dinitial_state", 1)):
        parts = getattr(each, name)
        assert (parts is None) == (getattr(tensors, name) is None)
        if parts is not None:
            assert parts.shape[dim] == 6
            parts.normal_()
    start(groups.launch_sums_over_groups(each, tensors))
    for parts, y, dim in ((each.dk, tensors.dk, 2), (each.dg, tensors.dg, 2), (each.dinitial_state, results[4], 1)):
        if y is not None:
            torch.testing.assert_close(y, parts.unflatten(dim, (2, 3)).sum(dim + 1).to(y.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["none", "mild", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_every_run(gates, dtype):
    x = case("cuda", B=2, T=200, H=2, K=128, V=128, gates=gates, dtype=dtype, initial_state=True)
    first, second = (gradients(x, states(x).float(), BK=64, BV=64) for _ in range(2))
    assert all(a is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))
