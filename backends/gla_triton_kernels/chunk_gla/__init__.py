"""Computes gated linear attention over sequences, and over segments of them.

    forward.py backward.py summary.py   the plan of a call, and its launches
    kernel.py                           a kernel as a value, and the plans that consist of kernels
    cutting.py                          the length of segments, and whether a cut saves time
    seen.py                             the widths and layouts that kernels receive
    price.py cost.py                    predicted seconds of a kernel, and of a call
    tensors.py                          the tensors of a call, by name
    general/ sm90/                      kernels for every GPU, and for Hopper: kernels.py holds the kernels as values,
                                        the other files hold their code
    shared/                             kernels and helpers for every GPU: segments of packed sequences, the scan of
                                        states, sums of partial gradients, copies to wider heads

Plans and prices import no Triton. The first call that is prepared imports it.
"""

from __future__ import annotations

from gla_core.dispatch.backend import Prepared
from gla_triton_kernels.chunk_gla import backward, forward, summary

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
    return Prepared(lambda call: forward.prepare(call, plan), takes, forward.explained(plan))


def chunk_gla_pool(plan: forward.Plan) -> Prepared:
    """Returns the op chunk_gla_pool, computed by a plan of forward.py."""
    slots = ("pool", "cu_seqlens", "read_slots", "write_slots")
    rest = ("has_state", "checkpoint_offsets", "checkpoint_slots", "pad_slot", "gate_normalizer", "out")
    takes = (*_INPUTS, *slots, "scale", *rest)
    return Prepared(lambda call: forward.prepare_pool(call, plan), takes, forward.explained(plan))


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
    return Prepared(lambda call: backward.prepare(call, plan), takes, backward.explained(plan))


def chunk_gla_summary(plan: summary.Plan) -> Prepared:
    """Returns the op chunk_gla_summary, computed by a plan of summary.py."""
    return Prepared(lambda call: summary.prepare(call, plan), ("left", "right", "g", "cu_seqlens", "backwards"))
