"""recurrent_gla_steps: any call, and slots of one token. tests/ops/test_serving.py has what it shares with others."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.dispatch.backend import GATES
from tests.ops.serving import OPS, STEPS, arguments, assert_computed, call, check, expected, ints


@settings(max_examples=30)
@given(
    lengths=st.none() | st.lists(st.integers(0, 4), max_size=4),
    padding=st.integers(0, 3),
    H=st.integers(1, 2),
    groups=st.sampled_from([{}, {"G": 2}, {"R": 3}]),
    K=st.integers(1, 9),
    V=st.integers(1, 9),
    gate=st.sampled_from([("none", "key"), *(("-inf", form) for form in GATES)]),
    page=st.integers(0, 3),
    pad_slot=st.sampled_from([-1, 0]),
    data=st.data(),
)
def test_any_call(lengths, padding, groups, gate, data, **sizes):
    """Slots are a random permutation, with pads; sequences are new at random, and drafts are accepted at random."""
    N, T = (data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))) if lengths is None else (len(lengths), 0)
    S = data.draw(st.integers(max(1, T, *(lengths or ())), 5))
    order = iter(data.draw(st.permutations(range(-6, 24))))
    sizes |= {"slots": tuple(tuple(next(order) for _ in range(S)) for _ in range(N)), "pool": 20, **groups}
    sizes |= {"B": N, "T": T} if lengths is None else {"lengths": tuple(lengths), "padding": padding}
    sizes |= {"gates": gate[0], "gate_form": gate[1], "dtype": torch.float64}
    some = st.lists(st.booleans(), min_size=N, max_size=N)
    x = arguments(STEPS, sizes, num_accepted=ints(*data.draw(st.lists(st.integers(-1, 6), min_size=N, max_size=N))))
    if data.draw(st.booleans()):
        x["has_state"] = torch.tensor(data.draw(some), dtype=torch.bool)
    if data.draw(st.booleans()):
        x["read_slots"] = ints(*(next(order) for _ in range(min(N, 4))))
    check(STEPS, x, 1e-12)


def test_slots_of_one_token_may_lack_a_dimension():
    x = arguments(STEPS, {**OPS[STEPS], "T": 1, "slots": ((4,), (2,))})
    wanted = expected(STEPS, x)
    assert_computed(STEPS, call(STEPS, {**x, "slots": x["slots"][:, 0]}), x, wanted)
