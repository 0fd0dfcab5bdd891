"""chunk_gla_pool: any call, and what a backend may lack. tests/ops/test_serving.py has what it shares with others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import GATES, Backend, Capabilities
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import random_arguments
from tests.ops.serving import LONG, POOL, arguments, call, check, expected

FORWARD_OP = get("reference").ops["chunk_gla_fwd"]


@pytest.mark.parametrize("changes", [{"out": torch.ones(1, 8, 2, 4)}, {"out": torch.ones(1, 8, 2, 3).half()}])
def test_a_bad_out_is_refused_under_autocast_too(changes):
    x = arguments(POOL, **changes)
    before = x["pool"].clone()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((ValueError, TypeError), match="out "):
        call(POOL, x)
    assert torch.equal(x["pool"], before)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=4),
    padding=st.integers(0, 9),
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
    """Slots are a random permutation, with pads; sequences are new at random, and snapshots at random offsets."""
    N = len(lengths)
    order = data.draw(st.permutations(range(12)))
    some = st.lists(st.booleans(), min_size=N, max_size=N)

    def slots(first):
        """Returns N slots of their own; some of them are outside the pool."""
        return tuple(s if inside else -5 for s, inside in zip(order[first : first + N], data.draw(some), strict=True))

    sizes |= {**groups, "lengths": tuple(lengths), "padding": padding, "gates": gate[0], "gate_form": gate[1]}
    sizes |= {"pool": 12, "read_slots": slots(0), "write_slots": slots(4), "has_state": tuple(data.draw(some))}
    offsets = data.draw(st.lists(st.integers(-1, 70), min_size=N, max_size=N))
    sizes |= {"checkpoint_offsets": tuple(offsets), "checkpoint_slots": slots(8), "dtype": torch.float64}
    x = arguments(POOL, sizes)
    for name in ("read_slots", "write_slots", "snapshot_offsets", "snapshot_slots"):
        x[name] = x[name].long()
    x["has_state"] = x["has_state"].bool()
    check(POOL, x, 1e-12)


def test_it_runs_on_meta_tensors():
    x = {name: y.to("meta") if isinstance(y, torch.Tensor) else y for name, y in arguments(POOL).items()}
    assert call(POOL, x).shape == (1, 8, 2, 3)


# ---- backends


def test_a_state_is_rounded_once():
    """The outputs are those of states that are not rounded, and the written state is the nearest number."""
    x = arguments(POOL, LONG, pool=torch.randn(6, 1, 2, 2).bfloat16())
    wanted = expected(POOL, x)
    assert relative_error(call(POOL, x), wanted["o"]) <= FORWARD[torch.float32]
    differ = x["pool"] != wanted["pool"].bfloat16()
    assert differ.float().mean() < 0.1  # a number in the middle of two may be rounded either way


def backend_of(forward, **claims):
    return Backend("mine", "1", {"chunk_gla_fwd": forward}, Capabilities(**claims))


def test_batch_invariance_needs_a_forward_of_the_backend():
    def op(q, k, v, g, pool, cu_seqlens, read_slots, scale, pad_slot):
        raise AssertionError("must not be called")

    message = "under batch_invariant chunk_gla_pool is computed part by part, by chunk_gla_fwd"
    backend = Backend("mine", "1", {"chunk_gla_pool": op})
    with gla.register(backend), gla.batch_invariant(64), pytest.raises(gla.NoBackendError, match=message):
        call(POOL, arguments(POOL), backend="mine")


def test_a_backend_that_takes_no_swapped_states_is_not_given_a_copy_of_the_pool():
    x = arguments(POOL)
    swapped = x["pool"].mT.contiguous()
    wanted, before = expected(POOL, x), swapped.clone()
    with gla.register(backend_of(FORWARD_OP)):
        message = "values are contiguous; pool has keys contiguous: request another"
        with pytest.raises(gla.NoBackendError, match=message):
            call(POOL, {**x, "pool": swapped}, state_v_first=True, backend="mine")
        assert torch.equal(swapped, before)
        call(POOL, x, backend="mine")
    assert relative_error(x["pool"], wanted["pool"]) <= 1e-5
    with gla.register(backend_of(FORWARD_OP, swapped_states=True)):
        call(POOL, {**x, "pool": swapped}, state_v_first=True, backend="mine")
    assert relative_error(swapped.mT, wanted["pool"]) <= 1e-5


def test_a_backend_that_lacks_an_optional_argument_refuses_it():
    def op(q, k, v, g, pool, cu_seqlens, read_slots, scale, pad_slot):
        raise AssertionError("must not be called")

    x = arguments(POOL, has_state=torch.tensor([True, False]))
    backend = Backend("mine", "1", {"chunk_gla_pool": op})
    with gla.register(backend), pytest.raises(gla.NoBackendError, match="takes no has_state; call it without"):
        call(POOL, x, backend="mine")


def test_a_forward_without_states_serves_no_pool():
    backend = backend_of(lambda q, k, v, g, scale, output_final_state: None)
    message = "takes no initial_state or cu_seqlens; call it without"
    with gla.register(backend), pytest.raises(gla.NoBackendError, match=message):
        call(POOL, arguments(POOL), backend="mine")


def test_a_call_known_by_its_sizes_can_be_run():
    spec = ABSTRACT_OPS["chunk_gla_pool"]
    sizes = {"B": 1, "T": 40, "H": 2, "K": 4, "V": 3, "N": 3}
    q, k, v, g, pool, cu_seqlens, slots, *_ = random_arguments(spec.call(sizes, torch.device("cpu"), torch.float32))
    x = {"q": q, "k": k, "v": v, "g": g, "pool": pool, "cu_seqlens": cu_seqlens, "read_slots": slots}
    wanted = expected(POOL, {**arguments(POOL), **x})
    assert sorted(slots.tolist()) == [0, 1, 2]
    assert relative_error(call(POOL, x), wanted["o"]) <= 1e-5
