"""States of flash-linear-attention's layers, converted in both directions."""

import pytest
import torch

from gla_core.compat.fla import state_from_fla, state_to_fla
from gla_core.dispatch.tensors import log_gates
from gla_core.nn import HGRN2, GatedLinearAttention

SMALL = {"hidden_size": 16, "num_heads": 4, "use_short_conv": True, "conv_size": 3}


def layer_there(options, tokens):
    """Returns our layer, its input, and the cache that flash-linear-attention documents, computed in float64."""
    torch.manual_seed(0)
    layer = GatedLinearAttention(**SMALL, **options).double()
    x = torch.randn(2, tokens + 1, 16, dtype=torch.float64)
    inputs = [projection(x[:, :tokens]) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)]
    caches = [torch.nn.functional.pad(y.mT, (3, 0))[..., -3:].detach() for y in inputs]  # the last W inputs
    convolutions = layer.convolutions
    _, k, v, g = layer.op_inputs(x[:, :tokens], lambda *ys: [c(y)[0] for c, y in zip(convolutions, ys, strict=True)])
    groups = 4 // layer.num_kv_heads
    g = log_gates(g, layer.gate_normalizer, torch.float64)
    k, v, g = (y.repeat_interleave(groups, 2).detach() for y in (k, v, g))
    state = torch.zeros(2, 4, v.shape[3], k.shape[3], dtype=torch.float64)  # [N, Hq, V, K]
    for t in range(tokens):
        state = state * g[:, t, :, None].exp() + torch.einsum("nhv,nhk->nhvk", v[:, t], k[:, t])
    return layer, x, {"recurrent_state": state, "conv_state": tuple(caches)}


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "conv_bias": True}])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_layer_goes_on_from_a_state_of_flash_linear_attention(options, tokens):
    layer, x, entry = layer_there(options, tokens)
    groups = 4 // layer.num_kv_heads
    state = state_from_fla(entry, groups)
    whole, _ = layer(x)
    y, _ = layer.step(x[:, -1], state)
    torch.testing.assert_close(y, whole[:, -1].detach())
    back = state_to_fla(state, groups)
    torch.testing.assert_close(back["recurrent_state"], entry["recurrent_state"])
    for actual, expected in zip(back["conv_state"], entry["conv_state"], strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual[..., 1:], expected[..., 1:])  # the oldest input is never read again


def test_there_and_back_without_convolutions():
    layer = HGRN2(16, expand_ratio=4)
    _, state = layer(torch.randn(2, 9, 16), output_final_state=True)
    entry = state_to_fla(state)
    assert entry["conv_state"] is None
    assert entry["recurrent_state"].shape == (2, 4, 4, 4)
    again = state_from_fla(entry)
    assert torch.equal(again.recurrent, state.recurrent)
    assert again.conv is None
    for x in (entry["recurrent_state"], again.recurrent):
        assert x.is_contiguous()
        assert x.data_ptr() != state.recurrent.data_ptr()


def test_half_precision_is_widened():
    actual = state_from_fla({"recurrent_state": torch.ones(1, 2, 3, 4, dtype=torch.bfloat16), "conv_state": None})
    assert (actual.recurrent.dtype, actual.recurrent.shape) == (torch.float32, (1, 2, 4, 3))


@pytest.mark.parametrize(
    ("entry", "groups", "message"),
    [
        ({}, 1, "has no 'recurrent_state'"),
        ({"recurrent_state": torch.zeros(2, 3, 4)}, 1, r"recurrent_state has shape \[2, 3, 4\]"),
        (
            {"recurrent_state": torch.zeros(2, 3, 4, 5)},
            2,
            "recurrent_state has 3 heads; expected a multiple of groups = 2",
        ),
    ],
)
def test_what_is_no_state(entry, groups, message):
    with pytest.raises(ValueError, match=message):
        state_from_fla(entry, groups)
