"""recurrent_gla_steps: values, slots, accepted drafts, new sequences, pads, pages, calls in a row, memory."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    beyond_float16,
    check_served,
    expected_steps,
    heads_first,
    output_shape,
    poisoned,
    pool_budget,
    rounded_states,
    rows_of_no_sequence,
    run_steps,
    steps,
    three_runs,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD
from gla_core.workloads.inputs import normal

STEPS = "recurrent_gla_steps"
TOKENS = ("q", "k", "v", "g")


def written_slots(x):
    """Returns the slots that a call writes."""
    _, written = oracle.recurrent_gla_steps(**x)
    return sorted(written)


def read_slots(x):
    """Returns the slot that each sequence starts from, whether it is used or not."""
    if x["read_slots"] is not None:
        return x["read_slots"].tolist()
    N, S = x["slots"].shape
    accepted = [1] * N if x["num_accepted"] is None else x["num_accepted"].tolist()
    return [int(x["slots"][n, min(max(accepted[n], 1), S) - 1]) for n in range(N)]


def tensors(x):
    return {name: y for name, y in x.items() if isinstance(y, torch.Tensor)}


def check(x, backend, measure, expected=None, **options):
    """Runs a call and compares o and the written states with the oracle, and all other memory of the pool by bits."""
    expected = expected_steps(x) if expected is None else expected
    return check_served(x, lambda: run_steps(x, backend.name, **options), expected, written_slots(x), measure)


@over(STEPS)
def test_values(backend, case, measure, layout):
    x = steps(case)
    out = check(x, backend, measure)
    layout(out, {"o": (output_shape(x["q"], x["v"]), case.dtype)}, case.device, tensors(x))


@over(STEPS, at_size=True)
def test_values_at_size(backend, case, measure):
    """The reference in float64 gives the expected values."""
    x = steps(case)
    y = {**x, **{name: x[name].double() for name in (*TOKENS, "pool")}}
    expected, out = run_steps(y, "reference"), run_steps(x, backend.name)
    measure({"o": out["o"]}, {"o": expected["o"]}, FORWARD[case.dtype])
    measure({"pool": out["pool"]}, {"pool": expected["pool"]}, pool_budget(x))


@over(STEPS, "small", dtypes="no_float64")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pool_dtypes(backend, case, pool_dtype, measure):
    """States are rounded where they are written, and not between tokens."""
    check(steps(case, pool_dtype=pool_dtype), backend, measure)


@over(STEPS, "small", dtypes="no_float64")
def test_numbers_beyond_float16(backend, case, measure):
    """A state above the largest number of float16 is written as inf, and o is computed from the state."""
    x = beyond_float16(steps(case, pool_dtype=torch.float16))
    check(x, backend, measure, rounded_states(expected_steps(x), torch.float16))


@over(STEPS, "accepted", "packed", dtypes="in_turn")
@pytest.mark.parametrize("accepted", [-1, 0, 2, 5])
def test_accepted_drafts(backend, case, accepted, measure):
    """Numbers below 1 count as 1, and numbers above S as S: rows of padding may hold anything."""
    x = steps(case)
    x["num_accepted"] = torch.full_like(x["num_accepted"], accepted)
    check(x, backend, measure)


@over(STEPS, "small", "apart", "per_head", dtypes="in_turn")
@pytest.mark.parametrize("page", [1, 3, 50])
def test_pages(backend, case, page, measure):
    """Slots may be any distance apart; the memory between them is not touched."""
    check(steps(case, page=page), backend, measure)


@over(STEPS, "apart", "grouped", "odd_widths", dtypes="in_turn")
def test_pool_with_values_first(backend, case, measure):
    x = steps(case)
    expected, written = expected_steps(x), written_slots(x)
    x["pool"] = x["pool"].mT.contiguous().mT  # as state_v_first=True passes it on
    o = gla.recurrent_gla_steps(**{**x, "pool": x["pool"].mT}, state_v_first=True, backend=backend.name)
    measure({"o": o}, {"o": expected["o"]}, FORWARD[case.dtype])
    measure({"states": x["pool"][written]}, {"states": expected["pool"][written]}, pool_budget(x))


@over(STEPS, dtypes="in_turn")
def test_new_sequences_in_slots_of_nan(backend, case, measure):
    """A sequence without a state starts from 0, even if its slot holds NaN; so do all slots that nobody reads."""
    x = steps(case)
    x["has_state"] = torch.arange(len(x["slots"]), device=case.device) % 2 == 1
    read = [slot for slot, has in zip(read_slots(x), x["has_state"].tolist(), strict=True) if has]
    x["pool"][[slot for slot in range(len(x["pool"])) if slot not in read]] = torch.nan
    out = check(x, backend, measure)
    assert out["o"].isfinite().all()


@over(STEPS, "small", "packed", dtypes="in_turn")
@pytest.mark.parametrize("pad", [-1, -3, "P", 2**30, "pad_slot"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_slots_outside_the_pool(backend, case, which, pad, measure):
    """Such a slot is neither read nor written. A sequence that would start from it is skipped: its o is 0."""
    x, index_dtype = steps(case), torch.int32 if pad in (-1, 2**30) else torch.int64
    if pad == "pad_slot":
        pad = x["pad_slot"] = int(x["slots"][0, 0])
        x["pool"][pad] = torch.nan
    pad = len(x["pool"]) if pad == "P" else pad
    x["slots"][0, 0 if which == "first" else -1] = pad
    for name in ("slots", "num_accepted", "read_slots", "cu_seqlens"):
        x[name] = None if x[name] is None else x[name].to(index_dtype)
    check(x, backend, measure)


@over(STEPS, "small", "packed", dtypes="in_turn")
def test_new_sequences_in_pad_slots(backend, case, measure):
    """A new sequence whose first slot is a pad is skipped; one whose slot to read is a pad is not."""
    x = steps(case)
    N = len(x["slots"])
    x["has_state"] = torch.zeros(N, dtype=torch.bool, device=case.device)
    x["read_slots"] = torch.full((N,), -1, device=case.device)
    x["slots"][0, 0] = -1
    check(x, backend, measure)


@over(STEPS, "small", "per_head", dtypes="in_turn")
def test_sequences_may_read_one_slot(backend, case, measure):
    x = steps(case, pool=12)
    x["read_slots"] = torch.full((len(x["slots"]),), 11, device=case.device)
    check(x, backend, measure)


@over(STEPS, "packed", "nobody", dtypes="in_turn")
def test_rows_of_no_sequence(backend, case, measure):
    """They may hold anything, as may tokens beyond the S columns of slots; their o is 0."""
    x = steps(case)
    rows = rows_of_no_sequence(x["cu_seqlens"], x["q"].shape[1])
    if len(x["slots"]):
        x["slots"] = x["slots"][:, :3]
        rows[x["cu_seqlens"][1] + 3] = True  # the fourth token of a sequence
    for name in TOKENS:
        x[name][:, rows] = torch.nan
    expected = expected_steps(x)
    with poisoned(backend.can(case.op), case.device):
        out = check(x, backend, measure, expected)
    assert out["o"].isfinite().all()


@over(
    STEPS,
    "small",
    "accepted",
    "grouped",
    "per_head",
    "constant",
    "ungated",
    dtypes="in_turn",
    also="recurrent_gla_step",
)
def test_equals_recurrent_gla_step(backend, case, measure):
    """The tokens of a call equal steps one by one, from states that are gathered before."""
    x = steps(case, pool_dtype=torch.float32)
    state, outs = x["pool"][read_slots(x)].clone(), []
    for j in range(x["q"].shape[1]):
        token = [y if y is None or y.ndim == 1 else y[:, j] for y in (x[name] for name in TOKENS)]
        o, state = gla.recurrent_gla_step(*token, state, backend=backend.name)
        outs.append(o)
    measure({"o": run_steps(x, backend.name)["o"]}, {"o": torch.stack(outs, 1)}, 2 * FORWARD[case.dtype])


@over(STEPS, "small", "grouped", "constant", dtypes="in_turn")
def test_calls_in_a_row(backend, case, measure):
    """Five calls, of whose tokens some are accepted, equal the recurrence over the accepted tokens."""
    x = steps(case)
    N, S = x["slots"].shape
    T = x["q"].shape[1]
    states = x["pool"][x["slots"][:, 0]].double()
    x["num_accepted"] = torch.ones(N, dtype=torch.int64, device=case.device)
    for call in range(5):
        y = steps(case, seed=call + 7)
        x.update({name: y[name] for name in TOKENS})
        o = run_steps(x, backend.name)["o"]
        accepted = [1 + (call + 2 * n) % min(S, T) for n in range(N)]
        for n in range(N):
            row = [z if z is None or z.ndim == 1 else z[n : n + 1] for z in (x[name] for name in TOKENS)]
            ref, _ = oracle.chunk_gla(*row, None, states[n : n + 1])
            measure({"o": o[n : n + 1]}, {"o": ref}, 3 * FORWARD[case.dtype])
            kept = [z if z is None or z.ndim == 1 else z[:, : accepted[n]] for z in row]
            states[n : n + 1] = oracle.chunk_gla(*kept, None, states[n : n + 1])[1]
        x["num_accepted"] = torch.tensor(accepted, device=case.device)


@over(STEPS, "small", "packed", "grouped", "odd_widths", dtypes="in_turn")
def test_out(backend, case, measure):
    """The result may be rows of a larger tensor, whose other rows keep their bits."""
    x = steps(case)
    expected = expected_steps(x)
    B, T, *rest = output_shape(x["q"], x["v"])
    memory = normal((B * T + 5, *rest), case.dtype, torch.Generator(case.device).manual_seed(2))
    before, out = memory.clone(), memory[2:-3].unflatten(0, (B, T))
    found = check(x, backend, measure, expected, out=out)
    assert found["o"] is out, "recurrent_gla_steps must return the tensor `out` that it was given"
    for rows in (slice(None, 2), slice(-3, None)):
        measure({"rows beside out": memory[rows]}, {"rows beside out": before[rows]}, 0)


@over(STEPS, gated=True, dtypes="in_turn")
def test_gates_from_logits(backend, case, measure):
    x = steps(case)
    x["g"] = 3 * normal(tuple(x["g"].shape), case.dtype, torch.Generator(case.device).manual_seed(3))
    check(x, backend, measure, expected_steps(x, gate_normalizer=4), gate="logsigmoid", gate_normalizer=4)


@over(STEPS, "small", "odd_widths", dtypes="in_turn")
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_scale(backend, case, scale, measure):
    x = steps(case)
    check(x, backend, measure, expected_steps(x, scale), scale=scale)


@over(STEPS, dtypes="in_turn")
def test_strided_views(backend, case, measure):
    x = steps(case)
    expected = expected_steps(x)
    views = {name: heads_first(x[name]) for name in TOKENS if x[name] is not None}
    views["slots"] = torch.stack([x["slots"], -x["slots"]], 2)[..., 0]
    for name in ("num_accepted", "read_slots"):
        views[name] = None if x[name] is None else torch.stack([x[name], -x[name]], 1)[:, 0]
    check({**x, **views}, backend, measure, expected)


@over(STEPS, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    x = steps(case)
    with poisoned(backend.can(case.op), case.device):
        check(x, backend, measure)


@over(STEPS, "small", "packed", "grouped", "odd_widths", dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    first, *again = three_runs(lambda: run_steps(steps(case), backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(STEPS, "small", "packed", "apart", dtypes="in_turn")
def test_inputs_unchanged(backend, case, measure):
    x, before = steps(case), steps(case)
    run_steps(x, backend.name)
    kept = [name for name in tensors(x) if name != "pool"]
    measure({name: x[name] for name in kept}, {name: before[name] for name in kept}, 0)


@over(STEPS, "small", "accepted", "per_head", dtypes="in_turn", requires="deterministic")
def test_same_bits_in_any_company(backend, case, measure):
    """Under `batch_invariant` a sequence has the same bits alone, and in a batch."""
    x = steps(case)
    with gla.batch_invariant(64):
        together = run_steps({**x, "pool": x["pool"].clone()}, backend.name)
        for n in range(len(x["slots"])):
            own = {name: y if y is None or y.ndim == 1 else y[n : n + 1] for name in TOKENS for y in (x[name],)}
            own |= {name: y if y is None else y[n : n + 1] for name in ("slots", "num_accepted") for y in (x[name],)}
            alone = run_steps({**x, "pool": x["pool"].clone(), **own}, backend.name)
            measure({"o": alone["o"]}, {"o": together["o"][n : n + 1]}, 0)
            slots = x["slots"][n]
            measure({"states": alone["pool"][slots]}, {"states": together["pool"][slots]}, 0)
