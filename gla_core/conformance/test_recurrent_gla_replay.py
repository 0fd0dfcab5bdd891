"""recurrent_gla_replay: values, accepted tokens, rings, new sequences, pads, pages, calls in a row, memory."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    beyond_float16,
    check_served,
    expected_replay,
    heads_first,
    output_shape,
    pages_of,
    poisoned,
    pool_budget,
    replay,
    rings_of,
    rounded_states,
    rows_of_no_sequence,
    run_replay,
    three_runs,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD
from gla_core.workloads.inputs import normal

REPLAY = "recurrent_gla_replay"
TOKENS = ("q", "k", "v", "g")
OF_SEQUENCES = ("slots", "ring_start", "num_accepted", "has_state")


def tensors(x):
    return {name: y for name, y in x.items() if isinstance(y, torch.Tensor)}


def memory(x):
    """Returns the tensors that a call writes, by name."""
    return {"pool": x["pool"], **rings_of(x)}


def written_slots(x):
    """Returns the slots whose states a call writes."""
    return sorted(oracle.recurrent_gla_replay(**x)[1])


def written_entries(x):
    """Returns the slots of the rings that a call writes, and the positions in them, as two lists."""
    entries = sorted(oracle.recurrent_gla_replay(**x)[2])
    return [slot for slot, _ in entries], [position for _, position in entries]


def entries_of(ring):
    """Returns the tokens of a ring as integers [P, L, ...], without the memory between slots, and that memory."""
    pages, size = pages_of(ring), ring[0].numel()
    return pages[:, :size].unflatten(1, (ring.shape[1], -1)), pages[:, size:]


def check(x, backend, measure, expected=None, **options):
    """Runs a call and compares o, written states and written tokens with the oracle, and all other memory by bits."""
    expected = expected_replay(x) if expected is None else expected
    written = written_entries(x)
    before = {name: [part.clone() for part in entries_of(ring)] for name, ring in rings_of(x).items()}
    out = check_served(x, lambda: run_replay(x, backend.name, **options), expected, written_slots(x), measure)
    for name, (entries, between) in before.items():
        of_logits = name == "ring_g" and "gate" in options
        budget = FORWARD[torch.float32] if of_logits else 0  # other numbers are kept as they are
        measure({name: x[name][written]}, {name: expected[name][written].to(x[name].dtype)}, budget)
        after, after_between = (part.clone() for part in entries_of(x[name]))
        entries[written], after[written] = 0, 0
        assert torch.equal(after, entries), f"tokens of {name} that the call does not write were changed"
        assert torch.equal(after_between, between), f"memory between the slots of {name} was changed"
    return out


@over(REPLAY)
def test_values(backend, case, measure, layout):
    x = replay(case)
    out = check(x, backend, measure)
    layout(out, {"o": (output_shape(x["q"], x["v"]), case.dtype)}, case.device, tensors(x))


@over(REPLAY, at_size=True)
def test_values_at_size(backend, case, measure):
    """The reference in float64 gives the expected values."""
    x = replay(case)
    y = {**x, **{name: x[name].double() for name in (*TOKENS, *memory(x))}}
    expected, out = run_replay(y, "reference"), run_replay(x, backend.name)
    measure({"o": out["o"]}, {"o": expected["o"]}, FORWARD[case.dtype])
    measure({"pool": out["pool"]}, {"pool": expected["pool"]}, pool_budget(x))
    measure(rings_of(x), rings_of(y), 0)


@over(REPLAY, "small", dtypes="no_float64")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pool_dtypes(backend, case, pool_dtype, measure):
    """States are rounded where they are written, and not before the new tokens."""
    check(replay(case, pool_dtype=pool_dtype), backend, measure)


@over(REPLAY, "small", dtypes="no_float64")
def test_numbers_beyond_float16(backend, case, measure):
    """A state above the largest number of float16 is written as inf, and o is computed from the state."""
    x = beyond_float16(replay(case, pool_dtype=torch.float16))
    check(x, backend, measure, rounded_states(expected_replay(x), torch.float16))


@over(REPLAY, "small", "per_head", dtypes="no_float64")
def test_rings_in_float32(backend, case, measure):
    check(replay(case, ring_dtype=torch.float32), backend, measure)


@over(REPLAY, "small", "packed", dtypes="in_turn")
@pytest.mark.parametrize("accepted", [-1, 0, 1, 2, 9])
def test_accepted_tokens(backend, case, accepted, measure):
    """Numbers below 0 count as 0, and numbers above L // 2 as L // 2: rows of padding may hold anything."""
    x = replay(case)
    x["num_accepted"] = torch.full_like(x["num_accepted"], accepted)
    check(x, backend, measure)


