"""Code that all recurrent layers share: how they read sequences and single tokens, and the state that they carry.

A layer computes q, k, v and g from x. If it has short convolutions, three of its projections go through them. The layer
receives a function that applies the convolutions, because this module, and not the layer, knows their history (a part
of the state) and the offsets of the sequences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch import request
from gla_core.dispatch.backend import wide
from gla_core.dispatch.errors import nearest
from gla_core.nn.layer import Histories, OpInputs, Output, RecurrentLayer
from gla_core.nn.padding import padding
from gla_core.nn.short_convolution import Packing, packing
from gla_core.ops import checks
from gla_core.ops.chunk_gla import chunk_gla
from gla_core.ops.recurrent_gla_step import recurrent_gla_step

if TYPE_CHECKING:
    from gla_core.distributed import Shard

MODES = ("chunk", "fused_chunk", "fused_recurrent")
"""Modes of flash-linear-attention's configurations; all of them compute the same here."""


class GLAState(NamedTuple):
    """The state of N sequences that a layer carries from call to call.

    Attributes:
        recurrent: [N, H, K, V] float32 (float64 with float64 inputs), the state of each key/value head.
        conv: the last conv_size - 1 inputs of the three convolutions, each [N, conv_size - 1, width]; None for a layer
            without convolutions.
    """

    recurrent: Tensor
    conv: Histories | None = None


torch.serialization.add_safe_globals([GLAState])  # lets torch.load read it with weights_only=True, the default


def read_sequences(
    layer: RecurrentLayer,
    op_inputs: OpInputs,
    output: Output,
    x: Tensor,
    state: GLAState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    attention_mask: Tensor | None,
    shard: Shard | None,
) -> tuple[Tensor, GLAState | None]:
    """Computes a layer's `forward`.

    Args:
        op_inputs: computes the op's inputs from x.
        output: computes y from the op's o and x.

    The other arguments and the results are as in `GatedLinearAttention.forward`.
    """
    if shard is not None or layer.context_parallel is not None:
        _refuse_over_ranks(state=state, output_final_state=output_final_state or None, attention_mask=attention_mask)
        from gla_core.nn.context_parallel import read_shard

        return read_shard(layer, op_inputs, output, x, cu_seqlens, shard), None
    dims: dict[str, Any] = {"hidden_size": layer.hidden_size}
    checks.tensor("x", x, "B T hidden_size", dims)
    dims["N"] = dims["B"]
    if cu_seqlens is not None:  # checked before the op checks it, since the convolutions run first
        checks.tensor("cu_seqlens", cu_seqlens, "N+1", dims)
        checks.dtype("cu_seqlens", cu_seqlens, checks.INTEGERS)
        checks.packed(dims, of="x")
    if state is not None:
        _check_state(layer, state, dims["N"])
    padded = None
    if attention_mask is not None:
        _check_mask(attention_mask, cu_seqlens, dims)
        padded = padding(attention_mask, dims["T"])
        x = padded.front(x)
    places = None if cu_seqlens is None or not layer.convolutions else packing(cu_seqlens, dims["T"], layer.conv_size)
    convolve = _Convolved(layer, None if state is None else state.conv, places, padded and padded.lengths)
    q, k, v, g = op_inputs(x, convolve)
    if padded is not None:  # padding behind the tokens must not change the state
        k, g = padded.zeroed(k), padded.zeroed(g)
    # FSDP2's mixed precision casts every input to half precision; this casts the state back.
    initial = None if state is None else state.recurrent.to(wide(state.recurrent.dtype))
    o, recurrent = chunk_gla(
        q,
        k,
        v,
        g,
        initial_state=initial,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        backend=layer.backend,
        max_seqlen=max_seqlen,
    )
    y = output(o, x)
    y = y if padded is None else padded.back(y)
    return y, None if recurrent is None else GLAState(recurrent, convolve.after)


def read_tokens(
    layer: RecurrentLayer,
    op_inputs: OpInputs,
    output: Output,
    x: Tensor,
    state: GLAState,
    inplace: bool,
    state_indices: Tensor | None,
) -> tuple[Tensor, GLAState]:
    """Computes a layer's `step`.

    Args:
        op_inputs, output: as in `read_sequences`.

    The other arguments and the results are as in `GatedLinearAttention.step`.
    """
    if layer.context_parallel is not None:
        raise ValueError("step reads one token, which no ranks share; decode by a layer without context_parallel")
    dims: dict[str, Any] = {"hidden_size": layer.hidden_size}
    checks.tensor("x", x, "B hidden_size", dims)
    if state_indices is not None:  # checked before the op checks it, since the convolutions run first
        checks.tensor("state_indices", state_indices, "B", dims)
        checks.dtype("state_indices", state_indices, checks.INTEGERS)
    _check_state(layer, state, dims["B"] if state_indices is None else None)
    convolve = _Convolved(layer, _rows(state.conv, state_indices))
    q, k, v, g = (t[:, 0] for t in op_inputs(x[:, None], convolve))
    o, recurrent = recurrent_gla_step(
        q, k, v, g, state.recurrent, state_indices=state_indices, inplace=inplace, backend=layer.backend
    )
    conv = _with_rows(state.conv, convolve.after, state_indices, inplace)
    return output(o, x), state if inplace else GLAState(recurrent, conv)


def initial_state(layer: RecurrentLayer, batch_size: int, device: Device) -> GLAState:
    """Returns the state before the first token of `batch_size` sequences: zeros on the layer's device."""
    like = next((p for p in layer.parameters() if p.dtype in checks.FLOATS), torch.empty(0))
    device = like.device if device is None else device
    recurrent = torch.zeros(batch_size, *layer.state_shape, device=device, dtype=wide(like.dtype))
    if not layer.convolutions:
        return GLAState(recurrent)
    widths = (convolution.width for convolution in layer.convolutions)
    a, b, c = (torch.zeros(batch_size, layer.conv_size - 1, w, device=device, dtype=like.dtype) for w in widths)
    return GLAState(recurrent, (a, b, c))


