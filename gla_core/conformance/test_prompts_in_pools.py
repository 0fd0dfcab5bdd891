"""Prompts in a pool: slots outside the pool, the pad slot, checkpoints, calls in a row, and equal calls without one."""

from __future__ import annotations

import itertools

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import call_arguments, check, compare, public_op, results, run, span, twice
from gla_core.conformance.cases import PROMPTS, over, relative
from gla_core.conformance.tolerances import FORWARD
from gla_core.dispatch.slots import states_of_slots
from gla_core.dispatch.tensors import wide

OPTIONAL = ("write_slots", "has_state", "snapshot_offsets", "snapshot_slots")
SLOTS = ("read_slots", "write_slots", "snapshot_slots")


@over(PROMPTS, "small", "scattered_slots", "checkpoints", dtypes="rotating")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pad", [-1, -3, "P", 2**30])
def test_slots_outside_the_pool(backend, case, pad, index_dtype, measure):
    """Such a slot is neither read nor written; the sequence starts from 0, and o is computed."""
    x = call_arguments(case)
    pad = len(x["pool"]) if pad == "P" else pad
    for name in SLOTS:
        if x[name] is not None:
            x[name] = x[name].to(index_dtype)
            x[name][0] = pad
    x["cu_seqlens"] = x["cu_seqlens"].to(index_dtype)
    check(case.op, x, backend.name, measure)


@over(PROMPTS, "small", "scattered_slots", "checkpoints", dtypes="rotating")
def test_the_pad_slot(backend, case, measure):
    """The pad slot may be a slot of the pool, and several sequences may name it. It holds NaN, and keeps it."""
    for name in SLOTS:
        x = call_arguments(case)
        if name == "write_slots" and x[name] is None:
            x[name] = x["read_slots"].clone()
        if x[name] is not None:
            x["pad_slot"] = len(x["pool"]) - 1
            x[name][:2] = x["pad_slot"]
            x["pool"][x["pad_slot"]] = torch.nan
            check(case.op, x, backend.name, measure)


@over(PROMPTS, "checkpoints", "padded", "grouped", dtypes="rotating")
@pytest.mark.parametrize("offset", [-64, 0, 64, "length", 2**30])
def test_snapshot_offsets(backend, case, offset, measure):
    """A checkpoint lies inside its sequence; for any other offset nothing is written."""
    x = call_arguments(case, pool=12)
    N = len(x["read_slots"])
    sizes = x["cu_seqlens"].diff()
    x["snapshot_offsets"] = sizes if offset == "length" else torch.full_like(sizes, offset)
    x["snapshot_slots"] = torch.arange(12 - N, 12, device=case.device)
    x["snapshot_slots"][x["snapshot_slots"] <= x["read_slots"].max()] = -1
    check(case.op, x, backend.name, measure)


@over(PROMPTS, dtypes="rotating", also="initial_state")
def test_equals_a_call_without_a_pool(backend, case, measure):
    """The call equals one from states that are gathered before, and scattered after it."""
    x = call_arguments(case)
    states = states_of_slots(x["pool"], x["read_slots"], x["has_state"], wide(case.dtype), x["pad_slot"])
    y = {name: x[name] for name in (*public_op(case.op).tokens, "cu_seqlens")}
    ref = run(relative(case.op, "initial_state"), {**y, "initial_state": states}, backend.name)
    compare(case.op, x, run(case.op, x, backend.name), {"o": ref["o"]}, measure, twice(FORWARD))


def parts_of(op, x, *cuts):
    """Returns calls on one pool, of the tokens of the first sequence between two cuts each."""
    first = {**x, "read_slots": x["read_slots"][:1], **dict.fromkeys(OPTIONAL)}
    for start, stop in itertools.pairwise(cuts):
        offsets = torch.tensor([0, stop - start], device=x["q"].device)
        yield span(op, first, start, stop, cu_seqlens=offsets)


def whole_and_parts(op, x, cut, backend):
    """Returns o and the state of the first sequence of a call alone, and of two calls in a row."""
    end = int(x["cu_seqlens"][1])
    outs = []
    for cuts in ((0, end), (0, cut, end)):
        y = {**x, "pool": x["pool"].clone()}
        o = torch.cat([run(op, part, backend.name)["o"] for part in parts_of(op, y, *cuts)], dim=1)
        outs.append({"o": o, "state": y["pool"][int(x["read_slots"][0])]})
    return outs


@over(PROMPTS, "checkpoints", dtypes="rotating")
@pytest.mark.parametrize("cut", [1, 64, 77, 128])
def test_calls_in_a_row(backend, case, cut, measure):
    """A prompt may be cut into calls, each of which continues from the state of the one before."""
    whole, parts = whole_and_parts(case.op, call_arguments(case), cut, backend)
    measure(parts, whole, 2 * FORWARD[case.dtype])


@over(PROMPTS, "checkpoints", dtypes="rotating", requires="deterministic")
def test_same_bits_in_calls_in_a_row(backend, case, measure):
    """Under `batch_invariant`, cuts at multiples of its tokens do not change a bit; nor does a checkpoint there."""
    x = call_arguments(case)
    with gla.batch_invariant(64):
        whole, parts = whole_and_parts(case.op, x, 64, backend)
        measure(parts, whole, 0)
        together = {**x, "snapshot_offsets": torch.full_like(x["snapshot_offsets"], 64)}
        out = results(case.op, together, backend.name)
        early = results(case.op, next(parts_of(case.op, x, 0, 64)), backend.name)
    end, slot = int(x["cu_seqlens"][1]), int(x["read_slots"][0])
    measure({"o": out["o"][:, :end], "state": out["pool"][slot]}, whole, 0)
    kept = int(x["snapshot_slots"][0])
    measure({"checkpoint": out["pool"][kept]}, {"checkpoint": early["pool"][slot]}, 0)
