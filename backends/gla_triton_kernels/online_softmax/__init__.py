"""Softmax along one dimension: one block computes each row, or several blocks compute splits of a row in parallel.

plan.py                launch parameters
launches.py            the launches of a call
one_pass.py splits.py  the kernels; sweep.py has functions that both use, rows.py describes a tensor as rows
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
"""online_softmax with one block per row: the block holds the row on chip if it fits, and otherwise reads it twice."""
SPLITS = Prepared(_prepare_splits, ("x", "dim"))
"""online_softmax with long rows in splits: one kernel sums all splits in parallel, and a second kernel writes y."""
