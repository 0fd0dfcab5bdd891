"""Gated linear attention over sequences, and over segments of them: one file per kernel and architecture.

    plan.py, cost.py       which kernels a call takes, and its predicted time; neither imports Triton
    call.py                what every call goes through
    forward*.py            outputs, and the state that leaves, from the state that enters
    states*.py, scan.py    states of segments from zero, and the states that enter segments from these

Modules are imported when they are first asked for: importing this package imports no Triton.
"""

from gla_triton_kernels.runtime.lazy import modules_of

__getattr__ = modules_of(__name__)
