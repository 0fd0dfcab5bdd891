"""Delta rules of transformers' models, accelerated: the functions alone, turns, beams, checkpoints, copies, compilers.

test_with_transformers.py runs the same models through the tests that all families share.
"""

import copy
import importlib
import pickle

import pytest
import torch

from gla_core.compat.transformers import accelerate
from gla_core.compat.transformers.accelerate import MODELS

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-fla")
pytest.importorskip("gla_transformers", reason="needs gla_transformers: make test-fla")

from tests.compat.conftest import RULES
from tests.compat.test_with_transformers import (
    CLOSE_DELTA,
    CLOSE_DELTA_GRADIENTS,
    DELTA_CONFIGS,
    INTERPRETED,
    assert_close,
    cache_of,
    layers_of,
    model_of,
    module_of,
    tokens_of,
    trained,
)

pytestmark = pytest.mark.usefixtures("delta_rules_in_pytorch")
CLOSE, CLOSE_GRADIENTS = 5e-6, 2e-5
"""Differences of the functions alone, in float32, in which transformers subtracts sums of 64 log gates."""
FAMILIES = {"gated_delta_rule": ("qwen3_5", 4), "kimi_delta_attention": ("kimi_linear", 2)}
"""A model of each family, by a part of its functions' names, and a number of value heads for 2 heads of keys."""


def rules_of(family):
    """Returns the functions of a family in a module, for sequences and for one token."""
    module = importlib.import_module("transformers.models.{0}.modeling_{0}".format(FAMILIES[family][0]))
    chunk, recurrent = (name for name in MODELS[FAMILIES[family][0]].functions if name in RULES)
    return getattr(module, chunk), getattr(module, recurrent)


def inputs_of(family, T, requires_grad=False, dtype=torch.float32):
    """Returns the arguments of a delta rule of T tokens, by name; log gates reach from 0 to -10.

    Queries and keys are so small that the eps of their norms counts.
    """
    generator = torch.Generator().manual_seed(T)

    def draw(*shape):
        return torch.randn(2, *shape, generator=generator)

    Hv = FAMILIES[family][1]
    g = -draw(T, Hv, *[8] * (family == "kimi_delta_attention")).square()
    tokens = {"query": 0.02 * draw(T, 2, 8), "key": 0.02 * draw(T, 2, 8), "value": draw(T, Hv, 12)}
    tokens = {name: x.to(dtype) for name, x in tokens.items()}
    inputs = tokens | {"g": g, "beta": draw(T, Hv).sigmoid().to(dtype), "initial_state": draw(Hv, 8, 12)}
    return {name: x.requires_grad_(requires_grad) for name, x in inputs.items()}


