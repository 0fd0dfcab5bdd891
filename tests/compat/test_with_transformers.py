"""Models of transformers itself with Mamba-2 or a delta rule, accelerated: `make test-fla`, on a CPU too.

With TRITON_INTERPRET=1 the kernels of gla_transformers compute what they would compute on a GPU.

A difference is divided by the largest element of the tensor. The tolerances are the changes of transformers' own
results when the last bit of the parameters changes: for Mamba-2 over 30 seeds, at most 4e-6 for logits and 9e-5 for
gradients. Over the same seeds, accelerated models differ by at most 1.5e-6 in logits and states, and by at most 1e-5 in
gradients. Models with a delta rule have norms and routers that are more sensitive: over 12 seeds, the last bit changes
6e-5 of logits and 1.6e-3 of gradients; accelerated models differ by at most 3.5e-5 and 7e-4.
test_delta_with_transformers.py compares their functions more closely.
"""

import functools
import importlib
import os
from types import SimpleNamespace

import pytest
import torch

from gla_core.compat.mamba_ssm import ops
from gla_core.compat.transformers import accelerate
from gla_core.compat.transformers.accelerate import MODELS
from gla_core.compat.transformers.delta import GATED_DELTA_RULE, KIMI_DELTA_ATTENTION
from gla_core.compat.transformers.mamba2 import MAMBA2
from gla_core.compat.transformers.one_token import groups_of

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-fla")

from gla_transformers import (
    causal_convolution,
    few_rows,
    few_rows_kernel,
    gated,
    generation,
    graphs,
    hybrid_generation,
    mamba2,
)
from gla_triton_runtime import prepared
from tests.compat.conftest import counted

pytestmark = pytest.mark.usefixtures("delta_rules_in_pytorch")

COMMON = {"vocab_size": 61, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
BARE = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16, "num_hidden_layers": 2}
CLOSE, CLOSE_GRADIENTS = 1e-5, 1e-4
CLOSE_DELTA, CLOSE_DELTA_GRADIENTS = 1e-4, 2e-3
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAMBA2_CONFIGS = {
    "Mamba2": BARE,
    "Mamba2, limits": BARE | {"time_step_limit": (0.02, 0.05)},
    "Bamba": ATTENTION | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "FalconH1": ATTENTION | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
    "FalconH1, norm": ATTENTION | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "GraniteMoeHybrid": ATTENTION
    | MAMBA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
    },
    "NemotronH": ATTENTION
    | {
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "moe", "mlp"],
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "Zamba2": {
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "chunk_size": 16,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    },
}
"""Small models, each with several Mamba-2 layers of 8 heads in 2 groups."""
THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": None}  # the last with indexed attention, whose name has changed
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GATED_DELTA = ATTENTION | {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
QWEN = GATED_DELTA | THREE_LAYERS
QWEN_EXPERTS = QWEN | EXPERTS | {"shared_expert_intermediate_size": 16}
KIMI_DELTA = {"linear_num_heads": 4, "linear_head_dim": 8} | EXPERTS | {"n_routed_experts": 4, "num_local_experts": 4}
LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "kv_lora_rank": 8}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
KIMI = KIMI_DELTA | LATENT | THREE_LAYERS
DELTA_CONFIGS = {
    "Qwen3Next": QWEN_EXPERTS,
    "Qwen3_5": QWEN,
    "Qwen3_5Moe": QWEN_EXPERTS,
    "Qwen4Exp": QWEN_EXPERTS
    | FOUR_LAYERS
    | {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    "LaraMini": QWEN_EXPERTS,
    "OlmoHybrid": QWEN | {"linear_num_key_heads": 4},
    "KimiLinear": KIMI,
    "BailingHybrid": KIMI | {"head_dim": 4},
    "BailingHybrid, unbounded": KIMI | {"head_dim": 4, "kda_safe_gate": False},
    "Glm5Next": KIMI
    | FOUR_LAYERS
    | {"q_lora_rank": 8, "qk_rope_head_dim": 0, "hc_mult": 2}
    | {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 64, "index_kpool": 4},
}
"""Small models, each with two or three layers that have a delta rule, of 4 value heads, 2 or 4 heads of keys, and gates
for each head or for each key."""
DELTA_CONFIGS = {
    name: config
    for name, config in DELTA_CONFIGS.items()
    if hasattr(transformers, f"{name.split(',')[0]}Config")  # in the installed version
}
CONFIGS = MAMBA2_CONFIGS | DELTA_CONFIGS


def model_of(name, seed=0, **options):
    """Returns a model whose parameters are all random, so that each of them has an effect."""
    torch.manual_seed(seed)
    family = name.split(",")[0]  # by the names of classes: importing FLA makes AutoModel return its own mamba2
    text_config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = text_config(**COMMON | CONFIGS[name] | options)
    if family == "Glm5Next":  # its language model has no class of its own
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"intermediate_size": 16, "projection_intermediate_size": 16}
        config = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=vision)
        model = transformers.Glm5NextForConditionalGeneration(config).eval()
    else:
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens_of(seed=0, length=40):
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(seed))


