"""The HGRN2 layer: gated linear attention with keys 1 - alpha, where alpha is the forget gate. For an input x:

    q = silu(x W_q)        f = x W_f        v = x W_i        each, if asked for, through a short convolution first
    alpha = c + (1 - c) sigmoid(f)                           the forget gate, with a lower bound c if there is one
    o = chunk_gla(q, 1 - alpha, v, log alpha)                per head
    y = rms_norm(o) W_o                                      over all heads

Source: Qin et al., "HGRN2: Gated Linear RNNs with State Expansion" (arXiv 2404.07904). The parameters have the names
and shapes of flash-linear-attention's layer, so weights move between the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch.tensors import wide
from gla_core.nn import recurrence
from gla_core.nn._typed_call import as_typed
from gla_core.nn.families import GATED_LINEAR_ATTENTION
from gla_core.nn.interface import Convolve, OpInputs, Output
from gla_core.nn.layer import Recurrent
from gla_core.nn.merged import Merging, added, products
from gla_core.nn.recompute import not_kept, recomputed
from gla_core.nn.recurrence import GLAState, check_computation, positive
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.short_convolution import ShortConvolution
from gla_core.ops.deprecated import renamed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from gla_core.distributed import Shard


class HGRN2(Recurrent, Merging):
    """HGRN2 as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    Args:
        hidden_size: width of the input and the output, and of the values of all heads together.
        num_heads: number of heads; hidden_size / expand_ratio by default.
        expand_ratio: key width of a head; 128 by default, or hidden_size / num_heads if num_heads is given.
        use_short_conv: whether to send q, f and v through a causal convolution over the last conv_size tokens.
        conv_size: number of tokens that an output of the convolution depends on.
        conv_bias: whether the convolutions have a bias.
        elementwise_affine: whether the norm has a weight.
        norm_eps: number added to the mean square in the norm. flash-linear-attention 0.6.0 ignores its own norm_eps and
            uses 1e-5.
        backend: a request for every op of the layer, such as "reference"; see `gla_core.use_backend`.
        device: device of the parameters, as in torch's own modules.
        dtype: dtype of the parameters.
        mode: as in `GatedLinearAttention`.
        layer_idx: as in `GatedLinearAttention`.
        context_parallel: as in `GatedLinearAttention`.

    Attributes:
        kernel: a function (q, f, lower_bound) that computes silu(q), 1 - alpha and log alpha in less time than PyTorch,
            the last one in float32, and their gradients. It returns None for a call that PyTorch is to compute. None if
            there is no function.

    Raises:
        ValueError: sizes do not fit together, or a mode is not known.
        ValueError, UnknownOpError, UnknownBackendError: `backend` cannot be parsed, or names an unknown op or backend.

    Example:
        >>> layer = gla.nn.HGRN2(hidden_size=256, expand_ratio=64)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    ops = GATED_LINEAR_ATTENTION

    def __init__(
        self,
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mode: str = "chunk",
        layer_idx: int | None = None,
        context_parallel: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        hidden_size, conv_size = positive(hidden_size=hidden_size, conv_size=conv_size)
        if num_heads is not None:
            (num_heads,) = positive(num_heads=num_heads)
        if expand_ratio is None:
            expand_ratio = 128 if num_heads is None else hidden_size // num_heads
        (expand_ratio,) = positive(expand_ratio=expand_ratio)
        (num_heads,) = positive(num_heads=hidden_size // expand_ratio if num_heads is None else num_heads)
        if hidden_size % num_heads != 0:
            raise ValueError(f"hidden_size is {hidden_size}; expected a multiple of num_heads = {num_heads}")
        check_computation(mode, backend)
        self.hidden_size, self.num_heads, self.expand_ratio = hidden_size, num_heads, expand_ratio
        self.head_v_dim = hidden_size // num_heads
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.backend, self.mode, self.layer_idx = backend, mode, layer_idx
        self.context_parallel = context_parallel
        self.kernel: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor] | None] | None = None

        forget_dim = num_heads * expand_ratio
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, forget_dim, bias=False, **where)
        self.f_proj = nn.Linear(hidden_size, forget_dim, bias=False, **where)
        self.i_proj = nn.Linear(hidden_size, hidden_size, bias=False, **where)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(forget_dim, conv_size, conv_bias, None, **where)
            self.f_conv1d = ShortConvolution(forget_dim, conv_size, conv_bias, None, **where)
            self.i_conv1d = ShortConvolution(hidden_size, conv_size, conv_bias, None, **where)
        self.g_norm = RMSNormGated(hidden_size, norm_eps, elementwise_affine, **where)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False, **where)
        self.merge()

    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        lower_bound: Tensor | None = None,
        *,
        shard: Shard | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, GLAState | Any]:
        """Reads whole sequences, for training and prefill.

        The call is differentiable, also through the states and the lower bound.

        Args:
            lower_bound: c, [num_heads * expand_ratio] or a single number, from 0 to below 1; 0 by default.

        The other arguments, the results and the errors are as in `GatedLinearAttention.forward`.
        """
        args = (x, state, output_final_state, cu_seqlens, max_seqlen, attention_mask, shard, residual)
        return recurrence.read_sequences(self, *self._functions(lower_bound), *args)

    if TYPE_CHECKING:

        @as_typed(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        state: GLAState,
        inplace: bool = False,
        slots: Tensor | None = None,
        lower_bound: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        state_indices: Tensor | None = None,
    ) -> tuple[Tensor, GLAState]:
        """Reads one token of each sequence, as `GatedLinearAttention.step` does; lower_bound is as in `forward`."""
        if state_indices is not None:
            slots = renamed("step", "state_indices", "slots", state_indices, slots, wrapped=True)
        return recurrence.read_tokens(self, *self._functions(lower_bound), x, state, inplace, slots, residual)

    @torch.no_grad()
    def step_from_projections(
        self,
        x: Tensor,
        made: Sequence[Tensor],
        state: GLAState,
        inplace: bool = False,
        slots: Tensor | None = None,
        lower_bound: Tensor | None = None,
    ) -> tuple[Tensor, GLAState]:
        """Computes what `step` computes between its products, up to the norm, for callers that compute the products.

        Args:
            x: as in `step`. Only its shape, dtype and device matter.
            made: the projections of q, f and v, each [B, 1, width].

        Returns:
            o [B, hidden_size], the input of `g_norm`, and the new state. Other arguments and the errors are as in
            `step`.
        """

        def op_inputs(_x: Tensor, convolve: Convolve) -> tuple[Tensor, ...]:
            return self._op_inputs(made, convolve, lower_bound)

        return recurrence.read_tokens(self, op_inputs, lambda o, _x: o.flatten(-2), x, state, inplace, slots)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Returns H, K and V, the sizes of the recurrent state of a sequence."""
        return self.num_heads, self.expand_ratio, self.head_v_dim

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]:
        """Returns the convolutions of q, f and v; empty without use_short_conv."""
        return (self.q_conv1d, self.f_conv1d, self.i_conv1d) if self.use_short_conv else ()

    @property
    def convolution_widths(self) -> tuple[int, ...]:
        """Returns the numbers of channels of q, f and v, which the convolutions have; empty without use_short_conv."""
        forget_dim = self.num_heads * self.expand_ratio
        return (forget_dim, forget_dim, self.num_heads * self.head_v_dim) if self.use_short_conv else ()

    def merged_layers(self) -> Sequence[Sequence[nn.Module]]:
        """Returns the projections of x, those of q, f and v."""
        return [[self.q_proj, self.f_proj, self.i_proj]]

    def _functions(self, lower_bound: Tensor | None = None) -> tuple[OpInputs, Output]:
        return functools.partial(self.op_inputs, lower_bound=lower_bound), self._output

    def op_inputs(
        self, x: Tensor, convolve: Convolve, lower_bound: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Maps x [B, T, hidden_size] to q, k [B, T, H, K], v [B, T, H, V] and g [B, T, H, K]."""
        (layers,) = self.merged_layers()
        projections = products(layers, x)
        if projections is None:
            with not_kept(x):
                projections = [layer(x) for layer in layers]
        return self._op_inputs(projections, convolve, lower_bound)

    def _op_inputs(
        self, made: Sequence[Tensor], convolve: Convolve, lower_bound: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes `op_inputs` from the projections of q, f and v."""
        q, f, v = convolve(*made)
        q, k, g = (y.unflatten(-1, (self.num_heads, -1)) for y in self._gated(q, f, lower_bound, v.dtype))
        return q, k, v.unflatten(-1, (self.num_heads, -1)), g

    def _gated(
        self, q: Tensor, f: Tensor, lower_bound: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns silu(q), 1 - alpha in `dtype`, and log alpha; `kernel` computes them if it can."""
        gated = self.kernel(q, f, lower_bound) if self.kernel is not None and f.dtype == dtype else None
        if gated is not None:
            return gated
        g = recomputed(log_gate, f, lower_bound)
        return F.silu(q), recomputed(_key, g).to(dtype), g

    def _output(self, o: Tensor, _x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps o [B, T, H, V] to y [B, T, hidden_size], plus the residual if there is one."""
        o = self.g_norm(o.flatten(-2))
        with not_kept(o):
            return self.o_proj(o) if residual is None else added(residual, self.o_proj, o)


def _key(g: Tensor) -> Tensor:
    return -g.expm1()


def log_gate(f: Tensor, lower_bound: Tensor | None) -> Tensor:
    """Returns the log gate in float32 or float64, because half precision rounds values near 0 to 0."""
    g = F.logsigmoid(f.to(wide(f.dtype)))
    if lower_bound is None:
        return g
    c = lower_bound.to(g.dtype)
    least = torch.finfo(g.dtype).tiny  # the log of a bound of 0 has no gradient
    return torch.logaddexp(c.clamp(min=least).log(), torch.log1p(-c) + g)
