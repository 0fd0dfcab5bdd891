"""Bugs in `chunk_gla`, its gradients and its summaries."""

import itertools
from types import SimpleNamespace

import torch

from gla_core.dispatch.tensors import log_gates
from tests.conformance.bugs.plant import LATE, REFERENCE, Op, as_if_dense

forward = Op("chunk_gla_fwd", "o", "state", "checkpoints")
backward = Op("chunk_gla_bwd", "dq", "dk", "dv", "dg", "dinitial_state")
summary = Op("chunk_gla_summary", "decay", "state")


forward.bugs(
    "test_values[short-float32]",
    wrong_scale=lambda x: forward(x, scale=1.01 * x.scale),
    no_state_returned=lambda x: (forward(x).o, None, None),
)
forward.bugs("test_scale[short-float32-1.0]", default_scale_always=lambda x: forward(x, scale=x.q.shape[-1] ** -0.5))
forward.bugs(
    "test_state_hand_off[last_chunk_partial-float32-64]", initial_state_ignored=lambda x: forward(x, initial_state=None)
)
forward.bugs("test_strided_views[short-float32]", strides_ignored=lambda x: forward(x, q=as_if_dense(x.q)))


def pair(q, k, v, scale):
    """Returns the contribution of key and value at a token to the query at the same token, [B, T, Hq, V]."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    return scale * (q * k).sum(-1, keepdim=True) * v


@forward.bug("test_values[short-float32]")
def current_token_excluded(x, y):
    y.o = y.o - pair(x.q, x.k, x.v, x.scale)


@forward.bug("test_values[short-float32]")
def next_token_included(x, y):
    y.o[:, :-1] += pair(x.q[:, :-1], x.k[:, 1:], x.v[:, 1:], x.scale)


@forward.bug("test_values[short-float32]")
def gate_one_step_late(x):
    late = None if x.g is None else torch.cat([torch.zeros_like(x.g[:, :1]), x.g[:, :-1]], 1)[:, : x.g.shape[1]]
    return forward(x, g=late)


@forward.bug("test_gates_from_logits[short-float32]")
def logits_not_divided_by_the_normalizer(x):
    return forward(x, gate_normalizer=None if x.gate_normalizer is None else 1)


@forward.bug("test_gates_from_logits[last_chunk_partial-", over={"state"})
def logits_of_0_past_the_end_decay_the_state(x, y):
    if x.gate_normalizer is not None and y.state is not None:
        y.state *= 0.5 ** (-x.q.shape[1] % 64 / x.gate_normalizer)


@forward.bug("test_every_logit[last_chunk_partial-float32-200]")
def log_of_sigmoid(x):
    """The log gates of logits below -104 are -inf, because their sigmoid in float32 is 0."""
    if x.g is None or x.gate_normalizer is None:
        return forward(x)
    return forward(x, g=(x.g.float().sigmoid().log() / x.gate_normalizer).to(x.g.dtype), gate_normalizer=None)


@forward.bug("test_values[one_more_than_a_chunk-float32]")
def last_partial_chunk_dropped(x):
    T = x.q.shape[1] // 64 * 64
    if x.cu_seqlens is not None or not T:
        return forward(x)
    kept = {name: y[:, :T] for name in ("q", "k", "v", "g") if (y := getattr(x, name)) is not None}
    y = forward(x, **kept, checkpoint_every=None)
    y.o = torch.cat([y.o, y.o.new_zeros(y.o.shape[0], x.q.shape[1] - T, *y.o.shape[2:])], 1)
    return y


@forward.bug("test_packed_equals_separate[packed-float32]")
def state_not_reset(x):
    if x.cu_seqlens is None:
        return forward(x, checkpoint_every=None)
    first = None if x.initial_state is None else x.initial_state[:1]
    y = forward(x, initial_state=first, cu_seqlens=None, checkpoint_every=None)
    y.state = None if y.state is None else y.state.repeat(len(x.cu_seqlens) - 1, 1, 1, 1)
    return y


@forward.bug("test_values[packed-float32]", over={"state"})
def state_of_the_sequence_before(x, y):
    if x.cu_seqlens is not None and y.state is not None and x.initial_state is not None:
        last = x.cu_seqlens[:-1] == x.q.shape[1]  # sequences that begin where all tokens end
        y.state = torch.where(last[:, None, None, None], x.initial_state.roll(1, 0), y.state)


@forward.bug("test_no_uninitialised_output[short-float32]")
def row_not_written(x, y):
    out = torch.empty(y.o.shape, dtype=y.o.dtype)
    out[:, :-1] = y.o[:, :-1]
    y.o = out


runs = itertools.count()


@forward.bug("test_same_bits[short-float32]")
def last_bit_changes(x, y):
    y.o *= 1 + (next(runs) % 2) * 2**-22


def scale_in_company(x):
    """Returns the scale, slightly larger if there are several packed sequences."""
    return x.scale * (1 + 1e-6 * (x.cu_seqlens is not None and len(x.cu_seqlens) > 2))


@forward.bug("test_batch_invariance[packed-float32]", batch_invariant=frozenset({"cpu"}))
def other_bits_in_company(x):
    return forward(x, scale=scale_in_company(x))


@forward.bug("test_values[grouped-float32]")
def wrong_head_grouping(x):
    H, Hq = x.k.shape[2], x.q.shape[2]
    order = torch.arange(Hq).view(Hq // H, H).T.flatten()  # query head h reads key head h % H
    y = forward(x, q=x.q[:, :, order])
    out = torch.empty_like(y.o)
    out[:, :, order] = y.o
    y.o = out
    return y


def gate_form(x):
    """Returns the form of the gates of a call of chunk_gla or of its backward."""
    return None if x.g is None else {1: "constant", 3: "head", 4: "key"}[x.g.ndim]


@forward.bug("test_values[per_head-float32]")
def gate_of_the_head_before(x):
    return forward(x, g=x.g.roll(1, -1) if gate_form(x) == "head" else x.g)


@forward.bug("test_values[constant-float32]")
def constant_gate_once_a_chunk(x):
    """The gate of a chunk's first token counts; the gates of its other tokens count as 0."""
    if gate_form(x) != "constant":
        return forward(x)
    first = torch.arange(x.q.shape[1], device=x.g.device) % 64 == 0
    return forward(x, g=torch.where(first[:, None], x.g, 0).expand(*x.v.shape[:3]))


