"""`generate` beside transformers' loop, on a CPU: one token at a time, and several in what stands for a graph."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gla_transformers import GLACache, accelerate, generation, graphs, hybrid_generation
from gla_transformers.cache import NAME

NEW = 10


class Again:
    """Calls the captured function again. It holds no tensors, so that the states of one cache serve the next."""

    def __init__(self, call, device, beside):
        self.call = call

    def __call__(self):
        return self.call()


class Recorded(TorchDispatchMode):
    """A call as a list of operators on the tensors of its capture, as in a CUDA graph: no line of Python runs again.

    A capture leaves all memory, and the generator of random numbers, as they were.
    """

    def __init__(self, call, device, beside):
        super().__init__()
        self.made, written, random = [], [], torch.get_rng_state()
        self.written = written
        with self:
            self.result = call()
        for tensor, before in reversed(written):
            if tensor.shape == before.shape:  # otherwise it is a result, which had no memory yet
                tensor.copy_(before)
        torch.set_rng_state(random)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                x = args[i] if i < len(args) else kwargs.get(argument.name)
                self.written += [(y, y.clone()) for y in (x if isinstance(x, (list, tuple)) else [x]) if y is not None]
        result = function(*args, **kwargs)
        is_view = any(x.alias_info is not None for x in schema.returns)
        self.made.append((function, args, kwargs, result, is_view))
        return result

    def __call__(self):
        for function, args, kwargs, there, is_view in self.made:
            result = function(*args, **kwargs)
            pairs = zip(there, result, strict=True) if isinstance(there, (list, tuple)) else [(there, result)]
            for old, new in [] if is_view else pairs:
                assert isinstance(old, torch.Tensor), f"{function} waits for the device"
                old.copy_(new)
        return self.result


@pytest.fixture(params=[None, Again, Recorded], ids=["one", "again", "recorded"])
def ahead(request, monkeypatch):
    """Lets several tokens be launched before the host looks at them, and returns whether it does."""
    if request.param is not None:
        monkeypatch.setitem(graphs.CAPTURES, "cpu", request.param)
        monkeypatch.setattr(graphs, "BEFORE", 0)
    return request.param is not None


@pytest.fixture(params=[{}, pytest.param({"model_type": "hgrn2"}, marks=pytest.mark.thorough)], ids=str)
def model(ours, request):
    return ours(num_hidden_layers=1, use_short_conv=True, **request.param)


@pytest.fixture
def tokens():
    return torch.randint(1, 61, (3, 12))


@pytest.fixture
def theirs(monkeypatch):
    """A function that generates by transformers' own loop."""

    def generate(model, *args, **kwargs):
        with monkeypatch.context() as patched:
            patched.setattr(generation, "rules", lambda *_: None)
            return model.generate(*args, **kwargs)

    return generate


@pytest.fixture
def left(monkeypatch):
    """The calls that are left to transformers' loop."""
    calls, original = [], GenerationMixin._sample
    monkeypatch.setattr(
        GenerationMixin, "_sample", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    )
    return calls


class Recorder(BaseStreamer):
    def __init__(self):
        self.parts, self.has_ended = [], False

    def put(self, value):
        self.parts.append(value.tolist())

    def end(self):
        self.has_ended = True


class Until(StoppingCriteria):
    """Ends row i after lengths[i] tokens, and counts its calls."""

    def __init__(self, *lengths):
        self.lengths, self.seen = torch.tensor(lengths), []

    def __call__(self, input_ids, scores, **_):
        self.seen.append(input_ids.tolist())
        return input_ids.shape[1] >= self.lengths


def results(generate, model, inputs, **options):
    """Returns what can be seen of a generation: tokens, what was streamed, and numbers that are drawn after it."""
    torch.manual_seed(3)
    streamer = Recorder()
    sequences = generate(model, inputs, streamer=streamer, **options)
    assert streamer.has_ended
    return sequences, streamer.parts, torch.rand(3)


def agree(actual, expected):
    assert torch.equal(actual[0], expected[0])
    assert actual[1] == expected[1]
    assert torch.equal(actual[2], expected[2])


def ours_generates(model, *args, **kwargs):
    return model.generate(*args, **kwargs)


