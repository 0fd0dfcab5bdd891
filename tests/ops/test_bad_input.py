"""Bad arguments are refused before anything runs: the message names the argument, what it was, what was expected."""

import contextlib
import functools
import inspect
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gla_core as gla
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.registry import get
from gla_core.ops import PUBLIC_OPS
from gla_core.workloads.inputs import arguments as arguments_of
from gla_core.workloads.inputs import gla_inputs
from gla_core.workloads.named import select


def chunk_arguments(**changes):
    x = gla_inputs(B=2, T=6, H=2, G=2, K=4, V=3)
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g, **changes}


def packed_arguments(**changes):
    x = gla_inputs(lengths=(2, 4), H=2, K=4, V=3)
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "cu_seqlens": x.cu_seqlens, **changes}


def step_arguments(**changes):
    x = gla_inputs(B=2, T=1, H=2, G=2, K=4, V=3, initial_state=True)
    token = {name: getattr(x, name)[:, 0] for name in "qkvg"}
    return {**token, "state": x.initial_state, **changes}


def attention_arguments(**changes):
    return {"q": torch.randn(2, 6, 4, 8), "k": torch.randn(2, 5, 2, 8), "v": torch.randn(2, 5, 2, 3), **changes}


ones = torch.ones
BAD_CHUNK = [
    ({"q": ones(2, 6, 4)}, "q has shape [2, 6, 4]; expected [B, T, Hq, K]"),
    ({"q": [1.0]}, "q is list; expected a tensor [B, T, Hq, K]", TypeError),
    ({"q": np.ones((2, 6, 4, 4))}, "q is ndarray; expected a tensor", TypeError),
    ({"k": ones(2, 5, 2, 4)}, "k has shape [2, 5, 2, 4]; expected [B, T, H, K] with B=2, T=6, K=4"),
    ({"k": None}, "k is NoneType; expected a tensor [B, T, H, K]", TypeError),
    ({"v": ones(2, 5, 2, 3)}, "v has shape [2, 5, 2, 3]; expected [B, T, Hv, V] with B=2, T=6"),
    ({"v": ones(2, 6, 3, 3)}, "v has 3 heads; expected a multiple of k's 2"),
    ({"v": ones(2, 6, 1, 3), "g": None}, "v has 1 heads; expected a multiple of k's 2"),
    (
        {"v": ones(2, 6, 6, 3)},
        "q has 4 heads, v has 6 and k has 2; expected groups of queries or of values, not both: repeat the heads of k",
    ),
    ({"g": [-1.0]}, "g is list; expected a tensor [B, T, Hv, K]", TypeError),
    ({"k": ones(2, 6, 3, 4), "v": ones(2, 6, 3, 3), "g": None}, "q has 4 heads; expected a multiple of k's 3"),
    ({"k": ones(2, 6, 0, 4), "v": ones(2, 6, 0, 3)}, "H is 0; expected at least 1"),
    ({"q": ones(2, 6, 4, 0), "k": ones(2, 6, 2, 0), "g": None}, "K is 0; expected at least 1"),
    ({"v": ones(2, 6, 2, 0)}, "V is 0; expected at least 1"),
    ({"q": ones(2, 6, 4, 4).int()}, "q is int32; expected float64 or float32 or float16 or bfloat16", TypeError),
    ({"k": ones(2, 6, 2, 4).half()}, "k is float16; expected float32, as q", TypeError),
    ({"v": ones(2, 6, 2, 3).double()}, "v is float64; expected float32, as q", TypeError),
    ({"g": -ones(2, 6, 2, 4).double()}, "g is float64; expected float32, as q or float32", TypeError),
    ({"k": ones(2, 6, 2, 4, device="meta")}, "k is on meta and q is on cpu; move them to one device"),
    ({"scale": "1"}, "scale is str; expected a number or None", TypeError),
    ({"scale": True}, "scale is bool; expected a number or None", TypeError),
    ({"output_final_state": 1}, "output_final_state is int; expected True or False", TypeError),
    ({"initial_state": ones(1, 2, 4, 3)}, "initial_state has shape [1, 2, 4, 3]; expected [N, Hv, K, V] with N=2"),
    (
        {"initial_state": ones(2, 2, 4, 3).half()},
        "initial_state is float16; expected float32 with torch.float32",
        TypeError,
    ),
    ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens goes with B = 1; q has B = 2: pack the sequences"),
]
BAD_PACKED = [
    ({"max_seqlen": 2.5}, "max_seqlen is float; expected an integer or None", TypeError),
    ({"max_seqlen": -1}, "max_seqlen is -1; expected the tokens of the longest sequence, or None"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens is float32; expected int32 or int64", TypeError),
    ({"cu_seqlens": torch.tensor([[0, 6]])}, "cu_seqlens has shape [1, 2]; expected [N+1]"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "cu_seqlens is empty; expected N+1 offsets"),
    ({"cu_seqlens": [0, 6]}, "cu_seqlens is list; expected a tensor [N+1]", TypeError),
    ({"cu_seqlens": ones(3, dtype=torch.int64, device="meta")}, "cu_seqlens is on meta and q is on cpu"),
    ({"initial_state": ones(1, 2, 4, 3)}, "initial_state has shape [1, 2, 4, 3]; expected [N, Hv, K, V] with N=2"),
]
BAD_STEP = [
    ({"q": ones(2, 1, 4, 4)}, "q has shape [2, 1, 4, 4]; expected [B, Hq, K]"),
    ({"k": ones(3, 2, 4)}, "k has shape [3, 2, 4]; expected [B, H, K] with B=2, K=4"),
    ({"v": ones(2, 2, 3).half()}, "v is float16; expected float32, as q", TypeError),
    ({"v": ones(2, 3, 3)}, "v has 3 heads; expected a multiple of k's 2"),
    ({"v": ones(2, 4, 3)}, "q has 4 heads, v has 4 and k has 2; expected groups of queries or of values, not both"),
    ({"state": ones(3, 2, 4, 3)}, "state has shape [3, 2, 4, 3]; expected [P, Hv, K, V] with P=2"),
    (
        {"q": ones(2, 2, 4), "v": ones(2, 6, 3), "g": None},
        "state has shape [2, 2, 4, 3]; expected [P, Hv, K, V] with P=2, Hv=6",
    ),
    ({"state": ones(2, 2, 4, 3).double()}, "state is float64; expected float32 or bfloat16 or float16", TypeError),
    ({"state": None}, "state is NoneType; expected a tensor [P, Hv, K, V]", TypeError),
    ({"bonus": ones(4, 4)}, "bonus has shape [4, 4]; expected [H, K] with H=2, K=4"),
    ({"bonus": ones(2, 4).half()}, "bonus is float16; expected float32, as q or float32", TypeError),
    ({"bonus": 1.0}, "bonus is float; expected a tensor [H, K]", TypeError),
    ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots has shape [3]; expected [B] with B=2"),
    ({"slots": torch.zeros(2)}, "slots is float32; expected int32 or int64", TypeError),
    ({"slots": ones(2, dtype=torch.int64, device="meta")}, "slots is on meta and q is on cpu"),
    ({"inplace": "yes"}, "inplace is str; expected True or False", TypeError),
    (
        {"inplace": True, "state": ones(2, 2, 4, 6)[..., ::2]},
        "state has strides (48, 24, 6, 2) and is written in place; its last dimension, or the one before, must be",
    ),
    ({"scale": None, "q": ones(2, 4, 0), "k": ones(2, 2, 0), "g": None}, "K is 0; expected at least 1"),
]
BAD_ATTENTION = [
    ({"k": ones(2, 5, 3, 8)}, "v has shape [2, 5, 2, 3]; expected [B, Tk, H, V] with B=2, Tk=5, H=3"),
    ({"k": ones(1, 5, 2, 8)}, "k has shape [1, 5, 2, 8]; expected [B, Tk, H, K] with B=2, K=8"),
    ({"q": ones(2, 6, 3, 8)}, "q has 3 heads; expected a multiple of k's 2"),
    ({"q": ones(2, 6, 4, 8).half()}, "k is float32; expected float16, as q", TypeError),
    ({"causal": None}, "causal is NoneType; expected True or False", TypeError),
    ({"scale": [1]}, "scale is list; expected a number or None", TypeError),
]
BAD_SOFTMAX = [
    ({"x": 3.0}, "x is float; expected a tensor", TypeError),
    ({"x": torch.tensor(3.0)}, "x has no dimension; expected at least one"),
    ({"x": torch.arange(3)}, "x is int64; expected float64", TypeError),
    ({"x": ones(2, 3), "dim": 2}, "dim is 2; x has 2 dimensions: expected -2 to 1"),
    ({"x": ones(2, 3), "dim": -3}, "dim is -3; x has 2 dimensions: expected -2 to 1"),
    ({"x": ones(2, 3), "dim": "last"}, "dim is str; expected an integer", TypeError),
]
CASES = [
    pytest.param(
        function, arguments(**changes), *(error or [ValueError]), message, id=f"{function.__name__}: {message[:60]}"
    )
    for function, arguments, bad in (
        (gla.chunk_gla, chunk_arguments, BAD_CHUNK),
        (gla.chunk_gla, packed_arguments, BAD_PACKED),
        (gla.recurrent_gla_step, step_arguments, BAD_STEP),
        (gla.softmax_attention, attention_arguments, BAD_ATTENTION),
        (gla.online_softmax, dict, BAD_SOFTMAX),
    )
    for changes, message, *error in bad
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), CASES)
def test_refused_with_a_message(function, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        function(**arguments)


def summary_arguments(**changes):
    return {name: x for name, x in chunk_arguments(**changes).items() if name != "q"}


ANY_FORM = "[Hv] or [B, T, Hv] or [B, T, Hv, K]"
CONSTANT, PER_HEAD, PER_KEY = (
    "[Hv] with Hv=2",
    "[B, T, Hv] with B=2, T=6, Hv=2",
    "[B, T, Hv, K] with B=2, T=6, Hv=2, K=4",
)
BAD_GATES = [
    ((3,), CONSTANT),
    ((1,), CONSTANT),
    ((2, 5, 2), PER_HEAD),
    ((2, 6, 4), PER_HEAD),
    ((1, 6, 2), PER_HEAD),
    ((2, 6, 2, 1), PER_KEY),
    ((2, 6, 4, 4), PER_KEY),
    ((), ANY_FORM),
    ((2, 6), ANY_FORM),
    ((2, 6, 2, 4, 1), ANY_FORM),
]


@pytest.mark.parametrize(("shape", "expected"), BAD_GATES)
def test_a_gate_of_no_form_is_refused(shape, expected):
    with pytest.raises(ValueError, match=re.escape(f"g has shape {list(shape)}; expected {expected}")):
        gla.chunk_gla(**chunk_arguments(g=-ones(shape)))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4,), "[Hv] with Hv=2"),
        ((2, 1), "[B, Hv] with B=2, Hv=2"),
        ((3, 2), "[B, Hv] with B=2, Hv=2"),
        ((2, 2, 5), "[B, Hv, K] with B=2, Hv=2, K=4"),
        ((2, 2, 1), "[B, Hv, K] with B=2, Hv=2, K=4"),
        ((2, 1, 2, 4), "[Hv] or [B, Hv] or [B, Hv, K]"),
    ],
)
def test_a_gate_of_no_form_is_refused_by_a_step(shape, expected):
    with pytest.raises(ValueError, match=re.escape(f"g has shape {list(shape)}; expected {expected}")):
        gla.recurrent_gla_step(**step_arguments(g=-ones(shape)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": ones(2, 6, 3, 3), "g": None}, "k has 2 heads and v has 3; expected a multiple of one another"),
        ({"v": ones(2, 6, 1, 3), "g": None}, "k has 2 heads; expected 1, as v, or a divisor of it"),
        ({"k": ones(2, 6, 4, 4)}, "k has 4 heads; expected 2, as g, or a divisor of it"),
        ({"v": ones(2, 6, 4, 3)}, "v has 4 heads; expected 2, with 2 of k and 2 of g"),
        ({"g": -ones(3)}, "k has 2 heads and g has 3; expected a multiple of one another"),
        ({"g": -ones(2, 6, 4)}, "v has 2 heads; expected 4, with 2 of k and 4 of g"),
        ({"g": -ones(2, 5, 2)}, "g has shape [2, 5, 2]; expected [B, T, Hv] with B=2, T=6"),
        ({"g": -ones(2, 6, 2, 1)}, "g has shape [2, 6, 2, 1]; expected [B, T, Hv, K] with B=2, T=6, K=4"),
        ({"g": -ones(2, 6)}, f"g has shape [2, 6]; expected {ANY_FORM}"),
    ],
)
def test_heads_of_a_summary_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gla.chunk_gla_summary(**summary_arguments(**changes))


