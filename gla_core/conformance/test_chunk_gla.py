"""chunk_gla: values, gradients, states, packing, layouts, memory."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import (
    CHECKPOINT_EVERY,
    CHUNK_LEAVES,
    backward,
    checkpoint_dtype,
    checkpoints,
    chunk,
    expected_checkpoints,
    expected_forward,
    expected_gradients,
    fill_freed_memory,
    forward,
    gradients,
    heads_first,
    in_two,
    last_two_swapped,
    loss_gradients,
    oracle_forward,
    oracle_gradients,
    output_shape,
    poisoned,
    reference_forward,
    reference_gradients,
    repeated,
    rows_of_no_sequence,
    run_step,
    three_runs,
    tokens,
    training_request,
    with_log_gates,
    with_logits,
    with_room,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT
from gla_core.workloads.inputs import token_of

FWD, BWD = "chunk_gla_fwd", "chunk_gla_bwd"


def state_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@over(FWD)
def test_values(backend, case, measure, layout):
    x = chunk(case)
    out = forward(x, backend.name)
    N = len(x.cu_seqlens) - 1 if x.cu_seqlens is not None else len(x.q)
    states = (N, x.v.shape[2], x.k.shape[3], x.v.shape[3])
    like = {"o": (output_shape(x.q, x.v), case.dtype), "state": (states, state_dtype(case.dtype))}
    measure(out, expected_forward(case), FORWARD[case.dtype])
    layout(out, like, case.device, present(x))


@over(FWD, "short", "no_token", dtypes="one", requires="gradients")
def test_results_can_be_changed_in_place(backend, case):
    """In-place changes work with autograd, too."""
    x = chunk(case)
    for y in forward(dataclasses.replace(x, q=x.q.requires_grad_()), training_request(backend)).values():
        y.mul_(2)


@over(FWD, at_size=True)
def test_values_at_size(backend, case, measure):
    """The reference in float64 gives the expected values, one row of the batch at a time."""
    x = chunk(case)
    measure(forward(x, backend.name), reference_forward(x), FORWARD[case.dtype])


@over(FWD, "short", "strong", "packed", dtypes="in_turn")
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_scale(backend, case, scale, measure):
    x = chunk(case)
    measure(forward(x, backend.name, scale), oracle_forward(x, scale), FORWARD[case.dtype])


@over(FWD, "short", "packed", "extreme")
def test_float32_gates(backend, case, measure):
    x = chunk(case, gate_dtype=torch.float32)
    measure(forward(x, backend.name), oracle_forward(x), FORWARD[case.dtype])


NORMALIZER = 16


def from_logits(number=NORMALIZER):
    return {"gate": "logsigmoid", "gate_normalizer": number}


@over(FWD, gated=True, dtypes="in_turn")
def test_gates_from_logits(backend, case, measure):
    x = with_logits(chunk(case))
    expected = oracle_forward(with_log_gates(x, NORMALIZER))
    measure(forward(x, backend.name, **from_logits()), expected, FORWARD[case.dtype])


EXTREME_LOGITS = (0.0, 1e-3, 10.0, 100.0, torch.inf, -1e-3, -10.0, -120.0, -500.0, -torch.inf)
NORMALIZERS = pytest.mark.parametrize("normalizer", [1, 16, 200])
"""Divided by 1, the log gates of extreme logits leave nothing of a state; divided by 200, they do."""


@over(FWD, "last_chunk_partial", "per_head", dtypes="in_turn")
@NORMALIZERS
def test_every_logit(backend, case, normalizer, measure):
    x = chunk(case)
    x.g[:] = one_of(EXTREME_LOGITS, x.g)
    expected = oracle_forward(with_log_gates(x, normalizer))
    measure(forward(x, backend.name, **from_logits(normalizer)), expected, FORWARD[case.dtype])


def one_of(values, like):
    """Returns a tensor like another one, whose elements are random elements of `values`."""
    generator = torch.Generator(like.device).manual_seed(0)
    at = torch.randint(len(values), like.shape, generator=generator, device=like.device)
    return torch.tensor(values, dtype=like.dtype, device=like.device)[at]


@over(FWD, "short", "last_chunk_partial", "packed")
def test_state_only_if_asked(backend, case, measure):
    x = chunk(case)
    o, state = gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, cu_seqlens=x.cu_seqlens, backend=backend.name)
    assert state is None
    measure({"o": o}, {"o": expected_forward(case)["o"]}, FORWARD[case.dtype])


@over(FWD, "last_chunk_partial", "grouped", "minus_infinity", "per_head", "constant", dtypes="in_turn")
@pytest.mark.parametrize("cut", [1, 63, 64, 77])
def test_state_hand_off(backend, case, cut, measure):
    """One call equals two calls that are joined by the state."""
    x = chunk(case)
    before = forward(tokens(x, None, cut, x.initial_state), backend.name)
    after = forward(tokens(x, cut, None, before["state"]), backend.name)
    joined = {"o": torch.cat([before["o"], after["o"]], dim=1), "state": after["state"]}
    measure(joined, expected_forward(case), FORWARD[case.dtype])


@over(
    FWD,
    *("short", "one_more_than_a_chunk", "grouped", "minus_infinity", "per_head_closed", "constant", "grouped_values"),
    also="recurrent_gla_step",
    dtypes="in_turn",
)
def test_chunk_equals_steps(backend, case, measure):
    x = chunk(case, initial_state=True)
    state, o = x.initial_state, []
    for t in range(x.q.shape[1]):
        token = {name: token_of(getattr(x, name), t) for name in "qkvg"}
        out = run_step({**token, "state": state, "state_indices": None}, backend.name)
        state = out["state"]
        o.append(out["o"])
    steps = {"o": torch.stack(o, dim=1), "state": state}
    measure(steps, forward(x, backend.name), 2 * FORWARD[case.dtype])


def packed_and_separate(x, backend):
    """Returns the results of packed sequences, and the joined results of each sequence alone."""
    spans = list(itertools.pairwise(x.cu_seqlens.tolist()))
    initial = [None if x.initial_state is None else x.initial_state[i : i + 1] for i in range(len(spans))]
    parts = [forward(tokens(x, *span, state), backend.name) for span, state in zip(spans, initial, strict=True)]
    separate = {"o": torch.cat([p["o"] for p in parts], 1), "state": torch.cat([p["state"] for p in parts])}
    out = forward(x, backend.name)
    return {**out, "o": out["o"][:, spans[0][0] : spans[-1][1]]}, separate


@over(FWD, tag="packed", dtypes="in_turn")
def test_packed_equals_separate(backend, case, measure):
    measure(*packed_and_separate(chunk(case), backend), 2 * FORWARD[case.dtype])


@over(FWD, tag="packed", dtypes="in_turn", requires="deterministic")
def test_same_bits_in_any_company(backend, case, measure):
    """Under `batch_invariant`, a packed sequence gives the same bits as the sequence alone."""
    with gla.batch_invariant(64):
        measure(*packed_and_separate(chunk(case), backend), 0)


@over(FWD, tag="packed", dtypes="one")
def test_packed_offsets_may_be_int32(backend, case, measure):
    x = chunk(case)
    out = forward(dataclasses.replace(x, cu_seqlens=x.cu_seqlens.int()), backend.name)
    measure(out, expected_forward(case), FORWARD[case.dtype])


def with_nan_in_padding(x, *more):
    """Fills the rows that belong to no sequence with NaN, in place; returns a mask of them."""
    padding = rows_of_no_sequence(x.cu_seqlens, x.q.shape[1])
    for y in (x.q, x.k, x.v, x.g, *more):
        if y.ndim > 1:  # a constant gate has no rows
            y[:, padding] = torch.nan
    return padding


@over(FWD, "padded", "per_head_padded", "constant_packed")
def test_padding(backend, case, measure):
    """Rows before the first sequence and after the last one may hold anything; their o is 0, and no result depends on
    them.
    """
    x = chunk(case)
    rows = with_nan_in_padding(x)
    with poisoned(backend.can(case.op), case.device):
        out = forward(x, backend.name)
    padding = out["o"][:, rows]
    measure({"o of the padding": padding}, {"o of the padding": torch.zeros_like(padding)}, 0)
    measure(out, expected_forward(case), FORWARD[case.dtype])


LAYOUTS_OF_STATES = pytest.mark.parametrize("states", [with_room, last_two_swapped], ids=["with_room", "values_first"])


def strided(x, states):
    views = {name: heads_first(y) for name in "qkvg" if (y := getattr(x, name)) is not None}
    if x.initial_state is not None:
        views["initial_state"] = states(x.initial_state)
    return dataclasses.replace(x, **views)


@over(FWD, dtypes="in_turn")
@LAYOUTS_OF_STATES
def test_strided_views(backend, case, states, measure):
    measure(forward(strided(chunk(case), states), backend.name), expected_forward(case), FORWARD[case.dtype])


@over(FWD, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    x = chunk(case)
    with poisoned(backend.can(case.op), case.device):
        out = forward(x, backend.name)
    measure(out, expected_forward(case), FORWARD[case.dtype])


@over(FWD, dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    x = chunk(case)
    first, *again = three_runs(lambda: forward(x, backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(FWD, dtypes="in_turn")
def test_inputs_unchanged(backend, case, measure):
    x, before = chunk(case), chunk(case)
    forward(x, backend.name)
    measure(present(x), present(before), 0)


def present(x):
    return {f.name: y for f in dataclasses.fields(x) if (y := getattr(x, f.name)) is not None}


@over(FWD, "one_chunk", "last_chunk_partial", "odd_widths", "grouped", "per_head", dtypes="in_turn")
@pytest.mark.parametrize("cut", [1, 41, 63])
def test_nothing_crosses_a_gate_of_minus_infinity(backend, case, cut, measure):
    """After alpha = 0 nothing depends on earlier tokens, not even the last bit."""
    x, y = chunk(case, initial_state=True), chunk(case, initial_state=True)
    x.g[:, cut] = y.g[:, cut] = -torch.inf
    for early in (y.k[:, :cut], y.v[:, :cut], y.initial_state):
        early.mul_(-30)
    outs = [forward(z, backend.name) for z in (x, y)]
    assert not torch.equal(outs[0]["o"][:, :cut], outs[1]["o"][:, :cut]), "what came before the gate made no difference"
    late = [{"o": out["o"][:, cut:], "state": out["state"]} for out in outs]
    measure(late[1], late[0], 0)
    measure(outs[0], oracle_forward(x), FORWARD[case.dtype])


# ---- checkpoints


@over(FWD, dtypes="in_turn", requires="checkpoints")
@pytest.mark.parametrize("every", [64, 192])
def test_checkpoints(backend, case, every, measure, layout):
    """Checkpoints are the states before every 64th or 192nd token of a sequence; unused rows are 0."""
    x = chunk(case)
    with poisoned(backend.can(case.op), case.device):
        out = checkpoints(x, backend.name, every)
    expected = expected_checkpoints(x, every)
    measure(out, {**expected_forward(case), "checkpoints": expected}, FORWARD[case.dtype])
    unused = expected == 0
    measure({"unused rows": out["checkpoints"][unused]}, {"unused rows": expected[unused]}, 0)
    layout(out, {"checkpoints": (expected.shape, checkpoint_dtype(case.dtype))}, case.device, present(x))


CHECKPOINTS_OF_LOGITS = ("last_chunk_partial", "packed", "per_head", "constant")


@over(FWD, *CHECKPOINTS_OF_LOGITS, dtypes="in_turn", requires="checkpoints")
def test_checkpoints_of_logits(backend, case, measure):
    x = with_logits(chunk(case))
    out = checkpoints(x, backend.name, 128, **from_logits())
    y = with_log_gates(x, NORMALIZER)
    expected = {**oracle_forward(y), "checkpoints": expected_checkpoints(y, 128)}
    measure(out, expected, FORWARD[case.dtype])


@over(BWD, *CHECKPOINTS_OF_LOGITS, dtypes="in_turn")
def test_gradients_of_logits_from_checkpoints(backend, case, measure):
    x = with_logits(chunk(case))
    states = expected_checkpoints(with_log_gates(x, NORMALIZER), 128).to(checkpoint_dtype(case.dtype))
    out = backward(x, backend, *loss_gradients(x), states, 128, NORMALIZER)
    measure(out, oracle_gradients(x, None, NORMALIZER), GRADIENT[case.dtype])


@over(BWD, dtypes="in_turn")
@pytest.mark.parametrize("every", [64, 192])
def test_gradients_from_checkpoints(backend, case, every, measure):
    """A backward accepts checkpoints of any origin; here the oracle makes them."""
    x = chunk(case)
    given = expected_checkpoints(x, every).to(checkpoint_dtype(case.dtype))
    out = backward(x, backend, *loss_gradients(x), checkpoints=given, every=every)
    measure(out, expected_gradients(case), GRADIENT[case.dtype])


# ---- gradients


@over(BWD)
def test_gradients(backend, case, measure):
    measure(gradients(chunk(case), training_request(backend)), expected_gradients(case), GRADIENT[case.dtype])


@over(BWD, at_size=True)
def test_gradients_at_size(backend, case, measure):
    """The reference in float64 gives the expected gradients, one row of the batch at a time.

    The backward runs without checkpoints, and then with the checkpoints of the reference.
    """
    x = chunk(case)
    loss, expected = loss_gradients(x), reference_gradients(x)
    measure(backward(x, backend, *loss), expected, GRADIENT[case.dtype])
    given = checkpoints(x, "reference", CHECKPOINT_EVERY)["checkpoints"]
    measure(backward(x, backend, *loss, given, CHECKPOINT_EVERY), expected, GRADIENT[case.dtype])


@over(BWD, "last_chunk_partial", "grouped", "minus_infinity", "packed", "per_head", "constant", dtypes="in_turn")
@pytest.mark.parametrize("cut", [1, 63, 64, 77])
def test_gradient_hand_off(backend, case, cut, measure):
    """One call equals two calls that are joined by the state and, backwards, by its gradient."""
    x = chunk(case)
    do, dstate = loss_gradients(x)
    (early_rows, early), (late_rows, late) = in_two(x, cut)
    late = dataclasses.replace(late, initial_state=forward(early, training_request(backend))["state"])
    after = backward(late, backend, do[:, late_rows], dstate)
    before = backward(early, backend, do[:, early_rows], after.pop("dinitial_state"))
    order = torch.cat([early_rows, late_rows]).argsort()
    joined = {  # the gradient of a constant gate is a sum over all tokens
        name: before[name] + d if d.ndim == 1 else torch.cat([before[name], d], dim=1)[:, order]
        for name, d in after.items()
    } | {"dinitial_state": before["dinitial_state"]}
    measure(joined, expected_gradients(case), GRADIENT[case.dtype])


@over(BWD, "grouped", "packed", "minus_infinity", "per_head_grouped", "constant", dtypes="one")
@pytest.mark.parametrize("name", CHUNK_LEAVES)
def test_gradient_of_one_input(backend, case, name, measure):
    x = chunk(case)
    if getattr(x, name) is None:
        x = dataclasses.replace(x, **{name: getattr(chunk(case, initial_state=True), name)})
    expected = oracle_gradients(x)
    measure(gradients(x, training_request(backend), (name,)), {f"d{name}": expected[f"d{name}"]}, GRADIENT[case.dtype])


@over(BWD, dtypes="in_turn")
def test_gradient_layout(backend, case, layout):
    x = chunk(case)
    do, dstate = loss_gradients(x)
    like = {f"d{name}": (y.shape, y.dtype) for name, y in present(x).items() if name != "cu_seqlens"}
    layout(backward(x, backend, do, dstate), like, case.device, {**present(x), "do": do, "dstate": dstate})


@over(BWD, "short", "packed", "extreme", "constant", dtypes="in_turn")
def test_gradients_without_final_state(backend, case, measure):
    """A missing gradient of the final state means a gradient of zeros."""
    x = chunk(case)
    do, dstate = loss_gradients(x)
    zeros = backward(x, backend, do, torch.zeros_like(dstate))
    measure(backward(x, backend, do, None), zeros, 2 * GRADIENT[case.dtype])


@over(BWD, "padded", "per_head_padded", "constant_packed")
def test_gradients_of_padding(backend, case, measure):
    """Gradients of padding are exactly 0, whatever the padding and its do hold."""
    x = chunk(case)
    do, dstate = loss_gradients(x)
    rows = with_nan_in_padding(x, do)
    with poisoned(backend.can(case.op), case.device):
        out = backward(x, backend, do, dstate)
    per_token = {name: d for name, d in out.items() if name != "dinitial_state" and d.ndim > 1}
    padding = {f"{name} of the padding": d[:, rows] for name, d in per_token.items()}
    measure(padding, {name: torch.zeros_like(d) for name, d in padding.items()}, 0)
    measure(out, expected_gradients(case), GRADIENT[case.dtype])


@over(BWD, "short", "packed", "extreme", "per_head", "constant")
def test_gradients_of_float32_gates(backend, case, measure):
    x = chunk(case, gate_dtype=torch.float32)
    out = gradients(x, training_request(backend))
    assert out["dg"].dtype == torch.float32
    expected = oracle_gradients(x)
    measure({"dg": out.pop("dg")}, {"dg": expected.pop("dg")}, max(GRADIENT[case.dtype], GRADIENT[torch.float32]))
    measure(out, expected, GRADIENT[case.dtype])


@over(BWD, gated=True, dtypes="in_turn")
def test_gradients_of_logits(backend, case, measure):
    x = with_logits(chunk(case))
    expected = oracle_gradients(x, None, NORMALIZER)
    measure(gradients(x, training_request(backend), **from_logits()), expected, GRADIENT[case.dtype])


@over(BWD, "last_chunk_partial", "per_head", dtypes="in_turn")
@NORMALIZERS
def test_gradients_of_every_logit(backend, case, normalizer, measure):
    x = chunk(case)
    x.g[:] = one_of([y for y in EXTREME_LOGITS if y > -torch.inf], x.g)  # autograd gives NaN at -inf
    expected = oracle_gradients(x, None, normalizer)
    measure(gradients(x, training_request(backend), **from_logits(normalizer)), expected, GRADIENT[case.dtype])


@over(BWD, dtypes="in_turn")
@LAYOUTS_OF_STATES
def test_gradients_of_strided_views(backend, case, states, measure):
    """Inputs and incoming gradients may be strided views."""
    x = chunk(case)
    do, dstate = loss_gradients(x)
    out = gradients(strided(x, states), training_request(backend), loss=(heads_first(do), states(dstate)))
    measure(out, expected_gradients(case), GRADIENT[case.dtype])


@over(BWD, "short", "grouped", "packed", "per_head", dtypes="in_turn")
@pytest.mark.parametrize("dimensions", [(0,), (1,), (0, 1, 2, 3)], ids=["first", "second", "all"])
def test_gradients_of_repeated_values(backend, case, dimensions, measure):
    """Gates and incoming gradients may have strides of 0; the gradient of a sum has stride 0 in all dimensions."""
    x = chunk(case)
    x = dataclasses.replace(x, g=repeated(x.g, *dimensions[: x.g.ndim]))
    do, dstate = (repeated(d, *dimensions) for d in loss_gradients(x))
    out = gradients(x, training_request(backend), loss=(do, dstate))
    measure(out, oracle_gradients(x, (do, dstate)), GRADIENT[case.dtype])


@over(BWD, dtypes="in_turn")
def test_no_uninitialised_gradient(backend, case, measure):
    x = chunk(case)
    with poisoned(backend.can(case.op), case.device):
        out = backward(x, backend, *loss_gradients(x))
    measure(out, expected_gradients(case), GRADIENT[case.dtype])


@over(BWD, dtypes="in_turn", requires="deterministic")
def test_gradients_same_bits(backend, case, measure):
    x = chunk(case)
    first, *again = three_runs(lambda: backward(x, backend, *loss_gradients(x)), case.device)
    for out in again:
        measure(out, first, 0)


@over(BWD, tag="packed", dtypes="in_turn", also=FWD, requires="deterministic")
def test_gradients_same_bits_in_any_company(backend, case, measure):
    """Under `batch_invariant`, a packed sequence has gradients with the same bits as the sequence alone in a batch."""
    x = chunk(case)
    do, dstate = loss_gradients(x)
    with gla.batch_invariant(64):
        out = backward(x, backend, do, dstate)
        for i, (a, b) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
            initial, span = None if x.initial_state is None else x.initial_state[i : i + 1], slice(a, b)
            expected = backward(tokens(x, a, b, initial), backend, do[:, span].contiguous(), dstate[i : i + 1])
            own = {
                name: d[i : i + 1] if name == "dinitial_state" else d[:, span] for name, d in out.items() if d.ndim > 1
            }
            measure(own, {name: expected[name] for name in own}, 0)


@over(BWD, dtypes="in_turn")
def test_inputs_unchanged_by_backward(backend, case, measure):
    x, before = chunk(case), chunk(case)
    fill_freed_memory(float("nan"), case.device)
    backward(x, backend, *loss_gradients(x))
    measure(present(x), present(before), 0)


@over(BWD, "one_chunk", "last_chunk_partial", "grouped", "per_head", dtypes="in_turn")
@pytest.mark.parametrize("cut", [1, 41, 63])
def test_no_gradient_crosses_a_gate_of_minus_infinity(backend, case, cut, measure):
    x = chunk(case, initial_state=True)
    x.g[:, cut] = -torch.inf
    do, _ = loss_gradients(x)
    do[:, :cut] = 0
    out = backward(x, backend, do, None)
    early = {"dk": out["dk"][:, :cut], "dv": out["dv"][:, :cut], "dinitial_state": out["dinitial_state"]}
    measure(early, {name: torch.zeros_like(d) for name, d in early.items()}, 0)


# ---- the gradient of g


def first_tokens(x):
    """Returns the rows at which sequences begin."""
    if x.cu_seqlens is None:
        return [0]
    return [start for start, end in itertools.pairwise(x.cu_seqlens.tolist()) if start < end]


@over(BWD, "short", "last_chunk_partial", "grouped", "packed", "padded", "per_head", dtypes="in_turn")
def test_gradient_of_g_is_zero_where_nothing_passes(backend, case, measure):
    """The gradient of g is exactly 0 at a gate of -inf, and at the first token of a sequence that starts from zero."""
    x = chunk(case, gates="-inf", initial_state=False)
    closed = x.g.isneginf()
    closed[:, first_tokens(x)] = True
    out = backward(x, backend, *loss_gradients(x))
    dg = out["dg"][closed]
    measure({"dg where nothing passes": dg}, {"dg where nothing passes": torch.zeros_like(dg)}, 0)
    measure(out, oracle_gradients(x), GRADIENT[case.dtype])


GATES = {
    "open": (0.0,),
    "strong": (-8.0,),
    "closed": (-torch.inf,),
    "any": (0.0, -1e-4, -0.1, -1.0, -30.0, -1e4, -torch.inf),
}


@over(BWD, "short", "last_chunk_partial", "grouped", "packed", "per_head", "constant", dtypes="in_turn")
@pytest.mark.parametrize("gates", GATES)
def test_gradients_of_every_gate(backend, case, gates, measure):
    """Checks gates of one strength everywhere, and gates of mixed strengths.

    If all gates are strong, dg is small beside q * dq and k * dk, which consist mostly of a token's own key and value.
    """
    x = chunk(case)
    x.g[:] = one_of(GATES[gates], x.g)
    measure(backward(x, backend, *loss_gradients(x)), oracle_gradients(x), GRADIENT[case.dtype])


@over(BWD, "last_chunk_partial", "per_head")
def test_gradient_of_strong_gates_before_open_ones(backend, case, measure):
    """The large q * dq and k * dk of the later tokens must leave no error in the small dg of the first tokens."""
    x = chunk(case, T=300)
    x.g[:, :192], x.g[:, 192:] = -8, 0
    name = "dg of the first tokens"
    out, expected = backward(x, backend, *loss_gradients(x)), oracle_gradients(x)
    measure({name: out["dg"][:, :128]}, {name: expected["dg"][:, :128]}, GRADIENT[case.dtype])