SAMPLED = {"do_sample": True, "top_k": 0}
ENDS = {"eos_token_id": list(range(3, 23)), "pad_token_id": 0}
OPTIONS = [
    {},
    {"max_new_tokens": 1},
    {"repetition_penalty": 3.0, "max_time": 60.0},
    ENDS | {"max_new_tokens": 60},
    SAMPLED | {"max_length": 17, "typical_p": 0.5},
    SAMPLED | ENDS | {"min_new_tokens": 2, "max_new_tokens": 60},
    SAMPLED | ENDS | {"min_new_tokens": 5, "num_return_sequences": 2, "max_new_tokens": 40},
    SAMPLED | ENDS | {"min_length": 15, "min_new_tokens": 2, "repetition_penalty": 0.5, "max_new_tokens": 60},
    SAMPLED | {"temperature": 0.3, "top_k": 4, "prefill_chunk_size": 5},
    SAMPLED | {"temperature": 2.0, "top_k": 30, "top_p": 0.6},
    SAMPLED | {"min_p": 0.2, "renormalize_logits": True},
    SAMPLED | {"repetition_penalty": 1.7, "epsilon_cutoff": 0.02},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(model, tokens, theirs, left, ahead, options):
    """Tokens, streams and the generator's later numbers equal those of transformers' loop, also from a graph."""
    mask = torch.ones_like(tokens)
    mask[0, :5], mask[2, :9] = 0, 0
    options = {"attention_mask": mask, "do_sample": False} | options
    if "max_length" not in options:
        options = {"max_new_tokens": NEW} | options
    expected = results(theirs, model, tokens, **options)
    assert left
    left.clear()
    for _ in range(2):
        agree(results(ours_generates, model, tokens, **options), expected)
    assert not left
    assert bool(repeated(model)) == (ahead and options.get("max_new_tokens") != 1)
    if {"eos_token_id", "max_length"} & {*options}:
        assert expected[0].shape[1] < 12 + options.get("max_new_tokens", NEW)


def repeated(model):
    """Returns the graphs of the loop."""
    return [form for slot in model.model.graphs.slots for form in slot.pieces if len(form) > 2]


@pytest.mark.parametrize("options", [{}, ENDS | {"min_new_tokens": 7}], ids=str)
def test_stopping_criteria(model, tokens, theirs, left, ahead, options):
    """They are called for each token, with the same tokens, and not after the end. Rows end apart."""
    options = SAMPLED | options | {"max_new_tokens": 40}
    criteria = [Until(14, 18, 17) for _ in range(3)]
    expected = results(theirs, model, tokens, stopping_criteria=[criteria[0]], **options)
    left.clear()
    for criterion in criteria[1:]:
        agree(results(ours_generates, model, tokens, stopping_criteria=[criterion], **options), expected)
        assert criterion.seen == criteria[0].seen
    assert not left
    assert expected[0].shape[1] == 18
    assert (expected[0][0, 14:] == 0).all() == bool(options.get("eos_token_id"))


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, ENDS, ENDS | {"stopping_criteria": [Until(14, 40, 17)]}], ids=lambda x: str([*x])
)
def test_a_cache_that_is_kept_ends_where_the_tokens_do(model, tokens, theirs, left, ahead, passed, options):
    def generated(generate):
        torch.manual_seed(3)
        how = {NAME: GLACache(model.config)} if passed else {"return_dict_in_generate": True}
        out = generate(model, tokens, max_new_tokens=NEW, **SAMPLED, **options, **how)
        cache = how[NAME] if passed else out[-1]
        return out if passed else out.sequences, cache.get_seq_length(), *cache.tensors()

    expected = generated(theirs)
    left.clear()
    for _ in range(2):
        actual = generated(ours_generates)
        assert torch.equal(actual[0], expected[0])
        assert actual[1] == expected[1] == expected[0].shape[1] - 1
        for a, b in zip(actual[2:], expected[2:], strict=True):
            assert torch.equal(a, b)
    assert not left


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
def test_embeddings(model, tokens, theirs, left, ahead):
    inputs = {"inputs_embeds": model.get_input_embeddings()(tokens), "repetition_penalty": 1.7}
    expected = results(theirs, model, None, max_new_tokens=NEW, **SAMPLED, **inputs)
    left.clear()
    agree(results(ours_generates, model, None, max_new_tokens=NEW, **SAMPLED, **inputs), expected)
    assert not left