@pytest.fixture
def keys_only():
    """Registers a backend that takes gates per key only, and no groups of value heads."""
    ops = get("reference").ops
    with gla.register(Backend("keys_only", "0", dict(ops), Capabilities())):
        yield "keys_only"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"g": -ones(2, 6, 2)},
            "takes a gate for each key [B, T, Hv, K]; g has one for each token and head [B, T, Hv]: expand it, or",
        ),
        ({"g": -ones(2)}, "takes a gate for each key [B, T, Hv, K]; g has one for each head [Hv]: expand it, or"),
        (
            {"q": ones(2, 6, 2, 4), "v": ones(2, 6, 6, 3), "g": None},
            "has no groups of value heads; v has 6 heads and k has 2",
        ),
    ],
)
def test_a_backend_without_the_form_refuses_it(keys_only, changes, message):
    arguments = chunk_arguments(**changes)
    with pytest.raises(gla.NoBackendError, match=re.escape(f"{keys_only}: {message}")):
        gla.chunk_gla(**arguments, backend=keys_only)
    gla.chunk_gla(**arguments, backend=f"{keys_only},reference")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (gla.chunk_gla, chunk_arguments(k=ones(2, 5, 2, 4)), "k has shape [2, 5, 2, 4]; expected [B, T, H, K]"),
        (gla.chunk_gla, packed_arguments(initial_state=ones(1, 2, 4, 3)), "initial_state has shape [1, 2, 4, 3]"),
        (gla.softmax_attention, attention_arguments(q=ones(2, 6, 3, 8)), "q has 3 heads; expected a multiple of k's 2"),
        (gla.online_softmax, {"x": ones(2, 3), "dim": 2}, "dim is 2; x has 2 dimensions"),
    ],
)
def test_refused_alike_where_a_gradient_is_needed(function, arguments, message):
    first, *_ = arguments
    arguments = {**arguments, first: arguments[first].detach().requires_grad_()}
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**arguments)


