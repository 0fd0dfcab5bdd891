"""The layer with Kimi delta attention of vLLM's GLM-5.3 models, computed by gla_core; see `delta_rules`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention

from gla_vllm.kda import ServedKDA, joined_filters


class GlmLayer(ServedKDA, Glm5NextLinearAttention):
    """vLLM's `Glm5NextLinearAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve_heads(self.kda_lower_bound)

    def filters(self) -> Tensor:
        return joined_filters(self)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        widths = [3 * self.local_projection_size, self.local_num_heads, self.head_dim, self.head_dim]
        qkv, beta, low, low_gate = self.in_proj_qkvbfg_a(hidden_states)[0].split(widths, dim=-1)
        return self.attend(qkv, self.f_b_proj(low)[0], beta, self.g_b_proj(low_gate)[0])
