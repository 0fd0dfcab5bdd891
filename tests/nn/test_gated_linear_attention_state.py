"""The state of a layer: prefill followed by steps, several calls in a row, saved and loaded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

from gla_core.nn import GLAState


@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 9])
def test_prefill_then_steps(name: str, prompt: int, make_layer: Callable, assert_same_state: Callable) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    whole, final = layer(x, output_final_state=True)
    y, state = layer(x[:, :prompt], output_final_state=True)
    rows = [y]
    for t in range(prompt, x.shape[1]):
        y, state = layer.step(x[:, t], state)
        rows.append(y[:, None])
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, rtol=1e-10, atol=1e-10)
    assert_same_state(state, final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "multi_query"])
def test_prefill_in_two_parts(name: str, make_layer: Callable, assert_same_state: Callable) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    whole, final = layer(x, layer.initial_state(2), output_final_state=True)
    first, state = layer(x[:, :2], output_final_state=True)
    second, state = layer(x[:, 2:], state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-10, atol=1e-10)
    assert_same_state(state, final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_initial_state(dtype: torch.dtype, make_layer: Callable) -> None:
    state = make_layer("multi_query", dtype).initial_state(3)
    recurrent_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(state.recurrent, torch.zeros(3, 1, 2, 4, dtype=recurrent_dtype))
    assert state.recurrent.dtype == recurrent_dtype
    assert [list(inputs.shape) for inputs in state.conv] == [[3, 3, 8], [3, 3, 2], [3, 3, 4]]
    assert all(inputs.dtype == dtype and not inputs.any() for inputs in state.conv)
    assert make_layer("plain").initial_state(3).conv is None


def test_a_saved_state_is_loaded_without_unpickling_code(make_layer: Callable, assert_same_state: Callable) -> None:
    layer = make_layer("conv")
    _, state = layer(torch.randn(2, 5, 16, dtype=torch.float64), output_final_state=True)
    file = io.BytesIO()
    torch.save({"layer": layer.state_dict(), "state": state, "plain": GLAState(state.recurrent)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded["state"], GLAState)
    assert_same_state(loaded["state"], state, rtol=0, atol=0)
    assert loaded["plain"].conv is None
    layer.load_state_dict(loaded["layer"])


def test_step_leaves_its_state_alone_and_needs_no_gradient(make_layer: Callable, assert_same_state: Callable) -> None:
    layer = make_layer("conv")
    state = layer.initial_state(2)
    before = copy.deepcopy(state)
    y, after = layer.step(torch.randn(2, 16, dtype=torch.float64, requires_grad=True), state)
    assert_same_state(state, before, rtol=0, atol=0)
    assert not any(t.requires_grad for t in (y, after.recurrent, *after.conv))
