"""The model on a GPU: decoding in a CUDA graph, and a compiled step of training."""

from __future__ import annotations

import pytest
import torch

from gla_transformers import GLACache

# Without the repository's conftest.py, as the plugin is also tested, the marker skips nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}
NEW = 9


@pytest.fixture(params=["gla", "hgrn2"])
def model(ours, request):
    return ours(model_type=request.param, **SIZES).to("cuda", torch.bfloat16)


@pytest.fixture
def prompt():
    return torch.randint(1, 61, (3, 80), device="cuda")


@torch.no_grad()
def test_a_step_in_a_cuda_graph(model, prompt):
    """A replay gives the tokens of `generate`, and gives them again in the same memory after the cache is reset."""
    expected = model.generate(prompt, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False)[:, 80:]
    cache = GLACache(model.config, compileable=True)

    def read(words):
        return model(words, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    word, stream = read(prompt), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        word.copy_(read(word))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        word.copy_(read(word))
    for _ in range(2):
        cache.reset()
        word.copy_(read(prompt))
        found = [word.clone()]
        for _ in range(NEW - 1):
            graph.replay()
            found.append(word.clone())
        assert torch.equal(torch.cat(found, 1), expected)


@torch.no_grad()
def test_a_static_cache(model, prompt):
    options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(prompt, **options)
    found = model.generate(prompt, cache_implementation="static", **options)
    same = (found == expected).float().mean()
    assert same > 0.9, "a compiled step rounds in other places, but hardly changes a word"


def test_a_compiled_step_of_training(model, prompt):
    """A compiled step has no graph break, and its gradients equal an eager step's up to rounding."""
    model.train()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(prompt, labels=prompt).loss, parameters)
    compiled = torch.compile(lambda words: model(words, labels=words).loss, fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(prompt), parameters), expected, strict=True):
        difference = (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-6)
        assert difference < 3e-2


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_generating_by_graphs(model, prompt, how):
    """Captures neither fail nor change a word, again and again, for prompts with padding too."""
    mask = torch.ones_like(prompt)
    mask[0, :30] = 0
    options = how | {"min_new_tokens": NEW, "max_new_tokens": NEW}
    model.float()  # in bfloat16, pieces of prompts round differently
    for given in ({}, {"attention_mask": mask}):
        model.config.cuda_graphs = False
        torch.manual_seed(1)
        expected = model.generate(prompt, **given, **options)
        model.config.cuda_graphs = True
        for _ in range(6):
            torch.manual_seed(1)
            assert torch.equal(model.generate(prompt, **given, **options), expected)
    (slot,) = model.model.graphs.slots
    assert not model.model.graphs.failed
    assert {T for T, _ in slot.pieces} >= {1, 128}


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"model_type": "hgrn2", "expand_ratio": 128}], ids=str)
def test_kernels_of_a_step(ours, options):
    """Counts the kernels that two more layers add to a replayed step in bfloat16."""
    numbers, sizes = [], {"hidden_size": 1024, "intermediate_size": 2816}
    for layers in (2, 4):
        model = ours(num_hidden_layers=layers, **sizes, **options).to("cuda", torch.bfloat16)
        cache, token = GLACache(model.config), torch.ones(1, 1, dtype=torch.long, device="cuda")
        for _ in range(8):
            model(token, past_key_values=cache)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(token, past_key_values=cache)
            torch.cuda.synchronize()
        numbers.append(sum(x.count for x in profile.key_averages() if x.device_type.name == "CUDA"))
    assert (numbers[1] - numbers[0]) / 2 <= 7, numbers
