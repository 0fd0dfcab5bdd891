"""Types of the interface between recurrent layers and the code that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from gla_core.nn.short_convolution import ShortConvolution

Histories = tuple[Tensor, Tensor, Tensor]
"""The last inputs of a layer's three convolutions, each [N, conv_size - 1, width]."""
Convolve = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Sends three projections [B, T, width] of x through a layer's convolutions; returns them unchanged if it has none."""
OpInputs = Callable[[Tensor, Convolve], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Maps x [B, T, hidden_size] to q [B, T, Hq, K], k [B, T, H, K], v [B, T, H, V] and g [B, T, H, K]."""
Output = Callable[[Tensor, Tensor], Tensor]
"""Maps the op's o [..., Hq, V] and x [..., hidden_size] to y [..., hidden_size]."""


class RecurrentLayer(Protocol):
    """The attributes of a layer that the functions of recurrence.py use.

    Attributes:
        state_shape: H, K and V.
        convolutions: the convolutions of its three projections; empty if it has none.
    """

    hidden_size: int
    conv_size: int
    backend: str | None
    context_parallel: ProcessGroup | DeviceMesh | None

    @property
    def state_shape(self) -> tuple[int, int, int]: ...

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]: ...

    def parameters(self) -> Iterable[Tensor]: ...