def called(rule, inputs, **options):
    """Returns the results of a delta rule that is called as layers do it."""
    named = dict(inputs)
    positional = [named.pop(name) for name in ("query", "key", "value")]
    return rule(*positional, **{"output_final_state": True, "use_qk_l2norm_in_kernel": True, **named, **options})


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("T", [1, 5, 130])
@pytest.mark.parametrize("which", [0, 1], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_functions(family, which, T, normalize, calls):
    """Values and gradients of both functions, for any number of tokens; without gradients one token is a step."""
    inputs, options = inputs_of(family, T, requires_grad=True), {"use_qk_l2norm_in_kernel": normalize}
    if not normalize:
        inputs["key"] = torch.nn.functional.normalize(inputs["key"].detach(), dim=-1).requires_grad_()
    expected = called(rules_of(family)[which], inputs, **options)
    directions = [torch.randn_like(x) for x in expected]
    gradients = torch.autograd.grad(expected, list(inputs.values()), directions)
    with accelerate():
        rule = rules_of(family)[which]
        actual = called(rule, inputs, **options)
        assert_close(actual, expected, CLOSE)
        assert_close(torch.autograd.grad(actual, list(inputs.values()), directions), gradients, CLOSE_GRADIENTS)
        assert calls == {"scan": 1, "step": 0}
        before = inputs["initial_state"].clone()
        with torch.no_grad():
            assert_close(called(rule, inputs, **options), expected, CLOSE)
        assert torch.equal(inputs["initial_state"], before)
    assert calls == ({"scan": 1, "step": 1} if T == 1 else {"scan": 2, "step": 0})


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_states_that_are_left_out(family):
    for which, T in ((0, 1), (0, 9), (1, 9)):
        inputs = inputs_of(family, T) | {"initial_state": None}
        expected = called(rules_of(family)[which], inputs)
        with accelerate():
            assert_close(called(rules_of(family)[which], inputs), expected, CLOSE)
            assert called(rules_of(family)[which], inputs_of(family, T), output_final_state=False)[1] is None


@torch.no_grad()
@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(family, T):
    """The result has the dtype of the inputs, and the state float32, into which a cache of another dtype is cast."""
    inputs = inputs_of(family, T, dtype=torch.bfloat16)
    inputs["initial_state"] = inputs["initial_state"].bfloat16()
    expected = called(rules_of(family)[0], inputs)
    with accelerate():
        actual = called(rules_of(family)[0], inputs)
    assert [x.dtype for x in actual] == [torch.bfloat16, torch.float32]
    assert_close(actual, expected, 0.01)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_are_left_to_the_original(family, calls):
    """Packed sequences without cu_seqlens, and arguments by positions on which the originals do not agree."""
    inputs = inputs_of(family, 9)
    tokens = [inputs[name] for name in ("query", "key", "value", "g", "beta")]
    expected = called(rules_of(family)[0], inputs)[0]
    in_order = (*tokens, 64, inputs["initial_state"], True, True)
    with accelerate():
        rule = rules_of(family)[0]
        for packed in ("seq_idx", "cu_seq_lens_q"):
            assert torch.equal(called(rule, inputs, **{packed: torch.zeros(2, 9)})[0], expected)
        assert torch.equal(rule(*in_order)[0], expected)
        assert calls == {"scan": 0, "step": 0}
        actual = called(rule, inputs, seq_idx=None, cu_seq_lens_q=None, cu_seqlens=None, num_items_in_batch=3)
        assert calls == {"scan": 1, "step": 0}
    assert_close(actual[:1], [expected], CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_functions(family, calls):
    """With cu_seqlens, sequences are kept apart, where transformers itself needs flash-linear-attention."""
    inputs = {name: x[:1] for name, x in inputs_of(family, 20).items()} | {"initial_state": None}
    parts = [{name: None if x is None else x[:, a:b] for name, x in inputs.items()} for a, b in ((0, 7), (7, 20))]
    (first, state), (second, last) = (called(rules_of(family)[0], part) for part in parts)
    with accelerate():
        actual = called(rules_of(family)[0], inputs, cu_seqlens=torch.tensor([0, 7, 20]), seq_idx=torch.zeros(1, 20))
    assert_close(actual, [torch.cat([first, second], 1), torch.cat([state, last])], CLOSE)
    assert calls == {"scan": 1, "step": 0}


def test_on_a_cpu_where_transformers_has_bound_other_kernels(monkeypatch):
    """With flash-linear-attention installed, transformers takes its Triton kernels, which a CPU cannot run."""
    pytest.importorskip("fla")
    if torch.cuda.is_available() or INTERPRETED:
        pytest.skip("Triton runs")
    model, tokens = model_of("Qwen3_5"), tokens_of()
    expected, expected_gradients = trained(model, tokens)
    words = model.eval().generate(tokens, max_new_tokens=4, do_sample=False)
    monkeypatch.undo()  # now transformers' functions are those that it has bound
    with pytest.raises(RuntimeError):
        model(tokens)
    with accelerate():
        actual, gradients = trained(model, tokens)
        assert torch.equal(model.eval().generate(tokens, max_new_tokens=4, do_sample=False), words)
    assert_close(actual, expected, CLOSE_DELTA)
    assert_close(gradients, expected_gradients, CLOSE_DELTA_GRADIENTS)


@torch.no_grad()
@pytest.mark.parametrize("name", DELTA_CONFIGS)
def test_turns_with_padding_on_either_side(name):
    """A cache goes on over turns of several tokens; the first prompt is padded on the left or on the right."""
    model, tokens = model_of(name), tokens_of(length=33)
    for padding in (slice(None, 6), slice(14, 20)):
        mask = torch.ones(2, 33, dtype=torch.long)
        mask[0, padding] = 0

        def turns(mask=mask):
            out = model(tokens[:, :20], attention_mask=mask[:, :20], use_cache=True)
            logits = [out.logits]
            for start, end in ((20, 21), (21, 31), (31, 32), (32, 33)):
                out = model(tokens[:, start:end], attention_mask=mask[:, :end], use_cache=True, **cache_of(out))
                logits.append(out.logits)
            return torch.cat(logits, 1)[mask.bool()]

        expected = turns()
        with accelerate():
            assert_close([turns()], [expected], CLOSE_DELTA)


@pytest.mark.parametrize("name", DELTA_CONFIGS)
def test_beams(name, calls):
    model, how = model_of(name), {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    expected = model.generate(tokens_of(), attention_mask=mask, **how)
    with accelerate():
        assert torch.equal(model.generate(tokens_of(), attention_mask=mask, **how), expected)
    assert calls == {"scan": layers_of(model), "step": 5 * layers_of(model)}


@pytest.mark.parametrize("name", DELTA_CONFIGS)
def test_checkpoints_in_training(name, calls):
    """Layers compute once more in the backward."""
    model, tokens = model_of(name), tokens_of()
    expected = trained(model, tokens)[1]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with accelerate():
        actual = trained(model, tokens)[1]
    assert calls == {"scan": 2 * layers_of(model), "step": 0}
    assert_close(actual, expected, CLOSE_DELTA_GRADIENTS)


@pytest.mark.parametrize("name", ["Qwen3_5", "KimiLinear"])
def test_a_step_that_records_gradients(name, calls):
    """It is computed here as a sequence of one token. (With a cache, transformers' models have no backward.)"""

    def logits():
        with torch.no_grad():
            out = model(tokens, use_cache=True)
        return model(tokens[:, :1], use_cache=True, **cache_of(out)).logits

    model, tokens = model_of(name), tokens_of()
    expected = logits()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        expected.sum().backward()
    with accelerate():
        assert_close([logits()], [expected], CLOSE_DELTA)
    assert calls == {"scan": 2 * layers_of(model), "step": 0}


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3_5", "KimiLinear"])
def test_float64(name):
    """Transformers computes delta rules in float32. Here they have the dtype of the model, and so do the states."""
    options = {} if name == "Qwen3_5" else {"experts_implementation": "eager"}  # others take no float64
    model, tokens, how = model_of(name, **options), tokens_of(), {"max_new_tokens": 4, "do_sample": False}
    expected, words = model(tokens).logits, model.generate(tokens, **how)
    model.double()
    with accelerate():
        actual = model(tokens).logits
        assert torch.equal(model.generate(tokens, **how), words)
    assert_close([actual.float()], [expected], CLOSE_DELTA)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3_5", "KimiLinear"])
def test_copies(name):
    """A copied model and a pickled function are those of the module, also afterwards."""
    model, tokens = model_of(name), tokens_of()
    module = module_of(model)
    rule = next(name for name in MODELS[module.__name__.split(".")[2]].functions if name in RULES)
    expected = model(tokens).logits
    with accelerate():
        twin, function = copy.deepcopy(model), getattr(module, rule)
        assert copy.deepcopy(function) is pickle.loads(pickle.dumps(function)) is function
        assert torch.equal(twin(tokens).logits, model(tokens).logits)
    assert getattr(module, rule) is not function
    assert torch.equal(twin(tokens).logits, expected)


@pytest.mark.parametrize("name", ["Qwen3_5", "KimiLinear"])
def test_compiled_without_a_break(name, calls):
    """A compiler sees the forward and the backward of a layer as a whole."""
    torch._dynamo.reset()
    layer = next(x for x in model_of(name).modules() if hasattr(x, "conv1d"))
    x = torch.randn(2, 40, 32, requires_grad=True)
    with accelerate():
        expected = layer(x, attention_mask=None)
        actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, attention_mask=None)
        assert calls["scan"] >= 2
    assert_close([actual], [expected], CLOSE_DELTA)
    gradients = [torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (actual, expected)]
    assert_close(*gradients, CLOSE_DELTA_GRADIENTS)


def test_autocast():
    """The error in bfloat16 is at most that of transformers."""
    model, tokens = model_of("Qwen3_5"), tokens_of()
    exact = trained(model, tokens)[0][0]
    with torch.autocast("cpu", torch.bfloat16):
        original = trained(model, tokens)[0][0]
        with accelerate():
            actual = trained(model, tokens)[0][0]
    assert actual.dtype == original.dtype
    assert (actual - exact).norm() <= 1.2 * (original - exact).norm()
