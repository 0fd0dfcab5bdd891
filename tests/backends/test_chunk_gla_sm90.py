"""The kernels of chunk_gla_fwd for Hopper against the float64 oracle; they run on compute capability 9.0 alone."""

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.calls import heads_first
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import GATES, gla_inputs
from gla_triton_kernels.gla import forward as launcher
from gla_triton_kernels.gla.sm90 import Division, fastest_division
from gla_triton_kernels.gla.sm90 import kernels as sm90
from tests.backends.prepared_calls import described
from tests.grid import grid

BUDGET = FORWARD[torch.bfloat16]
BUDGETS = {torch.bfloat16: BUDGET, torch.float16: FORWARD[torch.float16], torch.float32: 1e-3}
"""The allowed errors; float32 is computed under the matmul precision "high"."""
GATED = [gates for gates in GATES if gates != "none"]
LENGTHS = [(0, 65, 1, 0, 130, 3, 0), (64, 64), (0, 0, 5), (5, 0, 0), (200,)]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_sm90", "poisoned")]


@pytest.fixture(autouse=True)
def any_length(change_plans):
    """Makes the kernels for SM90 compute short sequences too."""
    change_plans("SM90_TOKENS", 0)
    change_plans("SM90_WIDE_TOKENS", 0)


def inputs(**sizes):
    x = gla_inputs(**{"dtype": torch.bfloat16, "gate_dtype": torch.float32, "device": "cuda", **sizes})
    return [x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens]


def prepared(arguments, cut=False):
    """Prepares a call by the kernels for SM90; fails if all of them refuse it."""
    kernels = (sm90.FORWARD, sm90.FORWARD_WIDE, sm90.FORWARD_HEAD)
    return launcher.prepare(described("chunk_gla_fwd", *arguments), cut, kernels)


def forward(q, k, v, g, scale, initial_state, cu_seqlens):
    arguments = (q, k, v, g, scale, initial_state, True, cu_seqlens, None, None)
    return prepared(arguments)(*arguments)[:2]


def check(q, k, v, g=None, initial_state=None, cu_seqlens=None, scale=0.3, cut=False):
    """Compares with the oracle, checks that a second run gives the same bits, and returns o and the final state."""
    arguments = (q, k, v, g, scale, initial_state, True, cu_seqlens, None, None)
    run = prepared(arguments, cut)
    (o, state, _), again = run(*arguments), run(*arguments)
    ref_o, ref_state = oracle.chunk_gla(q, k, v, g, scale, initial_state, cu_seqlens)
    assert relative_error(o, ref_o) <= BUDGETS[q.dtype]
    assert relative_error(state, ref_state) <= BUDGETS[q.dtype]
    assert torch.equal(o, again[0])
    assert torch.equal(state, again[1])
    return o, state


def each(pairs, **axes):
    """Returns every combination of values with each pair of K and V."""
    return [sizes for K, V in pairs for sizes in grid(K=K, V=V, **axes)]


@pytest.mark.parametrize(
    "sizes",
    [
        *each([(64, 64), (128, 128)], T=300, gates=[*GATES], gate_dtype=[torch.float32, torch.bfloat16]),
        *each([(8, 8), (16, 64), (40, 200), (64, 512), (96, 72), (128, 24), (120, 256)], T=130, gates=["mild", "-inf"]),
        *each(
            [(256, 512), (256, 64), (136, 128), (200, 40)],
            T=300,
            H=3,
            gates=GATED,
            gate_dtype=[torch.float32, torch.bfloat16],
        ),
        *grid(T=[1, 63, 64, 65, 129], K=256, V=256, initial_state=False),
        *grid(T=[1, 2, 63, 64, 65, 127, 128, 129, 1000], K=128, V=128),
        *grid(lengths=LENGTHS, K=128, V=128, gates=[*GATES]),
        *grid(lengths=LENGTHS, H=3, K=256, V=[72, 256], gates=GATED),
    ],
    ids=str,
)
def test_sizes(sizes):
    check(*inputs(**{"initial_state": True, **sizes}))


@pytest.mark.usefixtures("tf32_allowed")
@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 4, "R": 80, "T": 2000, "K": 64, "V": 64},
        {"B": 4, "R": 80, "T": 2000, "K": 128, "V": 64, "dtype": torch.float16},
        {"B": 4, "R": 50, "T": 2000, "K": 64, "V": 128, "dtype": torch.float32},
        {"B": 5, "R": 40, "T": 1500, "K": 256, "V": 128},
        {"B": 4, "H": 80, "T": 2000, "K": 64, "V": 64, "gate_form": "key"},
        {"B": 5, "H": 32, "T": 2000, "K": 128, "V": 128, "gate_form": "key", "dtype": torch.float16},
    ],
    ids=str,
)
def test_shared_chunks_have_the_same_bits(sizes, monkeypatch):
    q, k, v, g, initial_state, _ = inputs(**{"H": 1, "gate_form": "head", "initial_state": True, **sizes})
    divisions = []

    def division(*arguments):
        divisions.append(fastest_division(*arguments))
        return divisions[-1]

    monkeypatch.setattr(sm90, "fastest_division", division)
    shared = forward(q, k, v, g, 0.3, initial_state, None)
    assert any(x.programs for x in divisions)
    monkeypatch.setattr(sm90, "fastest_division", lambda jobs, *_: Division(max(jobs), None))
    for x, y in zip(shared, forward(q, k, v, g, 0.3, initial_state, None), strict=True):
        assert torch.equal(x, y)


