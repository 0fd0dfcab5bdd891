"""Layers of every kind in parts: token by token, packed, with padding, in a pool and compiled, against whole calls."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gla_core.nn import GLAState

POOL, INDICES = 6, [4, -1, 0, 2]
MASK = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 1, 0],
        [0, 1, 0, 1, 1, 0, 0, 1],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
)


def inputs(*shape):
    return torch.randn(*shape, 16, dtype=torch.float64)


def states(layer, N):
    """Returns states of N sequences that have read 1 to N tokens."""
    lengths = torch.arange(N + 1)
    _, state = layer(inputs(1, N * (N + 1) // 2), output_final_state=True, cu_seqlens=lengths.cumsum(0))
    return each(state, torch.Tensor.detach)


def each(state, function):
    conv = state.conv and tuple(map(function, state.conv))
    return GLAState(function(state.recurrent), conv, None if state.position is None else function(state.position))


def tensors(state):
    return [x for x in (state.recurrent, *(state.conv or ()), state.position) if x is not None]


def row(state, i):
    return each(state, lambda tensor: tensor[i : i + 1])


def assert_same(actual, expected):
    assert isinstance(actual, GLAState)
    assert (actual.position is None) == (expected.position is None)
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fresh", [False, True])
def test_prefill_then_steps(layer, fresh):
    """After a prompt of any length, a step or another call reads what follows."""
    x, before = inputs(3, 12), layer.initial_state(3) if fresh else states(layer, 3)
    whole, final = layer(x, None if fresh else before, output_final_state=True)
    rows, after = [], [before]
    for t in range(12):
        y, state = layer.step(x[:, t], each(after[t], torch.clone), inplace=t % 2 == 1)
        rows.append(y)
        after.append(state)
    torch.testing.assert_close(torch.stack(rows, 1), whole, rtol=1e-10, atol=1e-10)
    assert_same(after[-1], final)
    for prompt in (0, 1, 2, 3, 7, 9):
        y, state = layer(x[:, :prompt], before, output_final_state=True)
        assert_same(state, after[prompt])
        rest, last = layer(x[:, prompt:], state, output_final_state=True)
        torch.testing.assert_close(torch.cat([y, rest], 1), whole, rtol=1e-10, atol=1e-10)
        assert_same(last, final)
        y, state = layer.step(x[:, prompt], each(state, torch.clone), inplace=prompt % 2 == 1)
        torch.testing.assert_close(y, rows[prompt], rtol=1e-10, atol=1e-10)
        assert_same(state, after[prompt + 1])


@pytest.mark.parametrize("fresh", [False, True])
def test_packed_is_separate(layer, fresh):
    """Rows outside the sequences have y = 0 and no gradient."""
    lengths, before = [3, 0, 70, 1, 2], layer.initial_state(5) if fresh else states(layer, 5)
    x = inputs(1, 80).requires_grad_()
    parts = x[:, 2:78].split(lengths, 1)
    separate = [layer(part, row(before, i), output_final_state=True) for i, part in enumerate(parts)]
    alone, dy, wanted = torch.cat([y for y, _ in separate], 1), torch.randn_like(x), [x, *layer.parameters()]
    expected = torch.autograd.grad(alone, wanted, dy[:, 2:78])
    for dtype, longest in ((torch.int32, None), (torch.int64, 70)):
        offsets = torch.tensor([2, *lengths], dtype=dtype).cumsum(0, dtype=dtype)
        y, state = layer(x, None if fresh else before, True, offsets, longest)
        torch.testing.assert_close(y[:, 2:78], alone, rtol=1e-10, atol=1e-10)
        assert not y[:, :2].any()
        assert not y[:, 78:].any()
        for i, (_, after) in enumerate(separate):
            assert_same(row(state, i), after)
        torch.testing.assert_close(torch.autograd.grad(y, wanted, dy), expected, rtol=1e-9, atol=1e-9)


def test_packed_without_states_and_without_sequences(layer):
    x = inputs(1, 8)
    y, _ = layer(x, cu_seqlens=torch.tensor([0, 3, 8]))
    torch.testing.assert_close(y, torch.cat([layer(x[:, :3])[0], layer(x[:, 3:])[0]], 1), rtol=1e-10, atol=1e-10)
    y, state = layer(x, output_final_state=True, cu_seqlens=torch.tensor([0]))
    assert not y.any()
    assert_same(state, layer.initial_state(0))


def test_padding_changes_nothing(layer):
    """A mask has any dtype. The last columns of a longer one count."""
    x, before, states_after = inputs(*MASK.shape).requires_grad_(), states(layer, len(MASK)), []
    alone = torch.zeros_like(x)
    for i, tokens in enumerate(MASK.bool()):
        y, after = layer(x[i : i + 1, tokens], row(before, i), output_final_state=True)
        alone[i, tokens] = y[0]
        states_after.append(after)
    padded = torch.where(MASK[..., None].bool(), x, torch.nan)
    dy, wanted = torch.randn_like(x), [x, *layer.parameters()]
    expected = torch.autograd.grad(alone, wanted, dy)
    for mask in (MASK, MASK.bool(), MASK.float(), torch.cat([1 - MASK, MASK], 1)):
        y, state = layer(padded, before, output_final_state=True, attention_mask=mask)
        torch.testing.assert_close(y, alone, rtol=1e-10, atol=1e-10)
        assert not y[MASK == 0].any()
        for i, after in enumerate(states_after):
            assert_same(row(state, i), after)
        actual = torch.autograd.grad(layer(x, before, attention_mask=mask)[0], wanted, dy)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        assert not actual[0][MASK == 0].any()


def rows_alone(layer, x, pool, indices):
    """Computes `layer.step` in a pool of states one row after the other."""
    y, after = torch.zeros_like(x), each(pool, torch.clone)
    for b, i in enumerate(indices):
        if 0 <= i < POOL:
            y[b : b + 1], new = layer.step(x[b : b + 1], row(pool, i))
            for to, tensor in zip(tensors(after), tensors(new), strict=True):
                to[i] = tensor[0]
    return y, after


@pytest.mark.parametrize("indices", [INDICES, [-1, -1], [3, 0, -1], [POOL, 0, 5], [POOL, -1], []], ids=str)
def test_rows_of_a_pool(layer, indices):
    x, before = inputs(len(indices)), states(layer, POOL)
    expected, after = rows_alone(layer, x, before, indices)
    for inplace, dtype in ((False, torch.int32), (True, torch.int64)):
        pool = each(before, torch.clone)
        y, state = layer.step(x, pool, inplace, torch.tensor(indices, dtype=dtype))
        torch.testing.assert_close(y, expected)
        assert_same(state, after)
        assert (state is pool) == inplace
        assert_same(pool, after if inplace else before)


def test_a_step_in_place_is_a_step(layer):
    x, state = inputs(POOL), states(layer, POOL)
    expected, after = layer.step(x, state)
    memory = [tensor.data_ptr() for tensor in tensors(state)]
    y, same = layer.step(x, state, inplace=True)
    assert same is state
    assert [tensor.data_ptr() for tensor in tensors(state)] == memory
    torch.testing.assert_close(y, expected)
    assert_same(state, after)


def test_nothing_waits_for_a_value(layer):
    with FakeTensorMode(allow_non_fake_inputs=True):  # raises wherever a value is read
        x, rows = torch.zeros(3, 16, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
        y, _ = layer.step(x, layer.initial_state(POOL), False, rows)
        written, _ = layer.step(x, layer.initial_state(POOL), True, rows)
        packed, _ = layer(torch.zeros(1, 7, 16, dtype=torch.float64), None, True, rows)
    assert (y.shape, written.shape, packed.shape) == ((3, 16), (3, 16), (1, 7, 16))


@pytest.mark.thorough
@pytest.mark.parametrize("layer", ["retention", "mamba2", "kda", "gated_delta_net", "delta_net"], indirect=True)
def test_compiled_once(layer):
    torch._dynamo.reset()
    options = {"fullgraph": True, "backend": "eager", "dynamic": True}
    forward, step = (torch.compile(f, **options) for f in (layer.forward, layer.step))
    for i, N in enumerate((5, 6)):
        before, offsets = states(layer, N), (torch.arange(N + 1) * 2).cumsum(0)
        x, token = inputs(1, int(offsets[-1])), inputs(N)
        expected, after = layer(x, before, True, offsets)
        expected_token, last = layer.step(token, after)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            y, state = forward(x, before, True, offsets)
            y_token, state = step(token, state, inplace=True)
        torch.testing.assert_close((y, y_token), (expected, expected_token))
        assert_same(state, last)


@pytest.mark.gpu
def test_a_graph_decodes(layer):
    """Tokens and states change between replays; the positions do too."""
    layer = layer.float().cuda()
    state, x = layer.initial_state(3), torch.zeros(3, 16, device="cuda")
    layer.step(x, each(state, torch.clone), inplace=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = layer.step(x, state, inplace=True)
    each(state, torch.Tensor.zero_)
    check = each(state, torch.clone)
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected, check = layer.step(x, check)
        torch.testing.assert_close(y, expected)
    torch.testing.assert_close(tuple(state), tuple(check))


@pytest.mark.gpu
def test_a_graph_decodes_in_a_pool(layer):
    """Rows, states and tokens change between replays, and the host never waits."""
    layer = layer.float().cuda()
    state = layer.initial_state(POOL)
    x, rows = torch.zeros(3, 16, device="cuda"), torch.tensor([0, 1, -1], device="cuda")
    layer.step(x, each(state, torch.clone), True, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = layer.step(x, state, True, rows)
    check = layer.initial_state(POOL)
    each(state, torch.Tensor.zero_)
    for indices in ([0, 1, -1], [5, -1, 0], [-1, -1, -1]):
        x.normal_()
        rows.copy_(torch.tensor(indices))
        graph.replay()
        expected, check = rows_alone(layer, x, check, indices)
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(tensors(state), tensors(check), rtol=1e-3, atol=1e-3)
