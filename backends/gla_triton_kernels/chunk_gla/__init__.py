"""Gated linear attention over sequences, and over segments of them.

    forward.py backward.py summary.py   the plan of a call, and its launches
    kernel.py                           a kernel as a value, and the plans that are made of kernels
    cutting.py                          how sequences are cut into segments, and whether a cut pays
    seen.py                             widths and layouts that kernels see
    price.py cost.py                    predicted seconds of a kernel, and of a call
    tensors.py                          the tensors of a call, by name
    general/ sm90/                      a folder for each generation of GPU: kernels.py has the kernels as values, the
                                        other files have their code
    shared/                             kernels and helpers for every generation: segments of packed sequences, the
                                        scan of states, sums of partial gradients, copies to wider heads

Planning and prices import no Triton. It is imported when a call is prepared.
"""

from __future__ import annotations

from gla_core.dispatch.backend import Prepared
from gla_triton_kernels.chunk_gla import backward, forward, summary

_TOKENS = ("q", "k", "v", "g", "scale", "initial_state")


def chunk_gla_fwd(plan: forward.Plan) -> Prepared:
    """Returns chunk_gla_fwd by a plan of forward.py."""
    takes = (*_TOKENS, "output_final_state", "cu_seqlens", "checkpoint_every")
    return Prepared(lambda call: forward.prepare(call, plan), takes, forward.explained(plan))


def chunk_gla_bwd(plan: backward.Plan) -> Prepared:
    """Returns chunk_gla_bwd by a plan of backward.py."""
    takes = (*_TOKENS, "cu_seqlens", "checkpoints", "checkpoint_every", "do", "dstate")
    return Prepared(lambda call: backward.prepare(call, plan), takes, backward.explained(plan))


def chunk_gla_summary(plan: summary.Plan) -> Prepared:
    """Returns chunk_gla_summary by a plan of summary.py."""
    return Prepared(lambda call: summary.prepare(call, plan), ("left", "right", "g", "cu_seqlens", "backwards"))
