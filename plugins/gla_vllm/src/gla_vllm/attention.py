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
from gla_vllm.recurrence import Recurrence

GATE_RANK = 16
"""Rank of the projection that makes the forget gates; no configuration changes it."""
GATE_NORMALIZER = 16
"""Divides the log of the forget gates; no configuration changes it."""


def sizes_of_gla(config: GLAConfig, ranks: int) -> tuple[int, int, int, int]:
    """Returns Hq, H, K and V of a rank's part of a layer.

    Raises:
        ValueError: the heads cannot be spread evenly over the ranks, or have no whole width.
    """
    heads = config.num_heads
    kv_heads = heads if config.num_kv_heads is None else config.num_kv_heads
    _check_heads("num_kv_heads" if kv_heads != heads else "num_heads", kv_heads, ranks)
    K = head_width("expand_k", config.expand_k, config.hidden_size, heads)
    V = head_width("expand_v", config.expand_v, config.hidden_size, heads)
    return heads // ranks, kv_heads // ranks, K, V


def sizes_of_hgrn2(config: HGRN2Config, ranks: int) -> tuple[int, int, int]:
    """Returns H, K and V of a rank's part of a layer.

    Raises:
        ValueError: the heads cannot be spread evenly over the ranks.
    """
    heads = config.hidden_size // config.expand_ratio
    _check_heads("num_heads", heads, ranks)
    return heads // ranks, config.expand_ratio, config.hidden_size // heads


def _check_heads(name: str, heads: int, ranks: int) -> None:
    if heads % ranks != 0:
        raise ValueError(f"{name} is {heads}; expected a multiple of the {ranks} ranks of tensor parallelism")


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
        self.heads, self.kv_heads, self.K, self.V = sizes_of_gla(config, ranks)
        widths = [self.heads * self.K, self.kv_heads * self.K, self.kv_heads * self.V]
        widths += [self.heads * self.V] if config.use_output_gate else []
        self.widths, hidden = widths, config.hidden_size
        self.feature_map = None if config.feature_map is None else activation("feature_map", config.feature_map)
        self.clamp_min = config.clamp_min

        how: dict[str, Any] = {"quant_config": vllm_config.quant_config, "bias": False}
        self.in_proj = MergedColumnParallelLinear(
            hidden, [width * ranks for width in widths], prefix=f"{prefix}.in_proj", **how
        )
        self.gk_proj = nn.ModuleList(
            [
                ReplicatedLinear(hidden, GATE_RANK, prefix=f"{prefix}.gk_proj.0", **how),
                ColumnParallelLinear(
                    GATE_RANK, widths[1] * ranks, prefix=f"{prefix}.gk_proj.1", **how | {"bias": True}
                ),
            ]
        )
        self.recurrence = Recurrence(
            (self.kv_heads, self.K, self.V),
            vllm_config,
            f"{prefix}.recurrence",
            gate_normalizer=GATE_NORMALIZER if self.clamp_min is None else None,
        )
        self.g_norm = RMSNormGated(self.V, config.norm_eps, bool(config.elementwise_affine), config.hidden_act)
        self.o_proj = RowParallelLinear(self.heads * self.V * ranks, hidden, prefix=f"{prefix}.o_proj", **how)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, *gate = self.in_proj(x)[0].split(self.widths, dim=-1)
        q, k = q.unflatten(-1, (self.heads, self.K)), k.unflatten(-1, (self.kv_heads, self.K))
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        g = self.gates(x).unflatten(-1, (self.kv_heads, self.K))
        o = self.recurrence(q, k, v.unflatten(-1, (self.kv_heads, self.V)), g)
        o = self.g_norm(o, *(y.unflatten(-1, (self.heads, self.V)) for y in gate))
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
        self.heads, self.K, self.V = sizes_of_hgrn2(config, ranks)
        self.widths, hidden = [self.heads * self.K, self.heads * self.K, self.heads * self.V], config.hidden_size
        how: dict[str, Any] = {"quant_config": vllm_config.quant_config, "bias": False}
        self.in_proj = MergedColumnParallelLinear(
            hidden, [width * ranks for width in self.widths], prefix=f"{prefix}.in_proj", **how
        )
        self.recurrence = Recurrence((self.heads, self.K, self.V), vllm_config, f"{prefix}.recurrence")
        # flash-linear-attention 0.6.0 ignores norm_eps here, and uses 1e-5.
        self.g_norm = RMSNormGated(hidden // ranks, 1e-5, bool(config.elementwise_affine))
        if ranks > 1:
            self.g_norm.mean_over_ranks = lambda mean: tensor_model_parallel_all_reduce(mean) / ranks
        if self.g_norm.weight is not None:
            set_weight_attrs(self.g_norm.weight, {"weight_loader": sharded_weight_loader(0)})
        self.o_proj = RowParallelLinear(hidden, hidden, prefix=f"{prefix}.o_proj", **how)
        bound = nn.Parameter(torch.zeros(self.widths[0], dtype=torch.float32), requires_grad=False)
        self.register_parameter("lower_bound", bound if config.use_lower_bound else None)
        if self.lower_bound is not None:
            set_weight_attrs(self.lower_bound, {"weight_loader": sharded_weight_loader(0)})

    def forward(self, x: Tensor) -> Tensor:
        q, f, v = self.in_proj(x)[0].split(self.widths, dim=-1)
        g = log_gate(f, self.lower_bound)
        q, k, g = (y.unflatten(-1, (self.heads, self.K)) for y in (F.silu(q), -g.expm1().to(v.dtype), g))
        o = self.recurrence(q, k, v.unflatten(-1, (self.heads, self.V)), g)
        return self.o_proj(self.g_norm(o.flatten(-2)))[0]
