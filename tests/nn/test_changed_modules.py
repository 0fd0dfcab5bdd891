"""Layers of which one module is hooked, patched, wrapped, parametrized, offloaded or sharded: the module is called."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gla_core as gla
from tests.changes import CHANGES, QUICK, Runs, applies, check, places

SIZES = {"hidden_size": 16, "num_heads": 2}
LAYERS = {
    "gla": lambda: gla.nn.GatedLinearAttention(**SIZES, use_short_conv=True, conv_bias=True, gate_low_rank_dim=4),
    "hgrn2": lambda: gla.nn.HGRN2(**SIZES, use_short_conv=True),
    "simple_gla": lambda: gla.nn.SimpleGatedLinearAttention(**SIZES),
    "retention": lambda: gla.nn.Retention(**SIZES),
    "mamba2": lambda: gla.nn.Mamba2(8, d_state=4, headdim=4, ngroups=2),
    "kda": lambda: gla.nn.KimiDeltaAttention(**SIZES, head_dim=4),
    "gated_delta_net": lambda: gla.nn.GatedDeltaNet(**SIZES, head_dim=4),
    "delta_net": lambda: gla.nn.DeltaNet(**SIZES),
}
STEPS = 2
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def layer_of(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    for x in layer.parameters():
        torch.nn.init.normal_(x, std=0.5)
    return layer


def x_of(layer):
    x = torch.randn(2, 5, layer.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(torch.is_grad_enabled())  # as within a model


def whole(layer):
    return layer(x_of(layer))[0]


def stepped(layer):
    x = x_of(layer)
    y, state = layer(x[:, :-STEPS], output_final_state=True)
    outs = [y]
    for token in x[:, -STEPS:].unbind(1):
        y, state = layer.step(token, state)
        outs.append(y[:, None])
    return torch.cat(outs, 1)


RUNS = Runs(whole, stepped, 1 + STEPS, lambda layer: whole(layer).square().sum())
CASES = [
    pytest.param(layer, change, marks=() if layer == "gla" and change in QUICK else pytest.mark.thorough)
    for layer in LAYERS
    for change in CHANGES
]


@pytest.mark.parametrize(("name", "change"), CASES)
def test_each_module_in_turn(name, change):
    layer = layer_of(name)
    for path in places(layer):
        if applies(layer, path, change):
            check(layer, path, change, RUNS, CLOSE)


@pytest.mark.parametrize(
    "names", ["gla", pytest.param(",".join(name for name in LAYERS if name != "gla"), marks=pytest.mark.thorough)]
)
def test_each_module_as_a_unit_of_fsdp2(names, tmp_path):
    command = [sys.executable, Path(__file__).with_name("fsdp_units.py"), tmp_path, names]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
