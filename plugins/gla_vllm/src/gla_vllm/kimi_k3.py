"""The layer with Kimi delta attention of vLLM's Kimi-K3 models, computed by gla_core; see `delta_rules`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention

from gla_vllm.kda import ServedKDA


class KimiK3Layer(ServedKDA, KimiK3DeltaAttention):
    """vLLM's `KimiK3DeltaAttention`: the same arguments, weights and results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serve_heads(self.gate_lower_bound)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return self.attend_full_rank(hidden_states)
