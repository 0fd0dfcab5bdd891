"""recurrent_gla_replay as a public function: messages, checks of values, PyTorch, servers, and backends of others."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from hypothesis import given, settings

import gla_core as gla
from gla_core.conformance.calls import RINGS, oracle_results
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import GATES, Backend, Capabilities, Prepared, arguments_of
from gla_core.dispatch.composed import step_of_replay, through_replay
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import gla_inputs
from tests.replay_calls import replay_arguments, replay_calls

SIZES = {"B": 2, "T": 3, "H": 2, "K": 4, "V": 3, "pool": 8, "L": 6}
SIZES |= {"slots": (4, 2), "ring_start": (5, 0), "num_accepted": (3, 1)}
STEP_OP = get("reference").ops["recurrent_gla_step"]


def arguments(sizes=SIZES, **changes):
    """Returns the arguments of two sequences in a pool of 8 states, with changes."""
    return {**replay_arguments(sizes), **changes}


def ints(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


def memory(x):
    return {name: x[name] for name in ("pool", *RINGS) if x[name] is not None}


def assert_computed(found, x, expected, budget):
    """Compares o, the pool and the rings with expected ones."""
    out = {"o": found, **memory(x)}
    assert {name: error for name in expected if (error := relative_error(out[name], expected[name])) > budget} == {}


OFFSETS = {"lengths": (3, 3), **{name: y for name, y in SIZES.items() if name not in ("B", "T")}}
CONSTANT, UNGATED = {**SIZES, "gate_form": "constant"}, {**SIZES, "gates": "none"}
BAD = [
    (SIZES, {"slots": ints(4)}, ValueError, "ring_start has shape [2]; expected [N] with N=1"),
    (SIZES, dict.fromkeys(("slots", "ring_start", "num_accepted"), ints(4)), ValueError, "slots has 1 entries; exp"),
    (OFFSETS, dict.fromkeys(("slots", "ring_start", "num_accepted"), ints(4)), ValueError, "each sequence of cu_seq"),
    (SIZES, {"slots": torch.zeros(2)}, TypeError, "slots is float32; expected int32 or int64"),
    (SIZES, {"num_accepted": None}, TypeError, "num_accepted is NoneType; expected a tensor [N]"),
    (SIZES, {"has_state": ints(1, 1)}, TypeError, "has_state is int64; expected bool"),
    ({**SIZES, "L": 5}, {}, ValueError, "q has T = 3 tokens for each sequence and ring_k has L = 5; expected L of at"),
    ({**SIZES, "L": 1}, {}, ValueError, "ring_k has L = 1 tokens; expected 2 to 16: twice the tokens of a sequence"),
    ({**SIZES, "L": 17}, {}, ValueError, "ring_k has L = 17 tokens; expected 2 to 16: twice the tokens of a sequence"),
    (SIZES, {"ring_v": torch.ones(8, 5, 2, 3)}, ValueError, "ring_v has shape [8, 5, 2, 3]; expected [P, L, Hv, V]"),
    (SIZES, {"ring_k": torch.ones(8, 6, 2, 4).half()}, TypeError, "ring_k is float16; expected float32, as q"),
    (SIZES, {"ring_k": torch.ones(8, 6, 2, 8)[..., ::2]}, ValueError, "its last dimension must be contiguous"),
    (SIZES, {"ring_k": torch.ones(8, 1, 2, 4).expand(8, 6, 2, 4)}, ValueError, "ring_k has stride 0 along dimension"),
    (SIZES, {"ring_g": None}, ValueError, "ring_g is None and g has shape [2, 3, 2, 4]; expected memory [P, L,"),
    (SIZES, {"ring_g": torch.ones(8, 6, 2)}, ValueError, "ring_g has shape [8, 6, 2]; expected [P, L, Hv, K], because"),
    (SIZES, {"ring_g": torch.ones(8, 6, 2, 4).bfloat16()}, TypeError, "ring_g is bfloat16; expected float32"),
    (CONSTANT, {"ring_g": torch.ones(8, 6, 2)}, ValueError, "ring_g is given and g is constant; expected None"),
    (UNGATED, {"ring_g": torch.ones(8, 6, 2)}, ValueError, "ring_g is given and g is None; expected None"),
    (SIZES, {"pool": torch.ones(7, 2, 4, 3)}, ValueError, "pool has shape [7, 2, 4, 3]; expected [P, Hv, K, V]"),
    (SIZES, {"pool": torch.ones(8, 2, 4, 6)[..., ::2]}, ValueError, "its last dimension, or the one before, must be"),
    (SIZES, {"cu_seqlens": ints(0, 3, 6)}, ValueError, "cu_seqlens goes with B = 1; q has B = 2"),
    (SIZES, {"parents": ints(0, 0)}, ValueError, "parents is given; expected None: drafts are chains"),
    (SIZES, {"out": torch.ones(2, 3, 2, 4)}, ValueError, "out has shape [2, 3, 2, 4]; expected [B, T, Ho, V] with"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "changes", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_refused_with_a_message_before_anything_is_written(sizes, changes, error, message):
    x = arguments(sizes, **changes)
    before = {name: y.clone() for name, y in memory(x).items()}
    with pytest.raises(error, match=re.escape(message)):
        gla.recurrent_gla_replay(**x)
    assert all(torch.equal(y, before[name]) for name, y in memory(x).items())


BAD_VALUES = [
    (SIZES, {"slots": ints(4, 4)}, "slots[1] is 4, which sequence 0 writes too, by slots; expected no slot twice"),
    ({**OFFSETS, "lengths": (4, 2)}, {}, "sequence 0 has 4 tokens; a ring of L = 6 tokens serves 3"),
    (SIZES, {"pool": torch.full((8, 2, 4, 3), torch.nan)}, "pool holds NaN in 48 of 48 places"),
    (SIZES, {"ring_v": torch.full((8, 6, 2, 3), torch.nan)}, "ring_v holds NaN in 24 of 24 places"),
    (SIZES, {"g": torch.ones(2, 3, 2, 4)}, "g has values up to 1.0; expected the log of a forget gate"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "changes", "message"), BAD_VALUES, ids=lambda x: x if isinstance(x, str) else "")
def test_values_are_checked_on_request(sizes, changes, message, check_values):
    with pytest.raises(ValueError, match=re.escape(message)):
        gla.recurrent_gla_replay(**arguments(sizes, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": ints(-1, -1)},
        {"has_state": torch.tensor([False, False]), "pool": torch.full((8, 2, 4, 3), torch.nan)},
        {"num_accepted": ints(9, -1)},
        {"num_accepted": ints(0, 0), "ring_k": torch.full((8, 6, 2, 4), torch.nan)},
    ],
)
def test_good_values_pass_the_checks(changes, check_values):
    x = arguments(**changes)
    expected = oracle_results("recurrent_gla_replay", x)
    assert_computed(gla.recurrent_gla_replay(**x), x, expected, FORWARD[torch.float32])


@settings(max_examples=30)
@given(replay_calls(dtype=torch.float64))
def test_any_call(x):
    expected = oracle_results("recurrent_gla_replay", x)
    assert_computed(gla.recurrent_gla_replay(**x), x, expected, 1e-12)


# ---- servers


class Request:
    """A request of a server: the state after its accepted tokens, which steps compute one by one."""

    def __init__(self, slot):
        self.slot, self.start, self.accepted, self.is_new = slot, 0, 0, True
        self.state = torch.zeros(1, 2, 4, 3, dtype=torch.float64)


def served(requests, x, pool, rings):
    """Returns o of a call with packed tokens x, one sequence for each request."""
    numbers = (ints(*(getattr(each, name) for each in requests)) for name in ("slot", "start", "accepted"))
    old = torch.tensor([not each.is_new for each in requests])
    o = gla.recurrent_gla_replay(x.q, x.k, x.v, x.g, pool, *rings, *numbers, cu_seqlens=x.cu_seqlens, has_state=old)
    for each in requests:
        each.start, each.is_new = (each.start + each.accepted) % rings[0].shape[1], False
    return o


def steps_of(request, x, a, b):
    """Returns o of the tokens a to b, and the states before, between and after them, by steps one by one."""
    outs, states = [], [request.state]
    for t in range(a, b):
        o, state = gla.recurrent_gla_step(*(y[:, t] for y in (x.q, x.k, x.v, x.g)), states[-1])
        outs.append(o)
        states.append(state)
    return outs, states


def test_a_server_equals_steps_over_the_accepted_tokens():
    """Requests come and go in dirty slots, with drafts of any length; at the end the pool holds their states."""
    numbers = random.Random(0)
    pool = torch.randn(5, 2, 4, 3, dtype=torch.float64)
    rings = [torch.full((5, 7, 2, width), torch.nan, dtype=torch.float64) for width in (4, 3, 4)]
    free, requests = list(range(5)), []
    for call in range(25):
        while requests and (len(requests) > 3 or numbers.random() < 0.2):
            free.append(requests.pop(numbers.randrange(len(requests))).slot)
        requests.append(Request(free.pop(numbers.randrange(len(free)))))
        lengths = tuple(numbers.randint(0, 3) for _ in requests)
        x = gla_inputs(lengths=lengths, H=2, K=4, V=3, dtype=torch.float64, seed=call)
        o = served(requests, x, pool, rings)
        for each, (a, b) in zip(requests, itertools.pairwise(x.cu_seqlens.tolist()), strict=True):
            assert relative_error(pool[each.slot], each.state[0]) <= 1e-12
            outs, states = steps_of(each, x, a, b)
            assert all(relative_error(o[:, a + i], y) <= 1e-12 for i, y in enumerate(outs))
            each.accepted = numbers.randint(0, b - a)
            each.state = states[each.accepted]
    served(requests, gla_inputs(lengths=(0,) * len(requests), H=2, K=4, V=3, dtype=torch.float64), pool, rings)
    assert all(relative_error(pool[each.slot], each.state[0]) <= 1e-12 for each in requests)


def test_it_gives_the_outputs_of_recurrent_gla_steps():
    """Both ways of verifying drafts, after a prompt: the same accepted tokens give the same outputs and states."""
    x = gla_inputs(B=2, T=9, H=2, K=4, V=3, dtype=torch.float64)
    pool, slots = torch.zeros(2, 2, 4, 3, dtype=torch.float64), ints(0, 1)
    rings = [torch.zeros(2, 6, 2, width, dtype=torch.float64) for width in (4, 3, 4)]
    many, places = torch.zeros(6, 2, 4, 3, dtype=torch.float64), torch.arange(6).reshape(2, 3)
    start, accepted = ints(0, 0), ints(0, 0)
    for call, next_accepted in enumerate((ints(3, 1), ints(2, 3), ints(1, 1))):
        tokens = [y[:, 3 * call : 3 * call + 3] for y in (x.q, x.k, x.v, x.g)]
        o = gla.recurrent_gla_replay(*tokens, pool, *rings, slots, start, accepted)
        assert relative_error(o, gla.recurrent_gla_steps(*tokens, many, places, num_accepted=accepted)) <= 1e-12
        start, accepted = (start + accepted) % 6, next_accepted
    none = [y[:, :0] for y in (x.q, x.k, x.v, x.g)]
    assert gla.recurrent_gla_replay(*none, pool, *rings, slots, start, accepted).shape == (2, 0, 2, 3)
    assert relative_error(pool, many[[0, 3]]) <= 1e-12  # one token of the last call was accepted


# ---- PyTorch


@pytest.mark.parametrize("name", ["v", "pool", "ring_k"])
def test_it_has_no_backward(name):
    x = arguments()
    x[name].requires_grad_()
    with pytest.raises(RuntimeError, match="recurrent_gla_replay has no backward and an input requires a gradient"):
        gla.recurrent_gla_replay(**x)
    with torch.no_grad():
        gla.recurrent_gla_replay(**x)


@pytest.mark.parametrize("written", ["pool", "ring_k", "ring_v", "ring_g", "out"])
def test_what_it_writes_is_seen_by_autograd(written):
    x = arguments(out=torch.ones(2, 3, 2, 3))
    loss = (torch.ones(1, requires_grad=True) * x[written]).sum()
    gla.recurrent_gla_replay(**x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_vmap_is_refused():
    x = arguments()
    with pytest.raises(NotImplementedError, match="transforms no op that writes a pool or a state"):
        torch.vmap(lambda q: gla.recurrent_gla_replay(**{**x, "q": q}))(x["q"][None])


def test_one_graph_writes_the_pool_the_rings_and_out():
    def function(y, x):
        return gla.recurrent_gla_replay(**{**x, "q": y * 1.0}) + 1

    x = arguments(out=torch.zeros(2, 3, 2, 3))
    expected = oracle_results("recurrent_gla_replay", {name: y for name, y in x.items() if name != "out"})
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_computed(compiled(x["q"], x) - 1, x, expected, 1e-5)
    assert relative_error(x["out"], expected["o"]) <= 1e-5


# ---- backends


def plain(q, k, v, g, state, scale, state_indices, inplace):
    """Computes recurrent_gla_step without an optional argument, as a third party's backend may."""
    return STEP_OP(q, k, v, g, state, scale, state_indices, None, inplace)