def test_a_refused_step_writes_nothing():
    arguments = step_arguments(k=ones(2, 2, 5), inplace=True)
    before = arguments["state"].clone()
    with pytest.raises(ValueError, match="k has shape"):
        gla.recurrent_gla_step(**arguments)
    assert torch.equal(arguments["state"], before)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "state", "bonus"])
def test_a_step_has_no_backward(name):
    arguments = step_arguments(bonus=ones(2, 4))
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match="recurrent_gla_step has no backward"):
        gla.recurrent_gla_step(**arguments)
    with torch.no_grad():
        gla.recurrent_gla_step(**arguments)


def test_a_bad_call_after_a_good_one_of_the_same_function():
    """Facts learned from good arguments must not let bad ones pass."""
    gla.chunk_gla(**chunk_arguments())
    with pytest.raises(TypeError, match="k is float16"):
        gla.chunk_gla(**chunk_arguments(k=ones(2, 6, 2, 4).half()))
    with pytest.raises(TypeError, match="scale is str"):
        gla.chunk_gla(**chunk_arguments(scale="1"))


BAD_VALUES = [
    (gla.chunk_gla, chunk_arguments(g=ones(2, 6, 2, 4)), "g has values up to 1.0; expected the log of a forget gate"),
    (gla.chunk_gla, chunk_arguments(v=torch.full((2, 6, 2, 3), torch.nan)), "v holds NaN in 72 of 72 places"),
    (gla.chunk_gla, packed_arguments(cu_seqlens=torch.tensor([0, 7])), "expected offsets from 0 to T = 6 that do not"),
    (gla.chunk_gla, packed_arguments(cu_seqlens=torch.tensor([-1, 6])), "expected offsets from 0 to T = 6 that do not"),
    (
        gla.chunk_gla,
        packed_arguments(cu_seqlens=torch.tensor([0, 4, 3, 6])),
        "is [0, 4, 3, 6]; expected offsets from 0",
    ),
    (
        gla.chunk_gla,
        packed_arguments(cu_seqlens=torch.tensor([0, 5, 6]), max_seqlen=4),
        "max_seqlen is 4; the longest sequence of cu_seqlens has 5 tokens",
    ),
    (gla.recurrent_gla_step, step_arguments(g=ones(2, 2, 4)), "g has values up to 1.0"),
    (gla.recurrent_gla_step, step_arguments(slots=torch.tensor([0, 2])), "slots holds 2; the pool has 2"),
    (gla.recurrent_gla_step, step_arguments(slots=torch.tensor([1, 1])), "expected no state twice"),
    (gla.online_softmax, {"x": torch.tensor([torch.nan])}, "x holds NaN in 1 of 1 places"),
    (gla.softmax_attention, attention_arguments(k=torch.full((2, 5, 2, 8), torch.nan)), "k holds NaN"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD_VALUES)
def test_values_are_checked_on_request(function, arguments, message, check_values):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**arguments)


