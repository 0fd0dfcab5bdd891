"""Decoding in place, and in a pool of states from which each row of a batch selects one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gla_core.nn import GLAState

POOL, INDICES = 6, [4, -1, 0, 2]


@pytest.fixture
def pool(make_layer: Callable, name: str) -> tuple[torch.nn.Module, GLAState]:
    layer = make_layer(name)
    _, state = layer(torch.randn(POOL, 5, 16, dtype=torch.float64), output_final_state=True)
    return layer, GLAState(state.recurrent.detach(), state.conv and tuple(t.detach() for t in state.conv))


def copy(state: GLAState) -> GLAState:
    return GLAState(state.recurrent.clone(), state.conv and tuple(t.clone() for t in state.conv))


def tensors(state: GLAState) -> list[Tensor]:
    return [state.recurrent, *(state.conv or ())]


def expected(layer: torch.nn.Module, x: Tensor, state: GLAState, indices: list[int]) -> tuple[Tensor, GLAState]:
    """Computes the rows one after the other."""
    y, after = torch.zeros_like(x), copy(state)
    for i, row in enumerate(indices):
        if 0 <= row < POOL:
            one = GLAState(state.recurrent[row : row + 1], state.conv and tuple(t[row : row + 1] for t in state.conv))
            y[i], new = layer.step(x[i : i + 1], one)
            for to, actual in zip(tensors(after), tensors(new), strict=True):
                to[row] = actual[0]
    return y, after


@pytest.mark.parametrize("name", ["plain", "conv_bias", "multi_query", "conv_of_one"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("indices", [INDICES, [-1, -1], [3, 0, -1], [POOL, 0, 5], [POOL, -1], []], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_a_pool(
    pool: tuple, inplace: bool, indices: list[int], dtype: torch.dtype, assert_same_state: Callable
) -> None:
    layer, state = pool
    x, before = torch.randn(len(indices), 16, dtype=torch.float64), copy(state)
    y, after = expected(layer, x, state, indices)
    actual, new = layer.step(x, state, inplace, torch.tensor(indices, dtype=dtype))
    torch.testing.assert_close(actual, y)
    assert_same_state(new, after)
    assert (new is state) == inplace
    assert_same_state(state, after if inplace else before)


@pytest.mark.parametrize("name", ["plain", "conv_bias"])
def test_a_step_in_place_is_a_step(pool: tuple, assert_same_state: Callable) -> None:
    layer, state = pool
    x = torch.randn(POOL, 16, dtype=torch.float64)
    y, after = layer.step(x, state)
    memory = [t.data_ptr() for t in tensors(state)]
    actual, same = layer.step(x, state, inplace=True)
    assert same is state
    assert [t.data_ptr() for t in tensors(state)] == memory
    torch.testing.assert_close(actual, y)
    assert_same_state(state, after)


@pytest.mark.parametrize("name", ["conv"])
def test_indices_that_are_none(pool: tuple) -> None:
    layer, state = pool
    x = torch.randn(2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"state.recurrent has shape \[6, 2, 4, 8\]; expected .* with N=2"):
        layer.step(x, state)
    with pytest.raises(ValueError, match=r"state_indices has shape \[3\]; expected \[B\] with B=2"):
        layer.step(x, state, state_indices=torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match="state_indices is float32; expected int32 or int64"):
        layer.step(x, state, state_indices=torch.zeros(2))


@pytest.mark.parametrize("name", ["plain", "conv_bias", "multi_query", "conv_of_one"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_in_a_pool_waits_for_no_value(make_layer: Callable, name: str, inplace: bool) -> None:
    """Tensors of this mode have no values; on a GPU reading one would wait, and no graph could capture it."""
    layer = make_layer(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, rows = torch.zeros(3, 16, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
        y, _ = layer.step(x, layer.initial_state(POOL), inplace, rows)
    assert y.shape == x.shape


@pytest.mark.gpu
def test_a_graph_decodes_in_a_pool(make_layer: Callable) -> None:
    """Rows, states and tokens change between replays, and the host never waits."""
    layer = make_layer("conv_bias", torch.float32).cuda()
    state = layer.initial_state(POOL)
    x, rows = torch.zeros(3, 16, device="cuda"), torch.tensor([0, 1, -1], device="cuda")
    layer.step(x, copy(state), True, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = layer.step(x, state, True, rows)
    check = copy(layer.initial_state(POOL))
    for t in tensors(state):
        t.zero_()
    for indices in ([0, 1, -1], [5, -1, 0], [-1, -1, -1]):
        x.normal_()
        rows.copy_(torch.tensor(indices))
        graph.replay()
        expected_y, check = expected(layer, x, check, indices)
        torch.testing.assert_close(y, expected_y, rtol=1e-3, atol=1e-3)
        for a, b in zip(tensors(state), tensors(check), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
