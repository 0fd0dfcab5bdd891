"""The number of kernels of a decoding step and of a prompt, counted as operators that compute something."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from gla_core.compat.mamba_ssm import kernels
from gla_transformers import GLACache, accelerate, few_rows, gated

VIEWS = {"slice", "select", "unsqueeze", "view", "_unsafe_view", "t", "split", "split_with_sizes", "detach"}
VIEWS |= {"empty", "set_", "unbind", "expand", "transpose", "squeeze", "alias"}
A_LAYER = 10
"""Norm, projections, second half of the gate, step, output projection, norm, projections, two of the gated activation
(one on a GPU), last projection."""
FEW_ROWS_LAUNCHES = 6
"""Projections, second half of the gate, step, output projection, projections, last projection."""
A_PROMPT = 10
"""Norm, projections, second half of the gate, the op, norm of heads with its gate, output projection, norm,
projections, activation, last projection."""
OUTSIDE = 4
"""Embedding, last norm, head and the count of tokens."""
BOUNDS = 4
"""A cast, softmax, sums and a difference: the lower bounds of all layers of HGRN2."""
HGRN2 = 11
"""Norm, projections, gates, step, norm, output projection, norm, projections, two of the gated activation (one on a
GPU), last projection."""
MAMBA2 = 8
"""Cast, norm, projections, convolution, step, norm with the gate, output projection, residual."""
HYBRID = 7
"""The same without the cast, in models that keep the residual in the dtype of the weights."""
MAMBA2_OF_FEW_ROWS = 4
"""Projections, convolution, step, output projection."""
HYBRID_OF_FEW_ROWS = 5
"""The same with the norm of groups."""
HGRN2_OF_FEW_ROWS = 6
"""Projections, gates, step, output projection, projections, last projection."""


class Launches(TorchDispatchMode):
    """Counts operators other than views. A norm, and an operator of gla_core, is one, as it is on a GPU."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts, self.within = Counter(), False
        rms_norm = F.rms_norm
        monkeypatch.setattr(F, "rms_norm", lambda *args: self.counted("rms_norm", lambda: rms_norm(*args)))

    def counted(self, name, function):
        """Counts a function as one operator, whatever it calls."""
        self.counts[name] += not self.within
        before, self.within = self.within, True
        try:
            return function()
        finally:
            self.within = before

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name in VIEWS:
            return op(*args, **(kwargs or {}))
        return self.counted(name, lambda: op(*args, **(kwargs or {})))


def counted_step(model, monkeypatch, replace=lambda launches: None):
    """Returns the counts of operators of a decoding step, in which `replace` puts others in the place of kernels."""
    cache, tokens = GLACache(model.config), torch.randint(1, 61, (2, 3))
    model(tokens, past_key_values=cache)
    with Launches(monkeypatch) as launches:
        replace(launches)
        model(tokens[:, :1], past_key_values=cache)
    return launches.counts


def replace_products(launches, monkeypatch):
    """Replaces products of few rows, each of which is one kernel on a GPU, by nothing, as if it were one operator."""

    def product(x, weight, gated=False, **rest):
        number = len(weight) // 2 if gated else len(weight)
        return launches.counted("product", lambda: x.new_zeros(len(x), number))

    kernel = SimpleNamespace(is_served=lambda weight, M: True, product=product)
    monkeypatch.setattr(few_rows, "kernel_of", lambda device: kernel)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
def test_a_decoding_step(ours, layers, monkeypatch):
    counts = counted_step(ours(num_hidden_layers=layers).bfloat16(), monkeypatch)
    assert counts["mm"] + counts["addmm"] + counts["addmm_"] == 5 * layers + 1
    assert counts.total() <= A_LAYER * layers + OUTSIDE, counts


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
def test_a_decoding_step_of_few_rows(ours, layers, monkeypatch):
    model = ours(num_hidden_layers=layers).bfloat16()
    counts = counted_step(model, monkeypatch, lambda launches: replace_products(launches, monkeypatch))
    assert counts["product"] == 5 * layers
    assert counts.total() <= FEW_ROWS_LAUNCHES * layers + OUTSIDE, counts


@torch.no_grad()
@pytest.mark.parametrize("few", [False, True])
def test_a_decoding_step_of_hgrn2(ours, few, monkeypatch):
    """The gates are one kernel on a GPU, and here nothing; with few rows, products and norms are replaced too."""
    model = ours(model_type="hgrn2", num_hidden_layers=3).bfloat16()

    def replace(launches):
        def gates(q, f, bound):
            return launches.counted("gates", lambda: (q.clone(), q.clone(), q.float()))

        for layer in model.model.layers:
            layer.attn.kernel = gates
        if few:
            replace_products(launches, monkeypatch)

    counts = counted_step(model, monkeypatch, replace)
    assert counts.total() <= 3 * (HGRN2_OF_FEW_ROWS if few else HGRN2) + OUTSIDE + BOUNDS, counts


