"""vLLM's Mamba-2 models with the scan of their layers replaced, against transformers' models."""

import pytest
import torch
import transformers
from requests_of_tests import DRAFTS, VOCABULARY, expected, greedy, outputs, prompt, states_of_drafts, tokens

from gla_vllm.mamba2 import StateSpaceMixer

NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 48}, {"enable_chunked_prefill": False}], ids=["in chunks", "whole"]
)
def test_tokens(mamba2, engine, options):
    folder, model = mamba2()
    llm = engine(folder, enable_prefix_caching=False, max_model_len=256, **options)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert [type(layer) for layer in layers] == [StateSpaceMixer] * 2
    prompts = [prompt(length) for length in (1, 2, 64, 65, 100)]
    assert tokens(llm, prompts) == expected(model, prompts)


def test_drafts_are_refused_without_softmax_attention(mamba2, engine):
    with pytest.raises(ValueError, match="vLLM verifies drafts of models with softmax attention alone"):
        engine(mamba2()[0], speculative_config=DRAFTS)


def test_prefix_cache(mamba2, engine):
    folder, model = mamba2()
    llm = engine(folder, enable_prefix_caching=True, block_size=64, max_model_len=256, max_num_batched_tokens=256)
    for hits in (0, 128):
        (output,) = outputs(llm, [prompt(150)])
        assert output.num_cached_tokens == hits
        assert [list(output.outputs[0].token_ids)] == expected(model, [prompt(150)])


COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
COMMON |= {"max_position_embeddings": 256, "initializer_range": 0.3, **NONE}
GROUPS = {"n_groups": 2, "chunk_size": 16}  # of heads that share queries and keys
MODELS = {
    "GraniteMoeHybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "nope",
    },
    "FalconH1": {
        "num_hidden_layers": 2,
        "head_dim": 32,
        "intermediate_size": 48,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        **{f"mamba_{name}": size for name, size in GROUPS.items()},
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "head_dim": 32,
        "intermediate_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        **GROUPS,
    },
    "Zamba2": {
        "num_hidden_layers": 2,
        "layers_block_type": ["hybrid", "hybrid"],  # both have the same layer of softmax attention, with own adapters
        "intermediate_size": 48,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 8,
        "mamba_d_state": 16,
        "time_step_min": 1e-9,  # vLLM does not clamp time steps
        "mamba_ngroups": GROUPS["n_groups"],
        "chunk_size": GROUPS["chunk_size"],
    },
}


@pytest.fixture
def model(request, tmp_path):
    """A folder with a model of MODELS, and the model."""
    torch.manual_seed(0)
    name = request.param
    config = getattr(transformers, f"{name}Config")(**COMMON, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for part in model.modules():
        if hasattr(part, "dt_bias"):
            torch.nn.init.normal_(part.dt_bias, -3.0)  # short time steps, so that states last
    model.save_pretrained(tmp_path)
    return str(tmp_path), model


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_beside_softmax_attention(model, engine):
    """Two layers of each model are replaced; those of softmax attention stay vLLM's."""
    folder, made = model
    llm = engine(folder, max_num_batched_tokens=64, enable_prefix_caching=False)
    layers = [type(x) for x in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    assert layers.count(StateSpaceMixer) == 2
    assert len(layers) > 2
    prompts = [prompt(length) for length in (1, 2, 64, 65, 100)]
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)


@pytest.mark.parametrize("model", ["GraniteMoeHybrid", "NemotronH"], indirect=True)
def test_drafts(model, engine, accepted):
    folder, made = model
    prompts = [prompt(length) for length in (1, 2, 65, 100)]
    llm = engine(folder, speculative_config=DRAFTS, enable_prefix_caching=False, max_num_batched_tokens=64)
    assert tokens(llm, prompts, greedy(20)) == expected(made, prompts, 20)
    assert max(accepted) > 1
    assert states_of_drafts(llm) == [0, 0]