@over(REPLAY, "small", "per_head", dtypes="in_turn")
@pytest.mark.parametrize("start", [-1, 3, 5, 1000])
def test_ring_start(backend, case, start, measure):
    """A ring is read and written past its end, and positions count modulo L."""
    x = replay(case)
    x["ring_start"] = torch.full_like(x["ring_start"], start)
    check(x, backend, measure)


@over(REPLAY, "small", "packed", "per_head", dtypes="in_turn")
def test_only_accepted_tokens_are_read(backend, case, measure):
    """All other tokens of the rings may be NaN."""
    x = replay(case)
    L = x["ring_k"].shape[1]
    kept = torch.zeros(len(x["pool"]), L, dtype=torch.bool, device=case.device)
    for slot, start, accepted in zip(*(x[name].tolist() for name in OF_SEQUENCES[:3]), strict=True):
        kept[slot, [(start + i) % L for i in range(accepted)]] = True
    for ring in rings_of(x).values():
        ring[~kept] = torch.nan
    out = check(x, backend, measure)
    assert out["o"].isfinite().all()


@over(REPLAY, "small", "packed", "per_head", dtypes="in_turn")
@pytest.mark.parametrize("page", [1, 3, 50])
def test_pages(backend, case, page, measure):
    """Slots may be any distance apart; the memory between them is not touched."""
    check(replay(case, page=page), backend, measure)


@over(REPLAY, "packed", "grouped", "odd_widths", dtypes="in_turn")
def test_pool_with_values_first(backend, case, measure):
    x = replay(case)
    expected, written = expected_replay(x), written_slots(x)
    x["pool"] = x["pool"].mT.contiguous().mT  # as state_v_first=True passes it on
    o = gla.recurrent_gla_replay(**{**x, "pool": x["pool"].mT}, state_v_first=True, backend=backend.name)
    measure({"o": o}, {"o": expected["o"]}, FORWARD[case.dtype])
    measure({"states": x["pool"][written]}, {"states": expected["pool"][written]}, pool_budget(x))


@over(REPLAY, dtypes="in_turn")
def test_new_sequences_in_slots_of_nan(backend, case, measure):
    """A sequence without a state starts from 0, even if its slot holds NaN; so do all slots that nobody reads."""
    x = replay(case)
    x["has_state"] = torch.arange(len(x["slots"]), device=case.device) % 2 == 1
    read = x["slots"][x["has_state"]].tolist()
    x["pool"][[slot for slot in range(len(x["pool"])) if slot not in read]] = torch.nan
    out = check(x, backend, measure)
    assert out["o"].isfinite().all()


@over(REPLAY, "small", "packed", dtypes="in_turn")
@pytest.mark.parametrize("pad", [-1, -3, "P", 2**30, "pad_slot"])
def test_slots_outside_the_pool(backend, case, pad, measure):
    """A sequence with such a slot is skipped: its o is 0, and neither the pool nor the rings are touched."""
    x, index_dtype = replay(case), torch.int32 if pad in (-1, 2**30) else torch.int64
    if pad == "pad_slot":
        pad = x["pad_slot"] = int(x["slots"][0])
        x["pool"][pad] = torch.nan
    x["slots"][0] = len(x["pool"]) if pad == "P" else pad
    for name in (*OF_SEQUENCES[:3], "cu_seqlens"):
        x[name] = None if x[name] is None else x[name].to(index_dtype)
    check(x, backend, measure)


@over(REPLAY, "small", "packed", dtypes="in_turn")
def test_new_sequences_in_pad_slots(backend, case, measure):
    x = replay(case)
    x["has_state"] = torch.zeros(len(x["slots"]), dtype=torch.bool, device=case.device)
    x["slots"][0] = -1
    check(x, backend, measure)


@over(REPLAY, "packed", "nobody", dtypes="in_turn")
def test_rows_of_no_sequence(backend, case, measure):
    """They may hold anything, as may tokens of a sequence after the first L // 2; their o is 0."""
    x = replay(case)
    rows = rows_of_no_sequence(x["cu_seqlens"], x["q"].shape[1])
    if len(x["slots"]):
        for name, ring in rings_of(x).items():
            x[name] = ring[:, :6]
        rows[x["cu_seqlens"][1] + 3] = True  # the fourth token of a sequence
    for name in TOKENS:
        x[name][:, rows] = torch.nan
    expected = expected_replay(x)
    with poisoned(backend.can(case.op), case.device):
        o = run_replay(x, backend.name)["o"]
    measure({"o": o}, {"o": expected["o"]}, FORWARD[case.dtype])
    assert o.isfinite().all()


