"""The gated delta network: a delta rule with a forget gate for each head. For an input x:

    q, k, v, beta, y                                        as in delta_rule.py, with f = silu
    g = -exp(A_log) softplus(x W_a + dt_bias)               the log of the forget gate, one for each head
    gate = x W_g                                            the output gate, if asked for

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464). The parameters have
the names and shapes of flash-linear-attention's layer, so weights move between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.types import Device

from gla_core.nn.activations import Activation
from gla_core.nn.delta_rule import DeltaRule, head_widths
from gla_core.ops.delta.inputs import Gate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class GatedDeltaNet(DeltaRule):
    """A gated delta network as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    `forward`, `step` and `initial_state` are those of `GatedLinearAttention`. A state is [N, num_v_heads, head_dim,
    head_dim * expand_v], where flash-linear-attention has the last two dimensions swapped.

    Args:
        use_gate: whether to multiply the normed output by output_gate_activation(x W_g).
        output_gate_activation: the activation of the output gate, by name (see `activations`) or as a function.

    The other arguments, and the errors, are as in `KimiDeltaAttention`. The defaults are flash-linear-attention's.

    Example:
        >>> layer = gla.nn.GatedDeltaNet(256, head_dim=64, num_heads=2)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    rates = (0.0, 16.0)

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        output_gate_activation: str | Activation = "swish",
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
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_projections(**where)
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False, **where)
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False, **where)
        self._make_gates(self.num_v_heads, **where)
        self._make_convolutions(conv_bias, **where)
        self.projections = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj")
        if use_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.num_v_heads * head_v_dim, bias=False, **where)
            self.projections = (*self.projections, "g_proj")
        self._make_output(norm_eps, output_gate_activation, **where)

    def _gate(self) -> Gate:
        return "softplus", self._local(self.A_log), self._local(self.dt_bias)

    def _g(self, made: Mapping[str, Tensor]) -> Tensor:
        return made["a_proj"]
