"""The lightning layer of vLLM's Ling and Ring 2.5 models, computed by gla_core: a constant decay for each head.

Projections, weights and tensor parallelism are those of vLLM's layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from gla_core.extension import RMSNormGated
from gla_vllm.layers import announce
from gla_vllm.metadata import GLABackend
from gla_vllm.recurrence import Rows, batch_of, recur, with_checkpoints


class LightningAttention(BailingMoELinearAttention):
    """vLLM's `BailingMoELinearAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        announce(type(self))
        width = self.hidden_inner_size // self.tp_size
        self.g_norm = RMSNormGated(
            width, self.rms_norm_eps, gate_fn="sigmoid", groups=max(self.group_norm_size // self.tp_size, 1)
        )
        assert self.g_norm.weight is not None
        set_weight_attrs(self.g_norm.weight, {"weight_loader": sharded_weight_loader(0)})
        self.decay = -self.tp_slope.flatten()

    def get_attn_backend(self) -> type[AttentionBackend]:
        return GLABackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec | None:
        return with_checkpoints(super().get_kv_cache_spec(vllm_config))

    def _forward(self, hidden_states: Tensor, output: Tensor, positions: Tensor) -> None:
        """Computes the layer's output for x [T, hidden_size] into `output`; vLLM's op for this layer calls it."""
        q, k, v = self._heads(hidden_states, positions)
        o, batch = torch.empty_like(v), batch_of(self.prefix)
        if batch is None:
            o.zero_()
        else:
            recur(Rows(q, k, v, self.decay, o), self.kv_cache, batch, {"scale": self.scaling})
        y = self.g_norm(o.flatten(1), self.g_proj(hidden_states)[0])
        output.copy_(self.dense(y)[0])

    def _heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v [T, H, D], with x's dtype. The rotary embedding is computed in float32."""
        qkv = self.query_key_value(x)[0].float()
        if self.linear_silu:
            qkv = F.silu(qkv)
        q, k, v = qkv.unflatten(-1, (3, self.tp_heads, self.head_dim)).unbind(1)
        if self.use_qk_norm:
            q = F.rms_norm(q, (self.head_dim,), self.query_layernorm.weight.float(), self.rms_norm_eps)
            k = F.rms_norm(k, (self.head_dim,), self.key_layernorm.weight.float(), self.rms_norm_eps)
        if self.linear_rope:
            q, k = (y.view(v.shape) for y in self.rotary_emb(positions, q.flatten(1), k.flatten(1)))
        return q.to(x.dtype), k.to(x.dtype), v.to(x.dtype)
