"""The Mamba-2 layer of vLLM's Nemotron-H, Granite 4, Falcon-H1 and Zamba2 models, with its scan computed by gla_core.

A token's gate is one number for each head, and a group of heads shares its queries and keys. Projections, convolutions,
weights and tensor parallelism are those of vLLM's layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

import gla_core as gla
from gla_vllm.convolution import Filter, convolve
from gla_vllm.layers import announce
from gla_vllm.metadata import ConvolvedGLABackend
from gla_vllm.recurrence import Rows, batch_of, prefill, slots_of_decodes, with_checkpoints


class StateSpaceMixer(MambaMixer2):
    """vLLM's `MambaMixer2`: the same arguments, weights and results.

    Raises:
        ValueError: ReplaySSM, drafts or batch invariance are asked for. ReplaySSM's states are of vLLM's kernels, and
            the step of a Mamba-2 layer is computed for one token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        announce("MambaMixer2")
        sizes = {
            "use_replayssm": self.use_replayssm,
            "speculative_config": self.num_spec > 0,
            "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        }
        for name, is_given in sizes.items():
            if is_given:
                raise ValueError(f"{name} is given and GLA_VLLM_LAYERS has mamba2; expected one of them")

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ConvolvedGLABackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec | None:
        return with_checkpoints(MambaBase.get_kv_cache_spec(self, vllm_config))

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """Computes the convolution and the scan of [T, ..] into `output`; vLLM's op for this layer calls it."""
        batch = batch_of(self.prefix)
        if batch is None:
            output.zero_()
            return
        T = batch.num_decode_tokens + batch.num_prefill_tokens
        joined, dt = projected_states[:T, self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        filters = Filter(self.conv_weights, self.conv1d.bias, self.activation in ("silu", "swish"))
        convolved = torch.empty_like(joined)
        convolve(joined, filters, self.kv_cache[0], batch, convolved)
        u, k, q = self.split_hidden_states_B_C_fn(convolved)
        u = u.unflatten(-1, (-1, self.head_dim))
        q, k = (y.unflatten(-1, (-1, self.ssm_state_size)) for y in (q, k))
        o, pool, decoded = output[:T].view(u.shape), self.kv_cache[1], batch.num_decode_tokens
        options: dict[str, Any] = {"scale": 1.0, "state_v_first": True}
        if batch.num_decodes:
            q1, k1, u1, dt1 = (y[:decoded] for y in (q, k, u, dt))
            parameters = {"A": self.A, "dt_bias": self.dt_bias, "D": self.D, "dt_softplus": True}
            o1 = gla.recurrent_ssd_step(q1, k1, u1, pool, dt1, **parameters, slots=slots_of_decodes(batch), **options)
            o[:decoded] = o1
        if batch.num_prefills:
            rows = Rows(q, k, u, dt, o).part(decoded, T)
            dt = F.softplus(rows.g.float() + self.dt_bias.float())
            v = (rows.v * dt[..., None]).to(output.dtype)
            prefill(rows._replace(v=v, g=dt * self.A), [pool], batch, options)
            rows.out.copy_(rows.out.float() + self.D.float()[:, None] * rows.v)
