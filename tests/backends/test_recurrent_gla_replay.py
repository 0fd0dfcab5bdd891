"""The kernel of recurrent_gla_replay on random calls, and over the calls of a server, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance.calls import oracle_results, run
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import gla_inputs
from tests.replay_calls import replay_calls

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels


@settings(max_examples=15)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_any_call(device, data, dtype):
    x = data.draw(replay_calls(dtype=dtype, device=device))
    expected = oracle_results("recurrent_gla_replay", x)
    actual = run("recurrent_gla_replay", x, "triton_fused")
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if error > FORWARD[dtype]} == {}


@pytest.mark.parametrize("op", ["recurrent_gla_steps", "recurrent_gla_replay"])
def test_rows_in_front_of_the_first_sequence_and_behind_the_last_are_zero(device, op):
    x = gla_inputs(B=1, T=9, H=2, K=16, V=16, device=device)
    tokens = [y.clone() for y in (x.q, x.k, x.v, x.g)]
    for y in tokens:
        y[:, :3] = y[:, 7:] = torch.nan
    pool = torch.zeros(3, 2, 16, 16, device=device)
    offsets, slots, zeros = torch.tensor([[3, 5, 7], [2, 1, 0], [0, 0, 0]], device=device)
    memory = (pool, slots[:2, None].expand(2, 2))
    if op == "recurrent_gla_replay":
        rings = [torch.zeros(3, 4, 2, 16, device=device) for _ in range(3)]
        memory = (pool, *rings, slots[:2], zeros[:2], zeros[:2])
    out = torch.full_like(x.v, torch.nan)
    getattr(gla, op)(*tokens, *memory, cu_seqlens=offsets, out=out, backend="triton_fused")
    expected, _ = gla.chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=offsets, backend="reference")
    assert relative_error(out, expected) <= FORWARD[torch.float32]
    assert not out[:, :3].any()
    assert not out[:, 7:].any()


def test_calls_in_a_row_write_the_states_of_steps(device):
    """Tokens that were accepted in several calls give the state of steps over them."""
    H, K, V, S, L = 2, 16, 16, 3, 7
    pool, slots = torch.zeros(3, H, K, V, device=device), torch.tensor([2, 0], device=device)
    rings = [torch.full((3, L, H, width), torch.nan, device=device) for width in (K, V, K)]
    start, accepted = (torch.zeros(2, dtype=torch.int32, device=device) for _ in range(2))
    states = torch.zeros(2, H, K, V, dtype=torch.float64, device=device)
    for call in range(6):
        x = gla_inputs(B=2, T=S, H=H, K=K, V=V, device=device, seed=call)
        tokens = (x.q, x.k, x.v, x.g)
        gla.recurrent_gla_replay(*tokens, pool, *rings, slots, start, accepted, backend="triton_fused")
        assert relative_error(pool[slots], states) <= FORWARD[torch.float32]
        start = (start + accepted) % L
        accepted = torch.tensor([call % (S + 1), (2 * call + 1) % (S + 1)], dtype=torch.int32, device=device)
        for j in range(S):
            token = [y[:, j].double() for y in tokens]
            _, new = gla.recurrent_gla_step(*token, states, backend="reference")
            states = torch.where((j < accepted)[:, None, None, None], new, states)
