"""Ops that need not be written: each function makes an implementation of an op from an implementation of another.

The implementation may be a function or a `Prepared`, and the result is of the same kind. `forwards_of_pool` and its
like describe the calls of the other op, by which a plan or a cost model can be made.
"""

from gla_core.dispatch.composed.layer_step import through_layer_step
from gla_core.dispatch.composed.pool import forward_of_pool, forwards_of_pool, through_pool
from gla_core.dispatch.composed.replay import step_of_replay, through_replay
from gla_core.dispatch.composed.steps import step_of_steps, through_steps

__all__ = [
    "forward_of_pool",
    "forwards_of_pool",
    "step_of_replay",
    "step_of_steps",
    "through_layer_step",
    "through_pool",
    "through_replay",
    "through_steps",
]
