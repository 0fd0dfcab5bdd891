"""flash-linear-attention's own models on a GPU, with its kernels and accelerated."""

import contextlib

import pytest
import torch

import gla_core as gla
from gla_core.compat.fla import accelerate

models = pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 61}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(params=["GLA", "HGRN2", "KDA", "GatedDeltaNet", "DeltaNet"])
def model(request):
    config = getattr(models, f"{request.param}Config")(**SIZES)
    return getattr(models, f"{request.param}ForCausalLM")(config).to("cuda", torch.bfloat16)


@pytest.fixture
def words():
    return torch.randint(1, 61, (4, 200), device="cuda")


def apart(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("model", ["GLA", "HGRN2"], indirect=True)
def test_losses_and_gradients(model, words):
    parameters, results = list(model.parameters()), []
    for how in (accelerate, contextlib.nullcontext):
        with how():
            loss = model(words, labels=words).loss
            results.append((loss, torch.autograd.grad(loss, parameters)))
    (loss, grads), (expected, theirs) = results
    assert apart(loss, expected) < 1e-2
    assert max(apart(a, b) for a, b in zip(grads, theirs, strict=True)) < 5e-2


def test_packed_sequences_are_as_those_of_a_batch(model, words):
    """Under `batch_invariant`, both agree up to 1e-3 of the largest output, as in flash-linear-attention's tests."""
    offsets = torch.arange(5, device="cuda", dtype=torch.int32) * 200
    with accelerate(), gla.batch_invariant(), torch.no_grad():
        apart_ones = model(words, output_hidden_states=True).hidden_states[-1]
        packed = model(words.view(1, -1), cu_seqlens=offsets, output_hidden_states=True).hidden_states[-1]
    assert apart(packed.view_as(apart_ones), apart_ones) < 1e-3


@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_whole(model, words):
    model.eval()
    with accelerate():
        whole = model(words).logits
        out, results = model(words[:, :100], use_cache=True), []
        for t in range(100, 110):
            out = model(words[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            results.append(out.logits)
    assert apart(torch.cat(results, 1), whole[:, 100:110]) < 2e-2