def reset_parameters(layer: nn.Module) -> None:
    """Sets every parameter to its initial value, as the constructor does; for example after `to_empty`."""
    for module in layer.modules():
        if module is not layer and callable(reset := getattr(module, "reset_parameters", None)):
            reset()


class _Convolved:
    """Sends projections through a layer's convolutions, and keeps the new histories in `after`."""

    after: Histories | None = None

    def __init__(
        self,
        layer: RecurrentLayer,
        before: Histories | None,
        places: Packing | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        self.convolutions, self.before = layer.convolutions, before
        self.places, self.lengths = places, lengths

    def __call__(self, *projections: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = projections
        if self.convolutions:
            before = (None, None, None) if self.before is None else self.before
            (a, to_a), (b, to_b), (c, to_c) = (
                convolution(y, history, self.places, self.lengths)
                for convolution, y, history in zip(self.convolutions, projections, before, strict=True)
            )
            self.after = (to_a, to_b, to_c)
        return a, b, c


def _refuse_over_ranks(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is given, and the tokens are spread over ranks (context_parallel or shard); "
                "expected none: pack sequences in place of a mask, and pass states between calls without ranks"
            )


def _check_mask(mask: Tensor, cu_seqlens: Tensor | None, dims: dict[str, Any]) -> None:
    if cu_seqlens is not None:
        raise ValueError("both cu_seqlens and attention_mask are given; packed sequences need no mask")
    checks.tensor("attention_mask", mask, "B columns", dims)
    if dims["columns"] < dims["T"]:
        raise ValueError(f"attention_mask has {dims['columns']} columns; expected one for each of {dims['T']} tokens")


def _check_state(layer: RecurrentLayer, state: GLAState, N: int | None) -> None:
    """Checks a state of N sequences; N = None accepts any number of sequences."""
    if not isinstance(state, GLAState):
        raise TypeError(f"state is {type(state).__name__}; expected a GLAState, as this layer returns")
    dims = dict(zip("HKV", layer.state_shape, strict=True)) | ({} if N is None else {"N": N})
    checks.tensor("state.recurrent", state.recurrent, "N H K V", dims)
    if (state.conv is not None) != (len(layer.convolutions) > 0):
        has, expected = ("none", "some") if layer.convolutions else ("some", "none")
        raise ValueError(
            f"state.conv holds {has} of the convolutions' inputs; expected {expected}, as use_short_conv is "
            f"{bool(layer.convolutions)}: pass a state of this layer"
        )
    for name, convolution, inputs in zip("qkv", layer.convolutions, state.conv or (), strict=False):
        sizes = {"N": dims["N"], "conv_size-1": layer.conv_size - 1, "width": convolution.width}
        checks.tensor(f"state.conv of {name}", inputs, "N conv_size-1 width", sizes)


# ---- rows of a pool


def _rows(pool: Histories | None, indices: Tensor | None) -> Histories | None:
    """Returns the rows of a pool at these indices; for an index outside the pool it returns any row."""
    if pool is None or indices is None:
        return pool
    a, b, c = (rows.index_select(0, indices.clamp(0, len(rows) - 1)) for rows in pool)
    return a, b, c


def _with_rows(
    pool: Histories | None, new: Histories | None, indices: Tensor | None, inplace: bool
) -> Histories | None:
    """Returns the pool with new rows at these indices; indices outside the pool are skipped."""
    if pool is None or new is None or (indices is None and not inplace):
        return new
    a, b, c = (_written(rows if inplace else rows.clone(), to, indices) for rows, to in zip(pool, new, strict=True))
    return a, b, c


def _written(rows: Tensor, new: Tensor, indices: Tensor | None) -> Tensor:
    """Writes new [B, ...] into rows [P, ...] at the indices [B], or into all rows without indices."""
    if indices is None:
        return rows.copy_(new)
    if not len(indices):
        return rows
    # A skipped row repeats the write of the first row that is not skipped. If all are skipped, it writes a row's old
    # value.
    skipped, new = (indices < 0) | (indices >= len(rows)), new.to(rows.dtype)
    first = skipped.to(torch.uint8).argmin(0, keepdim=True)  # [1]; an index without dimensions would make the host wait
    places = torch.where(skipped, indices[first].clamp(0, len(rows) - 1), indices)
    instead = torch.where(skipped[first], rows[places[first]], new[first])
    return rows.index_copy_(0, places.long(), torch.where(skipped[:, None, None], instead, new))


# ---- checks of constructors' arguments


def check_computation(mode: str, backend: str | None) -> None:
    """Raises ValueError for an unknown mode, and the errors of `request.check` for an invalid backend."""
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}{nearest(mode, MODES)} (there are {', '.join(MODES)})")
    if backend is not None:
        request.check(backend, "backend=")


def check_positive(**sizes: int) -> None:
    """Raises ValueError unless all sizes are whole numbers, at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; expected a whole number, at least 1")


def head_width(name: str, expand: float, hidden_size: int, num_heads: int) -> int:
    """Returns hidden_size * expand / num_heads; raises ValueError unless it is a whole number."""
    total = hidden_size * expand
    if not math.isfinite(total) or round(total) < 1 or not math.isclose(total, round(total)):
        raise ValueError(f"hidden_size * {name} is {total}; expected a whole number, at least 1")
    if round(total) % num_heads != 0:
        raise ValueError(f"hidden_size * {name} is {round(total)}; expected a multiple of num_heads = {num_heads}")
    return round(total) // num_heads
