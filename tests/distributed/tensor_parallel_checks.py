"""A layer whose heads are spread over two ranks, compared with the same layer in one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gla_core import distributed
from gla_core.conformance.tolerances import relative_error
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


def spread(alone, mesh):
    layer = copy.deepcopy(alone)
    parallelize_module(layer, mesh, distributed.tensor_parallel_plan(layer))
    return layer


def new_layer(kind=GatedLinearAttention, **options):
    """Returns a layer whose parameters are random and equal on all ranks."""
    torch.manual_seed(0)
    local = {GatedLinearAttention: {"gate_low_rank_dim": 3}, HGRN2: {"expand_ratio": 3}}
    local |= {gated: {"head_dim": 3} for gated in (KimiDeltaAttention, GatedDeltaNet)}
    layer = kind(16, **{"num_heads": 4, "dtype": torch.float64, **local.get(kind, {}), **options})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def check_heads_over_ranks(ranks):
    """Outputs, states, steps, and the gradients of x and of all parameters agree; with packed sequences, too."""
    for options in (
        {"num_kv_heads": 2, "use_short_conv": True, "conv_bias": True, "feature_map": "relu"},
        {"use_output_gate": False, "elementwise_affine": False},
        {"kind": HGRN2, "use_short_conv": True, "conv_bias": True},
        {"kind": HGRN2, "elementwise_affine": False},
        {"kind": SimpleGatedLinearAttention, "conv_bias": True},
        {"kind": Retention, "num_kv_heads": 2, "use_short_conv": True, "conv_bias": True},
        {"kind": Retention, "use_output_gate": False},
        {"kind": KimiDeltaAttention, "num_heads": 2, "num_v_heads": 4, "conv_bias": True},
        {"kind": KimiDeltaAttention, "lower_bound": -5.0, "use_short_conv": False},
        {"kind": GatedDeltaNet, "use_gate": False},
        {"kind": DeltaNet, "use_gate": True},
    ):
        alone = new_layer(**options)
        layer = spread(alone, init_device_mesh("cpu", (ranks.number,)))
        for cu_seqlens in (None, torch.tensor([0, 4, 4, 9])):
            alone.zero_grad()
            layer.zero_grad()
            x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
            dy = torch.randn_like(x)
            y, state = alone(x, output_final_state=True, cu_seqlens=cu_seqlens)
            actual, local = layer(x=x, output_final_state=True, cu_seqlens=cu_seqlens)
            (dx,), (dx_actual,) = (torch.autograd.grad(z, x, dy, retain_graph=True) for z in (y, actual))
            y.backward(dy)
            actual.backward(dy)
            heads = state.recurrent.chunk(ranks.number, dim=1)[ranks.rank]
            for one, reference in ((actual, y), (local.recurrent, heads), (dx_actual, dx)):
                assert relative_error(one, reference) <= 1e-12
            for (name, p), q in zip(layer.named_parameters(), alone.parameters(), strict=True):
                assert relative_error(p.grad.full_tensor(), q.grad) <= 1e-12, name
            token = torch.randn(len(state.recurrent), 16, dtype=torch.float64)
            start = layer.initial_state(len(token))
            assert relative_error(layer.step(token, local)[0], alone.step(token, state)[0]) <= 1e-12
            assert relative_error(layer.step(token, start)[0], alone(token[:, None])[0][:, 0]) <= 1e-12


def check_heads_and_tokens_over_ranks(ranks):
    """Two ranks share the heads, and two share the tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads"))
    for kind in (GatedLinearAttention, HGRN2, SimpleGatedLinearAttention, KimiDeltaAttention):
        alone = new_layer(kind, use_short_conv=True)
        layer = spread(alone, mesh["heads"])
        layer.context_parallel = mesh["tokens"]
        x = torch.randn(2, 10, 16, dtype=torch.float64, requires_grad=True)
        local = slice(5 * mesh.get_local_rank("tokens"), 5 * mesh.get_local_rank("tokens") + 5)
        y, actual = alone(x)[0], layer(x[:, local])[0]
        assert relative_error(actual, y[:, local]) <= 1e-12
        (dx,), (dx_actual,) = (torch.autograd.grad(z.square().sum(), x) for z in (y, actual))
        assert relative_error(dx_actual[:, local], dx[:, local]) <= 1e-12


def check_a_bound_of_own_heads(ranks):
    alone = new_layer(HGRN2)
    layer = spread(alone, init_device_mesh("cpu", (ranks.number,)))
    x, bound = torch.randn(2, 5, 16, dtype=torch.float64), torch.rand(12, dtype=torch.float64)
    local = bound.chunk(ranks.number)[ranks.rank]
    assert relative_error(layer(x, lower_bound=local)[0], alone(x, lower_bound=bound)[0]) <= 1e-12


def check_what_cannot_be_spread(ranks):
    for layer in (nn.Linear(16, 16), Mamba2(16, headdim=8)):
        with pytest.raises(TypeError, match=rf"layer is {type(layer).__name__}; expected .* make a plan for each"):
            distributed.tensor_parallel_plan(layer)
    for layer, named in (
        (GatedLinearAttention(16, num_heads=4, num_kv_heads=1), "num_kv_heads is 1"),
        (HGRN2(18, num_heads=3), "num_heads is 3"),
        (GatedDeltaNet(16, head_dim=4, num_heads=1, num_v_heads=2), "num_heads is 1"),
    ):
        with pytest.raises(ValueError, match=f"{named}; expected a multiple of the mesh's 2 ranks"):
            spread(layer, init_device_mesh("cpu", (2,)))


NUMBERS = {
    check_heads_over_ranks: 2,
    check_a_bound_of_own_heads: 2,
    check_what_cannot_be_spread: 2,
    check_heads_and_tokens_over_ranks: 4,
}
