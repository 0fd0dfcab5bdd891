"""Layers of vLLM's own models that are made of this package's classes, if GLA_VLLM_LAYERS names them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import vllm
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.platforms import current_platform

from gla_core.extension import nearest

logger = init_logger("vllm.gla_vllm")  # vLLM prints what loggers below its own say

VERSION = "0.32"
"""The version of vLLM that this package was written for."""
LAYERS = {
    "gated_delta_net": {
        "QwenGatedDeltaNetAttention": "gla_vllm.delta_rules.QwenLayer",
        "OlmoHybridGatedDeltaNetAttention": "gla_vllm.delta_rules.OlmoLayer",
    },
    "kda": {
        "KimiGatedDeltaNetAttention": "gla_vllm.kda.KimiLayer",
        "BailingMoeV3KimiDeltaAttention": "gla_vllm.kda.LingLayer",
        "KimiK3DeltaAttention": "gla_vllm.kimi_k3.KimiK3Layer",
        "Glm5NextLinearAttention": "gla_vllm.glm.GlmLayer",
    },
    "lightning": {"BailingMoELinearAttention": "gla_vllm.lightning.LightningAttention"},
    "mamba2": {"MambaMixer2": "gla_vllm.mamba2.StateSpaceMixer"},
}
"""For each name: classes of vLLM, and the class that is made in place of each."""
_IN = "vllm.model_executor.models."
MODELS = {
    "gated_delta_net": {
        "Qwen3NextForCausalLM": f"{_IN}qwen3_next",
        "Qwen3_5ForCausalLM": f"{_IN}qwen3_5",
        "Qwen3_5MoeForCausalLM": f"{_IN}qwen3_5",
        "Qwen3_5ForConditionalGeneration": f"{_IN}qwen3_5",
        "Qwen3_5MoeForConditionalGeneration": f"{_IN}qwen3_5",
        "OlmoHybridForCausalLM": f"{_IN}olmo_hybrid",
    },
    "kda": {
        "KimiLinearForCausalLM": "vllm.models.kimi_k3",
        "KimiK3ForConditionalGeneration": "vllm.models.kimi_k3",
        "BailingMoeV3ForCausalLM": f"{_IN}bailing_moe_v3",
        "Glm5NextForCausalLM": "vllm.models.glm5next",
        "Glm5NextForConditionalGeneration": "vllm.models.glm5next",
    },
    "mamba2": {
        "FalconH1ForCausalLM": f"{_IN}falcon_h1",
        "GraniteMoeHybridForCausalLM": f"{_IN}granitemoehybrid",
        "NemotronHForCausalLM": f"{_IN}nemotron_h",
        "Zamba2ForCausalLM": f"{_IN}zamba2",
    },
}
"""For each name: models of vLLM that get room for rings of tokens, see `replays`, and their modules."""
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
ON_NVIDIA = ("KimiK3DeltaAttention", "Glm5NextLinearAttention")
"""Classes of vLLM that are imported for GPUs of NVIDIA alone."""


def replace_layers() -> None:
    """Replaces the layers that the environment's GLA_VLLM_LAYERS names, with commas between them; "all" for all.

    A line in vLLM's log says so, and warns of another vLLM.

    Raises:
        ValueError: a name is not known.
    """
    names = wanted(os.environ.get("GLA_VLLM_LAYERS", ""))
    with imported_early():
        for theirs, ours in (classes for name in names for classes in LAYERS[name].items()):
            if theirs not in ON_NVIDIA or current_platform.is_cuda():
                replace(theirs, ours)
    for model in (model for name in names for model in MODELS.get(name, ())):
        vllm.ModelRegistry.register_model(model, f"gla_vllm.replays:{model}")
    logger.info_once(
        "gla_vllm is loaded: gla_core computes GLA, HGRN2, GatedDeltaNet and KDA models, and of vLLM's own layers %s "
        "(GLA_VLLM_LAYERS)",
        ", ".join(names) or "none",
    )
    if vllm.__version__.split(".")[:2] != VERSION.split("."):
        logger.warning_once("gla_vllm was written for vLLM %s; this is %s", VERSION, vllm.__version__)


@contextmanager
def imported_early() -> Iterator[None]:
    """Lets modules be imported before vLLM knows the model, and with it whether its CUDA graphs break at ops.

    vLLM's decorator of such ops reads this when a module is imported. Where no graph breaks, it does nothing at a call.
    """
    if BREAKABLE in os.environ:
        yield
        return
    os.environ[BREAKABLE] = "1"
    try:
        yield
    finally:
        del os.environ[BREAKABLE]


def breakable(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function at which CUDA graphs break, if they can; it writes its results into its arguments."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    with imported_early():
        return eager_break_during_capture(function)


def replace(theirs: str, ours: str) -> None:
    """Makes layers of a class `ours`, named with its module, in place of those of a class of vLLM."""
    module, _, name = ours.rpartition(".")
    if theirs not in op_registry_oot:
        PluggableLayer.register_oot(getattr(importlib.import_module(module), name), name=theirs)


def announce(ours: type[PluggableLayer]) -> None:
    """Says once in vLLM's log which class of vLLM is replaced; plug-ins may be loaded before there is a log."""
    logger.info_once("gla_core computes vLLM's layer %s, because GLA_VLLM_LAYERS names it", ours.name)


def wanted(text: str) -> list[str]:
    """Returns the names of layers in the text of the environment variable."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(LAYERS)
    for name in names:
        if name not in LAYERS:
            raise ValueError(
                f"GLA_VLLM_LAYERS has {name!r}{nearest(name, LAYERS)}; expected names of layers out of "
                f"{', '.join(LAYERS)} with commas between them, or all"
            )
    return names
