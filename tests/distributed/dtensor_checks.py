"""The plain ops on DTensors of two ranks, compared with the same ops on whole tensors."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gla_core as gla
from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import gla_inputs

MESH = (2,)
BATCH, HEADS, WIDTH, WHOLE = Shard(0), Shard(2), Shard(3), Replicate()  # of [B, T, H, ..]


def spread(x, placement):
    if x is None:
        return None
    actual = distribute_tensor(x.detach().clone(), init_device_mesh("cpu", MESH), [placement])
    return actual.requires_grad_(x.requires_grad)


def compare(actual, expected):
    for x, reference in zip(actual, expected, strict=True):
        assert (x is None) == (reference is None)
        assert x is None or relative_error(x.full_tensor(), reference) <= 1e-12


def check_sequences_and_heads(ranks):
    """Results stay where q is. Other arguments are moved there, and their gradients go back."""
    for place, gate_place, there in (
        (BATCH, BATCH, BATCH),
        (HEADS, HEADS, HEADS),
        (HEADS, WHOLE, HEADS),
        (BATCH, HEADS, BATCH),
        (WIDTH, WIDTH, WHOLE),
    ):
        for states in (False, True):
            x = gla_inputs(B=2, T=20, H=2, G=2, dtype=torch.float64, initial_state=states)
            leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
            spread_out = [spread(y, p) for y, p in zip(leaves, (place, place, place, gate_place), strict=True)]
            expected = gla.chunk_gla(*leaves, None, x.initial_state, states)
            actual = gla.chunk_gla(*spread_out, None, spread(x.initial_state, WHOLE), states)
            compare(actual, expected)
            assert actual[0].placements == (there,)
            wanted = torch.autograd.grad(expected[0].square().sum(), leaves)
            compare(torch.autograd.grad(actual[0].square().sum(), spread_out), wanted)


def check_forms_of_gates_and_groups_of_values(ranks):
    """A constant gate has no batch: if the batch is spread, its gradient is the sum of the ranks' shares.

    All gates are given as logits, too.
    """
    head_place = Shard(0)  # of a constant gate [Hv]
    for form, place, gate_place in (
        ("head", BATCH, BATCH),
        ("head", HEADS, WHOLE),
        ("constant", BATCH, WHOLE),
        ("constant", BATCH, head_place),
        ("constant", HEADS, head_place),
        ("constant", HEADS, WHOLE),
    ):
        x = gla_inputs(B=2, T=6, H=2, R=2, dtype=torch.float64, gate_form=form)
        leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
        spread_out = [spread(y, p) for y, p in zip(leaves, (place, place, place, gate_place), strict=True)]
        for gates in ({"gate": "logsigmoid", "gate_normalizer": 4}, {}):
            expected, actual = (gla.chunk_gla(*args, output_final_state=True, **gates) for args in (leaves, spread_out))
            compare(actual, expected)
            wanted = torch.autograd.grad(expected.o.square().sum(), leaves)
            compare(torch.autograd.grad(actual.o.square().sum(), spread_out), wanted)
        compare(gla.chunk_gla_summary(*spread_out[1:]), gla.chunk_gla_summary(*leaves[1:]))
        token = [y.detach() if y.ndim == 1 else y.detach()[:, 0] for y in leaves]
        where = [Shard(1) if p == HEADS else p for p in (place, place, place, gate_place)]
        step = [spread(y, p) for y, p in zip(token, where, strict=True)]
        state = expected.state.detach()
        for gates in ({"gate": "logsigmoid"}, {}):
            actual = gla.recurrent_gla_step(*step, spread(state, WHOLE), **gates)
            compare(actual, gla.recurrent_gla_step(*token, state, **gates))


def check_packed_sequences(ranks):
    """Offsets may be a plain tensor; a row of packed sequences is not cut."""
    x = gla_inputs(lengths=(7, 0, 13), H=2, dtype=torch.float64)
    expected = gla.chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens, output_final_state=True)
    for place in (HEADS, BATCH):
        spread_out = [spread(y, place) for y in (x.q, x.k, x.v, x.g)]
        compare(gla.chunk_gla(*spread_out, cu_seqlens=x.cu_seqlens, output_final_state=True), expected)


def check_a_pool(ranks):
    """Only heads are spread, because slots count the states of the whole pool. The pool and `out` are written."""
    x = gla_inputs(lengths=(7, 0, 13), H=2, dtype=torch.float64)
    states = torch.randn(5, 2, x.k.shape[-1], x.v.shape[-1], dtype=torch.float64)
    integers = (x.cu_seqlens, torch.tensor([3, 1, -1]))
    expected_states = states.clone()
    expected = gla.chunk_gla_pool(x.q, x.k, x.v, x.g, expected_states, *integers)
    spread_out = [spread(y, HEADS) for y in (x.q, x.k, x.v, x.g)]
    for out in (None, spread(torch.zeros_like(x.v), HEADS)):
        written = spread(states, Shard(1))
        actual = gla.chunk_gla_pool(*spread_out, written, *integers, out=out)
        assert out is None or actual is out
        compare((actual, written), (expected, expected_states))
    with pytest.raises(ValueError, match="mismatched placements"):
        gla.chunk_gla_pool(*spread_out, spread(states, WHOLE), *integers)
    slots, written = torch.arange(5)[None], spread(states, Shard(1))
    expected = gla.recurrent_gla_steps(*(y[:, :3] for y in (x.q, x.k, x.v, x.g)), states, slots)
    compare((gla.recurrent_gla_steps(*(y[:, :3] for y in spread_out), written, slots), written), (expected, states))
    rings = [y[:, :6].expand(5, -1, -1, -1).clone() for y in (x.k, x.v, x.g)]
    pools, one = [y.clone() for y in (states, *rings)], torch.ones(1, dtype=torch.int64)
    written = [spread(states, Shard(1)), *(spread(y, HEADS) for y in rings)]
    expected = gla.recurrent_gla_replay(*(y[:, :3] for y in (x.q, x.k, x.v, x.g)), *pools, one, one, one)
    actual = gla.recurrent_gla_replay(*(y[:, :3] for y in spread_out), *written, one, one, one)
    compare((actual, *written), (expected, *pools))


def check_other_ops(ranks):
    """A decoding step, in place too; a summary; softmax attention."""
    x = gla_inputs(B=2, T=6, H=2, dtype=torch.float64)
    q, k, v, g = x.q, x.k, x.v, x.g
    state = torch.randn(2, 2, q.shape[-1], v.shape[-1], dtype=torch.float64)
    token = [y[:, 0] for y in (q, k, v, g)]
    for place, state_place, rate_place in ((BATCH, BATCH, WHOLE), (HEADS, Shard(1), Shard(0))):
        spread_out = [spread(y, place) for y in (q, k, v, g)]
        compare(gla.chunk_gla_summary(*spread_out[1:]), gla.chunk_gla_summary(k, v, g))
        compare(gla.chunk_gla_gradient_summary(spread_out[0], *spread_out[2:]), gla.chunk_gla_gradient_summary(q, v, g))
        compare(gla.softmax_attention(*spread_out[:3], causal=True), gla.softmax_attention(q, k, v, causal=True))
        one = [spread(y, state_place) for y in token]
        compare(gla.recurrent_gla_step(*one, spread(state, WHOLE)), gla.recurrent_gla_step(*token, state))
        bonus = torch.randn(2, q.shape[-1], dtype=torch.float64)
        expected = gla.recurrent_gla_step(*token, state, bonus=bonus)
        compare(gla.recurrent_gla_step(*one, spread(state, WHOLE), bonus=spread(bonus, rate_place)), expected)
        written = spread(state, state_place)
        expected = gla.recurrent_gla_step(*token, state)
        o, same = gla.recurrent_gla_step(*one, written, inplace=True)
        assert same is written
        compare((o, written), expected)
        with pytest.raises(ValueError, match="mismatched placements"):
            gla.recurrent_gla_step(*one, spread(state, WHOLE), inplace=True)
        weight, before, written = (
            torch.randn(v.shape[-1], dtype=torch.float64),
            state.clone(),
            spread(state, state_place),
        )
        expected = gla.recurrent_gla_layer_step(*token, before, token[2], weight)
        actual = gla.recurrent_gla_layer_step(*one, written, one[2], spread(weight, WHOLE))
        compare((actual, written), (expected, before))
        dt = v[:, 0, :, 0].abs()
        expected = gla.recurrent_ssd_step(*token[:3], before, dt, -dt[0])
        actual = gla.recurrent_ssd_step(*one[:3], written, spread(dt, state_place), spread(-dt[0], rate_place))
        compare((actual, written), (expected, before))


def check_rows_of_a_softmax(ranks):
    x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    y = gla.online_softmax(x, 1)
    for place in (Shard(0), Shard(2), WHOLE):
        spread_out = spread(x, place)
        actual = gla.online_softmax(spread_out, dim=-2)
        assert actual.placements == (place,)
        compare((actual,), (y,))
        wanted = torch.autograd.grad(y, x, dy, retain_graph=True)
        compare(torch.autograd.grad(actual, spread_out, spread(dy, place)), wanted)
        compare((gla.online_softmax(spread_out.detach(), 1),), (y,))


def check_a_mesh_of_two_dimensions(ranks):
    """Sequences are spread along one dimension, and heads along the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = gla_inputs(B=2, T=20, H=2, G=2, dtype=torch.float64)
    q, k, v, g = (distribute_tensor(y, mesh, [BATCH, HEADS]) for y in (x.q, x.k, x.v, x.g))
    o, state = gla.chunk_gla(q, k, v, g, output_final_state=True)
    assert o.placements == (BATCH, HEADS)
    compare((o, state), gla.chunk_gla(x.q, x.k, x.v, x.g, output_final_state=True))


