"""Types of the interface between recurrent layers and the code that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from gla_core.nn.short_convolution import ShortConvolution

Histories = tuple[Tensor, ...]
"""The last inputs of a layer's convolutions, each [N, conv_size - 1, width]."""
Convolve = Callable[..., tuple[Tensor, ...]]
"""Sends one projection [B, T, width] of x through each convolution; returns them unchanged if there is none."""
OpInputs = Callable[[Tensor, Convolve], tuple[Tensor, ...]]
"""Maps x [B, T, hidden_size] to q [B, T, Hq, K], k [B, T, H, K], v [B, T, Hv, V] and g in one of its forms.

Further tensors [B, T, ..] may follow g. They are arguments of `Output`.
"""
Output = Callable[..., Tensor]
"""Maps the op's o [B, T, Ho, V], x [B, T, hidden_size] and the tensors that follow g to y [B, T, hidden_size]."""


class RecurrentLayer(Protocol):
    """The attributes of a layer that the functions of recurrence.py use.

    Attributes:
        state_shape: Hv, K and V.
        convolutions: the convolutions of its projections; empty if it has none. They may be wrapped in other modules.
        convolution_widths: the numbers of channels of the convolutions.
        scale: factor of the op's output; None for K^-1/2.
        rotary_base: base of the rotary embedding of q and k; None for none.
        gate_normalizer: None if g holds log gates; if g holds logits, the number by which log sigma is divided.
        norms_heads: whether its `Output` passes o to `recurrence.normed`, and therefore takes a `Step` in place of o.
    """

    hidden_size: int
    conv_size: int
    backend: str | None
    scale: float | None
    rotary_base: float | None
    gate_normalizer: int | None
    norms_heads: bool
    context_parallel: ProcessGroup | DeviceMesh | None

    @property
    def state_shape(self) -> tuple[int, int, int]: ...

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]: ...

    @property
    def convolution_widths(self) -> tuple[int, ...]: ...

    def parameters(self) -> Iterable[Tensor]: ...
