"""The layers of GLA and HGRN2, with merged projections whose heads are spread over the ranks of tensor parallelism.

The mathematics is that of `gla_core.nn.GatedLinearAttention` and `gla_core.nn.HGRN2`. Every rank has an equal number of
heads, and the last projection sums over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from gla_core.extension import RMSNormGated, activation, head_width, log_gate
from gla_transformers import GLAConfig, HGRN2Config
from gla_vllm.convolution import Convolution
from gla_vllm.recurrence import Recurrence, Sizes

GATE_RANK = 16
"""Rank of the projection that makes the forget gates; no configuration changes it."""
GATE_NORMALIZER = 16
"""Divides the log of the forget gates; no configuration changes it."""


def sizes_of_gla(config: GLAConfig, ranks: int) -> Sizes:
    """Returns the sizes of a rank's part of a layer.

    Raises:
        ValueError: the heads cannot be spread evenly over the ranks, or have no whole width.
    """
    heads = config.num_heads
    kv_heads = heads if config.num_kv_heads is None else config.num_kv_heads
    check_heads("num_kv_heads" if kv_heads != heads else "num_heads", kv_heads, ranks)
    K = head_width("expand_k", config.expand_k, config.hidden_size, heads)
    V = head_width("expand_v", config.expand_v, config.hidden_size, heads)
    return Sizes(heads // ranks, kv_heads // ranks, kv_heads // ranks, K, V, K)


def sizes_of_hgrn2(config: HGRN2Config, ranks: int) -> Sizes:
    """Returns the sizes of a rank's part of a layer.

    Raises:
        ValueError: the heads cannot be spread evenly over the ranks.
    """
    heads = config.hidden_size // config.expand_ratio
    check_heads("num_heads", heads, ranks)
    part, K = heads // ranks, config.expand_ratio
    return Sizes(part, part, part, K, config.hidden_size // heads, K)


def check_heads(name: str, heads: int, ranks: int) -> None:
    """Raises ValueError if the heads cannot be spread evenly over the ranks."""
    if heads % ranks != 0:
        raise ValueError(f"{name} is {heads}; expected a multiple of the {ranks} ranks of tensor parallelism")


def convolution(config: Any, sizes: Sizes, silu: bool, layer: str) -> Convolution | None:
    """Returns the convolutions in front of the recurrence of this name; None if the model has none."""
    return Convolution(sizes.widths, config.conv_size, silu, layer) if config.use_short_conv else None


class GLAAttention(nn.Module):
    """The layer of a GLA model: [T, hidden_size] to [T, hidden_size].

    Args:
        config: the configuration of the model.
        vllm_config: vLLM's configuration.
        prefix: the name of the layer.
    """

    def __init__(self, config: GLAConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        sizes = self.sizes = sizes_of_gla(config, ranks)
        gate = [sizes.queries * sizes.V] if config.use_output_gate else []
        self.widths, hidden = [sum(sizes.widths), *gate], config.hidden_size
        self.feature_map = None if config.feature_map is None else activation("feature_map", config.feature_map)
        self.clamp_min = config.clamp_min

        how: dict[str, Any] = {"quant_config": vllm_config.quant_config, "bias": False}
        self.in_proj = MergedColumnParallelLinear(
            hidden, [width * ranks for width in (*sizes.widths, *gate)], prefix=f"{prefix}.in_proj", **how
        )
        self.gk_proj = nn.ModuleList(
            [
                ReplicatedLinear(hidden, GATE_RANK, prefix=f"{prefix}.gk_proj.0", **how),
                ColumnParallelLinear(
                    GATE_RANK, sizes.widths[1] * ranks, prefix=f"{prefix}.gk_proj.1", **how | {"bias": True}
                ),
            ]
        )
        logits = {} if self.clamp_min is not None else {"gate": "logsigmoid", "gate_normalizer": GATE_NORMALIZER}
        self.recurrence = Recurrence(sizes, vllm_config, f"{prefix}.recurrence", **logits)
        self.conv1d = convolution(config, sizes, True, self.recurrence.prefix)
        self.g_norm = RMSNormGated(sizes.V, config.norm_eps, bool(config.elementwise_affine), config.hidden_act)
        self.o_proj = RowParallelLinear(sizes.queries * sizes.V * ranks, hidden, prefix=f"{prefix}.o_proj", **how)

    def forward(self, x: Tensor) -> Tensor:
        qkv, *gate = self.in_proj(x)[0].split(self.widths, dim=-1)
        q, k, v = self.sizes.heads(qkv if self.conv1d is None else self.conv1d(qkv))
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        o = self.recurrence(q, k, v, self.gates(x).unflatten(-1, k.shape[1:]))
        o = self.g_norm(o, *(y.unflatten(-1, o.shape[1:]) for y in gate))
        return self.o_proj(o.flatten(-2))[0]

    def gates(self, x: Tensor) -> Tensor:
        """Returns logits of the gates or, with `clamp_min`, float32 log gates, because the op has no clamp."""
        first, second = self.gk_proj
        logits = second(first(x)[0])[0]
        if self.clamp_min is None:
            return logits
        return (F.logsigmoid(logits.float()) / GATE_NORMALIZER).clamp(min=self.clamp_min)


class HGRN2Attention(nn.Module):
    """The layer of an HGRN2 model: [T, hidden_size] to [T, hidden_size].

    Args:
        config: the configuration of the model.
        vllm_config: vLLM's configuration.
        prefix: the name of the layer.

    Attributes:
        lower_bound: the lower bound of this rank's forget gates, float32; None if the model has none.
    """

    lower_bound: nn.Parameter | None

    def __init__(self, config: HGRN2Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        sizes, hidden = sizes_of_hgrn2(config, ranks), config.hidden_size
        self.sizes = sizes
        how: dict[str, Any] = {"quant_config": vllm_config.quant_config, "bias": False}
        self.in_proj = MergedColumnParallelLinear(
            hidden, [width * ranks for width in sizes.widths], prefix=f"{prefix}.in_proj", **how
        )
        self.recurrence = Recurrence(sizes, vllm_config, f"{prefix}.recurrence")
        self.conv1d = convolution(config, sizes, False, self.recurrence.prefix)
        # flash-linear-attention 0.6.0 ignores norm_eps here, and uses 1e-5.
        self.g_norm = RMSNormGated(hidden // ranks, 1e-5, bool(config.elementwise_affine))
        if ranks > 1:
            self.g_norm.mean_over_ranks = lambda mean: tensor_model_parallel_all_reduce(mean) / ranks
        if self.g_norm.weight is not None:
            set_weight_attrs(self.g_norm.weight, {"weight_loader": sharded_weight_loader(0)})
        self.o_proj = RowParallelLinear(hidden, hidden, prefix=f"{prefix}.o_proj", **how)
        bound = nn.Parameter(torch.zeros(sizes.widths[0], dtype=torch.float32), requires_grad=False)
        self.register_parameter("lower_bound", bound if config.use_lower_bound else None)
        if self.lower_bound is not None:
            set_weight_attrs(self.lower_bound, {"weight_loader": sharded_weight_loader(0)})

    def forward(self, x: Tensor) -> Tensor:
        qfv = self.in_proj(x)[0]
        q, f, v = self.sizes.heads(qfv if self.conv1d is None else self.conv1d(qfv))
        g = log_gate(f, None if self.lower_bound is None else self.lower_bound.view(f.shape[1:]))
        o = self.recurrence(F.silu(q), -g.expm1().to(v.dtype), v, g)
        return self.o_proj(self.g_norm(o.flatten(-2)))[0]
