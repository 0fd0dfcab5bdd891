"""Ops with rings: accepted tokens, rings, slots outside the pool, and calls in a row."""

from __future__ import annotations

from operator import itemgetter

import pytest
import torch

from gla_core.conformance.calls import RINGS, call_arguments, check, run
from gla_core.conformance.cases import REPLAYS, over, relative
from gla_core.conformance.tolerances import FORWARD
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import token_of

NUMBERS = ("slots", "ring_start", "num_accepted")


@over(REPLAYS, "small", "per_head", dtypes="no_float64")
def test_rings_in_float32(backend, case, measure):
    check(case.op, call_arguments(case, ring_dtype=torch.float32), backend.name, measure)


@over(REPLAYS, "small", "packed", dtypes="rotating")
@pytest.mark.parametrize("accepted", [-1, 0, 1, 2, 9])
def test_accepted_tokens(backend, case, accepted, measure):
    """Numbers below 0 count as 0, and numbers above L // 2 as L // 2: rows of padding may hold anything."""
    x = call_arguments(case)
    x["num_accepted"] = torch.full_like(x["num_accepted"], accepted)
    check(case.op, x, backend.name, measure)


@over(REPLAYS, "small", "per_head", dtypes="rotating")
@pytest.mark.parametrize("start", [-1, 3, 5, 1000])
def test_ring_start(backend, case, start, measure):
    """A ring is read and written past its end, and positions count modulo L."""
    x = call_arguments(case)
    x["ring_start"] = torch.full_like(x["ring_start"], start)
    check(case.op, x, backend.name, measure)


@over(REPLAYS, "small", "packed", "per_head", dtypes="rotating")
def test_only_accepted_tokens_are_read(backend, case, measure):
    """All other tokens of the rings may be NaN."""
    x = call_arguments(case)
    L = x["ring_k"].shape[1]
    kept = torch.zeros(len(x["pool"]), L, dtype=torch.bool, device=case.device)
    for slot, start, accepted in zip(*(x[name].tolist() for name in NUMBERS), strict=True):
        kept[slot, [(start + i) % L for i in range(accepted)]] = True
    for ring in RINGS:
        x[ring][~kept] = torch.nan
    out = check(case.op, x, backend.name, measure)
    assert out["o"].isfinite().all()


@over(REPLAYS, "small", "packed", dtypes="rotating")
@pytest.mark.parametrize("pad", [-1, -3, "P", 2**30, "pad_slot"])
def test_slots_outside_the_pool(backend, case, pad, measure):
    """A sequence with such a slot is skipped: its o is 0, and neither the pool nor the rings are touched."""
    x, index_dtype = call_arguments(case), torch.int32 if pad in (-1, 2**30) else torch.int64
    if pad == "pad_slot":
        pad = x["pad_slot"] = int(x["slots"][0])
        x["pool"][pad] = torch.nan
    x["slots"][0] = len(x["pool"]) if pad == "P" else pad
    for name in (*NUMBERS, "cu_seqlens"):
        x[name] = None if x[name] is None else x[name].to(index_dtype)
    check(case.op, x, backend.name, measure)


@over(REPLAYS, "small", "grouped", "per_head", "constant", dtypes="rotating", also="state")
def test_calls_in_a_row(backend, case, measure):
    """Five calls, of whose tokens some are accepted, equal steps one by one from the last accepted token."""
    x, step = call_arguments(case, pool_dtype=torch.float32), relative(case.op, "state")
    names = ABSTRACT_OPS[case.op].tokens
    (N, T), L = x["q"].shape[:2], x["ring_k"].shape[1]
    served = (x["slots"] >= 0).tolist()
    states = x["pool"][x["slots"]].clone()
    x["num_accepted"] = torch.zeros_like(x["num_accepted"])
    for call in range(5):
        y = call_arguments(case, seed=call + 7)
        x.update({name: y[name] for name in names if y[name] is None or y[name].ndim > 1})
        o = run(case.op, x, backend.name)["o"]
        x["ring_start"] = (x["ring_start"] + x["num_accepted"]) % L
        x["num_accepted"] = torch.tensor([(call + 2 * n) % (T + 1) for n in range(N)], device=case.device)
        drafts = states.clone()
        for j in range(T):
            token = {name: token_of(x[name], j) for name in names}
            drafts, o_j = itemgetter("state", "o")(run(step, {**token, "state": drafts}, backend.name))
            measure({"o": o[served, j]}, {"o": o_j[served]}, 2 * FORWARD[case.dtype])
            states = torch.where((j < x["num_accepted"])[:, None, None, None], drafts, states)
