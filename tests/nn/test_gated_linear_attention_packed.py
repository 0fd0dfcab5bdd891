"""Packed sequences in a layer, and a layer without tokens."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gla_core as gla


def pack(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def test_packed_without_state_then_steps(make_layer):
    layer = make_layer("conv_bias")
    lengths = [1, 0, 7]
    sequences = torch.randn(3, 10, 16, dtype=torch.float64)
    packed = torch.cat([sequence[:n] for sequence, n in zip(sequences, lengths, strict=True)])
    _, state = layer(packed[None], output_final_state=True, cu_seqlens=pack(*lengths))
    for t in range(3):
        y, state = layer.step(torch.stack([s[n + t] for s, n in zip(sequences, lengths, strict=True)]), state)
    expected = torch.cat([layer(s[None, : n + 3])[0][:, -1] for s, n in zip(sequences, lengths, strict=True)])
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "conv_bias"])
@pytest.mark.parametrize("offsets", [[0, 3, 3, 5], [2, 2, 6], [0], [4]])
def test_tokens_outside_the_offsets_touch_nothing(name, offsets, make_layer, assert_same_state):
    layer = make_layer(name)
    begin, end = offsets[0], offsets[-1]
    x = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
    state = layer.initial_state(len(offsets) - 1)
    y, after = layer(x, state, True, torch.tensor(offsets))
    expected, expected_after = layer(x[:, begin:end], state, True, torch.tensor(offsets) - begin)
    torch.testing.assert_close(y[:, begin:end], expected)
    assert_same_state(after, expected_after)
    assert not y[:, :begin].any()
    assert not y[:, end:].any()
    wanted, dy = [x, *layer.parameters()], torch.randn_like(y)
    grads = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, wanted, dy[:, begin:end]))


@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [0, 9], [-1, 8]])
def test_bad_offsets_are_refused_by_name(offsets, fresh_registry, monkeypatch, make_layer):
    monkeypatch.setenv("GLA_CHECK", "1")
    gla.reload_environment()
    layer = make_layer("conv_bias")
    with pytest.raises(ValueError, match=r"cu_seqlens is \[.*\]; expected offsets from 0 to T"):
        layer(torch.randn(1, 8, 16, dtype=torch.float64), cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("name", ["plain", "conv"])
def test_no_tokens_and_no_sequences(name, make_layer, assert_same_state):
    layer = make_layer(name)
    y, state = layer(torch.zeros(2, 0, 16, dtype=torch.float64), output_final_state=True)
    assert y.shape == (2, 0, 16)
    assert_same_state(state, layer.initial_state(2), rtol=0, atol=0)
    for x, cu_seqlens in ((torch.zeros(0, 5, 16), None), (torch.zeros(1, 0, 16), torch.tensor([0]))):
        y, state = layer(x.double(), output_final_state=True, cu_seqlens=cu_seqlens)
        assert y.shape == x.shape
        assert_same_state(state, layer.initial_state(0), rtol=0, atol=0)


def test_packed_reads_no_value_on_the_host(make_layer):
    layer = make_layer("conv_bias")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # raises wherever a value is read
        cu_seqlens = mode.from_tensor(pack(2, 5))
        y, state = layer(torch.empty(1, 7, 16, dtype=torch.float64), output_final_state=True, cu_seqlens=cu_seqlens)
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            cu_seqlens.tolist()
    assert y.shape == (1, 7, 16)
    assert [list(inputs.shape) for inputs in state.conv] == [[2, 2, 8], [2, 2, 8], [2, 2, 16]]


@pytest.mark.thorough
def test_compile_packed_with_state_and_step(make_layer, assert_same_state):
    torch._dynamo.reset()
    layer = make_layer("conv_bias")
    options = {"fullgraph": True, "backend": "eager", "dynamic": True}
    forward, step = (torch.compile(f, **options) for f in (layer.forward, layer.step))
    # Sizes that differ from all of the layer's, since the compiler treats equal sizes as the same size.
    for i, lengths in enumerate([(2, 1, 0, 3, 5), (1, 1, 9, 0, 2, 6)]):
        x = torch.randn(1, sum(lengths), 16, dtype=torch.float64)
        token = torch.randn(len(lengths), 16, dtype=torch.float64)
        before = layer.initial_state(len(lengths))
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            y, state = forward(x, before, True, pack(*lengths))
            y1, state1 = step(token, state)
        expected_y, expected = layer(x, before, True, pack(*lengths))
        expected_y1, expected1 = layer.step(token, expected)
        torch.testing.assert_close((y, y1), (expected_y, expected_y1))
        assert_same_state(state, expected)
        assert_same_state(state1, expected1)
