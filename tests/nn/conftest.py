"""Small layers of every kind, and the comparison of their states."""

import pytest
import torch

from gla_core.nn import (
    HGRN2,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba2,
    Retention,
    SimpleGatedLinearAttention,
)

SMALL = {"hidden_size": 16, "expand_k": 0.5, "expand_v": 1.0, "num_heads": 2, "gate_low_rank_dim": 3}
LAYERS = {
    "plain": {},
    "no_gate": {"use_output_gate": False},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "multi_query": {"num_heads": 4, "num_kv_heads": 1, "use_short_conv": True},
    "conv": {"use_short_conv": True},
    "conv_bias": {"use_short_conv": True, "conv_bias": True, "conv_size": 3},
    "conv_of_one": {"use_short_conv": True, "conv_size": 1},
    "not_affine": {"elementwise_affine": False, "norm_eps": 0.1},
    "feature_map": {"feature_map": "sqrelu", "use_short_conv": True},
    "gelu_gate": {"gate_fn": "gelu", "num_heads": 4, "num_kv_heads": 2},
    "not_fused": {"fuse_norm": False, "mode": "fused_chunk", "layer_idx": 3},
    "other_gate": {"gate_logit_normalizer": 0.5, "clamp_min": -1.0, "expand_k": 1.0, "expand_v": 2.0},
}
KINDS = {
    **{name: (GatedLinearAttention, SMALL | options) for name, options in LAYERS.items()},
    "simple": (SimpleGatedLinearAttention, {"hidden_size": 16, "num_heads": 2}),
    "simple_no_conv": (SimpleGatedLinearAttention, {"hidden_size": 16, "num_heads": 2, "use_short_conv": False}),
    "hgrn2": (HGRN2, {"hidden_size": 16, "expand_ratio": 4}),
    "hgrn2_heads": (HGRN2, {"hidden_size": 16, "num_heads": 2}),
    "hgrn2_both": (HGRN2, {"hidden_size": 16, "num_heads": 2, "expand_ratio": 3}),
    "hgrn2_conv": (
        HGRN2,
        {"hidden_size": 16, "expand_ratio": 4, "use_short_conv": True, "conv_bias": True, "conv_size": 3},
    ),
    "hgrn2_not_affine": (HGRN2, {"hidden_size": 16, "expand_ratio": 8, "elementwise_affine": False, "norm_eps": 0.1}),
    "retention": (Retention, {"hidden_size": 16, "num_heads": 2}),
    "retention_grouped": (
        Retention,
        {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "conv_bias": True}
        | {"feature_map": "relu"},
    ),
    "mamba2": (Mamba2, {"d_model": 16, "d_state": 3, "headdim": 8, "d_conv": 3, "bias": True}),
    "mamba2_grouped": (
        Mamba2,
        {"d_model": 16, "d_state": 4, "headdim": 4, "ngroups": 2, "norm_before_gate": True, "D_has_hdim": True}
        | {"dt_limit": (0.1, 2)},
    ),
    "kda": (
        KimiDeltaAttention,
        {"hidden_size": 16, "head_dim": 4, "num_heads": 1, "num_v_heads": 2, "lower_bound": -5.0},
    ),
    "gated_delta_net": (
        GatedDeltaNet,
        {"hidden_size": 16, "head_dim": 4, "num_heads": 2, "allow_neg_eigval": True, "conv_size": 3, "conv_bias": True},
    ),
    "delta_net": (DeltaNet, {"hidden_size": 16, "num_heads": 2, "use_short_conv": False, "qk_norm": "sum"}),
}


THOROUGH = ("gated_delta_net", "delta_net")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in KINDS])
def layer(request):
    """A small layer of each kind in turn, in float64; every parameter is random."""
    kind, options = KINDS[request.param]
    layer = kind(**options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.fixture
def small():
    """The sizes of a small layer."""
    return SMALL


@pytest.fixture(params=LAYERS)
def name(request):
    """The name of a kind of layer: each one in turn, unless a test names some."""
    return request.param


@pytest.fixture
def options(name):
    """The arguments of that kind of layer."""
    return {**SMALL, **LAYERS[name]}


@pytest.fixture
def make_layer():
    """A function: `make_layer(name, dtype)` returns a small layer; no parameter has its initial value."""

    def make(name, dtype=torch.float64):
        torch.manual_seed(0)
        layer = GatedLinearAttention(**{**SMALL, **LAYERS[name]})
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return layer.to(dtype)

    return make


@pytest.fixture
def assert_same_state():
    def compare(state, expected, **tolerance):
        torch.testing.assert_close(state.recurrent, expected.recurrent, **tolerance)
        assert (state.conv is None) == (expected.conv is None)
        torch.testing.assert_close(state.conv or (), expected.conv or (), **tolerance)

    return compare