@pytest.mark.parametrize(("function", "arguments", "message"), BAD_VALUES[:2] + BAD_VALUES[6:])
def test_values_are_not_read_otherwise(function, arguments, message):
    function(**arguments)


def test_values_of_meta_tensors_are_not_checked(check_values):
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in packed_arguments().items()}
    assert gla.chunk_gla(**meta)[0].device.type == "meta"
    assert gla.online_softmax(torch.empty(3, 4, device="meta")).shape == (3, 4)


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_other_libraries_are_numbers(half):
    q = chunk_arguments()["q"].clone().requires_grad_()
    for arguments in (chunk_arguments(), chunk_arguments(q=q)):
        assert torch.equal(gla.chunk_gla(**arguments, scale=half)[0], gla.chunk_gla(**arguments, scale=0.5)[0])
    attention = attention_arguments()
    assert torch.equal(*(gla.softmax_attention(**attention, scale=scale)[0] for scale in (half, 0.5)))
    step = step_arguments()
    assert torch.equal(*(gla.recurrent_gla_step(**step, scale=scale)[0] for scale in (half, 0.5)))


class Index:
    """An integer of a library that derives it from no number."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


INTEGERS = {"checkpoint_every": 64, "max_seqlen": 99, "pad_slot": 1, "dim": 0}
"""A legal value of every argument that takes an integer."""


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("op", PUBLIC_OPS)
def test_integers_of_other_libraries_are_integers(op, name):
    """They are, with PyTorch's dispatcher and without it; flags, floats and tensors are not."""
    if name not in inspect.signature(getattr(gla, op)).parameters:
        return
    workload = next(w for w in select(op, ["ci"]) if w.sizes.get("lengths") or op == "online_softmax")

    def results(value):
        x = arguments_of(workload) | {name: value}
        return getattr(gla, op)(**x), *(y for y in x.values() if isinstance(y, torch.Tensor))

    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with mode:
            expected = results(INTEGERS[name])
            for kind in (np.int64, np.uint8, Index):
                torch.testing.assert_close(results(kind(INTEGERS[name])), expected, rtol=0, atol=0, equal_nan=True)
    for wrong in (True, np.bool_(True), 64.0, np.float32(64), torch.tensor(64)):
        with pytest.raises(TypeError, match=f"{name} is {type(wrong).__name__}; expected an integer"):
            results(wrong)


