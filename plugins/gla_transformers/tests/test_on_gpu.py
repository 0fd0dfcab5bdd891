"""The models on a GPU: decoding in a CUDA graph, and training, its loss too; and transformers' Mamba-2."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_transformers import GLACache, accelerate, generation, hybrid_generation, loss
from gla_transformers.gated import forgetting

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
        read_words = [word.clone()]
        for _ in range(NEW - 1):
            graph.replay()
            read_words.append(word.clone())
        assert torch.equal(torch.cat(read_words, 1), expected)


@torch.no_grad()
def test_a_static_cache(model, prompt):
    options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(prompt, **options)
    actual = model.generate(prompt, cache_implementation="static", **options)
    same = (actual == expected).float().mean()
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


def test_the_loss_of_logits():
    """In bfloat16, with more than 2^31 logits, against float32."""
    n, D = 67_584, 32_000
    logits = torch.randn(n, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, D, (n,), device="cuda").masked_fill_(torch.rand(n, device="cuda") < 0.1, loss.IGNORED)
    assert loss._functions(logits, targets).__name__ == "gla_transformers.loss_kernel"
    actual = loss.sum_of_losses(logits, targets, loss.IGNORED)
    (gradient,) = torch.autograd.grad(actual / n, logits)
    expected = 0
    for x, labels, dx in zip(*(y.split(4096) for y in (logits.detach(), targets, gradient)), strict=True):
        x = x.float().requires_grad_()
        part = F.cross_entropy(x, labels, reduction="sum")
        torch.testing.assert_close(dx.float(), torch.autograd.grad(part / n, x)[0], rtol=5e-3, atol=1e-12)
        expected = expected + part.detach().double()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_generating_by_graphs(model, prompt, how):
    """Captures neither fail nor change a word, again and again, for prompts with padding too."""
    mask = torch.ones_like(prompt)
    mask[0, :30] = 0
    options = how | {"min_new_tokens": NEW, "max_new_tokens": NEW}
    model.float()  # in bfloat16, pieces of prompts round differently
    for masks in ({}, {"attention_mask": mask}):
        model.config.cuda_graphs = False
        torch.manual_seed(1)
        expected = model.generate(prompt, **masks, **options)
        model.config.cuda_graphs = True
        for _ in range(6):
            torch.manual_seed(1)
            assert torch.equal(model.generate(prompt, **masks, **options), expected)
    (slot,) = model.model.graphs.slots
    assert not model.model.graphs.failed
    assert {form[0] for form in slot.pieces} >= {1, 128}


ENDS = {"eos_token_id": [*range(3, 9)], "pad_token_id": 0}
LOOPS = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.5, "min_new_tokens": 20} | ENDS,
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7} | ENDS,
    {"do_sample": True, "top_k": 0, "min_p": 0.05, "min_length": 90} | ENDS,
    {"do_sample": True, "top_k": 0, "typical_p": 0.9, "epsilon_cutoff": 0.01, "renormalize_logits": True},
]


def check_loop(model, prompt, options, monkeypatch):
    """Compares tokens and the random numbers after them with transformers' loop, and returns the graphs of loops."""
    results = []
    for is_theirs in (True, *[False] * 6):
        with monkeypatch.context() as patched:
            if is_theirs:
                patched.setattr(generation, "rules", lambda *_: None)
            torch.manual_seed(1)
            tokens = model.generate(prompt, max_new_tokens=30, **options)
            results.append((tokens, torch.rand(3, device="cuda")))
    for tokens, random in results[1:]:
        assert torch.equal(tokens, results[0][0])
        assert torch.equal(random, results[0][1])
    graphs = hybrid_generation._graphs.get(model) or model.model.graphs
    assert not graphs.failed
    return [form[0] for slot in graphs.slots for form in slot.pieces if len(form) == 3]


@pytest.mark.parametrize("options", LOOPS, ids=str)
def test_several_tokens_in_a_graph(model, prompt, options, monkeypatch):
    """The draws of a graph are those of as many single ones, and so is where they leave the generator."""
    model.float()
    assert generation.TOKENS in check_loop(model, prompt, options, monkeypatch)


@pytest.mark.parametrize("name", ["Mamba2", "Bamba", "FalconH1", "Qwen3_5"])
@pytest.mark.parametrize("options", LOOPS[::3], ids=str)
def test_several_tokens_of_hybrids_in_a_graph(name, hybrid_of, prompt, options, monkeypatch):
    model = hybrid_of(name).cuda()
    with accelerate():
        assert generation.TOKENS in check_loop(model, prompt, options, monkeypatch)


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