def check_what_dtensors_are_refused(ranks):
    x = gla_inputs(B=2, T=6, H=3, dtype=torch.float64)
    tokens = [spread(y, Shard(1)) for y in (x.q, x.k, x.v, x.g)]
    with pytest.raises(ValueError, match=r"q is sharded along its tokens.*gla_core\.distributed\.chunk_gla"):
        gla.chunk_gla(*tokens)
    with pytest.raises(ValueError, match="q has Hq = 3; expected a multiple of the 2 ranks that spread it"):
        gla.chunk_gla(*(spread(y, HEADS) for y in (x.q, x.k, x.v, x.g)))
    with pytest.raises(TypeError, match="k is a plain tensor and q a DTensor"):
        gla.chunk_gla(spread(x.q, BATCH), x.k, x.v, x.g)
    whole = [spread(y, WHOLE) for y in (x.q, x.k, x.v)]
    for i, name in enumerate("qkv"):
        args = [*whole[:i], tokens[i], *whole[i + 1 :]]
        with pytest.raises(ValueError, match=rf"{name} is sharded along its tokens.*redistribute\(\)"):
            gla.softmax_attention(*args)
    with pytest.raises(ValueError, match=r"x is sharded along dim = 1, which sums to one.*redistribute\(\)"):
        gla.online_softmax(tokens[0], 1)
    with pytest.raises(ValueError, match=r"x has shape\[2\] = 3; expected a multiple of the 2 ranks that spread it"):
        gla.online_softmax(spread(x.q, HEADS), 1)


NUMBERS = {
    check_sequences_and_heads: 2,
    check_forms_of_gates_and_groups_of_values: 2,
    check_packed_sequences: 2,
    check_a_pool: 2,
    check_other_ops: 2,
    check_rows_of_a_softmax: 2,
    check_what_dtensors_are_refused: 2,
    check_a_mesh_of_two_dimensions: 4,
}
