"""The gated linear attention layer. For an input x, with sigma the logistic function:

    q = x W_q        k = x W_k        v = x W_v              each, if asked for, through a short convolution and silu
    g = log sigma(x W_1 W_2 + b) / normalizer                the log of the forget gate, of low rank
    o = chunk_gla(phi(q), phi(k), v, g)                      per head, with a feature map phi if asked for
    y = (rms_norm(o) * f(x W_g)) W_o                         with f = silu

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635). The
parameters have the names and shapes of flash-linear-attention's layer, so weights move between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch.tensors import wide
from gla_core.nn import recurrence
from gla_core.nn.activations import Activation, activation
from gla_core.nn.families import GATED_LINEAR_ATTENTION
from gla_core.nn.interface import Convolve, OpInputs, Output
from gla_core.nn.layer import Recurrent
from gla_core.nn.merged import Merging, added, products
from gla_core.nn.plain import is_plain
from gla_core.nn.recompute import not_kept
from gla_core.nn.recurrence import GLAState, Step, check_computation, head_width, normed, positive
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.short_convolution import ShortConvolution
from gla_core.ops import checks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
NORM_NAMES = ("g_norm", "g_norm_swish_gate")


class Projections(NamedTuple):
    """The projections of x [B, T, hidden_size], each [B, T, width].

    Attributes:
        q, k, v: before the convolutions.
        low: the first half of the forget gate's projection; None if it is still to be computed, or there is none.
        gate: the projection of the output gate; None if it is still to be computed, or there is none.
        logits: the forget gate's projection; None if it is still to be computed, or there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    low: Tensor | None = None
    gate: Tensor | None = None
    logits: Tensor | None = None


