"""A causal convolution of each channel over the last W tokens: y_t = f(bias + sum_i w_i x_{t-W+1+i}), with f = silu.

The history of a sequence is the W - 1 inputs before its first token, zeros if there are none. In a packed batch, room
for its history is inserted in front of every sequence,

    x           a0 a1 a2 b0 c0 c1                            T tokens of N sequences, W = 3
    with room   .. .. .. .. a0 a1 a2 .. .. b0 .. .. c0 c1    T + (N + 1) (W - 1) rows

so that one convolution over the row reads the right inputs everywhere. The first room is for rows in front of the first
sequence. These rows belong to no sequence, like the rows behind the last one. The positions are computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch.tensors import wide
from gla_core.nn._typed_call import as_typed
from gla_core.nn.activations import ACTIVATIONS, Activation
from gla_core.nn.activations import activation as activation_of
from gla_core.nn.recompute import recomputed


class Packing(NamedTuple):
    """Positions of the rows of a packed batch once every sequence has room for its history.

    Attributes:
        tokens: [T], the row of each token.
        histories: [N, W - 1], the rows of each sequence's history.
        last: [N, W - 1], the rows of each sequence's last W - 1 inputs. For a short sequence these include rows of its
            history.
    """

    tokens: Tensor
    histories: Tensor
    last: Tensor


def packing(cu_seqlens: Tensor, T: int, W: int) -> Packing:
    """Returns the `Packing` of T tokens with offsets cu_seqlens [N+1], for a convolution of width W.

    Wrong offsets never give a position outside the rows; the op that follows reports them.
    """
    offsets = cu_seqlens.long().clamp(0, T)
    N, room = offsets.shape[0] - 1, W - 1
    tokens = torch.arange(T, device=offsets.device)
    begun = torch.searchsorted(offsets[:-1], tokens, right=True)  # [T], sequences that begin at or before a token
    rooms = torch.arange(room, (N + 1) * room, device=offsets.device).view(N, room)
    return Packing(tokens + (begun + 1) * room, offsets[:-1, None] + rooms, offsets[1:, None] + rooms)


def _last(rows: Tensor, room: int, lengths: Tensor | None) -> Tensor:
    """Returns the last inputs [B, room, D] of rows [B, room + T, D]; the first room + lengths [B] rows are inputs."""
    if lengths is None:
        return rows[:, rows.shape[1] - room :].clone()  # a view would keep all rows in memory
    places = lengths[:, None] + torch.arange(room, device=rows.device)  # [B, room]
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[2]))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution followed by an activation.

    Args:
        width: number of channels D.
        kernel_size: number W of tokens that an output depends on.
        bias: whether there is a `bias` [D] beside the `weight` [D, 1, W] (laid out as in `nn.Conv1d`).
        activation: a name or a function, see `activations`; None for none.
        device: device of the parameters, as in torch's own modules.
        dtype: dtype of the parameters.

    Attributes:
        kernel: a differentiable function (x [B, D, T], weight [D, W], bias, name of the activation or None) that
            computes y [B, D, T] without a history in less time than PyTorch. For the backward it keeps its arguments
            alone. It returns None for a call that PyTorch is to compute. None if there is no function.

    Example:
        >>> convolution = ShortConvolution(512, 4)
        >>> y, history = convolution(torch.randn(2, 100, 512))
        >>> y1, history = convolution(torch.randn(2, 1, 512), history)
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | Activation | None = "silu",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.kernel_size = width, kernel_size
        self.activation = None if activation is None else activation_of("activation", activation)
        self.kernel: Callable[[Tensor, Tensor, Tensor | None, str | None], Tensor | None] | None = None
        self.weight = nn.Parameter(torch.empty(width, 1, kernel_size, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters uniformly from +-W^-1/2, as `nn.Conv1d` does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.kernel_size**-0.5), self.kernel_size**-0.5)

    def forward(
        self, x: Tensor, history: Tensor | None = None, packing: Packing | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolves x.

        Args:
            x: [B, T, D].
            history: [N, W - 1, D], the inputs before x; N = B unless x is packed. Zeros by default.
            packing: the positions of the rows of a packed x (B = 1); see `packing`.
            lengths: [B], number of tokens of each sequence; T by default. The tokens come first, then padding. The new
                history ends with the last token.

        Returns:
            y [B, T, D], computed in float32 (float64 with float64 inputs), and the new history [N, W - 1, D]. Both have
            x's dtype.
        """
        N = x.shape[0] if packing is None else packing.histories.shape[0]
        room, T = self.kernel_size - 1, x.shape[1]
        if self.kernel is not None and history is None and packing is None and lengths is None and room <= T:
            y = self._by_kernel(x)
            if y is not None:
                return y, x[:, T - room :].clone()
        history = x.new_zeros(N, room, self.width) if history is None else history.to(x.dtype)
        if packing is None:
            rows = torch.cat([history, x], dim=1)
            return self._convolve(rows), _last(rows, room, lengths)
        order = torch.cat([packing.histories.flatten(), packing.tokens])
        rows = torch.cat([history.flatten(0, 1), x[0]])
        rows = rows.new_zeros(room + rows.shape[0], self.width).index_copy(0, order, rows)  # [T + (N + 1) (W - 1), D]
        y = self._convolve(rows[None]).index_select(1, packing.tokens - room)
        return y, rows[packing.last]

    if TYPE_CHECKING:

        @as_typed(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _convolve(self, rows: Tensor) -> Tensor:
        """Maps rows [B, n + W - 1, D] to y [B, n, D]."""
        y = self._by_kernel(rows)
        if y is not None:
            return y[:, self.kernel_size - 1 :]
        weights = self.weight, self.bias
        if self.activation is None or self.activation in ACTIVATIONS.values():  # it has no parameters
            return recomputed(self._computed, rows, *weights, weights=weights)
        return self._computed(rows, *weights)

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Returns y [B, T, D] of x [B, T, D] without a history; None if there is no kernel for it."""
        if self.kernel is None or self.activation not in (None, F.silu):
            return None
        activation = None if self.activation is None else "silu"
        y = self.kernel(x.mT, self.weight.squeeze(1), self.bias, activation)
        return None if y is None else y.mT

    def _computed(self, rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        dtype = wide(rows.dtype)
        n = rows.shape[1] - self.kernel_size + 1
        x = rows.to(dtype)
        y = x.new_zeros(()) if bias is None else bias.to(dtype)
        for i, weight in enumerate(weights.to(dtype).unbind(-1)):  # weight [D, 1] of the input W-1-i tokens back
            y = torch.addcmul(y, x[:, i : i + n], weight[:, 0])
        return (y if self.activation is None else self.activation(y)).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, kernel_size={self.kernel_size}, bias={self.bias is not None}"
