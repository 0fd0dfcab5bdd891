"""`generate` and the cache: values, padding, and storage whose address does not change."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from gla_transformers import GLACache

CONFIGURATIONS = [{}, {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True}]
HGRN2 = {"model_type": "hgrn2", "use_short_conv": True}
HYBRID = {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 7}, "use_short_conv": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def thorough(options):
    return pytest.param(options, marks=pytest.mark.thorough)


@pytest.fixture(params=[*CONFIGURATIONS, HYBRID, HGRN2, thorough(HYBRID | HGRN2)], ids=str)
def model(request, ours):
    return ours(**request.param)


def storage(cache):
    return [x.data_ptr() for layer in cache.layers for x in (layer.state.recurrent, *(layer.state.conv or ()))]


def greedy(model, tokens, steps):
    """Computes the expected tokens of `generate` by reading the whole sequence again for each token."""
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens


@torch.no_grad()
def test_greedy_and_padded(model, tokens):
    expected = greedy(model, tokens[:1, 25:], 12)
    assert torch.equal(model.generate(tokens[:1, 25:], max_new_tokens=12), expected)
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    batch = model.generate(tokens, attention_mask=mask, max_new_tokens=12)
    assert torch.equal(batch[:1, 25:], expected)
    assert torch.equal(batch[1:], greedy(model, tokens[1:], 12))


def test_a_second_turn_goes_on_as_each_row_alone(model, tokens):
    """The prompts of both turns have padding, on their left and on their right."""
    mask = torch.ones_like(tokens)
    mask[0, :9], mask[1, 30:40], mask[0, 40:78] = 0, 0, 0
    cache = GLACache(model.config)
    first = model.generate(tokens[:, :40], attention_mask=mask[:, :40], past_key_values=cache, max_new_tokens=5)
    asked = torch.cat([first, tokens[:, 40:]], 1)  # the last new token has not been read yet
    mask = torch.cat([mask[:, :40], torch.ones(2, 5, dtype=torch.long), mask[:, 40:]], 1)
    second = model.generate(asked, attention_mask=mask, past_key_values=cache, max_new_tokens=8)[:, 85:]
    for row, seen, answer in zip(asked, mask == 1, second, strict=True):
        assert torch.equal(answer, greedy(model, row[seen][None], 8)[0, -8:])


@pytest.mark.parametrize("how", [{"do_sample": True}, {"num_beams": 3}, {"do_sample": True, "num_beams": 2}], ids=str)
def test_with_and_without_a_cache(model, tokens, how):
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    results = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        results.append(model.generate(tokens, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **how))
    assert torch.equal(*results)


def test_embeddings_and_chunks_of_a_prompt(model, tokens):
    expected = model.generate(tokens, max_new_tokens=8)
    assert torch.equal(model.generate(tokens, max_new_tokens=8, prefill_chunk_size=33), expected)
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model.generate(inputs_embeds=embedded, max_new_tokens=8), expected[:, 80:])


@torch.no_grad()
def test_reading_on_in_parts_of_any_size(model, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    mask[1, 60:62] = 0
    whole, cache = model(tokens, attention_mask=mask).logits, GLACache(model.config)
    for begin, end in [(0, 40), (40, 41), (41, 60), (60, 61), (61, 80)]:
        name = ("cache", "past_key_values")[begin % 2]
        part = model(tokens[:, begin:end], attention_mask=mask[:, :end], **{name: cache})
        assert part.past_key_values is cache
        where = mask[:, begin:end] == 1
        torch.testing.assert_close(part.logits[where], whole[:, begin:end][where], **CLOSE)
    assert cache.get_seq_length() == 80


@torch.no_grad()
@pytest.mark.parametrize("options", [*CONFIGURATIONS, thorough(HGRN2)], ids=str)
def test_the_states_stay_where_they_are(ours, tokens, options):
    model = ours(**options)
    cache = GLACache(model.config)
    first = model(tokens, past_key_values=cache).logits
    places = storage(cache)
    assert len(places) == (8 if options else 2)
    for t in range(3):
        model(tokens[:, t : t + 1], past_key_values=cache)
    model(tokens[:, :9], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    assert storage(cache) == places
    assert cache.get_seq_length() == 0
    assert torch.equal(model(tokens, past_key_values=cache).logits, first)
    assert storage(cache) == places


@torch.no_grad()
def test_rows_of_a_cache(model, tokens):
    def go_on(rows, change):
        cache = model(tokens[:, :40], use_cache=True).past_key_values
        change(cache)
        return model(tokens[rows, 40:41], past_key_values=cache).logits[:, -1]

    expected = model(tokens[:, :41]).logits[:, -1]
    change = {
        (1, 0): lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        (0, 0, 1, 1): lambda cache: cache.batch_repeat_interleave(2),
        (1,): lambda cache: cache.batch_select_indices(torch.tensor([1])),
    }
    for rows, how in change.items():
        torch.testing.assert_close(go_on(list(rows), how), expected[list(rows)], **CLOSE)


def test_gradients_with_a_cache_are_of_the_part_alone(ours, tokens):
    model = ours(use_short_conv=True)
    cache = GLACache(model.config)
    for part in tokens.split(40, 1):
        loss = model(part, labels=part, past_key_values=cache).loss
        gradient = torch.autograd.grad(loss, model.lm_head.weight)[0]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[:, 40:]
    weight = model.lm_head.weight.detach().requires_grad_()
    logits = hidden[:, :-1] @ weight.mT
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 41:].flatten())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0], **CLOSE)


@pytest.mark.parametrize("options", [{"use_short_conv": True}, HGRN2], ids=str)
def test_a_compiled_step_and_a_cache_that_says_so(ours, tokens, options):
    model = ours(**options)
    expected = model.generate(tokens, max_new_tokens=8)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        cache = GLACache(model.config, compileable=True)
        token = model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
        places, words = storage(cache), [tokens, token]
        for _ in range(7):
            words.append(step(words[-1], past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(words, 1), expected)
    assert storage(cache) == places
    assert cache.get_seq_length() == 87
    assert cache.is_compileable
    assert not GLACache(model.config).is_compileable
    assert torch.equal(model.generate(tokens, max_new_tokens=8, cache_implementation="static"), expected)


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_in_a_cuda_graph(ours, tokens):
    model, tokens = ours(use_short_conv=True).cuda(), tokens.cuda()
    cache, token = GLACache(model.config), tokens[:, :1].clone()
    for _ in range(2):  # a first call compiles and allocates, which must not be captured
        model(token, past_key_values=cache)
        model(token, past_key_values=cache)
        cache.reset()
    token.copy_(model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1))
    words, graph = [tokens, token.clone()], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(model(token, past_key_values=cache).logits[:, -1:].argmax(-1))
    for _ in range(7):
        graph.replay()
        words.append(token.clone())
    assert torch.equal(torch.cat(words, 1), model.generate(tokens, max_new_tokens=8))
    assert cache.get_seq_length() == 87


def test_generate_compiles_if_asked(ours, tokens):
    from transformers import CompileConfig

    model = ours()
    asked = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    asked._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    how = {"attention_mask": mask, "max_new_tokens": 8}
    results = model.generate(tokens, **how, cache_implementation="static", compile_config=asked)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(results, model.generate(tokens, **how))


@torch.no_grad()
@pytest.mark.parametrize("slow", [False, True])
def test_the_cost_of_states_in_bfloat16(ours, slow):
    """Measured: a divergence of 3e-4 and, with gates that forget slowly, 1e-3 between the next words' distributions."""
    sizes = {"hidden_size": 128, "initializer_range": 0.05}
    model, rounded = ours(**sizes), ours(**sizes, state_dtype="bfloat16")
    for layer in model.model.layers:
        layer.attn.gk_proj[1].bias.fill_(4.0 if slow else 0.0)
    rounded.load_state_dict(model.state_dict())
    tokens, cache = torch.randint(1, 61, (2, 160)), GLACache(rounded.config)
    expected = model(tokens).logits[:, 40:].log_softmax(-1)
    actual = [rounded(tokens[:, :40], past_key_values=cache).logits[:, :0]]
    actual += [rounded(word, past_key_values=cache).logits for word in tokens[:, 40:].split(1, 1)]
    assert {tensor.dtype for tensor in cache.tensors()} == {torch.bfloat16}
    actual = torch.cat(actual, 1).log_softmax(-1)
    divergence = F.kl_div(actual, expected, log_target=True, reduction="none").sum(-1).mean()
    assert 1e-9 < divergence < 3e-3
    with pytest.raises(ValueError, match="expected 'bfloat16', or None"):
        ours(state_dtype="float16")


@pytest.mark.parametrize("wanted", ["quantized", "offloaded"])
def test_caches_there_are_not(ours, tokens, wanted):
    model = ours()
    with pytest.raises(ValueError, match="expected 'dynamic' or 'static'"):
        model.generate(tokens, max_new_tokens=2, cache_implementation=wanted)
    with pytest.raises(TypeError, match=r"expected a gla_transformers\.GLACache"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="one argument"):
        model(tokens, past_key_values=GLACache(model.config), cache=GLACache(model.config))
    with pytest.raises(ValueError, match="grows"):
        GLACache(ours(**HYBRID).config, compileable=True)
    with pytest.raises(NotImplementedError, match="cannot be taken back"):
        model(tokens, use_cache=True).past_key_values.crop(-1)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(tokens[:1], max_new_tokens=2, assistant_model=ours())
