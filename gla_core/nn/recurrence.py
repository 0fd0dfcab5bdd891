"""Code that all recurrent layers share: how they read sequences and single tokens, and the state that they carry.

A layer computes q, k, v and g from x. If it has short convolutions, some of its projections go through them. The layer
receives a function that applies the convolutions, because this module, and not the layer, knows their history (a part
of the state) and the offsets of the sequences. For the same reason this module applies the rotary embedding of q and k,
if the layer has one: the number of tokens before a call is a part of the state.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from gla_core.dispatch import request
from gla_core.dispatch.errors import check_known
from gla_core.dispatch.tensors import wide
from gla_core.nn.gates import gate_options
from gla_core.nn.interface import Histories, OpInputs, Output, RecurrentLayer
from gla_core.nn.padding import padding, with_residual, within
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.rotary import positions, rotated
from gla_core.nn.short_convolution import Packing, packing
from gla_core.ops import checks
from gla_core.ops.calls import exportable, is_dtensor, transformed

if TYPE_CHECKING:
    from gla_core.distributed import Shard

MODES = ("chunk", "fused_chunk", "fused_recurrent", "parallel")
"""Modes of flash-linear-attention's configurations; all of them compute the same here."""


@exportable
class GLAState(NamedTuple):
    """The state of N sequences that a layer carries from call to call.

    Attributes:
        recurrent: [N, H, K, V] float32 (float64 with float64 inputs), the state of each head.
        conv: the last conv_size - 1 inputs of each convolution, [N, conv_size - 1, width]; None for a layer without
            convolutions.
        position: [N] int64, number of tokens before the next one; None for a layer without a rotary embedding.
    """

    recurrent: Tensor
    conv: Histories | None = None
    position: Tensor | None = None


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
    residual: Tensor | None = None,
) -> tuple[Tensor, GLAState | None]:
    """Computes a layer's `forward`.

    Args:
        op_inputs: computes the op's inputs from x.
        output: computes y from the op's o and x.

    The other arguments and the results are as in `Recurrent.forward`.
    """
    if shard is not None or layer.context_parallel is not None:
        _refuse_over_ranks(
            layer, state=state, output_final_state=output_final_state or None, attention_mask=attention_mask
        )
        from gla_core.nn.context_parallel import read_shard

        return read_shard(layer, op_inputs, output, x, cu_seqlens, max_seqlen, shard, residual), None
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
    inputs, ops = op_inputs(x, convolve), layer.ops
    (q, k, v, g, *more), others = inputs[: ops.tokens], inputs[ops.tokens :]
    position = None
    if layer.rotary_base is not None:
        begun = None if state is None else state.position
        tokens, position = positions(x, begun, cu_seqlens, padded and padded.lengths)
        q, k = rotated(q, k, tokens, layer.rotary_base)
    if padded is not None:  # padding behind the tokens must not change the state
        k = padded.zeroed(k)
        if g is not None:
            g = padded.filled(g.expand(*v.shape[:3]) if g.ndim == 1 else g, layer.neutral_gate)
    # FSDP2's mixed precision casts every input to half precision; this casts the state back.
    initial = None if state is None else state.recurrent.to(wide(state.recurrent.dtype))
    o, recurrent = ops.chunk(
        *(q, k, v, g, *more),
        scale=layer.scale,
        initial_state=initial,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        backend=layer.backend,
        max_seqlen=max_seqlen,
        **gate_options(layer),
    )
    mask = None
    if padded is not None:  # o has the padding of each row at its end, and the residual where the mask has it
        mask = padded.back
    elif cu_seqlens is not None and others:  # o is 0 outside the sequences, and the others are not
        mask = functools.partial(within, cu_seqlens=cu_seqlens)
    y = with_residual(output, residual, mask)(o, x, *others)
    return y, None if recurrent is None else GLAState(recurrent, convolve.after, position)


