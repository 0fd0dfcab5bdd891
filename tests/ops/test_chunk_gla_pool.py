"""chunk_gla_pool as a public function: messages, checks of values, PyTorch, and backends of third parties."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance.calls import oracle_results
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import GATES, Backend, Capabilities, Prepared, arguments_of
from gla_core.dispatch.composed import forwards_of_pool, through_pool
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import pool_inputs, random_arguments
from gla_core.workloads.named import Workload

SIZES = {"lengths": (3, 5), "H": 2, "K": 4, "V": 3, "pool": 6, "read_slots": (4, 1)}
FORWARD_OP = get("reference").ops["chunk_gla_fwd"]


def arguments(sizes=SIZES, **changes):
    """Returns the arguments of two sequences in a pool of 6 states, with changes."""
    return {**pool_inputs(Workload("", "chunk_gla_pool", frozenset(), sizes)), **changes}


def ints(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


TWO_ROWS = {"q": torch.ones(2, 8, 2, 4), "k": torch.ones(2, 8, 2, 4), "v": torch.ones(2, 8, 2, 3), "g": None}
BAD = [
    ({"read_slots": ints(0, 1, 2)}, ValueError, "read_slots has 3 entries; expected 2, one for each sequence of cu_"),
    ({"write_slots": ints(0)}, ValueError, "write_slots has shape [1]; expected [N] with N=2"),
    ({"read_slots": torch.zeros(2)}, TypeError, "read_slots is float32; expected int32 or int64"),
    ({"read_slots": None}, TypeError, "read_slots is NoneType; expected a tensor [N]"),
    ({"cu_seqlens": None}, TypeError, "cu_seqlens is NoneType; expected a tensor [N+1]"),
    ({"cu_seqlens": ints()}, ValueError, "cu_seqlens is empty; expected N+1 offsets"),
    (TWO_ROWS, ValueError, "cu_seqlens goes with B = 1; q has B = 2"),
    ({"has_state": ints(0, 1, dtype=torch.int32)}, TypeError, "has_state is int32; expected bool"),
    ({"has_state": torch.ones(3, dtype=torch.bool)}, ValueError, "has_state has shape [3]; expected [N] with N=2"),
    ({"checkpoint_offsets": ints(0, 0)}, ValueError, "checkpoint_offsets is given and checkpoint_slots is None"),
    ({"checkpoint_slots": ints(0, 0)}, ValueError, "checkpoint_slots is given and checkpoint_offsets is None"),
    ({"pad_slot": 1.0}, TypeError, "pad_slot is float; expected an integer"),
    ({"pool": torch.ones(6, 2, 3, 4)}, ValueError, "pool has shape [6, 2, 3, 4]; expected [P, Hv, K, V] with Hv=2"),
    ({"pool": torch.ones(6, 2, 4, 3).double()}, TypeError, "pool is float64; expected float32 or bfloat16 or"),
    ({"pool": torch.ones(1, 2, 4, 3).expand(6, -1, -1, -1)}, ValueError, "pool has stride 0 along dimension 0"),
    ({"pool": torch.ones(6, 2, 4, 6)[..., ::2]}, ValueError, "its last dimension, or the one before, must be"),
    ({"out": torch.ones(1, 8, 2, 4)}, ValueError, "out has shape [1, 8, 2, 4]; expected [B, T, Ho, V] with"),
    ({"out": torch.ones(1, 8, 2, 3).half()}, TypeError, "out is float16; expected float32, as q"),
    ({"out": torch.ones(1, 8, 2, 6)[..., ::2]}, ValueError, "out has strides (96, 12, 6, 2) and is written in place"),
    ({"gate": "sigmoid"}, ValueError, "gate is 'sigmoid'; expected 'logsigmoid'"),
    ({"max_seqlen": -1}, ValueError, "max_seqlen is -1; expected the tokens of the longest sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_refused_with_a_message_before_anything_is_written(changes, error, message):
    given = arguments(**changes)
    before = given["pool"].clone()
    with pytest.raises(error, match=re.escape(message)):
        gla.chunk_gla_pool(**given)
    assert torch.equal(given["pool"], before)


@pytest.mark.parametrize("changes", [{"out": torch.ones(1, 8, 2, 4)}, {"out": torch.ones(1, 8, 2, 3).half()}])
def test_a_bad_out_is_refused_under_autocast_too(changes):
    given = arguments(**changes)
    before = given["pool"].clone()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((ValueError, TypeError), match="out "):
        gla.chunk_gla_pool(**given)
    assert torch.equal(given["pool"], before)


LONG = {"lengths": (70, 130), "H": 1, "K": 2, "V": 2, "pool": 6, "read_slots": (4, 1)}
FLAGS = torch.tensor([True, False])


def kept(offsets, slots):
    """Returns the arguments of checkpoints."""
    return {"checkpoint_offsets": ints(*offsets), "checkpoint_slots": ints(*slots)}


BAD_VALUES = [
    ({"read_slots": ints(3, 3)}, "read_slots[1] is 3, which sequence 0 writes too, by read_slots; expected no"),
    ({"write_slots": ints(3, 3)}, "write_slots[1] is 3, which sequence 0 writes too, by write_slots; expected no slot"),
    ({"write_slots": ints(1, 0)}, "read_slots[1] is 1, which sequence 0 writes; expected a slot that no"),
    ({"cu_seqlens": ints(0, 7, 5)}, "expected offsets from 0 to T = 200 that do not descend"),
    ({"max_seqlen": 7}, "max_seqlen is 7; the longest sequence of cu_seqlens has 130 tokens"),
    (kept((0, 100), (0, 2)), "checkpoint_offsets[1] is 100; expected a multiple of 64"),
    (kept((64, 64), (2, 4)), "checkpoint_slots[1] is 4, which sequence 0 writes too, by read"),
    (kept((64, 0), (1, 2)), "checkpoint_slots[0] is 1, which sequence 1 writes too"),
    ({"pool": torch.full((6, 1, 2, 2), torch.nan)}, "pool holds NaN in 8 of 8 places"),
    ({"g": torch.ones(1, 200, 1, 2)}, "g has values up to 1.0; expected the log of a forget gate"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES, ids=lambda x: x if isinstance(x, str) else "")
def test_values_are_checked_on_request(changes, message, check_values):
    with pytest.raises(ValueError, match=re.escape(message)):
        gla.chunk_gla_pool(**arguments(LONG, **changes))


GOOD_VALUES = [
    {"read_slots": ints(3, 3), "write_slots": ints(0, 1)},  # one prefix, two requests
    {"read_slots": ints(-1, -1)},
    {"read_slots": ints(5, 5), "pad_slot": 5},
    {"write_slots": ints(1, 0), "has_state": FLAGS},  # a new sequence reads no slot
    {"write_slots": ints(2, 3), **kept((100, 0), (2, 2))},  # none is kept: the first sequence has 70 tokens
    kept((64, 128), (0, 9)),
    {"pool": torch.full((6, 1, 2, 2), torch.nan), "has_state": FLAGS & False},
]


@pytest.mark.parametrize("changes", GOOD_VALUES)
def test_good_values_pass_the_checks(changes, check_values):
    given = arguments(LONG, **changes)
    expected = oracle_results("chunk_gla_pool", given)
    assert relative_error(gla.chunk_gla_pool(**given), expected["o"]) <= FORWARD[torch.float32]
    assert relative_error(given["pool"], expected["pool"]) <= FORWARD[torch.float32]


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
    """Slots are a random permutation, with pads; sequences are new at random, and checkpoints at random offsets."""
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
    x = arguments(sizes)
    for name in ("read_slots", "write_slots", "checkpoint_offsets", "checkpoint_slots"):
        x[name] = x[name].long()
    x["has_state"] = x["has_state"].bool()
    expected = oracle_results("chunk_gla_pool", x)
    assert relative_error(gla.chunk_gla_pool(**x), expected["o"]) <= 1e-12
    assert relative_error(x["pool"], expected["pool"]) <= 1e-12


# ---- PyTorch


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "pool"])
def test_it_has_no_backward(name):
    given = arguments()
    given[name].requires_grad_()
    with pytest.raises(
        RuntimeError, match="chunk_gla_pool has no backward and an input requires a gradient; train with"
    ):
        gla.chunk_gla_pool(**given)
    with torch.no_grad():
        gla.chunk_gla_pool(**given)


@pytest.mark.parametrize("written", ["pool", "out"])
def test_what_it_writes_is_seen_by_autograd(written):
    """A backward that needs the old values must fail, and not use the values that were written."""
    given = arguments(out=torch.ones(1, 8, 2, 3))
    leaf = torch.ones(1, requires_grad=True)
    loss = (leaf * given[written]).sum()
    gla.chunk_gla_pool(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_runs_in_inference_mode():
    with torch.inference_mode():
        given = arguments()
        expected = oracle_results("chunk_gla_pool", given)
        assert relative_error(gla.chunk_gla_pool(**given), expected["o"]) <= 1e-5
        assert relative_error(given["pool"], expected["pool"]) <= 1e-5


def test_vmap_is_refused():
    given = arguments()
    with pytest.raises(NotImplementedError, match="transforms no op that writes a pool or a state; call chunk_gla"):
        torch.vmap(lambda q: gla.chunk_gla_pool(**{**given, "q": q}))(given["q"][None])


@pytest.mark.parametrize("with_out", [False, True])
def test_one_graph_writes_the_pool_and_out(with_out):
    def function(x, given):
        return gla.chunk_gla_pool(**{**given, "q": x * 1.0}) + 1

    given = arguments(has_state=FLAGS, out=torch.zeros(1, 8, 2, 3) if with_out else None)
    expected = oracle_results("chunk_gla_pool", {name: x for name, x in given.items() if name != "out"})
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert relative_error(compiled(given["q"], given) - 1, expected["o"]) <= 1e-5
    assert relative_error(given["pool"], expected["pool"]) <= 1e-5
    assert not with_out or relative_error(given["out"], expected["o"]) <= 1e-5


def test_it_runs_on_meta_tensors():
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments().items()}
    assert gla.chunk_gla_pool(**given).shape == (1, 8, 2, 3)


# ---- backends


def test_a_state_is_rounded_once():
    """The outputs are those of states that are not rounded, and the written state is the nearest number."""
    given = arguments(LONG, pool=torch.randn(6, 1, 2, 2).bfloat16())
    expected = oracle_results("chunk_gla_pool", given)
    assert relative_error(gla.chunk_gla_pool(**given), expected["o"]) <= FORWARD[torch.float32]
    differ = given["pool"] != expected["pool"].bfloat16()
    assert differ.float().mean() < 0.1  # a number in the middle of two may be rounded either way


def test_batch_invariance_needs_a_forward_of_the_backend():
    backend = backend_of(through_pool(FORWARD_OP))
    message = "under batch_invariant chunk_gla_pool is computed part by part, by chunk_gla_fwd"
    with gla.register(backend), gla.batch_invariant(64), pytest.raises(gla.NoBackendError, match=message):
        gla.chunk_gla_pool(**arguments(), backend="mine")


def backend_of(op, **claims):
    return Backend("mine", "1", {"chunk_gla_pool": op}, Capabilities(**claims))


def test_a_backend_that_takes_no_swapped_states_is_not_given_a_copy_of_the_pool():
    given = arguments()
    swapped = given["pool"].mT.contiguous()
    expected, before = oracle_results("chunk_gla_pool", given), swapped.clone()
    with gla.register(backend_of(through_pool(FORWARD_OP))):
        with pytest.raises(
            gla.NoBackendError, match="values are contiguous; pool has keys contiguous: request another"
        ):
            gla.chunk_gla_pool(**{**given, "pool": swapped}, state_v_first=True, backend="mine")
        assert torch.equal(swapped, before)
        gla.chunk_gla_pool(**given, backend="mine")
    assert relative_error(given["pool"], expected["pool"]) <= 1e-5
    with gla.register(backend_of(through_pool(FORWARD_OP), swapped_states=True)):
        gla.chunk_gla_pool(**{**given, "pool": swapped}, state_v_first=True, backend="mine")
    assert relative_error(swapped.mT, expected["pool"]) <= 1e-5


def test_a_backend_that_lacks_an_optional_argument_refuses_it():
    def own(q, k, v, g, pool, cu_seqlens, read_slots, scale, pad_slot):
        raise AssertionError("must not be called")

    with gla.register(backend_of(own)), pytest.raises(gla.NoBackendError, match="takes no has_state; call it without"):
        gla.chunk_gla_pool(**arguments(has_state=FLAGS), backend="mine")


def plain(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    """Computes chunk_gla_fwd without optional arguments, as a third party's backend may."""
    assert initial_state.is_contiguous()
    return FORWARD_OP(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, None)


