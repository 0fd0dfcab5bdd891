"""Batch invariance: with VLLM_BATCH_INVARIANT=1 the log probabilities of a request do not depend on the batch.

vLLM's own part of this setting is Triton kernels, which a CPU does not run. Here each row is multiplied alone instead.
"""

import delta_models
import lightning_model
import pytest
import torch
from requests_of_tests import greedy, outputs, prompt
from vllm import envs
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers import utils

ALIGNED = {"enable_prefix_caching": True, "block_size": 64, "max_num_batched_tokens": 192}
WHOLE = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 512}
WIDE = {"hidden_size": 64, "intermediate_size": 64}  # PyTorch computes rests of 32 numbers otherwise


@pytest.fixture(autouse=True)
def invariant(monkeypatch):
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")

    monkeypatch.setattr(batch_invariant, "init_batch_invariance", lambda: None)

    def by_rows(layer, remove_weight):
        layer.cpu_linear = lambda x, w, b: torch.stack([w @ row if b is None else w @ row + b for row in x])

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", by_rows)
    yield
    envs.disable_envs_cache()


def log_probabilities(llm, prompts):
    """Returns the log probability of each token of the vocabulary, at each step of each request."""
    results = outputs(llm, prompts, greedy(20, logprobs=61))
    return [
        [[step[token].logprob for token in sorted(step)] for step in request.outputs[0].logprobs] for request in results
    ]


FOLDERS = {
    "gla": ("gla", {}),
    "gla convolved": ("gla", {"use_short_conv": True}),
    "hgrn2": ("hgrn2", {}),
    "gated delta net": ("fla", {"name": "GatedDeltaNet", "head_dim": 32}),
    "kda": ("fla", {"name": "KDA", "head_dim": 32}),
}


REPLACED = ["Qwen3Next", "OlmoHybrid", "KimiLinear"]


@pytest.fixture(params=[*FOLDERS, *REPLACED, "mamba2", "lightning"])
def folder(request, tmp_path, monkeypatch):
    """A folder with a model, and what is changed in its configuration."""
    if request.param in FOLDERS:
        fixture, options = FOLDERS[request.param]
        return request.getfixturevalue(fixture)(**WIDE, **options)[0], {}
    if request.param == "mamba2":
        return request.getfixturevalue("mamba2")(hidden_size=64, num_heads=8)[0], {}
    if request.param == "lightning":
        lightning_model.save(tmp_path)
        return str(tmp_path), {}
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")  # kernels for GPUs
    delta_models.save_one_layer(request.param, tmp_path, monkeypatch)
    return str(tmp_path), {"num_hidden_layers": 1}


@pytest.mark.parametrize("options", [ALIGNED, WHOLE], ids=["cut at blocks", "whole"])
def test_alone_and_in_company(folder, engine, options):
    folder, overrides = folder
    llm = engine(folder, max_logprobs=61, max_model_len=256, hf_overrides=overrides, **options)
    lengths = (1, 2, 63, 64, 65, 100, 128, 129, 130, 180)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    together = log_probabilities(llm, prompts)
    again = log_probabilities(llm, prompts[::-1])[::-1]  # the prefix cache is full, in the first case
    assert again == together
    for asked, wanted in zip(prompts, together, strict=True):
        llm.reset_prefix_cache()
        assert log_probabilities(llm, [asked]) == [wanted]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False, "enable_chunked_prefill": True}, "no-enable-chunked-prefill"),
        (ALIGNED | {"block_size": 32}, "block_size is 32; expected a multiple of 64"),
        (ALIGNED | {"max_num_batched_tokens": 48}, "at most max_num_batched_tokens = 48"),
    ],
    ids=["cut anywhere", "small blocks", "large blocks"],
)
def test_refusals(gla, engine, options, message):
    with pytest.raises(ValueError, match=message):
        engine(gla(**WIDE)[0], **options)
