"""Softmax along one dimension: one block computes each row, or several blocks compute splits of a row in parallel.

plan.py                launch parameters
launches.py            the launches of a call
one_pass.py splits.py  the kernels; sweep.py has functions that both use, rows.py describes a tensor as rows
backward.py            the kernels of the gradient
cost.py                predicted seconds
"""

from __future__ import annotations

from collections.abc import Callable

from gla_core.dispatch.backend import OpCall, Prepared


def _op(name: str, *takes: str) -> Prepared:
    """Returns an op that a function of launches.py prepares."""

    def prepare(call: OpCall) -> Callable[..., object]:
        from gla_triton_kernels.online_softmax import launches

        return getattr(launches, name)(call)

    return Prepared(prepare, takes)


ONE_PASS = {
    "online_softmax": _op("prepare_one_pass", "x", "dim"),
    "online_softmax_bwd": _op("prepare_gradient_one_pass", "x", "dim", "dy"),
}
"""The ops with one block per row: the block holds the row on chip if it fits, and otherwise reads it twice."""
SPLITS = {
    "online_softmax": _op("prepare_splits", "x", "dim"),
    "online_softmax_bwd": _op("prepare_gradient_splits", "x", "dim", "dy"),
}
"""The ops with long rows in splits: one kernel sums all splits in parallel, and a second kernel writes the result."""