@over(REPLAY, "small", "grouped", "per_head", "constant", dtypes="in_turn", also="recurrent_gla_step")
def test_calls_in_a_row(backend, case, measure):
    """Five calls, of whose tokens some are accepted, equal steps one by one from the last accepted token."""
    x = replay(case, pool_dtype=torch.float32)
    (N, T), L = x["q"].shape[:2], x["ring_k"].shape[1]
    served = (x["slots"] >= 0).tolist()
    states = x["pool"][x["slots"]].clone()
    x["num_accepted"] = torch.zeros_like(x["num_accepted"])
    for call in range(5):
        y = replay(case, seed=call + 7)
        x.update({name: y[name] for name in TOKENS if y[name] is None or y[name].ndim > 1})
        o = run_replay(x, backend.name)["o"]
        x["ring_start"] = (x["ring_start"] + x["num_accepted"]) % L
        x["num_accepted"] = torch.tensor([(call + 2 * n) % (T + 1) for n in range(N)], device=case.device)
        drafts = states.clone()
        for j in range(T):
            token = [z if z is None or z.ndim == 1 else z[:, j] for z in (x[name] for name in TOKENS)]
            step, drafts = gla.recurrent_gla_step(*token, drafts, backend=backend.name)
            measure({"o": o[served, j]}, {"o": step[served]}, 2 * FORWARD[case.dtype])
            states = torch.where((j < x["num_accepted"])[:, None, None, None], drafts, states)


@over(REPLAY, "small", "packed", "grouped", "odd_widths", dtypes="in_turn")
def test_out(backend, case, measure):
    """The result may be rows of a larger tensor, whose other rows keep their bits."""
    x = replay(case)
    expected = expected_replay(x)
    B, T, *rest = output_shape(x["q"], x["v"])
    larger = normal((B * T + 5, *rest), case.dtype, torch.Generator(case.device).manual_seed(2))
    before, out = larger.clone(), larger[2:-3].unflatten(0, (B, T))
    found = check(x, backend, measure, expected, out=out)
    assert found["o"] is out, "recurrent_gla_replay must return the tensor `out` that it was given"
    for rows in (slice(None, 2), slice(-3, None)):
        measure({"rows beside out": larger[rows]}, {"rows beside out": before[rows]}, 0)


@over(REPLAY, gated=True, dtypes="in_turn")
def test_gates_from_logits(backend, case, measure):
    """The rings hold log gates, and not logits."""
    x = replay(case)
    x["g"] = 3 * normal(tuple(x["g"].shape), case.dtype, torch.Generator(case.device).manual_seed(3))
    check(x, backend, measure, expected_replay(x, gate_normalizer=4), gate="logsigmoid", gate_normalizer=4)


@over(REPLAY, "small", "odd_widths", dtypes="in_turn")
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_scale(backend, case, scale, measure):
    x = replay(case)
    check(x, backend, measure, expected_replay(x, scale), scale=scale)


@over(REPLAY, dtypes="in_turn")
def test_strided_views(backend, case, measure):
    x = replay(case)
    expected = expected_replay(x)
    views = {name: heads_first(x[name]) for name in TOKENS if x[name] is not None}
    for name in OF_SEQUENCES[:3]:
        views[name] = torch.stack([x[name], -x[name]], 1)[:, 0]
    check({**x, **views}, backend, measure, expected)


@over(REPLAY, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    x = replay(case)
    with poisoned(backend.can(case.op), case.device):
        check(x, backend, measure)


@over(REPLAY, "small", "packed", "grouped", "odd_widths", dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    first, *again = three_runs(lambda: run_replay(replay(case), backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(REPLAY, "small", "packed", "grouped", dtypes="in_turn")
def test_inputs_unchanged(backend, case, measure):
    x, before = replay(case), replay(case)
    run_replay(x, backend.name)
    kept = [name for name in tensors(x) if name not in memory(x)]
    measure({name: x[name] for name in kept}, {name: before[name] for name in kept}, 0)


@over(REPLAY, "small", "grouped", "per_head", dtypes="in_turn", requires="deterministic")
def test_same_bits_in_any_company(backend, case, measure):
    """Under `batch_invariant` a sequence has the same bits alone, and in a batch."""
    x = replay(case)
    with gla.batch_invariant(64):
        together = run_replay({**x, **{name: y.clone() for name, y in memory(x).items()}}, backend.name)
        for n in range(len(x["slots"])):
            own = {name: y if y is None or y.ndim == 1 else y[n : n + 1] for name in TOKENS for y in (x[name],)}
            own |= {name: y if y is None else y[n : n + 1] for name in OF_SEQUENCES for y in (x[name],)}
            own |= {name: y.clone() for name, y in memory(x).items()}
            alone = run_replay({**x, **own}, backend.name)
            measure({"o": alone["o"]}, {"o": together["o"][n : n + 1]}, 0)
            slot = x["slots"][n]
            for name in memory(x):
                measure({name: alone[name][slot]}, {name: together[name][slot]}, 0)
