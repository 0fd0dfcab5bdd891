"""Retention and Mamba-2 in parts: token by token, packed, with padding, in a pool and compiled, against whole calls."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gla_core.nn import GLAState, Mamba2, Retention

LAYERS = {
    "retention": (Retention, {"num_heads": 2}),
    "retention_grouped": (
        Retention,
        {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "conv_bias": True, "feature_map": "relu"},
    ),
    "mamba2": (Mamba2, {"d_state": 3, "headdim": 8, "d_conv": 3, "bias": True}),
    "mamba2_grouped": (
        Mamba2,
        {"d_state": 4, "headdim": 4, "ngroups": 2, "norm_before_gate": True, "D_has_hdim": True, "dt_limit": (0.1, 2)},
    ),
}
POOL, INDICES = 5, [4, -1, 0, 5]
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6, [1] * 6])


@pytest.fixture(params=LAYERS)
def layer(request):
    """A small layer in float64; every parameter is random."""
    kind, options = LAYERS[request.param]
    layer = kind(16, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


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


def row(state, i):
    return each(state, lambda tensor: tensor[i : i + 1])


def assert_same(actual, expected):
    assert (actual.position is None) == (expected.position is None)
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("prompt", [0, 1, 7])
def test_prefill_then_steps(layer, prompt):
    x, before = inputs(3, 9), states(layer, 3)
    whole, final = layer(x, before, output_final_state=True)
    y, state = layer(x[:, :prompt], before, output_final_state=True)
    actual = [y]
    for t in range(prompt, 9):
        y, state = layer.step(x[:, t], state, inplace=t % 2 == 1)
        actual.append(y[:, None])
    torch.testing.assert_close(torch.cat(actual, 1), whole, rtol=1e-10, atol=1e-10)
    assert_same(state, final)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_is_separate(layer, dtype):
    """Rows outside the sequences have y = 0 and no gradient."""
    lengths, before = [3, 0, 7, 1], states(layer, 4)
    offsets = torch.tensor([2, *lengths], dtype=dtype).cumsum(0, dtype=dtype)
    x = inputs(1, 15).requires_grad_()
    y, state = layer(x, before, True, offsets)
    parts = x[:, 2:13].split(lengths, 1)
    expected = [layer(part, row(before, i), output_final_state=True) for i, part in enumerate(parts)]
    alone = torch.cat([y for y, _ in expected], 1)
    torch.testing.assert_close(y[:, 2:13], alone, rtol=1e-10, atol=1e-10)
    assert not y[:, :2].any()
    assert not y[:, 13:].any()
    for i, (_, after) in enumerate(expected):
        assert_same(row(state, i), after)
    dy, wanted = torch.randn_like(y), [x, *layer.parameters()]
    actual, expected = torch.autograd.grad(y, wanted, dy), torch.autograd.grad(alone, wanted, dy[:, 2:13])
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_packed_without_states_and_without_sequences(layer):
    x = inputs(1, 8)
    y, _ = layer(x, cu_seqlens=torch.tensor([0, 3, 8]))
    torch.testing.assert_close(y, torch.cat([layer(x[:, :3])[0], layer(x[:, 3:])[0]], 1), rtol=1e-10, atol=1e-10)
    y, state = layer(x, output_final_state=True, cu_seqlens=torch.tensor([0]))
    assert not y.any()
    assert_same(state, layer.initial_state(0))


def test_padding_changes_nothing(layer):
    x, before = inputs(*MASK.shape), states(layer, len(MASK))
    expected, y_expected = [], torch.zeros_like(x)
    for i, tokens in enumerate(MASK.bool()):
        y, after = layer(x[i : i + 1, tokens], row(before, i), output_final_state=True)
        y_expected[i, tokens] = y[0]
        expected.append(after)
    x = torch.where(MASK[..., None].bool(), x, torch.nan)
    y, state = layer(x, before, output_final_state=True, attention_mask=MASK)
    torch.testing.assert_close(y, y_expected, rtol=1e-10, atol=1e-10)
    for i, after in enumerate(expected):
        assert_same(row(state, i), after)


@pytest.mark.parametrize("inplace", [False, True])
def test_rows_of_a_pool(layer, inplace):
    x, pool = inputs(len(INDICES)), states(layer, POOL)
    before = each(pool, torch.clone)
    y, state = layer.step(x, pool, inplace, torch.tensor(INDICES))
    assert (state is pool) == inplace
    assert_same(pool, state if inplace else before)
    new = {i: layer.step(x[b : b + 1], row(before, i)) for b, i in enumerate(INDICES) if 0 <= i < POOL}
    for b, i in enumerate(INDICES):
        torch.testing.assert_close(y[b], new[i][0][0] if i in new else torch.zeros_like(y[b]))
    for i in range(POOL):
        assert_same(row(state, i), new[i][1] if i in new else row(before, i))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_waits_for_no_value(layer, inplace):
    with FakeTensorMode(allow_non_fake_inputs=True):  # raises wherever a value is read
        rows = torch.zeros(3, dtype=torch.int64)
        y, _ = layer.step(torch.zeros(3, 16, dtype=torch.float64), layer.initial_state(POOL), inplace, rows)
        packed, _ = layer(torch.zeros(1, 7, 16, dtype=torch.float64), None, True, torch.zeros(3, dtype=torch.int64))
    assert (y.shape, packed.shape) == ((3, 16), (1, 7, 16))


@pytest.mark.thorough
@pytest.mark.parametrize("layer", ["retention", "mamba2"], indirect=True)
def test_compiled_once(layer):
    torch._dynamo.reset()
    forward, step = (
        torch.compile(f, fullgraph=True, backend="eager", dynamic=True) for f in (layer.forward, layer.step)
    )
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
