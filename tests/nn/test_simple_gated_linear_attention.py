"""The layer with one gate per head against a direct evaluation in float64, and against itself in parts."""

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance import oracle
from gla_core.nn import SimpleGatedLinearAttention


def make(**options):
    torch.manual_seed(0)
    return SimpleGatedLinearAttention(**{"hidden_size": 16, "num_heads": 2, **options}).double()


def evaluate(layer, x):
    """Computes the layer by its formula, for layers without convolutions."""
    heads = [y.unflatten(-1, (2, -1)) for y in (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x), layer.g_proj(x))]
    q, k, v, gate = heads
    g = F.logsigmoid(x @ layer.gk_proj.weight.T + layer.gk_proj.bias) / layer.gate_logit_normalizer  # [B, T, 2]
    o, _ = oracle.chunk_gla(q, k, v, g)
    normed = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.g_norm_swish_gate.weight
    return layer.o_proj((normed * F.silu(gate)).flatten(-2))


def test_values_and_gradients():
    layer, x = make(use_short_conv=False, expand_v=2.0), torch.randn(2, 40, 16, dtype=torch.float64)
    expected = evaluate(layer, x)
    y, state = layer(x)
    assert state is None
    torch.testing.assert_close(y, expected)
    parameters = list(layer.parameters())
    for d, truth in zip(*(torch.autograd.grad(z.square().sum(), parameters) for z in (y, expected)), strict=True):
        torch.testing.assert_close(d, truth)


def test_parameters_have_the_names_of_flash_linear_attention():
    names = {name for name, _ in make(conv_bias=True).named_parameters()}
    projections = {f"{x}_proj.weight" for x in ("q", "k", "v", "g", "gk", "o")} | {"gk_proj.bias"}
    convolutions = {f"{x}_conv1d.{kind}" for x in "qkv" for kind in ("weight", "bias")}
    assert names == projections | convolutions | {"g_norm_swish_gate.weight"}
    assert make().gk_proj.weight.shape == (2, 16)
    assert make(fuse_norm=False).g_norm.weight.shape == (8,)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"hidden_size \* expand_k is 16; expected a multiple of num_heads = 3"):
        make(num_heads=3)
