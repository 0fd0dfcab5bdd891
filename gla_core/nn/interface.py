"""The interface between recurrent layers and the code that they share, which knows no family of ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

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
"""Maps x [B, T, hidden_size] to q [B, T, Hq, K], k [B, T, H, K], v [B, T, Hv, V], g in one of its forms or None, and
the other tokens of the layer's ops. Further tensors [B, T, ..] may follow. They are arguments of `Output`.
"""
Output = Callable[..., Tensor]
"""Maps the op's o [B, T, Ho, V], x [B, T, hidden_size] and the tensors that follow the tokens to y [B, T, hidden_size].

If a residual is passed, it takes one by name."""


@dataclass(frozen=True)
class Ops:
    """The ops of a family. The first arguments of each are the tokens: q, k, v, g, and others that the family has.

    Attributes:
        tokens: number of the tokens' tensors.
        chunk: reads sequences, as `gla_core.chunk_gla` does.
        chunk_over_ranks: reads a rank's shard of sequences, as `gla_core.distributed.chunk_gla` does.
        step: reads one token of each sequence, and returns its output and the state after it.
        layer_step: a step and the norm of its output; None if the family has no such op.
    """

    tokens: int
    chunk: Callable[..., tuple[Any, Any]]
    chunk_over_ranks: Callable[..., tuple[Any, Any]]
    step: Callable[..., tuple[Tensor, Tensor]]
    layer_step: Callable[..., Tensor] | None

    def with_options(self, **options: Any) -> Ops:
        """Returns the ops of a family without a `layer_step`, called with these options."""
        chunk, chunk_over_ranks, step = (
            functools.partial(op, **options) for op in (self.chunk, self.chunk_over_ranks, self.step)
        )
        return replace(self, chunk=chunk, chunk_over_ranks=chunk_over_ranks, step=step)


class RecurrentLayer(Protocol):
    """The attributes of a layer that the functions of recurrence.py use.

    Attributes:
        ops: the ops of its family, or functions with their arguments that compute by them.
        state_shape: Hv, K and V.
        convolutions: the convolutions of its projections; empty if it has none. They may be wrapped in other modules.
        convolution_widths: the numbers of channels of the convolutions.
        scale: factor of the op's output; None for K^-1/2.
        rotary_base: base of the rotary embedding of q and k; None for none.
        gate_normalizer: None if g holds log gates; if g holds logits, the number by which log sigma is divided.
        neutral_gate: the g of a token whose gate is 1.
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
    def ops(self) -> Ops: ...

    @property
    def neutral_gate(self) -> float: ...

    @property
    def state_shape(self) -> tuple[int, int, int]: ...

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]: ...

    @property
    def convolution_widths(self) -> tuple[int, ...]: ...

    def _functions(self) -> tuple[OpInputs, Output]: ...

    def parameters(self) -> Iterable[Tensor]: ...
