"""Greedy tokens are those of gla_transformers, whatever the batches are."""

import pytest
from requests_of_tests import expected, prompt, tokens
from transformers import AutoConfig
from vllm.compilation.counter import compilation_counter

import gla_vllm

LENGTHS = [1, 2, 63, 64, 65, 100, 129, 200]
GROUPED = {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "clamp_min": -0.05, "expand_k": 1.0}
PLAIN = {"use_output_gate": False, "elementwise_affine": False, "tie_word_embeddings": True, "fuse_norm": False}
CONVOLVED = {"use_short_conv": True, "conv_size": 3, "num_heads": 4, "num_kv_heads": 2}
IN_CHUNKS = {"max_num_batched_tokens": 48}
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}


@pytest.mark.parametrize("batches", [IN_CHUNKS, WHOLE], ids=["in chunks", "whole"])
@pytest.mark.parametrize("options", [{}, GROUPED, PLAIN, CONVOLVED], ids=["default", "grouped", "plain", "convolved"])
def test_gla(gla, engine, options, batches):
    folder, model = gla(**options)
    prompts = [prompt(length) for length in LENGTHS]
    llm = engine(folder, enable_prefix_caching=False, **batches)
    assert tokens(llm, prompts) == expected(model, prompts)


UNFUSED = {"fuse_norm": False, "fuse_swiglu": False}
NO_BOUNDS = {"num_heads": 4, "expand_ratio": None, "use_lower_bound": False}
FOLDERS = {
    "gla": ("GLA", {}),
    "gla grouped": ("GLA", GROUPED | UNFUSED),
    "gla plain": ("GLA", PLAIN | {"attn_mode": "fused_recurrent", "intermediate_size": None}),
    "gla convolved": ("GLA", CONVOLVED),
    "hgrn2": ("HGRN2", {}),
    "hgrn2 convolved": ("HGRN2", {"use_short_conv": True}),
    "hgrn2 plain": ("HGRN2", NO_BOUNDS | UNFUSED | {"elementwise_affine": False, "tie_word_embeddings": True}),
}


FOLDERS |= {
    "gated delta net": ("GatedDeltaNet", {}),
    "gated delta net plain": (
        "GatedDeltaNet",
        {"num_v_heads": 4, "use_gate": False, "use_short_conv": False} | UNFUSED,
    ),
    "gated delta net sigmoid": ("GatedDeltaNet", {"output_gate_activation": "sigmoid", "allow_neg_eigval": True}),
    "kda": ("KDA", {}),
    "kda bounded": ("KDA", {"num_v_heads": 4, "expand_v": 2.0, "safe_gate": True, "lower_bound": -5.0}),
    "kda plain": ("KDA", {"use_short_conv": False, "allow_neg_eigval": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize(("name", "options"), FOLDERS.values(), ids=FOLDERS)
def test_folders_of_flash_linear_attention(fla, engine, name, options):
    """The folder, the model and its tokens are flash-linear-attention's."""
    folder, model = fla(name, **options)
    prompts = [prompt(length) for length in LENGTHS]
    assert tokens(engine(folder, max_num_batched_tokens=256), prompts) == expected(model, prompts)


@pytest.mark.parametrize("name", ["GLA", "HGRN2"])
def test_configurations_of_flash_linear_attention(fla, engine, name):
    """A program that imports flash-linear-attention after vLLM's plug-ins has its configurations, not the plug-in's."""
    folder, model = fla(name)
    AutoConfig.register(name.lower(), type(model.config), exist_ok=True)
    llm = engine(folder)
    gla_vllm.register()
    assert type(llm.llm_engine.vllm_config.model_config.hf_config) is type(model.config)
    assert tokens(llm, [prompt(100)]) == expected(model, [prompt(100)])


PARALLEL = {
    "gla": ("gla", GROUPED | CONVOLVED),
    "hgrn2": ("hgrn2", {"expand_ratio": 8, "use_short_conv": True}),
    "gated delta net": ("fla", {"name": "GatedDeltaNet", "num_v_heads": 4}),
    "kda": ("fla", {"name": "KDA", "num_v_heads": 4}),
}


@pytest.mark.parametrize(("fixture", "options"), PARALLEL.values(), ids=PARALLEL)
def test_two_ranks_of_tensor_parallelism(request, engine, monkeypatch, fixture, options):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder, model = request.getfixturevalue(fixture)(**options)
    prompts = [prompt(length) for length in (1, 65, 100)]
    llm = engine(folder, tensor_parallel_size=2, **IN_CHUNKS, enable_prefix_caching=False)
    assert tokens(llm, prompts) == expected(model, prompts)


def test_compiled(gla, engine):
    """The model is compiled, or an earlier run of this test has compiled it."""

    def compiled():
        return compilation_counter.num_aot_compiles + compilation_counter.num_aot_artifacts_loaded

    folder, model = gla(use_short_conv=True)
    before = compiled()
    llm = engine(folder, enforce_eager=False, **IN_CHUNKS, enable_prefix_caching=False)
    prompts = [prompt(length) for length in (1, 65, 100)]
    assert tokens(llm, prompts) == expected(model, prompts)
    assert compiled() - before == 1
