"""Captured steps and prompts, with a graph that calls the captured function again, on a CPU."""

import copy
import gc
import pickle

import pytest
import torch

import gla_core as gla
from gla_transformers import GLACache, GLAConfig, generation, graphs

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NEW = 12


class Replay:
    """Computes the captured function again. `made` counts captures and `replayed` replays."""

    made = replayed = 0

    def __init__(self, call, device, beside):
        type(self).made += 1
        self.call = call

    def __call__(self):
        type(self).replayed += 1
        return self.call()


@pytest.fixture(autouse=True)
def replay(monkeypatch):
    monkeypatch.setitem(graphs.CAPTURES, "cpu", Replay)
    monkeypatch.setattr(graphs, "LENGTHS", (16, 4))
    monkeypatch.setattr(graphs, "SPARE_TOKENS", 6)
    monkeypatch.setattr(Replay, "made", 0)
    monkeypatch.setattr(Replay, "replayed", 0)
    return Replay


@pytest.fixture
def token_by_token(monkeypatch):
    """Has `generate` call the model for each token, as transformers' loop does."""
    monkeypatch.setattr(generation, "rules", lambda *_: None)


@pytest.fixture(params=[{}, pytest.param({"model_type": "hgrn2"}, marks=pytest.mark.thorough)], ids=str)
def model(ours, request):
    return ours(num_hidden_layers=1, use_short_conv=True, **request.param)


@pytest.fixture
def tokens():
    return torch.randint(1, 61, (2, 23))


def plainly(model, *args, **kwargs):
    """Generates without graphs."""
    model.config.cuda_graphs = False
    results = model.generate(*args, max_new_tokens=NEW, **kwargs)
    model.config.cuda_graphs = True
    return results


def generated(model, *args, **kwargs):
    return model.generate(*args, max_new_tokens=NEW, **kwargs)


def test_one_capture_serves_many_calls(model, tokens, replay, token_by_token):
    expected = plainly(model, tokens)
    assert replay.made == 0
    assert torch.equal(generated(model, tokens), expected)
    steps = NEW - 1 - graphs.BEFORE
    assert (replay.made, replay.replayed) == (1, steps)
    assert torch.equal(generated(model, tokens), expected)
    assert (replay.made, replay.replayed) == (1, steps + NEW - 1)
    for _ in range(3):  # prompts as well, of other lengths too: 23 = 3 + 4 + 16 and 21 = 1 + 4 + 16, less the padding
        assert torch.equal(generated(model, tokens), expected)
    captured = replay.made
    other = torch.randint(1, 61, (2, 21))
    assert torch.equal(generated(model, other), plainly(model, other))
    assert captured == replay.made == 4
    assert len(model.model.graphs.slots) == 1


@pytest.mark.parametrize("how", [{"do_sample": True}, {"num_beams": 3}, {"do_sample": True, "num_beams": 2}], ids=str)
def test_padding_sampling_and_beams(model, tokens, how, replay, token_by_token):
    mask = torch.ones_like(tokens)
    mask[0, :18] = 0
    how = how | {"attention_mask": mask}
    torch.manual_seed(1)
    expected = plainly(model, tokens, **how)
    for _ in range(6):
        torch.manual_seed(1)
        assert torch.equal(generated(model, tokens, **how), expected)
    assert replay.made == 3


@torch.no_grad()
def test_prompts_in_pieces_equal_whole_ones(model, tokens, replay):
    mask = torch.ones_like(tokens)
    mask[0, :18], mask[1, 20:22] = 0, 0
    generated(model, tokens)
    for T, seen in [(23, mask), (23, None), (16, None), (5, None), (2, None), (22, mask.bool())]:
        seen = None if seen is None else seen[:, :T]
        whole = model(tokens[:, :T], attention_mask=seen, use_cache=False).logits
        for _ in range(graphs.BEFORE + 2):
            cache, before = GLACache(model.config), replay.replayed
            actual = model(tokens[:, :T], attention_mask=seen, past_key_values=cache).logits
            where = torch.ones(2, T, dtype=torch.bool) if seen is None else seen == 1
            torch.testing.assert_close(actual[where], whole[where], **CLOSE)
            assert cache.get_seq_length() == T
        assert replay.replayed == before + len(graphs.lengths(T, 2))
        step = model(tokens[:, :1], past_key_values=cache).logits
        row = torch.cat([tokens[1:, :T] if seen is None else tokens[1:, :T][:, seen[1] == 1], tokens[1:, :1]], 1)
        torch.testing.assert_close(step[1:, -1], model(row, use_cache=False).logits[:, -1], **CLOSE)