def keyword_only(q, k, v, *, scale, g, state, state_indices, inplace):
    return plain(q, k, v, g, state, scale, state_indices, inplace)


@pytest.mark.parametrize("step", [plain, keyword_only, Prepared(lambda call: plain, arguments_of(plain))])
def test_any_step_replays(step):
    backend = Backend("mine", "1", {"recurrent_gla_replay": through_replay(step)}, Capabilities())
    with gla.register(backend):
        for options in ({}, {"gate": "logsigmoid", "gate_normalizer": 4}):
            x = arguments()
            expected = oracle_results("recurrent_gla_replay", x, gate_normalizer=options.get("gate_normalizer"))
            assert_computed(gla.recurrent_gla_replay(**x, **options, backend="mine"), x, expected, 1e-5)
        message = "under batch_invariant recurrent_gla_replay is computed part by part, by recurrent_gla_step, which"
        with gla.batch_invariant(64), pytest.raises(gla.NoBackendError, match=message):
            gla.recurrent_gla_replay(**arguments(), backend="mine")


@pytest.mark.parametrize("form", [None, *GATES])
def test_a_prepared_step_is_described_as_its_own_call_would_be(form):
    """`through_replay` prepares a step by the description of the tensors that it passes on, with log gates."""
    spec, step = ABSTRACT_OPS["recurrent_gla_replay"], ABSTRACT_OPS["recurrent_gla_step"]
    sizes = {"gate_form": form or "key", "gates": "mild" if form else "none", "dtype": torch.float16}
    x = arguments({**SIZES, **sizes})
    call = spec.describe(*spec.complete((), {**x, "scale": 1.0, "gate_normalizer": 16 if form else None}))
    token = {name: y if (y := x[name]) is None or y.ndim == 1 else y[:, 0].contiguous() for name in "qkvg"}
    token["g"] = None if form is None else token["g"].float()
    named = {**token, "state": torch.zeros(2, 2, 4, 3), "scale": 1.0}
    assert step_of_replay(call) == step.describe(*step.complete((), named))
