"""The memory floor against counts by hand and the table of docs/results.md."""

import pytest
import torch

import gla_core as gla
from gla_core.bench.floor import floor_bytes, floor_seconds
from gla_core.bench.suite import leaves, make_arguments
from gla_core.ops import PUBLIC_OPS
from gla_core.workloads.named import select
from gla_core.workloads.rows import IN_BFLOAT16

BANDWIDTH = 4.23e12  # from the table, with three digits


@pytest.mark.parametrize(
    ("B", "T", "H", "forward", "both"),
    [(8, 4096, 16, 0.190, 0.540), (1, 65536, 8, 0.190, 0.540), (1, 8192, 16, 0.048, 0.135), (2, 2048, 8, 0.012, 0.034)],
)
def test_chunk_gla_is_the_table(B, T, H, forward, both):
    sizes = {"B": B, "T": T, "H": H, "K": 128, "V": 128, **IN_BFLOAT16}
    assert floor_bytes("chunk_gla", sizes) == 1536 * B * T * H
    assert floor_bytes("chunk_gla", sizes, backward=True) == 4352 * B * T * H
    # The table is rounded to 1 us, and its bandwidth to 1 part in 800.
    assert 1e3 * floor_seconds("chunk_gla", sizes, BANDWIDTH) == pytest.approx(forward, abs=6e-4)
    assert 1e3 * floor_seconds("chunk_gla", sizes, BANDWIDTH, backward=True) == pytest.approx(both, abs=7e-4)


@pytest.mark.parametrize(("B", "microseconds"), [(64, 32), (256, 128), (1024, 514)])
def test_decoding_is_the_table(B, microseconds):
    (workload,) = [w for w in select("recurrent_gla_step") if w.name == f"decode_b{B}"]
    assert floor_bytes(workload.op, workload.sizes) == B * 16 * (2 * 128 * 128 * 4 + 1536)
    assert round(1e6 * floor_seconds(workload.op, workload.sizes, BANDWIDTH)) == microseconds


def test_grouped_queries_share_keys_gates_and_state():
    sizes = {"B": 3, "T": 5, "H": 2, "G": 4, "K": 8, "V": 16, "initial_state": True, "dtype": torch.float16}
    q, k, v, g, o, state = 3 * 5 * 8 * 8, 3 * 5 * 2 * 8, 3 * 5 * 2 * 16, 3 * 5 * 2 * 8, 3 * 5 * 8 * 16, 3 * 2 * 8 * 16
    once = 2 * (q + k + v + g) + 4 * state, 2 * o + 4 * state
    assert floor_bytes("chunk_gla", sizes) == sum(once)
    assert floor_bytes("chunk_gla", sizes, backward=True) == 3 * once[0] + 2 * once[1]


def test_packed_sequences_have_a_state_each():
    sizes = {"lengths": (0, 3, 4), "H": 1, "K": 2, "V": 5, "initial_state": True}
    assert floor_bytes("chunk_gla", sizes) == 4 * (7 * (2 + 2 + 5 + 2 + 5) + 2 * 3 * 2 * 5)


def test_without_a_gate_none_is_read():
    sizes = {"B": 1, "T": 10, "H": 1, "K": 4, "V": 4}
    gated, ungated = (floor_bytes("chunk_gla", {**sizes, "gates": gates}) for gates in ("mild", "none"))
    assert gated - ungated == 10 * 4 * 4


def test_a_pool_costs_what_the_rows_served_cost():
    sizes = {"B": 4, "H": 2, "K": 16, "V": 16, "rows": (5, -1, 0, 2), "pool": 6}
    assert floor_bytes("recurrent_gla_step", sizes) == 3 * 2 * (2 * 16 * 16 + 5 * 16) * 4


def test_float64_states_are_float64():
    sizes = {"B": 1, "H": 1, "K": 4, "V": 4, "dtype": torch.float64}
    assert floor_bytes("recurrent_gla_step", sizes) == 8 * (2 * 16 + 5 * 4)


