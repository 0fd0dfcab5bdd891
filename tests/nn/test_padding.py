"""Rows with padding, given by a mask: a layer's results for the tokens do not depend on the padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gla_core.nn import HGRN2, GLAState
from gla_core.nn.padding import padding

MASK = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
B, T = MASK.shape


def row_of(state: GLAState, i: int) -> GLAState:
    return GLAState(state.recurrent[i : i + 1], state.conv and tuple(t[i : i + 1] for t in state.conv))


def tokens_alone(layer: torch.nn.Module, x: Tensor, state: GLAState) -> tuple[Tensor, list[GLAState]]:
    """Runs the layer on each row's tokens alone; returns y at the tokens' columns, and the states after them."""
    y, states = torch.zeros_like(x), []
    for i in range(B):
        kept = MASK[i].bool()
        actual, after = layer(x[i : i + 1, kept], row_of(state, i), output_final_state=True)
        y[i, kept] = actual[0]
        states.append(after)
    return y, states


def check(layer: torch.nn.Module, mask: Tensor, assert_same_state: Callable) -> None:
    x = torch.randn(B, T, 16, dtype=torch.float64)
    _, before = layer(torch.randn(B, 5, 16, dtype=torch.float64), output_final_state=True)
    expected, states = tokens_alone(layer, x, before)
    x = torch.where(MASK[..., None].bool(), x, torch.nan)
    y, after = layer(x, before, output_final_state=True, attention_mask=mask)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    assert not y[MASK == 0].any()
    for i in range(B):
        assert_same_state(row_of(after, i), states[i], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.float(), torch.cat([1 - MASK, MASK], 1)], ids=str)
def test_tokens_are_read_as_without_padding(
    mask: Tensor, options: dict, name: str, make_layer: Callable, assert_same_state: Callable
) -> None:
    check(make_layer(name), mask, assert_same_state)


def test_hgrn2(assert_same_state: Callable) -> None:
    torch.manual_seed(0)
    check(HGRN2(16, 2, 4, use_short_conv=True, conv_bias=True).double(), MASK, assert_same_state)


def test_gradients(make_layer: Callable) -> None:
    layer = make_layer("conv_bias")
    x = torch.randn(B, T, 16, dtype=torch.float64, requires_grad=True)
    wanted, dy = [x, *layer.parameters()], torch.randn(B, T, 16, dtype=torch.float64)
    expected = torch.autograd.grad(tokens_alone(layer, x, layer.initial_state(B))[0], wanted, dy)
    actual = torch.autograd.grad(layer(x, attention_mask=MASK)[0], wanted, dy)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert not actual[0][MASK == 0].any()


@pytest.mark.thorough
def test_in_a_compiled_graph(make_layer: Callable) -> None:
    layer = make_layer("conv")
    x = torch.randn(B, T, 16, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, _ = compiled(x, attention_mask=MASK)
    torch.testing.assert_close(y, layer(x, attention_mask=MASK)[0])


def test_what_is_no_mask_of_x(make_layer: Callable) -> None:
    layer, x = make_layer("plain"), torch.randn(1, T, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 8, 8\]; expected \[B, columns\]"):
        layer(x, attention_mask=torch.ones(1, T, T))
    with pytest.raises(ValueError, match="has 7 columns; expected one for each of 8 tokens"):
        layer(x, attention_mask=torch.ones(1, T - 1))
    with pytest.raises(ValueError, match="both cu_seqlens and attention_mask"):
        layer(x, cu_seqlens=torch.tensor([0, T]), attention_mask=torch.ones(1, T))


def test_there_and_back() -> None:
    actual, x = padding(MASK, T), torch.randn(B, T, 3)
    assert actual.lengths.tolist() == MASK.sum(1).tolist()
    front = actual.front(x)
    for i in range(B):
        assert torch.equal(front[i, : actual.lengths[i]], x[i, MASK[i].bool()])
        assert not front[i, actual.lengths[i] :].any()
    assert torch.equal(actual.back(front), x * MASK[..., None])
