"""Ops on a pool of slots: the dtype of the pool, pages, new sequences, slots that several sequences read."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance.calls import Arguments, call_arguments, check, expected
from gla_core.conformance.cases import DRAFTS, PROMPTS, REPLAYS, SERVING, having, over
from gla_core.workloads.inputs import beyond_float16

SMALL = {PROMPTS: "small checkpoints", DRAFTS: "small", REPLAYS: "small"}


@over(SERVING, few=SMALL, dtypes="no_float64")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pool_dtypes(backend, case, pool_dtype, measure):
    """States are rounded where they are written, and not between tokens."""
    check(case.op, call_arguments(case, pool_dtype=pool_dtype), backend.name, measure)


@over(SERVING, few={**SMALL, PROMPTS: "checkpoints"}, dtypes="no_float64")
def test_numbers_beyond_float16(backend, case, measure):
    """A state above the largest number of float16 is written as inf, and o is computed from the state."""
    x = beyond_float16(call_arguments(case, pool_dtype=torch.float16))
    ref = expected(case.op, x)
    rounded = {"pool": ref.results["pool"].to(torch.float16).double()}
    check(case.op, x, backend.name, measure, ref._replace(results={**ref.results, **rounded}))


@over(
    SERVING,
    few={
        PROMPTS: "small scattered_slots per_head checkpoints",
        DRAFTS: "small scattered_slots per_head",
        REPLAYS: "small packed per_head",
    },
    dtypes="rotating",
)
@pytest.mark.parametrize("page", [1, 3, 50])
def test_pages(backend, case, page, measure):
    """Slots may be any distance apart; the memory between them is not touched."""
    check(case.op, call_arguments(case, page=page), backend.name, measure)


def slots_read(x: Arguments) -> list[int]:
    """Returns the slot that each sequence starts from, whether it is used or not."""
    if x.get("read_slots") is not None:
        return x["read_slots"].tolist()
    slots = x["slots"] if x["slots"].ndim == 2 else x["slots"][:, None]
    S, accepted = slots.shape[1], x["num_accepted"]
    last = [0] * len(slots) if S == 1 or accepted is None else (accepted.clamp(1, S) - 1).tolist()
    return [int(slots[n, i]) for n, i in enumerate(last)]


@over(SERVING, dtypes="rotating")
def test_new_sequences_in_slots_of_nan(backend, case, measure):
    """A sequence without a state starts from 0, even if its slot holds NaN; so do all slots that nobody reads."""
    x = call_arguments(case)
    read = slots_read(x)
    x["has_state"] = torch.arange(len(read), device=case.device) % 2 == 1
    kept = [slot for slot, has in zip(read, x["has_state"].tolist(), strict=True) if has]
    x["pool"][[slot for slot in range(len(x["pool"])) if slot not in kept]] = torch.nan
    ref = expected(case.op, x)
    out = check(case.op, x, backend.name, measure, ref)
    assert out["o"].isfinite().all()
    assert out["pool"][ref.written["pool"]].isfinite().all()


@over(having("slots"), "small", "packed", dtypes="rotating")
def test_new_sequences_in_pad_slots(backend, case, measure):
    """A new sequence whose first slot is a pad is skipped; one whose slot to read is a pad is not."""
    x = call_arguments(case)
    N = len(x["slots"])
    x["has_state"] = torch.zeros(N, dtype=torch.bool, device=case.device)
    x["slots"].view(N, -1)[0, 0] = -1
    if "read_slots" in x:
        x["read_slots"] = torch.full((N,), -1, device=case.device)
    check(case.op, x, backend.name, measure)


@over((*PROMPTS, *DRAFTS), few={PROMPTS: "small per_head checkpoints", DRAFTS: "small per_head"}, dtypes="rotating")
def test_sequences_may_read_one_slot(backend, case, measure):
    """Two requests with one cached prefix."""
    x = call_arguments(case, pool=16)
    N = len(slots_read(x))
    x["read_slots"] = torch.full((N,), 8, device=case.device)
    if "write_slots" in x:
        x["write_slots"] = torch.arange(N, device=case.device) + 9
    check(case.op, x, backend.name, measure)
