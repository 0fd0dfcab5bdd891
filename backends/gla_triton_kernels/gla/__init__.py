"""Computes gated linear attention over sequences, and over segments of them.

    forward.py backward.py summary.py   the plan of a call, and its launches
    seen.py                             the widths and layouts that kernels receive
    cost.py                             predicted seconds of a call
    tensors.py groups.py                the tensors of a call by name; gradients of groups of heads
    general/ sm90/                      kernels for every GPU, and for Hopper: kernels.py holds the kernels as values,
                                        the other files hold their code
    shared/                             loads, gates and limits that kernels of both share
    step/                               one token, and several tokens, of each sequence

../chunks/ has what is not GLA's own: segments and how they are cut, their scan, prices, sums of partial results.
Plans and prices import no Triton. The first call that is prepared imports it.
"""

from __future__ import annotations

from functools import partial

from gla_core.dispatch.backend import Prepared
from gla_triton_kernels.gla import backward, forward, summary

_INPUTS = ("q", "k", "v", "g")


def chunk_gla_fwd(plan: forward.Plan) -> Prepared:
    """Returns the op chunk_gla_fwd, computed by a plan of forward.py."""
    takes = (
        *_INPUTS,
        "scale",
        "initial_state",
        "output_final_state",
        "cu_seqlens",
        "checkpoint_every",
        "gate_normalizer",
    )
    return Prepared(partial(forward.prepare, plan=plan), takes, forward.explained(plan))


def chunk_gla_pool(plan: forward.Plan) -> Prepared:
    """Returns the op chunk_gla_pool, computed by a plan of forward.py."""
    slots = ("pool", "cu_seqlens", "read_slots", "write_slots")
    rest = ("has_state", "checkpoint_offsets", "checkpoint_slots", "pad_slot", "gate_normalizer", "out")
    takes = (*_INPUTS, *slots, "scale", *rest)
    return Prepared(partial(forward.prepare_pool, plan=plan), takes, forward.explained(plan))


def chunk_gla_bwd(plan: backward.Plan) -> Prepared:
    """Returns the op chunk_gla_bwd, computed by a plan of backward.py."""
    takes = (
        *_INPUTS,
        "scale",
        "initial_state",
        "cu_seqlens",
        "checkpoints",
        "checkpoint_every",
        "do",
        "dstate",
        "gate_normalizer",
    )
    return Prepared(partial(backward.prepare, plan=plan), takes, backward.explained(plan))


def chunk_gla_summary(plan: summary.Plan) -> Prepared:
    """Returns the op chunk_gla_summary, computed by a plan of summary.py."""
    takes = ("left", "right", "g", "cu_seqlens", "backwards", "gate_normalizer")
    return Prepared(partial(summary.prepare, plan=plan), takes)
