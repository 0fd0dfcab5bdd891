"""The recurrences of gated linear attention and of delta rules over a batch of vLLM, in states that vLLM allocates."""

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
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.kv_cache_interface import KVCacheSpec

import gla_core as gla
from gla_vllm.metadata import CHECKPOINTS, ConvolvedGLABackend, GLABackend, GLAMetadata


class Recurrence(nn.Module, MambaBase):
    """Gated linear attention or a delta rule over the tokens of a batch, with a state of each sequence.

    Args:
        sizes: the sizes of the layer on this rank.
        vllm_config: vLLM's configuration.
        prefix: the name of the layer, unique in the model.
        options: what the ops compute of the projections, as in `recur`.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(
        self,
        sizes: Sizes,
        vllm_config: VllmConfig,
        prefix: str,
        **options: Any,
    ) -> None:
        super().__init__()
        self.shapes, self.dtypes = state_shapes(vllm_config, sizes), state_dtypes(vllm_config)
        self.options, self.prefix = options, prefix
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"there are two layers of the name {prefix}; expected names to be unique")
        layers[prefix] = self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
        """Maps q [T, Hq, K], k [T, H, K], v [T, Hv, V] and g, in a form of `chunk_gla`, to o [T, Ho, V].

        With beta [T, Hv] the recurrence is that of `chunk_delta`.
        """
        o = v.new_empty(v.shape[0], max(q.shape[1], v.shape[1]), v.shape[2])
        torch.ops.vllm.gla_recurrence(q, k, v, g, beta, o, self.prefix)
        return o

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    def get_attn_backend(self) -> type[AttentionBackend]:
        return GLABackend if len(self.shapes) == 1 else ConvolvedGLABackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return with_checkpoints(super().get_kv_cache_spec(vllm_config))


class Sizes(NamedTuple):
    """The sizes of a rank's part of a layer: its query, key and value heads, and the widths of a key and a value."""

    queries: int
    keys: int
    values: int
    K: int
    V: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """The widths of the projections that become q, k and v."""
        return self.queries * self.K, self.keys * self.K, self.values * self.V

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the three parts of joined projections [T, D], each as [T, heads, width]."""
        q, k, v = x.split(self.widths, dim=-1)
        return (
            q.unflatten(-1, (self.queries, self.K)),
            k.unflatten(-1, (self.keys, self.K)),
            v.unflatten(-1, (self.values, self.V)),
        )


def state_shapes(vllm_config: VllmConfig, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the states of a sequence: the histories of its convolutions, if any, and [Hv, K, V]."""
    config: Any = vllm_config.model_config.hf_config
    state = (sizes.values, sizes.K, sizes.V)
    if not config.use_short_conv:
        return (state,)
    drafts = vllm_config.num_speculative_tokens
    histories = MambaStateShapeCalculator.short_conv_state_shape(1, sum(sizes.widths), config.conv_size, drafts)
    return (*histories, state)


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the states of a sequence.

    The histories of convolutions have the dtype of the model. The recurrent state has that of --mamba-ssm-cache-dtype,
    float32 if it is "auto".
    """
    config: Any = vllm_config.model_config
    name = vllm_config.cache_config.mamba_ssm_cache_dtype
    dtype = torch.float32 if name == "auto" else getattr(torch, name)
    return (config.dtype, dtype) if config.hf_config.use_short_conv else (dtype,)


def with_checkpoints(spec: Any) -> Any:
    """Returns the specification of a layer's states, saying that prefills can keep a state from inside.

    Under batch invariance they cannot: vLLM then cuts every prompt at its last block, whatever else is in the batch.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return spec
    return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINTS)


