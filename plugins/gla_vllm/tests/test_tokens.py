"""Greedy tokens are those of gla_transformers, whatever the batches are."""

from __future__ import annotations

import pytest
import torch
from requests_of_tests import VOCABULARY, expected, prompt, tokens

import gla_vllm
from gla_core.compat.fla import accelerate

LENGTHS = [1, 2, 63, 64, 65, 100, 129, 200]
GROUPED = {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "clamp_min": -0.05, "expand_k": 1.0}
PLAIN = {"use_output_gate": False, "elementwise_affine": False, "tie_word_embeddings": True, "fuse_norm": False}
IN_CHUNKS = {"max_num_batched_tokens": 48}
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}


@pytest.mark.parametrize("batches", [IN_CHUNKS, WHOLE], ids=["in chunks", "whole"])
@pytest.mark.parametrize("options", [{}, GROUPED, PLAIN], ids=["default", "grouped", "plain"])
def test_gla(gla, engine, options, batches):
    folder, model = gla(**options)
    prompts = [prompt(length) for length in LENGTHS]
    llm = engine(folder, enable_prefix_caching=False, **batches)
    assert tokens(llm, prompts) == expected(model, prompts)


@pytest.fixture
def hgrn2(tmp_path):
    """A function: `hgrn2(**options)` returns a folder with flash-linear-attention's HGRN2 model, and the model."""
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": VOCABULARY, "intermediate_size": 48}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3}

    def make(**options):
        torch.manual_seed(0)
        model = HGRN2ForCausalLM(HGRN2Config(**sizes | options)).eval()
        if model.config.use_lower_bound:
            torch.nn.init.normal_(model.model.lower_bounds)
        model.save_pretrained(tmp_path)
        gla_vllm.register()  # importing flash-linear-attention registered its configuration
        return str(tmp_path), model

    with accelerate(cpu=True):
        yield make


@pytest.mark.parametrize("options", [{"expand_ratio": 16}, {"expand_ratio": 8, "use_lower_bound": False}], ids=str)
def test_hgrn2(hgrn2, engine, options):
    folder, model = hgrn2(**options)
    prompts = [prompt(length) for length in LENGTHS]
    assert tokens(engine(folder, max_num_batched_tokens=256), prompts) == expected(model, prompts)