@torch.no_grad()
def test_states_in_bfloat16(model, tokens, replay):
    """A slot serves caches of its own kind of states alone."""
    generated(model, tokens)
    model.config.state_dtype = "bfloat16"
    expected = plainly(model, tokens)
    for _ in range(2):
        assert torch.equal(generated(model, tokens), expected)
    assert [slot.cache.tensors()[0].dtype for slot in model.model.graphs.slots] == [torch.float32, torch.bfloat16]


@torch.no_grad()
def test_caches_that_live_together(model, tokens):
    """Each has states of its own, whichever of them were those of a slot."""
    generated(model, tokens)
    caches = [GLACache(model.config) for _ in range(3)]
    words = [tokens[:, i : i + 6] for i in range(3)]
    results = [model(w, past_key_values=cache).logits[:, -1:] for w, cache in zip(words, caches, strict=True)]
    for _ in range(6):
        words = [torch.cat([w, x.argmax(-1)], 1) for w, x in zip(words, results, strict=True)]
        results = [model(w[:, -1:], past_key_values=cache).logits for w, cache in zip(words, caches, strict=True)]
    for w, x in zip(words, results, strict=True):
        torch.testing.assert_close(x, model(w, use_cache=False).logits[:, -1:], **CLOSE)
    places = {tensor.data_ptr() for cache in caches for tensor in cache.tensors()}
    assert len(places) == 3 * len(caches[0].tensors())


@torch.no_grad()
def test_a_cache_goes_on_after_its_slot_is_gone(model, tokens, replay):
    cache = GLACache(model.config)
    words, logits = tokens[:, :6], model(tokens[:, :6], past_key_values=cache).logits[:, -1:]
    changes = {
        5: model.model.graphs.drop,
        10: lambda: cache.batch_select_indices(torch.tensor([0, 1])),
        15: lambda: cache.reorder_cache(torch.tensor([0, 1])),
    }
    for i in range(20):
        changes.get(i, lambda: None)()
        words = torch.cat([words, logits.argmax(-1)], 1)
        logits = model(words[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(words, use_cache=False).logits[:, -1:], **CLOSE)
    assert replay.made == 2  # its free slot served again after the second change
    assert torch.equal(copy.deepcopy(cache).tensors()[0], cache.tensors()[0])


def test_a_bounded_number_of_slots(model, tokens, replay):
    for B in [1, 2, 3, 4, 5, 6, 5, 2]:
        rows = tokens[:1].expand(B, -1)
        assert torch.equal(generated(model, rows), plainly(model, rows))
        assert len(model.model.graphs.slots) <= graphs.MOST_SLOTS
    assert [slot.setting.sequences for slot in model.model.graphs.slots] == [4, 6, 5, 2]


def change_weights(model):
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight * 3


def replace_a_layer(model):
    model.model.layers[0].attn.o_proj = torch.nn.Sequential(model.model.layers[0].attn.o_proj, torch.nn.Tanh())


def hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, y: -y)


def change_an_option(model):
    model.model.layers[0].mlp_norm.eps = 1.0


def convert(model):
    model.double()


CHANGES = [change_weights, replace_a_layer, hook, change_an_option, convert]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_has_changed(model, tokens, change, replay, token_by_token):
    before = generated(model, tokens)
    change(model)
    results = [generated(model, tokens) for _ in range(3)]
    expected = plainly(model, tokens)
    assert all(torch.equal(x, expected) for x in results)
    assert not torch.equal(before, expected) or change is convert
    assert replay.made == (1 if change in (replace_a_layer, hook) else 2)


@pytest.mark.parametrize("moved", [False, True])
def test_lower_bounds_that_change(ours, tokens, moved, replay, token_by_token):
    """They are a parameter of the whole model. Steps read the bounds that it has, and move to other addresses too."""
    model = ours(model_type="hgrn2")
    before, bounds = generated(model, tokens), model.model.lower_bounds
    with torch.no_grad():
        bounds.data = bounds * 9 if moved else bounds.mul_(9)
    results = [generated(model, tokens) for _ in range(2)]
    expected = plainly(model, tokens)
    assert all(torch.equal(x, expected) for x in results)
    assert not torch.equal(before, expected)
    assert replay.made == 1 + moved


