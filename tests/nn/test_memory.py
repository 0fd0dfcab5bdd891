"""The memory that layers keep for the backward, in bfloat16, per token. It does not depend on the processor."""

from typing import Any

import pytest
import torch

from gla_core import nn
from gla_core.bench.kept import bytes_kept

D, B, T = 64, 2, 64
MARGIN = 1.03
QKV = D / 2 + D / 2 + D
LOW_RANK, LOGITS, OUT, GATE, Y = 16, D / 2, D, D, D
# Channels of bfloat16 for each token: the tensors that the backward needs, and the result.
LAYERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "gated": (nn.GatedLinearAttention, {"num_heads": 2}, QKV + LOW_RANK + LOGITS + OUT + GATE + Y),
    "no_gate": (nn.GatedLinearAttention, {"num_heads": 2, "use_output_gate": False}, QKV + LOW_RANK + LOGITS + OUT + Y),
    "convolution": (  # keeps its inputs, and three rows of history before them
        nn.GatedLinearAttention,
        {"num_heads": 2, "use_short_conv": True},
        (1 + (T + 3) / T) * QKV + LOW_RANK + LOGITS + OUT + GATE + Y,
    ),
    # q, silu(q), f, float32 gates, k and v
    "hgrn2": (nn.HGRN2, {"num_heads": 2}, D + D + D + 2 * D + D + D + OUT + Y),
    # the projection, the convolution's input and result, v, o with the skip, and numbers of each head
    "mamba2": (nn.Mamba2, {"headdim": 32, "d_state": 32}, 5 * D + 2 * 3 * D + 2 * D + 2 * D + Y + 56),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_what_its_backward_needs(name):
    make, options, channels = LAYERS[name]
    layer = make(D, **options, dtype=torch.bfloat16)
    x = torch.randn(B, T, D, dtype=torch.bfloat16, requires_grad=True)
    assert bytes_kept(lambda: layer(x)) / (B * T) <= MARGIN * 2 * channels
