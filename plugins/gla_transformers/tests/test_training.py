"""Training: losses, checkpointing, compilation, precision, packing."""

import pytest
import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from gla_core.bench.kept import Storages, bytes_kept
from gla_transformers import GLACache, modeling
from gla_transformers.loss import next_token_loss
from gla_transformers.loss_pytorch import ROWS

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def loss_and_gradients(model, *args, **kwargs):
    loss = model(*args, **kwargs).loss
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.fixture(params=[{}, pytest.param({"model_type": "hgrn2"}, marks=pytest.mark.thorough)], ids=str)
def model(ours, request):
    return ours(use_short_conv=True, **request.param).train()


def test_the_loss_is_of_the_next_token(model, tokens):
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    logits = model(tokens).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(model(tokens, labels=labels).loss, expected / count)
    torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=50).loss, expected / 50)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, expected / count)


@pytest.mark.parametrize("warp", [False, True])
@pytest.mark.parametrize("number", [None, 50])
def test_the_loss_in_parts(ours, tokens, warp, number):
    model = ours(use_l2warp=warp).train()
    model.lm_head.weight.data *= 100
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    whole = loss_and_gradients(model, tokens, labels=labels, num_items_in_batch=number)
    model.config.fuse_linear_cross_entropy = True
    torch.testing.assert_close(loss_and_gradients(model, tokens, labels=labels, num_items_in_batch=number), whole)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    actual = loss_and_gradients(model, tokens, shift_labels=shifted, num_items_in_batch=number)
    torch.testing.assert_close(actual, whole)
    other = {"labels": labels.where(labels >= 0, 0), "num_items_in_batch": number, "ignore_index": 0}
    torch.testing.assert_close(loss_and_gradients(model, tokens, **other), whole)
    assert model(tokens, labels=labels).logits is None
    assert model(tokens).logits.shape == (2, 80, 61)


def test_what_is_kept_and_returned(ours, tokens):
    model = ours()
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
        assert [x.shape for x in out.hidden_states] == [(2, 80, 32)] * 3
        assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(tokens))
        assert torch.equal(model.lm_head(out.hidden_states[2]), out.logits)
        torch.testing.assert_close(model(tokens, logits_to_keep=3).logits, out.logits[:, -3:])
        places = torch.tensor([5, 70])
        torch.testing.assert_close(model(tokens, logits_to_keep=places).logits, out.logits[:, places])
        embedded = model.get_input_embeddings()(tokens)
        assert torch.equal(model(inputs_embeds=embedded).logits, out.logits)
        logits, cache = model(tokens, return_dict=False)
        assert torch.equal(logits, out.logits)
        assert cache.get_seq_length() == 80
        assert model(tokens, use_cache=False).past_key_values is None
    assert model.train()(tokens).past_key_values is None


def test_tied_embeddings_and_another_vocabulary(ours, tokens):
    model = ours(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embeddings.weight
    model.resize_token_embeddings(70)
    assert model(tokens).logits.shape == (2, 80, 70)
    assert model.lm_head.weight is model.model.embeddings.weight
    assert (model.config.vocab_size, model(tokens, labels=tokens).loss.isfinite()) == (70, True)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # transformers 5.0 lacks the name that replaces it
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["gla", "hgrn2"])
def test_gradient_checkpointing(ours, tokens, reentrant, kind):
    model = ours(model_type=kind, num_hidden_layers=3).train()
    expected = loss_and_gradients(model, tokens, labels=tokens)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    runs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    loss = model(tokens, labels=tokens, use_cache=True).loss
    loss.backward()
    assert len(runs) == 2  # forward, and again in the backward
    torch.testing.assert_close((loss, [x.grad for x in model.parameters()]), (expected[0], list(expected[1])))
    assert model(tokens, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match=r"in training with gradient checkpointing; call model\.eval\(\) or"):
        model(tokens, past_key_values=GLACache(model.config))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_generating_in_training_with_gradient_checkpointing(model, tokens, how, monkeypatch):
    expected, said = model.eval().generate(tokens, max_new_tokens=4, **how), []
    monkeypatch.setattr(modeling.logger, "warning_once", said.append)
    assert torch.equal(model.train().generate(tokens, max_new_tokens=4, **how), expected)
    assert said == []
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(tokens, max_new_tokens=4, **how), expected)
    assert len(said) == 1
    assert "call model.eval() or model.gradient_checkpointing_disable() first" in said[0]
    assert model.training
    assert model.generation_config.use_cache is not False


