"""The Mamba-2 layer of vLLM's Nemotron-H, Granite 4, Falcon-H1 and Zamba2 models, with its scan computed by gla_core.

A token's gate is one number for each head, and a group of heads shares its queries and keys. Projections, convolutions,
weights and tensor parallelism are those of vLLM's layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

import gla_core as gla
from gla_vllm.convolution import Filter, convolve
from gla_vllm.metadata import GLAMetadata
from gla_vllm.recurrence import Rows, Sizes, batch_of, invariance, recur, slots_of_decodes
from gla_vllm.replays import ReplacedLayer

OPTIONS: dict[str, Any] = {"scale": 1.0, "state_v_first": True}


class StateSpaceMixer(ReplacedLayer, MambaMixer2):
    """vLLM's `MambaMixer2`: the same arguments, weights and results.

    Raises:
        ValueError: ReplaySSM is asked for, whose states are of vLLM's kernels; or drafts are, for a model without
            softmax attention, whose accepted drafts vLLM does not count.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads = self.num_heads // self.tp_size
        groups = self.n_groups // self.tp_size
        self.take_place(Sizes(groups, groups, heads, self.ssm_state_size, self.head_dim, 1))
        if self.num_spec and not get_current_vllm_config().model_config.is_hybrid:
            raise ValueError("speculative_config is given; vLLM verifies drafts of models with softmax attention alone")

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
        rows, decoded = Rows(q, k, u, dt, output[:T].view(u.shape)), batch.num_decode_tokens
        if batch.num_accepted_tokens is None and batch.num_decodes:
            with invariance(batch):
                self._step(rows.part(0, decoded), batch)
            rows, batch = rows.part(decoded, T), replace(batch, num_decodes=0, num_decode_tokens=0)
            if not batch.num_prefills:
                return
        # softplus; PyTorch's own, on a CPU, has other bits at the end of a tensor
        dt = -F.logsigmoid(-rows.g.float() - self.dt_bias.float())
        v = (rows.v * dt[..., None]).to(output.dtype)
        recur(rows._replace(v=v, g=dt * self.A), self.kv_cache[1:], batch, OPTIONS)
        rows.out.copy_(rows.out.float() + self.D.float()[:, None] * rows.v)

    def _step(self, rows: Rows, batch: GLAMetadata) -> None:
        """Computes a token of each sequence in one op."""
        parameters = {"A": self.A, "dt_bias": self.dt_bias, "D": self.D, "dt_softplus": True}
        slots = slots_of_decodes(batch)
        o = gla.recurrent_ssd_step(
            rows.q, rows.k, rows.v, self.kv_cache[1], rows.g, **parameters, slots=slots, **OPTIONS
        )
        rows.out.copy_(o)