def module_of(model):
    return importlib.import_module(type(model).__module__)


def layers_of(model):
    """Returns the number of layers with Mamba-2 or a delta rule."""
    return sum(hasattr(module, "A_log") for module in model.modules())


def family_of(model):
    return MODELS[type(model).__module__.split(".")[2]]


def tolerances_of(model):
    """Returns the tolerances of logits and of gradients."""
    return (CLOSE, CLOSE_GRADIENTS) if family_of(model) is MAMBA2 else (CLOSE_DELTA, CLOSE_DELTA_GRADIENTS)


def norms_of(model):
    """Returns the number of norms that a call of the model computes by kernels, if there are kernels."""
    if family_of(model) is not MAMBA2:
        return 0
    return sum(type(module).__name__.endswith(("RMSNorm", "RMSNormGated")) for module in model.modules())


def blocks_of(model):
    """Returns the blocks whose steps take their norms and the residual into their products."""
    return [x for x in model.modules() if hasattr(x, "norm") and hasattr(getattr(x, "mixer", None), "A_log")]


def norms_within(model):
    """Returns the number of norms that are computed within products of a step of one or two sequences."""
    norms = [block.mixer.norm for block in blocks_of(model)]
    return sum(1 + (groups_of(norm, len(norm.weight)) == 1) for norm in norms)


@pytest.fixture(params=CONFIGS)
def model(request):
    return model_of(request.param)


IN_KERNELS = [pytest.mark.kernels, pytest.mark.skipif(not INTERPRETED, reason="the models are on a CPU")]


@pytest.fixture(autouse=True, params=["PyTorch", pytest.param("kernels", marks=IN_KERNELS)])
def by_kernels(request, monkeypatch):
    """The numbers of calls of the kernels of gla_transformers, which are interpreted; empty if PyTorch computes."""
    counts: dict[str, int] = {}
    if request.param == "PyTorch":
        return counts
    for dispatch, names in (
        (mamba2, ("convolve_token",)),
        (causal_convolution, ("convolve", "convolve_backward")),
        (gated, ("normed", "normed_backward")),
    ):
        module = importlib.import_module(f"{dispatch.__name__}_kernel")
        counts |= dict.fromkeys(names, 0)
        functions = SimpleNamespace(**{name: counted(counts, name, getattr(module, name)) for name in names})
        monkeypatch.setattr(dispatch, "_kernels_of", lambda device, functions=functions: functions)
    counts["product"] = 0
    product = counted(counts, "product", few_rows_kernel.product)
    products = SimpleNamespace(is_served=few_rows_kernel.is_served, product=product)
    monkeypatch.setattr(few_rows, "kernel_of", lambda device: products)
    return counts


def assert_close(actual, expected, tolerance=CLOSE):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def trained(model, tokens):
    """Returns the logits, the loss and the gradients of all parameters."""
    model.train()
    out = model(tokens, labels=tokens)
    gradients = torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return (out.logits, out.loss), gradients


def cache_of(out):
    """Returns the keyword by which a model takes its cache, and the cache."""
    key = next(name for name in ("cache", "past_key_values", "cache_params") if name in out)  # from 5.24 on all "cache"
    return {key: out[key]}


