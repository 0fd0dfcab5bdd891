"""Greedy tokens are those of gla_transformers, whatever the batches are."""

from __future__ import annotations

import pytest
from requests_of_tests import expected, prompt, tokens

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
