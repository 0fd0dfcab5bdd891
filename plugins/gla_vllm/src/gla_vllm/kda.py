"""The layers with Kimi delta attention of vLLM's own models, computed by gla_core; see `delta_rules`.

Their norms are gla_core's, because vLLM's are kernels for GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from gla_core.extension import RMSNormGated
from gla_vllm.delta_rules import Served
from gla_vllm.recurrence import Sizes


class ServedKDA(Served):
    """The parts that the replaced layers with Kimi delta attention share; the names are those of vLLM's layers."""

    def serve_heads(self, bound: float | None) -> None:
        """Keeps what the ops need, for gates above e^bound."""
        layer: Any = self
        heads, width = layer.local_num_heads, layer.head_dim
        parameters = layer.A_log.view(heads), layer.dt_bias.view(heads, width)
        gate = ("softplus", *parameters) if bound is None else ("bounded", *parameters, bound)
        self.serve(Sizes(heads, heads, heads, width, width, width), gate)
        layer.o_norm = RMSNormGated(width, layer.o_norm.eps, gate_fn="sigmoid")

    def attend(self, qkv: Tensor, g: Tensor, beta: Tensor, gate: Tensor) -> Tensor:
        """Maps projections [T, D], logits of gates [T, H K] and of betas [T, H] to [T, hidden_size]."""
        layer: Any = self
        o = self.recurrence(qkv, g.unflatten(-1, (-1, layer.head_dim)), beta)
        return layer.o_proj(layer.o_norm(o, gate.reshape(o.shape)).flatten(1))[0]

    def attend_full_rank(self, x: Tensor) -> Tensor:
        """Computes a layer of Kimi whose output gate is a projection of full rank."""
        layer: Any = self
        P, H = layer.local_projection_size, layer.local_num_heads
        widths = [3 * P, P, layer.head_dim, H, layer.in_proj_padding]
        qkv, gate, low, beta, _ = layer.in_proj_qkvgfab(x)[0].split(widths, dim=-1)
        return self.attend(qkv, layer.f_b_proj(low)[0], beta, gate)


def joined_filters(layer: Any) -> Tensor:
    """Returns the filters [D, W] of a layer that has a convolution for each of q, k and v."""
    return torch.cat([each.weight.squeeze(1) for each in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)])


class KimiLayer(ServedKDA, KimiGatedDeltaNetAttention):
    """vLLM's `KimiGatedDeltaNetAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve_heads(self.gate_lower_bound)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        if self.use_full_rank_gate:
            return self.attend_full_rank(hidden_states)
        x = self.in_proj_qkvgfab(hidden_states)[0]
        qkv, beta, low = x.split([3 * self.local_projection_size, self.local_num_heads, self.head_dim], dim=-1)
        gate = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0]
        return self.attend(qkv, self.f_b_proj(low)[0], beta, gate)


class LingLayer(ServedKDA, BailingMoeV3KimiDeltaAttention):
    """vLLM's `BailingMoeV3KimiDeltaAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve_heads(self.lower_bound if self.safe_gate else None)

    def filters(self) -> Tensor:
        return joined_filters(self)

    def forward(self, hidden_states: Tensor, positions: Tensor, output: Tensor) -> None:
        joined = self.qkv_proj if self.separate_b_proj else self.qkvb_proj
        assert joined is not None
        qkv, *beta = joined(hidden_states)[0].split(
            [3 * self.projection_size_per_partition, *([] if self.separate_b_proj else [self.local_num_heads])], dim=-1
        )
        if self.b_proj is not None:
            beta = [self.b_proj(hidden_states)[0]]
        g, gate = self.f_proj(hidden_states)[0], self.g_proj(hidden_states)[0]
        output.copy_(self.attend(qkv, g, beta[0], gate))