OTHERS = [
    {"T": 300, "K": 128, "V": 128},
    {"T": 300, "K": 64, "V": 64},
    {"T": 130, "K": 40, "V": 200},
    {"lengths": (0, 65, 1, 0, 130, 3, 0), "K": 128, "V": 128},
    {"lengths": (0, 65, 1, 0, 130, 3, 0), "K": 128, "V": 128, "gate_form": "head", "R": 2},
    {"T": 300, "K": 128, "V": 64, "gate_form": "head", "R": 2},
    {"T": 300, "K": 128, "V": 128, "R": 3},
    {"lengths": (0, 65, 1, 0, 130, 3, 0), "K": 64, "V": 64, "R": 2},
    {"lengths": (0, 65, 1, 0, 130, 3, 0), "K": 64, "V": 128, "G": 2},
]


@pytest.mark.usefixtures("tf32_allowed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("sizes", OTHERS, ids=str)
def test_other_dtypes(change_plans, sizes, gates, dtype):
    x = inputs(**sizes, gates=gates, dtype=dtype, initial_state=True)
    check(*x)
    change_plans("segment_length", lambda *_: 128)
    check(*x, cut=True)


@pytest.mark.parametrize("gates", ["mild", "-inf"])
@pytest.mark.parametrize("sizes", [{"B": 2, "T": 300}, {"lengths": (0, 65, 1, 0, 130, 3, 0)}], ids=["dense", "packed"])
@pytest.mark.parametrize("groups", [{"G": 4}, {"R": 4}], ids=["queries", "values"])
@pytest.mark.parametrize("K", [64, 128, 256])
def test_groups(change_plans, K, groups, sizes, gates):
    x = inputs(H=2, K=K, V=K, gates=gates, initial_state=True, **groups, **sizes)
    check(*x)
    change_plans("segment_length", lambda *_: 128)
    check(*x, cut=True)


@pytest.mark.usefixtures("tf32_allowed")
@pytest.mark.parametrize(
    "sizes",
    [*grid(K=64, dtype=[torch.float16, torch.float32], gate_form=["key", "head"]), {"K": 64}, {"K": 256}],
    ids=str,
)
def test_a_packed_sequence_sees_nothing_of_the_next(sizes):
    q, k, v, g, state, offsets = inputs(lengths=(70, 70), V=64, initial_state=True, **sizes)
    for x in (q, k, v, g):
        x[:, 70:] = torch.nan
    o, states = forward(q, k, v, g, 0.3, state, offsets)
    ref_o, ref_state = oracle.chunk_gla(*(x[:, :70] for x in (q, k, v, g)), 0.3, state[:1])
    assert relative_error(o[:, :70], ref_o) <= BUDGETS[q.dtype]
    assert relative_error(states[:1], ref_state) <= BUDGETS[q.dtype]


@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("sizes", [{"B": 2, "T": 300}, {"lengths": (0, 65, 1, 0, 430, 3, 128)}], ids=str)
@pytest.mark.parametrize("K", [128, 136, 256])
def test_segments(change_plans, K, sizes, initial_state):
    change_plans("segment_length", lambda *_: 128)
    x = inputs(H=3, K=K, V=136, gates="-inf", initial_state=initial_state, **sizes)
    check(*x, cut=True)


def test_mild_and_other_chunks_by_turns():
    q, k, v, g, state, _ = inputs(T=64 * 6, K=128, V=128, initial_state=True)
    g[:, 64:128] *= 400
    g[:, 200, :, 5] = -torch.inf
    g[:, 330:, :, 7] = -3.0
    check(q, k, v, g, state)


@pytest.mark.parametrize("decay", [1.0, 79.0, 81.0, 7000.0])
def test_either_side_of_the_largest_decay_of_a_mild_chunk(decay):
    q, k, v, g, state, _ = inputs(T=128, K=128, V=128, initial_state=True)
    g[..., 3] = -decay / 64
    check(q, k, v, g, state)


@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("weak", [None, 1, 6, 32])
def test_halves_between_which_every_gate_forgets(weak, K):
    """Such halves of chunks are skipped, unless one gate of one channel does not forget."""
    q, k, v, g, *rest = inputs(T=128, K=K, V=128, gates="extreme")
    g[:] = -100
    if weak is not None:
        g[:, weak, :, 5] = -1.0
    check(q, k, v, g, *rest)


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_large_and_small_inputs(factor):
    q, k, v, g, state, _ = inputs(T=200, K=128, V=128, gates="strong", initial_state=True)
    check(q * factor, k * factor, v * factor, g, state * factor**2)


def test_strided():
    q, k, v, g, state, _ = inputs(T=150, H=3, K=64, V=64, initial_state=True)
    check(*(heads_first(x) for x in (q, k, v, g)), state.transpose(0, 1).contiguous().transpose(0, 1))
    wide = torch.cat([q, k, v], -1)
    check(*wide.split(64, -1), g, state)


def test_more_than_2_to_the_31_elements():
    """The last sequence of a tensor of more than 2^31 elements."""
    long, short = 2**20, 100
    q, k, v, g = (torch.randn(1, long + short, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    g.abs_().mul_(-0.05)
    offsets = torch.tensor([0, long, long + short], device="cuda")
    o, states = forward(q, k, v, g, 0.3, None, offsets)
    ref_o, ref_state = oracle.chunk_gla(*(x[:, long:] for x in (q, k, v, g)), 0.3)
    assert relative_error(o[:, long:], ref_o) <= BUDGET
    assert relative_error(states[1:], ref_state) <= BUDGET
