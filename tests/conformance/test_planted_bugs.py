"""Deliberately wrong backends: each is the reference with one bug, which the kit must name."""

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from _pytest.runner import runtestprotocol

import gla_core as gla
from gla_core import conformance
from gla_core.conformance.diagnosis import diagnosis
from gla_core.conformance.run import run
from gla_core.dispatch.backend import GATES, Backend, Capabilities, arguments_of
from gla_core.dispatch.registry import get
from gla_core.dispatch.tensors import log_gates
from gla_core.ops.gla.chunk_ssd import values_and_gates
from tests.reference import function

REFERENCE = {op: function(op) for op in get("reference").ops}
LATE = 1000
"""Number of tokens, columns or keys before some bugs show."""


class Bug(NamedTuple):
    """A bug in an op of the reference.

    Attributes:
        function: the op with the bug.
        case: the beginning of the name of the case that must name the bug.
        over: the quantities that this case reports over its budget. None means that the test does not check them.
        claims: further capabilities of the backend.
    """

    name: str
    op: str
    function: Callable[..., Any]
    case: str
    over: set[str] | None
    claims: Mapping[str, Any]


BUGS: list[Bug] = []


class Op:
    """An op of the reference: it returns the right results for arguments x with changes, and bugs are planted in it.

    Several results are a namespace. Pools and rings are written.
    """

    def __init__(self, name, *results):
        self.name, self.results = name, results

    def __call__(self, x, **changes):
        computed = REFERENCE[self.name](**{**vars(x), **changes})
        return SimpleNamespace(**dict(zip(self.results, computed, strict=True))) if self.results else computed

    def bug(self, case, over=None, call=None, **claims):
        """Returns a decorator that plants a bug: a function that maps a namespace of the op's arguments to its results.

        A function with a second argument receives the right results there, and changes them in place.

        Args:
            case: the beginning of the name of the case that must name the bug, without the name of the call.
            call: the name of the call, by default that of the op.
        """
        case = case.replace("[", f"[{call or self.name}-", 1)

        def plant(wrong):
            changes_results = wrong.__code__.co_argcount == 2

            @functools.wraps(REFERENCE[self.name])
            def function(*args):
                x = SimpleNamespace(**dict(zip(arguments_of(REFERENCE[self.name]), args, strict=True)))
                if changes_results:
                    wrong(x, results := self(x))
                else:
                    results = wrong(x)
                return tuple(vars(results).values()) if isinstance(results, SimpleNamespace) else results

            BUGS.append(Bug(wrong.__name__, self.name, function, case, over, claims))
            return wrong

        return plant

    def bugs(self, case, over=None, **bugs):
        """Plants bugs that one case must name, each of one expression, by their names."""
        for name, wrong in bugs.items():
            wrong.__name__ = name
            self.bug(case, over)(wrong)


