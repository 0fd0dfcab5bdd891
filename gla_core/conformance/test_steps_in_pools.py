"""Several steps in a pool: accepted drafts, slots outside the pool, and calls in a row."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import call_arguments, check, compare, oracle_results, public_op, run, span, twice
from gla_core.conformance.cases import DRAFTS, over, relative
from gla_core.conformance.test_pools import slots_read
from gla_core.conformance.tolerances import FORWARD
from gla_core.workloads.inputs import token_of


@over(DRAFTS, "accepted", "packed", dtypes="rotating")
@pytest.mark.parametrize("accepted", [-1, 0, 2, 5])
def test_accepted_drafts(backend, case, accepted, measure):
    """Numbers below 1 count as 1, and numbers above S as S: rows of padding may hold anything."""
    x = call_arguments(case)
    x["num_accepted"] = torch.full_like(x["num_accepted"], accepted)
    check(case.op, x, backend.name, measure)


@over(DRAFTS, "small", "packed", dtypes="rotating")
@pytest.mark.parametrize("pad", [-1, -3, "P", 2**30, "pad_slot"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_slots_outside_the_pool(backend, case, which, pad, measure):
    """Such a slot is neither read nor written. A sequence that would start from it is skipped: its o is 0."""
    x, index_dtype = call_arguments(case), torch.int32 if pad in (-1, 2**30) else torch.int64
    if pad == "pad_slot":
        pad = x["pad_slot"] = int(x["slots"][0, 0])
        x["pool"][pad] = torch.nan
    pad = len(x["pool"]) if pad == "P" else pad
    x["slots"][0, 0 if which == "first" else -1] = pad
    for name in ("slots", "num_accepted", "read_slots", "cu_seqlens"):
        x[name] = None if x[name] is None else x[name].to(index_dtype)
    check(case.op, x, backend.name, measure)


@over(DRAFTS, *("small", "accepted", "grouped", "per_head", "constant", "ungated"), dtypes="rotating", also="state")
def test_equals_steps_one_by_one(backend, case, measure):
    """The tokens of a call equal steps one by one, from states that are gathered before."""
    x = call_arguments(case, pool_dtype=torch.float32)
    state, outs = x["pool"][slots_read(x)].clone(), []
    for j in range(x["q"].shape[1]):
        token = {name: token_of(x[name], j) for name in public_op(case.op).tokens}
        out = run(relative(case.op, "state"), {**token, "state": state}, backend.name)
        state = out["state"]
        outs.append(out["o"])
    compare(case.op, x, run(case.op, x, backend.name), {"o": torch.stack(outs, 1)}, measure, twice(FORWARD))


@over(DRAFTS, "small", "grouped", "constant", dtypes="rotating")
def test_calls_in_a_row(backend, case, measure):
    """Five calls, of whose tokens some are accepted, equal the recurrence over the accepted tokens."""
    x = call_arguments(case)
    whole, names = relative(case.op, "initial_state"), public_op(case.op).tokens
    N, S = x["slots"].shape
    T = x["q"].shape[1]
    states = x["pool"][x["slots"][:, 0]].double()
    x["num_accepted"] = torch.ones(N, dtype=torch.int64, device=case.device)
    for call in range(5):
        y = call_arguments(case, seed=call + 7)
        x.update({name: y[name] for name in names})
        o = run(case.op, x, backend.name)["o"]
        accepted = [1 + (call + 2 * n) % min(S, T) for n in range(N)]
        for n in range(N):
            row = {name: z if (z := x[name]) is None or z.ndim == 1 else z[n : n + 1] for name in names}
            row["initial_state"] = states[n : n + 1].clone()
            measure({"o": o[n : n + 1]}, {"o": oracle_results(whole, row)["o"]}, 3 * FORWARD[case.dtype])
            states[n : n + 1] = oracle_results(whole, span(whole, row, None, accepted[n]))["state"]
        x["num_accepted"] = torch.tensor(accepted, device=case.device)
