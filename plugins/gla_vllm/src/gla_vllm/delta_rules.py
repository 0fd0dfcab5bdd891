"""The layers with a delta rule of vLLM's own models, computed by gla_core.

Projections, weights and tensor parallelism are those of vLLM's layers, and so are the shapes of the states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from gla_core.extension import RMSNormGated
from gla_vllm.delta import EPS_OF_UNIT_VECTORS
from gla_vllm.recurrence import Sizes
from gla_vllm.replays import ReplacedLayer


class Served(ReplacedLayer):
    """The parts that the replaced layers share: all between their projections and their norm.

    Attributes:
        options: what the ops compute of the projections, as in `recurrence.recur`.
    """

    histories = 1
    options: dict[str, Any]
    prefix: str
    conv1d: Any

    def serve(self, sizes: Sizes, gate: tuple[Any, ...], beta_limit: float = 1.0) -> None:
        """Keeps what the ops need, for logits of gates and of betas."""
        self.take_place(sizes)
        self.options = {"normalize": EPS_OF_UNIT_VECTORS, "gate": gate, "beta_limit": beta_limit, "state_v_first": True}

    def filters(self) -> Tensor:
        """Returns the filters of the convolutions of q, k and v, joined [D, W]."""
        return self.conv1d.weight.squeeze(1)

    def recurrence(self, qkv: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Maps joined projections [T, D], logits of gates, and those of betas [T, Hv] to o [T, Hv, V]."""
        convolved = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        torch.ops.vllm.gla_convolution(qkv, self.filters(), convolved, True, self.prefix)
        q, k, v = self.sizes.heads(convolved)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        torch.ops.vllm.gla_recurrence(q, k, v, g, beta, o, self.prefix)
        return o


def invariant_norm(norm: Any) -> Any:
    """Returns a gated norm of vLLM or, under batch invariance, gla_core's in its place.

    vLLM's kernel computes one to four rows in a block, depending on the batch.
    """
    if not envs.VLLM_BATCH_INVARIANT:
        return norm
    return RMSNormGated(len(norm.weight), norm.eps, gate_fn=norm.activation, dtype=norm.weight.dtype)


class QwenLayer(Served, QwenGatedDeltaNetAttention):
    """vLLM's `QwenGatedDeltaNetAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve(sizes_of(self), ("softplus", self.A_log, self.dt_bias))
        self.norm = invariant_norm(self.norm)

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


class OlmoLayer(Served, OlmoHybridGatedDeltaNetAttention):
    """vLLM's `OlmoHybridGatedDeltaNetAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limit = 2.0 if self.allow_neg_eigval else 1.0
        self.serve(sizes_of(self), ("softplus", self.A_log, self.dt_bias), limit)
        self.o_norm = invariant_norm(self.o_norm)
        load = self.conv1d.weight.weight_loader  # it expects the part as an argument, which vLLM does not pass
        self.conv1d.weight.weight_loader = lambda weight, loaded: load(weight, loaded, loaded.shard_id)

    def forward(self, hidden_states: Tensor, output: Tensor) -> None:
        qkv, z = self.in_proj_qkvg(hidden_states)[0].split([sum(self.sizes.widths), self.sizes.widths[2]], dim=-1)
        o = self.recurrence(qkv, self.a_proj(hidden_states)[0], self.b_proj(hidden_states)[0])
        output.copy_(self.o_proj(self.o_norm(o, z.reshape(o.shape)).flatten(1))[0])


def sizes_of(layer: QwenGatedDeltaNetAttention | OlmoHybridGatedDeltaNetAttention) -> Sizes:
    """Returns the sizes of a layer of a gated delta network on this rank."""
    keys, values = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
    return Sizes(keys, keys, values, layer.head_k_dim, layer.head_v_dim, 1)
