"""MiniMax's lightning attention in transformers, accelerated: `make test-fla`, on a CPU too.

A difference is divided by the largest element of the tensor. transformers' own results change by 2e-7 (logits) and 5e-7
(gradients) with another block_size.
"""

import contextlib

import pytest
import torch

from gla_core.compat.transformers import accelerate

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-fla")

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24}
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(
        vocab_size=61, num_local_experts=2, num_experts_per_tok=2, block_size=16, pad_token_id=0, **SIZES, **LAYERS
    )
    return transformers.MiniMaxForCausalLM(config).eval()


def tokens_of(T=40):
    return torch.randint(1, 61, (2, T))


def close(actual, expected, tolerance):
    assert ((actual - expected).abs().max() / expected.abs().max()) < tolerance


def gradients(model, tokens):
    loss = model(tokens, labels=tokens).loss
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def test_values_gradients_and_padding(model):
    tokens, mask = tokens_of(), torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0
    expected, grads = model(tokens, attention_mask=mask).logits, gradients(model, tokens)
    with accelerate("minimax") as acceleration:
        close(model(tokens, attention_mask=mask).logits[mask == 1], expected[mask == 1], 1e-5)
        for actual, grad in zip(gradients(model, tokens), grads, strict=True):
            assert (actual is None) == (grad is None)
            if grad is not None:
                close(actual, grad, 1e-4)
    assert acceleration.served == {"MiniMaxLightningAttention.forward": 4}
    assert acceleration.left == {}
    assert torch.equal(model(tokens, attention_mask=mask).logits, expected)


def continued(model, tokens, accelerated):
    """Returns the logits of a prompt, of three tokens and of one; `accelerated` are the parts that compute here."""
    logits, cache = [], None
    for i, part in enumerate((slice(33), slice(33, 36), slice(36, 37))):
        with accelerate("minimax") if i in accelerated else contextlib.nullcontext():
            out = model(tokens[:, part], past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        cache = out.past_key_values
    return torch.cat(logits, 1)


@torch.no_grad()
@pytest.mark.parametrize("accelerated", [(0, 1, 2), (0,), (1, 2), (2,)])
def test_states_change_hands(model, accelerated):
    tokens = tokens_of()
    close(continued(model, tokens, accelerated), continued(model, tokens, ()), 1e-5)


def test_generated_tokens_are_equal(model):
    tokens, options = tokens_of(9), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(tokens, **options)
    with accelerate("minimax") as acceleration:
        assert torch.equal(model.generate(tokens, **options), expected)
    assert acceleration.served["MiniMaxLightningAttention.forward"] == 12
