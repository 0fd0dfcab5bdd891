"""Gated linear attention over sequences, and over segments of them: one file per kernel and architecture.

    plan*.py, cost*.py     which kernels a call takes, and its predicted time; none imports Triton
    call.py                what every call goes through, forward and backward
    widths.py              heads of widths that TMA does not move: copies with zeros behind them, results copied back
    outputs.py             the kernels of a forward in order; of these forward*.py computes outputs, and the state
                           that leaves, from the state that enters
    segments.py            sequences, and what they are cut into, and in which order blocks take them; padding.py clears
                           rows that belong to none
    before_segments.py     the states that enter segments, or the gradients of those that leave them: states*.py builds
                           them from zero, scan.py joins them
    summary.py             states from zero and decays of whole sequences, of the same kernels
    gradients.py           the kernels of a backward in order; of these backward*.py computes the gradients, for wide
                           heads after state_gradients_sm90.py, pairs.py adds what those for SM90 leave out,
                           partials.py sums what blocks or query heads give
    common*.py             what kernels share

Modules are imported when they are first asked for: importing this package imports no Triton.
"""

from gla_triton_kernels.runtime.lazy import modules_of

__getattr__ = modules_of(__name__)