SIZES = {"hidden_size": 32, "vocab_size": 61, "head_dim": 8, "chunk_size": 16}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES = {
    "Mamba2": ((MAMBA2, MAMBA2_OF_FEW_ROWS), {"num_heads": 8, "state_size": 16, "n_groups": 1}),
    "NemotronH": (
        (HYBRID, HYBRID_OF_FEW_ROWS),
        {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2} | ATTENTION,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoding_step_of_mamba2(family, few, monkeypatch):
    """On a GPU the convolution, the step and each norm are one kernel, as is a product of few rows with one group.

    Here they are replaced by nothing.
    """
    expected, options = FAMILIES[family]
    totals = []
    for layers in (1, 3):
        number = {"num_hidden_layers": layers}
        if family == "NemotronH":  # its cache needs a layer of attention
            number = {"layers_block_type": ["full_attention"] + ["linear_attention"] * layers}
        config = getattr(transformers, f"{family}Config")(**SIZES, **options, **number)
        model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().eval()
        out = model(torch.ones(2, 5, dtype=torch.long), use_cache=True)
        key = next(name for name in ("cache", "past_key_values", "cache_params") if name in out)
        with monkeypatch.context() as patch, Launches(patch) as launches, accelerate():

            def kernel(name, number, launches=launches):
                return lambda *arguments, **_: launches.counted(name, lambda: torch.zeros_like(arguments[number]))

            def product(x, weight, norm_weight, eps, groups, residual, launches=launches):
                normed = x if groups == 1 else launches.counted("norm", lambda: torch.zeros_like(x))
                dtype = (weight if residual is None else residual).dtype
                return launches.counted("product", lambda: normed.new_zeros(len(x), 1, len(weight), dtype=dtype))

            functions = SimpleNamespace(
                convolve_token=kernel("convolve", 0),
                norm=kernel("norm", 0),
                product=product if few else lambda *arguments: None,
            )
            patch.setattr(kernels, "provided", functions)
            patch.setattr("gla_core.compat.mamba_ssm.ops.recurrent_ssd_step", kernel("step", 2))
            model(torch.ones(2, 1, dtype=torch.long), use_cache=True, **{key: out[key]})
        totals.append(launches.counts.total())
    assert (totals[1] - totals[0]) / 2 == expected[few], launches.counts


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
def test_a_prompt(ours, layers, monkeypatch):
    """On a GPU each norm and activation is one kernel. Here they are replaced by nothing."""
    model, tokens = ours(num_hidden_layers=layers).bfloat16(), torch.randint(1, 61, (2, 70))
    with Launches(monkeypatch) as launches:

        def kernel(x, *rest):
            return launches.counted("gated", lambda: torch.zeros_like(x))

        kernels = SimpleNamespace(gated=kernel, gated_backward=None, normed=kernel)
        monkeypatch.setattr(gated, "_kernels", lambda x, gate: kernels)
        model(tokens, use_cache=True)
    assert launches.counts["gated"] == 4 * layers + 1
    assert launches.counts.total() <= A_PROMPT * layers + OUTSIDE + 1, launches.counts  # a new cache counts from zeros


def hook(owner, name, seen):
    getattr(owner, name).register_forward_hook(lambda module, args, y: seen.append(y))


def hook_before(owner, name, seen):
    getattr(owner, name).register_forward_pre_hook(lambda module, args: seen.append(args[0]))


def patch(owner, name, seen):
    module, forward = getattr(owner, name), getattr(owner, name).forward
    module.forward = lambda *args, **kwargs: seen.append(forward(*args, **kwargs)) or seen[-1]


def wrap(owner, name, seen):
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            seen.append(self.inner(*args, **kwargs))
            return seen[-1]

    setattr(owner, name, Wrapper(getattr(owner, name)))


def subclass(owner, name, seen):
    class Mine(type(getattr(owner, name))):
        def forward(self, *args, **kwargs):
            seen.append(super().forward(*args, **kwargs))
            return seen[-1]

    getattr(owner, name).__class__ = Mine


@torch.no_grad()
@pytest.mark.parametrize("capture", [hook, hook_before, patch, wrap, subclass], ids=lambda capture: capture.__name__)
def test_what_a_caller_sees_is_not_written(ours, capture):
    """Tensors that a caller has captured of embeddings or of a block stay as they were."""
    tokens = torch.randint(1, 61, (2, 3))
    for name in ("embeddings", "0", "1"):
        model, seen = ours(), []
        expected = model(tokens, output_hidden_states=True).hidden_states
        capture(model.model if name == "embeddings" else model.model.layers, name, seen)
        model(tokens)
        place = 0 if name == "embeddings" else int(name) + (capture is not hook_before)
        if seen[0].is_floating_point() and place < 2:  # a later hidden state is normed
            torch.testing.assert_close(seen[0], expected[place])


@torch.no_grad()
def test_what_embeddings_return_is_not_written(ours):
    class View(torch.nn.Embedding):
        def forward(self, words):
            return self.weight[None, : words.shape[1]]

    model, tokens, features = ours(), torch.randint(1, 61, (1, 3)), torch.randn(2, 3, 32)
    embedded, kept = model.get_input_embeddings()(tokens), features.clone()
    before = embedded.clone()
    model(inputs_embeds=embedded)
    assert torch.equal(embedded, before)
    model.set_input_embeddings(torch.nn.Identity())
    logits = model(features).logits
    assert torch.equal(features, kept)
    torch.testing.assert_close(model(features).logits, logits)
    model.set_input_embeddings(View(61, 32))
    kept = model.get_input_embeddings().weight.clone()
    model(tokens)
    assert torch.equal(model.get_input_embeddings().weight, kept)


@torch.no_grad()
def test_what_a_module_of_a_block_sees_is_not_written(ours):
    model, tokens, seen = ours(), torch.randint(1, 61, (2, 3)), []
    expected, layer = model(tokens, output_hidden_states=True).hidden_states, model.model.layers[0]
    layer.mlp.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
    model(tokens)
    ((x, y),) = seen
    torch.testing.assert_close(layer.mlp_norm(expected[1] - y), x)
