"""Causal convolutions in front of a recurrence, over a batch of vLLM, from and into histories that vLLM allocates.

The history of a sequence is the last W - 1 inputs before its next token. It is kept as in vLLM's own layers: a slot has
L = W - 1 + drafts rows. A decode writes its history without the oldest input, and its tokens behind that, so that the
next call finds the history after a accepted tokens at row a - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op

from gla_vllm.layers import breakable
from gla_vllm.metadata import GLAMetadata
from gla_vllm.recurrence import batch_of


class Filter(NamedTuple):
    """The weights [D, W] and bias [D], or None, of the convolutions of D channels, and whether silu follows."""

    weight: Tensor
    bias: Tensor | None
    silu: bool

    @property
    def room(self) -> int:
        """The number W - 1 of inputs in a history."""
        return self.weight.shape[1] - 1


class Convolution(nn.Module):
    """The convolutions of a layer's projections, joined: [T, D] to [T, D]. Each channel has a filter of its own.

    Args:
        widths: the number of channels of each projection on this rank.
        size: the number W of tokens that an output depends on.
        silu: whether silu follows.
        layer: the name of the layer with states that keeps the histories, its first state.
    """

    def __init__(self, widths: Sequence[int], size: int, silu: bool, layer: str) -> None:
        super().__init__()
        self.widths, self.silu, self.layer = widths, silu, layer
        self.weight = nn.Parameter(torch.empty(sum(widths), 1, size), requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": self._load})

    def _load(self, weight: Tensor, loaded: Any) -> None:
        """Copies this rank's channels of the filters of a projection, whose number is in `loaded.shard_id`."""
        width, begin = self.widths[loaded.shard_id], sum(self.widths[: loaded.shard_id])
        part = loaded.narrow(0, get_tensor_model_parallel_rank() * width, width)
        weight.data.narrow(0, begin, width).copy_(part)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.ops.vllm.gla_convolution(x, self.weight[:, 0], out, self.silu, self.layer)
        return out


def convolve(x: Tensor, filters: Filter, pool: Tensor, batch: GLAMetadata, out: Tensor) -> None:
    """Computes y_t = f(bias + sum_i weight_i x_{t-W+1+i}) over a batch. Rows behind its tokens stay as they are.

    On a GPU vLLM's kernels compute filters of 2 to 4 tokens. Its functions for a CPU take back no drafts.

    Args:
        x: [T, D].
        filters: the weights, the bias, and whether f is silu; otherwise f(x) = x.
        pool: the histories as vLLM keeps them, [P, L, D] or [P, D, L] (VLLM_SSM_CONV_STATE_LAYOUT); written.
        batch: which rows belong to which sequence, and where its histories are.
        out: y [T, D]; written.
    """
    pool = pool.mT if is_conv_state_dim_first() else pool
    decoded, computed = batch.num_decode_tokens, batch.num_decode_tokens + batch.num_prefill_tokens
    in_kernels = x.is_cuda and filters.room in (1, 2, 3)
    decode, prefill = (_vllm_decode, _vllm_prefill) if in_kernels else (_decode, _prefill)
    if batch.num_decodes:
        decode(x[:decoded], filters, pool, batch, out[:decoded])
    if batch.num_prefills:
        prefill(x[decoded:computed], filters, pool, batch, out[decoded:computed])
        if batch.checkpoint is not None:
            _keep(x[decoded:computed], filters.room, pool, batch)


def _vllm_decode(x: Tensor, filters: Filter, pool: Tensor, batch: GLAMetadata, out: Tensor) -> None:
    slots = batch.state_indices_tensor_d
    assert slots is not None
    causal_conv1d_update(
        x,
        pool.mT,
        filters.weight,
        filters.bias,
        filters.silu,
        conv_state_indices=slots,
        num_accepted_tokens=batch.num_accepted_tokens,
        query_start_loc=batch.query_start_loc_d,
        max_query_len=pool.shape[1] - filters.room + 1,
        out=out,
    )


def _vllm_prefill(x: Tensor, filters: Filter, pool: Tensor, batch: GLAMetadata, out: Tensor) -> None:
    y = causal_conv1d_fn(
        x.mT,
        filters.weight,
        filters.bias,
        activation="silu" if filters.silu else None,
        conv_states=pool.mT,
        has_initial_state=batch.has_initial_states_p,
        cache_indices=batch.state_indices_tensor_p,
        metadata=batch,
        query_start_loc=batch.query_start_loc_p,
    )
    out.copy_(y.mT)


