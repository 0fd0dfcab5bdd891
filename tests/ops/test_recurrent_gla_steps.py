"""recurrent_gla_steps as a public function: messages, checks of values, PyTorch, and backends of third parties."""

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
from gla_core.dispatch.composed import step_of_steps, through_steps
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import steps_inputs
from gla_core.workloads.named import Workload

SIZES = {"B": 2, "T": 3, "H": 2, "K": 4, "V": 3, "pool": 8, "slots": ((4, 1, 0), (2, 3, 5))}
STEP_OP = get("reference").ops["recurrent_gla_step"]


def arguments(sizes=SIZES, **changes):
    """Returns the arguments of two sequences in a pool of 8 states, with changes."""
    return {**steps_inputs(Workload("", "recurrent_gla_steps", frozenset(), sizes)), **changes}


def ints(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


OFFSETS = {"lengths": (3, 3), **{name: SIZES[name] for name in ("H", "K", "V", "pool", "slots")}}
BAD = [
    (SIZES, {"slots": ints((4, 1, 0))}, ValueError, "slots has 1 rows; expected 2, one for each row of q"),
    (SIZES, {"slots": ints(4, 1)}, ValueError, "q has T = 3 tokens for each sequence and slots has 1 columns"),
    (SIZES, {"slots": torch.zeros(2, 9, dtype=torch.int64)}, ValueError, "slots has 9 columns; expected 1 to 8"),
    (SIZES, {"slots": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "slots has 0 columns; expected 1 to 8"),
    (SIZES, {"slots": torch.zeros(2, 3)}, TypeError, "slots is float32; expected int32 or int64"),
    (OFFSETS, {"slots": ints((4, 1, 0))}, ValueError, "slots has 1 rows; expected 2, one for each sequence of cu_seq"),
    (SIZES, {"cu_seqlens": ints(0, 3, 6)}, ValueError, "cu_seqlens goes with B = 1; q has B = 2"),
    (SIZES, {"num_accepted": ints(1)}, ValueError, "num_accepted has shape [1]; expected [N] with N=2"),
    (SIZES, {"read_slots": torch.zeros(2)}, TypeError, "read_slots is float32; expected int32 or int64"),
    (SIZES, {"has_state": ints(1, 1)}, TypeError, "has_state is int64; expected bool"),
    (SIZES, {"parents": ints(0, 0)}, ValueError, "parents is given; expected None: drafts are chains"),
    (SIZES, {"pool": torch.ones(8, 2, 4, 6)[..., ::2]}, ValueError, "its last dimension, or the one before, must be"),
    (SIZES, {"out": torch.ones(2, 3, 2, 4)}, ValueError, "out has shape [2, 3, 2, 4]; expected [B, T, Ho, V] with"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "changes", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_refused_with_a_message_before_anything_is_written(sizes, changes, error, message):
    x = arguments(sizes, **changes)
    before = x["pool"].clone()
    with pytest.raises(error, match=re.escape(message)):
        gla.recurrent_gla_steps(**x)
    assert torch.equal(x["pool"], before)


BAD_VALUES = [
    (SIZES, {"slots": ints((4, 1, 4), (2, 3, 5))}, "slots[:, 2][0] is 4, which sequence 0 writes too, by slots[:, 0]"),
    (SIZES, {"read_slots": ints(6, 1)}, "read_slots[1] is 1, which sequence 0 writes; expected a slot that no"),
    (OFFSETS, {"cu_seqlens": ints(0, 4, 6)}, "sequence 0 has 4 tokens; slots has 3 columns"),
    (SIZES, {"pool": torch.full((8, 2, 4, 3), torch.nan)}, "pool holds NaN in 48 of 48 places"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "changes", "message"), BAD_VALUES, ids=lambda x: x if isinstance(x, str) else "")
def test_values_are_checked_on_request(sizes, changes, message, check_values):
    with pytest.raises(ValueError, match=re.escape(message)):
        gla.recurrent_gla_steps(**arguments(sizes, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"read_slots": ints(6, 6)},  # one prefix, two requests
        {"slots": ints((4, 1, -1), (2, -1, 9))},
        {"has_state": torch.tensor([False, False]), "pool": torch.full((8, 2, 4, 3), torch.nan)},
        {"read_slots": ints(-1, 1), "slots": ints((4, 1, 0), (1, 3, 5))},  # a skipped sequence writes nothing
        {"num_accepted": ints(9, 0)},
    ],
)
def test_good_values_pass_the_checks(changes, check_values):
    x = arguments(**changes)
    expected = oracle_results("recurrent_gla_steps", x)
    assert relative_error(gla.recurrent_gla_steps(**x), expected["o"]) <= FORWARD[torch.float32]
    assert relative_error(x["pool"].nan_to_num(), expected["pool"].nan_to_num()) <= FORWARD[torch.float32]


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
    x = arguments(sizes, num_accepted=ints(*data.draw(st.lists(st.integers(-1, 6), min_size=N, max_size=N))))
    if data.draw(st.booleans()):
        x["has_state"] = torch.tensor(data.draw(some), dtype=torch.bool)
    if data.draw(st.booleans()):
        x["read_slots"] = ints(*(next(order) for _ in range(min(N, 4))))
    expected = oracle_results("recurrent_gla_steps", x)
    assert relative_error(gla.recurrent_gla_steps(**x), expected["o"]) <= 1e-12
    assert relative_error(x["pool"], expected["pool"]) <= 1e-12


# ---- PyTorch


@pytest.mark.parametrize("name", ["v", "pool"])
def test_it_has_no_backward(name):
    x = arguments()
    x[name].requires_grad_()
    with pytest.raises(RuntimeError, match="recurrent_gla_steps has no backward and an input requires a gradient"):
        gla.recurrent_gla_steps(**x)
    with torch.no_grad():
        gla.recurrent_gla_steps(**x)


@pytest.mark.parametrize("written", ["pool", "out"])
def test_what_it_writes_is_seen_by_autograd(written):
    x = arguments(out=torch.ones(2, 3, 2, 3))
    loss = (torch.ones(1, requires_grad=True) * x[written]).sum()
    gla.recurrent_gla_steps(**x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_vmap_is_refused():
    x = arguments()
    with pytest.raises(NotImplementedError, match="transforms no op that writes a pool or a state"):
        torch.vmap(lambda q: gla.recurrent_gla_steps(**{**x, "q": q}))(x["q"][None])


@pytest.mark.parametrize("with_out", [False, True])
def test_one_graph_writes_the_pool_and_out(with_out):
    def function(y, x):
        return gla.recurrent_gla_steps(**{**x, "q": y * 1.0}) + 1

    x = arguments(num_accepted=ints(3, 1), out=torch.zeros(2, 3, 2, 3) if with_out else None)
    expected = oracle_results("recurrent_gla_steps", {name: y for name, y in x.items() if name != "out"})
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert relative_error(compiled(x["q"], x) - 1, expected["o"]) <= 1e-5
    assert relative_error(x["pool"], expected["pool"]) <= 1e-5
    assert not with_out or relative_error(x["out"], expected["o"]) <= 1e-5


def test_slots_of_one_token_may_lack_a_dimension():
    x = arguments({**SIZES, "T": 1, "slots": ((4,), (2,))})
    expected = oracle_results("recurrent_gla_steps", x)
    o = gla.recurrent_gla_steps(**{**x, "slots": x["slots"][:, 0]})
    assert relative_error(o, expected["o"]) <= 1e-5
    assert relative_error(x["pool"], expected["pool"]) <= 1e-5


# ---- backends


def plain(q, k, v, g, state, scale, state_indices, inplace):
    """Computes recurrent_gla_step without an optional argument, as a third party's backend may."""
    return STEP_OP(q, k, v, g, state, scale, state_indices, None, inplace)


def keyword_only(q, k, v, *, scale, g, state, state_indices, inplace):
    return plain(q, k, v, g, state, scale, state_indices, inplace)


@pytest.mark.parametrize("step", [plain, keyword_only, Prepared(lambda call: plain, arguments_of(plain))])
def test_any_step_computes_several(step):
    backend = Backend("mine", "1", {"recurrent_gla_steps": through_steps(step)}, Capabilities())
    with gla.register(backend):
        for options in ({}, {"gate": "logsigmoid", "gate_normalizer": 4}):
            x = arguments()
            expected = oracle_results("recurrent_gla_steps", x, gate_normalizer=options.get("gate_normalizer"))
            assert relative_error(gla.recurrent_gla_steps(**x, **options, backend="mine"), expected["o"]) <= 1e-5
            assert relative_error(x["pool"], expected["pool"]) <= 1e-5
        message = "under batch_invariant recurrent_gla_steps is computed part by part, by recurrent_gla_step, which"
        with gla.batch_invariant(64), pytest.raises(gla.NoBackendError, match=message):
            gla.recurrent_gla_steps(**arguments(), backend="mine")


@pytest.mark.parametrize("form", [None, *GATES])
def test_a_prepared_step_is_described_as_its_own_call_would_be(form):
    """`through_steps` prepares a step by the description of the tensors that it passes on."""
    spec, step = ABSTRACT_OPS["recurrent_gla_steps"], ABSTRACT_OPS["recurrent_gla_step"]
    x = arguments({**SIZES, "gate_form": form or "key", "gates": "mild" if form else "none"})
    call = spec.describe(*spec.complete((), {**x, "scale": 1.0, "gate_normalizer": 16 if form else None}))
    token = {name: y if (y := x[name]) is None or y.ndim == 1 else y[:, 0].contiguous() for name in "qkvg"}
    named = {**token, "state": torch.zeros(2, 2, 4, 3), "scale": 1.0, "gate_normalizer": 16 if form else None}
    assert step_of_steps(call) == step.describe(*step.complete((), named))
