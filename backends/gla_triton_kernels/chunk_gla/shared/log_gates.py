"""Computes log gates from logits once, for a call whose kernels would each compute them several times.

B batch   T tokens   Hv value heads   K key width   C tokens of a program   BK keys read at once, at least K
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_core.dispatch.backend import ceil_div
from gla_triton_kernels.gates import log_gates
from gla_triton_kernels.runtime.launch import Launch, strides_of
from gla_triton_kernels.runtime.sizes import power_of_two

TOKENS = 32


def launch_log_gates(x: Tensor, normalizer: int) -> tuple[Tensor, Launch]:
    """Returns memory for the log gates [B, T, Hv, K] of logits x, in float32, and the launch that fills it."""
    B, T, H, K = x.shape
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    arguments = {
        "x_ptr": x,
        "g_ptr": g,
        **strides_of("", x),
        "T": T,
        "H": H,
        "K": K,
        "NORMALIZER": normalizer,
        "C": TOKENS,
        "BK": power_of_two(K, 16),
    }
    return g, Launch(_log_gates_kernel, (B * ceil_div(T, TOKENS) * H, 1, 1), arguments, {"num_warps": 4})


@triton.jit(do_not_specialize=["T", "H"])
def _log_gates_kernel(
    x_ptr,  # [B, T, Hv, K]
    g_ptr,  # [B, T, Hv, K], contiguous
    stride_b,
    stride_t,
    stride_h,
    T,
    H,
    K,
    NORMALIZER: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    h, block = tl.program_id(0) % H, tl.program_id(0) // H
    blocks = tl.cdiv(T, C)
    b = (block // blocks).to(tl.int64)
    token = (block % blocks * C + tl.arange(0, C))[:, None]  # [C, 1]
    key = tl.arange(0, BK)[None, :]  # [1, BK]
    inside = (token < T) & (key < K)  # [C, BK]
    x_at = x_ptr + b * stride_b + token.to(tl.int64) * stride_t + tl.cast(h, tl.int64) * stride_h + key
    g_at = g_ptr + ((b * T + token) * H + h) * K + key
    tl.store(g_at, log_gates(tl.load(x_at, mask=inside, other=0.0), NORMALIZER), mask=inside)
