"""vLLM's Ling 2.5 model with its lightning layers replaced, against a recurrence token by token."""

import lightning_model
import pytest
import torch
from requests_of_tests import DRAFTS, greedy, outputs, prompt, tokens

from gla_vllm.layers import logger
from gla_vllm.lightning import LightningAttention


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 48}, {"enable_chunked_prefill": False}, {"speculative_config": DRAFTS}],
    ids=["in chunks", "whole", "drafts"],
)
def test_tokens(tmp_path, engine, monkeypatch, options):
    weights, said = lightning_model.save(tmp_path), []
    monkeypatch.setattr(logger, "info_once", lambda text, *values: said.append(text % values))
    llm = engine(str(tmp_path), enable_prefix_caching=False, **options)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert [type(layer) for layer in layers] == [LightningAttention] * lightning_model.LAYERS
    assert set(said) == {"gla_core computes vLLM's layer BailingMoELinearAttention, because GLA_VLLM_LAYERS names it"}
    prompts = [prompt(length) for length in (1, 2, 64, 65, 100)]
    assert tokens(llm, prompts, greedy(20)) == [lightning_model.tokens_of(weights, p, 20) for p in prompts]


def test_bfloat16(tmp_path, engine):
    """States have the dtype of the model, and log probabilities are those of float32 up to rounding."""
    lightning_model.save(tmp_path)
    results = {}
    for dtype in ("float32", "bfloat16"):
        llm = engine(str(tmp_path), dtype=dtype, max_num_batched_tokens=48, max_logprobs=61)
        layer, *_ = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert layer.kv_cache[0].dtype == getattr(torch, dtype)
        (step,) = outputs(llm, [prompt(100)], greedy(1, logprobs=61))[0].outputs[0].logprobs
        results[dtype] = torch.tensor([step[token].logprob for token in sorted(step)])
        llm.llm_engine.engine_core.shutdown()
    # Three layers round to 8 bits, with differences of up to 0.08.
    torch.testing.assert_close(results["bfloat16"], results["float32"], rtol=0, atol=0.25)
