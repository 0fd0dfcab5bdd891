"""The recurrences of gated linear attention and of delta rules over a batch of vLLM, in states that vLLM allocates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from gla_vllm.layers import breakable
from gla_vllm.metadata import CHECKPOINTS, ConvolvedGLABackend, GLABackend, GLAMetadata, ring_length


class Recurrence(nn.Module, MambaBase):
    """Gated linear attention or a delta rule over the tokens of a batch, with a state of each sequence.

    Args:
        sizes: the sizes of the layer on this rank.
        vllm_config: vLLM's configuration.
        prefix: the name of the layer, unique in the model.
        options: what the ops compute of the projections, as in `recur`.

    Attributes:
        histories: how many of the states hold the last inputs of convolutions; they come before the recurrent ones.
        replays: whether a sequence has one state and rings, whatever its drafts; see `replays`.
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
        config: Any = vllm_config.model_config.hf_config
        self.shapes, self.dtypes = state_shapes(vllm_config, sizes), state_dtypes(vllm_config)
        self.options, self.prefix, self.histories = options, prefix, int(config.use_short_conv)
        self.replays = replays(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"there are two layers of the name {prefix}; expected names to be unique")
        layers[prefix] = self
        split_graphs(vllm_config)

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
        return ConvolvedGLABackend if self.histories else GLABackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec: Any = with_checkpoints(super().get_kv_cache_spec(vllm_config))
        return replace(spec, num_speculative_blocks=0) if self.replays else spec


class Sizes(NamedTuple):
    """The sizes of a rank's part of a layer.

    Attributes:
        queries, keys, values: the number of heads of each.
        K, V: the widths of a key and a value.
        gates: how many forget gates a value head has, K or 1.
    """

    queries: int
    keys: int
    values: int
    K: int
    V: int
    gates: int

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


def split_graphs(vllm_config: VllmConfig) -> None:
    """Makes vLLM's graphs of prefills stop at the ops of this package, as they do at its own ops with states."""
    ops = vllm_config.compilation_config.splitting_ops
    if ops:
        ops += [op for op in ("vllm::gla_convolution", "vllm::gla_recurrence") if op not in ops]


def state_shapes(vllm_config: VllmConfig, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the states of a sequence.

    These are the histories of its convolutions, if any; the recurrent state [Hv, K, V]; and the rings [L, ..] of keys,
    values and gates, if it has them.
    """
    config: Any = vllm_config.model_config.hf_config
    drafts, histories = vllm_config.num_speculative_tokens, ()
    if config.use_short_conv:
        histories = MambaStateShapeCalculator.short_conv_state_shape(1, sum(sizes.widths), config.conv_size, drafts)
    return (*histories, (sizes.values, sizes.K, sizes.V), *rings(vllm_config, sizes))


def rings(vllm_config: VllmConfig, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a sequence's rings [L, ..] of keys, values and gates, if it has them; see `replays`."""
    if not replays(vllm_config):
        return ()
    L = ring_length(vllm_config.num_speculative_tokens)
    gates = [sizes.gates] if sizes.gates > 1 else []
    return (L, sizes.keys, sizes.K), (L, sizes.values, sizes.V), (L, sizes.values, *gates)


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the states of a sequence.

    The histories of convolutions have the dtype of the model, and rings float32. The recurrent state has the dtype of
    --mamba-ssm-cache-dtype, float32 if it is "auto".
    """
    config: Any = vllm_config.model_config
    name = vllm_config.cache_config.mamba_ssm_cache_dtype
    dtype = torch.float32 if name == "auto" else getattr(torch, name)
    histories = (config.dtype,) if config.hf_config.use_short_conv else ()
    return (*histories, dtype, *((torch.float32,) * 3 if replays(vllm_config) else ()))


def replays(vllm_config: VllmConfig) -> bool:
    """Returns whether drafts are verified with one state for each sequence, and rings of the tokens of its last call.

    The state is then behind by the tokens of the last call, and its bits depend on the numbers of drafts in the calls.
    A prefix cache needs states that are up to date, and batch invariance bits that do not depend on these numbers,
    which vLLM lowers in full batches. So with these a sequence has a state for each draft.
    """
    cached = vllm_config.cache_config.mamba_cache_mode != "none"
    return vllm_config.num_speculative_tokens > 0 and not cached and not envs.VLLM_BATCH_INVARIANT


def with_checkpoints(spec: Any) -> Any:
    """Returns the specification of a layer's states, saying that prefills can keep a state from inside.

    Under batch invariance they cannot: vLLM then cuts every prompt at its last block, whatever else is in the batch.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return spec
    return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINTS)


