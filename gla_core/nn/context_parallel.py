"""Layers on sequences whose tokens are spread over ranks: the op exchanges states, the convolutions exchange rows.

Layers import this module only if they need it, because it imports torch.distributed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gla_core.dispatch.environment import environment
from gla_core.distributed import Shard
from gla_core.distributed import shard as make_shard
from gla_core.distributed.history import histories
from gla_core.distributed.outside_graphs import outside_graphs
from gla_core.distributed.shard import refuse_ranks_that_differ
from gla_core.nn.gates import gate_options
from gla_core.nn.padding import with_residual, within
from gla_core.nn.short_convolution import ShortConvolution, packing
from gla_core.ops import checks

if TYPE_CHECKING:
    from gla_core.nn.interface import OpInputs, Output, RecurrentLayer


def read_shard(
    layer: RecurrentLayer,
    op_inputs: OpInputs,
    output: Output,
    x: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    shard: Shard | None,
    residual: Tensor | None,
) -> Tensor:
    """Computes a layer's y for this rank's tokens x [B, T, hidden_size]. Arguments are as in `read_sequences`."""
    dims: dict[str, Any] = {"hidden_size": layer.hidden_size}
    if shard is None:
        checks.tensor("x", x, "B T hidden_size", dims)
        shard = make_shard(x.shape[1], cu_seqlens, layer.context_parallel, max_seqlen=max_seqlen)
    elif cu_seqlens is not None:
        raise ValueError("both cu_seqlens and shard are given; the shard has offsets of its own")
    dims["T"] = shard.tokens
    checks.tensor("x", x, "B T hidden_size", dims)
    if shard.packed is not None:
        checks.packed(dims | {"N+1": len(shard.packed.cu_seqlens)}, of="x")
    _check_agreement(layer, x, shard)

    def convolve(*projections: Tensor) -> tuple[Tensor, ...]:
        if not layer.convolutions:
            return projections
        return _convolved(layer.convolutions, projections, layer.conv_size, shard)

    inputs, ops = op_inputs(x, convolve), layer.ops
    tokens, others = inputs[: ops.tokens], inputs[ops.tokens :]
    options = {"scale": layer.scale, "backend": layer.backend, "shard": shard} | gate_options(layer)
    o, _ = ops.chunk_over_ranks(*tokens, **options)
    offsets = None if shard.packed is None or not others else shard.packed.parts
    mask = None if offsets is None else functools.partial(within, cu_seqlens=offsets)
    return with_residual(output, residual, mask)(o, x, *others)


@outside_graphs  # compiled code would keep the value that GLA_CHECK had at compile time
def _check_agreement(layer: RecurrentLayer, x: Tensor, shard: Shard) -> None:
    """Checks, if GLA_CHECK=1, that all ranks have the same batch size and dtype of x and the same conv_size."""
    if environment().check_values:
        agreed = {"B": x.shape[0], "dtype": x.dtype, "conv_size": layer.conv_size if layer.convolutions else None}
        refuse_ranks_that_differ(agreed, shard.group, "a layer and its x have to be alike on every rank, except for T")


def _convolved(
    convolutions: Sequence[ShortConvolution], projections: Sequence[Tensor], W: int, shard: Shard
) -> tuple[Tensor, ...]:
    """Sends projections [B, T, width] through the convolutions, with the W - 1 rows before each piece as history."""
    before = histories(projections, W - 1, shard) if W > 1 else [None] * len(projections)
    places, rows = None, projections
    if shard.packed is not None:
        places = packing(shard.packed.parts, shard.tokens, W)
    elif len(shard.places) > 1:  # each piece becomes a row of the batch
        pieces = (len(shard.places), shard.tokens // len(shard.places))
        rows = [x.unflatten(1, pieces).flatten(0, 1) for x in projections]
    return tuple(
        convolution(x, history, places)[0].view(like.shape)
        for convolution, x, history, like in zip(convolutions, rows, before, projections, strict=True)
    )
