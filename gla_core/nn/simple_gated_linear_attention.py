"""The layer of simple gated linear attention: one gate for each token and head, not for each key.

    g = log sigma(x W_g + b) / normalizer        [B, T, H]

Everything else is as in `GatedLinearAttention`. The gates take 1/K of the memory, and the recurrence is that of Mamba-2
and xLSTM with other gates. The parameters have the names and shapes of flash-linear-attention's layer, so weights move
between the two.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635); Dao and
Gu, "Transformers are SSMs" (arXiv 2405.21060), for one gate per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.types import Device

from gla_core.nn.activations import Activation
from gla_core.nn.gated_linear_attention import GatedLinearAttention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class SimpleGatedLinearAttention(GatedLinearAttention):
    """Gated linear attention with one gate per head, as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    `forward`, `step` and `initial_state` are those of `GatedLinearAttention`.

    Args:
        hidden_size: width of the input and the output.
        expand_k: width of all keys together, as a multiple of hidden_size.
        expand_v: width of all values together, as a multiple of hidden_size.
        num_heads: number of heads.

    The other arguments, and the errors, are as in `GatedLinearAttention`. The defaults are flash-linear-attention's.

    Example:
        >>> layer = gla.nn.SimpleGatedLinearAttention(256, num_heads=4)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        feature_map: str | Activation | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_fn: str | Activation = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_norm: bool = True,
        mode: str = "chunk",
        layer_idx: int | None = None,
        context_parallel: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        sizes = (hidden_size, expand_k, expand_v, num_heads, None)
        parts = (feature_map, use_short_conv, conv_size, conv_bias, True, gate_fn)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"backend": backend, "fuse_norm": fuse_norm, "mode": mode, "layer_idx": layer_idx}
        options |= {"gate_logit_normalizer": gate_logit_normalizer, "context_parallel": context_parallel}
        super().__init__(*sizes, *parts, elementwise_affine, norm_eps, **options, **where)
        self.gk_proj = nn.Linear(self.hidden_size, self.num_heads, **where)

    def gates(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, T, H], or log gates; see `GatedLinearAttention.gates`."""
        return super().gates(logits).squeeze(-1)