def states_of(out):
    """Returns the states of the layers, and the inputs that their convolutions keep."""
    (cache,) = cache_of(out).values()
    layers = [layer for layer in cache.layers if getattr(layer, "recurrent_states", None)]
    states = [state[0] for layer in layers for state in (layer.recurrent_states, layer.conv_states)]
    return [state for state in states if state is not None]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_training(name, seed, calls, by_kernels):
    model, tokens = model_of(name, seed), tokens_of(seed)
    expected, expected_gradients = trained(model, tokens)
    assert calls["scan"] == 0
    with accelerate():
        actual, gradients = trained(model, tokens)
    assert calls == {"scan": layers_of(model), "step": 0}
    if by_kernels:
        norms, layers = norms_of(model), layers_of(model)
        backward = {"normed_backward": norms, "convolve_backward": layers}
        none = {"convolve_token": 0, "product": 0}
        assert by_kernels == none | {"normed": norms, "convolve": layers} | backward
    close, close_gradients = tolerances_of(model)
    assert_close(actual, expected, close)
    assert_close(gradients, expected_gradients, close_gradients)


def test_generating_from_a_padded_batch(model, calls, by_kernels):
    tokens, mask = tokens_of(), torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    try:
        expected = model.generate(tokens, attention_mask=mask, **options)
    except RuntimeError as error:  # 5.17: FalconH1 with mamba_rms_norm
        pytest.skip(f"transformers itself fails here: {error}")
    close, _ = tolerances_of(model)
    with accelerate():
        actual = model.generate(tokens, attention_mask=mask, **options)
        n = layers_of(model)
        assert calls == {"scan": n, "step": 7 * n}
        if by_kernels:
            norms = 8 * norms_of(model) - 7 * norms_within(model)
            forward = {"convolve": n, "convolve_token": 7 * n, "normed": norms}
            forward["product"] = 14 * len(blocks_of(model))
            assert by_kernels == forward | {"convolve_backward": 0, "normed_backward": 0}
        with torch.no_grad():
            assert_close(model(tokens, attention_mask=mask).logits[:1, 9:], model(tokens[:1, 9:]).logits, close)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_close(actual.logits, expected.logits, close)
    assert_close(states_of(actual), states_of(expected), close)
    assert len(states_of(actual)) == 2 * n


@pytest.mark.parametrize(("name", "gated"), [("FalconH1", True), ("FalconH1, norm", False)])
def test_the_output_gate_of_a_prompt_is_in_the_scan(name, gated, monkeypatch):
    model, tokens, in_op, scan = model_of(name), tokens_of(), [], ops.chunk_ssd
    monkeypatch.setattr(ops, "chunk_ssd", lambda *x, **y: in_op.append(y["z"] is not None) or scan(*x, **y))
    with torch.no_grad():
        expected = model(tokens).logits
        with accelerate():
            assert_close(model(tokens).logits, expected)
    assert in_op == [gated] * layers_of(model)
    with accelerate():
        assert_close(model(tokens).logits, expected)
    assert in_op[layers_of(model) :] == [False] * layers_of(model)  # with gradients, transformers multiplies