class Reversed(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.flip(-1)


HANDED_OVER = [
    {"logits_processor": LogitsProcessorList([Reversed()])},
    {"return_dict_in_generate": True, "output_scores": True},
    {"no_repeat_ngram_size": 2},
    {"cache_implementation": "static"},
    {"use_cache": False},
]


@pytest.mark.parametrize("options", HANDED_OVER, ids=lambda x: str([*x]))
def test_what_is_left_to_transformers(model, tokens, left, options):
    model.generate(tokens, max_new_tokens=2, **options)
    assert left


def test_logits_that_are_no_probabilities(model, tokens, ahead):
    model.lm_head.weight.data[7, 0] = torch.nan
    with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan`"):
        model.generate(tokens, max_new_tokens=NEW, **SAMPLED)
    assert (model.generate(tokens, max_new_tokens=NEW, do_sample=False)[:, 12:] == 7).all()


def move_weights(model):
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight * 3


def hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, y: -y)


def replace_the_head(model):
    model.lm_head = torch.nn.Linear(32, 61, bias=False)


@pytest.mark.parametrize("change", [move_weights, hook, replace_the_head], ids=lambda change: change.__name__)
def test_a_model_that_changes(model, tokens, theirs, ahead, change):
    for _ in range(2):
        model.generate(tokens, max_new_tokens=NEW)
    change(model)
    expected = theirs(model, tokens, max_new_tokens=NEW)
    for _ in range(2):
        assert torch.equal(model.generate(tokens, max_new_tokens=NEW), expected)


def test_loops_that_were_not_used_for_long_are_forgotten(model, tokens, ahead, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_PIECES", 4)
    for penalty in (1.1, 1.2, 1.3, 1.2):
        model.generate(tokens, max_new_tokens=NEW, repetition_penalty=penalty)
    assert [form[2][0][2][1] for form in repeated(model)] == ([1.3, 1.2, 1.2] if ahead else [])


# ---- transformers' models with Mamba-2 or a delta rule


@pytest.fixture(params=["Mamba2", "Bamba", "FalconH1", "Qwen3_5"])
def hybrid(request, hybrid_of):
    with accelerate():
        yield (model := hybrid_of(request.param))
    assert "_sample" not in vars(type(model))


def has_attention(model):
    return type(model).__name__ != "Mamba2ForCausalLM"


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("options", [{}, SAMPLED | ENDS, SAMPLED | {"top_k": 4, "repetition_penalty": 1.7}], ids=str)
def test_hybrids(hybrid, tokens, theirs, left, ahead, options, padded):
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :5], mask[2, :9] = 0, 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW} | options
    expected = results(theirs, hybrid, tokens, **options)
    assert left
    left.clear()
    for inputs in (tokens, tokens.flip(1), tokens):
        actual = results(ours_generates, hybrid, inputs, **options)
    agree(actual, expected)
    if has_attention(hybrid) and not ahead:
        assert len(left) == 3  # keys are moved for graphs alone
        return
    assert not left
    if ahead:
        assert any(form[0] == 4 for slot in hybrid_generation._graphs[hybrid].slots for form in slot.pieces)


def test_long_texts_have_more_room(hybrid, theirs, left, ahead):
    tokens = torch.randint(1, 61, (1, 250))  # 256 tokens have room at first
    for number in (3, 8, 3):
        options = {"max_new_tokens": number, "do_sample": False}
        assert torch.equal(hybrid.generate(tokens, **options), theirs(hybrid, tokens, **options))


def states_of(cache):
    """Returns all states, keys and values of a cache, and the classes of its layers."""
    states = []
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states += list(getattr(layer, name, {}).values())
        states += [layer.keys, layer.values] if hasattr(layer, "keys") else []
    return states, list(map(type, cache.layers))


def test_a_cache_of_a_hybrid_that_is_kept(hybrid, tokens, theirs, left, ahead):
    def generated(generate):
        options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
        out = generate(hybrid, tokens, **options)
        cache = out[-1]
        states, kinds = states_of(cache)
        states = [x.clone() for x in states]  # the second turn may write them in place
        name = next(name for name in hybrid_generation.NAMES if name in inspect.signature(hybrid.forward).parameters)
        more = generate(hybrid, torch.cat([out.sequences, tokens], 1), **options, **{name: cache})
        return out.sequences, states, kinds, more.sequences, *states_of(more[-1])

    expected = generated(theirs)
    left.clear()
    kept = [generated(ours_generates) for _ in range(3)]
    rounds_alike = type(hybrid).__name__ != "FalconH1ForCausalLM" or not ahead  # attention to more memory feeds a layer
    tolerance = {"rtol": 0, "atol": 0} if rounds_alike else {}
    for actual in kept:
        for i in (0, 3):  # of both turns
            assert torch.equal(actual[i], expected[i])
            torch.testing.assert_close(actual[i + 1], expected[i + 1], **tolerance)
            assert actual[i + 2] == expected[i + 2]
    assert len({actual[4][0].data_ptr() for actual in kept}) == 3
    assert bool(left) == (has_attention(hybrid) and not ahead)


def test_what_of_hybrids_is_left_to_transformers(hybrid, tokens, left, ahead):
    hybrid.generate(tokens, max_new_tokens=2, no_repeat_ngram_size=2)
    hybrid.generate(tokens, max_new_tokens=2, cache_implementation="static")
    hybrid.generate(tokens, max_new_tokens=2, use_cache=False)
    assert len(left) == 3
    if has_attention(hybrid):
        hybrid.generate(tokens, position_ids=torch.arange(12).expand(3, 12) + 5, max_new_tokens=2)
        assert len(left) == 4
    if type(hybrid).__name__ == "Qwen3_5ForCausalLM":  # transformers lets few of them begin with embeddings
        hybrid.generate(inputs_embeds=torch.randn(3, 12, 32), max_new_tokens=2)
        assert len(left) == 5


def test_keys_stay_in_place_only_for_attention_that_masks_them(hybrid, tokens, theirs, left, ahead):
    AttentionInterface.register("without_masks", sdpa_attention_forward)
    for attention in ("eager", "without_masks") if has_attention(hybrid) else ():
        hybrid.set_attn_implementation(attention)
        expected = theirs(hybrid, tokens, max_new_tokens=3)
        left.clear()
        assert torch.equal(hybrid.generate(tokens, max_new_tokens=3), expected)
        assert bool(left) == (attention == "without_masks" or not ahead)