@torch.no_grad()
@pytest.mark.parametrize("change", [change_weights, hook], ids=lambda change: change.__name__)
def test_a_model_that_changes_between_two_tokens(model, tokens, change, replay):
    cache = GLACache(model.config)
    model(tokens, past_key_values=cache)
    for _ in range(graphs.BEFORE + 2):
        model(tokens[:, :1], past_key_values=cache)
    assert replay.replayed == 2
    change(model)
    again = copy.deepcopy(cache)
    model.config.cuda_graphs = False
    expected = model(tokens[:, :1], past_key_values=again).logits
    model.config.cuda_graphs = True
    assert torch.equal(model(tokens[:, :1], past_key_values=cache).logits, expected)


@torch.no_grad()
def test_what_is_not_captured(model, tokens, replay, monkeypatch):
    def read(**options):
        cache = options.pop("cache", None) or GLACache(model.config)
        model(tokens, past_key_values=cache)
        for _ in range(graphs.BEFORE + 2):
            model(tokens[:, :1], past_key_values=cache, **options)

    read(output_hidden_states=True)
    read(attention_mask=torch.ones(2, 1, dtype=torch.long))
    read(cache=GLACache(model.config, compileable=True))
    with torch.autocast("cpu", torch.bfloat16):
        read()
    with torch.enable_grad():
        read()
    with monkeypatch.context() as patched:
        patched.setattr(graphs, "_short_of_memory", lambda device: True)
        read()
        assert model.model.graphs.slots == []
    model.train()
    read()
    model.eval()
    assert replay.made == 0
    read()
    assert replay.made == 1
    with gla.use_backend("reference"):  # the graph holds what `auto` chose
        read()
    assert replay.made == 2
    with gla.batch_invariant(64):  # pieces of prompts would change bits; steps do not
        for _ in range(2 * graphs.BEFORE):
            read()
    assert [slot.pieces.keys() for slot in model.model.graphs.slots] == [{(1, False)}] * 3
    model.train()
    assert model.model.graphs.slots == []


def test_a_capture_that_fails_is_not_tried_again(model, tokens, monkeypatch):
    tried = []

    def capture(*_):
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(graphs.CAPTURES, "cpu", capture)
    for _ in range(5):
        assert torch.equal(generated(model, tokens), plainly(model, tokens))
    assert len(tried) == 1


def test_copies_and_configurations(model, tokens, tmp_path):
    expected = generated(model, tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.model.graphs.slots == []
        assert torch.equal(generated(other, tokens), expected)
    assert "cuda_graphs" not in model.config.to_dict()
    model.config.cuda_graphs = False
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.cuda_graphs is False
    assert type(model).from_pretrained(tmp_path, cuda_graphs=True).config.cuda_graphs
    assert GLAConfig(cuda_graphs=False).to_dict()["cuda_graphs"] is False


@pytest.mark.parametrize("kept", [lambda state: state, lambda state: state[0]], ids=["a tensor", "a view"])
def test_states_are_free_once_a_cache_is_gone(model, tokens, kept):
    generated(model, tokens)
    gc.collect()
    (slot,) = model.model.graphs.slots
    assert slot.is_free()
    cache = GLACache(model.config)
    model.generate(tokens, past_key_values=cache, max_new_tokens=2)
    assert slot.holds(cache)
    assert not slot.is_free()
    view = kept(cache.layers[0].state.recurrent)
    del cache
    gc.collect()
    assert not slot.is_free()
    before = view.clone()
    generated(model, tokens)
    assert torch.equal(view, before)
    assert len(model.model.graphs.slots) == 2
    del view
    assert slot.is_free()


@pytest.mark.parametrize("B", [1, 3, 64, 128])
@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 130, 500, 512, 700, 1500, 4000])
def test_lengths_of_pieces(B, T, monkeypatch):
    monkeypatch.undo()
    cut = graphs.lengths(T, B)
    assert set(cut) <= set(graphs.LENGTHS)
    assert 0 <= sum(cut) - T < cut[0]
    assert max(cut) * B <= graphs.MOST_TOKENS
    assert (sum(cut) - T) * B <= max(graphs.SPARE_TOKENS, graphs.LENGTHS[-1] * B)
