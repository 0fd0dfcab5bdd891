"""DeltaNet: a delta rule without a forget gate. For an input x:

    q, k, v, beta, y        as in delta_rule.py, with other activations and norms of q and k if asked for, and f = silu
    gate = x W_g            the output gate, if asked for

Sources: Schlag et al., "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174); Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484). The parameters have the
names and shapes of flash-linear-attention's layer, so weights move between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from gla_core.dispatch.errors import check_known
from gla_core.dispatch.tensors import wide
from gla_core.nn.activations import Activation
from gla_core.nn.delta_rule import DeltaRule
from gla_core.nn.interface import Convolve
from gla_core.nn.recurrence import head_width, positive

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def _above_0(x: Tensor) -> Tensor:
    return F.elu(x) + 1


ACTIVATIONS: Mapping[str, Activation | None] = {"silu": F.silu, "relu": F.relu, "elu": _above_0, "identity": None}
"""The activations of q and k by their names in flash-linear-attention."""
NORMS = ("l2", "sum")


class DeltaNet(DeltaRule):
    """DeltaNet as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    `forward`, `step` and `initial_state` are those of `GatedLinearAttention`.

    Args:
        hidden_size: width of the input and the output.
        expand_k: width of all keys together, as a multiple of hidden_size.
        expand_v: width of all values together, as a multiple of hidden_size.
        num_heads: number of heads.
        use_beta: whether beta depends on x; otherwise it is the largest beta.
        use_gate: whether to multiply the normed output by silu(x W_g).
        qk_activation: the activation of q and k: "silu", "relu", "elu", which is elu(x) + 1, or "identity".
        qk_norm: the norm by which q and k are divided: "l2" or "sum", the sum of absolute values.

    The other arguments, and the errors, are as in `KimiDeltaAttention`. The defaults are flash-linear-attention's.

    Example:
        >>> layer = gla.nn.DeltaNet(hidden_size=256, num_heads=4)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mode: str = "chunk",
        layer_idx: int | None = None,
        context_parallel: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        hidden_size, num_heads = positive(hidden_size=hidden_size, num_heads=num_heads)
        check_known("qk_activation", qk_activation, ACTIVATIONS)
        check_known("qk_norm", qk_norm, NORMS)
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_heads,
            head_k_dim=head_width("expand_k", expand_k, hidden_size, num_heads),
            head_v_dim=head_width("expand_v", expand_v, hidden_size, num_heads),
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            allow_neg_eigval=allow_neg_eigval,
            mode=mode,
            layer_idx=layer_idx,
            backend=backend,
            context_parallel=context_parallel,
            qk_activation=ACTIVATIONS[qk_activation],
        )
        self.use_beta, self.qk_norm = use_beta, qk_norm
        self.normalize = DeltaRule.normalize if qk_norm == "l2" else None
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_projections(**where)
        self.projections = ("q_proj", "k_proj", "v_proj")
        if use_beta:
            self.b_proj = nn.Linear(hidden_size, num_heads, bias=False, **where)
            self.projections = (*self.projections, "b_proj")
        self._make_convolutions(conv_bias, **where)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, num_heads * self.head_v_dim, bias=False, **where)
            self.projections = (*self.projections, "g_proj")
        self._make_output(norm_eps, "swish", **where)

    def _heads(self, made: Mapping[str, Tensor], convolve: Convolve) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._heads(made, convolve)
        return (_unit_sum(q), _unit_sum(k), v) if self.qk_norm == "sum" else (q, k, v)

    def _beta_limit(self) -> float | None:
        return super()._beta_limit() if self.use_beta else None

    def _beta(self, made: Mapping[str, Tensor]) -> Tensor:
        if self.use_beta:
            return super()._beta(made)
        q = made["q_proj"]
        return q.new_full((*q.shape[:-1], self.num_v_heads), 2.0 if self.allow_neg_eigval else 1.0)


def _unit_sum(x: Tensor) -> Tensor:
    """Returns x [.., K] divided by the sum of its absolute values, in the dtype of x."""
    return F.normalize(x.to(wide(x.dtype)), p=1, dim=-1, eps=1e-6).to(x.dtype)