class GatedLinearAttention(Recurrent, Merging):
    """Gated linear attention as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    Args:
        hidden_size: width of the input and the output.
        expand_k: width of all keys together, as a multiple of hidden_size.
        expand_v: width of all values together, as a multiple of hidden_size.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads; num_heads by default. Query head i reads
            key/value head i // (num_heads // num_kv_heads).
        feature_map: phi, by name (see `activations`) or as a function of the queries or keys [..., K] of heads.
        use_short_conv: whether to send q, k and v through a causal convolution over the last conv_size tokens, and
            silu.
        conv_size: number of tokens that an output of the convolution depends on.
        conv_bias: whether the convolutions have a bias.
        use_output_gate: whether to multiply the normed output by gate_fn(x W_g).
        gate_fn: f, by name or as a function.
        elementwise_affine: whether the norm has a weight.
        norm_eps: number added to the mean square in the norm.
        gate_logit_normalizer: divides the log of the forget gate; a larger number makes the decay slower.
        gate_low_rank_dim: rank of the projection that makes the forget gate.
        clamp_min: lower bound of the log gate after that division, at most 0; None for no bound.
        backend: a request for every op of the layer, such as "reference"; see `gla_core.use_backend`.
        device: device of the parameters, as in torch's own modules.
        dtype: dtype of the parameters.
        fuse_norm: selects the name of the norm's weight, as in flash-linear-attention: `g_norm_swish_gate` if fuse_norm
            is True, use_output_gate is True and gate_fn is "swish"; otherwise `g_norm`. A checkpoint may use either
            name.
        mode: "chunk", "fused_chunk", "fused_recurrent" or "parallel", for configurations that set it; all modes compute
            the same.
        layer_idx: index of the layer in its model; the layer stores it and does not use it.
        context_parallel: ranks that share the tokens of each sequence, as a process group or a one-dimensional
            DeviceMesh. `forward` then reads this rank's tokens. All ranks have to run the forward and the backward.

    Raises:
        ValueError: sizes do not fit together, or a name is not known.
        ValueError, UnknownOpError, UnknownBackendError: `backend` cannot be parsed, or names an unknown op or backend.

    Example:
        >>> layer = gla.nn.GatedLinearAttention(hidden_size=256, num_heads=4)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    ops = GATED_LINEAR_ATTENTION
    norms_heads = True

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | Activation | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str | Activation = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_norm: bool = True,
        mode: str = "chunk",
        layer_idx: int | None = None,
        context_parallel: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_size, num_heads = positive(hidden_size=hidden_size, num_heads=num_heads)
        num_kv_heads, conv_size = positive(num_kv_heads=num_kv_heads, conv_size=conv_size)
        (gate_low_rank_dim,) = positive(gate_low_rank_dim=gate_low_rank_dim)
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_heads is {num_heads}; expected a multiple of num_kv_heads = {num_kv_heads}")
        if not 0 < gate_logit_normalizer < math.inf:
            raise ValueError(f"gate_logit_normalizer is {gate_logit_normalizer}; expected a finite number above 0")
        if clamp_min is not None and not clamp_min <= 0:
            raise ValueError(f"clamp_min is {clamp_min}; expected at most 0: it bounds the log of a forget gate")
        check_computation(mode, backend)

        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_k_dim = head_width("expand_k", expand_k, hidden_size, num_heads)
        self.head_v_dim = head_width("expand_v", expand_v, hidden_size, num_heads)
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.use_output_gate = use_output_gate
        self.feature_map = None if feature_map is None else activation("feature_map", feature_map)
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min
        is_whole = gate_logit_normalizer <= checks.MOST_NORMALIZER and gate_logit_normalizer % 1 == 0
        in_op = clamp_min is None and is_whole
        self.gate_normalizer = int(gate_logit_normalizer) if in_op else None
        self.backend, self.mode, self.layer_idx = backend, mode, layer_idx
        self.context_parallel = context_parallel

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
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, value_dim, bias=False, **where)
        fused = use_output_gate and gate_fn == "swish" and fuse_norm
        self._norm_name = "g_norm_swish_gate" if fused else "g_norm"
        self.add_module(self._norm_name, RMSNormGated(self.head_v_dim, norm_eps, elementwise_affine, gate_fn, **where))
        self.register_load_state_dict_pre_hook(_read_norm_under_either_name)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False, **where)
        self.merge()

    @torch.no_grad()
    def step_from_projections(
        self, x: Tensor, made: Projections, state: GLAState, inplace: bool = False, slots: Tensor | None = None
    ) -> tuple[Tensor, GLAState]:
        """Computes what `step` computes between its matrix products, for callers that compute the products themselves.

        Args:
            x: as in `step`. Only its shape, dtype and device matter.
            made: all projections of x, each [B, 1, width]; the logits take the place of their first half.

        Returns:
            The input [B, value heads' width] of `o_proj`, and the new state. Other arguments and the errors are as in
            `step`.
        """

        def op_inputs(x: Tensor, convolve: Convolve) -> tuple[Tensor, ...]:
            return self._op_inputs(x, made, convolve)

        def output(o: Tensor | Step, x: Tensor) -> Tensor:
            return self._normed(o, x, made.gate).flatten(-2)

        return recurrence.read_tokens(self, op_inputs, output, x, state, inplace, slots)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Returns H, K and V, the sizes of the recurrent state of a sequence."""
        return self.num_kv_heads, self.head_k_dim, self.head_v_dim

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]:
        """Returns the convolutions of q, k and v; empty without use_short_conv."""
        return (self.q_conv1d, self.k_conv1d, self.v_conv1d) if self.use_short_conv else ()

    @property
    def convolution_widths(self) -> tuple[int, ...]:
        """Returns the numbers of channels of q, k and v, which the convolutions have; empty without use_short_conv."""
        q, k = self.num_heads * self.head_k_dim, self.num_kv_heads * self.head_k_dim
        return (q, k, self.num_kv_heads * self.head_v_dim) if self.use_short_conv else ()

    def merged_layers(self) -> Sequence[Sequence[nn.Module]]:
        """Returns the projections of x: of q, k and v, of the output gate, and the first half of the forget gate's."""
        layers: list[nn.Module] = [self.q_proj, self.k_proj, self.v_proj]
        if self.use_output_gate:
            layers.append(self.g_proj)
        halves = getattr(self, "gk_proj", None)
        if isinstance(halves, nn.Sequential) and is_plain(halves, nn.Sequential) and len(halves) == 2:
            layers.append(halves[0])
        return [layers]

    def _functions(self) -> tuple[OpInputs, Output]:
        """Returns functions for one call, which computes the output gate together with the op's inputs if it can."""
        gates: list[Tensor | None] = []

        def op_inputs(x: Tensor, convolve: Convolve) -> tuple[Tensor, ...]:
            made = self._projections(x)
            gates.append(made.gate)
            return self._op_inputs(x, made, convolve)

        def output(o: Tensor | Step, x: Tensor, residual: Tensor | None = None) -> Tensor:
            return self._output(o, x, gates[0], residual)

        return op_inputs, output

    def _projections(self, x: Tensor) -> Projections:
        (layers,) = self.merged_layers()
        parts = products(layers, x)
        if parts is not None:
            q, k, v, *more = parts
            gate = more.pop(0) if self.use_output_gate else None
            return Projections(q, k, v, more[0] if more else None, gate)
        with not_kept(x):
            return Projections(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def op_inputs(self, x: Tensor, convolve: Convolve) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Maps x [B, T, hidden_size] to q [B, T, Hq, K], k [B, T, H, K], v [B, T, H, V] and g in one of its forms."""
        return self._op_inputs(x, self._projections(x), convolve)

    def _op_inputs(self, x: Tensor, made: Projections, convolve: Convolve) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes `op_inputs` from the projections of x that are made."""
        heads = self._heads(made, convolve)
        if made.logits is not None:
            return *heads, self.gates(made.logits)
        if made.low is None:
            with not_kept(x):
                return *heads, self.gates(self.gk_proj(x))
        second, low = self.gk_proj[1], made.low
        if not is_plain(second, nn.Linear):
            return *heads, self.gates(second(low))
        rows = low.flatten(0, -2)  # with more dimensions, PyTorch would add the bias apart
        return *heads, self.gates(second(rows).unflatten(0, x.shape[:-1]))

    def _heads(self, made: Projections, convolve: Convolve) -> tuple[Tensor, Tensor, Tensor]:
        """Maps projections to q [B, T, Hq, K], k [B, T, H, K] and v [B, T, H, V]."""
        q, k, v = convolve(made.q, made.k, made.v)
        q = q.unflatten(-1, (self.num_heads, self.head_k_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_k_dim))
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        return q, k, v.unflatten(-1, (self.num_kv_heads, self.head_v_dim))

    def gates(self, logits: Tensor) -> Tensor:
        """Returns the logits as [B, T, H, K] if the op computes the gates from them, otherwise the log gates.

        The op takes no lower bound of the gates, and divides by whole numbers only. The log gates are float32 or
        float64, because half precision rounds values near 0 to 0.
        """
        if self.gate_normalizer is None:
            logits = F.logsigmoid(logits.to(wide(logits.dtype))) / float(self.gate_logit_normalizer)
            logits = logits if self.clamp_min is None else logits.clamp(min=self.clamp_min)
        return logits.unflatten(-1, (self.num_kv_heads, -1))

    def _output(self, o: Tensor | Step, x: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        """Maps o [B, T, Hq, V] and x [B, T, hidden_size] to y [B, T, hidden_size], plus a residual if there is one."""
        if self.use_output_gate and gate is None:
            with not_kept(x):
                gate = self.g_proj(x)
        o = self._normed(o, x, gate)
        with not_kept(o):
            rows = o.flatten(-2)
            return self.o_proj(rows) if residual is None else added(residual, self.o_proj, rows)

    def _normed(self, o: Tensor | Step, x: Tensor, gate: Tensor | None) -> Tensor:
        """Returns o [B, T, Hq, V] of x [B, T, hidden_size] after the norm and the output gate."""
        if gate is not None:
            gate = gate.reshape(*x.shape[:-1], self.num_heads, self.head_v_dim)
        return normed(o, getattr(self, self._norm_name), gate)


def _read_norm_under_either_name(layer: GatedLinearAttention, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    key = f"{prefix}{layer._norm_name}.weight"
    for name in NORM_NAMES:
        if key not in state_dict and f"{prefix}{name}.weight" in state_dict:
            state_dict[key] = state_dict.pop(f"{prefix}{name}.weight")