BLOCKS = [
    ("Mamba2", {"n_groups": 1}),
    ("Mamba2", {"residual_in_fp32": False}),
    ("NemotronH", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
]
STEPS = 3


@torch.no_grad()
def stepped(model, batch):
    """Returns the logits of some tokens after a prompt, and the states after them."""
    tokens = torch.randint(3, 61, (batch, 9), generator=torch.Generator().manual_seed(batch))
    out = model(tokens[:, :-STEPS], use_cache=True)
    logits = [model(word, use_cache=True, **cache_of(out)).logits for word in tokens[:, -STEPS:].split(1, 1)]
    return torch.cat(logits, 1), states_of(out)


@pytest.mark.parametrize(("name", "options"), BLOCKS, ids=str)
def test_steps_of_blocks(name, options, by_kernels):
    """Products take one or two sequences in float32; others run in the functions apart."""
    model = model_of(name, **options)
    for batch in range(1, 6):
        before = by_kernels.get("product")
        expected, states = stepped(model, batch)
        with accelerate():
            actual, after = stepped(model, batch)
        assert_close([actual, *after], [expected, *states])
        if by_kernels:
            assert by_kernels["product"] - before == (2 * STEPS * len(blocks_of(model)) if batch <= 2 else 0)


@pytest.mark.parametrize(("name", "options"), BLOCKS, ids=str)
def test_steps_of_blocks_in_half_precision(name, options, by_kernels):
    """The error is that of transformers' own computation; the residual is float32 in the first model."""
    for batch in range(1, 6):
        model, before = model_of(name, **options), by_kernels.get("product")
        exact, states = stepped(model, batch)
        model.half()
        dtypes = []
        blocks_of(model)[0].register_forward_hook(lambda block, arguments, y, dtypes=dtypes: dtypes.append(y.dtype))
        original, original_states = stepped(model, batch)
        with accelerate():
            actual, after = stepped(model, batch)
        assert dtypes[: STEPS + 1] == dtypes[STEPS + 1 :]
        for a, b, c in zip((actual, *after), (original, *original_states), (exact, *states), strict=True):
            assert a.dtype == b.dtype
            assert (a - c).norm() <= 1.5 * (b - c).norm()
        if by_kernels:
            assert by_kernels["product"] - before == 2 * STEPS * len(blocks_of(model))


@pytest.mark.parametrize(("name", "options"), BLOCKS, ids=str)
def test_large_gates_in_half_precision(name, options, by_kernels):
    """The product of y and silu(gate) is beyond float16, but not the norm of it."""
    model = model_of(name, **options)
    with torch.no_grad():
        for block in blocks_of(model):
            block.mixer.D.fill_(2000.0)
            block.mixer.in_proj.weight[: block.mixer.intermediate_size] *= 60
    exact, _ = stepped(model, 2)
    with accelerate():
        actual, _ = stepped(model.half(), 2)
    assert (actual - exact).norm() <= 0.02 * exact.norm()


def launches_of_a_step(name, batch, monkeypatch, **options):
    """Returns the number of Triton kernels of a step; interpreted products of many rows are wrong in bfloat16.

    The op of the step is one kernel on a GPU.
    """
    dtype = torch.bfloat16 if batch <= 2 else torch.float16
    model, launched, start = model_of(name, **options).to(dtype), [], prepared.start
    step = functools.partial(ops.recurrent_ssd_step, backend="reference")
    out = model(torch.ones(batch, 5, dtype=torch.long), use_cache=True)
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "start", lambda launches: launched.extend(launches) or start(launches))
        patch.setattr(ops, "recurrent_ssd_step", lambda *args, **kw: launched.append("step") or step(*args, **kw))
        model(torch.ones(batch, 1, dtype=torch.long), use_cache=True, **cache_of(out))
    return len(launched)


@torch.no_grad()
@pytest.mark.parametrize("by_kernels", [pytest.param("kernels", marks=IN_KERNELS)], indirect=True)
@pytest.mark.parametrize(
    ("name", "batch", "expected"), [("Mamba2", 2, 4), ("Mamba2", 3, 6), ("NemotronH", 2, 5), ("NemotronH", 3, 6)]
)
def test_kernels_of_a_block(name, batch, expected, monkeypatch):
    """Two products, the convolution and the step; a norm of groups, and norms of more rows, are kernels before them."""
    numbers = []
    for n in (1, 3):
        options = {"num_hidden_layers": n, "n_groups": 1}
        if name == "NemotronH":  # its cache needs a layer of attention
            options = {"layers_block_type": ["full_attention"] + ["linear_attention"] * n}
        with accelerate():
            numbers.append(launches_of_a_step(name, batch, monkeypatch, **options))
    assert (numbers[1] - numbers[0]) / 2 == expected


def with_a_hook(path):
    """Returns a function that puts a hook on a part of the first block, which doubles its output."""

    def change(block):
        block.get_submodule(path).register_forward_hook(lambda module, args, y: 2 * y)

    change.__name__ = f"hook on {path}"
    return change


def with_a_hook_before(block):
    block.mixer.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))


def another_forward(block):
    norm, forward = block.norm, block.norm.forward
    norm.forward = lambda x: 2 * forward(x)


def another_linear_layer(block):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    block.mixer.in_proj.__class__ = Doubled


def another_norm(block):
    class Doubled(type(block.norm)):
        def forward(self, x):
            return 2 * super().forward(x)

    block.norm.__class__ = Doubled


def bias(block):
    block.mixer.out_proj.bias = torch.nn.Parameter(torch.randn(32))


PARTS = ("norm", "mixer", "mixer.in_proj", "mixer.norm", "mixer.out_proj")
CHANGES = [*map(with_a_hook, PARTS), with_a_hook_before, another_forward, another_linear_layer, another_norm, bias]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_blocks_that_compute_part_by_part(change, by_kernels):
    """Hooks and other modules in a block are called, as without acceleration. The other block is not affected."""
    model = model_of("Mamba2", n_groups=1)
    change(blocks_of(model)[0])
    expected, states = stepped(model, 2)
    with accelerate():
        actual, after = stepped(model, 2)
    assert_close([actual, *after], [expected, *states])
    if by_kernels:
        assert by_kernels["product"] == 2 * STEPS


