"""Layers of vLLM's own models that are made of this package's classes, if GLA_VLLM_LAYERS names them."""

from __future__ import annotations

import importlib
import os

import vllm
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

from gla_core.extension import nearest

logger = init_logger("vllm.gla_vllm")  # vLLM prints what loggers below its own say

VERSION = "0.32"
"""The version of vLLM that this package was written for."""
LAYERS = {
    "gated_delta_net": ("gla_vllm.delta_rules", "QwenLayer", "QwenGatedDeltaNetAttention"),
    "kda": ("gla_vllm.delta_rules", "KimiLayer", "KimiGatedDeltaNetAttention"),
    "lightning": ("gla_vllm.lightning", "LightningAttention", "BailingMoELinearAttention"),
    "mamba2": ("gla_vllm.mamba2", "StateSpaceMixer", "MambaMixer2"),
}
"""For each name: a module, its class, and vLLM's class in whose place it is made."""


def replace_layers() -> None:
    """Replaces the layers that the environment's GLA_VLLM_LAYERS names, with commas between them; "all" for all.

    A line in vLLM's log says so, and warns of another vLLM.

    Raises:
        ValueError: a name is not known.
    """
    names = wanted(os.environ.get("GLA_VLLM_LAYERS", ""))
    for name in names:
        module, ours, theirs = LAYERS[name]
        if theirs not in op_registry_oot:
            PluggableLayer.register_oot(getattr(importlib.import_module(module), ours), name=theirs)
    logger.info_once(
        "gla_vllm is loaded: gla_core computes GLA, HGRN2, GatedDeltaNet and KDA models, and of vLLM's own layers %s "
        "(GLA_VLLM_LAYERS)",
        ", ".join(names) or "none",
    )
    if vllm.__version__.split(".")[:2] != VERSION.split("."):
        logger.warning_once("gla_vllm was written for vLLM %s; this is %s", VERSION, vllm.__version__)


def announce(theirs: str) -> None:
    """Says once in vLLM's log that a class of vLLM is replaced; plug-ins may be loaded before there is a log."""
    logger.info_once("gla_core computes vLLM's layer %s, because GLA_VLLM_LAYERS names it", theirs)


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