def test_softmax_reads_and_writes_once():
    sizes = {"shape": (8, 1024), "dtype": torch.bfloat16}
    assert floor_bytes("online_softmax", sizes) == 2 * 8 * 1024 * 2
    assert floor_bytes("online_softmax", sizes, backward=True) == 5 * 8 * 1024 * 2  # x y, x dy dx


def test_attention_counts_its_log_sum_exp():
    sizes = {"B": 2, "Tq": 3, "Tk": 7, "H": 2, "G": 2, "K": 4, "V": 8, "dtype": torch.bfloat16}
    q, k, v, o, lse = 2 * 3 * 4 * 4 * 2, 2 * 7 * 2 * 4 * 2, 2 * 7 * 2 * 8 * 2, 2 * 3 * 4 * 8 * 2, 2 * 3 * 4 * 4
    assert floor_bytes("softmax_attention", sizes) == q + k + v + o + lse
    assert floor_bytes("softmax_attention", sizes, backward=True) == 3 * (q + k + v) + 2 * (o + lse)


def test_the_floor_of_a_pool_reads_and_writes_a_state_of_each_sequence():
    sizes = {"lengths": (5, 9, 0), "H": 2, "K": 16, "V": 8, "pool": 50, "pool_dtype": torch.bfloat16}
    tokens, states = 4 * 14 * 2 * (3 * 16 + 8 + 8), 2 * 3 * 2 * 16 * 8
    assert floor_bytes("chunk_gla_pool", sizes) == tokens + 2 * states


def test_the_floor_of_several_steps_writes_a_state_of_each_token():
    sizes = {"B": 2, "T": 3, "H": 2, "K": 16, "V": 8, "pool": 50, "slots": ((0, 1, 2, 3), (4, 5, 6, 7))}
    tokens, state = 4 * 6 * 2 * (3 * 16 + 8 + 8), 4 * 2 * 16 * 8
    assert floor_bytes("recurrent_gla_steps", sizes) == tokens + (2 + 6) * state


def test_the_floor_of_a_replay_moves_a_state_twice_and_the_rings_once_for_each_token():
    sizes = {"B": 2, "T": 3, "H": 2, "K": 16, "V": 8, "pool": 50, "L": 7, "dtype": torch.bfloat16}
    tokens, state, kept = 2 * 6 * 2 * (3 * 16 + 8 + 8), 4 * 2 * 16 * 8, 6 * 2 * (2 * 16 + 2 * 8 + 4 * 16)
    assert floor_bytes("recurrent_gla_replay", sizes) == tokens + 2 * 2 * state + 2 * kept
    constant = {**sizes, "gate_form": "constant"}
    without_gates = 6 * 2 * 16 * (2 + 2 * 4) - 2 * 2
    assert floor_bytes("recurrent_gla_replay", sizes) - floor_bytes("recurrent_gla_replay", constant) == without_gates


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="op is 'chunk_gla_fwd'; expected one of chunk_gla"):
        floor_bytes("chunk_gla_fwd", {})
    with pytest.raises(ValueError, match="has no backward"):
        floor_bytes("recurrent_gla_step", {}, backward=True)


@pytest.mark.parametrize(
    "workload",
    [w for w in select(tags=["ci"]) if "rows" not in w.sizes and "pool" not in w.sizes],
    ids=lambda w: f"{w.op}-{w.name}",
)
def test_the_floor_is_the_size_of_the_tensors(workload):
    """The floor equals the bytes of the arguments, of the op's results, and of what it writes."""
    arguments = make_arguments(workload, torch.device("cpu"))
    size = sum(x.nbytes for x in leaves(arguments))
    outputs = getattr(gla, workload.op)(**arguments)
    outputs = [outputs] if workload.op == "online_softmax" else [x for x in outputs if x is not None]
    outputs += [arguments[name] for name in PUBLIC_OPS[workload.op].written]
    assert floor_bytes(workload.op, workload.sizes) == size + sum(x.nbytes for x in outputs)
