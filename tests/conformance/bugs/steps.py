"""Bugs in steps of one token."""

import torch
import torch.nn.functional as F

from tests.conformance.bugs.plant import REFERENCE, Op, as_if_dense

step = Op("recurrent_gla_step", "o", "state")
layer_stepped = Op("recurrent_gla_layer_step")
ssd_stepped = Op("recurrent_ssd_step")


@layer_stepped.bug("test_values[small-float32]", over={"o"})
def mean_over_all_heads(x):
    token = (x.q, x.k, x.v, x.g, x.state.clone(), x.scale, x.state_indices, x.gate_normalizer, None, True)
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


@step.bug("test_values[bonus-float32]", over={"o"})
def output_of_a_bonus_read_after_the_token(x):
    after = step(x, bonus=None)
    if x.bonus is not None:  # the part of the token itself has no bonus after the token
        alone, with_bonus = (step(x, bonus=u, state=torch.zeros_like(x.state), inplace=False) for u in (None, x.bonus))
        after.o = after.o - alone.o + with_bonus.o
    return after


step.bugs(
    "test_values[bonus-float32]",
    over={"o"},
    bonus_of_the_head_before=lambda x: step(x, bonus=None if x.bonus is None else x.bonus.roll(1, 0)),
)
step.bugs("test_gates_from_logits[small-float32]", logits_taken_for_log_gates=lambda x: step(x, gate_normalizer=None))
step.bugs("test_inplace[small-float32]", never_in_place=lambda x: step(x, inplace=False))
step.bugs("test_inputs_unchanged[small-float32]", always_in_place=lambda x: step(x, inplace=True))
