"""Deliberately wrong backends: each is the reference with one bug, which the kit must name."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest.runner import runtestprotocol

import gla_core as gla
from gla_core import conformance
from gla_core.conformance.run import run
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.registry import get

REFERENCE = get("reference").ops
FWD, BWD, SUMMARY, STEP, SOFTMAX, ATTENTION = (
    REFERENCE[op]
    for op in (
        "chunk_gla_fwd",
        "chunk_gla_bwd",
        "chunk_gla_summary",
        "recurrent_gla_step",
        "online_softmax",
        "softmax_attention",
    )
)


def wrong_scale(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    return FWD(q, k, v, g, 1.01 * scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def default_scale_always(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    return FWD(q, k, v, g, q.shape[-1] ** -0.5, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def pair(q, k, v, scale):
    """Returns the contribution of key and value at a token to the query at the same token, [B, T, Hq, V]."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    return scale * (q * k).sum(-1, keepdim=True) * v


def current_token_excluded(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return o - pair(q, k, v, scale), state, checkpoints


def next_token_included(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    o[:, :-1] += pair(q[:, :-1], k[:, 1:], v[:, 1:], scale)
    return o, state, checkpoints


def gate_one_step_late(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    late = None if g is None else torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1)[:, : g.shape[1]]
    return FWD(q, k, v, late, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def last_partial_chunk_dropped(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    T = q.shape[1] // 64 * 64
    if cu_seqlens is not None or not T:
        return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    part = (None if x is None else x[:, :T] for x in (q, k, v, g))
    o, state, checkpoints = FWD(*part, scale, initial_state, output_final_state, None, None)
    return torch.cat([o, o.new_zeros(o.shape[0], q.shape[1] - T, *o.shape[2:])], 1), state, checkpoints


def state_not_reset(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    if cu_seqlens is None:
        return FWD(q, k, v, g, scale, initial_state, output_final_state, None, None)
    first = None if initial_state is None else initial_state[:1]
    o, state, checkpoints = FWD(q, k, v, g, scale, first, output_final_state, None, None)
    return o, None if state is None else state.repeat(len(cu_seqlens) - 1, 1, 1, 1), checkpoints


def state_of_the_sequence_before(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    if cu_seqlens is not None and state is not None and initial_state is not None:
        last = cu_seqlens[:-1] == q.shape[1]  # sequences that begin where all tokens end
        state = torch.where(last[:, None, None, None], initial_state.roll(1, 0), state)
    return o, state, checkpoints


def row_not_written(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    out = torch.empty(o.shape, dtype=o.dtype)
    out[:, :-1] = o[:, :-1]
    return out, state, checkpoints


runs = itertools.count()


def last_bit_changes(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return o * (1 + (next(runs) % 2) * 2**-22), state, checkpoints


def wrong_head_grouping(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    H, Hq = k.shape[2], q.shape[2]
    order = torch.arange(Hq).view(Hq // H, H).T.flatten()  # query head h reads key head h % H
    o, state, checkpoints = FWD(
        q[:, :, order], k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every
    )
    out = torch.empty_like(o)
    out[:, :, order] = o
    return out, state, checkpoints


def state_in_bfloat16(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return o, None if state is None else state.bfloat16().float(), checkpoints


def initial_state_ignored(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    return FWD(q, k, v, g, scale, None, output_final_state, cu_seqlens, checkpoint_every)


def computed_in_half(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    g = None if g is None else g.half()
    o, state, checkpoints = FWD(
        q.half(), k.half(), v.half(), g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every
    )
    return o.float(), state, checkpoints


def gate_clamped(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    g = None if g is None else g.clamp(min=-16)
    return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def input_scaled_in_place(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    result = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    q.mul_(scale)
    return result


def strides_ignored(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    dense = torch.empty(q.shape).stride()
    return FWD(
        q.as_strided(q.shape, dense), k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every
    )


def swapped_state_read_as_any(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    state = initial_state.as_strided(initial_state.shape, torch.empty(initial_state.shape).stride())
    return FWD(q, k, v, g, scale, state, output_final_state, cu_seqlens, checkpoint_every)


def output_not_contiguous(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return o.transpose(1, 2).contiguous().transpose(1, 2), state, checkpoints


LATE = 1000
"""Number of tokens, columns or keys before the bug shows."""


def output_wrong_from_late(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    o[:, LATE:] *= 1.1
    return o, state, checkpoints


def state_not_decayed_from_late(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    if g is not None:
        g = g.clone()
        g[:, LATE:] = 0
    return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def output_is_a_view(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return torch.cat([o, o])[: len(o)], state, checkpoints


def results_share_memory(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    memory = torch.cat([o.flatten(), state.flatten()]).untyped_storage()
    return o.new_empty(0).set_(memory, 0, o.shape), o.new_empty(0).set_(memory, o.numel(), state.shape), checkpoints


def initial_state_returned_without_tokens(
    q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every
):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return o, initial_state if q.shape[1] == 0 and output_final_state else state, checkpoints


def no_state_returned(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)[0], None, None


def output_in_another_dtype(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return o.double(), state, checkpoints


def products_in_half_precision(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    with torch.autocast("cpu", torch.bfloat16, enabled=q.dtype == torch.bfloat16):
        return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def padding_not_written(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    if cu_seqlens is not None:
        o[:, cu_seqlens[-1] :] = v[:, cu_seqlens[-1] :]
    return o, state, checkpoints


def checkpoints_of_the_next_interval(
    q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every
):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    return o, state, None if checkpoints is None else checkpoints.roll(-1, 1)


def checkpoints_of_packed_sequences_in_a_row(
    q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every
):
    o, state, checkpoints = FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)
    if checkpoints is not None and cu_seqlens is not None:  # one after the other, without unused rows between them
        used = [
            i + int(a) // checkpoint_every + j
            for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens))
            for j in range(-(-int(b - a) // checkpoint_every))
        ]
        checkpoints = torch.cat([checkpoints[:, used], torch.zeros_like(checkpoints)], 1)[:, : checkpoints.shape[1]]
    return o, state, checkpoints.contiguous() if checkpoints is not None else None


GRADIENTS = ("dq", "dk", "dv", "dg", "dinitial_state")


def right(x, **changes):
    """Returns the reference's gradients, by name, for the arguments x with changes."""
    return SimpleNamespace(**dict(zip(GRADIENTS, BWD(**{**vars(x), **changes}), strict=True)))


def backward(bug):
    """Makes a chunk_gla_bwd from a function that maps the arguments to the gradients, by name."""

    @functools.wraps(BWD)
    def bwd(*args):
        x = SimpleNamespace(**dict(zip(inspect.signature(BWD).parameters, args, strict=True)))
        return tuple(vars(bug(x)).values())

    bwd.__name__ = bug.__name__
    return bwd


@backward
def gradients_wrong_from_late(x):
    d = right(x)
    d.dk[:, LATE:] *= 1.1
    return d


@backward
def gradient_of_padding_not_written(x):
    d = right(x)
    if x.cu_seqlens is not None:
        d.dq[:, x.cu_seqlens[-1] :] = 1
    return d


@backward
def gradient_is_the_gradient_of_the_state(x):
    d = right(x)
    if x.q.shape[1] == 0:
        d.dinitial_state = x.dstate
    return d


@backward
def checkpoints_taken_for_twice_as_many_tokens(x):
    if x.checkpoints is None or x.cu_seqlens is not None:
        return right(x)
    return right(x, checkpoints=x.checkpoints.repeat_interleave(2, 1)[:, : x.checkpoints.shape[1]])


@backward
def gradient_of_state_ignored(x):
    return right(x, dstate=None)


@backward
def gradient_of_state_left_out_of_the_initial_state(x):
    d = right(x)
    d.dinitial_state = right(x, dstate=None).dinitial_state
    return d


@backward
def rows_of_a_partial_chunk_dropped(x):
    T = x.q.shape[1] // 64 * 64
    if x.cu_seqlens is not None or not T:
        return right(x)
    kept = {name: y[:, :T] for name in ("q", "k", "v", "g", "do") if (y := getattr(x, name)) is not None}
    found = vars(right(x, **kept))
    zeros = {f"d{name}": torch.zeros_like(getattr(x, name)[:, T:]) for name in kept if name != "do"}
    return SimpleNamespace(**found | {name: torch.cat([found[name], rest], 1) for name, rest in zeros.items()})


@backward
def dk_of_a_head_by_one_of_its_query_heads(x):
    d, groups = right(x), x.q.shape[2] // x.k.shape[2]
    d.dk[:, :, 0] = right(x, q=x.q[:, :, ::groups], do=x.do[:, :, ::groups]).dk[:, :, 0]
    return d


@backward
def gradient_of_g_missing(x):
    d = right(x)
    d.dg = None if x.g is None else torch.zeros_like(d.dg)
    return d


@backward
def gradient_of_g_without_the_state(x):
    d = right(x)
    if x.g is not None and x.cu_seqlens is None:
        d.dg -= through_the_end(x)
    return d


@backward
def gradient_of_g_from_the_end(x):
    """Computes dg by one suffix sum over all tokens, of gradients that were rounded first."""
    d = right(x)
    if x.g is not None and x.cu_seqlens is None:
        d.dg = (suffix_sums(given_and_taken(x, d)) + through_the_end(x)).to(x.g.dtype)
    return d


@backward
def gradient_of_g_with_the_diagonal(x):
    """Computes dg by suffix sums per chunk, exact at its end, of float32 gradients that include pairs s = t."""
    d = right(x)
    if x.g is not None and x.cu_seqlens is None:
        wide = in_float32(x)
        exact = right(wide)
        after = [*(dg[:, None] for dg in exact.dg[:, 64::64].unbind(1)), through_the_end(x)]
        chunks = given_and_taken(wide, exact).split(64, 1)
        sums = [suffix_sums(chunk) + rest for chunk, rest in zip(chunks, after, strict=True)]
        d.dg = torch.cat(sums, 1).to(x.g.dtype).contiguous()
    return d


def given_and_taken(x, d):
    """Returns dg_t - dg_{t+1}: q * dq, summed over the query heads of a key, minus k * dk."""
    return (x.q.float() * d.dq).unflatten(2, (x.k.shape[2], -1)).sum(3) - x.k.float() * d.dk


def suffix_sums(x):
    return x.flip(1).cumsum(1).flip(1)


def through_the_end(x):
    """Returns the contribution of the final state's gradient to each gate [B, 1, H, K]."""
    state = FWD(x.q, x.k, x.v, x.g, x.scale, x.initial_state, True, None, None)[1]
    return (state * (torch.zeros_like(state) if x.dstate is None else x.dstate)).sum(-1)[:, None]


def in_float32(x):
    return SimpleNamespace(**{name: y.float() if torch.is_tensor(y) else y for name, y in vars(x).items()})


@backward
def gate_clamped_backwards(x):
    return right(x, g=None if x.g is None else x.g.clamp(min=-16))


@backward
def strides_of_do_ignored(x):
    return right(x, do=x.do.as_strided(x.do.shape, torch.empty(x.do.shape).stride()))


@backward
def gradient_row_not_written(x):
    d = right(x)
    out = torch.empty(d.dv.shape, dtype=d.dv.dtype)
    out[:, 1:] = d.dv[:, 1:]
    d.dv = out
    return d


@backward
def gradient_last_bit_changes(x):
    d = right(x)
    d.dq *= 1 + (next(runs) % 2) * 2**-22
    return d


def last_columns_left_out(x, dim):
    y = SOFTMAX(x, dim)
    y.narrow(dim, min(LATE, y.shape[dim]), max(0, y.shape[dim] - LATE)).zero_()
    return y


def late_keys_left_out(q, k, v, scale, causal):
    return ATTENTION(q, k[:, :LATE], v[:, :LATE], scale, causal and k.shape[1] <= LATE)


def negative_index_counts_from_the_end(q, k, v, g, state, scale, state_indices, inplace):
    if state_indices is not None:
        state_indices = torch.where(state_indices < 0, state_indices + len(state), state_indices)
    return STEP(q, k, v, g, state, scale, state_indices, inplace)


def never_in_place(q, k, v, g, state, scale, state_indices, inplace):
    return STEP(q, k, v, g, state, scale, state_indices, False)


def always_in_place(q, k, v, g, state, scale, state_indices, inplace):
    return STEP(q, k, v, g, state, scale, state_indices, True)


def decay_without_the_last_gate(left, right, g, cu_seqlens, backwards):
    decay, _ = SUMMARY(left[:, :-1], right[:, :-1], None if g is None else g[:, :-1], cu_seqlens, backwards)
    return decay, SUMMARY(left, right, g, cu_seqlens, backwards)[1]


def own_gate_left_out_backwards(left, right, g, cu_seqlens, backwards):
    decay, state = SUMMARY(left, right, g, cu_seqlens, backwards)
    if backwards and g is not None and g.shape[1]:
        late = torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1)
        state = SUMMARY(left, right, late, cu_seqlens, backwards)[1]
    return decay, state


def one_query_head_of_a_group(left, right, g, cu_seqlens, backwards):
    groups = 1 if g is None else left.shape[2] // g.shape[2]
    return SUMMARY(left[:, :, ::groups], right[:, :, ::groups], g, cu_seqlens, backwards)


def summary_of_padding(left, right, g, cu_seqlens, backwards):
    if cu_seqlens is not None:
        cu_seqlens = torch.cat([cu_seqlens[:-1], cu_seqlens.new_full((1,), left.shape[1])])
    return SUMMARY(left, right, g, cu_seqlens, backwards)


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


def other_bits_in_company(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    if cu_seqlens is not None and len(cu_seqlens) > 2:
        scale *= 1 + 1e-6
    return FWD(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every)


def other_gradient_bits_in_company(
    q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate
):
    if cu_seqlens is not None and len(cu_seqlens) > 2:
        scale *= 1 + 1e-6
    return BWD(q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate)


PLANTED = [  # the bug, its op, and the case (or its beginning) that must name it
    (wrong_scale, "chunk_gla_fwd", "test_values[short-float32]"),
    (default_scale_always, "chunk_gla_fwd", "test_scale[short-float32-1.0]"),
    (current_token_excluded, "chunk_gla_fwd", "test_values[short-float32]"),
    (next_token_included, "chunk_gla_fwd", "test_values[short-float32]"),
    (gate_one_step_late, "chunk_gla_fwd", "test_values[short-float32]"),
    (last_partial_chunk_dropped, "chunk_gla_fwd", "test_values[one_more_than_a_chunk-float32]"),
    (state_not_reset, "chunk_gla_fwd", "test_packed_equals_separate[packed-float32]"),
    (state_of_the_sequence_before, "chunk_gla_fwd", "test_values[packed-float32]"),
    (row_not_written, "chunk_gla_fwd", "test_no_uninitialised_output[short-float32]"),
    (last_bit_changes, "chunk_gla_fwd", "test_same_bits[short-float32]"),
    (other_bits_in_company, "chunk_gla_fwd", "test_same_bits_in_any_company[packed-float32]"),
    (wrong_head_grouping, "chunk_gla_fwd", "test_values[grouped-float32]"),
    (state_in_bfloat16, "chunk_gla_fwd", "test_values[short-float32]"),
    (initial_state_ignored, "chunk_gla_fwd", "test_state_hand_off[last_chunk_partial-float32-64]"),
    (computed_in_half, "chunk_gla_fwd", "test_values[short-float32]"),
    (gate_clamped, "chunk_gla_fwd", "test_nothing_crosses_a_gate_of_minus_infinity[one_chunk-float32-41]"),
    (input_scaled_in_place, "chunk_gla_fwd", "test_inputs_unchanged[short-float32]"),
    (strides_ignored, "chunk_gla_fwd", "test_strided_views[short-float32-with_room]"),
    (swapped_state_read_as_any, "chunk_gla_fwd", "test_strided_views[short-float32-values_first]"),
    (output_not_contiguous, "chunk_gla_fwd", "test_values[short-float32]"),
    (output_wrong_from_late, "chunk_gla_fwd", "test_long_sequence[narrow_mild-"),
    (state_not_decayed_from_late, "chunk_gla_fwd", "test_long_sequence[narrow_strong-"),
    (output_is_a_view, "chunk_gla_fwd", "test_values[short-float32]"),
    (results_share_memory, "chunk_gla_fwd", "test_values[short-float32]"),
    (initial_state_returned_without_tokens, "chunk_gla_fwd", "test_values[no_token-float32]"),
    (no_state_returned, "chunk_gla_fwd", "test_values[short-float32]"),
    (output_in_another_dtype, "chunk_gla_fwd", "test_values[short-float32]"),
    (products_in_half_precision, "chunk_gla_fwd", "test_autocast_of_chunk_gla[ungated-bfloat16]"),
    (checkpoints_of_the_next_interval, "chunk_gla_fwd", "test_checkpoints[last_chunk_partial-"),
    (checkpoints_of_packed_sequences_in_a_row, "chunk_gla_fwd", "test_checkpoints[packed-"),
    (
        checkpoints_taken_for_twice_as_many_tokens,
        "chunk_gla_bwd",
        "test_gradients_from_checkpoints[last_chunk_partial-",
    ),
    (padding_not_written, "chunk_gla_fwd", "test_padding[padded-float32]"),
    (gradients_wrong_from_late, "chunk_gla_bwd", "test_gradients_of_long_sequence[narrow_mild-"),
    (gradient_of_padding_not_written, "chunk_gla_bwd", "test_gradients_of_padding[padded-float32]"),
    (gradient_is_the_gradient_of_the_state, "chunk_gla_bwd", "test_gradient_layout[no_token-"),
    (gradient_of_g_missing, "chunk_gla_bwd", "test_gradients[short-float32]"),
    (gradient_of_g_without_the_state, "chunk_gla_bwd", "test_gradients[short-float32]"),
    (gradient_of_g_from_the_end, "chunk_gla_bwd", "test_gradient_of_strong_gates_before_open_ones[last_chunk_partial-"),
    (gradient_of_g_with_the_diagonal, "chunk_gla_bwd", "test_gradients_of_every_gate[short-float32-strong]"),
    (
        gate_clamped_backwards,
        "chunk_gla_bwd",
        "test_gradient_of_g_is_zero_where_nothing_passes[short-float32]",
    ),
    (gradient_of_state_ignored, "chunk_gla_bwd", "test_gradients[short-float32]"),
    (
        gradient_of_state_left_out_of_the_initial_state,
        "chunk_gla_bwd",
        "test_gradient_hand_off[last_chunk_partial-float32-64]",
    ),
    (rows_of_a_partial_chunk_dropped, "chunk_gla_bwd", "test_gradients[one_more_than_a_chunk-float32]"),
    (dk_of_a_head_by_one_of_its_query_heads, "chunk_gla_bwd", "test_gradients[grouped-float32]"),
    (strides_of_do_ignored, "chunk_gla_bwd", "test_gradients_of_strided_views[short-float32-with_room]"),
    (gradient_row_not_written, "chunk_gla_bwd", "test_no_uninitialised_gradient[short-float32]"),
    (gradient_last_bit_changes, "chunk_gla_bwd", "test_gradients_same_bits[short-float32]"),
    (other_gradient_bits_in_company, "chunk_gla_bwd", "test_gradients_same_bits_in_any_company[packed-float32]"),
    (decay_without_the_last_gate, "chunk_gla_summary", "test_values[short-float32-forwards]"),
    (own_gate_left_out_backwards, "chunk_gla_summary", "test_values[short-float32-backwards]"),
    (one_query_head_of_a_group, "chunk_gla_summary", "test_grouped_queries_backwards[short-float32]"),
    (summary_of_padding, "chunk_gla_summary", "test_padding[padded-float32-forwards]"),
    (
        negative_index_counts_from_the_end,
        "recurrent_gla_step",
        "test_inplace_writes_only_addressed_rows[small-float32--1]",
    ),
    (never_in_place, "recurrent_gla_step", "test_inplace[small-float32]"),
    (always_in_place, "recurrent_gla_step", "test_inputs_unchanged[small-float32-False]"),
    (nan_for_a_tile_of_minus_infinity, "online_softmax", "test_values[minus_infinity-float32]"),
    (no_maximum_taken_off, "online_softmax", "test_large_values[small-float32-30000.0]"),
    (last_columns_left_out, "online_softmax", "test_long_rows[many_columns-float32]"),
    (late_keys_left_out, "softmax_attention", "test_many_keys_or_queries[many_keys-float32]"),
    (logarithm_to_base_two, "softmax_attention", "test_values[small-float32]"),
    (mask_aligned_at_the_first_key, "softmax_attention", "test_values[odd-float32]"),
]

QUANTITIES = {  # for some bugs, the quantities that the case reports over its budget
    "state_in_bfloat16": {"state"},
    "state_of_the_sequence_before": {"state"},
    "gradient_of_g_missing": {"dg"},
    "gradient_of_g_without_the_state": {"dg"},
    "gradient_of_g_with_the_diagonal": {"dg"},
    "dk_of_a_head_by_one_of_its_query_heads": {"dk"},
    "logarithm_to_base_two": {"lse"},
    "padding_not_written": {"o of the padding"},
}
NAMING = ("AssertionError", "assert", "gla_core.dispatch.errors.BackendError")
"""Beginnings of the messages of a case that names a bug; the core itself refuses results of a wrong form."""


def planted(op, function):
    claims_bits = frozenset({"cpu"} if "in_company" in function.__name__ else ())
    dtypes = frozenset({torch.float32, torch.bfloat16})
    swaps = "swapped" in function.__name__
    can = Capabilities(dtypes=dtypes, checkpoints=True, batch_invariant=claims_bits, swapped_states=swaps)
    return Backend("planted", "0", {**REFERENCE, op: function}, can)


class Judge:
    """A pytest plugin that collects the kit once, and then runs a case on each wrong backend in turn."""

    def __init__(self, collected_on):
        self._collected_on = collected_on
        self.reports = {}

    def pytest_runtestloop(self, session):
        self._collected_on.unregister()
        for function, op, case in PLANTED:
            self.reports[function.__name__] = self._run(_item(session, op, case), planted(op, function))
        for op, case in {(op, case) for _, op, case in PLANTED}:
            self.reports[op, case] = self._run(_item(session, op, case), planted(op, REFERENCE[op]))
        return True

    def _run(self, item, backend):
        item.user_properties.clear()
        with gla.register(backend):
            setup, call, teardown = runtestprotocol(item, log=False)
        assert (setup.outcome, teardown.outcome) == ("passed", "passed")
        return call


def _item(session, op, case):
    items = [item for item in session.items if item.name.startswith(case) and item.callspec.params["case"].op == op]
    return items[0]


def over_budget(report):
    errors = [value for name, value in report.user_properties if name == "error"]
    return {error["quantity"] for error in errors if not error["error"] <= error["budget"]}


def test_every_bug_is_named_and_without_it_the_same_cases_pass():
    judge = Judge(gla.register(planted("chunk_gla_fwd", FWD)))
    settings = ("-c", str(Path(conformance.__file__).with_name("pytest.ini")))
    pytest.main(["-q", *settings, "--pyargs", "gla_core.conformance", "--gla-backend", "planted"], [judge])
    messages = {function.__name__: judge.reports[function.__name__].longrepr for function, *_ in PLANTED}
    messages = {name: longrepr and longrepr.reprcrash.message for name, longrepr in messages.items()}
    assert {name: text for name, text in messages.items() if not (text or "").startswith(NAMING)} == {}
    assert {name: over_budget(judge.reports[name]) for name in QUANTITIES} == QUANTITIES
    without = {case: judge.reports[op, case] for _, op, case in PLANTED}
    assert {case: report.longreprtext for case, report in without.items() if not report.passed} == {}


def test_a_backend_that_refuses_all_it_declares_does_not_pass(tmp_path):
    backend = Backend("planted", "0", REFERENCE, Capabilities(), supports=lambda call: "not today")
    with gla.register(backend):
        code = run("planted", report=str(tmp_path / "cases.jsonl"), module="test_refusals")
    assert code == 1
    rows = map(json.loads, (tmp_path / "cases.jsonl").read_text().splitlines())
    failed = {row["op"] for row in rows if row["outcome"] == "failed"}
    assert failed == set(REFERENCE)
