"""The recurrence of gated linear attention over a batch of vLLM, from and into states that vLLM allocates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.kv_cache_interface import KVCacheSpec

import gla_core as gla
from gla_vllm.metadata import CHECKPOINTS, GLABackend, GLAMetadata


class Recurrence(nn.Module, MambaBase):
    """Gated linear attention over the tokens of a batch, with a state of each sequence.

    Args:
        shape: the sizes Hv, K and V of the state of a sequence on this rank.
        vllm_config: vLLM's configuration.
        prefix: the name of the layer, unique in the model.
        scale: factor of the output; None means K^-1/2.
        gate_normalizer: None if the gates are log gates; if they are logits, the number that divides their log sigma.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(
        self,
        shape: tuple[int, int, int],
        vllm_config: VllmConfig,
        prefix: str,
        scale: float | None = None,
        gate_normalizer: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.prefix = shape, state_dtype(vllm_config), prefix
        self.options: dict[str, Any] = {"scale": scale}
        if gate_normalizer is not None:
            self.options |= {"gate": "logsigmoid", "gate_normalizer": gate_normalizer}
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"there are two layers of the name {prefix}; expected names to be unique")
        layers[prefix] = self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        """Maps q [T, Hq, K], k [T, H, K], v [T, Hv, V] and g, in a form of `chunk_gla`, to o [T, Ho, V]."""
        o = v.new_empty(v.shape[0], max(q.shape[1], v.shape[1]), v.shape[2])
        torch.ops.vllm.gla_recurrence(q, k, v, g, o, self.prefix)
        return o

    def get_state_shape(self) -> tuple[tuple[int, int, int]]:
        return (self.shape,)

    def get_state_dtype(self) -> tuple[torch.dtype]:
        return (self.dtype,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return GLABackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return with_checkpoints(super().get_kv_cache_spec(vllm_config))


def state_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """Returns the dtype of the states: that of --mamba-ssm-cache-dtype, float32 if it is "auto"."""
    name = vllm_config.cache_config.mamba_ssm_cache_dtype
    return torch.float32 if name == "auto" else getattr(torch, name)


def with_checkpoints(spec: Any) -> Any:
    """Returns the specification of a layer's states, saying that prefills can keep a state from inside.

    Under batch invariance they cannot: vLLM then cuts every prompt at its last block, whatever else is in the batch.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return spec
    return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINTS)


def recur(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, out: Tensor, pool: Tensor, batch: GLAMetadata, **options: Any
) -> None:
    """Computes a batch: decodes are its first rows, then come prefills, then padding, whose output is 0.

    Args:
        q, k, v, g: [T, ..], or g [Hv].
        out: [T, Ho, V]; written.
        pool: the states [P, Hv, K, V]; written.
        batch: which rows belong to which sequence, and where its states are.
        options: scale, gate, gate_normalizer and state_v_first, as in `chunk_gla_pool`.
    """
    rows, decoded = Rows(q, k, v, g, out), batch.num_decode_tokens
    computed = decoded + batch.num_prefill_tokens
    with nullcontext() if batch.segment is None else gla.batch_invariant(batch.segment):
        if batch.num_decodes:
            _decode(rows.part(0, decoded), pool, batch, options)
        if batch.num_prefills:
            prefill(rows.part(decoded, computed), pool, batch, options)
    out[computed:] = 0


class Rows(NamedTuple):
    """Tokens [T, ..] and their output [T, Ho, V]; a constant gate g is [Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    out: Tensor

    def part(self, begin: int, end: int) -> Rows:
        """Returns the rows from begin to end, as views."""
        return self._each(lambda x: x[begin:end])

    def packed(self) -> Rows:
        """Returns the tokens as a batch of one row, [1, T, ..]."""
        return self._each(lambda x: x[None])

    def single(self) -> Rows:
        """Returns the tokens as a batch of rows of one token, [T, 1, ..]."""
        return self._each(lambda x: x[:, None])

    def _each(self, function: Callable[[Tensor], Tensor]) -> Rows:
        g = self.g if self.g.ndim == 1 else function(self.g)
        return Rows(function(self.q), function(self.k), function(self.v), g, function(self.out))


def _decode(rows: Rows, pool: Tensor, batch: GLAMetadata, options: dict[str, Any]) -> None:
    slots = batch.state_indices_tensor_d
    assert slots is not None
    if batch.num_accepted_tokens is None and pool.dtype != torch.float16:  # the quicker op takes no float16
        q, k, v, g, out = rows
        o, _ = gla.recurrent_gla_step(q, k, v, g, pool, slots=slots_of_decodes(batch), inplace=True, **options)
        out.copy_(o)
        return
    q, k, v, g, out = rows.single() if batch.query_start_loc_d is None else rows.packed()
    drafts: Any = {"cu_seqlens": batch.query_start_loc_d, "num_accepted": batch.num_accepted_tokens}
    gla.recurrent_gla_steps(q, k, v, g, pool, slots, pad_slot=NULL_BLOCK_ID, out=out, **drafts, **options)


def slots_of_decodes(batch: GLAMetadata) -> Tensor:
    """Returns the slots of decodes of one token [num_decodes]; -1 for padding of a CUDA graph."""
    slots = batch.state_indices_tensor_d
    assert slots is not None
    return slots[:, 0].masked_fill(slots[:, 0] == NULL_BLOCK_ID, -1)


def prefill(rows: Rows, pool: Tensor, batch: GLAMetadata, options: dict[str, Any]) -> None:
    """Computes the prefills of a batch, `rows`; `options` are those of `recur`."""
    offsets, slots, kept = batch.query_start_loc_p, batch.state_indices_tensor_p, batch.checkpoint
    assert offsets is not None
    assert slots is not None
    q, k, v, g, out = rows.packed()
    states: Any = {"has_state": batch.has_initial_states_p, "pad_slot": NULL_BLOCK_ID}
    if kept is not None:
        states |= {"snapshot_offsets": kept.checkpoint_offsets, "snapshot_slots": kept.state_indices}
    gla.chunk_gla_pool(q, k, v, g, pool, offsets, slots, out=out, **states, **options)


def batch_of(layer: str) -> Any:
    """Returns the `GLAMetadata` of a layer; None while vLLM measures memory, when there are no states yet."""
    batches: Any = get_forward_context().attn_metadata
    return None if batches is None else batches.get(layer)


def _gla_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, out: Tensor, layer: str) -> None:
    batch = batch_of(layer)
    if batch is None:
        out.zero_()
        return
    this = get_forward_context().no_compile_layers[layer]
    recur(q, k, v, g, out, this.kv_cache[0], batch, **this.options)


def _no_computation(q: Tensor, k: Tensor, v: Tensor, g: Tensor, out: Tensor, layer: str) -> None:
    return


direct_register_custom_op(
    op_name="gla_recurrence", op_func=_gla_recurrence, mutates_args=["out"], fake_impl=_no_computation
)
