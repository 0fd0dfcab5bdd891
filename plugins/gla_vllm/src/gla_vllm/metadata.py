"""The batches of vLLM's scheduler: which rows are decodes, which are prefills, and where their states are.

vLLM keeps the states of a layer in blocks of memory, and names them by block. A block is a slot of the pool of states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointBuilder, MambaPrefillCheckpointMetadata
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata, ShortConvAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from gla_core.extension import MOST_STEPS

CHECKPOINTS = 64
"""A state inside a prefill can be kept after a multiple of this number of its tokens."""
WHOLE = 4096
"""Tokens of a segment of prompts that are never cut, under batch invariance."""


@dataclass
class GLAMetadata(ShortConvAttentionMetadata):
    """A batch: `num_decodes` sequences first, then `num_prefills` sequences.

    Attributes:
        checkpoint: for each prefill, the state to keep from inside it, and where; None if no prefill keeps one.
        segment: the number of tokens for `gla_core.batch_invariant`; None if results may depend on the batch.
        ring_start: for each decode, the place in the rings of the first token of its last call [num_decodes]; None if
            the layers have no rings.
    """

    checkpoint: MambaPrefillCheckpointMetadata | None = None
    segment: int | None = None
    ring_start: torch.Tensor | None = None


class GLAMetadataBuilder(ShortConvAttentionMetadataBuilder):
    """Makes the `GLAMetadata` of a batch.

    vLLM passes the number of accepted drafts to the builders that it knows, and to their subclasses; of these, the one
    of short convolutions needs nothing else.
    """

    metadata_cls = GLAMetadata
    needs_causal_conv1d_metadata = False

    def __init__(
        self, kv_cache_spec: MambaSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.num_spec_tokens >= MOST_STEPS:
            raise ValueError(f"num_speculative_tokens is {self.num_spec_tokens}; expected at most {MOST_STEPS - 1}")
        # Without blocks for drafts, layers have rings. CUDA graphs read where these begin at the same place in memory.
        has_rings = self.num_spec_tokens > 0 and kv_cache_spec.num_speculative_blocks == 0
        sequences = vllm_config.scheduler_config.max_num_seqs
        self.ring_start = torch.zeros(sequences, dtype=torch.int32, device=device) if has_rings else None
        self.checkpoints = MambaPrefillCheckpointBuilder(vllm_config, kv_cache_spec)
        self.segment = segment(vllm_config, kv_cache_spec.block_size) if envs.VLLM_BATCH_INVARIANT else None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **drafts: Any,
    ) -> GLAMetadata:
        """Returns the metadata of a batch; `drafts` are vLLM's arguments about speculation."""
        metadata: Any = super().build(common_prefix_len, common_attn_metadata, fast_build, **drafts)
        checkpoint, ring_start = None, None
        if self.ring_start is not None and metadata.num_decodes:  # a token is in the rings at its place in the sequence
            accepted = metadata.num_accepted_tokens
            before = metadata.seq_lens[: len(accepted)] - metadata.query_start_loc_d.diff()
            places = (before - accepted) % ring_length(self.num_spec_tokens)
            ring_start = self.ring_start[: len(accepted)].copy_(places)
        if metadata.num_prefills:
            prefills = list(range(metadata.num_reqs - metadata.num_prefills, metadata.num_reqs))
            checkpoint = self.checkpoints.build(common_attn_metadata, prefills)
        return replace(metadata, checkpoint=checkpoint, segment=self.segment, ring_start=ring_start)

    def update_block_table(
        self, metadata: GLAMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> GLAMetadata:
        """Returns the metadata for layers whose states are in other blocks."""
        updated: Any = super().update_block_table(metadata, blk_table, slot_mapping)
        if metadata.checkpoint is None:
            return updated
        return replace(updated, checkpoint=metadata.checkpoint.regather_state_indices(blk_table))


def ring_length(drafts: int) -> int:
    """Returns the number of tokens in a ring: those of a call, and as many that were accepted of the call before."""
    return 2 * (1 + drafts)


def segment(vllm_config: VllmConfig, block_size: int) -> int:
    """Returns the number of tokens of a segment at whose multiples vLLM cuts every prompt, whatever else it computes.

    With a prefix cache it cuts at multiples of a block; without one, prompts have to be whole.

    Raises:
        ValueError: vLLM would cut prompts elsewhere, so that results would depend on the batch.
    """
    scheduler = vllm_config.scheduler_config
    if vllm_config.cache_config.mamba_cache_mode == "align":
        if block_size % CHECKPOINTS or block_size > scheduler.max_num_batched_tokens:
            raise ValueError(
                f"VLLM_BATCH_INVARIANT is 1 and block_size is {block_size}; expected a multiple of {CHECKPOINTS}, at "
                f"most max_num_batched_tokens = {scheduler.max_num_batched_tokens}: pass --block-size"
            )
        return block_size
    if scheduler.enable_chunked_prefill:
        raise ValueError(
            "VLLM_BATCH_INVARIANT is 1, and prompts are cut where a batch is full; expected cuts at blocks, or none: "
            "pass --enable-prefix-caching, or --no-enable-chunked-prefill"
        )
    return WHOLE


class GLABackend(AttentionBackend):
    """Tells vLLM how batches of layers with states are described."""

    @staticmethod
    def get_name() -> str:
        return "GLA"

    @staticmethod
    def get_builder_cls() -> type[GLAMetadataBuilder]:
        return GLAMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class ConvolvedGLAMetadataBuilder(GLAMetadataBuilder):
    """Makes the metadata of layers with convolutions in front of the recurrence."""

    needs_causal_conv1d_metadata = True


class ConvolvedGLABackend(GLABackend):
    """Tells vLLM how batches of layers with convolutions are described."""

    @staticmethod
    def get_builder_cls() -> type[GLAMetadataBuilder]:
        return ConvolvedGLAMetadataBuilder
