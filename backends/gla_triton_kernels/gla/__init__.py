"""Computes gated linear attention over sequences, and over segments of them.

    forward.py backward.py summary.py   the plan of a call, and its launches
    ssd.py                              Mamba-2's scan by the kernel that reads its time steps
    seen.py                             the widths and layouts that kernels receive
    cost.py                             predicted seconds of a call
    tensors.py groups.py                the tensors of a call by name; gradients of groups of heads
    general/ sm90/                      kernels for every GPU, and for Hopper: kernels.py holds the kernels as values,
                                        the other files hold their code
    shared/                             loads, gates, limits and skips that kernels of both share
    step/                               one token, and several tokens, of each sequence

../chunks/ has what is not GLA's own: segments and how they are cut, their scan, prices, sums of partial results.
Plans and prices import no Triton. The first call that is prepared imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gla_core.dispatch.backend import OP_PARAMETERS, Constants, OpCall, Prepared
from gla_core.dispatch.lowering import lowered
from gla_triton_kernels.gla import backward, cost, forward, ssd, step, summary
from gla_triton_kernels.gla.step import cost as step_cost

_INPUTS = ("q", "k", "v", "g")
_FORWARD = ("scale", "initial_state", "output_final_state", "cu_seqlens", "checkpoint_every", "gate_normalizer")
_BACKWARD = ("scale", "initial_state", "cu_seqlens", "checkpoints", "checkpoint_every", "do", "dstate")
_SLOTS = ("pool", "cu_seqlens", "read_slots", "write_slots", "scale", "has_state")
_POOL = (*_SLOTS, "checkpoint_offsets", "checkpoint_slots", "pad_slot", "gate_normalizer", "out")
_SUMMARY = ("left", "right", "g", "cu_seqlens", "backwards", "gate_normalizer")


def ops(cut: bool) -> dict[str, Prepared]:
    """Returns the ops of the family by name.

    Args:
        cut: whether to cut sequences into segments where this takes less time. If not, sequences stay whole.
    """

    def op(prepare: Callable[..., Any], takes: tuple[str, ...], explain: Callable[..., list[str]] | None) -> Prepared:
        return Prepared(partial(prepare, cut=cut), takes, None if explain is None else partial(explain, cut=cut))

    chunk_gla_bwd = op(backward.prepare, (*_INPUTS, *_BACKWARD, "gate_normalizer"), backward.explain)
    scan_bwd = op(ssd.prepare_backward, OP_PARAMETERS["chunk_ssd_bwd"], ssd.explain_backward)
    chunk_gla_fwd = op(forward.prepare, (*_INPUTS, *_FORWARD), forward.explain)
    scan = op(ssd.prepare, OP_PARAMETERS["chunk_ssd_fwd"], ssd.explain)
    return {
        "chunk_gla_fwd": chunk_gla_fwd,
        "chunk_ssd_fwd": lowered("chunk_ssd_fwd", chunk_gla_fwd, scan, partial(ssd.refusal, cut=cut)),
        "chunk_gla_bwd": chunk_gla_bwd,
        "chunk_ssd_bwd": lowered("chunk_ssd_bwd", chunk_gla_bwd, scan_bwd, partial(ssd.backward_refusal, cut=cut)),
        "chunk_gla_pool": op(forward.prepare_pool, (*_INPUTS, *_POOL), forward.explain_pool),
        "chunk_gla_summary": op(summary.prepare, _SUMMARY, None),
        "recurrent_gla_step": step.STEP,
        "recurrent_gla_layer_step": step.LAYER_STEP,
        "recurrent_ssd_step": step.SSD_STEP,
        "recurrent_gla_steps": step.STEPS,
        "recurrent_gla_replay": step.REPLAY,
    }


def seconds(cut: bool) -> dict[str, Callable[[OpCall, Constants], float]]:
    """Returns the functions that predict the seconds of calls of these ops; see `ops`."""
    plan = partial(forward.plan, cut=cut)
    return {
        "chunk_gla_fwd": cost.predictor(plan, cost.forward_prices),
        "chunk_gla_bwd": cost.predictor(partial(backward.plan, cut=cut), cost.backward_prices),
        "chunk_gla_pool": cost.pool_predictor(plan),
        "chunk_gla_summary": cost.predictor(partial(summary.plan, cut=cut), cost.summary_prices),
        "recurrent_gla_step": step_cost.seconds,
        "recurrent_gla_layer_step": step_cost.seconds,
        "recurrent_ssd_step": step_cost.seconds,
        "recurrent_gla_steps": step_cost.seconds_of_steps,
        "recurrent_gla_replay": step_cost.seconds_of_replay,
    }
