"""Holds what all recurrent layers share: `forward`, `step` and the states before the first token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch.tensors import wide
from gla_core.nn import recurrence
from gla_core.nn._typed_call import as_typed
from gla_core.nn.interface import OpInputs, Output, RecurrentLayer
from gla_core.nn.recurrence import GLAState
from gla_core.ops import checks
from gla_core.ops.deprecated import renamed

if TYPE_CHECKING:
    from gla_core.distributed import Shard


class Recurrent(nn.Module):
    """A layer that reads sequences, and then single tokens. Subclasses have the attributes of a `RecurrentLayer`."""

    scale: float | None = None
    rotary_base: float | None = None
    gate_normalizer: int | None = None
    norms_heads: bool = False

    @property
    def neutral_gate(self) -> float:
        """Returns the log gate, or the logit, of a gate of 1."""
        return 0.0 if self.gate_normalizer is None else math.inf

    def _functions(self) -> tuple[OpInputs, Output]:
        """Returns the functions of one call: from x to the inputs of the op, and from its output to y."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Sets every parameter to its initial value, as the constructor does; for example after `to_empty`."""
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def forward(
        self: RecurrentLayer,
        x: Tensor,
        state: GLAState | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        *,
        shard: Shard | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, GLAState | Any]:
        """Reads whole sequences, for training and prefill. The call is differentiable, also through the states.

        Args:
            x: [B, T, hidden_size], dtype as the parameters (any dtype under torch.autocast).
            state: states of the N sequences before their first token in x; zeros by default.
            output_final_state: whether to return the state after the last tokens too.
            cu_seqlens: [N+1] int32 or int64 on x's device, with B = 1: sequence i is the rows cu_seqlens[i] to
                cu_seqlens[i+1]. Sequences may be empty. Rows outside all sequences are padding: their y is 0. Without
                cu_seqlens N = B.
            max_seqlen: number of tokens of the longest packed sequence, if known; see `chunk_gla`.
            attention_mask: [B, T], 0 where x is padding. If it has more columns, the last T are used. Padding may be in
                front of the tokens of a sequence, behind them or between them. The y of padding is 0, and padding does
                not change the state.
            shard: the value that `gla_core.distributed.shard` returned for this batch, in place of cu_seqlens. All
                layers of a model share it, and T is the number of this rank's tokens. With context_parallel and without
                a shard, every layer makes a contiguous one, and cu_seqlens are offsets in the row of all ranks' tokens.
                With either, state, output_final_state and attention_mask are not allowed. With a shard, max_seqlen is
                not used: the shard has its own.
            residual: [B, T, hidden_size], added to y. Without gradients, y may be written into it.

        Returns:
            y [B, T, hidden_size] with x's dtype (under torch.autocast, autocast's dtype), and the state (None unless
            output_final_state).

        Raises:
            ValueError, TypeError: an argument has a wrong shape or dtype, or two arguments exclude each other.
            NoBackendError, UnknownBackendError: no backend can serve the request in `backend`.
        """
        args = (x, state, output_final_state, cu_seqlens, max_seqlen, attention_mask, shard, residual)
        return recurrence.read_sequences(self, *self._functions(), *args)

    if TYPE_CHECKING:

        @as_typed(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @torch.no_grad()
    def step(
        self: RecurrentLayer,
        x: Tensor,
        state: GLAState,
        inplace: bool = False,
        slots: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        state_indices: Tensor | None = None,
    ) -> tuple[Tensor, GLAState]:
        """Reads one token of each sequence, for decoding. Runs under torch.no_grad(), since its op has no backward.

        Under FSDP2 call `torch.distributed.fsdp.register_fsdp_forward_method(layer, "step")` first.

        Args:
            x: [B, hidden_size], as in `forward`.
            state: states of the B sequences, from `forward`, `step` or `initial_state`; with `slots` a pool of states.
            inplace: whether to write the new states into `state` instead of returning new tensors.
            slots: [B] int32 or int64, the slot of the pool that each row of the batch reads and writes. No
                two rows may have the same state. A row with a negative slot is skipped: its y is 0.
            residual: [B, hidden_size], added to y. y may be written into it.
            state_indices: the deprecated name of `slots`.

        Returns:
            y [B, hidden_size] as in `forward`, and the new state. With `inplace` this is `state` itself; otherwise
            `state` is not changed.

        Raises:
            ValueError, TypeError, NoBackendError, UnknownBackendError: as in `forward`.
        """
        if state_indices is not None:
            slots = renamed("step", "state_indices", "slots", state_indices, slots, wrapped=True)
        return recurrence.read_tokens(self, *self._functions(), x, state, inplace, slots, residual)

    def initial_state(self: RecurrentLayer, batch_size: int, device: Device = None) -> GLAState:
        """Returns the state before the first token of `batch_size` sequences: zeros.

        Args:
            batch_size: N.
            device: device of x; by default the device of the layer's first floating-point parameter.
        """
        like = next(
            (p for p in self.parameters() if p.dtype in checks.FLOATS),
            torch.empty(0, device=torch.get_default_device()),
        )
        device = like.device if device is None else device
        recurrent = torch.zeros(batch_size, *self.state_shape, device=device, dtype=wide(like.dtype))
        sizes = ((batch_size, self.conv_size - 1, width) for width in self.convolution_widths)
        conv = tuple(torch.zeros(size, device=device, dtype=like.dtype) for size in sizes)
        position = None if self.rotary_base is None else torch.zeros(batch_size, device=device, dtype=torch.int64)
        return GLAState(recurrent, conv or None, position)