def read_tokens(
    layer: RecurrentLayer,
    op_inputs: OpInputs,
    output: Output,
    x: Tensor,
    state: GLAState,
    inplace: bool,
    slots: Tensor | None,
    residual: Tensor | None = None,
) -> tuple[Tensor, GLAState]:
    """Computes a layer's `step`.

    Args:
        op_inputs, output: as in `read_sequences`.

    The other arguments and the results are as in `Recurrent.step`.
    """
    if layer.context_parallel is not None:
        raise ValueError("step reads one token, which no ranks share; decode by a layer without context_parallel")
    dims: dict[str, Any] = {"hidden_size": layer.hidden_size}
    checks.tensor("x", x, "B hidden_size", dims)
    if slots is not None:  # checked before the op checks it, since the convolutions run first
        checks.tensor("slots", slots, "B", dims)
        checks.dtype("slots", slots, checks.INTEGERS)
    _check_state(layer, state, dims["B"] if slots is None else None)
    convolve = _Convolved(layer, state.conv and tuple(_rows(pool, slots) for pool in state.conv))
    x = x.unsqueeze(1)  # the layer's modules, which may have hooks, get sequences of one token
    inputs, ops = op_inputs(x, convolve), layer.ops
    (q, k, v, g, *more), others = inputs[: ops.tokens], inputs[ops.tokens :]
    before = None
    if layer.rotary_base is not None and state.position is not None:
        before = _rows(state.position, slots)
        q, k = rotated(q, k, before[:, None], layer.rotary_base)
    token = tuple(t if t is None or t.ndim == 1 else t.squeeze(1) for t in (q, k, v, g, *more))
    if layer.norms_heads and (is_compiling() or not transformed()):
        recurrent = state.recurrent if inplace else state.recurrent.clone()
        o: Any = Step(layer, token, recurrent, slots)
    else:
        args = (state.recurrent, layer.scale, slots, inplace)
        o, recurrent = ops.step(*token, *args, backend=layer.backend, **gate_options(layer))
        o = o.unsqueeze(1)
    conv, position = state.conv, state.position
    if conv is not None:
        pairs = zip(conv, convolve.after or (), strict=True)
        conv = tuple(_with_rows(pool, new, slots, inplace) for pool, new in pairs)
    if position is not None and before is not None:
        position = _with_rows(position, before + 1, slots, inplace)
    mask = None
    if others and slots is not None:  # o is 0 in skipped rows, and the others are not
        skipped = _skipped(slots, len(state.recurrent))[:, None, None]
        mask = functools.partial(torch.where, skipped, 0)
    residual = None if residual is None else residual.unsqueeze(1)
    y = with_residual(output, residual, mask)(o, x, *others).squeeze(1)
    return y, state if inplace else GLAState(recurrent, conv, position)


class Step(NamedTuple):
    """A decoding step that has not run, so that one op can compute it together with the norm of its output.

    Attributes:
        token: q [B, Hq, K], k [B, H, K], v [B, Hv, V], g, and the other tokens of the layer's ops.
        state: the states, which the step writes.
        slots: as in `Recurrent.step`.
    """

    layer: RecurrentLayer
    token: tuple[Tensor, ...]
    state: Tensor
    slots: Tensor | None

    def normed(self, norm: nn.Module, gate: Tensor | None) -> Tensor:
        """Runs the step, and returns its output [B, 1, Ho, V] after a norm and an output gate [B, 1, Ho, V]."""
        layer, slots, options = self.layer, self.slots, gate_options(self.layer)
        layer_step, options = layer.ops.layer_step, {**options, "backend": layer.backend}
        activation = norm.activation_in_op(gate) if isinstance(norm, RMSNormGated) else None
        q, weight = self.token[0], norm.weight if activation is not None else None
        fits = gate is None or gate.dtype == q.dtype
        fits = fits and (weight is None or (weight.dtype in (q.dtype, torch.float32) and not is_dtensor(q)))
        if activation is not None and layer_step is not None and fits:
            options |= {"norm_eps": norm.eps, "activation": activation}
            gate = None if gate is None else gate.squeeze(1)
            args = (self.state, gate, weight, layer.scale, slots)
            return layer_step(*self.token, *args, **options).unsqueeze(1)
        o, _ = layer.ops.step(*self.token, self.state, layer.scale, slots, True, **options)
        return norm(o.unsqueeze(1), gate)


def normed(o: Tensor | Step, norm: nn.Module, gate: Tensor | None) -> Tensor:
    """Returns the op's o [B, T, Ho, V], or that of a step that has not run, after a norm and an output gate."""
    return norm(o, gate) if isinstance(o, Tensor) else o.normed(norm, gate)


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

    def __call__(self, *projections: Tensor) -> tuple[Tensor, ...]:
        if not self.convolutions:
            return projections
        before = self.before or (None,) * len(projections)
        pairs = [
            convolution(y, history, self.places, self.lengths)
            for convolution, y, history in zip(self.convolutions, projections, before, strict=True)
        ]
        self.after = tuple(after for _, after in pairs)
        return tuple(y for y, _ in pairs)


