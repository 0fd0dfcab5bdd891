"""Layers of flash-linear-attention itself, accelerated: run where it is installed, on a CPU too.

On a CPU its norm, which is Triton's alone, is replaced for the test; all else is its own code.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gla_core.compat.fla import accelerate, state_from_fla
from gla_core.nn import HGRN2, GatedLinearAttention

layers = pytest.importorskip("fla.layers.gla", reason="needs flash-linear-attention 0.6.0 and transformers")
SMALL = {"hidden_size": 32, "num_heads": 4, "gate_low_rank_dim": 3}


class Norm(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x, gate):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * F.silu(gate)


@pytest.fixture(autouse=True)
def accelerated():
    with accelerate():
        yield


@pytest.fixture(params=[{}, {"num_kv_heads": 2}, {"mode": "fused_chunk"}, {"feature_map": "relu"}], ids=str)
def pair(request):
    """Its layer, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = layers.GatedLinearAttention(**SMALL, layer_idx=0, **request.param)
    theirs.g_norm_swish_gate = Norm(theirs.g_norm_swish_gate)
    ours = GatedLinearAttention(**SMALL, **request.param)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_values_and_gradients(pair):
    found = []
    x = torch.randn(2, 80, 32, requires_grad=True)
    for layer in pair:
        y, names = layer(x)[0], [name for name, _ in pair[1].named_parameters()]
        wanted = [x, *(layer.get_parameter(name) for name in names)]
        found.append((y, *torch.autograd.grad(y.sum(), wanted)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_padding(pair):
    if pair[1].mode == "fused_chunk":
        pytest.skip("in this mode its layer forgets where the sequences that it has packed begin")
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :20] = 0
    x = torch.randn(2, 80, 32)
    theirs, ours = (layer(x, attention_mask=mask)[0] for layer in pair)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_decoding_from_its_cache(pair):
    from fla.models.utils import Cache

    theirs, ours = pair
    x = torch.randn(2, 72, 32)
    whole, _ = ours(x)
    _, _, cache = theirs(x[:, :70], past_key_values=Cache(), use_cache=True)
    y, _, cache = theirs(x[:, 70:71], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(y, whole[:, 70:71], rtol=1e-4, atol=1e-5)
    y, _ = ours.step(x[:, 71], state_from_fla(cache[0], theirs.num_kv_groups))
    torch.testing.assert_close(y, whole[:, 71], rtol=1e-4, atol=1e-5)


def test_hgrn2(monkeypatch):
    from fla.layers import hgrn2

    monkeypatch.setattr(
        hgrn2, "rms_norm_linear", lambda x, w, b, lw, lb: F.linear(F.rms_norm(x, x.shape[-1:], w, 1e-5), lw)
    )
    monkeypatch.setattr(hgrn2, "swish", F.silu)
    theirs, ours = hgrn2.HGRN2Attention(hidden_size=32, expand_ratio=8, layer_idx=1), HGRN2(32, expand_ratio=8)
    ours.load_state_dict(theirs.state_dict())
    x, bound = torch.randn(2, 80, 32), torch.rand(32)
    torch.testing.assert_close(theirs(x, lower_bound=bound)[0], ours(x, lower_bound=bound)[0], rtol=1e-4, atol=1e-5)