@pytest.mark.parametrize(
    "options", [{}, {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}, {"model_type": "hgrn2"}], ids=str
)
def test_compiled_without_a_break(ours, tokens, options):
    model = ours(use_short_conv=True, use_l2warp=True, **options).train()
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    arguments = {"labels": tokens, "attention_mask": mask}
    expected = loss_and_gradients(model, tokens, **arguments)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(compiled, tokens, **arguments), expected, **CLOSE)
    cu_seqlens = torch.tensor([0, 30, 80])
    arguments = {"labels": tokens[:1], "cu_seqlens": cu_seqlens}
    expected = loss_and_gradients(model, tokens[:1], **arguments)
    torch.testing.assert_close(loss_and_gradients(compiled, tokens[:1], **arguments), expected, **CLOSE)


def test_autocast_and_bfloat16(model, tokens):
    expected, gradients = loss_and_gradients(model, tokens, labels=tokens)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, labels=tokens)
    assert out.logits.dtype == torch.bfloat16
    torch.testing.assert_close(out.loss, expected, rtol=2e-2, atol=2e-2)
    actual = torch.autograd.grad(out.loss, list(model.parameters()))
    assert all(x.dtype == torch.float32 for x in actual)
    for a, b in zip(actual, gradients, strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.95
    half = model.to(torch.bfloat16).eval()
    with torch.no_grad():
        out = half(tokens, labels=tokens)
        assert (out.logits.dtype, out.loss.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(out.loss, expected, rtol=3e-2, atol=3e-2)
        assert out.past_key_values.layers[0].state.recurrent.dtype == torch.float32
    assert half.generate(tokens, max_new_tokens=4).shape == (2, 84)


@pytest.mark.parametrize("options", [{}, pytest.param({"model_type": "hgrn2"}, marks=pytest.mark.thorough)], ids=str)
def test_learning(ours, options):
    model = ours(initializer_range=0.02, **options).train()
    tokens = torch.arange(60).repeat(3)[None]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(30):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5
    assert torch.equal(model.eval().generate(tokens[:, :70], max_new_tokens=10), tokens[:, :80])


@pytest.mark.parametrize("kind", ["gla", "hgrn2"])
def test_the_memory_that_is_kept(ours, kind):
    """In bfloat16 a layer keeps no input of a projection, and the loss keeps the logits."""
    D, width, words = 64, 192, 211
    model = ours(model_type=kind, hidden_size=D, intermediate_size=width, vocab_size=words).to(torch.bfloat16).train()
    tokens = torch.randint(1, words, (2, 64))
    attention = {
        "gla": D / 2 + D / 2 + D + 16 + D / 2 + D + D,  # q, k, v, low rank, logits; o, its gate
        "hgrn2": D + D + D + 2 * D + D + D + D,  # q, silu(q), f, float32 gates, k, v; o
    }[kind]
    layer = attention + D + 2 * width + D  # the sum; gate and x of the MLP; the sum
    kept = bytes_kept(lambda: model(tokens, labels=tokens).loss) / tokens.numel()
    assert kept <= 1.03 * 2 * (D + 2 * layer + words + 4 + 2)  # the embeddings; a label, and a normalizer


def test_the_loss_makes_no_copy_of_all_logits():
    logits = torch.randn(1, 8 * ROWS, 13).bfloat16().requires_grad_()
    labels = torch.randint(0, 13, (1, 8 * ROWS))
    with Storages() as storages:
        next_token_loss(logits, labels, 13).backward()
    assert storages.largest == 2 * logits.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_loss_of_logits(dtype):
    """Values and derivatives are those of transformers' loss, also with labels to ignore and logits of -inf."""
    logits = torch.randn(2, 700, 13, dtype=dtype)
    logits[:, ::3, 0] = -torch.inf
    labels = torch.randint(1, 13, (2, 700)).masked_fill(torch.rand(2, 700) < 0.3, -100)
    for options in {}, {"num_items_in_batch": 50}, {"shift_labels": labels}, {"ignore_index": 3}:
        targets = labels.abs().clamp(max=12) if "ignore_index" in options else labels
        pairs = []
        for loss in next_token_loss, ForCausalLMLoss:
            x = logits.clone().requires_grad_()
            y = loss(x, targets, 13, **options)
            pairs.append((y, *torch.autograd.grad(y, x, retain_graph=True)))
            if dtype == torch.float64:
                (slope,) = torch.autograd.grad(y * y, x, create_graph=True)
                pairs[-1] += torch.autograd.grad(slope[:, :, 1:].square().sum(), x)
        torch.testing.assert_close(*pairs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_another_loss_is_called(model, tokens):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + vocab_size
    assert model(tokens, labels=tokens).loss == 61