def _decode(x: Tensor, filters: Filter, pool: Tensor, batch: GLAMetadata, out: Tensor) -> None:
    assert batch.state_indices_tensor_d is not None
    slots, offsets = batch.state_indices_tensor_d[:, 0], batch.query_start_loc_d
    room, first = filters.room, torch.zeros_like(slots)
    if offsets is None:
        offsets = torch.arange(len(slots) + 1, device=x.device)
    if batch.num_accepted_tokens is not None:
        first = (batch.num_accepted_tokens - 1).clamp(0, pool.shape[1] - room)
    inputs = _Inputs(pool[slots[:, None], first[:, None] + torch.arange(room, device=x.device)], x, offsets)
    _filter(inputs, filters, out)
    places = torch.arange(1 - room, 1 - room + pool.shape[1], device=x.device)
    pool[slots] = inputs.last(torch.minimum(places, inputs.length[:, None] - 1))


def _prefill(x: Tensor, filters: Filter, pool: Tensor, batch: GLAMetadata, out: Tensor) -> None:
    slots, offsets, has_state = batch.state_indices_tensor_p, batch.query_start_loc_p, batch.has_initial_states_p
    assert slots is not None
    assert offsets is not None
    assert has_state is not None
    room = filters.room
    inputs = _Inputs(torch.where(has_state[:, None, None], pool[slots, :room], 0), x, offsets)
    _filter(inputs, filters, out)
    pool[slots, :room] = inputs.last(inputs.length[:, None] + torch.arange(-room, 0, device=x.device))


class _Inputs:
    """The inputs of N sequences: their histories [N, W - 1, D], and the tokens x [T, D] at offsets [N + 1]."""

    def __init__(self, history: Tensor, x: Tensor, offsets: Tensor) -> None:
        self.rows, self.room = torch.cat([history.flatten(0, 1), x]), history.shape[1]
        self.begin, self.length, self.tokens = offsets[:-1], offsets.diff(), torch.arange(len(x), device=x.device)

    def before(self, distance: int) -> Tensor:
        """Returns for each token the input this many places before it [T, D]."""
        n = torch.searchsorted(self.begin, self.tokens, right=True) - 1
        return self._at(n, self.tokens - self.begin[n] - distance)

    def last(self, places: Tensor) -> Tensor:
        """Returns the inputs of each sequence at these places [N, m], counted from its first token: [N, m, D]."""
        return self._at(torch.arange(len(self.begin), device=places.device)[:, None], places)

    def _at(self, n: Tensor, places: Tensor) -> Tensor:
        tokens = len(self.begin) * self.room + self.begin[n] + places
        return self.rows[torch.where(places < 0, (n + 1) * self.room + places, tokens)]


def _filter(inputs: _Inputs, filters: Filter, out: Tensor) -> None:
    """Computes the convolution of all tokens in float32, in one order, so that no batch changes its bits."""
    y = torch.zeros((), device=out.device) if filters.bias is None else filters.bias.float()
    for i, weight in enumerate(filters.weight.float().unbind(1)):
        y = torch.addcmul(y, inputs.before(filters.room - i).float(), weight)
    out.copy_(F.silu(y) if filters.silu else y)


def _keep(x: Tensor, room: int, pool: Tensor, batch: GLAMetadata) -> None:
    """Keeps the histories at the checkpoints of prefills x [T, D]; the null block takes those of other prefills."""
    kept, offsets = batch.checkpoint, batch.query_start_loc_p
    assert kept is not None
    assert offsets is not None
    rows = (offsets[:-1] + kept.checkpoint_offsets)[:, None] + torch.arange(-room, 0, device=x.device)
    pool[kept.state_indices, :room] = x[rows.clamp(min=0)]


@breakable
def _convolve(x: Tensor, weight: Tensor, out: Tensor, silu: bool, layer: str) -> None:
    batch = batch_of(layer)
    if batch is None:
        out.zero_()
        return
    convolve(x, Filter(weight, None, silu), get_forward_context().no_compile_layers[layer].kv_cache[0], batch, out)


def _gla_convolution(x: Tensor, weight: Tensor, out: Tensor, silu: bool, layer: str) -> None:
    _convolve(x, weight, out, silu, layer)


def _no_computation(x: Tensor, weight: Tensor, out: Tensor, silu: bool, layer: str) -> None:
    return


direct_register_custom_op(
    op_name="gla_convolution", op_func=_gla_convolution, mutates_args=["out"], fake_impl=_no_computation
)