def _refuse_over_ranks(layer: RecurrentLayer, **arguments: object) -> None:
    if layer.rotary_base is not None:
        raise ValueError(
            "context_parallel or shard is given, and the layer has a rotary embedding; expected neither: a rank does "
            "not know the positions of its tokens, so call the layer with whole sequences"
        )
    for name, value in arguments.items():
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
    n, expected = len(state.conv or ()), len(layer.convolution_widths)
    if n != expected:
        raise ValueError(
            f"state.conv has {n} tensors; expected {expected}, the inputs of each convolution of the layer: pass a "
            "state of this layer"
        )
    for i, (width, inputs) in enumerate(zip(layer.convolution_widths, state.conv or (), strict=True)):
        sizes = {"N": dims["N"], "conv_size-1": layer.conv_size - 1, "width": width}
        checks.tensor(f"state.conv[{i}]", inputs, "N conv_size-1 width", sizes)
    if (state.position is None) != (layer.rotary_base is None):
        passed, expected = ("None", "integers [N]") if state.position is None else ("given", "None")
        raise ValueError(f"state.position is {passed}; expected {expected}: pass a state of this layer")
    if state.position is not None:
        checks.tensor("state.position", state.position, "N", {"N": dims["N"]})
        checks.dtype("state.position", state.position, checks.INTEGERS)


# ---- rows of a pool


def _skipped(indices: Tensor, P: int) -> Tensor:
    """Returns whether each of these indices [B] is outside a pool of P states."""
    return (indices < 0) | (indices >= P)


def _rows(pool: Tensor, indices: Tensor | None) -> Tensor:
    """Returns the rows of a pool at these indices; for an index outside the pool it returns any row."""
    return pool if indices is None else pool.index_select(0, indices.clamp(0, len(pool) - 1))


def _with_rows(pool: Tensor, new: Tensor, indices: Tensor | None, inplace: bool) -> Tensor:
    """Returns the pool [P, ...] with rows new [B, ...] at the indices [B]; indices outside the pool are skipped.

    Without indices, new has all rows.
    """
    if indices is None:
        return pool.copy_(new) if inplace else new
    rows = pool if inplace else pool.clone()
    if not len(indices):
        return rows
    # A skipped row repeats the write of the first row that is not skipped. If all are skipped, it writes a row's old
    # value.
    skipped, new = _skipped(indices, len(rows)), new.to(rows.dtype)
    first = skipped.to(torch.uint8).argmin(0, keepdim=True)  # [1]; an index without dimensions would make the host wait
    places = torch.where(skipped, indices[first].clamp(0, len(rows) - 1), indices)
    ones = [1] * (new.ndim - 1)
    instead = torch.where(skipped[first].view(1, *ones), rows[places[first]], new[first])
    return rows.index_copy_(0, places.long(), torch.where(skipped.view(-1, *ones), instead, new))


# ---- checks of constructors' arguments


def check_computation(mode: str, backend: str | None) -> None:
    """Raises ValueError for an unknown mode, and the errors of `request.check` for an invalid backend."""
    check_known("mode", mode, MODES)
    if backend is not None:
        request.check(backend, "backend=")


def positive(**sizes: int) -> tuple[int, ...]:
    """Returns the sizes as ints; raises ValueError unless all are whole numbers, at least 1."""
    integers = tuple(checks.integer(size) for size in sizes.values())
    for name, size in zip(sizes, integers, strict=True):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; expected a whole number, at least 1")
    return integers


def head_width(name: str, expand: float, hidden_size: int, num_heads: int) -> int:
    """Returns hidden_size * expand / num_heads; raises ValueError unless it is a whole number."""
    total = whole_width(f"hidden_size * {name}", hidden_size * expand)
    if total % num_heads != 0:
        raise ValueError(f"hidden_size * {name} is {total}; expected a multiple of num_heads = {num_heads}")
    return total // num_heads


def whole_width(name: str, width: float) -> int:
    """Returns the width as an int; raises ValueError unless it is a whole number, at least 1."""
    if not math.isfinite(width) or round(width) < 1 or not math.isclose(width, round(width)):
        raise ValueError(f"{name} is {width}; expected a whole number, at least 1")
    return round(width)
