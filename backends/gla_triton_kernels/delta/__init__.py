"""Computes delta rules: KDA (a gate for each key), the gated delta rule (a gate for each head) and DeltaNet (no gate).

    forward.py backward.py   the plan of a call over sequences, and its launches
    halves.py                the gradients of wide heads as those of two heads, on Hopper
    summary.py               how sequences change the states before them, on Hopper
    step.py                  one token, and several tokens, of each sequence
    plan.py cost.py          launch parameters, and predicted seconds of a call
    tensors.py               the tensors of a call by name
    general/ sm90/           kernels for every GPU, and for Hopper

A delta rule is gated linear attention (../gla/) of u in place of v, so these kernels load tiles and gates as its do.
Plans import no Triton. The first call that is prepared imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gla_core.dispatch.backend import OP_PARAMETERS, Constants, OpCall, Prepared
from gla_core.dispatch.lowering import lowered
from gla_triton_kernels.delta import backward, cost, forward, step, summary
from gla_triton_kernels.delta.plan import MOST_KEYS
from gla_triton_kernels.gla.step import cost as step_cost

OVER_SEQUENCES = ("chunk_delta_fwd", "chunk_delta_bwd")
KEY_WIDTHS = range(1, MOST_KEYS + 1)
"""The key widths of heads that the kernels over sequences compute."""

_INPUTS = ("q", "k", "v", "g", "beta", "scale", "initial_state")
_FORWARD = (*_INPUTS, "output_final_state", "cu_seqlens", "checkpoint_every", "gate_normalizer")
_SAVED = ("cu_seqlens", "checkpoints", "checkpoint_every", "do", "dstate")
_BACKWARD = (*_INPUTS, *_SAVED, "gate_normalizer")


def seconds(cut: bool) -> dict[str, Callable[[OpCall, Constants], float]]:
    """Returns the functions that predict the seconds of calls of these ops; see `ops`."""
    return {
        "chunk_delta_fwd": partial(cost.forward_seconds, cut=cut),
        "chunk_delta_bwd": partial(cost.backward_seconds, cut=cut),
        "recurrent_delta_step": step_cost.seconds,
        "recurrent_delta_steps": step_cost.seconds_of_steps,
        "recurrent_delta_replay": step_cost.seconds_of_replay,
    }


def ops(cut: bool) -> dict[str, Prepared]:
    """Returns the ops of the family by name.

    Args:
        cut: whether to cut sequences into segments if they do not fill the device. If not, sequences stay whole.
    """
    chunk_delta_fwd = Prepared(partial(forward.prepare, cut=cut), _FORWARD, partial(forward.explain, cut=cut))
    chunk_delta_bwd = Prepared(partial(backward.prepare, cut=cut), _BACKWARD, partial(backward.explain, cut=cut))

    def summaries(op: str, part: Prepared, prepare: Callable[..., Callable[..., tuple]]) -> Prepared:
        direct = Prepared(partial(prepare, cut=cut), OP_PARAMETERS[op], partial(summary.explain, cut=cut))
        return lowered(op, part, direct, summary.refusal)

    explain_pool = partial(forward.explain_pool, cut=cut)
    pool = Prepared(partial(forward.prepare_pool, cut=cut), OP_PARAMETERS["chunk_delta_pool"], explain_pool)
    return {
        "chunk_delta_fwd": chunk_delta_fwd,
        "chunk_delta_pool": lowered("chunk_delta_pool", chunk_delta_fwd, pool, partial(forward.pool_refusal, cut=cut)),
        "chunk_delta_bwd": chunk_delta_bwd,
        "chunk_delta_summary": summaries("chunk_delta_summary", chunk_delta_fwd, summary.prepare),
        "chunk_delta_gradient_summary": summaries(
            "chunk_delta_gradient_summary", chunk_delta_bwd, summary.prepare_gradient
        ),
        "recurrent_delta_step": step.STEP,
        "recurrent_delta_steps": step.STEPS,
        "recurrent_delta_replay": step.REPLAY,
    }
