"""Packed sequences and batches: each sequence is computed as if it were alone, and rows of no sequence are left out."""

from __future__ import annotations

import torch

import gla_core as gla
from gla_core.conformance import calls
from gla_core.conformance.calls import RINGS
from gla_core.conformance.cases import (
    DRAFTS,
    GRADIENTS_OF_STATES,
    PROMPTS,
    REPLAYS,
    SEQUENCES,
    SERVING,
    STEPS,
    WITH_STATES,
    having,
    over,
)
from gla_core.conformance.tolerances import FORWARD

PACKED = "packed padded gated_padded packed_grouped per_head_grouped per_head_padded constant_packed many_sequences"


@over(WITH_STATES, tag="packed", dtypes="rotating")
def test_packed_equals_separate(backend, case, measure):
    x = calls.call_arguments(case)
    N, offsets = len(x["cu_seqlens"]) - 1, x["cu_seqlens"]
    parts = [calls.results(case.op, calls.alone(case.op, x, n), backend.name) for n in range(N)]
    separate = {"o": torch.cat([p["o"] for p in parts], 1), "state": torch.cat([p["state"] for p in parts])}
    out = calls.results(case.op, x, backend.name)
    calls.compare(
        case.op, x, {**out, "o": out["o"][:, offsets[0] : offsets[-1]]}, separate, measure, calls.twice(FORWARD)
    )


@over(WITH_STATES, tag="packed", dtypes="one")
def test_packed_offsets_may_be_int32(backend, case, measure):
    x = calls.call_arguments(case)
    calls.check(case.op, {**x, "cu_seqlens": x["cu_seqlens"].int()}, backend.name, measure)


@over(
    (*WITH_STATES, *SERVING, *having("state"), *GRADIENTS_OF_STATES),
    few={
        (*WITH_STATES, *GRADIENTS_OF_STATES): PACKED,
        PROMPTS: "small",
        STEPS: "small",
        "recurrent_gla_layer_step": "small grouped per_head",
        "recurrent_ssd_step": "small grouped_values plain",
        DRAFTS: "small accepted per_head",
        REPLAYS: "small grouped per_head",
    },
    dtypes="rotating",
    requires="deterministic",
)
def test_batch_invariance(backend, case, measure):
    """Under `batch_invariant`, a sequence has the same bits alone, packed with others, and as a row of a batch."""
    x = calls.call_arguments(case)
    with gla.batch_invariant(64):
        together = calls.results(case.op, x, backend.name)
        for n in range(len(x["q"]) if x.get("cu_seqlens") is None else len(x["cu_seqlens"]) - 1):
            y = calls.alone(case.op, x, n)
            single, share = calls.results(case.op, y, backend.name), calls.sequence_share(case.op, x, together, n)
            measure(single, share, 0)
            for name, at in calls.expected(case.op, y).written.items() if "pool" in x else ():
                measure({name: single[name][at]}, {name: together[name][at]}, 0)


# ---- rows of no sequence


@over(
    (*SEQUENCES, *GRADIENTS_OF_STATES), "padded", "gated_padded", "per_head_padded", "constant_packed", functions=True
)
def test_padding(backend, case, measure):
    """Rows before the first sequence and after the last one may hold anything, and so may the gradients of their o.

    Their o and all their gradients are exactly 0, and no other result depends on them.
    """
    x = calls.call_arguments(case)
    ref = calls.expected(case.call, x).results
    rows = calls.rows_of_no_sequence(x["cu_seqlens"], len(next(iter(x.values()))[0]))
    for y in calls.tokens(case.call, x).values():
        y[:, rows] = torch.nan
    with calls.poisoned(backend.can(case.op), case.device):
        out = calls.results(case.call, x, backend.name)
    with_tokens = [name for name, dims in calls.dims_of(case.call, out).items() if dims[:2] == ["B", "T"]]
    padding = {f"{name} of the padding": out[name][:, rows] for name in with_tokens}
    measure(padding, {name: torch.zeros_like(y) for name, y in padding.items()}, 0)
    calls.compare(case.call, x, out, ref, measure)


@over(
    SERVING,
    few={PROMPTS: "padded per_head constant", DRAFTS: "packed empty_batch", REPLAYS: "packed empty_batch"},
    dtypes="rotating",
)
def test_rows_of_no_sequence(backend, case, measure):
    """They may hold anything, as may tokens of a sequence for which slots or rings have no room; their o is 0."""
    x = calls.call_arguments(case, leading=4, padding=9)
    rows = calls.rows_of_no_sequence(x["cu_seqlens"], x["q"].shape[1])
    if "slots" in x and len(x["slots"]):  # leave room for three tokens
        cut = {name: x[name][:, :6] for name in RINGS if x.get(name) is not None} or {"slots": x["slots"][:, :3]}
        x |= cut
        rows[x["cu_seqlens"][1] + 3] = True  # the fourth token of a sequence
    for y in calls.tokens(case.op, x).values():
        y[:, rows] = torch.nan
    with calls.poisoned(backend.can(case.op), case.device):
        out = calls.check(case.op, x, backend.name, measure)
    padding = out["o"][:, rows]
    measure({"o of the padding": padding}, {"o of the padding": torch.zeros_like(padding)}, 0)
    assert out["o"].isfinite().all()
