"""Places of chunks, decays, and products in units, which the general kernels of the delta rule share.

**Units.** In bfloat16, rounding A, G and the vectors that they multiply would be most of the error of the outputs, because
correlated keys make sums of like signs. float16 has three bits more, but a short range. So each row of a matrix is
divided by a unit, a power of two near its largest number, and the product is multiplied by the units again:

    x y^T  =  unit_x (x / unit_x) (y / unit_y)^T unit_y

The largest number of a row becomes 2^14 to 2^15, so numbers down to 2^-28 of it keep the precision of float16.

B batch   T tokens   I chunks   C tokens of a chunk   K key width   BK K rounded up to a power of two
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from gla_triton_kernels.chunks.segments import segment_at
from gla_triton_kernels.gla.general.backward import product, sums
from gla_triton_kernels.gla.shared.common import load_gates
from gla_triton_kernels.gla.shared.limits import LEAST_GATE
from gla_triton_runtime.arithmetic import LOG2E


@triton.jit
def chunk_at(order_ptr, i, T, chunks, C: tl.constexpr):
    """Returns (batch, first token, end, first token of its sequence, end of its sequence, number) of a chunk."""
    if order_ptr is None:
        start = i % chunks * C
        return i // chunks, start, tl.minimum(start + C, T), 0, T, i
    else:  # noqa: RET505 -- one branch is compiled
        number, start, end, opening, last = segment_at(order_ptr, i)
        return 0, start, end, opening, last, number


@triton.jit
def load_numbers(ptr, stride_t, stride_h, t, head, end, C: tl.constexpr):
    """Loads a number of each of C tokens from row t on, such as beta, in float32 [C]; 0 from row `end` on."""
    rows = (t + tl.arange(0, C)).to(tl.int64)  # [C]
    x = tl.load(ptr + rows * stride_t + tl.cast(head, tl.int64) * stride_h, mask=rows < end, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_log2_gates(
    ptr,
    stride_t,
    stride_h,
    t,
    head,
    column,
    end,
    GATE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Loads the log gates of C tokens in units of log 2: [C, BK] if each key has a gate, else [C, 1].

    A gate whose exp is 0 in float32 counts as `LEAST_GATE`, so sums of gates are finite.
    """
    g = load_gates(None, ptr, stride_t, stride_h, 0, t, head, column, end, GATE, NORMALIZER, K, C, BK)
    return tl.maximum(g, LEAST_GATE) * LOG2E


@triton.jit
def decays_of_tokens(g, SUMS: tl.constexpr):
    """Returns the decays from the start of a chunk through each token, and those after each token to its end.

    Sums of gates are never subtracted, so all exponents are at most 0 and a gate of any strength is exact.

    Args:
        g: [C, BK], and both results are [C, BK]; or [C, 1], and they are [C, 1].
    """
    row, column = tl.arange(0, g.shape[0])[:, None], tl.arange(0, g.shape[0])[None, :]  # [C, 1], [1, C]
    return tl.exp2(sums(column <= row, g, SUMS)), tl.exp2(sums(column > row, g, SUMS))


@triton.jit
def units_of_rows(x):
    """Returns the units [rows] of the rows of x [rows, columns]."""
    largest = tl.max(tl.abs(x), 1)  # [rows]
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000  # of the exponent alone: a power of two
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True) * 2.0**-14)


@triton.jit
def product_in_units(x, y, units, PRECISION: tl.constexpr):
    """Returns the product [rows, columns] of x [rows, C] and the transpose of a matrix y [columns, C].

    Args:
        y: [C, columns], the transpose, divided by units [columns] in float16; or in float32 without units.
        units: [columns]; None without units.
    """
    if units is None:
        return product(x, y, None, PRECISION)
    else:  # noqa: RET505 -- one branch is compiled
        unit = units_of_rows(x)  # [rows]
        return tl.dot((x / unit[:, None]).to(tl.float16), y) * unit[:, None] * units[None, :]
