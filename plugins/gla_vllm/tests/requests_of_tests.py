"""Requests of the tests, and the tokens that transformers generates for them."""

import torch
from vllm import SamplingParams
from vllm.model_executor.layers.mamba.abstract import MambaBase

VOCABULARY = 61
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def prompt(length, seed=0):
    """Returns tokens; a longer prompt of the same seed begins with the shorter ones."""
    return [(7 * i * i + 3 * i * seed + seed) % (VOCABULARY - 1) + 1 for i in range(length)]


def greedy(new=12, **options):
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **options)


def outputs(llm, prompts, how=None):
    """Returns vLLM's outputs for prompts."""
    return llm.generate([{"prompt_token_ids": p} for p in prompts], how or greedy(), use_tqdm=False)


def tokens(llm, prompts, how=None):
    """Returns the tokens that vLLM generates for prompts."""
    return [list(output.outputs[0].token_ids) for output in outputs(llm, prompts, how)]


@torch.no_grad()
def expected(model, prompts, new=12):
    """Returns the greedy tokens of a transformers model."""
    return [model.generate(torch.tensor([p]), max_new_tokens=new)[0, len(p) :].tolist() for p in prompts]


def states_of_drafts(llm):
    """Returns for each layer with states how many states of a sequence are kept for drafts."""
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    return [x.get_kv_cache_spec(config).num_speculative_blocks for x in layers if isinstance(x, MambaBase)]
