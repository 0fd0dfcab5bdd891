"""The retention layer of RetNet: linear attention with one constant gate per head, and rotary position embedding.

    gamma_h = 1 - 2^(-5-h)                                 the forget gate of query head h, for all tokens
    q, k = rotated(phi(x W_q)), rotated(phi(x W_k))        see `gla_core.nn.rotary`
    o = chunk_gla(q, k, x W_v, log gamma)                  per head
    y = (rms_norm(o) * f(x W_g)) W_o                       with f = silu

Source: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models" (arXiv 2307.08621). The
parameters have the names and shapes of flash-linear-attention's `MultiScaleRetention`, so weights move between the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Device

from gla_core.dispatch.tensors import wide
from gla_core.nn.activations import Activation
from gla_core.nn.gated_linear_attention import GatedLinearAttention, Projections
from gla_core.nn.interface import Convolve


class Retention(GatedLinearAttention):
    """Retention as a layer: [B, T, hidden_size] to [B, T, hidden_size].

    `forward`, `step` and `initial_state` are those of `GatedLinearAttention`. A state also has the number of tokens
    that a sequence has read, which is the position of its next token. Every query head has a gate and a state of its
    own, also with fewer key/value heads. The tokens of a layer cannot be spread over ranks.

    Args:
        hidden_size: width of the input and the output.
        expand_k: width of all queries together, as a multiple of hidden_size. The width of a head must be even.
        expand_v: width of all outputs of heads together, as a multiple of hidden_size.
        num_heads: number of query heads.

    The other arguments, and the errors, are as in `GatedLinearAttention`. The defaults are flash-linear-attention's.

    Attributes:
        first_head: index of this rank's first query head, if tensor parallelism spreads the heads over ranks; 0
            otherwise.

    Example:
        >>> layer = gla.nn.Retention(hidden_size=256, num_heads=4)
        >>> y, state = layer(torch.randn(2, 100, 256), output_final_state=True)
        >>> state.position
        tensor([100, 100])
        >>> y1, state = layer.step(torch.randn(2, 256), state)
    """

    rotary_base: float | None = 10000.0
    first_head: int = 0

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str | Activation | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str | Activation = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_norm: bool = True,
        mode: str = "chunk",
        layer_idx: int | None = None,
    ) -> None:
        sizes = (hidden_size, expand_k, expand_v, num_heads, num_kv_heads)
        parts = (feature_map, use_short_conv, conv_size, conv_bias, use_output_gate, gate_fn)
        options: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
        options |= {"fuse_norm": fuse_norm, "mode": mode, "layer_idx": layer_idx}
        super().__init__(*sizes, *parts, elementwise_affine, norm_eps, **options)
        if self.head_k_dim % 2 != 0:
            raise ValueError(
                f"hidden_size * expand_k / num_heads is {self.head_k_dim}; expected an even number, as the rotary "
                "embedding turns pairs of channels: change expand_k or num_heads"
            )
        del self.gk_proj  # the gates are constants
        self.gate_normalizer = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Returns Hq, K and V, the sizes of the recurrent state of a sequence."""
        return self.num_heads, self.head_k_dim, self.head_v_dim

    def _op_inputs(self, x: Tensor, made: Projections, convolve: Convolve) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes q, k [B, T, Hq, K] before the rotation, v [B, T, Hq, V] and g [Hq]."""
        q, k, v = self._heads(made, convolve)
        groups = self.num_heads // self.num_kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        h = self.first_head + torch.arange(self.num_heads, device=q.device, dtype=wide(q.dtype))
        return q, k, v, torch.log1p(-torch.exp2(-5 - h))
