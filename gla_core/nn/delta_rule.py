"""Holds what `KimiDeltaAttention`, `GatedDeltaNet` and `DeltaNet` share, the layers with a delta rule. For an input x:

    q = x W_q        k = x W_k        v = x W_v       each through a short convolution, if asked for, and silu
    beta = limit * sigma(x W_b)                       how much of v_t is learnt; the limit is 1 or 2
    o = chunk_delta(q, k, v, g, beta)                 per head, with unit q and k; g depends on the layer
    y = (rms_norm(o) * f(gate)) W_o

num_v_heads // num_heads value heads share a query and key head. The parameters have the names and shapes of
flash-linear-attention's layers, so weights move between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_core.nn.activations import Activation
from gla_core.nn.families import DELTA_RULE
from gla_core.nn.gates import draw_gates
from gla_core.nn.interface import Convolve, OpInputs, Ops, Output
from gla_core.nn.layer import Recurrent
from gla_core.nn.merged import Merging, added, products
from gla_core.nn.plain import is_plain
from gla_core.nn.recompute import not_kept
from gla_core.nn.recurrence import check_computation, positive, whole_width
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.short_convolution import ShortConvolution
from gla_core.ops.delta.inputs import Gate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class DeltaRule(Recurrent, Merging):
    """A layer with a delta rule. Subclasses make its modules, in flash-linear-attention's order, and its gates.

    Attributes:
        projections: names of the modules that read x: `q_proj`, `k_proj`, `v_proj`, and those of the gates and betas.
        normalize: the eps of the l2 norm of q and k, as in flash-linear-attention; None if the op computes no norm.
        local: maps a parameter of the layer itself to the part of this rank's heads, if tensor parallelism spreads the
            heads over ranks. None if this rank has all heads.
        rates: between which numbers exp(A_log) begins; None for a layer without gates.
    """

    projections: Sequence[str]
    normalize: float | None = 1e-6
    rates: tuple[float, float] | None = None
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_k_dim: int,
        head_v_dim: int,
        use_short_conv: bool,
        conv_size: int,
        allow_neg_eigval: bool,
        mode: str,
        layer_idx: int | None,
        backend: str | None,
        context_parallel: ProcessGroup | DeviceMesh | None,
        qk_activation: Activation | None = F.silu,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        hidden_size, num_heads = positive(hidden_size=hidden_size, num_heads=num_heads)
        num_v_heads, conv_size = positive(num_v_heads=num_v_heads, conv_size=conv_size)
        if num_v_heads % num_heads != 0:
            raise ValueError(f"num_v_heads is {num_v_heads}; expected a multiple of num_heads = {num_heads}")
        check_computation(mode, backend)
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.use_short_conv, self.conv_size, self.qk_activation = use_short_conv, conv_size, qk_activation
        self.allow_neg_eigval = allow_neg_eigval
        self.backend, self.mode, self.layer_idx = backend, mode, layer_idx
        self.context_parallel = context_parallel
        self.local: Callable[[Tensor], Tensor] | None = None

    def _make_projections(self, **where: Any) -> None:
        key_dim, value_dim = self.num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.q_proj = nn.Linear(self.hidden_size, key_dim, bias=False, **where)
        self.k_proj = nn.Linear(self.hidden_size, key_dim, bias=False, **where)
        self.v_proj = nn.Linear(self.hidden_size, value_dim, bias=False, **where)

    def _make_convolutions(self, bias: bool, **where: Any) -> None:
        if self.use_short_conv:
            q, k, v = self.convolution_widths
            self.q_conv1d = ShortConvolution(q, self.conv_size, bias, self.qk_activation, **where)
            self.k_conv1d = ShortConvolution(k, self.conv_size, bias, self.qk_activation, **where)
            self.v_conv1d = ShortConvolution(v, self.conv_size, bias, **where)

    def _make_gates(self, width: int, **where: Any) -> None:
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, **where))
        self.dt_bias = nn.Parameter(torch.empty(width, **where))
        self._reset_gates()

    def _reset_gates(self) -> None:
        if self.rates is not None:
            draw_gates(self.A_log, self.dt_bias, self.rates, (0.001, 0.1))

    def _make_output(self, norm_eps: float, gate_fn: str | Activation, **where: Any) -> None:
        self.o_norm = RMSNormGated(self.head_v_dim, norm_eps, gate_fn=gate_fn, **where)
        self.o_proj = nn.Linear(self.num_v_heads * self.head_v_dim, self.hidden_size, bias=False, **where)
        self.merge()

    def reset_parameters(self) -> None:
        """Sets every parameter to its initial value, as the constructor does; for example after `to_empty`."""
        super().reset_parameters()
        self._reset_gates()

    @property
    def neutral_gate(self) -> float:
        """Returns a logit of a gate of 1: finite, because a gate may multiply it by exp(A_log), and in every dtype."""
        return -65504.0

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Returns Hv, K and V, the sizes of the recurrent state of a sequence."""
        return self.num_v_heads, self.head_k_dim, self.head_v_dim

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]:
        """Returns the convolutions of q, k and v; empty without use_short_conv."""
        return (self.q_conv1d, self.k_conv1d, self.v_conv1d) if self.use_short_conv else ()

    @property
    def convolution_widths(self) -> tuple[int, ...]:
        """Returns the numbers of channels of q, k and v, which the convolutions have; empty without use_short_conv."""
        key_dim = self.num_heads * self.head_k_dim
        return (key_dim, key_dim, self.num_v_heads * self.head_v_dim) if self.use_short_conv else ()

    @property
    def ops(self) -> Ops:
        """Returns the ops of a delta rule, which normalize q and k, and compute gates and betas from logits."""
        return DELTA_RULE.with_options(normalize=self.normalize, gate=self._gate(), beta_limit=self._beta_limit())

    def _gate(self) -> Gate:
        """Returns the argument `gate` of the ops, which says how they compute the gates from the layer's g."""
        return None

    def _beta_limit(self) -> float | None:
        """Returns the argument `beta_limit` of the ops; None if the layer computes the betas."""
        return 2.0 if self.allow_neg_eigval else 1.0

    def _g(self, made: Mapping[str, Tensor]) -> Tensor | None:
        """Returns g in one of its forms, from the projections of x."""
        return None

    def _beta(self, made: Mapping[str, Tensor]) -> Tensor:
        """Returns beta [B, T, Hv], or its logits, from the projections of x."""
        return made["b_proj"]

    def _local(self, parameter: Tensor) -> Tensor:
        """Returns the part of a parameter that belongs to this rank's heads."""
        return parameter if self.local is None else self.local(parameter)

    def merged_layers(self) -> Sequence[Sequence[nn.Module]]:
        """Returns the projections of x, and of those with a low rank the first half."""
        return [[_first(getattr(self, name)) for name in self.projections]]

    def _projections(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the projections of x [B, T, hidden_size] by the names of their modules, each [B, T, width]."""
        modules, (layers,) = [getattr(self, name) for name in self.projections], self.merged_layers()
        results = products(layers, x)
        if results is None:
            with not_kept(x):
                results = [module(x) for module in modules]
        else:
            each = zip(modules, layers, results, strict=True)
            results = [y if module is layer else module[1](y) for module, layer, y in each]
        return dict(zip(self.projections, results, strict=True))

    def _functions(self) -> tuple[OpInputs, Output]:
        """Returns functions for one call, which projects x once, for the op and for the output gate."""
        gates: list[Tensor | None] = []

        def op_inputs(x: Tensor, convolve: Convolve) -> tuple[Any, ...]:
            made = self._projections(x)
            gates.append(made.get("g_proj"))
            return *self._heads(made, convolve), self._g(made), self._beta(made)

        def output(o: Tensor, _x: Tensor, residual: Tensor | None = None) -> Tensor:
            return self._output(o, gates[0], residual)

        return op_inputs, output

    def _heads(self, made: Mapping[str, Tensor], convolve: Convolve) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k [B, T, H, K] and v [B, T, Hv, V] after convolutions and activations."""
        q, k, v = convolve(made["q_proj"], made["k_proj"], made["v_proj"])
        if not self.use_short_conv:
            v = F.silu(v)
            q, k = (q, k) if self.qk_activation is None else (self.qk_activation(q), self.qk_activation(k))
        q, k = (y.unflatten(-1, (self.num_heads, self.head_k_dim)) for y in (q, k))
        return q, k, v.unflatten(-1, (self.num_v_heads, self.head_v_dim))

    def _output(self, o: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        """Maps o [B, T, Hv, V] and gate [B, T, Hv * V] to y [B, T, hidden_size], plus a residual if there is one."""
        o = self.o_norm(o, None if gate is None else gate.unflatten(-1, (self.num_v_heads, self.head_v_dim)))
        with not_kept(o):
            rows = o.flatten(-2)
            return self.o_proj(rows) if residual is None else added(residual, self.o_proj, rows)


def _first(module: nn.Module) -> nn.Module:
    """Returns the first half of a projection of low rank, and any other module itself."""
    if isinstance(module, nn.Sequential) and is_plain(module, nn.Sequential) and len(module) == 2:
        return module[0]
    return module


def head_widths(head_dim: int, expand_v: float) -> tuple[int, int]:
    """Returns the key and the value width of a head, head_dim and head_dim * expand_v, after checks."""
    (head_dim,) = positive(head_dim=head_dim)
    return head_dim, whole_width("head_dim * expand_v", head_dim * expand_v)
