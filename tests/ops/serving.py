"""Calls of the ops that write states in place: their arguments, the values that the oracle expects, and comparisons."""

from collections.abc import Mapping
from typing import Any

import torch

import gla_core as gla
from gla_core.conformance.calls import oracle_results
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import arguments as workload_arguments
from gla_core.workloads.named import Workload

POOL, STEPS, REPLAY = "chunk_gla_pool", "recurrent_gla_steps", "recurrent_gla_replay"
LAYER_STEP, STEP = "recurrent_gla_layer_step", "recurrent_gla_step"


_PROMPTS = {"lengths": (3, 5), "H": 2, "K": 4, "V": 3, "pool": 6, "read_slots": (4, 1)}
_DRAFTS = {"B": 2, "T": 3, "H": 2, "K": 4, "V": 3, "pool": 8}
_LAST_CALL = {"L": 6, "slots": (4, 2), "ring_start": (5, 0), "num_accepted": (3, 1)}
LONG = {**_PROMPTS, "lengths": (70, 130), "H": 1, "K": 2, "V": 2}
"""The sizes of a prompt that is long enough for snapshots."""
OPS: Mapping[str, Mapping[str, Any]] = {
    POOL: _PROMPTS,
    STEPS: {**_DRAFTS, "slots": ((4, 1, 0), (2, 3, 5))},
    REPLAY: {**_DRAFTS, **_LAST_CALL},
    LAYER_STEP: {"B": 2, "H": 2, "G": 2, "K": 4, "V": 3},
}
"""The sizes of a call of each op, as those of a workload."""


def ints(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


def arguments(op, sizes=None, **changes):
    """Returns the arguments of a call by their public names, with changes."""
    workload = Workload("", op, frozenset(), OPS[op] if sizes is None else sizes)
    return {**workload_arguments(workload), **changes}


def call(op, x, **options):
    return getattr(gla, op)(**x, **options)


def expected(op, x, **options):
    """Returns o and all that a call writes; a given `out` is o."""
    return oracle_results(op, {name: y for name, y in x.items() if name != "out"}, **options)


def written(op):
    """Returns the names of the arguments that a call writes."""
    return ABSTRACT_OPS[op].written


def memory(op, x):
    """Returns all that a call writes but `out`."""
    return {name: x[name] for name in written(op) if name != "out" and x.get(name) is not None}


def assert_computed(op, o, x, wanted, budget=FORWARD[torch.float32]):
    """Compares o, and all that was written, with the expected values."""
    results = {"o": o, **memory(op, x)}
    if x.get("out") is not None:
        assert relative_error(x["out"], wanted["o"]) <= budget
    assert set(results) == set(wanted)
    assert {name: error for name in wanted if (error := relative_error(results[name], wanted[name])) > budget} == {}


def check(op, x, budget=FORWARD[torch.float32], **options):
    """Calls an op, and compares o, and all that it writes, with the oracle."""
    wanted = expected(op, x, gate_normalizer=options.get("gate_normalizer"))
    assert_computed(op, call(op, x, **options), x, wanted, budget)


# ---- functions of third parties

_REFERENCE = get("reference").ops


def plain_forward(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    """Computes chunk_gla_fwd without optional arguments, as a third party's backend may."""
    assert initial_state.is_contiguous()
    return _REFERENCE["chunk_gla_fwd"](q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, None)


def keyword_only_forward(q, k, v, *, scale, cu_seqlens, g, initial_state, output_final_state):
    return plain_forward(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)


def plain_step(q, k, v, g, state, scale, state_indices, inplace):
    """Computes recurrent_gla_step without an optional argument, as a third party's backend may."""
    return _REFERENCE["recurrent_gla_step"](q, k, v, g, state, scale, state_indices, None, None, inplace)


def keyword_only_step(q, k, v, *, scale, g, state, state_indices, inplace):
    return plain_step(q, k, v, g, state, scale, state_indices, inplace)
