"""Functions shared by steps.py and replay.py, whose kernels compute several tokens of each sequence.

Both kernels have one program per sequence n, value head h and BV values.

B batch   T tokens of a row   N sequences   S most tokens of a sequence   Hv heads of values, states and gates
G query heads of a state   V value width   BK keys of a block, all keys of a head   BV values of a block
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gla_triton_runtime.gates import log_gates


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Returns the strides of rows, tokens and heads of x [B, T, heads, width] or [B, T, heads], as arguments.

    All tokens share a gate [heads], so its strides of rows and tokens are 0.
    """
    b, t, h = (0, 0, x.stride(0)) if x.ndim == 1 else x.stride()[:3]
    return {f"{name}_b": b, f"{name}_t": t, f"{name}_h": h}


@triton.jit
def locate(
    o_ptr, offsets_ptr, n, N, T, h, columns, S: tl.constexpr, Hv: tl.constexpr, G: tl.constexpr, V: tl.constexpr
):
    """Returns the row of the batch, the first token (int64) and the number of tokens of sequence n.

    Also writes 0 to two kinds of outputs: of tokens of the sequence after the first S, and of tokens before the first
    sequence or after the last one.

    Args:
        offsets_ptr: [N+1], or None if sequence n is row n.
        columns: the columns of outputs that this program writes, [BV].
    """
    b, start, length = n, n * 0, T
    if offsets_ptr is not None:
        start = tl.load(offsets_ptr + n).to(tl.int64)
        end = tl.load(offsets_ptr + n + 1).to(tl.int64)
        b, length = n * 0, (end - start).to(tl.int32)
        _clear(o_ptr, start + S, end, h, columns, Hv, G, V)
        if n == 0:
            _clear(o_ptr, n, start, h, columns, Hv, G, V)
        if n == N - 1:
            _clear(o_ptr, end, T, h, columns, Hv, G, V)
    return b, start, length


@triton.jit
def _clear(o_ptr, first, end, h, columns, Hv: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """Writes 0 to `columns` [BV] of the outputs of a head for tokens `first` (int64) to `end` - 1."""
    o_block = o_ptr + (first * Hv + h) * G * V + columns  # [BV]
    for _ in range((end - first).to(tl.int32)):
        for i in range(G):
            tl.store(o_block + i * V, tl.zeros(columns.shape, o_ptr.dtype.element_ty), mask=columns < V)
        o_block += Hv * G * V


@triton.jit
def load_gates(g_block, rows, in_k, live, OF_KEYS: tl.constexpr, NORMALIZER: tl.constexpr):
    """Returns the log gates of a token in float32: [BK] if OF_KEYS, else a number. If not `live`, they mean nothing."""
    if OF_KEYS:
        return log_gates(tl.load(g_block + rows, mask=in_k & live, other=0.0), NORMALIZER)
    else:  # noqa: RET505 -- one branch is compiled
        return log_gates(tl.load(g_block, mask=live, other=0.0), NORMALIZER)


@triton.jit
def decayed(state, g, OF_KEYS: tl.constexpr):
    """Returns a state [BK, BV] after the decay by log gates g, [BK] if OF_KEYS, else one number."""
    if OF_KEYS:
        return state * tl.exp(g)[:, None]
    else:  # noqa: RET505 -- one branch is compiled
        return state * tl.exp(g)


@triton.jit
def write_outputs(o_block, q_block, q_h, state, scale, in_k, in_v, live, there, G: tl.constexpr, V: tl.constexpr):
    """Writes the outputs of a token for the G query heads of a state.

    Args:
        o_block: pointers to the output of the first query head [BV].
        q_block: pointers to the first query head [BK].
        state: the state after the token [BK, BV].
        in_k, in_v: masks of the keys [BK] and the values [BV] that exist.
        live: whether the token is computed; otherwise its outputs are 0.
        there: whether the token exists; otherwise nothing is written.
    """
    for _ in range(G):
        q = tl.load(q_block, mask=in_k & live, other=0.0)  # [BK]
        o = tl.where(live, scale * tl.sum(q.to(tl.float32)[:, None] * state, axis=0), 0.0)  # [BV]
        tl.store(o_block, o.to(o_block.dtype.element_ty), mask=in_v & there)
        q_block += q_h
        o_block += V