def test_a_product_that_is_refused_after_the_step(by_kernels, monkeypatch):
    """The state has been advanced, so the parts of the layer that remain are computed apart."""
    model, product, calls = model_of("Mamba2"), mamba2.product, []

    def first_alone(*arguments):
        calls.append(arguments)
        return None if arguments[-1] is not None else product(*arguments)

    monkeypatch.setattr(mamba2, "product", first_alone)
    expected, states = stepped(model, 2)
    with accelerate():
        actual, after = stepped(model, 2)
    assert_close([actual, *after], [expected, *states])
    assert len(calls) == STEPS * 2 * (2 if by_kernels else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_in_float32(dtype, by_kernels):
    """The last product does not take its weight, and is computed apart as well."""
    model = model_of("Mamba2").to(dtype)
    for block in blocks_of(model):
        block.mixer.norm.float()
    exact, states = stepped(model, 2)
    with accelerate():
        actual, after = stepped(model, 2)
    for a, b in zip((actual, *after), (exact, *states), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize(("name", "options"), BLOCKS, ids=str)
def test_beams(name, options, by_kernels):
    model, how = model_of(name, **options), {"num_beams": 2, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(tokens_of()[:1], **how)
    with accelerate():
        assert torch.equal(model.generate(tokens_of()[:1], **how), expected)
    if by_kernels:
        assert by_kernels["product"] == 2 * 5 * len(blocks_of(model))


@pytest.mark.parametrize("padding", [0, 9])
def test_keys_that_stay_in_place_for_graphs(model, padding, monkeypatch):
    """A call stands for its graph here; gla_transformers' test_loop.py compares whole generations."""
    if getattr(model.config, "mamba_rms_norm", False) and not hasattr(transformers.Cache, "get_recurrent_state"):
        pytest.skip("5.17: transformers' own generation fails")
    monkeypatch.setitem(graphs.CAPTURES, "cpu", lambda call, device, beside: call)
    monkeypatch.setattr(graphs, "BEFORE", 0)
    tokens, mask = tokens_of(), torch.ones(2, 40, dtype=torch.long)
    mask[0, :padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with accelerate():
        with monkeypatch.context() as patched:
            patched.setattr(generation, "rules", lambda *_: None)
            expected = model.generate(tokens, **options)
        assert torch.equal(model.generate(tokens, **options), expected)
    by_index = ("Qwen4ExpForCausalLM", "Glm5NextForConditionalGeneration")  # whose generation is transformers' own
    assert (model in hybrid_generation._graphs) == (type(model).__name__ not in by_index)


def test_checkpoints_in_training(monkeypatch):
    """Transformers computes each block again in the backward, if it is asked to."""
    model, tokens = model_of("Mamba2"), tokens_of()
    expected = trained(model, tokens)[1]
    model.gradient_checkpointing_enable()
    calls = []
    for block in blocks_of(model):
        checkpointed = block._gradient_checkpointing_func
        monkeypatch.setattr(
            block, "_gradient_checkpointing_func", lambda *a, f=checkpointed, **o: calls.append(1) or f(*a, **o)
        )
    with accelerate():
        assert_close(trained(model, tokens)[1], expected, CLOSE_GRADIENTS)
        assert len(calls) == 2
    trained(model, tokens)
    assert len(calls) == 4


@torch.no_grad()
def test_a_prompt_in_two_parts(model, calls):
    def logits():
        out = model(tokens[:, :23], use_cache=True)
        return model(tokens[:, 23:], use_cache=True, **cache_of(out)).logits

    tokens = tokens_of()
    expected = logits()
    with accelerate():
        assert_close([logits()], [expected], tolerances_of(model)[0])
    assert calls["scan"] == 2 * layers_of(model)


@torch.no_grad()
def test_packed_sequences(model, calls, monkeypatch):
    """Sequences stay separate; the convolution is replaced, because without causal_conv1d it refuses such calls."""
    if family_of(model) is KIMI_DELTA_ATTENTION:
        pytest.skip("transformers' layers do not pass on the offsets; see test_delta_with_transformers.py")
    module, lengths = module_of(model), [7, 20, 13]
    convolve = module.causal_conv1d_fn

    def convolution(x, weight, bias=None, activation=None, seq_idx=None, **_):
        parts = [x] if seq_idx is None else x.split(lengths, -1)
        return torch.cat([convolve(part, weight, bias, activation) for part in parts], -1)

    monkeypatch.setattr(module, "causal_conv1d_fn", convolution)
    body, tokens = model.base_model, tokens_of()[:1]
    expected = torch.cat([body(part, use_cache=False).last_hidden_state for part in tokens.split(lengths, 1)], 1)
    seq_idx = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = {"seq_idx": seq_idx, "position_ids": positions, "use_cache": False}
    if family_of(model) is GATED_DELTA_RULE:
        packed["cu_seq_lens_q"] = torch.tensor([0, 7, 27, 40], dtype=torch.int32)
    if model.config.model_type == "granitemoehybrid":  # its attention does not find the sequences by the positions
        mask = (seq_idx[:, :, None] == seq_idx[:, None]).tril()[:, None]
        packed["attention_mask"] = {"full_attention": mask, "linear_attention": None}
    with accelerate():
        actual = body(tokens, **packed).last_hidden_state
        model.train()
        in_training = body(tokens, **packed).last_hidden_state
    assert_close([actual, in_training], [expected] * 2, tolerances_of(model)[0])
    assert calls["scan"] == 2 * layers_of(model)


@torch.no_grad()
def test_models_created_before_and_inside_run_on_the_originals_afterwards(model, calls):
    module, tokens = module_of(model), tokens_of()
    before, expected = dict(vars(module)), model(tokens).logits
    with accelerate() as acceleration:
        inside = type(model)(model.config).eval()
        inside.load_state_dict(model.state_dict())
        assert torch.equal(inside(tokens).logits, model(tokens).logits)
        assert calls["scan"] == 2 * layers_of(model)
        assert {module.__name__} <= {place for places in acceleration.replaced.values() for place in places}
    assert vars(module) == before
    assert torch.equal(inside(tokens).logits, expected)
    assert torch.equal(model(tokens).logits, expected)
    assert calls["scan"] == 2 * layers_of(model)


def test_a_step_that_records_gradients_runs_on_the_original(calls):
    def logits():
        with torch.no_grad():
            out = model(tokens, use_cache=True)
        return model(tokens[:, :1], use_cache=True, **cache_of(out)).logits

    model, tokens = model_of("Mamba2"), tokens_of()
    expected = logits()
    with accelerate():
        assert_close([logits()], [expected])
    assert calls == {"scan": layers_of(model), "step": 0}


@torch.no_grad()
def test_compiled_without_a_break(calls):
    torch._dynamo.reset()
    layer = model_of("Mamba2").base_model.layers[0].mixer
    x = torch.randn(2, 40, 32)
    with accelerate():
        actual = torch.compile(layer, fullgraph=True, backend="eager")(x)
        assert calls["scan"] > 0
        torch.testing.assert_close(actual, layer(x))


def test_generating_with_a_static_cache_compiles_a_step_without_a_break(model):
    """A GPU replays this step as a CUDA graph."""
    pytest.importorskip("gla_transformers")  # whose kernels are left out of compiled code
    if "Qwen4Exp" in type(model).__name__:
        pytest.skip("its layers of attention read values on the host")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    every_device = transformers.CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    every_device._compile_all_devices = True
    torch._dynamo.reset()
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    try:
        expected = model.generate(tokens_of(), **options, disable_compile=True)
    except IndexError as error:  # 5.17: FalconH1 with mamba_rms_norm
        pytest.skip(f"transformers itself fails here: {error}")
    with accelerate():
        actual = model.generate(tokens_of(), **options, compile_config=every_device)
    assert torch.equal(actual, expected)
    (graph,) = graphs
    step = "recurrent_ssd_step" if family_of(model) is MAMBA2 else "recurrent_delta_step"
    assert sum(step in str(node.target) for node in graph.graph.nodes) == layers_of(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mamba2", "FalconH1", "Qwen3_5", "OlmoHybrid", "KimiLinear", "BailingHybrid"])
def test_bfloat16(name, calls):
    """The error is that of transformers' own computation in bfloat16, up to the rounding of the scan's result."""
    model, tokens = model_of(name), tokens_of()
    exact = model(tokens).logits
    model.to(torch.bfloat16)
    original = model(tokens).logits
    with accelerate():
        actual = model(tokens).logits
        model.generate(tokens, max_new_tokens=4)
    assert calls == {"scan": 2 * layers_of(model), "step": 3 * layers_of(model)}
    assert (actual - exact).norm() <= 1.5 * (original - exact).norm()