def key_heads(x, head_of):
    """Returns q and k with the heads that the value heads read: `head_of` maps value heads, H and R to heads of k."""
    H, Hv = x.k.shape[2], x.v.shape[2]
    heads = head_of(torch.arange(Hv), H, Hv // H)
    return {"q": x.q[:, :, heads], "k": x.k[:, :, heads]}


@forward.bug("test_values[grouped_values-float32]")
def value_heads_read_key_heads_in_turn(x):
    if x.v.shape[2] == x.k.shape[2]:
        return forward(x)
    return forward(x, **key_heads(x, lambda i, H, R: i % H))


@forward.bug("test_values[short-float32]", over={"state"})
def state_in_bfloat16(x, y):
    y.state = None if y.state is None else y.state.bfloat16().float()


@forward.bug("test_values[short-float32]")
def computed_in_half(x):
    g = None if x.g is None else x.g.half()
    y = forward(x, q=x.q.half(), k=x.k.half(), v=x.v.half(), g=g)
    y.o = y.o.float()
    return y


@forward.bug("test_nothing_crosses_a_gate_of_minus_infinity[one_chunk-float32-41]")
def gate_clamped(x):
    return forward(x, g=None if x.g is None else x.g.clamp(min=-16))


@forward.bug("test_inputs_unchanged[short-float32]")
def input_scaled_in_place(x, y):
    x.q.mul_(x.scale)


@forward.bug("test_initial_states_with_values_first[short-float32]", swapped_states=True)
def swapped_state_read_as_any(x):
    return forward(x, initial_state=as_if_dense(x.initial_state))


@forward.bug("test_values[short-float32]")
def output_not_contiguous(x, y):
    y.o = y.o.transpose(1, 2).contiguous().transpose(1, 2)


@forward.bug("test_long_sequences[narrow_mild-")
def output_wrong_from_late(x, y):
    y.o[:, LATE:] *= 1.1


@forward.bug("test_long_sequences[narrow_strong-")
def state_not_decayed_from_late(x):
    g = None if x.g is None else x.g.clone()
    if g is not None:
        g[:, LATE:] = 0
    return forward(x, g=g)


@forward.bug("test_values[short-float32]")
def output_is_a_view(x, y):
    y.o = torch.cat([y.o, y.o])[: len(y.o)]


@forward.bug("test_values[short-float32]")
def results_share_memory(x, y):
    memory = torch.cat([y.o.flatten(), y.state.flatten()]).untyped_storage()
    o, state = y.o, y.state
    y.o, y.state = o.new_empty(0).set_(memory, 0, o.shape), o.new_empty(0).set_(memory, o.numel(), state.shape)


@forward.bug("test_values[no_token-float32]")
def initial_state_returned_without_tokens(x, y):
    if x.q.shape[1] == 0 and x.output_final_state:
        y.state = x.initial_state


@forward.bug("test_values[short-float32]")
def output_in_another_dtype(x, y):
    y.o = y.o.double()


@forward.bug("test_values_under_autocast[ungated-bfloat16]")
def products_in_half_precision(x):
    with torch.autocast("cpu", torch.bfloat16, enabled=x.q.dtype == torch.bfloat16):
        return forward(x)


@forward.bug("test_padding[padded-float32]", over={"o of the padding"})
def padding_not_written(x, y):
    if x.cu_seqlens is not None:
        y.o[:, x.cu_seqlens[-1] :] = x.v[:, x.cu_seqlens[-1] :]


@forward.bug("test_padding[padded-float32]", over={"o of the padding"})
def rows_before_the_first_sequence_not_written(x, y):
    if x.cu_seqlens is not None:
        y.o[:, : x.cu_seqlens[0]] = x.v[:, : x.cu_seqlens[0]]


@forward.bug("test_values[many_sequences-float32]")
def sequences_after_the_16th_left_out(x, y):
    if x.cu_seqlens is not None and len(x.cu_seqlens) > 17:
        y.o[:, x.cu_seqlens[16] :] = 0


@forward.bug("test_checkpoints[last_chunk_partial-bfloat16-192]", over={"checkpoints"})
def checkpoints_of_an_interval_above_128_one_late(x, y):
    if y.checkpoints is not None and x.checkpoint_every > 128:
        y.checkpoints = y.checkpoints.roll(1, 1)


@forward.bug("test_checkpoints[last_chunk_partial-")
def checkpoints_of_the_next_interval(x, y):
    y.checkpoints = None if y.checkpoints is None else y.checkpoints.roll(-1, 1)


@forward.bug("test_checkpoints[packed-")
def checkpoints_of_packed_sequences_in_a_row(x, y):
    if y.checkpoints is not None and x.cu_seqlens is not None:  # no unused rows between two sequences
        used = [
            i + int(a) // x.checkpoint_every + j
            for i, (a, b) in enumerate(itertools.pairwise(x.cu_seqlens))
            for j in range(-(-int(b - a) // x.checkpoint_every))
        ]
        rows = torch.cat([y.checkpoints[:, used], torch.zeros_like(y.checkpoints)], 1)
        y.checkpoints = rows[:, : y.checkpoints.shape[1]].contiguous()


@backward.bug("test_long_sequences[narrow_mild-")
def gradients_wrong_from_late(x, d):
    d.dk[:, LATE:] *= 1.1


@backward.bug("test_padding[padded-float32]")
def gradient_of_padding_not_written(x, d):
    if x.cu_seqlens is not None:
        d.dq[:, x.cu_seqlens[-1] :] = 1


@backward.bug("test_gradient_layout[no_token-")
def gradient_is_the_gradient_of_the_state(x, d):
    if x.q.shape[1] == 0:
        d.dinitial_state = x.dstate


@backward.bug("test_gradients_from_checkpoints[last_chunk_partial-")
def checkpoints_taken_for_twice_as_many_tokens(x):
    if x.checkpoints is None or x.cu_seqlens is not None:
        return backward(x)
    return backward(x, checkpoints=x.checkpoints.repeat_interleave(2, 1)[:, : x.checkpoints.shape[1]])


backward.bugs("test_gradients[short-float32]", gradient_of_state_ignored=lambda x: backward(x, dstate=None))


@backward.bug("test_gradient_hand_off[last_chunk_partial-float32-64]")
def gradient_of_state_left_out_of_the_initial_state(x, d):
    d.dinitial_state = backward(x, dstate=None).dinitial_state


@backward.bug("test_gradients[one_more_than_a_chunk-float32]")
def rows_of_a_partial_chunk_dropped(x):
    T = x.q.shape[1] // 64 * 64
    if x.cu_seqlens is not None or not T:
        return backward(x)
    kept = {name: y[:, :T] for name in ("q", "k", "v", "g", "do") if (y := getattr(x, name)) is not None}
    gradients = vars(backward(x, **kept))
    zeros = {f"d{name}": torch.zeros_like(getattr(x, name)[:, T:]) for name in kept if name != "do"}
    return SimpleNamespace(**gradients | {name: torch.cat([gradients[name], rest], 1) for name, rest in zeros.items()})


@backward.bug("test_gradients[grouped-float32]", over={"dk"})
def dk_of_a_head_by_one_of_its_query_heads(x):
    d, groups = backward(x), x.q.shape[2] // x.k.shape[2]
    d.dk[:, :, 0] = backward(x, q=x.q[:, :, ::groups], do=x.do[:, :, ::groups]).dk[:, :, 0]
    return d


@backward.bug("test_gradients[grouped_values-float32]", over={"dk"})
def dk_of_a_head_by_one_of_its_value_heads(x):
    d, R = backward(x), x.v.shape[2] // x.k.shape[2]
    if R > 1:
        separate = backward(x, **key_heads(x, lambda i, H, R: i // R)).dk
        d.dk.copy_(separate[:, :, ::R])
    return d


@backward.bug("test_gradients[per_head-float32]", over={"dg"})
def gradient_of_a_gate_per_head_by_one_key(x, d):
    if gate_form(x) == "head":
        per_key = x.g[..., None].expand(*x.g.shape, x.k.shape[3])
        d.dg.copy_(backward(x, g=per_key).dg[..., 0])


@backward.bug("test_gradients[constant-float32]", over={"dg"})
def gradient_of_a_constant_gate_by_the_last_row_of_the_batch(x, d):
    if gate_form(x) == "constant":
        d.dg = backward(x, g=x.g.expand(*x.v.shape[:3])).dg[-1].sum(0)


@backward.bug("test_padding[constant_packed-float32]", over={"dg"})
def gradient_of_a_constant_gate_with_the_padding(x, d):
    if gate_form(x) == "constant" and x.cu_seqlens is not None:
        end = x.cu_seqlens.new_full((1,), x.q.shape[1])
        d.dg = backward(x, cu_seqlens=torch.cat([x.cu_seqlens[:-1], end])).dg


@backward.bug("test_gradients_of_logits[short-float32]", over={"dg"})
def gradient_of_log_gates_for_logits(x):
    g = None if x.g is None else log_gates(x.g, x.gate_normalizer, torch.float64).to(x.g.dtype)
    return backward(x, g=g, gate_normalizer=None)


@backward.bug("test_gradients_of_every_logit[last_chunk_partial-float32-200]", over={"dg"})
def gradient_of_logits_divided_by_16_at_most(x, d):
    if x.g is not None and (x.gate_normalizer or 0) > 16:
        d.dg = d.dg * (x.gate_normalizer / 16)


@backward.bug("test_gradients[many_sequences-float32]", over={"dinitial_state"})
def gradient_of_ungated_states_by_the_first_value_head_of_a_group(x):
    d, R = backward(x), x.v.shape[2] // x.k.shape[2]
    if x.g is None and x.initial_state is not None:
        d.dinitial_state.copy_(d.dinitial_state[:, ::R].repeat_interleave(R, 1))
    return d


@backward.bug("test_gradients[short-float32]", over={"dg"})
def gradient_of_g_missing(x, d):
    d.dg = None if x.g is None else torch.zeros_like(d.dg)


@backward.bug("test_gradients[short-float32]", over={"dg"})
def gradient_of_g_without_the_state(x, d):
    if x.g is not None and x.cu_seqlens is None:
        d.dg -= through_the_end(x)


@backward.bug("test_gradient_of_strong_gates_before_open_ones[last_chunk_partial-")
def gradient_of_g_from_the_end(x, d):
    """Computes dg by one suffix sum over all tokens. It sums gradients that were rounded before."""
    if x.g is not None and x.cu_seqlens is None:
        d.dg = (suffix_sums(given_and_taken(x, d)) + through_the_end(x)).to(x.g.dtype)


@backward.bug("test_gradients_of_every_gate[short-float32-strong]", over={"dg"})
def gradient_of_g_with_the_diagonal(x, d):
    """Computes dg by suffix sums per chunk of float32 gradients that include pairs s = t. Chunk ends are exact."""
    if x.g is not None and x.cu_seqlens is None:
        wide = in_float32(x)
        exact = backward(wide)
        after = [*(dg[:, None] for dg in exact.dg[:, 64::64].unbind(1)), through_the_end(x)]
        chunks = given_and_taken(wide, exact).split(64, 1)
        sums = [suffix_sums(chunk) + rest for chunk, rest in zip(chunks, after, strict=True)]
        d.dg = torch.cat(sums, 1).to(x.g.dtype).contiguous()


def given_and_taken(x, d):
    """Returns dg_t - dg_{t+1}: q * dq, summed over the query heads of a key, minus k * dk."""
    return (x.q.float() * d.dq).unflatten(2, (x.k.shape[2], -1)).sum(3) - x.k.float() * d.dk


def suffix_sums(x):
    return x.flip(1).cumsum(1).flip(1)


def through_the_end(x):
    """Returns the contribution of the final state's gradient to each gate [B, 1, H, K]."""
    state = REFERENCE["chunk_gla_fwd"](x.q, x.k, x.v, x.g, x.scale, x.initial_state, True, None, None)[1]
    return (state * (torch.zeros_like(state) if x.dstate is None else x.dstate)).sum(-1)[:, None]


def in_float32(x):
    return SimpleNamespace(**{name: y.float() if torch.is_tensor(y) else y for name, y in vars(x).items()})


@backward.bug("test_gradient_of_g_is_zero_where_nothing_passes[short-float32]")
def gate_clamped_backwards(x):
    return backward(x, g=None if x.g is None else x.g.clamp(min=-16))


@backward.bug("test_gradients_of_strided_views[short-float32-with_room]")
def strides_of_do_ignored(x):
    return backward(x, do=as_if_dense(x.do))


@backward.bug("test_no_uninitialised_output[short-float32]")
def gradient_row_not_written(x, d):
    out = torch.empty(d.dv.shape, dtype=d.dv.dtype)
    out[:, 1:] = d.dv[:, 1:]
    d.dv = out


@backward.bug("test_same_bits[short-float32]")
def gradient_last_bit_changes(x, d):
    d.dq *= 1 + (next(runs) % 2) * 2**-22


@backward.bug("test_batch_invariance[packed-float32]", batch_invariant=frozenset({"cpu"}))
def other_gradient_bits_in_company(x):
    return backward(x, scale=scale_in_company(x))


@summary.bug("test_values[short-float32]")
def decay_without_the_last_gate(x, y):
    y.decay = summary(x, left=x.left[:, :-1], right=x.right[:, :-1], g=None if x.g is None else x.g[:, :-1]).decay


@summary.bug("test_values[short-float32]", call="chunk_gla_gradient_summary")
def own_gate_left_out_backwards(x, y):
    if x.backwards and x.g is not None and x.g.shape[1]:
        late = torch.cat([torch.zeros_like(x.g[:, :1]), x.g[:, :-1]], 1)
        y.state = summary(x, g=late).state


@summary.bug("test_grouped_queries_backwards[short-float32]")
def one_query_head_of_a_group(x):
    groups = 1 if x.g is None else x.left.shape[2] // x.g.shape[2]
    return summary(x, left=x.left[:, :, ::groups], right=x.right[:, :, ::groups])


@summary.bug("test_values[per_head-float32]")
def gate_of_the_head_before_in_a_summary(x):
    return summary(x, g=x.g.roll(1, -1) if x.g is not None and x.g.ndim == 3 else x.g)


@summary.bug("test_values[grouped_values-float32]")
def summary_of_key_heads_in_turn(x):
    H, Hv = x.left.shape[2], x.right.shape[2]
    return summary(x, left=x.left[:, :, torch.arange(Hv) % H]) if Hv > H else summary(x)


@summary.bug("test_padding[padded-float32]")
def summary_of_padding(x):
    if x.cu_seqlens is None:
        return summary(x)
    end = x.cu_seqlens.new_full((1,), x.left.shape[1])
    return summary(x, cu_seqlens=torch.cat([x.cu_seqlens[:-1], end]))
