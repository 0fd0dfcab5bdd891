"""Layers and models of flash-linear-attention 0.6.0 itself, accelerated: `make test-fla`, on a CPU too.

On a CPU, FLA's norm is replaced for the test, because it exists only in Triton. All other code is FLA's own.
"""

import pytest
import torch
import torch.nn.functional as F

from gla_core import chunk_gla
from gla_core.compat.fla import accelerate, ops, state_from_fla
from gla_core.nn import HGRN2, GatedLinearAttention

layers = pytest.importorskip("fla.layers.gla", reason="needs flash-linear-attention 0.6.0: make test-fla")

from fla import models
from fla.layers import hgrn2, linear_attn, multiscale_retention, simple_gla
from fla.models.utils import Cache

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
    """Returns FLA's layer, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = layers.GatedLinearAttention(**SMALL, layer_idx=0, **request.param)
    theirs.g_norm_swish_gate = Norm(theirs.g_norm_swish_gate)
    ours = GatedLinearAttention(**SMALL, **request.param)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_values_and_gradients(pair):
    results = []
    x = torch.randn(2, 80, 32, requires_grad=True)
    for layer in pair:
        y, names = layer(x)[0], [name for name, _ in pair[1].named_parameters()]
        wanted = [x, *(layer.get_parameter(name) for name in names)]
        results.append((y, *torch.autograd.grad(y.sum(), wanted)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_key_value_heads_are_not_repeated(pair, monkeypatch):
    heads = []

    def spied(q, k, *args, **kwargs):
        heads.append((q.shape[2], k.shape[2]))
        return chunk_gla(q, k, *args, **kwargs)

    monkeypatch.setattr(ops, "_chunk_gla", spied)
    pair[0](torch.randn(2, 80, 32))
    assert heads == [(4, pair[1].num_kv_heads)]


def test_padding(pair):
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :20] = 0
    x = torch.randn(2, 80, 32)
    theirs, ours = (layer(x, attention_mask=mask)[0] for layer in pair)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_compiled_without_a_break(pair):
    torch._dynamo.reset()
    x, layer = torch.randn(2, 80, 32), pair[0]
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x)[0], layer(x)[0])


@torch.no_grad()
def test_decoding_from_its_cache(pair):
    theirs, ours = pair
    x = torch.randn(2, 72, 32)
    whole, _ = ours(x)
    _, _, cache = theirs(x[:, :70], past_key_values=Cache(), use_cache=True)
    y, _, cache = theirs(x[:, 70:71], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(y, whole[:, 70:71], rtol=1e-4, atol=1e-5)
    y, _ = ours.step(x[:, 71], state_from_fla(cache[0], theirs.num_kv_groups))
    torch.testing.assert_close(y, whole[:, 71], rtol=1e-4, atol=1e-5)


def test_hgrn2(monkeypatch):
    monkeypatch.setattr(
        hgrn2, "rms_norm_linear", lambda x, w, b, lw, lb: F.linear(F.rms_norm(x, x.shape[-1:], w, 1e-5), lw)
    )
    monkeypatch.setattr(hgrn2, "swish", F.silu)
    theirs, ours = hgrn2.HGRN2Attention(hidden_size=32, expand_ratio=8, layer_idx=1), HGRN2(32, expand_ratio=8)
    ours.load_state_dict(theirs.state_dict())
    x, bound = torch.randn(2, 80, 32), torch.rand(32)
    torch.testing.assert_close(theirs(x, lower_bound=bound)[0], ours(x, lower_bound=bound)[0], rtol=1e-4, atol=1e-5)


def layer_of(name):
    """Returns a small layer; its rotary embedding, which exists only in Triton, is left out."""
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "layer_idx": 0}
    if name == "simple_gla":
        return simple_gla.SimpleGatedLinearAttention(**sizes)
    if name == "linear_attn":
        return linear_attn.LinearAttention(**sizes, feature_map="elu", do_feature_map_norm=True)
    layer = multiscale_retention.MultiScaleRetention(**sizes)
    layer.rotary = Rotary()
    return layer


class Rotary(torch.nn.Module):
    def forward(self, q, k, **_):
        return q, k


@torch.no_grad()
@pytest.mark.parametrize("name", ["simple_gla", "retention", "linear_attn"])
def test_layers_with_a_gate_for_each_head_or_none(name):
    torch.manual_seed(0)
    x, offsets = torch.randn(1, 80, 32), torch.tensor([0, 9, 80])
    with accelerate(cpu=True):
        layer = layer_of(name)
        whole, _, _ = layer(x)
        _, _, cache = layer(x[:, :78], past_key_values=Cache(), use_cache=True)
        for t in (78, 79):
            y, _, cache = layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(y[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)
        parts = torch.cat([layer(x[:, :9])[0], layer(x[:, 9:])[0]], 1)
        torch.testing.assert_close(layer(x, cu_seqlens=offsets)[0], parts, rtol=1e-4, atol=1e-5)


MODELS = [
    ("GLA", {"num_heads": 2}),
    ("GLA", {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "fuse_norm": False, "fuse_swiglu": False}),
    ("GLA", {"num_heads": 2, "feature_map": "relu", "fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}),
    ("HGRN2", {"expand_ratio": 32, "use_short_conv": True}),
    ("GLA", {"num_heads": 2, "attn_mode": "fused_chunk"}),
    ("HGRN2", {"expand_ratio": 32, "attn_mode": "fused_chunk"}),
    ("GSA", {"num_heads": 2, "num_slots": 8}),
    ("KDA", {"num_heads": 2, "num_v_heads": 4, "head_dim": 16}),
    ("KDA", {"num_heads": 2, "head_dim": 16, "safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True}),
    ("GatedDeltaNet", {"num_heads": 2, "head_dim": 16, "num_v_heads": 4, "allow_neg_eigval": True}),
    ("GatedDeltaNet", {"num_heads": 2, "head_dim": 16, "use_gate": False, "use_short_conv": False}),
    ("DeltaNet", {"num_heads": 2}),
    (
        "DeltaNet",
        {"num_heads": 2, "qk_norm": "sum", "qk_activation": "elu", "use_gate": True, "allow_neg_eigval": True},
    ),
]


@pytest.mark.parametrize(("name", "options"), MODELS, ids=str)
def test_models_train_and_decode_on_a_cpu(name, options):
    with accelerate(cpu=True):
        torch.manual_seed(0)
        config = getattr(models, f"{name}Config")(
            hidden_size=64, num_hidden_layers=2, vocab_size=97, intermediate_size=128, **options
        )
        model, tokens = getattr(models, f"{name}ForCausalLM")(config), torch.randint(0, 97, (2, 80))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        for _ in range(12 if name == "GSA" else 5):  # it learns more slowly
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
        model.eval()
        with torch.no_grad():
            logits = model(tokens).logits
            expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            torch.testing.assert_close(model(tokens, labels=tokens).loss, expected, rtol=1e-4, atol=1e-4)
            out = model(tokens[:, :70], use_cache=True)
            for t in range(70, 73):
                out = model(tokens[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
                torch.testing.assert_close(out.logits[:, 0], logits[:, t], rtol=1e-3, atol=1e-4)
            mask = torch.ones(2, 80, dtype=torch.long)
            mask[0, :9] = 0
            padded = model(tokens, attention_mask=mask).logits[0, 9:]
            torch.testing.assert_close(padded, model(tokens[:1, 9:]).logits[0], rtol=1e-3, atol=1e-4)
            packed = model(tokens[:1], cu_seqlens=torch.tensor([0, 9, 80])).logits[0, 9:]
            torch.testing.assert_close(packed, model(tokens[:1, 9:]).logits[0], rtol=1e-3, atol=1e-4)
