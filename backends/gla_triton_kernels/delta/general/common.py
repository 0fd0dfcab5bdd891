"""Places of chunks, decays, and products in units, which the general kernels of the delta rule share.

**Units.** In bfloat16, rounding operands would be most of the error of the outputs, because correlated keys make sums
of like signs, and because a state explains values that are then subtracted. float16 has three bits more, but a short
range. So each row of a matrix is divided by a unit, a power of two near its largest number, and the product is
multiplied by the units again:

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
def load_units(numbers_ptr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Loads the units of the rows of A and of G of a chunk [C]; they are 1 unless matrices are in units."""
    if PRECISION == "units":
        i_c = tl.arange(0, C)  # [C]
        return tl.load(numbers_ptr + i_c), tl.load(numbers_ptr + C + i_c)
    else:  # noqa: RET505 -- one branch is compiled
        return 1.0, 1.0  # Triton 3.6 cannot assign None to one of several names


@triton.jit
def load_factors(numbers_ptr, C: tl.constexpr, FACTORS: tl.constexpr):
    """Loads the factors of the rows of kin, of qin and of kout of a chunk [1, C]; they are 1 without factors."""
    if FACTORS:
        at = numbers_ptr + 2 * C + tl.arange(0, C)[None, :]  # [1, C]
        return tl.load(at), tl.load(at + C), tl.load(at + 2 * C)
    else:  # noqa: RET505 -- one branch is compiled
        return 1.0, 1.0, 1.0


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
    """Returns the units [rows] of the rows of x [rows, columns]. That of a row of zeros is small."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 2.0**-100)  # [rows]
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000  # of the exponent alone: a power of two
    return bits.to(tl.float32, bitcast=True) * 2.0**-14


@triton.jit
def in_units(x):
    """Returns the rows of x [rows, columns] in float16, divided by their units, and the units [rows, 1]."""
    unit = units_of_rows(x)[:, None]  # [rows, 1]
    return (x * (1.0 / unit)).to(tl.float16), unit


@triton.jit
def as_operand(x, PRECISION: tl.constexpr):
    """Returns x [rows, columns] as an operand of products, and the units of its rows [rows, 1] or 1."""
    if PRECISION == "units":
        return in_units(x.to(tl.float32))
    else:  # noqa: RET505 -- one branch is compiled
        return x.to(tl.float32), 1.0


@triton.jit
def add_product(acc, x, unit, y, PRECISION: tl.constexpr):
    """Returns acc [rows, columns] plus the product of x [rows, C], from `as_operand`, and y [C, columns]."""
    if PRECISION == "units":
        return acc + tl.dot(x, y) * unit
    else:  # noqa: RET505 -- one branch is compiled
        return product(x, y, acc, PRECISION)


@triton.jit
def product_of_rows(x, unit, y, factors, PRECISION: tl.constexpr):
    """Returns the product [rows, C] of x [rows, BK] and the transpose of y [C, BK], whose rows have factors.

    Args:
        x, unit: what `as_operand` returns.
        factors: [1, C]; 1 without factors.
    """
    if PRECISION == "units":
        return tl.dot(x, tl.trans(y)) * (unit * factors)
    else:  # noqa: RET505 -- one branch is compiled
        z = product(x, tl.trans(y), None, PRECISION)  # [rows, C]
        return z * factors


@triton.jit
def product_in_units(x, y, units, PRECISION: tl.constexpr):
    """Returns the product [rows, columns] of x [rows, C] and the transpose of a matrix, y [C, columns].

    Args:
        y: float16, each column divided by its unit; or float32 without units.
        units: [columns]; unused without units.
    """
    if PRECISION == "units":
        x, unit = in_units(x)
        return tl.dot(x, y) * unit * units[None, :]
    else:  # noqa: RET505 -- one branch is compiled
        return product(x, y, None, PRECISION)


@triton.jit
def product_with_units(x, y, units, PRECISION: tl.constexpr):
    """Returns the product [rows, columns] of x [rows, C] and a matrix y [C, columns] whose rows were divided by units.

    Args:
        units: [C]; unused without units.
    """
    if PRECISION == "units":
        x, unit = in_units(x * units[None, :])
        return tl.dot(x, y) * unit
    else:  # noqa: RET505 -- one branch is compiled
        return product(x, y, None, PRECISION)


@triton.jit
def transposed(stride_t, stride_h, t, head, i_v, end, D: tl.constexpr, C: tl.constexpr):
    """Returns the offsets and the mask of the transpose of C rows of one head from row t on, of columns i_v [BV, 1]."""
    rows = (t + tl.arange(0, C)).to(tl.int64)[None, :]  # [1, C]
    return tl.cast(head, tl.int64) * stride_h + rows * stride_t + i_v, (rows < end) & (i_v < D)  # [BV, C]


@triton.jit
def load_transposed(ptr, stride_t, stride_h, t, head, i_v, end, D: tl.constexpr, C: tl.constexpr):
    """Loads the transpose [BV, C] of C rows of one head; it is 0 from row `end` on and from column D on."""
    offsets, inside = transposed(stride_t, stride_h, t, head, i_v, end, D, C)
    return tl.load(ptr + offsets, mask=inside, other=0.0)


@triton.jit
def store_transposed(ptr, stride_t, stride_h, t, head, i_v, end, x, D: tl.constexpr, C: tl.constexpr):
    """Writes x [BV, C] to the elements that `load_transposed` loads."""
    offsets, inside = transposed(stride_t, stride_h, t, head, i_v, end, D, C)
    tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def pair_decays(g, row, column, LEVELS: tl.constexpr):
    """Returns the decays D_ts of pairs s <= t [C, C] from gates g [C, 1]; the rest is undefined, but finite."""
    apart = row ^ column  # [C, C]
    D = tl.full(apart.shape, 1.0, tl.float32)
    for level in tl.range(0, LEVELS, num_stages=1):
        m = 1 << level
        chosen = (apart < m) & tl.where((row & m) != 0, column <= row, column > row)  # gate `column` decays `row`
        decay = tl.exp2(tl.sum(tl.where(chosen, tl.trans(g), 0.0), 1))[:, None]  # [C, 1]
        D = tl.where(apart >> level == 1, decay * tl.trans(decay), D)
    return D