def recur(rows: Rows, states: Sequence[Tensor], batch: GLAMetadata, options: dict[str, Any]) -> None:
    """Computes a batch: decodes are its first rows, then come prefills, then padding, whose output is 0.

    Args:
        rows: the tokens, and their output, which is written.
        states: the recurrent states [P, Hv, K, V], and the rings [P, L, ..] if there are any; written.
        batch: which rows belong to which sequence, and where its states are.
        options: scale, gate, gate_normalizer and state_v_first as in `chunk_gla_pool`, and with betas normalize and
            beta_limit as in `chunk_delta_pool`.
    """
    decoded = batch.num_decode_tokens
    computed = decoded + batch.num_prefill_tokens
    with invariance(batch):
        if batch.num_decodes:
            _decode(rows.part(0, decoded), states, batch, options)
        if batch.num_prefills:
            prefill(rows.part(decoded, computed), states, batch, options)
    rows.out[computed:] = 0


def invariance(batch: GLAMetadata) -> AbstractContextManager[Any]:
    """Returns a context in which ops are batch invariant if the batch asks for it."""
    return nullcontext() if batch.segment is None else gla.batch_invariant(batch.segment)


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
    """The functions of gla_core for a token of each sequence, for a token and drafts in two ways, and for prompts."""

    step: Callable[..., Any]
    steps: Callable[..., Tensor]
    replay: Callable[..., Tensor]
    pool: Callable[..., Tensor]


GATED_LINEAR_ATTENTION = Ops(
    gla.recurrent_gla_step, gla.recurrent_gla_steps, gla.recurrent_gla_replay, gla.chunk_gla_pool
)
DELTA_RULE = Ops(gla.recurrent_delta_step, gla.recurrent_delta_steps, gla.recurrent_delta_replay, gla.chunk_delta_pool)


def _decode(rows: Rows, states: Sequence[Tensor], batch: GLAMetadata, options: dict[str, Any]) -> None:
    slots, (pool, *rings) = batch.state_indices_tensor_d, states
    assert slots is not None
    if batch.num_accepted_tokens is None and pool.dtype != torch.float16:  # the quicker op takes no float16
        o, _ = rows.ops.step(*rows.tokens, pool, slots=slots_of_decodes(batch), inplace=True, **options)
        rows.out.copy_(o)
        return
    rows = rows.single() if batch.query_start_loc_d is None else rows.packed()
    where: Any = {"cu_seqlens": batch.query_start_loc_d, "pad_slot": NULL_BLOCK_ID, "out": rows.out}
    accepted = batch.num_accepted_tokens
    if rings:
        rows.ops.replay(*rows.tokens, pool, *rings, slots[:, 0], batch.ring_start, accepted, **where, **options)
    else:
        rows.ops.steps(*rows.tokens, pool, slots, num_accepted=accepted, **where, **options)


def slots_of_decodes(batch: GLAMetadata) -> Tensor:
    """Returns the slots of decodes of one token [num_decodes]; -1 for padding of a CUDA graph."""
    slots = batch.state_indices_tensor_d
    assert slots is not None
    return slots[:, 0].masked_fill(slots[:, 0] == NULL_BLOCK_ID, -1)


def prefill(rows: Rows, states: Sequence[Tensor], batch: GLAMetadata, options: dict[str, Any]) -> None:
    """Computes the prefills of a batch, `rows`; the other arguments are those of `recur`.

    A prefill brings the state up to date, and vLLM counts one accepted token after it. So its last token in the rings
    becomes one that changes no state: k = 0, with a gate of 1.
    """
    offsets, slots, kept, (pool, *rings) = (
        batch.query_start_loc_p,
        batch.state_indices_tensor_p,
        batch.checkpoint,
        states,
    )
    assert offsets is not None
    assert slots is not None
    rows = rows.packed()
    where: Any = {"has_state": batch.has_initial_states_p, "pad_slot": NULL_BLOCK_ID, "out": rows.out}
    if kept is not None:
        where |= {"snapshot_offsets": kept.checkpoint_offsets, "snapshot_slots": kept.state_indices}
    rows.ops.pool(*rows.tokens, pool, offsets, slots, **where, **options)
    if rings:
        lengths = batch.seq_lens[batch.num_reqs - batch.num_prefills : batch.num_reqs]
        for ring in rings:
            ring[slots, (lengths - 1) % ring.shape[1]] = 0


def batch_of(layer: str) -> Any:
    """Returns the `GLAMetadata` of a layer; None while vLLM measures memory, when there are no states yet."""
    batches: Any = get_forward_context().attn_metadata
    return None if batches is None else batches.get(layer)


@breakable
def _recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, out: Tensor, layer: str) -> None:
    batch = batch_of(layer)
    if batch is None:
        out.zero_()
        return
    this = get_forward_context().no_compile_layers[layer]
    recur(Rows(q, k, v, g, out, beta), this.kv_cache[this.histories :], batch, this.options)


def _gla_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, out: Tensor, layer: str) -> None:
    _recur(q, k, v, g, beta, out, layer)


def _no_computation(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, out: Tensor, layer: str) -> None:
    return


direct_register_custom_op(
    op_name="gla_recurrence", op_func=_gla_recurrence, mutates_args=["out"], fake_impl=_no_computation
)