def keyword_only(q, k, v, *, scale, cu_seqlens, g, initial_state, output_final_state):
    return plain(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)


@pytest.mark.parametrize("forward", [plain, keyword_only, Prepared(lambda call: plain, arguments_of(plain))])
def test_any_forward_goes_through_a_pool(forward):
    logits = {"gate": "logsigmoid", "gate_normalizer": 4}
    with gla.register(backend_of(through_pool(forward))):
        for options in ({}, logits):
            given = arguments(**kept((2, 64), (0, 2)))
            expected = oracle_results("chunk_gla_pool", given, gate_normalizer=options.get("gate_normalizer"))
            o = gla.chunk_gla_pool(**given, **options, backend="mine")
            assert relative_error(o, expected["o"]) <= 1e-5
            assert relative_error(given["pool"], expected["pool"]) <= 1e-5


def test_a_forward_without_states_cannot_go_through_a_pool():
    with pytest.raises(TypeError, match="chunk_gla_fwd takes no initial_state or cu_seqlens; through_pool needs it"):
        through_pool(lambda q, k, v, g, scale, output_final_state: None)


@pytest.mark.parametrize("given", [{}, {"gate": "logsigmoid"}, {"g": None}])
def test_a_prepared_forward_is_described_as_its_own_call_would_be(given):
    """`through_pool` prepares a forward by the description of the tensors that it passes on."""
    spec, forward = ABSTRACT_OPS["chunk_gla_pool"], ABSTRACT_OPS["chunk_gla_fwd"]
    x = arguments(**{name: y for name, y in given.items() if name == "g"})
    x |= {"gate_normalizer": 16 if "gate" in given else None, "out": None, "max_seqlen": 5, "scale": 1.0}
    x |= kept((2, 2), (0, 2))
    call = spec.describe(*(x[name] for name in spec.parameters))
    for parts, found in enumerate(forwards_of_pool(call), 1):
        states, offsets = torch.zeros(2 * parts, 2, 4, 3), torch.zeros(2 * parts + 1, dtype=torch.int64)
        tokens = {name: x[name] for name in ("q", "k", "v", "g", "scale", "gate_normalizer", "max_seqlen")}
        named = {"initial_state": states, "output_final_state": True, "cu_seqlens": offsets, **tokens}
        assert found == forward.describe(*forward.complete((), named))
    assert len(forwards_of_pool(call)) == 2


def test_a_call_known_by_its_sizes_can_be_run():
    spec = ABSTRACT_OPS["chunk_gla_pool"]
    sizes = {"B": 1, "T": 40, "H": 2, "K": 4, "V": 3, "N": 3}
    q, k, v, g, pool, cu_seqlens, slots, *_ = random_arguments(spec.call(sizes, torch.device("cpu"), torch.float32))
    given = {"q": q, "k": k, "v": v, "g": g, "pool": pool, "cu_seqlens": cu_seqlens, "read_slots": slots}
    expected = oracle_results("chunk_gla_pool", {**arguments(), **given})
    assert sorted(slots.tolist()) == [0, 1, 2]
    assert relative_error(gla.chunk_gla_pool(**given), expected["o"]) <= 1e-5