def test_gradients_of_gates():
    """The gates of HGRN2 in more rows than there are programs, which sum for the gradient of the lower bound."""
    q, f, _ = torch.randn(4, 2048, 3072, device="cuda").mul_(4).bfloat16().split(1024, -1)
    inputs = [x.requires_grad_() for x in (q.detach(), f.detach(), torch.rand(1024, device="cuda") * 0.9)]
    z, x, c = exact = [y.detach().double().requires_grad_() for y in inputs]
    alpha = c + (1 - c) * x.sigmoid()
    results, expected = forgetting(*inputs), (F.silu(z), 1 - alpha, alpha.log())
    gradients = [torch.randn_like(y) for y in results]
    actual = torch.autograd.grad(results, inputs, gradients)
    wanted = torch.autograd.grad(expected, exact, [y.double() for y in gradients])
    for y, a, b in zip(inputs, actual, wanted, strict=True):
        assert relative_error(a, b) <= GRADIENT[y.dtype]
    again = torch.autograd.grad(forgetting(*inputs), inputs, gradients)
    assert all(map(torch.equal, actual, again))


def mamba2(layers, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 2, "vocab_size": 61}
    config = transformers.Mamba2Config(**sizes | {"residual_in_fp32": False} | options, num_hidden_layers=layers)
    return transformers.Mamba2ForCausalLM(config).eval().cuda()


def tokens_and_cache(model, prompt):
    """Returns a function that reads a token, and the states that it advances."""
    out = model(prompt, use_cache=True)
    key = next(name for name in ("cache", "past_key_values", "cache_params") if name in out)
    layers = out[key].layers
    states = [x for layer in layers for x in (layer.conv_states[0], layer.recurrent_states[0])]
    return lambda words: model(words, use_cache=True, **{key: out[key]}).logits, states


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"n_groups": 1, "residual_in_fp32": True}], ids=str)
@pytest.mark.parametrize("sequences", [1, 3, 70])
def test_mamba2_of_transformers(sequences, options):
    """A step by kernels has the error of transformers' own, and the same results in a CUDA graph."""
    prompt = torch.randint(1, 61, (sequences, 80), device="cuda")
    model, word = mamba2(2, **options), prompt[:, :1].clone()
    exact = tokens_and_cache(model, prompt)[0](word)
    model.bfloat16()
    original = tokens_and_cache(model, prompt)[0](word)
    with accelerate():
        read, states = tokens_and_cache(model, prompt)
        before = [x.clone() for x in states]
        actual = read(word)
        assert (actual - exact).norm() <= 1.5 * (original - exact).norm()
        after = [x.clone() for x in states]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            read(word)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            captured = read(word)
        torch._foreach_copy_(states, before)
        graph.replay()
        torch.testing.assert_close((captured, *states), (actual, *after), rtol=1e-2, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize(("sequences", "groups", "most"), [(1, 1, 4), (1, 2, 5), (3, 1, 6), (3, 2, 6)])
def test_kernels_of_a_step_of_mamba2(sequences, groups, most, prompt):
    """Counts the kernels that two more layers add to a step."""
    numbers, prompt = [], prompt[:sequences]
    for layers in (2, 4):
        model = mamba2(layers, n_groups=groups, residual_in_fp32=True).bfloat16()
        with accelerate():
            read, _ = tokens_and_cache(model, prompt)
            for _ in range(3):
                read(prompt[:, :1])
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                read(prompt[:, :1])
                torch.cuda.synchronize()
        numbers.append(sum(x.count for x in profile.key_averages() if x.device_type.name == "CUDA"))
    assert (numbers[1] - numbers[0]) / 2 <= most, numbers


def test_training_mamba2_of_transformers(prompt):
    """Gradients by kernels have the error of transformers' own in bfloat16."""
    model = mamba2(2).train()
    parameters = list(model.parameters())

    def gradients():
        return torch.autograd.grad(model(prompt, labels=prompt).loss, parameters)

    exact = gradients()
    model.bfloat16()
    parameters = list(model.parameters())
    original = gradients()
    with accelerate():
        actual = gradients()

    def error(a):
        return sum((x.float() - y).norm() ** 2 for x, y in zip(a, exact, strict=True)) ** 0.5

    assert error(actual) <= 1.5 * error(original)