def recur(rows: Rows, pool: Tensor, batch: GLAMetadata, options: dict[str, Any]) -> None:
    """Computes a batch: decodes are its first rows, then come prefills, then padding, whose output is 0.

    Args:
        rows: the tokens, and their output, which is written.
        pool: the states [P, Hv, K, V]; written.
        batch: which rows belong to which sequence, and where its states are.
        options: scale, gate, gate_normalizer and state_v_first as in `chunk_gla_pool`, and with betas normalize and
            beta_limit as in `chunk_delta_pool`.
    """
    decoded = batch.num_decode_tokens
    computed = decoded + batch.num_prefill_tokens
    with nullcontext() if batch.segment is None else gla.batch_invariant(batch.segment):
        if batch.num_decodes:
            _decode(rows.part(0, decoded), pool, batch, options)
        if batch.num_prefills:
            prefill(rows.part(decoded, computed), pool, batch, options)
    rows.out[computed:] = 0


class Rows(NamedTuple):
    """Tokens [T, ..] and their output [T, Ho, V]; a constant gate g is [Hv]. A delta rule has betas [T, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    out: Tensor
    beta: Tensor | None = None

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        """The tokens as the ops of their recurrence take them."""
        return (self.q, self.k, self.v, self.g) if self.beta is None else (self.q, self.k, self.v, self.g, self.beta)

    @property
    def ops(self) -> Ops:
        """The ops of their recurrence."""
        return GATED_LINEAR_ATTENTION if self.beta is None else DELTA_RULE

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
        beta = None if self.beta is None else function(self.beta)
        return Rows(function(self.q), function(self.k), function(self.v), g, function(self.out), beta)


class Ops(NamedTuple):
    """The functions of gla_core for one token of each sequence, for a token and drafts, and for prompts."""

    step: Callable[..., Any]
    steps: Callable[..., Tensor]
    pool: Callable[..., Tensor]


GATED_LINEAR_ATTENTION = Ops(gla.recurrent_gla_step, gla.recurrent_gla_steps, gla.chunk_gla_pool)
DELTA_RULE = Ops(gla.recurrent_delta_step, gla.recurrent_delta_steps, gla.chunk_delta_pool)


def _decode(rows: Rows, pool: Tensor, batch: GLAMetadata, options: dict[str, Any]) -> None:
    slots = batch.state_indices_tensor_d
    assert slots is not None
    if batch.num_accepted_tokens is None and pool.dtype != torch.float16:  # the quicker op takes no float16
        o, _ = rows.ops.step(*rows.tokens, pool, slots=slots_of_decodes(batch), inplace=True, **options)
        rows.out.copy_(o)
        return
    rows = rows.single() if batch.query_start_loc_d is None else rows.packed()
    drafts: Any = {"cu_seqlens": batch.query_start_loc_d, "num_accepted": batch.num_accepted_tokens}
    rows.ops.steps(*rows.tokens, pool, slots, pad_slot=NULL_BLOCK_ID, out=rows.out, **drafts, **options)


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
    rows = rows.packed()
    states: Any = {"has_state": batch.has_initial_states_p, "pad_slot": NULL_BLOCK_ID}
    if kept is not None:
        states |= {"snapshot_offsets": kept.checkpoint_offsets, "snapshot_slots": kept.state_indices}
    rows.ops.pool(*rows.tokens, pool, offsets, slots, out=rows.out, **states, **options)


def batch_of(layer: str) -> Any:
    """Returns the `GLAMetadata` of a layer; None while vLLM measures memory, when there are no states yet."""
    batches: Any = get_forward_context().attn_metadata
    return None if batches is None else batches.get(layer)


def _gla_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, out: Tensor, layer: str
) -> None:
    batch = batch_of(layer)
    if batch is None:
        out.zero_()
        return
    this = get_forward_context().no_compile_layers[layer]
    recur(Rows(q, k, v, g, out, beta), this.kv_cache[-1], batch, this.options)


def _no_computation(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, out: Tensor, layer: str
) -> None:
    return


direct_register_custom_op(
    op_name="gla_recurrence", op_func=_gla_recurrence, mutates_args=["out"], fake_impl=_no_computation
)
