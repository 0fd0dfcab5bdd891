"""The state of a layer: prefill followed by steps, several calls in a row, saved and loaded."""

import copy
import io

import pytest
import torch

import gla_core as gla
from gla_core.nn import GLAState


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_initial_state(dtype, make_layer):
    state = make_layer("multi_query", dtype).initial_state(3)
    recurrent_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(state.recurrent, torch.zeros(3, 1, 2, 4, dtype=recurrent_dtype))
    assert state.recurrent.dtype == recurrent_dtype
    assert [list(inputs.shape) for inputs in state.conv] == [[3, 3, 8], [3, 3, 2], [3, 3, 4]]
    assert all(inputs.dtype == dtype and not inputs.any() for inputs in state.conv)
    assert make_layer("plain").initial_state(3).conv is None


def test_a_saved_state_is_loaded_without_unpickling_code(make_layer, assert_same_state):
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


def test_step_leaves_its_state_alone_and_needs_no_gradient(make_layer, assert_same_state):
    layer = make_layer("conv")
    state = layer.initial_state(2)
    before = copy.deepcopy(state)
    y, after = layer.step(torch.randn(2, 16, dtype=torch.float64, requires_grad=True), state)
    assert_same_state(state, before, rtol=0, atol=0)
    assert not any(t.requires_grad for t in (y, after.recurrent, *after.conv))


def test_states_and_indices_that_do_not_fit(make_layer):
    layer, x = make_layer("conv"), torch.randn(2, 16, dtype=torch.float64)
    state = layer.initial_state(6)
    with pytest.raises(ValueError, match=r"state.recurrent has shape \[6, 2, 4, 8\]; expected .* with N=2"):
        layer.step(x, state)
    with pytest.raises(ValueError, match=r"slots has shape \[3\]; expected \[B\] with B=2"):
        layer.step(x, state, slots=torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match="slots is float32; expected int32 or int64"):
        layer.step(x, state, slots=torch.zeros(2))


@pytest.mark.parametrize("kind", [gla.nn.GatedLinearAttention, gla.nn.HGRN2])
def test_the_old_name_of_slots_warns_where_it_is_passed_and_means_the_same(kind):
    layer = kind(16, num_heads=2)
    pool, x, slots = layer.initial_state(3), torch.randn(2, 16), torch.tensor([2, 0])
    expected, _ = layer.step(x, pool, slots=slots)
    with pytest.warns(DeprecationWarning, match="state_indices of step is now called slots") as told:
        y, _ = layer.step(x, pool, state_indices=slots)
    assert told[0].filename == __file__
    assert torch.equal(y, expected)
    with pytest.raises(TypeError, match="step got slots and state_indices"):
        layer.step(x, pool, slots=slots, state_indices=slots)
