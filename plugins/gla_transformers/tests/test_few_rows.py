"""Products of few rows in one kernel with what stands around them, and layers that are computed by them."""

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_transformers import GLACache, few_rows
from plugins.gla_transformers.tests.kernels import DEVICE, DTYPES, INTERPRETED, compiled, runs

pytest.importorskip("triton")

from gla_transformers import few_rows_kernel
from gla_transformers.few_rows_kernel import FEW, launches, product

FORMS = {
    "plain": {},
    "norm": {"norm": True},
    "bias": {"bias": True},
    "residual": {"residual": True},
    "normed residual": {"norm": True, "residual": True},
    "gated": {"norm": True, "gated": True},
    "norm of float32": {"norm": True, "wide": "x"},
    "residual in float32": {"norm": True, "residual": True, "bias": True, "wide": "residual"},
}


def inputs(M, K, N, dtype=torch.float32, norm=False, bias=False, residual=False, gated=False, wide=""):
    """Returns the arguments of `product`; x is a slice of rows that are longer. The one that is `wide` is float32."""
    options = {"device": DEVICE, "dtype": torch.float32}
    x = torch.randn(M, K + 16, **options).to(torch.float32 if wide == "x" else dtype)[:, :K]
    weight = (torch.randn(2 * N if gated else N, K, **options) / K**0.5).to(dtype)
    rest = {
        "norm_weight": torch.rand(K, **options).to(dtype) if norm else None,
        "bias": torch.randn(N, **options).to(dtype) if bias else None,
        "residual": torch.randn(M, N, **options).to(torch.float32 if wide else dtype) if residual else None,
    }
    return x, weight, {**rest, "norm_eps": 1e-5, "gated": gated}


def expected(x, weight, norm_weight, norm_eps, bias, residual, gated):
    """Returns in float64 what layers apart compute, with the roundings between them."""
    dtype, x, weight = weight.dtype, x.to(weight.dtype).double(), weight.double()
    if norm_weight is not None:
        x = F.rms_norm(x, x.shape[1:], norm_weight.double(), norm_eps).to(dtype).double()
    y = x @ weight.t()
    if gated:
        gate, up = y.to(dtype).double().chunk(2, 1)
        y = F.silu(gate) * up
    y = y if bias is None else y + bias.double()
    if residual is not None:
        y = y.to(dtype if residual.dtype != dtype else y.dtype).double() + residual.double()
    return y


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 32, 6), (3, 48, 5), (8, 16, 64), (2, 3072, 8), (9, 48, 21), (40, 256, 2050), (35, 2048, 70)],
    ids=str,
)
def test_a_product(M, K, N, form, dtype):
    x, weight, options = inputs(M, K, N, dtype, **FORMS[form])
    y = product(x, weight, **options)
    residual = options["residual"]
    assert y.dtype == (dtype if residual is None else residual.dtype)
    assert relative_error(y, expected(x, weight, **options)) <= FORWARD[dtype]
    if residual is not None:
        alone = product(x, weight, **options | {"residual": residual.zero_()})
        assert torch.equal(alone, alone.to(dtype).to(y.dtype)), "a product is rounded before the residual is added"


@runs
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_row_do_not_depend_on_the_others(form):
    x, weight, options = inputs(FEW, 1024, 96, **FORMS[form])
    together, residual = product(x, weight, **options), options["residual"]
    for i in range(FEW):
        options["residual"] = None if residual is None else residual[i : i + 1]
        assert torch.equal(product(x[i : i + 1], weight, **options), together[i : i + 1])


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("M", "K", "N"), [(1, 1024, 2816), (64, 1024, 2816), (64, 2816, 1024)], ids=str)
@pytest.mark.parametrize("capability", [90, 80])
def test_they_compile_for_an_h100_and_an_a100(capability, M, K, N, form):
    x, weight, options = inputs(M, K, N, torch.bfloat16, **FORMS[form])
    residual = options["residual"]
    y = (weight if residual is None else residual).new_empty(M, N)
    tensors = (x, weight, options["norm_weight"], options["bias"], residual, y)
    overlaps = capability == 90
    for launch in launches(tensors, 1e-5, options["gated"], overlaps):
        kernel = compiled(launch, ("cuda", capability, 32))
        assert kernel.metadata.shared <= 101_376, "of consumer cards; an H100 has more"
        asks_for_weights = "cp.async.bulk.prefetch.L2.global" in kernel.asm["ptx"]
        assert asks_for_weights == (overlaps and launch.kernel.fn.__name__.startswith("_product"))


