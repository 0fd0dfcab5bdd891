"""The kernel of recurrent_gla_step against the float64 oracle: any width, layout, pool and address."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import oracle_results
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import GATES, gla_inputs, token_of
from tests.backends.prepared_calls import call_prepared, described
from tests.kernels import INTERPRETED

pytest.importorskip("triton")

from gla_triton_kernels.gla.step.step import prepare

# Where a device rounds to the nearest bfloat16, Triton's interpreter rounds towards zero.
STATE_BUDGET = {**FORWARD, torch.bfloat16: (2 if INTERPRETED else 1) * FORWARD[torch.bfloat16]}
WIDTHS = [(512, 1), (1, 512), (129, 31)] + ([] if INTERPRETED else [(512, 512), (300, 257), (128, 128)])

pytestmark = pytest.mark.kernels


def step(q, k, v, g, state, scale=0.3, state_indices=None, inplace=False, bonus=None):
    arguments = (q, k, v, g, state, scale, state_indices, None, bonus, inplace)
    return call_prepared("recurrent_gla_step", prepare, *arguments)


def prepared_step(q, k, v, g, state, inplace=False):
    """Prepares a step, and returns the function that computes steps like it, in place or not."""
    run = prepare(described("recurrent_gla_step", q, k, v, g, state, 0.3, None, None, None, inplace))
    return lambda q, k, v, g, state: run(q, k, v, g, state, 0.3, None, None, None, inplace)


def remembered_step(*arguments, scale=0.3, inplace=False):
    """Computes a step through gla_core, which keeps prepared calls."""
    return gla.recurrent_gla_step(*arguments, scale, inplace=inplace, backend="triton_fused")


def inputs(**sizes):
    """Makes q, k, v, g of one token, and a state [B, H, K, V]."""
    x = gla_inputs(T=1, initial_state=True, **sizes)
    return (*(None if y is None else y[:, 0] for y in (x.q, x.k, x.v, x.g)), x.initial_state)


def expected(q, k, v, g, state, scale=0.3, rows=None):
    """Returns the oracle's o and states. `rows` is state_indices as a list."""
    rows = list(range(len(q))) if rows is None else rows
    alpha = torch.ones_like(k).double() if g is None else g.double().exp()
    new, o = state.double().clone(), torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    used = [b for b, p in enumerate(rows) if 0 <= p < len(state)]
    pool = [rows[b] for b in used]
    token = (x.double()[used] for x in (q, k, v, alpha))
    o[used], new[pool] = oracle.recurrent_gla_step(*token, state.double()[pool], scale)
    return o, new


def check(results, references, dtype, state_dtype=torch.float32):
    assert relative_error(results[0], references[0]) <= FORWARD[dtype]
    assert relative_error(results[1], references[1]) <= STATE_BUDGET[state_dtype]
    assert results[0].is_contiguous()


def strided(x, spare):
    """Copies x into a tensor with `spare` more of every dimension but the last."""
    if x is None:
        return None
    memory = torch.full([n + spare for n in x.shape[:-1]] + [x.shape[-1]], torch.nan, dtype=x.dtype, device=x.device)
    view = memory[tuple(slice(spare, None) for _ in x.shape[:-1])]
    return view.copy_(x)


@settings(max_examples=15 if INTERPRETED else 60)
@given(
    B=st.integers(0, 4),
    H=st.integers(1, 3),
    G=st.integers(1, 3),
    K=st.integers(1, 70),
    V=st.integers(1, 70),
    gates=st.sampled_from(GATES),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    gate_dtype=st.sampled_from([None, torch.float32]),
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, -0.5, 0.0]),
    inplace=st.booleans(),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_layout(device, state_dtype, scale, inplace, spare, dtype, **sizes):
    *token, state = inputs(**sizes, dtype=dtype, device=device)
    token, state = [strided(x, spare) for x in token], strided(state.to(state_dtype), spare)
    before, reference = state.clone(), expected(*token, state, scale)
    o, new = step(*token, state, scale, inplace=inplace)
    check((o, new), reference, dtype, state_dtype)
    assert new is state if inplace else torch.equal(state, before) and new.is_contiguous()


