"""The kernels of softmax_attention on their own: the edges of blocks and of splits of the keys, masks, layouts."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import layout_of
from gla_core.workloads.inputs import normal
from gla_triton_kernels.softmax_attention.plan import plan_splits
from gla_triton_runtime.architecture import gpu_of_call
from tests.backends.prepared_calls import call_prepared, described, preparing
from tests.kernels import INTERPRETED

pytest.importorskip("triton")

from gla_triton_kernels.softmax_attention import launches
from gla_triton_runtime.prepared import Launches

WIDTHS = [(16, 16), (128, 128), (300, 24)]
WIDTHS += [] if INTERPRETED else [(64, 64), (256, 256), (512, 512), (40, 512)]
UNLIKE = [(38, 9), (24, 120)] + ([] if INTERPRETED else [(46, 8), (66, 17), (120, 24), (8, 256)])
ROWS = [1, 70] if INTERPRETED else [1, 17, 150]
KEYS = 150 if INTERPRETED else 300  # several blocks
IN_SPLITS = [("triton_fused", None), ("parallel_scan", 3)] + ([] if INTERPRETED else [("parallel_scan", 20)])

pytestmark = pytest.mark.kernels


@pytest.fixture(params=IN_SPLITS, ids=str)
def prepare(request):
    """Returns the function by which a backend prepares a call.

    For parallel_scan, the function may divide the keys into a given number of splits, if there are enough blocks of
    keys.
    """
    backend, splits = request.param
    if splits is None:
        return preparing(backend, "softmax_attention")

    def in_splits(call):
        plan, Tk = plan_splits(call, gpu_of_call(call)), call.dims["Tk"]
        keys = max(1, -(-Tk // (splits * plan.BT))) * plan.BT
        return launches.prepare(call, dataclasses.replace(plan, split=keys if keys < Tk else None))

    return in_splits


@pytest.fixture
def softmax_attention(prepare):
    return functools.partial(call_prepared, "softmax_attention", prepare)


as_called = pytest.mark.parametrize(
    "prepare", [("triton_fused", None), ("parallel_scan", None)], indirect=True, ids=str
)
"""With as many splits as each call is worth."""


@pytest.fixture(params=[torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    """Returns a dtype; only float32 if kernels are interpreted. Tests of blocks use float16 too."""
    return request.param


def inputs(device, dtype=torch.float32, *, B=1, Tq=20, Tk=20, H=1, G=1, K=16, V=16, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    shapes = ((B, Tq, H * G, K), (B, Tk, H, K), (B, Tk, H, V))
    return tuple(normal(shape, dtype, generator) for shape in shapes)


def check(softmax_attention, q, k, v, causal, scale=None, budget=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    budget = FORWARD[q.dtype] if budget is None else budget
    o, lse = softmax_attention(q, k, v, scale, causal)
    o_ref, lse_ref = oracle.softmax_attention(q, k, v, scale, causal)
    assert o.is_contiguous()
    assert lse.is_contiguous()
    assert (o.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert relative_error(o, o_ref) <= budget
    assert relative_error(lse, lse_ref) <= budget
    return o, lse


@as_called
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("K", "V"), WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_block_size(softmax_attention, device, dtype, K, V, rows, causal):
    check(softmax_attention, *inputs(device, dtype, Tq=rows, Tk=KEYS, K=K, V=V), causal)


@as_called
@pytest.mark.parametrize("width", [16] if INTERPRETED else [16, 128, 256, 512])
@pytest.mark.parametrize("rows", [17] if INTERPRETED else ROWS)
def test_tf32(softmax_attention, device, tf32_allowed, width, rows):
    check(softmax_attention, *inputs(device, Tq=rows, Tk=300, K=width, V=width), True, budget=1e-3)


@pytest.mark.parametrize("Tq", [1, 65] if INTERPRETED else [1, 127, 129, 257])
@pytest.mark.parametrize("Tk", [1, 64, 257] if INTERPRETED else [1, 63, 64, 65, 257, 300, 500])
@pytest.mark.parametrize("causal", [False, True])
def test_edges_of_blocks_and_splits(softmax_attention, device, dtype, Tq, Tk, causal):
    check(softmax_attention, *inputs(device, dtype, Tq=Tq, Tk=Tk), causal)


@pytest.mark.parametrize(("K", "V"), UNLIKE)
@pytest.mark.parametrize("causal", [False, True])
def test_values_narrower_or_wider_than_keys(softmax_attention, device, dtype, K, V, causal):
    Tq = 5 if INTERPRETED else 23
    check(softmax_attention, *inputs(device, dtype, Tq=Tq, Tk=150, G=3, K=K, V=V), causal)
    x = inputs(device, dtype, Tq=3 * Tq, Tk=150, K=K + 1, V=V + 1)
    check(softmax_attention, *(y[..., 1:] for y in x), causal)  # at odd addresses


@as_called
@pytest.mark.parametrize(
    ("Tq", "Tk"),
    [(65, 1), (128, 128), (129, 700), (700, 129), (1000, 1000), (1, 20_000), (3, 16_385), (64, 9_000), (700, 5000)],
)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.gpu
def test_many_queries_and_keys(softmax_attention, Tq, Tk, width, causal):
    for half in (torch.float16, torch.bfloat16):
        check(softmax_attention, *inputs("cuda", half, B=2, Tq=Tq, Tk=Tk, H=2, G=2, K=width, V=width), causal)


@pytest.mark.parametrize("G", [3] if INTERPRETED else [2, 3, 8])
@pytest.mark.parametrize("Tq", [5] if INTERPRETED else [1, 5, 37, 70])
def test_grouped_queries(softmax_attention, device, dtype, G, Tq):
    check(softmax_attention, *inputs(device, dtype, B=2, Tq=Tq, Tk=290, H=2, G=G, K=24, V=40), True)


@pytest.mark.parametrize("Tk", [0, 3, 130] if INTERPRETED else [0, 3, 130, 290])
def test_queries_without_keys(softmax_attention, device, dtype, Tk):
    Tq = 150 if INTERPRETED else 300
    x = inputs(device, dtype, Tq=Tq, Tk=Tk)
    o, lse = check(softmax_attention, *x, True) if Tk else softmax_attention(*x, 0.25, True)
    assert bool(o[:, : Tq - Tk].isnan().all())
    assert bool(lse[:, : Tq - Tk].isneginf().all())


@pytest.mark.parametrize("shape", [{"B": 0}, {"Tq": 0}, {"H": 0}])
def test_nothing_to_compute(prepare, device, shape):
    """A call may even have no heads. gla_core refuses that, so the call is described without its checks."""
    q, k, v = inputs(device, **shape)
    (B, Tq, Hq, K), (_, Tk, H, V) = q.shape, v.shape
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "Hq": Hq, "K": K, "V": V}
    facts = {"scalars": {"causal": True}, "layouts": {"q": layout_of(q), "k": layout_of(k), "v": layout_of(v)}}
    run = prepare(ABSTRACT_OPS["softmax_attention"].call(sizes, q.device, q.dtype, **facts))
    o, lse = run(q, k, v, 0.3, True)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])


@pytest.mark.parametrize("scale", [-0.7, 0.0, 30.0])
def test_any_scale(softmax_attention, device, dtype, scale):
    check(softmax_attention, *inputs(device, dtype, Tq=17 if INTERPRETED else 70, Tk=300, K=32), True, scale)


@pytest.mark.thorough
@pytest.mark.parametrize("scales", [(0.7, -0.7, 0.7), (-0.7, 0.7, -0.7)], ids=str)
@pytest.mark.parametrize("view", ["slice", "expanded", "heads_first", "odd"])
def test_scales_of_either_sign_of_a_call_that_is_prepared_once(prepare, device, dtype, view, scales):
    """For a negative scale, queries are negated with the same strides, so that recorded launches find them."""
    Tq, Tk, width = (9, 70, 24) if INTERPRETED else (130, 300, 128)
    q, k, v = inputs(device, dtype, B=2, Tq=Tq, Tk=Tk, H=2, K=width, V=width)
    q = {
        "slice": lambda: torch.nn.functional.pad(q, (8, 16))[..., 8:-16],
        "expanded": lambda: q[:1, :, :1].expand(q.shape),
        "heads_first": lambda: q.transpose(1, 2).contiguous().transpose(1, 2),
        "odd": lambda: torch.nn.functional.pad(q, (1, 0))[..., 1:],
    }[view]()
    run = prepare(described("softmax_attention", q, k, v, scales[0], True))
    for scale in scales:
        check(run, q, k, v, True, scale)


def test_negated_queries_have_the_strides_that_launches_were_described_for(prepare, device, monkeypatch):
    taken, replay = [], Launches.replay

    def noted(launches, tensors, *floats):
        taken.append((tensors[0].stride(), *floats))
        return replay(launches, tensors, *floats)

    monkeypatch.setattr(Launches, "replay", noted)
    q, k, v = inputs(device, Tq=9, Tk=20, H=2)
    q = torch.nn.functional.pad(q, (4, 8))[..., 4:-8]
    run = prepare(described("softmax_attention", q, k, v, 1.0, True))
    taken.clear()  # the rehearsal's launches
    for scale in (0.5, -0.5):
        run(q, k, v, scale, True)
    assert taken == [(q.stride(), 0.5)] * 2


@pytest.mark.parametrize("where", ["first", "middle", "last", "everywhere"])
def test_scores_that_are_minus_infinity(softmax_attention, device, where):
    """Positive queries do not see keys of -inf, and a query that sees no other key gives NaN, as in PyTorch."""
    q, k, v = inputs(device, Tq=17 if INTERPRETED else 70, Tk=400)
    unseen = {"first": slice(300), "middle": slice(3, 150), "last": slice(150, None), "everywhere": slice(None)}[where]
    q, k[:, unseen, :, 0] = q.abs(), -torch.inf
    o, lse = check(softmax_attention, q, k, v, False)
    if where == "everywhere":
        assert bool(o.isnan().all())
        assert bool(lse.isneginf().all())


def test_infinite_scores_as_in_torch(softmax_attention, device):
    q, k, v = inputs(device, Tq=3, Tk=400)
    q, k[:, 270, :, 0] = q.abs(), torch.inf
    o, lse = softmax_attention(q, k, v, 0.25, False)
    assert bool(o.isnan().all())
    assert not bool(lse.isfinite().any())


@pytest.mark.parametrize("K", [41] if INTERPRETED else [16, 40, 41])
def test_layouts(softmax_attention, device, dtype, K):
    Tq, Tk = (9, 100) if INTERPRETED else (70, 300)
    q, k, v = inputs(device, dtype, B=2, Tq=Tq, Tk=Tk, H=3, G=2, K=K, V=K)
    expected = check(softmax_attention, q, k, v, True)

    def same(*tensors):
        for out, ref in zip(softmax_attention(*tensors, K**-0.5, True), expected, strict=True):
            torch.testing.assert_close(out, ref, equal_nan=True, rtol=1e-2, atol=1e-3)

    same(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    same(*(torch.nn.functional.pad(x, (3, 5))[..., 3:-5] for x in (q, k, v)))
    same(*(torch.nn.functional.pad(x, (8, 8, 1, 1, 2, 0))[:, 2:, 1:-1, 8:-8] for x in (q, k, v)))
    check(softmax_attention, q, k[:, :, :1].expand(-1, -1, 3, -1), v[:1].expand(2, -1, -1, -1), True)


@pytest.mark.gpu
def test_the_same_bits_every_run(prepare, dtype):
    x = inputs("cuda", dtype, Tq=300, Tk=600, G=2, K=64, V=64)
    softmax_attention = prepare(described("softmax_attention", *x, 0.1, True))
    first = softmax_attention(*x, 0.1, True)
    for _ in range(3):
        assert all(map(torch.equal, first, softmax_attention(*x, 0.1, True)))


@as_called
@settings(max_examples=6 if INTERPRETED else 25)
@given(
    Tq=st.integers(1, 40 if INTERPRETED else 140),
    Tk=st.integers(1, 300 if INTERPRETED else 600),
    H=st.integers(1, 2),
    G=st.integers(1, 4),
    K=st.integers(1, 70),
    V=st.integers(1, 70),
    causal=st.booleans(),
    scale=st.floats(-2, 2, width=16),
    seed=st.integers(0, 2**20),
)
def test_any_sizes(softmax_attention, device, Tq, Tk, H, G, K, V, causal, scale, seed):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    check(softmax_attention, *inputs(device, dtype, Tq=Tq, Tk=Tk, H=H, G=G, K=K, V=V, seed=seed), causal, scale)


@as_called
@pytest.mark.gpu
def test_more_elements_than_32_bits_address(softmax_attention):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    k = torch.zeros(1, 2**14 + 64, 1024, 128, dtype=torch.bfloat16, device="cuda")  # over 2^31 elements
    q, tail, v = inputs("cuda", torch.bfloat16, Tq=64, Tk=64, K=128, V=128)
    k[:, -64:, -1:] = tail
    check(softmax_attention, q, k[:, -64:, -1:], v, True)
    many, head = k[:, :, 1020:], k[:, :, 1023:]
    o, lse = softmax_attention(q.expand(1, 64, 4, 128), many, many, 1.0, True)
    ref = oracle.softmax_attention(q, head, head, 1.0, True)
    assert relative_error(o[:, :, 3:], ref[0]) <= FORWARD[torch.bfloat16]
    assert relative_error(lse[:, :, 3:], ref[1]) <= FORWARD[torch.bfloat16]