# ---- layers


@pytest.fixture
def calls(monkeypatch):
    """A list to which every product by the kernel adds its number of rows. On a CPU, its kernels are interpreted."""
    recorded = []
    product = few_rows_kernel.product
    monkeypatch.setattr(few_rows_kernel, "product", lambda x, *a, **o: recorded.append(len(x)) or product(x, *a, **o))
    monkeypatch.setattr(few_rows, "kernel_of", lambda device: few_rows_kernel)
    return recorded


@torch.no_grad()
def steps(model, tokens, mask=None):
    """Returns the logits of steps after a prompt, and the cache."""
    cache = GLACache(model.config)
    model(tokens[:, :4], past_key_values=cache)
    seen = [None if mask is None else mask[:, i : i + 1] for i in range(4, tokens.shape[1])]
    words = tokens[:, 4:].split(1, 1)
    logits = [model(w, past_key_values=cache, attention_mask=s).logits for w, s in zip(words, seen, strict=True)]
    return torch.cat(logits, 1), cache


def compare(model, tokens, monkeypatch, mask=None, tolerance=1e-4):
    """Checks that steps by the kernel give what steps by PyTorch give."""
    close = {"rtol": tolerance, "atol": tolerance}
    actual, cache = steps(model, tokens, mask)
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "kernel_of", lambda device: None)
        wanted, other = steps(model, tokens, mask)
    torch.testing.assert_close(actual, wanted, **close)
    for a, b in zip(cache.tensors(), other.tensors(), strict=True):
        torch.testing.assert_close(a, b, **close)


MODELS = [
    {},
    {"use_short_conv": True, "use_output_gate": False},
    {"num_kv_heads": 1, "clamp_min": -1.0},
    {"fuse_norm": False, "feature_map": "relu"},
    {"model_type": "hgrn2", "num_hidden_layers": 2},
    {"model_type": "hgrn2", "num_hidden_layers": 2, "use_short_conv": True},
]


@runs
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_steps(ours, options, calls, monkeypatch):
    model, tokens = ours(**{"num_hidden_layers": 1} | options).to(DEVICE), torch.randint(1, 61, (2, 6), device=DEVICE)
    compare(model, tokens, monkeypatch)
    products = 5 if "model_type" not in options else 4
    assert calls == [2] * products * 2 * len(model.model.layers)
    mask = torch.ones_like(tokens)
    mask[0, 4] = 0
    compare(model, tokens, monkeypatch, mask)


def apart(layer):
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.clone())


def hook(module):
    module.register_forward_hook(lambda module, args, y: 2 * y)


CHANGES = {
    "apart": apart,
    "hook of a norm": lambda layer: hook(layer.mlp_norm),
    "hook within": lambda layer: hook(layer.attn.gk_proj),
    "another module": lambda layer: setattr(layer.attn, "o_proj", torch.nn.Sequential(layer.attn.o_proj)),
    "bias": lambda layer: setattr(layer.mlp, "down_proj", torch.nn.Linear(48, 32, device=DEVICE)),
    "norm of groups": lambda layer: setattr(layer.attn_norm, "groups", 2),
    "hook of the output norm of hgrn2": lambda layer: hook(layer.attn.g_norm),
    "no weight of the output norm of hgrn2": lambda layer: setattr(layer.attn.g_norm, "weight", None),
}


@runs
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_compute_for_themselves(ours, change, calls, monkeypatch):
    model = ours(num_hidden_layers=1, model_type="hgrn2" if change.endswith("hgrn2") else "gla").to(DEVICE)
    model.config.cuda_graphs = False
    CHANGES[change](model.model.layers[0])
    compare(model, torch.randint(1, 61, (2, 5), device=DEVICE), monkeypatch)
    assert calls == []


@runs
@torch.no_grad()
def test_many_rows_and_prompts(ours, calls, monkeypatch):
    model, tokens = ours(num_hidden_layers=1).to(DEVICE), torch.randint(1, 61, (70, 5), device=DEVICE)
    model(tokens[:1, :1], use_cache=True)
    compare(model, tokens[:3], monkeypatch)
    assert calls == []
    compare(model, tokens[:2], monkeypatch)
    assert calls == [2] * 5
    model.half()
    compare(model, tokens[:9], monkeypatch, tolerance=2e-2)
    assert calls == [2] * 5 + [9] * 5
    compare(model, tokens, monkeypatch, tolerance=2e-2)
    assert len(calls) == 10
