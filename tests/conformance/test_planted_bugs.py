"""Deliberately wrong backends, each the reference with one bug: the kit must name it. About 50 s."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

import gla_core as gla
from gla_core.conformance.run import run
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.registry import get

REFERENCE = get("reference").ops
FWD, BWD, STEP, SOFTMAX, ATTENTION = (
    REFERENCE[op]
    for op in ("chunk_gla_fwd", "chunk_gla_bwd", "recurrent_gla_step", "online_softmax", "softmax_attention")
)


def wrong_scale(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    return FWD(q, k, v, g, 1.01 * scale, initial_state, output_final_state, cu_seqlens)


def default_scale_always(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    return FWD(q, k, v, g, q.shape[-1] ** -0.5, initial_state, output_final_state, cu_seqlens)


def pair(q, k, v, scale):
    """What key and value at a token give to the query at the same place, [B, T, Hq, V]."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    return scale * (q * k).sum(-1, keepdim=True) * v


def current_token_excluded(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    o, state = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    return o - pair(q, k, v, scale), state


def next_token_included(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    o, state = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    o[:, :-1] += pair(q[:, :-1], k[:, 1:], v[:, 1:], scale)
    return o, state


def gate_one_step_late(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    late = None if g is None else torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1)[:, : g.shape[1]]
    return FWD(q, k, v, late, scale, initial_state, output_final_state, cu_seqlens)


def last_partial_chunk_dropped(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    T = q.shape[1] // 64 * 64
    if cu_seqlens is not None or not T:
        return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    part = (None if x is None else x[:, :T] for x in (q, k, v, g))
    o, state = FWD(*part, scale, initial_state, output_final_state, None)
    return torch.cat([o, o.new_zeros(o.shape[0], q.shape[1] - T, *o.shape[2:])], 1), state


def state_not_reset(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    if cu_seqlens is None:
        return FWD(q, k, v, g, scale, initial_state, output_final_state, None)
    first = None if initial_state is None else initial_state[:1]
    o, state = FWD(q, k, v, g, scale, first, output_final_state, None)
    return o, None if state is None else state.repeat(len(cu_seqlens) - 1, 1, 1, 1)


def row_not_written(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    o, state = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    out = torch.empty(o.shape, dtype=o.dtype)
    out[:, :-1] = o[:, :-1]
    return out, state


runs = itertools.count()


def last_bit_changes(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    o, state = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    return o * (1 + (next(runs) % 2) * 2**-22), state


def wrong_head_grouping(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    H, Hq = k.shape[2], q.shape[2]
    order = torch.arange(Hq).view(Hq // H, H).T.flatten()  # query head h reads key head h % H
    o, state = FWD(q[:, :, order], k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    out = torch.empty_like(o)
    out[:, :, order] = o
    return out, state


def state_in_bfloat16(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    o, state = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    return o, None if state is None else state.bfloat16().float()


def initial_state_ignored(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    return FWD(q, k, v, g, scale, None, output_final_state, cu_seqlens)


def computed_in_half(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    g = None if g is None else g.half()
    o, state = FWD(q.half(), k.half(), v.half(), g, scale, initial_state, output_final_state, cu_seqlens)
    return o.float(), state


def gate_clamped(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    g = None if g is None else g.clamp(min=-16)
    return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)


def input_scaled_in_place(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    result = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    q.mul_(scale)
    return result


def strides_ignored(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    dense = torch.empty(q.shape).stride()
    return FWD(q.as_strided(q.shape, dense), k, v, g, scale, initial_state, output_final_state, cu_seqlens)


def output_not_contiguous(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    o, state = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    return o.transpose(1, 2).contiguous().transpose(1, 2), state


def gradient_of_g_missing(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate):
    dq, dk, dv, dg, dinitial = BWD(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate)
    return dq, dk, dv, None if dg is None else torch.zeros_like(dg), dinitial


def gradient_of_state_ignored(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate):
    return BWD(q, k, v, g, scale, initial_state, cu_seqlens, do, None)


def gradient_row_not_written(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate):
    dq, dk, dv, dg, dinitial = BWD(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate)
    out = torch.empty(dv.shape, dtype=dv.dtype)
    out[:, 1:] = dv[:, 1:]
    return dq, dk, out, dg, dinitial


def gradient_last_bit_changes(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate):
    dq, *rest = BWD(q, k, v, g, scale, initial_state, cu_seqlens, do, dstate)
    return dq * (1 + (next(runs) % 2) * 2**-22), *rest


def negative_index_counts_from_the_end(q, k, v, g, state, scale, state_indices, inplace):
    if state_indices is not None:
        state_indices = torch.where(state_indices < 0, state_indices + len(state), state_indices)
    return STEP(q, k, v, g, state, scale, state_indices, inplace)


def never_in_place(q, k, v, g, state, scale, state_indices, inplace):
    return STEP(q, k, v, g, state, scale, state_indices, False)


def always_in_place(q, k, v, g, state, scale, state_indices, inplace):
    return STEP(q, k, v, g, state, scale, state_indices, True)


def nan_for_a_tile_of_minus_infinity(x, dim):
    rows = x.movedim(dim, -1)
    m, z = rows.new_full((*rows.shape[:-1], 1), -torch.inf), rows.new_zeros(*rows.shape[:-1], 1)
    for tile in rows.split(256, -1):
        m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
        z = z * torch.exp(m - m_new) + torch.exp(tile - m_new).sum(-1, keepdim=True)
        m = m_new
    return (torch.exp(rows - m) / z).movedim(-1, dim).contiguous()


def no_maximum_taken_off(x, dim):
    return (x.exp() / x.exp().sum(dim, keepdim=True)).contiguous()


def logarithm_to_base_two(q, k, v, scale, causal):
    o, lse = ATTENTION(q, k, v, scale, causal)
    return o, lse / torch.log(torch.tensor(2.0))


def mask_aligned_at_the_first_key(q, k, v, scale, causal):
    Tq, Tk = q.shape[1], k.shape[1]
    if not causal or Tk <= Tq:
        return ATTENTION(q, k, v, scale, causal)
    return ATTENTION(q, k[:, :Tq], v[:, :Tq], scale, True)


PLANTED = [  # the bug, the op it is in, and the case that must name it
    (wrong_scale, "chunk_gla_fwd", "test_values[short-float32]"),
    (default_scale_always, "chunk_gla_fwd", "test_scale[short-float32-1.0]"),
    (current_token_excluded, "chunk_gla_fwd", "test_values[short-float32]"),
    (next_token_included, "chunk_gla_fwd", "test_values[short-float32]"),
    (gate_one_step_late, "chunk_gla_fwd", "test_values[short-float32]"),
    (last_partial_chunk_dropped, "chunk_gla_fwd", "test_values[one_more_than_a_chunk-float32]"),
    (state_not_reset, "chunk_gla_fwd", "test_packed_equals_separate[packed-float32]"),
    (row_not_written, "chunk_gla_fwd", "test_no_uninitialised_output[short-float32]"),
    (last_bit_changes, "chunk_gla_fwd", "test_same_bits[short-float32]"),
    (wrong_head_grouping, "chunk_gla_fwd", "test_values[grouped-float32]"),
    (state_in_bfloat16, "chunk_gla_fwd", "test_values[short-float32]"),
    (initial_state_ignored, "chunk_gla_fwd", "test_state_hand_off[last_chunk_partial-float32-64]"),
    (computed_in_half, "chunk_gla_fwd", "test_values[short-float32]"),
    (gate_clamped, "chunk_gla_fwd", "test_nothing_crosses_a_gate_of_minus_infinity[one_chunk-float32-41]"),
    (input_scaled_in_place, "chunk_gla_fwd", "test_inputs_unchanged[short-float32]"),
    (strides_ignored, "chunk_gla_fwd", "test_strided_views[short-float32]"),
    (output_not_contiguous, "chunk_gla_fwd", "test_values[short-float32]"),
    (gradient_of_g_missing, "chunk_gla_bwd", "test_gradients[short-float32]"),
    (gradient_of_state_ignored, "chunk_gla_bwd", "test_gradients[short-float32]"),
    (gradient_row_not_written, "chunk_gla_bwd", "test_no_uninitialised_gradient[short-float32]"),
    (gradient_last_bit_changes, "chunk_gla_bwd", "test_gradients_same_bits[short-float32]"),
    (
        negative_index_counts_from_the_end,
        "recurrent_gla_step",
        "test_inplace_writes_only_addressed_rows[small-float32--1]",
    ),
    (never_in_place, "recurrent_gla_step", "test_inplace[small-float32]"),
    (always_in_place, "recurrent_gla_step", "test_inputs_unchanged[small-float32-False]"),
    (nan_for_a_tile_of_minus_infinity, "online_softmax", "test_values[minus_infinity-float32]"),
    (no_maximum_taken_off, "online_softmax", "test_large_values[small-float32-30000.0]"),
    (logarithm_to_base_two, "softmax_attention", "test_values[small-float32]"),
    (mask_aligned_at_the_first_key, "softmax_attention", "test_values[odd-float32]"),
]
MODULES = {op: "test_" + op.removesuffix("_fwd").removesuffix("_bwd") for op in REFERENCE}


def judge(backend, op, case, path):
    """Exit code and the report's rows for one case."""
    test, _, parameters = case.partition("[")
    workload = parameters.partition("-")[0]
    with gla.register(backend):
        code = run("planted", report=str(path), select=f"{test} and {workload}", module=MODULES[op])
    return code, {row["id"]: row for row in json.loads(path.read_text())["cases"]}


def planted(op, function):
    functions = {**REFERENCE, op: function}
    return Backend("planted", "0", functions, Capabilities(dtypes=frozenset({torch.float32})))


@pytest.mark.parametrize(("function", "op", "case"), [pytest.param(*bug, id=bug[0].__name__) for bug in PLANTED])
def test_the_bug_is_named(function, op, case, tmp_path):
    code, rows = judge(planted(op, function), op, case, tmp_path / "report.json")
    assert code == 1
    assert rows[case]["outcome"] == "failed"
    assert rows[case]["reason"].startswith(("AssertionError", "assert"))


def test_the_same_cases_pass_without_a_bug(tmp_path):
    for op, case in {(op, case) for _, op, case in PLANTED}:
        code, rows = judge(planted(op, REFERENCE[op]), op, case, tmp_path / "report.json")
        assert code == 0, case
        assert rows[case]["outcome"] == "passed"


@pytest.mark.parametrize(
    ("function", "op", "case", "quantities"),
    [
        (state_in_bfloat16, "chunk_gla_fwd", "test_values[short-float32]", {"state"}),
        (gradient_of_g_missing, "chunk_gla_bwd", "test_gradients[short-float32]", {"dg"}),
        (logarithm_to_base_two, "softmax_attention", "test_values[small-float32]", {"lse"}),
    ],
)
def test_the_report_says_which_result_is_wrong(function, op, case, quantities, tmp_path):
    _, rows = judge(planted(op, function), op, case, tmp_path / "report.json")
    over = {e["quantity"] for e in rows[case]["errors"] if e["error"] is None or e["error"] > e["budget"]}
    assert over == quantities


def test_a_small_chunk_without_a_rest_does_not_show_the_dropped_one(tmp_path):
    """The bug is named by the case it is in, and by no other."""
    backend = planted("chunk_gla_fwd", last_partial_chunk_dropped)
    code, rows = judge(backend, "chunk_gla_fwd", "test_values[one_chunk-float32]", tmp_path / "report.json")
    assert code == 0
    assert rows["test_values[one_chunk-float32]"]["outcome"] == "passed"


def test_a_backend_that_refuses_all_it_declares_does_not_pass(tmp_path):
    backend = Backend("planted", "0", REFERENCE, Capabilities(), supports=lambda call: "not today")
    with gla.register(backend):
        code = run("planted", report=str(tmp_path / "report.json"), module="test_refusals")
    assert code == 1
    rows = json.loads((tmp_path / "report.json").read_text())["cases"]
    failed = {row["op"] for row in rows if row["outcome"] == "failed"}
    assert failed == set(REFERENCE)
