"""Layers and models of vLLM that verify drafts with one state for each sequence, and rings of its last tokens.

vLLM asks a model, before it makes layers, how large their states are, and pads the blocks of softmax attention to that.
So a model whose layers have rings is registered anew, as a class that differs in these sizes alone.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from gla_vllm.layers import MODELS, announce
from gla_vllm.metadata import ConvolvedGLABackend
from gla_vllm.recurrence import Sizes, rings, split_graphs, with_checkpoints

Shapes = tuple[tuple[int, ...], ...]


class ReplacedLayer(MambaBase):
    """The parts that replaced layers with convolutions share.

    Attributes:
        sizes: the sizes of the layer on this rank.
        ring_shapes: the shapes of the rings, which are states behind vLLM's; none without drafts.
    """

    sizes: Sizes
    ring_shapes: Shapes = ()

    def take_place(self, sizes: Sizes) -> None:
        """Announces that the layer is replaced, and keeps its sizes.

        Raises:
            ValueError: ReplaySSM is asked for, whose states are of vLLM's kernels.
        """
        vllm_config = get_current_vllm_config()
        announce(type(self))
        split_graphs(vllm_config)
        if vllm_config.cache_config.use_replayssm:
            raise ValueError("use_replayssm is given and GLA_VLLM_LAYERS names the layer; expected one of them")
        self.sizes = sizes

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ConvolvedGLABackend

    def get_state_shape(self) -> Shapes:
        return (*super().get_state_shape(), *self.ring_shapes)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (*super().get_state_dtype(), *[torch.float32] * len(self.ring_shapes))

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Returns how the states are kept, with rings if the whole model, whose sizes vLLM has read, has them."""
        config = vllm_config.model_config
        model, _ = ModelRegistry.resolve_model_cls(config.architectures, model_config=config)
        self.ring_shapes = rings(vllm_config, self.sizes) if issubclass(model, ReplayingModel) else ()
        spec: Any = with_checkpoints(MambaBase.get_kv_cache_spec(self, vllm_config))
        return replace(spec, num_speculative_blocks=0) if self.ring_shapes else spec


class ReplayingModel:
    """A model of vLLM, whose layers have rings if there are drafts.

    Attributes:
        by_key: whether each key has a forget gate of its own.
    """

    by_key = False

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Shapes:
        parent: Any = super()
        shapes = parent.get_mamba_state_shape_from_config(vllm_config)
        return (*shapes, *rings(vllm_config, sizes_of_states(shapes, cls.by_key)))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        parent: Any = super()
        added = len(cls.get_mamba_state_shape_from_config(vllm_config)) - 2
        return (*parent.get_mamba_state_dtype_from_config(vllm_config), *[torch.float32] * added)


def sizes_of_states(shapes: Shapes, by_key: bool) -> Sizes:
    """Returns the sizes of a layer, from the shapes of its histories of q, k and v, joined, and of its state."""
    history, (values, V, K) = shapes
    width = history[0] if is_conv_state_dim_first() else history[1]
    keys = (width - values * V) // (2 * K)
    return Sizes(keys, keys, values, K, V, K if by_key else 1)


def __getattr__(name: str) -> Any:
    """Returns the class that is registered for a model of vLLM with this name."""
    for layer, models in MODELS.items():
        if name in models:
            theirs = getattr(importlib.import_module(models[name]), name)
            return type(name, (ReplayingModel, theirs), {"by_key": layer == "kda", "__module__": __name__})
    raise AttributeError(name)