def test_every_argument_that_takes_an_integer_is_tested():
    kinds = {a.name for spec in PUBLIC_OPS.values() for a in spec.arguments if "Int" in a.type or "int" in a.type}
    assert kinds == {*INTEGERS, "gate_normalizer"}  # which takes any number, if it is whole


def test_good_values_pass_the_checks(check_values):
    gla.chunk_gla(**chunk_arguments())
    gla.chunk_gla(**packed_arguments(cu_seqlens=torch.tensor([0, 0, 6]), max_seqlen=6))
    gla.recurrent_gla_step(**step_arguments(slots=torch.tensor([-1, -1])))
    gla.softmax_attention(**attention_arguments())
    gla.online_softmax(torch.ones(3))


LAYOUTS = {
    op: name
    for op, spec in PUBLIC_OPS.items()
    for name in ("initial_state", "state", "pool")
    if name in spec.parameters
}
"""The state of every op that takes states with V before K."""


def wrong_states(state):
    """Yields states that no op takes in place of `state` [.., V, K], and the shapes that messages have to tell."""
    *outer, V, K = state.shape
    yield state.mT.contiguous(), [*outer, K, V]
    yield state.new_zeros(*outer, V, K + 1), [*outer, V, K + 1]
    yield state.new_zeros(V), [V]
    yield state.new_zeros(1, *outer, V, K), [1, *outer, V, K]


