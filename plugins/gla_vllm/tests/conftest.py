"""vLLM's engine on a CPU, and small checkpoints of random weights."""

import functools
import os
from unittest import mock

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
from transformers import Mamba2Config, Mamba2ForCausalLM
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

import gla_vllm
from gla_core.compat.fla import accelerate
from gla_transformers import GLAConfig, GLAForCausalLM
from gla_vllm import recurrence

# An engine replaces Triton kernels in all modules, and stumbles over one that drafts import. Once will do, before it.
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides = lambda: None

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY, "intermediate_size": 48}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 512}
SIZES |= {"initializer_range": 0.3}
SIZES_OF = {
    "HGRN2": {"num_heads": None, "expand_ratio": 16, "num_hidden_layers": 3},
    "GatedDeltaNet": {"head_dim": 16},
    "KDA": {"head_dim": 16},
}
ENGINE = {"enforce_eager": True, "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4}
ENGINE |= {"num_gpu_blocks_override": 64}  # states


@pytest.fixture(autouse=True)
def environment():
    """Restores the environment: for some models vLLM sets variables, which change the engines of later tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def gla(tmp_path_factory):
    """A function: `gla(**options)` returns a folder with a GLA model, and the model, computed by gla_transformers."""

    def make(**options):
        torch.manual_seed(0)
        config = GLAConfig(**SIZES | options)
        model = GLAForCausalLM(config).eval()
        folder = tmp_path_factory.mktemp("gla")
        model.save_pretrained(folder)
        return str(folder), model

    return make


@pytest.fixture(scope="session")
def fla(tmp_path_factory):
    """A function: `fla(name, **options)` returns a folder with flash-linear-attention's model, and the model."""
    from fla import models

    def make(name, **options):
        torch.manual_seed(0)
        sizes = SIZES | SIZES_OF.get(name, {})
        config = getattr(models, f"{name}Config")(**sizes | options)
        model = getattr(models, f"{name}ForCausalLM")(config).eval()
        if getattr(config, "use_lower_bound", False):
            torch.nn.init.normal_(model.model.lower_bounds)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        gla_vllm.register()  # importing flash-linear-attention registered its configurations
        return str(folder), model

    with accelerate(cpu=True):
        yield make


@pytest.fixture(scope="session")
def hgrn2(fla):
    """A function: `hgrn2(**options)` returns a folder with flash-linear-attention's HGRN2 model, and the model."""
    return functools.partial(fla, "HGRN2")


@pytest.fixture(scope="session")
def mamba2(tmp_path_factory):
    """A function: `mamba2(**options)` returns a folder with a Mamba-2 model, and the model."""

    def make(**options):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}
        none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        sizes |= {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "initializer_range": 0.3}
        model = Mamba2ForCausalLM(Mamba2Config(**none, **sizes | options)).eval()
        folder = tmp_path_factory.mktemp("mamba2")
        model.save_pretrained(folder)
        return str(folder), model

    return make


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
    cleanup_dist_env_and_memory()


@pytest.fixture
def accepted(monkeypatch):
    """The numbers of accepted tokens, the token after the drafts included, that decodes begin from."""
    numbers, decode = [], recurrence._decode

    def recorded(*args):
        numbers.extend(args[2].num_accepted_tokens.tolist())
        decode(*args)

    monkeypatch.setattr(recurrence, "_decode", recorded)
    return numbers
