"""Kimi delta attention (KDA): a delta rule with a forget gate for each key. For an input x:

    q, k, v, beta, y                                            as in delta_rule.py, with f = sigma
    g = -exp(A_log) softplus(x W_1 W_2 + dt_bias)               the log of the forget gate, of low rank
    g = bound sigma(exp(A_log) (x W_1 W_2 + dt_bias))           with a lower bound
    gate = x W_3 W_4 + b                                        the output gate, of low rank

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv 2510.26692). The parameters
have the names and shapes of flash-linear-attention's layer, so weights move between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.types import Device

from gla_core.nn.delta_rule import DeltaRule, head_widths
from gla_core.ops.delta.inputs import Gate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class KimiDeltaAttention(DeltaRule):
    """Kimi delta attention as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    `forward`, `step` and `initial_state` are those of `GatedLinearAttention`. A state is [N, num_v_heads, head_dim,
    head_dim * expand_v], where flash-linear-attention has the last two dimensions swapped.

    Args:
        hidden_size: width of the input and the output.
        expand_v: value width of a head, as a multiple of head_dim.
        head_dim: query and key width of a head.
        num_heads: number of query and key heads.
        num_v_heads: number of value heads, a multiple of num_heads; num_heads by default. Value head i reads query and
            key head i // (num_v_heads // num_heads). Gates, betas and states are those of value heads.
        use_short_conv: whether to send q, k and v through a causal convolution over the last conv_size tokens. silu
            follows in any case.
        conv_size: number of tokens that an output of the convolution depends on.
        conv_bias: whether the convolutions have a bias.
        allow_neg_eigval: whether beta goes to 2, not to 1, so that transitions may have negative eigenvalues.
        safe_gate: whether A_log begins with 0, as models with a lower bound do; needs lower_bound.
        lower_bound: the smallest log gate, below 0; None for gates without a bound.
        mode: "chunk", "fused_chunk", "fused_recurrent" or "parallel", for configurations that set it; all modes compute
            the same.
        layer_idx: index of the layer in its model; the layer stores it and does not use it.
        norm_eps: number added to the mean square in the norm.
        backend: a request for every op of the layer, such as "reference"; see `gla_core.use_backend`.
        device: device of the parameters, as in torch's own modules.
        dtype: dtype of the parameters.
        context_parallel: as in `GatedLinearAttention`.

    Raises:
        ValueError: sizes do not fit together, a mode is not known, or a bound is not below 0.
        ValueError, UnknownOpError, UnknownBackendError: `backend` cannot be parsed, or names an unknown op or backend.

    Example:
        >>> layer = gla.nn.KimiDeltaAttention(256, head_dim=64, num_heads=4)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    projections = ("q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_proj")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mode: str = "chunk",
        layer_idx: int | None = None,
        context_parallel: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        head_dim, head_v_dim = head_widths(head_dim, expand_v)
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            head_k_dim=head_dim,
            head_v_dim=head_v_dim,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            allow_neg_eigval=allow_neg_eigval,
            mode=mode,
            layer_idx=layer_idx,
            backend=backend,
            context_parallel=context_parallel,
        )
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound is {lower_bound}; expected a number below 0: it bounds the log of a gate")
        if safe_gate and lower_bound is None:
            raise ValueError("safe_gate is True and lower_bound is None; expected a lower bound such as -5.0")
        self.lower_bound, self.rates = lower_bound, (1.0, 1.0) if safe_gate else (1.0, 16.0)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        low_rank, key_dim = head_v_dim, self.num_v_heads * head_dim
        self._make_projections(**where)
        self._make_convolutions(conv_bias, **where)
        self.f_proj = nn.Sequential(
            nn.Linear(self.hidden_size, low_rank, bias=False, **where),
            nn.Linear(low_rank, key_dim, bias=False, **where),
        )
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False, **where)
        self._make_gates(key_dim, **where)
        self.g_proj = nn.Sequential(
            nn.Linear(self.hidden_size, low_rank, bias=False, **where),
            nn.Linear(low_rank, self.num_v_heads * head_v_dim, **where),
        )
        self._make_output(norm_eps, "sigmoid", **where)

    def _gate(self) -> Gate:
        dt_bias = self._local(self.dt_bias).unflatten(0, (self.num_v_heads, self.head_k_dim))
        if self.lower_bound is None:
            return "softplus", self._local(self.A_log), dt_bias
        return "bounded", self._local(self.A_log), dt_bias, self.lower_bound

    def _g(self, made: Mapping[str, Tensor]) -> Tensor:
        return made["f_proj"].unflatten(-1, (self.num_v_heads, self.head_k_dim))
