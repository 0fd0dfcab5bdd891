"""Activations by name, and the layer's arguments that take them."""

import math

import pytest
import torch

from gla_core.nn import GatedLinearAttention
from gla_core.nn.activations import ACTIVATIONS, activation
from gla_core.nn.short_convolution import ShortConvolution

FORMULAS = {
    "relu": lambda x: max(x, 0.0),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "logsigmoid": lambda x: -math.log(1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "sqrelu": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: 0.5 * x * (1 + math.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values(name):
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    expected = torch.tensor([FORMULAS[name](float(value)) for value in x], dtype=torch.float64)
    torch.testing.assert_close(activation("gate_fn", name)(x), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("argument", ["gate_fn", "feature_map"])
def test_a_name_that_is_not_known(argument):
    with pytest.raises(ValueError, match=rf"unknown {argument} 'swisch'; did you mean 'swish'\? \(there are relu, "):
        GatedLinearAttention(16, **{argument: "swisch"})


def test_a_function_stands_for_itself():
    x = torch.randn(2, 9, 16)
    torch.manual_seed(0)
    named = GatedLinearAttention(16, feature_map="relu", gate_fn="sigmoid")
    layer = GatedLinearAttention(16, feature_map=torch.relu, gate_fn=torch.sigmoid)
    layer.load_state_dict(named.state_dict())
    torch.testing.assert_close(layer(x)[0], named(x)[0])


def test_a_convolution_without():
    convolution, x = ShortConvolution(4, 3, activation=None), torch.randn(2, 9, 4)
    expected = torch.nn.functional.conv1d(x.mT, convolution.weight, padding=2, groups=4)[..., :9].mT
    torch.testing.assert_close(convolution(x)[0], expected)
    convolution.activation = torch.tanh
    torch.testing.assert_close(convolution(x)[0], torch.tanh(expected))


@pytest.mark.parametrize(
    ("options", "name", "other"),
    [
        ({}, "g_norm_swish_gate", "g_norm"),
        ({"fuse_norm": False}, "g_norm", "g_norm_swish_gate"),
        ({"gate_fn": "silu"}, "g_norm", "g_norm_swish_gate"),
        ({"use_output_gate": False}, "g_norm", "g_norm_swish_gate"),
    ],
)
def test_a_checkpoint_is_read_under_either_name_of_the_norm(options, name, other):
    model = torch.nn.Sequential(GatedLinearAttention(16, **options))
    weights = model.state_dict()
    assert f"0.{name}.weight" in weights
    weights[f"0.{other}.weight"] = weights.pop(f"0.{name}.weight") + 1
    model.load_state_dict(weights)
    assert torch.equal(model.state_dict()[f"0.{name}.weight"], torch.full((4,), 2.0))
    assert f"0.{other}.weight" in weights  # the caller's dictionary does not change
    both = {**model.state_dict(), f"0.{other}.weight": torch.zeros(4)}
    assert model.load_state_dict(both, strict=False).unexpected_keys == [f"0.{other}.weight"]
    none = {name: weight for name, weight in model.state_dict().items() if "norm" not in name}
    assert model.load_state_dict(none, strict=False).missing_keys == [f"0.{name}.weight"]
