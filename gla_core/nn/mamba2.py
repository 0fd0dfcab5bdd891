"""The Mamba-2 layer: gated linear attention with a gate for each token and head, and heads in groups. For an input x:

    z, u, B, C, dt = x W                                    u, B and C through one short convolution and silu
    o = chunk_ssd(C, B, u, dt, -exp(A_log), D, bias)        per head; a group of heads shares B and C
    y = rms_norm(o * silu(z)) W_o

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality" (arXiv 2405.21060). The parameters have the names and shapes of mamba_ssm's layer, so weights move between the
two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch.tensors import wide
from gla_core.nn.families import GATED_LINEAR_ATTENTION
from gla_core.nn.gates import draw_gates
from gla_core.nn.interface import Convolve, OpInputs, Ops, Output
from gla_core.nn.layer import Recurrent
from gla_core.nn.merged import added
from gla_core.nn.recompute import not_kept, recomputed
from gla_core.nn.recurrence import check_computation, positive
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.short_convolution import ShortConvolution
from gla_core.ops.calls import transformed
from gla_core.ops.gla.chunk_ssd import ChunkGla, chunk_ssd, values_and_gates
from gla_core.ops.gla.recurrent_ssd_step import recurrent_ssd_step
from gla_core.ops.gla.ssd import output, rates, time_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Mamba2(Recurrent):
    """Mamba-2 as a layer: [B, T, d_model] to [B, T, d_model].

    A state has K = d_state and V = headdim: [N, nheads, d_state, headdim], where mamba_ssm has the last two swapped.

    Args:
        d_model: width of the input and the output.
        d_state: number of channels of B and C in a group, the key width of a head.
        d_conv: number of tokens that an output of the convolution depends on.
        conv_init: the weights of the convolution begin uniformly in +-conv_init; in +-d_conv^-1/2 by default.
        expand: number of channels of all heads together, d_inner, as a multiple of d_model.
        headdim: number of channels of a head.
        ngroups: number of groups of heads that share B and C, and of groups of channels that are normed together.
        A_init_range: exp(A_log) begins uniformly between these two numbers.
        D_has_hdim: whether D has a number for each channel, and not for each head.
        rmsnorm: whether there is a norm.
        norm_before_gate: whether silu(z) multiplies the normed output, and not the output before the norm.
        dt_min: softplus(dt_bias) begins between dt_min and dt_max, with a uniform logarithm.
        dt_max: see dt_min.
        dt_init_floor: the least initial value of softplus(dt_bias).
        dt_limit: the smallest and the largest step; other values are clamped, in `step` as well.
        bias: whether the two projections have a bias.
        conv_bias: whether the convolution has a bias.
        chunk_size: accepted for configurations that set it, and not used.
        use_mem_eff_path: likewise.
        layer_idx: index of the layer in its model; the layer stores it and does not use it.
        device: device of the parameters, as in torch's own modules.
        dtype: dtype of the parameters.
        norm_eps: number added to the mean square in the norm.
        backend: a request for every op of the layer, such as "reference"; see `gla_core.use_backend`.
        context_parallel: as in `GatedLinearAttention`.

    Raises:
        ValueError: sizes do not fit together, or a range is empty.
        ValueError, UnknownOpError, UnknownBackendError: `backend` cannot be parsed, or names an unknown op or backend.

    Example:
        >>> layer = gla.nn.Mamba2(d_model=256, d_state=64)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    scale: float | None = 1.0

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        norm_eps: float = 1e-5,
        backend: str | None = None,
        context_parallel: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        d_model, d_state, d_conv, expand, headdim, ngroups = positive(
            d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand, headdim=headdim, ngroups=ngroups
        )
        d_inner = expand * d_model
        check_computation("chunk", backend)
        if d_inner % headdim != 0:
            raise ValueError(f"expand * d_model is {d_inner}; expected a multiple of headdim = {headdim}")
        if d_inner // headdim % ngroups != 0:
            raise ValueError(f"ngroups is {ngroups}; expected a divisor of the number of heads, {d_inner // headdim}")
        if not 0 <= dt_limit[0] <= dt_limit[1]:
            raise ValueError(f"dt_limit is {dt_limit}; expected two numbers, at least 0, in ascending order")
        for name, ends in (("A_init_range", A_init_range), ("(dt_min, dt_max)", (dt_min, dt_max))):
            if not 0 < ends[0] <= ends[1] < math.inf:
                raise ValueError(f"{name} is {ends}; expected two finite numbers above 0, in ascending order")
        self.hidden_size = self.d_model = d_model
        self.conv_size, self.conv_init = d_conv, conv_init
        self.d_state, self.headdim, self.nheads, self.ngroups = d_state, headdim, d_inner // headdim, ngroups
        self.A_init_range, self.dt_init, self.dt_init_floor = A_init_range, (dt_min, dt_max), dt_init_floor
        self.dt_limit, self.rmsnorm, self.layer_idx = dt_limit, rmsnorm, layer_idx
        self.backend, self.context_parallel = backend, context_parallel

        conv_dim = d_inner + 2 * ngroups * d_state
        self.widths = (d_inner, conv_dim, self.nheads)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias, **where)
        self.conv1d = ShortConvolution(conv_dim, d_conv, conv_bias, **where)
        if rmsnorm:
            self.norm = RMSNormGated(d_inner, norm_eps, **where, groups=ngroups, norm_before_gate=norm_before_gate)
        self.out_proj = nn.Linear(d_inner, d_model, bias, **where)
        self.dt_bias = nn.Parameter(torch.empty(self.nheads, **where))
        self.A_log = nn.Parameter(torch.empty(self.nheads, **where))
        self.D = nn.Parameter(torch.empty(d_inner if D_has_hdim else self.nheads, **where))
        self._reset_own_parameters()

    def reset_parameters(self) -> None:
        """Sets every parameter to its initial value, as the constructor does; for example after `to_empty`."""
        super().reset_parameters()
        self._reset_own_parameters()

    @torch.no_grad()
    def _reset_own_parameters(self) -> None:
        if self.conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -self.conv_init, self.conv_init)
        draw_gates(self.A_log, self.dt_bias, self.A_init_range, self.dt_init, self.dt_init_floor)
        nn.init.ones_(self.D)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Returns nheads, d_state and headdim, the sizes of the recurrent state of a sequence."""
        return self.nheads, self.d_state, self.headdim

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]:
        """Returns the one convolution, of u, B and C together."""
        return (self.conv1d,)

    @property
    def convolution_widths(self) -> tuple[int, ...]:
        """Returns the number of channels of u, B and C together, which the convolution has."""
        return (self.widths[1],)

    @property
    def ops(self) -> Ops:
        """Returns functions that call the ops of Mamba-2's form with the layer's parameters."""
        return Ops(5 if self._gates_in_op else 4, self._chunk, self._chunk_over_ranks, self._step, None)

    @property
    def neutral_gate(self) -> float:
        """Returns the dt of a step of 0."""
        return -math.inf if self._steps_in_op else 0.0

    @property
    def _steps_in_op(self) -> bool:
        """Returns whether the ops add the bias to dt and apply softplus; no step has a limit then."""
        return self.dt_limit == (0.0, math.inf)

    @property
    def _gates_in_op(self) -> bool:
        """Returns whether the ops multiply by silu(z). In training, `recomputed` does, and keeps less."""
        return not self.rmsnorm and not torch.is_grad_enabled()

    def _functions(self) -> tuple[OpInputs, Output]:
        return self.op_inputs, self._output

    def op_inputs(self, x: Tensor, convolve: Convolve) -> tuple[Tensor, ...]:
        """Maps x [B, T, d_model] to the inputs of the op and of `_output`.

        Returns:
            q, k [B, T, ngroups, d_state], u [B, T, nheads, headdim] and dt [B, T, nheads]; z like u if the op takes it;
            and z [B, T, d_inner].
        """
        with not_kept(x):
            z, joined, dt = self.in_proj(x).split(self.widths, dim=-1)
        (joined,) = convolve(joined)
        u, k, q = joined.split((self.widths[0], *[self.ngroups * self.d_state] * 2), dim=-1)
        u = u.unflatten(-1, (self.nheads, self.headdim))
        q, k = (y.unflatten(-1, (self.ngroups, self.d_state)) for y in (q, k))
        if not self._steps_in_op:
            dt = time_steps(dt, self.dt_bias, True, wide(dt.dtype)).clamp(*self.dt_limit)
        gate = (z.view(u.shape).to(u.dtype),) if self._gates_in_op else ()
        return q, k, u, dt, *gate, z

    def _parameters_of_steps(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns A, D, dt_bias and dt_softplus of the ops, A in a dtype."""
        D = self.D if self.D.numel() == self.nheads else self.D.view(self.nheads, self.headdim)
        dt_bias = self.dt_bias if self._steps_in_op else None
        return {"A": rates(self.A_log, True, dtype), "D": D, "dt_bias": dt_bias, "dt_softplus": self._steps_in_op}

    def _chunk(
        self, q: Tensor, k: Tensor, u: Tensor, dt: Tensor, z: Tensor | None = None, *, scale: None, **options: Any
    ) -> ChunkGla:
        return chunk_ssd(q, k, u, dt, z=z, **self._parameters_of_steps(wide(q.dtype)), **options)

    def _chunk_over_ranks(
        self, q: Tensor, k: Tensor, u: Tensor, dt: Tensor, z: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        x = self._parameters_of_steps(wide(q.dtype))
        v, g = values_and_gates(u, dt, x["A"], x["dt_bias"], x["dt_softplus"], 0.0, math.inf)
        o, state = GATED_LINEAR_ATTENTION.chunk_over_ranks(q, k, v, g, **options)
        return output(o, u, x["D"], z), state

    def _step(self, *args: Any, backend: str | None) -> tuple[Tensor, Tensor]:
        q, k, u, dt, *gate, state, scale, slots, inplace = args
        x, z = self._parameters_of_steps(wide(q.dtype)), gate[0] if gate else None
        if transformed():  # torch.func transforms no op that writes a state
            v, g = values_and_gates(u, dt, x["A"], x["dt_bias"], x["dt_softplus"], 0.0, math.inf)
            o, state = GATED_LINEAR_ATTENTION.step(q, k, v, g, state, scale, slots, inplace, backend=backend)
            return output(o, u, x["D"], z), state
        state = state if inplace else state.clone()
        options: dict[str, Any] = {"dt_softplus": x["dt_softplus"], "A_is_log": True, "backend": backend}
        D, z, after = (x["D"], z, ()) if x["D"].ndim == 1 else (None, None, (x["D"], z))  # the op has one D for a head
        o = recurrent_ssd_step(q, k, u, state, dt, self.A_log, x["dt_bias"], D, z, scale, slots, **options)
        return output(o, u, *after) if after else o, state

    def _output(self, o: Tensor, _x: Tensor, z: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps o [B, T, nheads, headdim] and z to y [B, T, d_model], plus the residual if there is one."""
        y = o.flatten(-2)
        if not self._gates_in_op:
            y = self.norm(y, z) if self.rmsnorm else recomputed(_gated, y, z)
        with not_kept(y):
            return self.out_proj(y) if residual is None else added(residual, self.out_proj, y)


def _gated(y: Tensor, z: Tensor) -> Tensor:
    return (y * F.silu(z.to(wide(y.dtype)))).to(y.dtype)
