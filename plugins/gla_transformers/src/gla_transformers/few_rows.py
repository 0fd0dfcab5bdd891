"""A layer of the model for one token of a few sequences: each matrix product in one kernel with what stands around it.

    q, k, v, output gate, first half of the forget gate     from rms_norm(x)
    logits of the forget gate                               with their bias
    GatedLinearAttention.step_between
    x + output projection
    silu(x W_gate) * x W_up                                 from rms_norm(x)
    x + last projection of the MLP

Otherwise each norm and activation is a kernel of its own, and PyTorch splits products of few rows in two.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gla_core.nn import GatedLinearAttention
from gla_core.nn.gated_linear_attention import Projections
from gla_core.nn.merged import matrix_of, split
from gla_core.nn.rms_norm import RMSNormGated
from gla_transformers.cache import LayerState, rows_with_a_token


def step(
    attn_norm: RMSNormGated,
    attn: GatedLinearAttention,
    mlp_norm: RMSNormGated,
    mlp: Any,
    x: Tensor,
    memory: LayerState,
    attention_mask: Tensor | None,
) -> Tensor | None:
    """Returns the output [B, 1, hidden_size] of a layer for x [B, 1, hidden_size], and adds x to its memory.

    Returns None, and computes nothing, if the layer has to be computed otherwise.

    Args:
        attn_norm, attn, mlp_norm, mlp: the parts of a `GLABlock`, without hooks of their own. Parts of them may have
            hooks.
        memory, attention_mask: as in `gla_transformers.cache.read`.
    """
    kernel = _kernel(x.device) if x.shape[1] == 1 else None
    if kernel is None or memory.state is None or not (_is_plain(attn_norm, x) and _is_plain(mlp_norm, x)):
        return None
    (of_x,), halves = attn.merged_layers(), attn.gk_proj
    if len(of_x) < 4 + attn.use_output_gate:  # the first half is another module, or seen by a hook
        return None
    bias = halves[1]._parameters.get("bias")
    if bias is not None and not _is_alike(bias, x):
        return None
    first = matrix_of(of_x, x)
    second = matrix_of([halves[1]], x, biased=True)
    output = matrix_of([attn.o_proj], x)
    middle = matrix_of([mlp.gate_proj, mlp.up_proj], x)
    last = matrix_of([mlp.down_proj], x)
    if any(weight is None or not kernel.is_served(weight, x) for weight in (first, second, output, middle, last)):
        return None

    rows = x[:, 0].contiguous()
    y = kernel.product(rows, first, norm_weight=attn_norm.weight, norm_eps=attn_norm.eps)
    q, k, v, *gates = (part[:, None] for part in split(y, of_x))
    logits = kernel.product(gates.pop()[:, 0], second, bias=bias)[:, None]
    made = Projections(q, k, v, gate=gates[0] if gates else None, logits=logits)
    o, _ = attn.step_between(rows, made, memory.state, inplace=True, state_indices=rows_with_a_token(attention_mask))
    rows = kernel.product(o, output, residual=rows)
    y = kernel.product(rows, middle, norm_weight=mlp_norm.weight, norm_eps=mlp_norm.eps, gated=True)
    return kernel.product(y, last, residual=rows)[:, None]


def _is_plain(norm: Any, x: Tensor) -> bool:
    """Returns whether the kernel computes a norm of x."""
    if type(norm) is not RMSNormGated or norm.groups > 1 or norm.mean_over_ranks is not None:
        return False
    return norm.weight is not None and _is_alike(norm.weight, x)


def _is_alike(vector: Tensor, x: Tensor) -> bool:
    return vector.dtype == x.dtype and vector.device == x.device and vector.is_contiguous()


@functools.cache
def _kernel(device: torch.device) -> ModuleType | None:
    """Returns the module of the kernel; None if it does not run on a device."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from gla_transformers import few_rows_kernel
    except ImportError:  # there is no Triton
        return None
    return few_rows_kernel