@pytest.mark.parametrize("how", ["eager", "dispatcher", "gradient"])
@pytest.mark.parametrize("op", LAYOUTS)
def test_messages_have_the_shapes_of_states_as_they_were_given(op, how):
    name, workload = LAYOUTS[op], next(w for w in select(op, ["ci"]) if w.name == "odd_widths")
    x = arguments_of(workload)
    if name == "initial_state":
        values = x["x" if op == "chunk_ssd" else "v"]
        x[name] = torch.zeros(len(x["q"]), values.shape[2], x["k"].shape[3], values.shape[3])
        x["q"].requires_grad_(how == "gradient" and PUBLIC_OPS[op].differentiable)
    state = x.pop(name).mT.contiguous()
    function = functools.partial(getattr(gla, op), **x, state_v_first=True)
    with FlopCounterMode(display=False) if how == "dispatcher" else contextlib.nullcontext():
        function(**{name: state})
        sizes = f"V={state.shape[-2]}, K={state.shape[-1]}"
        for wrong, shape in wrong_states(state):
            message = rf"{name} has shape {re.escape(str(shape))}; expected \[\w, Hv, V, K\] with .*{sizes}$"
            with pytest.raises(ValueError, match=message):
                function(**{name: wrong})
    if how != "dispatcher":  # which checks types itself
        with pytest.raises(TypeError, match=rf"{name} is list; expected a tensor \[\w, Hv, V, K\]"):
            function(**{name: [1.0]})


def test_every_op_with_states_in_two_layouts_is_tested():
    taking = {op for op in PUBLIC_OPS if "state_v_first" in inspect.signature(getattr(gla, op)).parameters}
    assert taking == {*LAYOUTS, "chunk_gla_summary"}  # which returns states alone


def test_strides_are_told_as_they_were_given():
    x = step_arguments(state=ones(2, 2, 3, 8)[..., ::2], inplace=True)
    with pytest.raises(ValueError, match=re.escape("state has strides (48, 24, 8, 2) and is written in place")):
        gla.recurrent_gla_step(**x, state_v_first=True)


@pytest.mark.parametrize("v_first", [False, True])
def test_linear_attention_tells_shapes_without_its_own_column(v_first):
    q, k, v = ones(2, 6, 2, 4), ones(2, 6, 2, 4), ones(2, 6, 2, 3)
    with pytest.raises(ValueError, match=re.escape("v has shape [2, 5, 2, 3]; expected [B, T, Hv, V] with B=2, T=6")):
        gla.linear_attention(q, k, v[:, :5])
    wrong, names = ones(2, 2, 3, 3), "[N, Hv, V+1, K]" if v_first else "[N, Hv, K, V+1]"
    with pytest.raises(ValueError, match=re.escape(f"initial_state has shape [2, 2, 3, 3]; expected {names} with")):
        gla.linear_attention(q, k, v, initial_state=wrong, state_v_first=v_first)
