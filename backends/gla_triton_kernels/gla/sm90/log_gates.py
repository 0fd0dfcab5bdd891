"""Computes log gates g = log sigma(x) / NORMALIZER from logits x, and writes them to memory.

A launch of this kernel pays if later kernels read the same gates several times.

B batch   T tokens   H heads   K key width   ROWS tokens and D keys of a block
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.gla.sm90.common import log_gates
from gla_triton_runtime.launch import Launch, strides_of

ROWS = gl.constexpr(32)
D = gl.constexpr(128)
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


def launch_log_gates(x: Tensor, normalizer: int) -> tuple[Tensor, Launch]:
    """Returns memory [B, T, H, K] in float32 for the log gates of logits x, and the launch that fills it."""
    B, T, H, K = x.shape
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    arguments = {"x_ptr": x, "g_ptr": g, **strides_of("", x), "T": T, "H": H, "K": K, "NORMALIZER": normalizer}
    blocks = B * ceil_div(T, ROWS.value) * H * ceil_div(K, D.value)
    return g, Launch(_log_gates_kernel, (blocks, 1, 1), arguments, {"num_warps": 4})


# K is specialised: if it is a multiple of 16, a thread reads and writes several gates at once.
@gluon.jit(do_not_specialize=["T", "H"])
def _log_gates_kernel(
    x_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, H, K], contiguous
    stride_b,
    stride_t,
    stride_h,
    T,
    H,
    K,
    NORMALIZER: gl.constexpr,
):
    """Computes the log gates of ROWS tokens and D keys of a head."""
    columns, rows = gl.cdiv(K, D), gl.cdiv(T, ROWS)
    head = gl.program_id(0) // columns
    h = head % H
    b = (head // H // rows).to(gl.int64)
    token = head // H % rows * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]  # [ROWS, 1]
    key = gl.program_id(0) % columns * D + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, D]
    inside = (token < T) & (key < K)  # [ROWS, D]
    x = gl.load(x_ptr + b * stride_b + token.to(gl.int64) * stride_t + h.to(gl.int64) * stride_h + key, inside, 0.0)
    gl.store(g_ptr + ((b * T + token) * H + h) * K + key, log_gates(x, NORMALIZER), inside)