@settings(max_examples=15 if INTERPRETED else 60)
@given(
    B=st.integers(0, 4),
    H=st.integers(1, 3),
    groups=st.sampled_from([{"G": 1}, {"G": 3}, {"R": 3}]),
    K=st.integers(1, 70),
    V=st.integers(1, 70),
    gates=st.sampled_from(GATES),
    gate_form=st.sampled_from(["constant", "head", "key"]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    has_slots=st.booleans(),
    has_float32_bonus=st.booleans(),
    inplace=st.booleans(),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_any_bonus(device, B, H, K, groups, has_slots, has_float32_bonus, inplace, spare, dtype, seed, **sizes):
    x = gla_inputs(B=B, T=1, H=H, K=K, **groups, dtype=dtype, seed=seed, device=device, initial_state=True, **sizes)
    token, state = [token_of(y, 0) for y in (x.q, x.k, x.v, x.g)], strided(x.initial_state, spare)
    bonus = strided(torch.randn(H, K, device=device).to(torch.float32 if has_float32_bonus else dtype), spare)
    rows = torch.arange(B, device=device).flip(0) - 1 if has_slots else None  # the last row is skipped
    passed = dict(zip("qkvg", token, strict=True)) | {"state": state.clone(), "slots": rows, "bonus": bonus}
    wanted = oracle_results("recurrent_gla_step", passed, scale=0.3)
    o, new = step(*token, state, state_indices=rows, inplace=inplace, bonus=bonus)
    check((o, new), (wanted["o"], wanted["state"]), dtype)
    assert new is state if inplace else torch.equal(state, passed["state"])


def test_calls_that_differ_in_the_bonus_only(device):
    """A call must not replay the launch of a call with another bonus, or with none."""
    *token, state = inputs(B=2, H=2, K=16, V=8, device=device)
    arguments = dict(zip("qkvg", token, strict=True)) | {"state": state}
    bonuses = [torch.randn(2, 16, device=device) for _ in range(2)]
    memory = torch.randn(33, device=device)
    for bonus in (*bonuses, None, memory[1:].view(2, 16), *bonuses, bonuses[0].half().float()):
        wanted = oracle_results("recurrent_gla_step", arguments | {"bonus": bonus}, scale=0.3)
        results = gla.recurrent_gla_step(*token, state, 0.3, bonus=bonus, backend="triton_fused")
        check(results, (wanted["o"], wanted["state"]), torch.float32)


@pytest.mark.parametrize(("K", "V"), WIDTHS)
@pytest.mark.parametrize("G", [1, 5])
def test_widths(K, V, G, device):
    arguments = inputs(B=2, H=2, G=G, K=K, V=V, device=device)
    check(step(*arguments), expected(*arguments), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3, 128])
@pytest.mark.parametrize("K", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles(B, K, G, state_dtype, gate_dtype):
    """Tests the tiles for few states and for many, of each width."""
    sizes = {"B": B, "H": 4, "G": G, "K": K, "V": K, "gates": "-inf", "device": "cuda"}
    *token, state = inputs(**sizes, dtype=torch.bfloat16, gate_dtype=gate_dtype)
    state = state.to(state_dtype)
    reference = expected(*token, state)
    check(step(*token, state), reference, torch.bfloat16, state_dtype)
    in_place = prepared_step(*token, state, inplace=True)
    again = [in_place(*token, state.clone()) for _ in range(2)]
    check(again[0], reference, torch.bfloat16, state_dtype)
    assert all(torch.equal(x, y) for x, y in zip(*again, strict=True))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("rows", [[2, 0, 5], [-1, 0, 5], [3, -7, 6], [-1, -1, 99], [0, 2**31 - 1, -(2**31)]], ids=str)
def test_pool(rows, inplace, index_dtype, device):
    """Rows read and write their own state; rows outside the pool give 0 and write nothing."""
    *token, _ = inputs(B=3, H=2, G=2, K=8, V=12, gates="-inf", device=device)
    memory = torch.randn(12, 2, 8, 12, device=device)
    before, pool = memory.clone(), memory[3:9]
    reference = expected(*token, before[3:9], rows=rows)
    o, new = step(*token, pool, state_indices=torch.tensor(rows, dtype=index_dtype, device=device), inplace=inplace)
    check((o, new), reference, torch.float32)
    skipped = [b for b, p in enumerate(rows) if not 0 <= p < 6]
    assert torch.equal(o[skipped], torch.zeros_like(o[skipped]))
    assert new is pool if inplace else torch.equal(memory, before)
    written = [3 + p for p in rows if 0 <= p < 6] if inplace else []
    kept = [i for i in range(12) if i not in written]
    assert torch.equal(memory[kept], before[kept])


@pytest.mark.parametrize("inplace", [False, True])
def test_pool_of_strided_states(inplace, device):
    *token, _ = inputs(B=2, H=3, K=16, V=20, device=device)
    pool = torch.randn(3, 5, 16, 20, device=device).transpose(0, 1)
    reference = expected(*token, pool, rows=[4, 1])
    o, new = step(*token, pool, state_indices=torch.tensor([4, 1], device=device), inplace=inplace)
    check((o, new), reference, torch.float32)
    assert new is pool if inplace else new.is_contiguous()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("rows", [None, [4, 1], [-1, 7]], ids=str)
@pytest.mark.parametrize(("K", "V"), [(16, 20), (37, 8)])
def test_states_whose_keys_are_contiguous(K, V, rows, inplace, device):
    *token, _ = inputs(B=2, H=3, G=2, K=K, V=V, device=device)
    pool = torch.randn(2 if rows is None else 5, 3, V, K, device=device).mT
    reference, before = expected(*token, pool, rows=rows), pool.clone()
    indices = None if rows is None else torch.tensor(rows, device=device)
    o, new = step(*token, pool, state_indices=indices, inplace=inplace)
    check((o, new), reference, torch.float32)
    assert new.mT.is_contiguous()
    assert new is pool if inplace else torch.equal(pool, before)


@pytest.mark.parametrize("rows", [[], [0, -1]], ids=str)
def test_nobody(rows, device):
    """An empty batch, and an empty pool."""
    *token, _ = inputs(B=len(rows), H=2, K=8, V=12, device=device)
    pool = torch.randn(0 if rows else 3, 2, 8, 12, device=device)
    o, new = step(*token, pool, state_indices=torch.tensor(rows, dtype=torch.int64, device=device))
    assert torch.equal(o, torch.zeros(len(rows), 2, 12, device=device))
    assert torch.equal(new, pool)


def test_expanded_inputs(device):
    """Strides of 0: one token for all rows and heads."""
    *token, state = inputs(B=3, H=2, G=2, K=16, V=16, device=device)
    token = [x[:1, :1].expand(x.shape) for x in token]
    check(step(*token, state), expected(*token, state), torch.float32)


def test_calls_that_differ_in_one_thing_only(device):
    """A call must not reuse what is kept of another call only because the shapes are the same."""
    *token, state = inputs(B=2, H=2, K=32, V=8 if INTERPRETED else 32, device=device)
    layouts = [
        lambda x: x,
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),  # an address that is no multiple of 16
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: strided(x, 1),
        lambda x: x,
    ]
    for change in range(5):
        for layout in layouts:
            arguments = [layout(x.clone()) if i == change else x.clone() for i, x in enumerate((*token, state))]
            reference = expected(*arguments)
            check(remembered_step(*arguments), reference, torch.float32)
            check(remembered_step(*arguments, inplace=True), reference, torch.float32)
            no_gate = (*arguments[:3], None, arguments[4])
            check(remembered_step(*no_gate, scale=-2.0), expected(*no_gate, scale=-2.0), torch.float32)


@pytest.mark.gpu
def test_waits_for_the_kernels_before_and_is_waited_for():
    """A step may start while the kernel before it ends, also in a graph. It must not read or write too early."""
    *token, state = inputs(B=8, H=16, K=128, V=128, dtype=torch.bfloat16, gate_dtype=torch.float32, device="cuda")
    q, k, v, g = token
    work, total = torch.zeros_like(state), torch.zeros_like(v)
    step = prepared_step(*token, work, inplace=True)

    def steps():
        work.copy_(state)
        total.zero_()
        for i in range(20):
            gate = g * (i + 1)
            o, _ = step(q, k * (1 + i), v, gate, work)
            o, _ = step(q, k, o, gate, work)
            total.add_(o)
            work.mul_(0.5)

    with torch.no_grad():
        steps()
        torch.cuda.synchronize()
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            steps()
        torch.cuda.synchronize()
        eager = work.clone(), total.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        for _ in range(20):
            graph.replay()
        replayed = work.clone(), total.clone()

        slow_work, slow_total = state.clone(), torch.zeros_like(v)
        for i in range(20):
            gate = g * (i + 1)
            o = v
            for keys in (k * (1 + i), k):
                torch.cuda.synchronize()
                o, _ = step(q, keys, o, gate, slow_work)
                torch.cuda.synchronize()
            slow_total.add_(o)
            slow_work.mul_(0.5)
    for actual in (eager, replayed):
        assert torch.equal(actual[0], slow_work)
        assert torch.equal(actual[1], slow_total)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["PHKV", "HPKV", "KPHV"])
def test_a_pool_of_more_than_2_to_31_elements(order):
    """The pool has 2^32 elements, so that every stride but the last exceeds 2^31 when multiplied by its index."""
    *token, _ = inputs(B=2, H=4, K=128, V=128, dtype=torch.bfloat16, device="cuda")
    sizes, rows = {"P": 2**16 + 1, "H": 4, "K": 128, "V": 128}, [2**16, 1]
    memory = torch.zeros([sizes[name] for name in order], dtype=torch.bfloat16, device="cuda")
    pool = memory.permute([order.index(name) for name in "PHKV"])
    pool[rows] = torch.randn(2, 4, 128, 128, device="cuda").bfloat16()
    reference = expected(*token, pool[rows])
    o, new = step(*token, pool, state_indices=torch.tensor(rows, device="cuda"), inplace=True)
    check((o, new[rows]), reference, torch.bfloat16, torch.bfloat16)
    pool[rows] = 0
    assert not memory.any()
