"""Softmax along one dimension: each row in one pass, or in splits that are computed at once.

plan.py                launch parameters
launches.py            the launches of a call
one_pass.py splits.py  the kernels; sweep.py has what they share, rows.py a tensor as rows
cost.py                predicted seconds
"""

from __future__ import annotations

from collections.abc import Callable

from gla_core.dispatch.backend import OpCall, Prepared


def _prepare_one_pass(call: OpCall) -> Callable[..., object]:
    from gla_triton_kernels.online_softmax.launches import prepare_one_pass

    return prepare_one_pass(call)


def _prepare_splits(call: OpCall) -> Callable[..., object]:
    from gla_triton_kernels.online_softmax.launches import prepare_splits

    return prepare_splits(call)


ONE_PASS = Prepared(_prepare_one_pass, ("x", "dim"))
"""online_softmax, each row by one block: held on chip if it fits, read twice if not."""
SPLITS = Prepared(_prepare_splits, ("x", "dim"))
"""online_softmax with long rows in splits: one kernel sums all splits at once, a second one writes."""