forward = Op("chunk_gla_fwd", "o", "state", "checkpoints")
backward = Op("chunk_gla_bwd", "dq", "dk", "dv", "dg", "dinitial_state")
summary = Op("chunk_gla_summary", "decay", "state")
pooled = Op("chunk_gla_pool")
step = Op("recurrent_gla_step", "o", "state")
stepped = Op("recurrent_gla_steps")
replayed = Op("recurrent_gla_replay")
layer_stepped = Op("recurrent_gla_layer_step")
ssd = Op("chunk_ssd_fwd", "o", "state", "checkpoints")
ssd_backward = Op("chunk_ssd_bwd", "dq", "dk", "dx", "ddt", "dA", "dD", "ddt_bias", "dinitial_state")
ssd_stepped = Op("recurrent_ssd_step")
delta = Op("chunk_delta_fwd", "o", "state", "checkpoints")
delta_backward = Op("chunk_delta_bwd", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
delta_summary = Op("chunk_delta_summary", "transition", "state")
delta_step = Op("recurrent_delta_step", "o", "state")
delta_replayed = Op("recurrent_delta_replay")
softmax = Op("online_softmax")
softmax_gradient = Op("online_softmax_bwd")
attention = Op("softmax_attention", "o", "lse")
attention_gradients = Op("softmax_attention_bwd", "dq", "dk", "dv")


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


def as_if_dense(x):
    """Returns the elements at the addresses that a contiguous tensor of x's shape would have."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


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


pooled.bugs(
    "test_values[scattered_slots-float32]",
    flags_of_new_sequences_ignored=lambda x: pooled(x, has_state=None),
    state_written_to_the_slot_that_was_read=lambda x: pooled(x, write_slots=None),
)
pooled.bugs("test_the_pad_slot[small-float32]", pad_slot_written=lambda x: pooled(x, pad_slot=-1))
pooled.bugs("test_pages[small-float32-3]", pages_taken_for_dense=lambda x: pooled(x, pool=as_if_dense(x.pool)))
pooled.bugs("test_out[small-float32]", out_ignored=lambda x: pooled(x, out=None))


@pooled.bug("test_new_sequences_in_slots_of_nan[small-float32]")
def new_sequences_multiply_their_slot_by_0(x):
    if x.has_state is not None:
        x.pool[x.read_slots[~x.has_state & (x.read_slots >= 0)]] *= 0
    return pooled(x, has_state=None)


@pooled.bug("test_slots_outside_the_pool[small-float32--1-")
def slot_counts_from_the_end(x):
    slots = x.read_slots
    return pooled(x, read_slots=torch.where(slots < 0, slots + len(x.pool), slots))


@pooled.bug("test_slots_outside_the_pool[small-float32-P-")
def slot_clamped_into_the_pool(x):
    return pooled(x, read_slots=x.read_slots.clamp(max=len(x.pool) - 1))


@pooled.bug("test_values[small-float32]")
def slot_of_the_sequence_before(x):
    to = x.read_slots if x.write_slots is None else x.write_slots
    return pooled(x, read_slots=x.read_slots.roll(1), write_slots=to)


@pooled.bug("test_values[no_token-float32]", over={"states"})
def state_of_an_empty_sequence_not_copied(x):
    to = x.read_slots if x.write_slots is None else x.write_slots
    return pooled(x, write_slots=torch.where(x.cu_seqlens.diff() > 0, to, -1))


@pooled.bug("test_values[small-float32]")
def state_written_before_it_is_read(x):
    """The outputs of a second pass start from the states that the first pass has written."""
    pooled(x)
    return pooled(x, pool=x.pool.clone())


@pooled.bug("test_pool_dtypes[checkpoints-float32-torch.bfloat16]", over={"o"})
def state_rounded_after_64_tokens(x):
    """Each sequence continues from its state after 64 tokens, in the dtype of the pool."""
    cuts = torch.minimum(x.cu_seqlens[:-1] + 64, x.cu_seqlens[1:])
    o, to = [], x.read_slots if x.write_slots is None else x.write_slots
    for n, (a, b, c) in enumerate(zip(x.cu_seqlens.tolist(), cuts.tolist(), x.cu_seqlens[1:].tolist(), strict=False)):
        row = slice(n, n + 1)
        for start, end, read, has in ((a, b, x.read_slots, x.has_state), (b, c, to, None)):
            parts = {name: y if (y := getattr(x, name)) is None or y.ndim == 1 else y[:, start:end] for name in "qkvg"}
            others = {"cu_seqlens": torch.tensor([0, end - start]), "checkpoint_offsets": None, "out": None}
            others |= {"read_slots": read[row], "write_slots": to[row], "has_state": None if has is None else has[row]}
            o.append(pooled(x, **parts, **others))
    o.append(torch.zeros_like(o[0][:, :1]).expand(-1, x.q.shape[1] - int(x.cu_seqlens[-1]), -1, -1))
    return torch.cat(o, 1)


@pooled.bug("test_pages[small-float32-1]", over=set())
def memory_after_a_slot_written(x, o):
    size = x.pool[0].numel()
    if x.pool.stride(0) > size:
        x.pool.as_strided((len(x.pool), 1), (x.pool.stride(0), 1), size).zero_()


@pooled.bug("test_written_states_with_values_first[scattered_slots-float32]", swapped_states=True)
def swapped_pool_taken_for_any(x):
    return pooled(x, pool=as_if_dense(x.pool))


@pooled.bug("test_values[checkpoints-float32]", over={"states"})
def checkpoint_of_the_next_token(x):
    return pooled(x, checkpoint_offsets=None if x.checkpoint_offsets is None else x.checkpoint_offsets + 1)


@pooled.bug("test_values[checkpoints-float32]", over={"states"})
def checkpoint_in_bfloat16(x, o):
    if x.checkpoint_slots is not None:
        x.pool[x.checkpoint_slots] = x.pool[x.checkpoint_slots].bfloat16().to(x.pool.dtype)


@pooled.bug("test_snapshot_offsets[checkpoints-float32-0]", over=set())
def checkpoint_before_the_first_token(x):
    if x.checkpoint_offsets is not None:
        first = (x.checkpoint_offsets == 0) & (x.checkpoint_slots >= 0)
        x.pool[x.checkpoint_slots[first]] = x.pool[x.read_slots[first]]
    return pooled(x)


@pooled.bug("test_same_bits_in_calls_in_a_row[checkpoints-float32]", batch_invariant=frozenset({"cpu"}))
def other_bits_of_a_part(x):
    return pooled(x, scale=x.scale * (1 + 1e-6 * (x.q.shape[1] == 64)))


@pooled.bug("test_rows_of_no_sequence[padded-float32]", over={"o"})
def padding_pool_results_call_not_cleared(x, o):
    o[:, x.cu_seqlens[-1] :] = 1


@pooled.bug("test_gates_from_logits[small-float32]")
def logits_taken_for_log_gates_in_a_pool(x):
    return pooled(x, gate_normalizer=None)


@pooled.bug("test_numbers_beyond_float16[checkpoints-float32]", over={"states"})
def states_clamped_to_float16(x):
    return clamped(x, pooled(x))


def clamped(x, o):
    """Returns o; states of the pool above the range of float16 become its largest number."""
    if x.pool.dtype == torch.float16:
        x.pool.clamp_(-65504, 65504)
    return o


@stepped.bug("test_values[accepted-float32]")
def accepted_drafts_counted_from_0(x):
    return stepped(x, num_accepted=None if x.num_accepted is None else x.num_accepted + 1)


stepped.bugs("test_values[accepted-float32]", accepted_drafts_ignored=lambda x: stepped(x, num_accepted=None))
stepped.bugs(
    "test_pages[small-float32-3]", pages_of_steps_taken_for_dense=lambda x: stepped(x, pool=as_if_dense(x.pool))
)
stepped.bugs("test_out[small-float32]", out_of_steps_ignored=lambda x: stepped(x, out=None))


@stepped.bug("test_values[many_sequences-float32]")
def accepted_drafts_before_slots_to_read(x):
    return stepped(x, read_slots=x.read_slots if x.num_accepted is None else None)


@stepped.bug("test_numbers_beyond_float16[small-float32]", over={"states"})
def states_of_steps_clamped_to_float16(x):
    return clamped(x, stepped(x))


@stepped.bug("test_accepted_drafts[accepted-float32-0]")
def no_accepted_draft_read_from_the_end(x):
    S = x.slots.shape[1]
    return stepped(x, num_accepted=torch.where(x.num_accepted == 0, S, x.num_accepted))


@stepped.bug("test_values[packed-float32]")
def states_after_the_last_token_written(x, o):
    """The columns of slots beyond the tokens of a sequence receive its last state."""
    for n, (a, b) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
        for j in range(b - a, x.slots.shape[1]):
            x.pool[x.slots[n, j]] = x.pool[x.slots[n, max(b - a - 1, 0)]]


@stepped.bug("test_pool_dtypes[small-float32-torch.bfloat16]", over={"o"})
def state_rounded_between_tokens(x):
    """Each token continues from the state that was written."""
    o = []
    for j in range(x.q.shape[1]):
        token = {name: y if (y := getattr(x, name)) is None or y.ndim == 1 else y[:, j : j + 1] for name in "qkvg"}
        read = x.slots[:, j - 1] if j else x.slots[:, 0] if x.read_slots is None else x.read_slots
        others = {"slots": x.slots[:, j : j + 1], "num_accepted": None, "read_slots": read, "out": None}
        o.append(stepped(x, **token, **others, has_state=None if j else x.has_state))
    return torch.cat(o, 1)


@stepped.bug("test_values[small-float32]", over={"states"})
def every_state_written_to_the_first_slot(x):
    return stepped(x, slots=x.slots[:, :1].expand_as(x.slots))


@stepped.bug("test_new_sequences_in_slots_of_nan[small-float32]")
def new_sequences_of_steps_read_their_slot(x):
    return stepped(x, has_state=None)


@stepped.bug("test_new_sequences_in_pad_slots[small-float32]")
def new_sequence_in_a_pad_slot_computed(x):
    slots = x.slots.clone()
    slots[:, 0] = torch.where(slots[:, 0] < 0, x.slots[:, 1], slots[:, 0])
    return stepped(x, slots=slots)


@stepped.bug("test_slots_outside_the_pool[small-float32-first--1]")
def slots_of_steps_count_from_the_end(x):
    return stepped(x, slots=torch.where(x.slots < 0, x.slots + len(x.pool), x.slots))


@stepped.bug("test_rows_of_no_sequence[packed-float32]", over={"o"})
def padding_of_steps_not_cleared(x, o):
    o[:, x.cu_seqlens[-1] :] = 1


def without_tokens(x):
    """Returns arguments x without new tokens."""
    none = {name: y if (y := getattr(x, name)) is None or y.ndim == 1 else y[:, :0] for name in "qkvg"}
    return {**none, "cu_seqlens": None if x.cu_seqlens is None else torch.zeros_like(x.cu_seqlens), "out": None}


replayed.bugs(
    "test_values[small-float32]", accepted_tokens_counted_from_0=lambda x: replayed(x, num_accepted=x.num_accepted + 1)
)
replayed.bugs(
    "test_pages[small-float32-3]", rings_in_pages_taken_for_dense=lambda x: replayed(x, ring_v=as_if_dense(x.ring_v))
)
replayed.bugs("test_out[small-float32]", out_of_replay_ignored=lambda x: replayed(x, out=None))


@replayed.bug("test_numbers_beyond_float16[small-float32]", over={"states"})
def states_of_replay_clamped_to_float16(x):
    return clamped(x, replayed(x))


@replayed.bug("test_ring_start[small-float32-5]")
def ring_not_wrapped(x):
    """No call reads or writes past the end of a ring."""
    L = x.ring_k.shape[1]
    return replayed(x, ring_start=torch.minimum(x.ring_start % L, L - x.num_accepted - x.q.shape[1]))


@replayed.bug("test_values[small-float32]", over={"states"})
def state_written_with_drafts_included(x, o):
    drafts = torch.full_like(x.num_accepted, x.q.shape[1])
    replayed(x, **without_tokens(x), ring_start=x.ring_start + x.num_accepted, num_accepted=drafts)


@replayed.bug("test_values[small-float32]", over={"ring_k"})
def new_tokens_written_over_accepted_ones(x):
    replayed(x, **without_tokens(x))
    return replayed(x, num_accepted=torch.zeros_like(x.num_accepted))


@replayed.bug("test_pool_dtypes[small-float32-torch.bfloat16]", over={"o"})
def state_rounded_before_the_new_tokens(x):
    replayed(x, **without_tokens(x))
    none = torch.zeros_like(x.num_accepted)
    return replayed(x, ring_start=x.ring_start + x.num_accepted, num_accepted=none, has_state=None)


@replayed.bug("test_values[packed-float32]", over={"states"})
def new_sequence_without_accepted_tokens_not_written(x):
    before = x.pool.clone()
    o = replayed(x)
    for slot, accepted in zip(x.slots.tolist(), x.num_accepted.tolist(), strict=True):
        if accepted <= 0 <= slot < len(before):
            x.pool[slot] = before[slot]
    return o


@replayed.bug("test_only_accepted_tokens_are_read[small-float32]")
def tokens_not_accepted_multiplied_by_0(x):
    return replayed(x) + 0 * x.ring_v.sum()


@replayed.bug("test_new_sequences_in_slots_of_nan[small-float32]")
def new_sequences_of_replay_read_their_slot(x):
    return replayed(x, has_state=None)


@replayed.bug("test_slots_outside_the_pool[small-float32--1]")
def slots_of_replay_count_from_the_end(x):
    return replayed(x, slots=torch.where(x.slots < 0, x.slots + len(x.pool), x.slots))


@replayed.bug("test_gates_from_logits[small-float32]", over={"ring_g"})
def log_sigma_kept_without_its_normalizer(x):
    before = x.ring_g.clone()
    o = replayed(x)
    if x.gate_normalizer is not None:
        x.ring_g.copy_(torch.where(x.ring_g == before, before, x.gate_normalizer * x.ring_g))
    return o


@replayed.bug("test_rows_of_no_sequence[packed-float32]", over={"o"})
def padding_of_replay_not_cleared(x, o):
    o[:, x.cu_seqlens[-1] :] = 1


@ssd.bug("test_values[short-float32]", over={"o"})
def skip_added_twice(x):
    return ssd(x, D=None if x.D is None else 2 * x.D)


def with_o(y, change):
    """Returns the results y with a function of o in place of o."""
    return SimpleNamespace(**{**vars(y), "o": change(y.o)})


def ssd_by_chunk_gla(x, v_of=lambda v: v, bias_of_gates=True):
    """Returns the results of chunk_ssd_fwd by chunk_gla_fwd, with other values or gates."""
    steps = (x.dt_softplus, x.dt_min, x.dt_max)
    v, g = values_and_gates(x.x, x.dt, x.A, x.dt_bias, *steps)
    g = g if bias_of_gates else values_and_gates(x.x, x.dt, x.A, None, *steps)[1]
    sequences = {name: getattr(x, name) for name in ("initial_state", "output_final_state", "cu_seqlens")}
    options = {"scale": 1.0, "checkpoint_every": x.checkpoint_every, "gate_normalizer": None}
    y = forward(SimpleNamespace(q=x.q, k=x.k, v=v_of(v), g=g, **sequences, **options))
    skip = ssd(x).o - ssd(x, D=None).o  # 0 in rows of no sequence
    y.o = y.o + skip.to(y.o.dtype)
    return y


@ssd.bug("test_values[short-float32]", over={"o", "state"})
def time_step_left_out_of_values(x):
    return ssd_by_chunk_gla(x, v_of=lambda v: x.x.contiguous())


@ssd.bug("test_values[short-float32]", over={"o", "state"})
def bias_left_out_of_the_gates(x):
    return ssd_by_chunk_gla(x, bias_of_gates=False)


@ssd.bug("test_padding[padded-float32]")
def skip_of_padding(x):
    y = ssd(x, D=None)
    y.o = y.o if x.D is None else y.o + (x.x * (x.D[:, None] if x.D.ndim == 1 else x.D)).to(y.o.dtype)
    return y


ssd.bugs(
    "test_values[gated-float32]",
    over={"o"},
    output_gate_without_silu=lambda x: with_o(ssd(x, z=None), lambda o: o if x.z is None else o * x.z),
    output_gate_before_the_skip=lambda x: with_o(
        ssd(x, D=None), lambda o: o + ssd(x, z=None).o - ssd(x, D=None, z=None).o
    ),
    output_gate_left_out=lambda x: ssd(x, z=None),
)
ssd.bugs(
    "test_padding[gated_padded-float32]",
    output_gate_of_padding=lambda x: with_o(ssd(x, z=None), lambda o: o if x.z is None else o * F.silu(x.z)),
)


@ssd_backward.bug("test_gradients[odd_widths-float32]", over={"ddt", "ddt_bias"})
def gradient_of_clamped_time_steps(x):
    d, unlimited = ssd_backward(x), ssd_backward(x, dt_min=0.0, dt_max=float("inf"))
    d.ddt, d.ddt_bias = unlimited.ddt, unlimited.ddt_bias
    return d


@ssd_backward.bug("test_gradients[short-float32]", over={"dx"})
def skip_left_out_of_the_gradient(x):
    d = ssd_backward(x)
    d.dx = ssd_backward(x, D=None).dx
    return d


@layer_stepped.bug("test_values[small-float32]", over={"o"})
def mean_over_all_heads(x):
    token = (x.q, x.k, x.v, x.g, x.state.clone(), x.scale, x.state_indices, x.gate_normalizer, True)
    u, _ = REFERENCE["recurrent_gla_step"](*token)
    per_head, over_all = (u.square().mean(dims, keepdim=True) + x.norm_eps for dims in (2, (1, 2)))
    return layer_stepped(x) * (per_head / over_all).sqrt()


layer_stepped.bugs(
    "test_scale_and_eps[small-float32-0.001-1e-05]",
    over={"o"},
    eps_ignored=lambda x: layer_stepped(x, norm_eps=0.0),
    scale_before_the_norm_ignored=lambda x: layer_stepped(x, scale=1.0),
)
layer_stepped.bugs(
    "test_values[small-float32]", over={"o"}, weight_of_the_norm_ignored=lambda x: layer_stepped(x, norm_weight=None)
)


@layer_stepped.bug("test_values[grouped-float32]", over={"o"})
def every_activation_taken_for_silu(x):
    return layer_stepped(x, activation="silu")


@layer_stepped.bug("test_state_dtypes[small-float32-torch.bfloat16]", over={"o"})
def output_of_the_rounded_state(x):
    o, state = layer_stepped(x), x.state.clone()
    none = {"k": torch.zeros_like(x.k), "g": None, "gate_normalizer": None}
    return layer_stepped(x, **none, state=state) if x.state.dtype == torch.bfloat16 else o


@layer_stepped.bug("test_skipped_rows[pool-float32-torch.int32--1]", over={"o"})
def output_gate_of_a_skipped_row_multiplied_by_0(x):
    o = layer_stepped(x)
    return o if x.output_gate is None else o + 0 * x.output_gate


@layer_stepped.bug("test_strided_views[small-float32]", over={"o"})
def rows_of_the_output_gate_taken_for_dense(x):
    return layer_stepped(x, output_gate=None if x.output_gate is None else as_if_dense(x.output_gate))


@ssd_stepped.bug("test_values[small-float32]", over={"o"})
def skip_of_a_step_added_twice(x):
    return ssd_stepped(x, D=None if x.D is None else 2 * x.D)


@ssd_stepped.bug("test_values[small-float32]")
def time_steps_left_out_of_values(x):
    times = x.dt if x.dt_bias is None else x.dt + x.dt_bias
    times = F.softplus(times) if x.dt_softplus else times
    return ssd_stepped(x, v=x.v / times[..., None])


@ssd_stepped.bug("test_values[pool-float32]")
def softplus_not_asked_for(x):
    return ssd_stepped(x, dt_softplus=True)


@ssd_stepped.bug("test_values[plain-float32]")
def logarithms_of_rates_taken_for_rates(x):
    return ssd_stepped(x, A_is_log=False)


@ssd_stepped.bug("test_values[grouped_values-float32]", over={"o"})
def query_head_of_the_value_head(x):
    return ssd_stepped(x, q=x.q.repeat(1, x.v.shape[1] // x.q.shape[1], 1)[:, :: x.v.shape[1] // x.q.shape[1]])


@ssd_stepped.bug("test_skipped_rows[pool-float32-torch.int32--1]", over={"o"})
def output_gate_of_a_skipped_step_multiplied_by_0(x):
    o = ssd_stepped(x)
    return o if x.z is None else o + 0 * x.z


@step.bug("test_inplace_writes_only_addressed_rows[small-float32--1]")
def negative_index_counts_from_the_end(x):
    rows = x.state_indices
    return step(x, state_indices=None if rows is None else torch.where(rows < 0, rows + len(x.state), rows))


@step.bug("test_values[per_head-float32]")
def gate_of_the_row_before(x):
    return step(x, g=x.g.roll(1, 0) if x.g is not None and x.g.ndim == 2 else x.g)


step.bugs("test_gates_from_logits[small-float32]", logits_taken_for_log_gates=lambda x: step(x, gate_normalizer=None))
step.bugs("test_inplace[small-float32]", never_in_place=lambda x: step(x, inplace=False))
step.bugs("test_inputs_unchanged[small-float32]", always_in_place=lambda x: step(x, inplace=True))


@softmax.bug("test_many_columns_keys_or_queries[many_columns-float32]")
def last_columns_left_out(x, y):
    y.narrow(x.dim, min(LATE, y.shape[x.dim]), max(0, y.shape[x.dim] - LATE)).zero_()


@softmax.bug("test_values[minus_infinity-float32]")
def nan_for_a_tile_of_minus_infinity(x):
    rows = x.x.movedim(x.dim, -1)
    m, z = rows.new_full((*rows.shape[:-1], 1), -torch.inf), rows.new_zeros(*rows.shape[:-1], 1)
    for tile in rows.split(256, -1):
        m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
        z = z * torch.exp(m - m_new) + torch.exp(tile - m_new).sum(-1, keepdim=True)
        m = m_new
    return (torch.exp(rows - m) / z).movedim(-1, x.dim).contiguous()


@softmax.bug("test_large_values[small-float32-30000.0]")
def no_maximum_taken_off(x):
    return (x.x.exp() / x.x.exp().sum(x.dim, keepdim=True)).contiguous()


@attention.bug("test_many_columns_keys_or_queries[many_keys-float32]")
def late_keys_left_out(x):
    return attention(x, k=x.k[:, :LATE], v=x.v[:, :LATE], causal=x.causal and x.k.shape[1] <= LATE)


@attention.bug("test_values[small-float32]", over={"lse"})
def logarithm_to_base_two(x, y):
    y.lse = y.lse / torch.log(torch.tensor(2.0))


@attention.bug("test_values[odd-float32]")
def mask_aligned_at_the_first_key(x):
    Tq, Tk = x.q.shape[1], x.k.shape[1]
    return attention(x, k=x.k[:, :Tq], v=x.v[:, :Tq]) if x.causal and Tk > Tq else attention(x)


@softmax_gradient.bug("test_gradients[small-float32]")
def mean_of_dy_not_subtracted(x):
    y = torch.softmax(x.x.float(), x.dim)
    return (y * x.dy).to(x.x.dtype).contiguous()


@softmax_gradient.bug("test_gradients[small-float32]")
def plain_mean_of_dy_subtracted(x):
    y = torch.softmax(x.x.float(), x.dim)
    return (y * (x.dy - x.dy.mean(x.dim, keepdim=True))).to(x.x.dtype).contiguous()


@attention_gradients.bug("test_gradients[small-float32]", over={"dq", "dk"})
def gradient_of_lse_left_out(x):
    return attention_gradients(x, dlse=None)


@attention_gradients.bug("test_gradients[grouped-float32]", over={"dk", "dv"})
def last_head_of_a_group_left_out(x):
    y, groups = attention_gradients(x), x.q.shape[2] // x.k.shape[2]
    if groups > 1:
        last = torch.arange(x.q.shape[2]) % groups < groups - 1
        fewer = attention_gradients(x, do=x.do * last[:, None], dlse=None if x.dlse is None else x.dlse * last)
        y.dk, y.dv = fewer.dk, fewer.dv
    return y


@attention_gradients.bug("test_gradients[small-float32]")
def causal_gradients_one_key_off(x):
    y = attention_gradients(x)
    if x.causal and x.k.shape[1] > 1:
        earlier = attention_gradients(
            x,
            q=x.q[:, 1:],
            o=x.o[:, 1:],
            lse=x.lse[:, 1:],
            do=x.do[:, 1:],
            dlse=None if x.dlse is None else x.dlse[:, 1:],
            k=x.k[:, :-1],
            v=x.v[:, :-1],
        )
        y.dk[:, :-1], y.dv[:, :-1] = earlier.dk, earlier.dv
    return y


# ---- delta rules


def recurrence(x, transition_first=False, all_of_the_error=False, keys=None):
    """Computes a delta rule token by token, without packed sequences, and perhaps wrongly.

    Args:
        transition_first: whether the state forgets a key before it is decayed, and not after.
        all_of_the_error: whether the whole error is written, and not its share beta.
        keys: the keys by which the state is read, by default those by which it is written.
    """
    R, state = x.v.shape[2] // x.k.shape[2], x.initial_state
    q, k, read = (y.repeat_interleave(R, 2) for y in (x.q, x.k, x.k if keys is None else keys))
    state = k.new_zeros(*k.shape[:1], *k.shape[2:], x.v.shape[-1]) if state is None else state
    alpha = torch.ones_like(k) if x.g is None else x.g.exp()
    o = []
    for t in range(k.shape[1]):
        decay, beta = alpha[:, t, :, :, None], 1 if all_of_the_error else x.beta[:, t, :, None]
        state = state if transition_first else decay * state
        forgotten, learnt = beta * torch.einsum("bhk,bhkv->bhv", read[:, t], state), beta * x.v[:, t]
        state = state - torch.einsum("bhk,bhv->bhkv", k[:, t], forgotten)
        state = (decay * state if transition_first else state) + torch.einsum("bhk,bhv->bhkv", k[:, t], learnt)
        o.append(x.scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, 1), state


delta.bugs(
    "test_values[short-float32]",
    beta_of_the_token_before=lambda x: delta(x, beta=x.beta.roll(1, 1)),
    transition_applied_before_the_decay=lambda x: (*recurrence(x, transition_first=True), None),
    u_not_times_beta=lambda x: (*recurrence(x, all_of_the_error=True), None),
    # (I + B M) U = B X with the diagonal of k k^T in M
    block_solved_with_its_diagonal=lambda x: delta(
        x, beta=x.beta / (1 + x.beta * x.k.square().sum(-1).repeat_interleave(x.v.shape[2] // x.k.shape[2], -1))
    ),
    read_left_out=lambda x: REFERENCE["chunk_gla_fwd"](**{n: y for n, y in vars(x).items() if n != "beta"}),
)
delta.bugs(
    "test_keys_of_any_length[last_chunk_partial-float32-4.0",
    keys_normalised_without_being_asked=lambda x: delta(x, k=F.normalize(x.k, dim=-1)),
)
delta.bugs("test_every_beta[short-float32-2.0]", beta_at_most_1=lambda x: delta(x, beta=x.beta.clamp(max=1)))
delta.bugs(
    "test_nothing_crosses_a_gate_of_minus_infinity[one_chunk-float32-41]",
    closed_gates_of_a_delta_rule_leak=lambda x: delta(x, g=x.g.clamp(min=-20)),
)


@delta.bug("test_values[grouped-float32]")
def value_heads_of_a_delta_rule_read_modulo(x):
    R = x.v.shape[2] // x.k.shape[2]
    return delta(x, q=x.q.repeat(1, 1, R, 1), k=x.k.repeat(1, 1, R, 1))


@delta_backward.bug("test_gradients[short-float32]", over={"dk"})
def sign_of_the_read_in_dk(x, y):
    k, read = (x.k.clone().requires_grad_() for _ in range(2))
    with torch.enable_grad():
        results = recurrence(SimpleNamespace(**{**vars(x), "k": k}), keys=read)
        loss = (results[0] * x.do).sum() + (0 if x.dstate is None else (results[1] * x.dstate).sum())
    dk, dread = torch.autograd.grad(loss, (k, read))
    y.dk = dk - dread


@delta_backward.bug("test_some_betas_of_0[short-float32]", over={"dbeta"})
def gradient_of_beta_divided_by_beta(x, y):
    y.dbeta = y.dbeta * x.beta / x.beta


delta_backward.bugs(
    "test_gradients[short-float32]",
    over={"dbeta"},
    gradient_of_beta_of_the_token_before=lambda x: SimpleNamespace(
        **{**vars(y := delta_backward(x)), "dbeta": y.dbeta.roll(1, 1)}
    ),
)


@delta_backward.bug("test_gradients[grouped-float32]", over={"dk"})
def dk_of_a_delta_rule_by_one_value_head(x, y):
    R = x.v.shape[2] // x.k.shape[2]
    y.dk = delta_backward(x, do=x.do * (torch.arange(x.v.shape[2]) % R == 0)[:, None], dstate=None).dk


@delta_summary.bug("test_values[last_chunk_partial-float32]", over={"transition"})
def transition_of_the_last_chunk_alone(x, y):
    if x.cu_seqlens is None and x.k.shape[1] > 64:
        last = {n: z[:, 64:] for n, z in vars(x).items() if isinstance(z, torch.Tensor) and z.ndim > 1}
        y.transition = delta_summary(x, **last).transition


delta_step.bugs(
    "test_values[small-float32]", beta_of_the_step_left_out=lambda x: delta_step(x, beta=torch.ones_like(x.beta))
)


@delta_step.bug("test_values[grouped-float32]")
def value_heads_of_a_step_read_modulo(x):
    R = x.v.shape[1] // x.k.shape[1]
    return delta_step(x, q=x.q.repeat(1, R, 1), k=x.k.repeat(1, R, 1))


@delta_replayed.bug("test_values[small-float32]", over={"ring_v"})
def ring_holds_v(x):
    o, L = delta_replayed(x), x.ring_v.shape[1]
    for n, slot in enumerate(x.slots.tolist()):
        for t in range(x.q.shape[1]):
            x.ring_v[slot, int(x.ring_start[n] + x.num_accepted[n] + t) % L] = x.v[n, t]
    return o


@delta_replayed.bug("test_values[small-float32]", over={"o"})
def accepted_tokens_read_the_state(x):
    """The delta rule advances a state by them, as if u were v."""
    for n, slot in enumerate(x.slots.tolist()):
        for i in range(int(x.num_accepted[n])):
            at = slot, int(x.ring_start[n] + i) % x.ring_k.shape[1]
            k, v, g = (ring[at][None] for ring in (x.ring_k, x.ring_v, x.ring_g))
            token = {"q": k, "k": k, "v": v, "g": g, "beta": v.new_ones(v.shape[:2]), "state": x.pool[slot][None]}
            options = {"scale": 1.0, "state_indices": None, "gate_normalizer": None, "inplace": False}
            x.pool[slot] = REFERENCE["recurrent_delta_step"](**token, **options)[1][0]
    none = torch.zeros_like(x.num_accepted)
    return delta_replayed(x, ring_start=x.ring_start + x.num_accepted, num_accepted=none)


FORMS = ("short", "last_chunk_partial", "grouped", "per_head", "per_head_grouped", "constant", "grouped_values")
"""Workloads with each form of gates, and with and without groups of heads."""
NAMING = ("AssertionError", "assert", "gla_core.dispatch.errors.BackendError")
"""Beginnings of the messages of a case that names a bug; the core itself refuses results of a wrong form."""


def planted(op, function, claims):
    dtypes = frozenset({torch.float32, torch.bfloat16})
    can = Capabilities(dtypes=dtypes, checkpoints=True, gates=frozenset(GATES), grouped_values=True, **claims)
    return Backend("planted", "0", {**REFERENCE, op: function}, can)


class Judge:
    """A pytest plugin that collects the kit once, and then runs a case on each wrong backend in turn."""

    def __init__(self, collected_on):
        self._collected_on = collected_on
        self.with_bug, self.without = {}, {}

    def pytest_runtestloop(self, session):
        self._collected_on.unregister()
        for bug in BUGS:
            item = _item(session, bug.op, bug.case)
            self.with_bug[bug.name] = self._run(item, planted(bug.op, bug.function, bug.claims))
        for op, case, swapped in {(bug.op, bug.case, bug.claims.get("swapped_states", False)) for bug in BUGS}:
            right = planted(op, REFERENCE[op], {"swapped_states": swapped})
            self.without[op, case] = self._run(_item(session, op, case), right)
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
    judge = Judge(gla.register(planted("chunk_gla_fwd", REFERENCE["chunk_gla_fwd"], {})))
    settings = ("-c", str(Path(conformance.__file__).with_name("pytest.ini")))
    quick = ("--tb=native", "-p", "no:logging")  # other tracebacks show source, which takes longer than the cases
    pytest.main(["-q", *settings, *quick, "--pyargs", "gla_core.conformance", "--gla-backend", "planted"], [judge])
    assert judge.with_bug.keys() == {bug.name for bug in BUGS}
    messages = {name: report.longrepr and report.longrepr.reprcrash.message for name, report in judge.with_bug.items()}
    assert {name: text for name, text in messages.items() if not (text or "").startswith(NAMING)} == {}
    quantities = {bug.name: bug.over for bug in BUGS if bug.over is not None}
    assert {name: over_budget(judge.with_bug[name]) for name in quantities} == quantities
    assert {case: report.longreprtext for case, report in judge.without.items() if not report.passed} == {}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gate_of_the_head_before", "with gates per head"),
        ("constant_gate_once_a_chunk", "with constant gates"),
        ("value_heads_read_key_heads_in_turn", "with groups of value heads"),
        ("dk_of_a_head_by_one_of_its_value_heads", "with groups of value heads"),
        ("gradient_of_a_gate_per_head_by_one_key", "with gates per head"),
    ],
)
def test_the_diagnosis_names_the_form_that_is_wrong(name, form, tmp_path):
    (bug,) = [bug for bug in BUGS if bug.name == name]
    module = "test_values" if bug.op == "chunk_gla_fwd" else "test_gradients"
    cases = " or ".join(f"{module}[{bug.op}-{workload}-float32" for workload in FORMS)
    report = tmp_path / "cases.jsonl"
    with gla.register(planted(bug.op, bug.function, bug.claims)):
        run("planted", report=str(report), module=module, select=cases)
    lines = diagnosis([json.loads(line) for line in report.read_text().splitlines()], "gla conformance planted")
    (common,) = [line for line in lines if line.startswith("in common")]
    assert form in common


def test_a_backend_that_refuses_all_it_declares_does_not_pass(tmp_path):
    backend = Backend("planted", "0", REFERENCE, Capabilities(), supports=lambda call: "not today")
    with gla.register(backend):
        code = run("planted", report=str(tmp_path / "cases.jsonl"), module="test_refusals")
    assert code == 1
    rows = map(json.loads, (tmp_path / "cases.jsonl").read_text().splitlines())
    failed = {row["op"] for row in rows if row["outcome"] == "failed"}
    assert failed == set(REFERENCE)
