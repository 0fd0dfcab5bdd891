"""The gated linear attention layer. For an input x, with sigma the logistic function:

    q = x W_q        k = x W_k        v = x W_v              each, if asked for, through a short convolution and silu
    g = log sigma(x W_1 W_2 + b) / normalizer                the log of the forget gate, of low rank
    o = chunk_gla(q, k, v, g)                                per head
    y = (rms_norm(o) * silu(x W_g)) W_o

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635). The
parameters have the names and shapes of those of flash-linear-attention's layer, so weights move between the two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch import request
from gla_core.nn._typed_call import as_typed
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.short_convolution import ShortConvolution, packing
from gla_core.ops import _checks
from gla_core.ops.chunk_gla import chunk_gla
from gla_core.ops.recurrent_gla_step import recurrent_gla_step


class GLAState(NamedTuple):
    """What a `GatedLinearAttention` remembers of N sequences.

    Attributes:
        recurrent: [N, H, K, V] float32 (float64 with float64), the state of each key/value head.
        conv: the last conv_size - 1 inputs of the convolutions of q, k and v, each [N, conv_size - 1, width]; None
            for a layer without convolutions.
    """

    recurrent: Tensor
    conv: tuple[Tensor, Tensor, Tensor] | None = None


torch.serialization.add_safe_globals([GLAState])  # so that torch.load reads it with weights_only=True, its default


class GatedLinearAttention(nn.Module):
    """Gated linear attention as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    Args:
        hidden_size: width of the input and the output.
        expand_k: width of all keys together, as a multiple of hidden_size.
        expand_v: width of all values together, as a multiple of hidden_size.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads, which is the default. Query head i reads
            key/value head i // (num_heads // num_kv_heads).
        use_short_conv: send q, k and v through a causal convolution over the last conv_size tokens, and silu.
        conv_size: tokens that an output of the convolution sees.
        conv_bias: give the convolutions a bias.
        use_output_gate: multiply the normed output by silu(x W_g).
        elementwise_affine: give the norm a weight.
        norm_eps: added to the mean square in the norm.
        gate_logit_normalizer: divides the log of the forget gate; the greater, the slower the decay.
        gate_low_rank_dim: rank of the projection that makes the forget gate.
        clamp_min: least value of the log gate after that division, at most 0; None for no bound.
        backend: a request handed to every op, such as "reference"; see `gla_core.use_backend`.
        device, dtype: of the parameters, as in torch's own modules.

    Raises:
        ValueError: sizes that do not fit together.
        ValueError, UnknownOpError, UnknownBackendError: `backend` cannot be read or met.

    Example:
        >>> layer = gla.nn.GatedLinearAttention(hidden_size=256, num_heads=4)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_positive(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            conv_size=conv_size,
            gate_low_rank_dim=gate_low_rank_dim,
        )
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_heads is {num_heads}; expected a multiple of num_kv_heads = {num_kv_heads}")
        if not gate_logit_normalizer > 0:
            raise ValueError(f"gate_logit_normalizer is {gate_logit_normalizer}; expected a number above 0")
        if clamp_min is not None and not clamp_min <= 0:
            raise ValueError(f"clamp_min is {clamp_min}; expected at most 0: it bounds the log of a forget gate")
        if backend is not None:
            request.check(backend, "backend=")

        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_k_dim = _head_width("expand_k", expand_k, hidden_size, num_heads)
        self.head_v_dim = _head_width("expand_v", expand_v, hidden_size, num_heads)
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.use_output_gate = use_output_gate
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min
        self.backend = backend

        key_dim, value_dim = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        kv_key_dim, kv_value_dim = num_kv_heads * self.head_k_dim, num_kv_heads * self.head_v_dim
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False, **where)
        self.k_proj = nn.Linear(hidden_size, kv_key_dim, bias=False, **where)
        self.v_proj = nn.Linear(hidden_size, kv_value_dim, bias=False, **where)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(key_dim, conv_size, conv_bias, **where)
            self.k_conv1d = ShortConvolution(kv_key_dim, conv_size, conv_bias, **where)
            self.v_conv1d = ShortConvolution(kv_value_dim, conv_size, conv_bias, **where)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False, **where),
            nn.Linear(gate_low_rank_dim, kv_key_dim, **where),
        )
        norm = RMSNormGated(self.head_v_dim, norm_eps, elementwise_affine, **where)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, value_dim, bias=False, **where)
            self.g_norm_swish_gate = norm
        else:
            self.g_norm = norm
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False, **where)

    def reset_parameters(self) -> None:
        """Set every parameter as the constructor does, such as after `to_empty`."""
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    @overload
    def forward(
        self,
        x: Tensor,
        state: GLAState | None,
        output_final_state: Literal[True],
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, GLAState]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        *,
        output_final_state: Literal[True],
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, GLAState]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, GLAState | None]: ...

    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, GLAState | None]:
        """Read whole sequences: training and prefill. Differentiable, through the states too.

        Args:
            x: [B, T, hidden_size], of the parameters' dtype (under torch.autocast, of any).
            state: of the N sequences before their first token here; zeros by default.
            output_final_state: also return the state after the last tokens.
            cu_seqlens: [N+1] int32 or int64 on x's device, B = 1: sequence i is rows cu_seqlens[i] to cu_seqlens[i+1].
                Empty sequences are legal. Rows outside all sequences are padding: their y is 0. Without it N = B.
            max_seqlen: tokens of the longest packed sequence, where they are known; see `chunk_gla`.

        Returns:
            y [B, T, hidden_size] as x (under torch.autocast, of its dtype), and the state (None unless asked for).

        Raises:
            ValueError, TypeError: an argument of a wrong shape or dtype.
            NoBackendError, UnknownBackendError: nobody can serve the request in `backend`.
        """
        dims: dict[str, Any] = {"hidden_size": self.hidden_size}
        _checks.tensor("x", x, "B T hidden_size", dims)
        dims["N"] = dims["B"]
        if cu_seqlens is not None:  # here and not only in the op, for the convolutions come before it
            _checks.tensor("cu_seqlens", cu_seqlens, "N+1", dims)
            _checks.dtype("cu_seqlens", cu_seqlens, _checks.INTEGERS)
            _checks.packed(dims, of="x")
        if state is not None:
            self._check_state(state, dims["N"])
        q, k, v, g, conv = self._op_inputs(x, None if state is None else state.conv, cu_seqlens)
        # Half precision, which FSDP2's mixed precision makes of every input, is widened.
        initial = None if state is None else state.recurrent.to(_at_least_float32(state.recurrent))
        o, recurrent = chunk_gla(
            q,
            k,
            v,
            g,
            initial_state=initial,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            max_seqlen=max_seqlen,
        )
        return self._output(o, x), None if recurrent is None else GLAState(recurrent, conv)

    if TYPE_CHECKING:

        @as_typed(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @torch.no_grad()
    def step(self, x: Tensor, state: GLAState) -> tuple[Tensor, GLAState]:
        """Read one token of each sequence: decoding. Runs under torch.no_grad(), as its op has no backward.

        Under FSDP2 call `torch.distributed.fsdp.register_fsdp_forward_method(layer, "step")` first.

        Args:
            x: [B, hidden_size], as in `forward`.
            state: of the B sequences, from `forward`, `step` or `initial_state`.

        Returns:
            y [B, hidden_size] as in `forward`, and the new state; the state given is left alone.

        Raises:
            As `forward`.
        """
        dims: dict[str, Any] = {"hidden_size": self.hidden_size}
        _checks.tensor("x", x, "B hidden_size", dims)
        self._check_state(state, dims["B"])
        q, k, v, g, conv = self._op_inputs(x[:, None], state.conv)
        q, k, v, g = (t[:, 0] for t in (q, k, v, g))
        o, recurrent = recurrent_gla_step(q, k, v, g, state.recurrent, backend=self.backend)
        return self._output(o, x), GLAState(recurrent, conv)

    def initial_state(self, batch_size: int, device: Device = None) -> GLAState:
        """The state before the first token of `batch_size` sequences: zeros.

        Args:
            batch_size: N.
            device: where x will be; by default the device of the layer's first floating-point parameter.
        """
        like = next((p for p in self.parameters() if p.dtype in _checks.FLOATS), torch.empty(0))
        device = like.device if device is None else device
        recurrent = torch.zeros(batch_size, *self._state_shape(), device=device, dtype=_checks.wide(like.dtype))
        if not self.use_short_conv:
            return GLAState(recurrent)
        widths = (convolution.width for convolution in self._convolutions())
        q, k, v = (torch.zeros(batch_size, self.conv_size - 1, w, device=device, dtype=like.dtype) for w in widths)
        return GLAState(recurrent, (q, k, v))

    def _op_inputs(
        self, x: Tensor, conv: tuple[Tensor, Tensor, Tensor] | None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """From x [B, T, hidden_size] to q [B, T, Hq, K], k and g [B, T, H, K], v [B, T, H, V], and the new `conv`."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.use_short_conv:
            places = None if cu_seqlens is None else packing(cu_seqlens, x.shape[1], self.conv_size)
            before_q, before_k, before_v = (None, None, None) if conv is None else conv
            q, after_q = self.q_conv1d(q, before_q, places)
            k, after_k = self.k_conv1d(k, before_k, places)
            v, after_v = self.v_conv1d(v, before_v, places)
            conv = (after_q, after_k, after_v)
        g = self._log_gate(x)
        key_heads, value_heads = (self.num_kv_heads, self.head_k_dim), (self.num_kv_heads, self.head_v_dim)
        q = q.unflatten(-1, (self.num_heads, self.head_k_dim))
        return q, k.unflatten(-1, key_heads), v.unflatten(-1, value_heads), g.unflatten(-1, key_heads), conv

    def _log_gate(self, x: Tensor) -> Tensor:
        """The log of the forget gate, in float32 (float64 with float64): half precision loses what is near 0."""
        logits = self.gk_proj(x)
        logits = logits.to(_at_least_float32(logits))
        g = F.logsigmoid(logits) / self.gate_logit_normalizer
        return g if self.clamp_min is None else g.clamp(min=self.clamp_min)

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        """From o [..., Hq, V] and x [..., hidden_size] to y [..., hidden_size]."""
        if self.use_output_gate:
            gate = self.g_proj(x).unflatten(-1, (self.num_heads, self.head_v_dim))
            o = self.g_norm_swish_gate(o, gate)
        else:
            o = self.g_norm(o)
        return self.o_proj(o.flatten(-2))

    def _convolutions(self) -> tuple[ShortConvolution, ShortConvolution, ShortConvolution]:
        return self.q_conv1d, self.k_conv1d, self.v_conv1d

    def _state_shape(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.head_k_dim, self.head_v_dim

    def _check_state(self, state: GLAState, N: int) -> None:
        if not isinstance(state, GLAState):
            raise TypeError(f"state is {type(state).__name__}; expected a GLAState, as this layer returns")
        dims = dict(zip("NHKV", (N, *self._state_shape()), strict=True))
        _checks.tensor("state.recurrent", state.recurrent, "N H K V", dims)
        if (state.conv is not None) != self.use_short_conv:
            has, expected = ("none", "some") if self.use_short_conv else ("some", "none")
            raise ValueError(
                f"state.conv holds {has} of the convolutions' inputs; expected {expected}, as use_short_conv is "
                f"{self.use_short_conv}: pass a state of this layer"
            )
        if state.conv is not None:
            for name, convolution, inputs in zip("qkv", self._convolutions(), state.conv, strict=True):
                dims = {"N": N, "conv_size-1": self.conv_size - 1, "width": convolution.width}
                _checks.tensor(f"state.conv of {name}", inputs, "N conv_size-1 width", dims)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; expected a whole number, at least 1")


def _head_width(name: str, expand: float, hidden_size: int, num_heads: int) -> int:
    """hidden_size * expand / num_heads."""
    total = hidden_size * expand
    if not math.isfinite(total) or round(total) < 1 or not math.isclose(total, round(total)):
        raise ValueError(f"hidden_size * {name} is {total}; expected a whole number, at least 1")
    if round(total) % num_heads != 0:
        raise ValueError(f"hidden_size * {name} is {round(total)}; expected a multiple of num_heads = {num_heads}")
    return round(total) // num_heads
