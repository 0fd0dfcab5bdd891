"""chunk_gla_pool: values, slots, pages, new sequences, pads, checkpoints, calls in a row, memory."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import (
    beyond_float16,
    check_served,
    expected_pool,
    forward,
    heads_first,
    output_shape,
    poisoned,
    pool,
    pool_budget,
    rounded_states,
    rows_of_no_sequence,
    run_pool,
    three_runs,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD
from gla_core.dispatch.slots import states_of_slots
from gla_core.dispatch.tensors import wide
from gla_core.workloads.inputs import GlaInputs, normal

POOL = "chunk_gla_pool"
TOKENS = ("q", "k", "v", "g")
OPTIONAL = ("write_slots", "has_state", "checkpoint_offsets", "checkpoint_slots")


def written_slots(x):
    """Returns the slots that a call writes."""

    def is_used(slot):
        return 0 <= slot < len(x["pool"]) and slot != x["pad_slot"]

    to = x["read_slots"] if x["write_slots"] is None else x["write_slots"]
    found = [slot for slot in to.tolist() if is_used(slot)]
    if x["checkpoint_offsets"] is not None:
        rows = zip(x["checkpoint_slots"].tolist(), x["checkpoint_offsets"].tolist(), lengths(x), strict=True)
        found += [slot for slot, offset, length in rows if is_used(slot) and 0 < offset < length]
    return found


def lengths(x):
    return x["cu_seqlens"].diff().tolist()


def check(x, backend, measure, expected=None, **options):
    """Runs a call and compares o and the written states with the oracle, and all other memory of the pool by bits."""
    expected = expected_pool(x) if expected is None else expected
    return check_served(x, lambda: run_pool(x, backend.name, **options), expected, written_slots(x), measure)


@over(POOL)
def test_values(backend, case, measure, layout):
    x = pool(case)
    out = check(x, backend, measure)
    layout(out, {"o": (output_shape(x["q"], x["v"]), case.dtype)}, case.device, tensors(x))


def tensors(x):
    return {name: y for name, y in x.items() if isinstance(y, torch.Tensor)}


@over(POOL, at_size=True)
def test_values_at_size(backend, case, measure):
    """The reference in float64 gives the expected values."""
    x = pool(case)
    y = {**x, **{name: x[name].double() for name in (*TOKENS, "pool")}}
    expected = run_pool(y, "reference")
    out = run_pool(x, backend.name)
    measure({"o": out["o"]}, {"o": expected["o"]}, FORWARD[case.dtype])
    measure({"pool": out["pool"]}, {"pool": expected["pool"]}, pool_budget(x))


@over(POOL, "small", "checkpoints", dtypes="no_float64")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pool_dtypes(backend, case, pool_dtype, measure):
    check(pool(case, pool_dtype=pool_dtype), backend, measure)


@over(POOL, "checkpoints", dtypes="no_float64")
def test_numbers_beyond_float16(backend, case, measure):
    """A state above the largest number of float16 is written as inf, and o is computed from the state."""
    x = beyond_float16(pool(case, pool_dtype=torch.float16))
    check(x, backend, measure, rounded_states(expected_pool(x), torch.float16))


@over(POOL, "small", "apart", "per_head", "checkpoints", dtypes="in_turn")
@pytest.mark.parametrize("page", [1, 3, 50])
def test_pages(backend, case, page, measure):
    """Slots may be any distance apart; the memory between them is not touched."""
    check(pool(case, page=page), backend, measure)


@over(POOL, "apart", "grouped", "odd_widths", "checkpoints", dtypes="in_turn")
def test_pool_with_values_first(backend, case, measure):
    x = pool(case)
    expected = expected_pool(x)
    K, V = x["pool"].shape[2:]
    x["pool"] = x["pool"].mT.contiguous().mT  # as state_v_first=True passes it on
    before = x["pool"].clone()
    given = {**x, "pool": x["pool"].mT}
    assert given["pool"].shape[2:] == (V, K)
    o = run_pool(given, backend.name, state_v_first=True)["o"]
    written = written_slots(x)
    others = [slot for slot in range(len(before)) if slot not in written]
    measure({"o": o}, {"o": expected["o"]}, FORWARD[case.dtype])
    measure({"states": x["pool"][written]}, {"states": expected["pool"][written]}, pool_budget(x))
    measure({"others": x["pool"][others]}, {"others": before[others]}, 0)


@over(POOL, dtypes="in_turn")
def test_new_sequences_in_slots_of_nan(backend, case, measure):
    """A sequence without a state starts from 0, even if its slot holds NaN; so do all slots that nobody reads."""
    x = pool(case)
    N = len(x["read_slots"])
    x["has_state"] = torch.arange(N, device=case.device) % 2 == 1
    read = [slot for slot, has in zip(x["read_slots"].tolist(), x["has_state"].tolist(), strict=True) if has]
    dirty = [slot for slot in range(len(x["pool"])) if slot not in read]
    x["pool"][dirty] = torch.nan
    out = check(x, backend, measure)
    assert out["o"].isfinite().all()
    assert out["pool"][written_slots(x)].isfinite().all()


@over(POOL, "small", "apart", "checkpoints", dtypes="in_turn")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pad", [-1, -3, "P", 2**30])
def test_slots_outside_the_pool(backend, case, pad, index_dtype, measure):
    """Such a slot is neither read nor written; the sequence starts from 0, and o is computed."""
    x = pool(case)
    pad = len(x["pool"]) if pad == "P" else pad
    for name in ("read_slots", "write_slots", "checkpoint_slots"):
        if x[name] is not None:
            x[name] = x[name].to(index_dtype)
            x[name][0] = pad
    x["cu_seqlens"] = x["cu_seqlens"].to(index_dtype)
    check(x, backend, measure)


@over(POOL, "small", "apart", "checkpoints", dtypes="in_turn")
def test_the_pad_slot(backend, case, measure):
    """The pad slot may be a slot of the pool, and several sequences may name it. It holds NaN, and keeps it."""
    for name in ("read_slots", "write_slots", "checkpoint_slots"):
        x = pool(case)
        if name == "write_slots" and x[name] is None:
            x[name] = x["read_slots"].clone()
        if x[name] is not None:
            x["pad_slot"] = len(x["pool"]) - 1
            x[name][:2] = x["pad_slot"]
            x["pool"][x["pad_slot"]] = torch.nan
            check(x, backend, measure)


@over(POOL, "small", "per_head", "checkpoints", dtypes="in_turn")
def test_sequences_may_read_one_slot(backend, case, measure):
    """Two requests with one cached prefix."""
    x = pool(case, pool=16)
    x["read_slots"][:] = x["read_slots"][0]
    x["write_slots"] = torch.arange(len(x["read_slots"]), device=case.device) + 9
    check(x, backend, measure)


@over(POOL, "checkpoints", "padded", "grouped", dtypes="in_turn")
@pytest.mark.parametrize("offset", [-64, 0, 64, "length", 2**30])
def test_checkpoints(backend, case, offset, measure):
    """A checkpoint lies inside its sequence; for any other offset nothing is written."""
    x = pool(case, pool=12)
    N = len(x["read_slots"])
    sizes = x["cu_seqlens"].diff()
    x["checkpoint_offsets"] = sizes if offset == "length" else torch.full_like(sizes, offset)
    x["checkpoint_slots"] = torch.arange(12 - N, 12, device=case.device)
    x["checkpoint_slots"][x["checkpoint_slots"] <= x["read_slots"].max()] = -1
    check(x, backend, measure)


@over(POOL, "padded", "per_head", "constant", dtypes="in_turn")
def test_rows_of_no_sequence(backend, case, measure):
    """They may hold anything; their o is 0."""
    x = pool(case, leading=4, padding=9)
    rows = rows_of_no_sequence(x["cu_seqlens"], x["q"].shape[1])
    for name in TOKENS:
        if x[name].ndim > 1:
            x[name][:, rows] = torch.nan
    expected = expected_pool(x)
    with poisoned(backend.can(case.op), case.device):
        out = check(x, backend, measure, expected)
    padding = out["o"][:, rows]
    measure({"o of the padding": padding}, {"o of the padding": torch.zeros_like(padding)}, 0)


@over(POOL, dtypes="in_turn", also="chunk_gla_fwd")
def test_equals_chunk_gla(backend, case, measure):
    """The call equals `chunk_gla` from states that are gathered before, and scattered after it."""
    x = pool(case)
    states = states_of_slots(x["pool"], x["read_slots"], x["has_state"], wide(case.dtype), x["pad_slot"])
    y = GlaInputs(*(x[name] for name in TOKENS), states, x["cu_seqlens"])
    expected = {"o": forward(y, backend.name)["o"]}
    measure(run_pool(x, backend.name), expected, 2 * FORWARD[case.dtype])


def parts_of(x, cut):
    """Returns two calls on one pool: the first `cut` tokens of the first sequence, and all its other tokens."""
    end = int(x["cu_seqlens"][1])
    own = {name: x[name][:1] for name in ("read_slots", "cu_seqlens")}
    for start, stop in ((0, cut), (cut, end)):
        rows = {name: y if (y := x[name]) is None or y.ndim == 1 else y[:, start:stop] for name in TOKENS}
        offsets = torch.tensor([0, stop - start], device=x["q"].device)
        yield {**x, **rows, "read_slots": own["read_slots"], "cu_seqlens": offsets, **dict.fromkeys(OPTIONAL)}


def whole_and_parts(x, cut, backend):
    """Returns o and the state of the first sequence of a call alone, and of two calls in a row."""
    found = []
    for cuts in ((), (cut,)):
        y = {**x, "pool": x["pool"].clone()}
        calls = list(parts_of(y, *cuts)) if cuts else list(parts_of(y, int(y["cu_seqlens"][1])))[:1]
        o = torch.cat([run_pool(call, backend.name)["o"] for call in calls], dim=1)
        found.append({"o": o, "state": y["pool"][int(x["read_slots"][0])]})
    return found


@over(POOL, "checkpoints", dtypes="in_turn")
@pytest.mark.parametrize("cut", [1, 64, 77, 128])
def test_calls_in_a_row(backend, case, cut, measure):
    """A prompt may be cut into calls, each of which continues from the state of the one before."""
    whole, parts = whole_and_parts(pool(case), cut, backend)
    measure(parts, whole, 2 * FORWARD[case.dtype])


@over(POOL, "checkpoints", dtypes="in_turn", requires="deterministic")
def test_same_bits_in_calls_in_a_row(backend, case, measure):
    """Under `batch_invariant`, cuts at multiples of its tokens do not change a bit; nor does a checkpoint there."""
    x = pool(case)
    with gla.batch_invariant(64):
        whole, parts = whole_and_parts(x, 64, backend)
        measure(parts, whole, 0)
        together = {**x, "pool": x["pool"].clone(), "checkpoint_offsets": torch.full_like(x["checkpoint_offsets"], 64)}
        out = run_pool(together, backend.name)
        early = next(parts_of({**x, "pool": x["pool"].clone()}, 64))
        run_pool(early, backend.name)
    end, slot = int(x["cu_seqlens"][1]), int(x["read_slots"][0])
    found = {"o": out["o"][:, :end], "state": out["pool"][slot]}
    measure(found, whole, 0)
    kept = int(x["checkpoint_slots"][0])
    measure({"checkpoint": out["pool"][kept]}, {"checkpoint": early["pool"][slot]}, 0)


@over(POOL, dtypes="in_turn")
def test_out(backend, case, measure):
    """The result may be rows of a larger tensor, whose other rows keep their bits."""
    x = pool(case)
    expected = expected_pool(x)
    shape = list(output_shape(x["q"], x["v"]))
    memory = normal((1, shape[1] + 5, *shape[2:]), case.dtype, torch.Generator(case.device).manual_seed(2))
    before, out = memory.clone(), memory[:, 2:-3]
    found = check(x, backend, measure, expected, out=out)
    assert found["o"] is out, "chunk_gla_pool must return the tensor `out` that it was given"
    for rows in (slice(None, 2), slice(-3, None)):
        measure({"rows beside out": memory[:, rows]}, {"rows beside out": before[:, rows]}, 0)


@over(POOL, gated=True, dtypes="in_turn")
def test_gates_from_logits(backend, case, measure):
    x = pool(case)
    x["g"] = 3 * normal(tuple(x["g"].shape), case.dtype, torch.Generator(case.device).manual_seed(3))
    check(x, backend, measure, expected_pool(x, gate_normalizer=4), gate="logsigmoid", gate_normalizer=4)


@over(POOL, "small", "odd_widths", "checkpoints", dtypes="in_turn")
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_scale(backend, case, scale, measure):
    x = pool(case)
    check(x, backend, measure, expected_pool(x, scale), scale=scale)


@over(POOL, dtypes="in_turn")
def test_strided_views(backend, case, measure):
    x = pool(case)
    expected = expected_pool(x)
    views = {name: heads_first(x[name]) for name in TOKENS if x[name] is not None}
    views["read_slots"] = torch.stack([x["read_slots"], -x["read_slots"]], 1)[:, 0]
    check({**x, **views}, backend, measure, expected)


@over(POOL, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    x = pool(case)
    with poisoned(backend.can(case.op), case.device):
        check(x, backend, measure)


@over(POOL, dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    first, *again = three_runs(lambda: run_pool(pool(case), backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(POOL, dtypes="in_turn")
def test_inputs_unchanged(backend, case, measure):
    x, before = pool(case), pool(case)
    run_pool(x, backend.name)
    kept = [name for name in tensors(x) if name != "pool"]
    measure({name: x[name] for name in kept}, {name: before[name] for name in kept}, 0)
