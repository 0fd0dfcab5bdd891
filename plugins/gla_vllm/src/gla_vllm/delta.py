"""The layers of gated delta networks and of Kimi delta attention, with heads spread over the ranks as in `attention`.

The mathematics is that of `gla_core.nn.GatedDeltaNet` and `gla_core.nn.KimiDeltaAttention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from gla_core.extension import RMSNormGated
from gla_vllm.attention import check_heads, convolution
from gla_vllm.configuration import GatedDeltaNetConfig, KDAConfig
from gla_vllm.recurrence import Recurrence, Sizes

EPS_OF_UNIT_VECTORS = 1e-6
"""Added to the square of the length of a query or key; no configuration changes it."""


def sizes_of_delta_rule(config: GatedDeltaNetConfig | KDAConfig, ranks: int) -> Sizes:
    """Returns the sizes of a rank's part of a layer.

    Raises:
        ValueError: the heads cannot be spread evenly over the ranks.
    """
    heads, values = config.num_heads, config.num_v_heads or config.num_heads
    check_heads("num_heads", heads, ranks)
    check_heads("num_v_heads", values, ranks)
    K, V = config.head_dim, int(config.head_dim * config.expand_v)
    return Sizes(heads // ranks, heads // ranks, values // ranks, K, V, K if config.model_type == "kda" else 1)


class GatedDeltaNetAttention(nn.Module):
    """The layer of a gated delta network: [T, hidden_size] to [T, hidden_size].

    Args:
        config: the configuration of the model.
        vllm_config: vLLM's configuration.
        prefix: the name of the layer.
    """

    def __init__(self, config: GatedDeltaNetConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        sizes = self.sizes = sizes_of_delta_rule(config, ranks)
        others = [sizes.values, sizes.values, *([sizes.values * sizes.V] if config.use_gate else [])]
        self.widths, how = [sum(sizes.widths), *others], _options(vllm_config)
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, [width * ranks for width in (*sizes.widths, *others)], prefix=f"{prefix}.in_proj", **how
        )
        self.A_log, self.dt_bias = _gate_parameter(sizes.values), _gate_parameter(sizes.values)
        self.recurrence = _recurrence(config, vllm_config, prefix, sizes, ("softplus", self.A_log, self.dt_bias))
        self.conv1d = convolution(config, sizes, True, self.recurrence.prefix)
        self.o_norm = RMSNormGated(sizes.V, config.norm_eps, gate_fn=config.output_gate_activation)
        self.o_proj = RowParallelLinear(
            sizes.values * sizes.V * ranks, config.hidden_size, prefix=f"{prefix}.o_proj", **how
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv, g, beta, *gate = self.in_proj(x)[0].split(self.widths, dim=-1)
        qkv = F.silu(qkv) if self.conv1d is None else self.conv1d(qkv)
        o = self.recurrence(*self.sizes.heads(qkv), g, beta)
        o = self.o_norm(o, *(y.unflatten(-1, o.shape[1:]) for y in gate))
        return self.o_proj(o.flatten(-2))[0]


class KimiDeltaAttention(nn.Module):
    """The layer of Kimi delta attention: [T, hidden_size] to [T, hidden_size].

    The arguments are those of `GatedDeltaNetAttention`.
    """

    def __init__(self, config: KDAConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        sizes = self.sizes = sizes_of_delta_rule(config, ranks)
        how, hidden, value_width = _options(vllm_config), config.hidden_size, sizes.values * sizes.V * ranks
        self.widths = [sum(sizes.widths), sizes.values]
        self.in_proj = MergedColumnParallelLinear(
            hidden, [width * ranks for width in (*sizes.widths, sizes.values)], prefix=f"{prefix}.in_proj", **how
        )
        self.f_proj = _low_rank(hidden, sizes.V, sizes.values * sizes.K * ranks, False, f"{prefix}.f_proj", how)
        self.g_proj = _low_rank(hidden, sizes.V, value_width, True, f"{prefix}.g_proj", how)
        self.A_log, self.dt_bias = _gate_parameter(sizes.values), _gate_parameter(sizes.values * sizes.K)
        parameters = self.A_log, self.dt_bias.view(sizes.values, sizes.K)
        bound = config.lower_bound
        gate = ("softplus", *parameters) if bound is None else ("bounded", *parameters, bound)
        self.recurrence = _recurrence(config, vllm_config, prefix, sizes, gate)
        self.conv1d = convolution(config, sizes, True, self.recurrence.prefix)
        self.o_norm = RMSNormGated(sizes.V, config.norm_eps, gate_fn="sigmoid")
        self.o_proj = RowParallelLinear(value_width, hidden, prefix=f"{prefix}.o_proj", **how)

    def forward(self, x: Tensor) -> Tensor:
        qkv, beta = self.in_proj(x)[0].split(self.widths, dim=-1)
        qkv = F.silu(qkv) if self.conv1d is None else self.conv1d(qkv)
        g, gate = (second(first(x)[0])[0] for first, second in (self.f_proj, self.g_proj))
        o = self.recurrence(*self.sizes.heads(qkv), g.unflatten(-1, (self.sizes.values, self.sizes.K)), beta)
        return self.o_proj(self.o_norm(o, gate.unflatten(-1, o.shape[1:])).flatten(-2))[0]


def _options(vllm_config: VllmConfig) -> dict[str, Any]:
    return {"quant_config": vllm_config.quant_config, "bias": False}


def _low_rank(hidden: int, rank: int, width: int, bias: bool, prefix: str, how: dict[str, Any]) -> nn.ModuleList:
    """Returns the two halves of a projection of low rank; its width is that of all ranks together."""
    first = ReplicatedLinear(hidden, rank, prefix=f"{prefix}.0", **how)
    return nn.ModuleList([first, ColumnParallelLinear(rank, width, prefix=f"{prefix}.1", **how | {"bias": bias})])


def _gate_parameter(size: int) -> nn.Parameter:
    """Returns a parameter of the gates with this rank's numbers."""
    parameter = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
    return parameter


def _recurrence(
    config: GatedDeltaNetConfig | KDAConfig, vllm_config: VllmConfig, prefix: str, sizes: Sizes, gate: tuple[Any, ...]
) -> Recurrence:
    limit = 2.0 if config.allow_neg_eigval else 1.0
    options: dict[str, Any] = {"normalize": EPS_OF_UNIT_VECTORS, "gate": gate, "beta_limit": limit}
    return Recurrence(sizes, vllm_config, f"{prefix}.recurrence", **options)
