"""vLLM's engine on a CPU, and small checkpoints of random weights."""

from __future__ import annotations

import functools
import gc
import os

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in the process of the tests
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    GLA_VLLM_LAYERS="all",
    GLA_CHECK="1",  # the ops look for NaN, wrong offsets, and slots that two sequences share
)

import pytest
import torch
from requests_of_tests import VOCABULARY
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

import gla_vllm
from gla_core.compat.fla import accelerate
from gla_transformers import GLAConfig, GLAForCausalLM

# An engine replaces Triton kernels in all modules, and stumbles over one that drafts import. One engine's work will do.
current_platform.register_triton_kernel_overrides = functools.cache(current_platform.register_triton_kernel_overrides)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY, "intermediate_size": 48}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512}
ENGINE = {"enforce_eager": True, "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4}
ENGINE |= {"num_gpu_blocks_override": 64}  # states; GLA_CHECK reads all of them in each step


@pytest.fixture(scope="session")
def gla(tmp_path_factory):
    """A function: `gla(**options)` returns a folder with a GLA model, and the model, computed by gla_transformers."""

    def make(**options):
        torch.manual_seed(0)
        config = GLAConfig(**SIZES | {"initializer_range": 0.3, "pad_token_id": 0} | options)
        model = GLAForCausalLM(config).eval()
        folder = tmp_path_factory.mktemp("gla")
        model.save_pretrained(folder)
        return str(folder), model

    return make


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


@pytest.fixture
def engine():
    """A function: `engine(folder, **options)` returns an engine, which ends with the test."""
    made = []

    def make(folder, **options):
        made.append(LLM(model=folder, **ENGINE | options))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.engine_core.shutdown()
    made.clear()
    gc.collect()
    cleanup_dist_env_and_memory()
