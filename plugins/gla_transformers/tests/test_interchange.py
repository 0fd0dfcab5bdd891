"""Weights, configurations and values equal flash-linear-attention's own model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import gla_transformers
from gla_transformers import GLAConfig, GLAForCausalLM, HGRN2Config, HGRN2ForCausalLM
from gla_transformers.cache import NAME

CONFIGURATIONS = [
    {},
    {"intermediate_size": None, "hidden_ratio": 3},
    {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1.0, "clamp_min": -0.02},
    {"use_short_conv": True, "conv_size": 3, "feature_map": "relu"},
    {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False, "norm_eps": 1e-3},
    {"use_output_gate": False, "elementwise_affine": False, "use_gk": False, "use_gv": True},
    {"tie_word_embeddings": True, "attn_mode": "fused_recurrent"},
    {"model_type": "hgrn2"},
    {"model_type": "hgrn2", "use_short_conv": True, "conv_size": 3, "norm_eps": 1e-3, "num_hidden_layers": 3},
    {"model_type": "hgrn2", "use_lower_bound": False, "elementwise_affine": False, "expand_ratio": 8},
]
SEQUENCES = [CONFIGURATIONS[i] for i in (0, 2, 3, 8)]  # they differ in how they treat sequences
KINDS = ["gla", "hgrn2"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_state_dicts_are_strict_in_both_directions(theirs, ours, options):
    a, b = theirs(**options), ours(**options)
    assert {name: x.shape for name, x in a.state_dict().items()} == {n: x.shape for n, x in b.state_dict().items()}
    b.load_state_dict(a.state_dict(), strict=True)
    a.load_state_dict(b.state_dict(), strict=True)


ATTENTION = {"layers": [1], "num_heads": 2}
OTHERS = [{"attn": ATTENTION}, {"attn": [ATTENTION]}, {"model_type": "hgrn2", "expand_ratio": None, "num_heads": 8}]


@pytest.mark.parametrize("options", [*CONFIGURATIONS, *OTHERS], ids=str)
def test_configurations_say_the_same(options):
    import fla.models

    rest = {name: value for name, value in options.items() if name != "model_type"}
    name = f"{options.get('model_type', 'gla').upper()}Config"
    ours, theirs = (getattr(models, name) for models in (gla_transformers, fla.models))
    assert ours(**rest).to_dict() == theirs(**rest).to_dict()
    assert ours.from_dict(theirs(**rest).to_dict()).to_dict() == theirs(**rest).to_dict()
    assert theirs.from_dict(ours(**rest).to_dict()).to_dict() == ours(**rest).to_dict()


def test_the_public_checkpoints_have_their_sizes():
    with torch.device("meta"):
        model = GLAForCausalLM(GLAConfig())  # as published by FLA: 2048 wide, 24 layers, 4 heads
        other = HGRN2ForCausalLM(HGRN2Config())
    assert model.num_parameters() == 1365514240
    assert model.model.layers[23].mlp.gate_proj.weight.shape == (5632, 2048)
    assert other.num_parameters() == 2 * 32000 * 2048 + 24 * (4 * 2048**2 + 3 * 2048 * 5632 + 4 * 2048) + 2048


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_logits_loss_and_gradients(pair, tokens, options):
    labels = tokens.clone()
    labels[0, :30] = -100
    results = []
    for model in pair(**options):
        out = model(tokens, labels=labels, output_hidden_states=True)
        gradients = torch.autograd.grad(out.loss, list(model.parameters()))
        assert all(x.any() for x in gradients)
        names = [name for name, _ in model.named_parameters()]
        results.append((out.logits, out.loss, out.hidden_states, dict(zip(names, gradients, strict=True))))
    torch.testing.assert_close(*results, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("options", SEQUENCES, ids=str)
def test_padding(pair, tokens, options):
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    mask[1, 70:] = 0
    a, b = (model(tokens, attention_mask=mask).logits for model in pair(**options))
    torch.testing.assert_close(a[mask == 1], b[mask == 1], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("options", SEQUENCES, ids=str)
def test_packed_sequences(pair, tokens, options):
    cu_seqlens = torch.tensor([0, 3, 50, 80])
    a, b = pair(**options)
    results = b(tokens[:1], cu_seqlens=cu_seqlens).logits
    torch.testing.assert_close(results, a(tokens[:1], cu_seqlens=cu_seqlens).logits, **CLOSE)
    torch.testing.assert_close(results[:, 3:50], b(tokens[:1, 3:50]).logits, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_generated_tokens(pair, tokens, how, kind):
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    results = []
    for model in pair(use_short_conv=True, model_type=kind):
        torch.manual_seed(1)
        cache = {} if NAME == "past_key_values" or results else {"use_cache": False}  # FLA forgets a `cache`
        results.append(model.generate(tokens, attention_mask=mask, max_new_tokens=12, **how, **cache))
    assert results[0].shape == (2, 92)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_theirs(theirs, ours, tokens, tmp_path, kind):
    model = theirs(use_short_conv=True, model_type=kind)
    model.save_pretrained(tmp_path)
    gla_transformers.register()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(ours(model_type=kind))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_ours(ours, theirs, tokens, tmp_path, kind):
    model = ours(use_short_conv=True, model_type=kind)
    model.save_pretrained(tmp_path)
    loaded = type(theirs(model_type=kind)).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}], ids=str)
def test_the_loss_of_a_number_of_items(pair, tokens, options):
    a, b = (model(tokens, labels=tokens, num_items_in_batch=torch.tensor(37)) for model in pair(**options))
    torch.testing.assert_close(a.loss, b.loss, **CLOSE)
    assert (a.logits is None) == (b.logits is None)


@pytest.mark.parametrize("number", [None, 37])
def test_l2warp(pair, tokens, number):
    results = []
    for model in pair(use_l2warp=True):
        model.lm_head.weight.data *= 1000  # large logits, which l2warp is there to reduce
        loss = model(tokens, labels=tokens, num_items_in_batch=number).loss
        results.append((loss, torch.autograd.grad(loss, model.lm_head.weight)[0]))
    torch.testing.assert_close(*results, **CLOSE)
    model.config.use_l2warp = False
    loss = model(tokens, labels=tokens, num_items_in_batch=number).loss
    assert loss == results[1][0]
    assert (torch.autograd.grad(loss, model.lm_head.weight)[0] - results[1][1]).abs().max() > 10 * CLOSE["atol"]
