"""A layer of the model for one token of a few sequences: each matrix product in one kernel with what stands around it.

    GLA                                                     HGRN2
    q, k, v, output gate, first half of the forget gate     q, forget gate, v                 from rms_norm(x)
    logits of the forget gate                                                                 with their bias
    GatedLinearAttention.step_from_projections              HGRN2.step_from_projections
    x + output projection                                   x + output projection             of rms_norm(o) in HGRN2

    silu(x W_gate) * x W_up                                                                   from rms_norm(x)
    x + last projection of the MLP

Otherwise each norm and activation is a kernel of its own, and PyTorch splits products of few rows in two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gla_core.extension import Projections, RMSNormGated, matrix_of, split
from gla_core.nn import HGRN2, GatedLinearAttention, GLAState
from gla_transformers.cache import LayerState, rows_with_a_token


def step(
    attn_norm: RMSNormGated,
    attn: Any,
    mlp_norm: RMSNormGated,
    mlp: Any,
    x: Tensor,
    memory: LayerState,
    attention_mask: Tensor | None,
    lower_bound: Tensor | None,
) -> Tensor | None:
    """Returns the output [B, 1, hidden_size] of a layer for x [B, 1, hidden_size], and adds x to its memory.

    Returns None, and computes nothing, if the layer has to be computed otherwise.

    Args:
        attn_norm, attn, mlp_norm, mlp: the parts of a `Block`, which are plain. Parts of them need not be.
        memory, attention_mask, lower_bound: as in `gla_transformers.cache.read`.
    """
    kernel = kernel_of(x.device) if x.shape[1] == 1 else None
    if kernel is None or memory.state is None or not (_is_plain(attn_norm, x) and _is_plain(mlp_norm, x)):
        return None
    matrices = _matrices(kernel, x, [mlp.gate_proj, mlp.up_proj], [mlp.down_proj])
    if matrices is None:
        return None
    middle, last = matrices
    rows, options = x[:, 0].contiguous(), {"inplace": True, "slots": rows_with_a_token(attention_mask)}
    if type(attn) is GatedLinearAttention:
        attended = _gla(kernel, attn_norm, attn, rows, memory.state, options)
    elif type(attn) is HGRN2:
        attended = _hgrn2(kernel, attn_norm, attn, rows, memory.state, options | {"lower_bound": lower_bound})
    else:
        return None
    if attended is None:
        return None
    y = kernel.product(attended, middle, norm_weight=mlp_norm.weight, norm_eps=mlp_norm.eps, gated=True)
    return kernel.product(y, last, residual=attended)[:, None]


def _gla(
    kernel: Any, norm: RMSNormGated, attn: GatedLinearAttention, x: Tensor, state: GLAState, options: dict[str, Any]
) -> Tensor | None:
    """Returns x + attn(norm(x)) for x [B, hidden_size]; None, and computes nothing, if it is left to others."""
    (merged,), halves = attn.merged_layers(), attn.gk_proj
    if len(merged) < 4 + attn.use_output_gate:  # the first half is another module, or seen by a hook
        return None
    bias = halves[1]._parameters.get("bias")
    matrices = _matrices(kernel, x, merged, [attn.o_proj])
    second = matrix_of([halves[1]], x, biased=True)
    if matrices is None or second is None or not _is_served(kernel, second, x):
        return None
    if bias is not None and not _is_alike(bias, x):
        return None
    y = kernel.product(x, matrices[0], norm_weight=norm.weight, norm_eps=norm.eps)
    q, k, v, *gates = (part[:, None] for part in split(y, merged))
    logits = kernel.product(gates.pop()[:, 0], second, bias=bias)[:, None]
    made = Projections(q, k, v, gate=gates[0] if gates else None, logits=logits)
    o, _ = attn.step_from_projections(x, made, state, **options)
    return kernel.product(o, matrices[1], residual=x)


def _hgrn2(
    kernel: Any, norm: RMSNormGated, attn: HGRN2, x: Tensor, state: GLAState, options: dict[str, Any]
) -> Tensor | None:
    """Returns x + attn(norm(x)), as `_gla` does."""
    (merged,), g_norm = attn.merged_layers(), attn.g_norm
    matrices = _matrices(kernel, x, merged, [attn.o_proj])
    if matrices is None or not _is_plain(g_norm, x):
        return None
    y = kernel.product(x, matrices[0], norm_weight=norm.weight, norm_eps=norm.eps)
    o, _ = attn.step_from_projections(x, [part[:, None] for part in split(y, merged)], state, **options)
    return kernel.product(o, matrices[1], norm_weight=g_norm.weight, norm_eps=g_norm.eps, residual=x)


def _matrices(kernel: Any, x: Tensor, *groups: Sequence[nn.Module]) -> list[Tensor] | None:
    """Returns the matrix of each group of layers of one input; None if the kernel does not take one of them."""
    matrices = [matrix_of(layers, x) for layers in groups]
    served = [matrix for matrix in matrices if matrix is not None and _is_served(kernel, matrix, x)]
    return served if len(served) == len(groups) else None


def _is_served(kernel: Any, matrix: Tensor, x: Tensor) -> bool:
    """Returns whether the kernel multiplies x [B, ...] by a matrix."""
    return _is_alike(matrix, x) and kernel.is_served(matrix, len(x))


def _is_plain(norm: Any, x: Tensor) -> bool:
    """Returns whether the kernel computes a norm of x."""
    plain = isinstance(norm, RMSNormGated) and norm.activation_in_op(None) is not None
    return plain and norm.weight is not None and _is_alike(norm.weight, x)


def _is_alike(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == x.dtype and weight.device == x.device and weight.is_contiguous()


@functools.cache
def kernel_of(device: torch.device) -> ModuleType | None:
    """Returns the module of the kernel; None if it does not run on a device."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from gla_transformers import few_rows_kernel
    except ImportError:  # there is no Triton
        return None
    return few_rows_kernel
