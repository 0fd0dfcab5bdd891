"""The layers with a delta rule of vLLM's Qwen3-Next, Qwen3.5 and Kimi-Linear models, computed by gla_core.

Projections, weights and tensor parallelism are those of vLLM's layers, and so are the shapes of the states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from gla_core.extension import RMSNormGated
from gla_vllm.delta import EPS_OF_UNIT_VECTORS
from gla_vllm.layers import announce
from gla_vllm.metadata import ConvolvedGLABackend
from gla_vllm.recurrence import Sizes, with_checkpoints


class ServedBackend(ConvolvedGLABackend):
    """Tells vLLM how batches of the replaced layers are described. Their batch invariance has not been tested."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False


class Served(MambaBase):
    """The parts that the replaced layers share: their states, and all between their projections and their norm.

    Attributes:
        sizes: the sizes of the layer on this rank.
        options: what the ops compute of the projections, as in `recurrence.recur`.
    """

    histories = 1
    sizes: Sizes
    options: dict[str, Any]
    prefix: str
    conv1d: Any

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ServedBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec | None:
        return with_checkpoints(super().get_kv_cache_spec(vllm_config))

    def serve(self, sizes: Sizes, gate: tuple[Any, ...], theirs: str) -> None:
        """Keeps what the ops need, and announces that the layer is replaced."""
        announce(theirs)
        self.sizes = sizes
        self.options = {"normalize": EPS_OF_UNIT_VECTORS, "gate": gate, "beta_limit": 1.0, "state_v_first": True}

    def recurrence(self, qkv: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Maps joined projections [T, D], logits of gates, and those of betas [T, Hv] to o [T, Hv, V]."""
        convolved = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        torch.ops.vllm.gla_convolution(qkv, self.conv1d.weight.squeeze(1), convolved, True, self.prefix)
        q, k, v = self.sizes.heads(convolved)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        torch.ops.vllm.gla_recurrence(q, k, v, g, beta, o, self.prefix)
        return o


class QwenLayer(Served, QwenGatedDeltaNetAttention):
    """vLLM's `QwenGatedDeltaNetAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keys, values = self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size
        sizes = Sizes(keys, keys, values, self.head_k_dim, self.head_v_dim, 1)
        self.serve(sizes, ("softplus", self.A_log, self.dt_bias), "QwenGatedDeltaNetAttention")

    def forward(self, hidden_states: Tensor) -> Tensor:
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if self.gqa_interleaved_layout:
            q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        else:
            qkv, z = qkvz.split([sum(self.sizes.widths), self.sizes.widths[2]], dim=-1)
            b, a = self.split_ba(ba)
        o = self.recurrence(qkv, a, b)
        return self.out_proj(self.norm(o, z.reshape(o.shape)).flatten(1))[0]


class KimiLayer(Served, KimiGatedDeltaNetAttention):
    """vLLM's `KimiGatedDeltaNetAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads, bound = self.local_num_heads, self.gate_lower_bound
        parameters = self.A_log, self.dt_bias.view(heads, self.head_dim)
        gate = ("softplus", *parameters) if bound is None else ("bounded", *parameters, bound)
        self.serve(Sizes(heads, heads, heads, *[self.head_dim] * 3), gate, "KimiGatedDeltaNetAttention")
        self.o_norm = RMSNormGated(self.head_dim, self.o_norm.eps, gate_fn="sigmoid")  # vLLM's is a kernel for GPUs

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        P, H = self.local_projection_size, self.local_num_heads
        x, padding = self.in_proj_qkvgfab(hidden_states)[0], self.in_proj_padding
        if self.use_full_rank_gate:
            qkv, gate, low, beta, _ = x.split([3 * P, P, self.head_dim, H, padding], dim=-1)
        else:
            qkv, beta, low = x.split([3 * P, H, self.head_dim], dim=-1)
            gate = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0]
        o = self.recurrence(qkv, self.f_b_proj(low)[0].unflatten(-1, (H, self.head_dim)), beta)
        return self.o_proj(self.o_norm(o, gate.unflatten(-1, (H, self.head_dim))).flatten(1))[0]
