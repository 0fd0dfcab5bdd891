"""Computes log gates from logits, for kernels of several ops.

    g = log sigma(x) / normalizer        dg/dx = sigma(-x) / normalizer

x logits   g log gates, in nats   normalizer a positive integer
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_gates(x, NORMALIZER: tl.constexpr):
    """Returns log gates in float32: x itself, or log sigma(x) / NORMALIZER if NORMALIZER is given and x holds logits.

    log sigma(x) = min(x, 0) - log(1 + e) with e = exp(-|x|). For small e, a series replaces the logarithm, which would
    lose precision near 1.
    """
    x = x.to(tl.float32)
    if NORMALIZER is None:
        return x
    else:  # noqa: RET505 -- one branch is compiled
        e = tl.exp(-tl.abs(x))
        series = e * (1.0 - e * (0.5 - e * (1.0 / 3 - e * 0.25)))
        return (tl.minimum(x, 0.0) - tl.where(e < 1.0 / 64, series, tl.log(1.0 + e))) * (1.0 / NORMALIZER)


@triton.jit
def slope_of_gates(x, NORMALIZER: tl.constexpr):
    """Returns the derivative of log sigma(x) / NORMALIZER at the logits x, in float32."""
    return (1.0 / NORMALIZER) / (1.0 + tl.exp(x.to(tl.float32)))
