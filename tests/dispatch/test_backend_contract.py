"""The contract: a backend's data becomes refusals, predictions and errors at registration."""

import dataclasses
import functools
import re

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import (
    OP_PARAMETERS,
    Backend,
    Capabilities,
    CostModel,
    LaunchError,
    Layout,
    OpCall,
    Prepared,
    shipped_constants,
)

DIMS = {"B": 2, "T": 64, "H": 2, "Hq": 2, "Hv": 2, "K": 32, "V": 48, "N": 2}
CPU_CALL = OpCall(op="chunk_gla_fwd", device=torch.device("cpu"), dtype=torch.float32, dims=DIMS)
CUDA_CALL = dataclasses.replace(CPU_CALL, device=torch.device("cuda", 0))


def chunk_gla_fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    raise AssertionError("a refusal runs nothing")


def softmax(x, dim):
    return torch.softmax(x, dim)


def gla_backend(supports=lambda call: None, cost=None, **capabilities):
    return Backend("mine", "1.0", {"chunk_gla_fwd": chunk_gla_fwd}, Capabilities(**capabilities), supports, cost)


# Capabilities


@pytest.mark.parametrize(
    ("capabilities", "change", "sentence"),
    [
        ({"devices": frozenset({"cuda"})}, {}, "needs a cuda device; q is on cpu"),
        ({"devices": frozenset({"cuda", "xpu"})}, {}, "needs a cuda or xpu device; q is on cpu"),
        ({"devices": frozenset({"cuda", "xpu", "mps"})}, {}, "needs a cuda, mps or xpu device; q is on cpu"),
        ({"dtypes": frozenset({torch.bfloat16})}, {}, "computes bfloat16; q is float32"),
        (
            {"dtypes": frozenset({torch.float16, torch.bfloat16})},
            {"dtype": torch.float64},
            "computes bfloat16 or float16; q is float64",
        ),
        ({"key_widths": range(64, 257)}, {}, "computes K from 64 to 256; K is 32"),
        (
            {"key_widths": range(16, 257, 16)},
            {"dims": {**DIMS, "K": 24}},
            "computes K from 16 to 256 in steps of 16; K is 24",
        ),
        ({"value_widths": range(1, 33)}, {}, "computes V from 1 to 32; V is 48"),
        (
            {"variable_length": False},
            {"variable_length": True},
            "has no packed sequences; call it per sequence, without cu_seqlens",
        ),
        ({"grouped_queries": False}, {"dims": {**DIMS, "Hq": 8}}, "has no grouped queries; q has 8 heads and k has 2"),
        ({}, {"dims": {**DIMS, "Hv": 8}}, "has no groups of value heads; v has 8 heads and k has 2"),
        (
            {},
            {"gate_form": "head"},
            "takes a gate for each key [B, T, Hv, K]; g has one for each token and head [B, T, Hv]: "
            "expand it, or request another backend",
        ),
        (
            {"gates": frozenset({"key", "head"})},
            {"gate_form": "constant"},
            "takes a gate for each token and head [B, T, Hv] or for each key [B, T, Hv, K]; "
            "g has one for each head [Hv]: expand it, or request another backend",
        ),
        ({"gradients": False}, {"needs_grad": True}, "has no gradients; call it under torch.no_grad()"),
        (
            {"deterministic": False},
            {"deterministic": True},
            "is not deterministic; torch.use_deterministic_algorithms is on",
        ),
        ({"cuda_graphs": False}, {"capturing": True}, "cannot be captured into a CUDA graph"),
    ],
)
def test_a_call_beyond_the_capabilities_is_refused_with_a_sentence(capabilities, change, sentence):
    assert gla_backend(**capabilities).refusal(dataclasses.replace(CPU_CALL, **change)) == sentence


@pytest.mark.parametrize(
    ("capabilities", "change"),
    [
        ({"devices": frozenset({"cpu"})}, {}),
        ({"devices": None}, {"device": torch.device("meta")}),
        ({"dtypes": frozenset({torch.float32})}, {}),
        ({"min_compute_capability": (9, 0)}, {}),  # not looked at on a CPU
        ({"key_widths": range(32, 33), "value_widths": range(48, 49)}, {}),
        ({"variable_length": False}, {}),
        ({"variable_length": True}, {"variable_length": True}),
        ({"grouped_queries": False}, {}),
        ({"grouped_queries": True}, {"dims": {**DIMS, "Hq": 8}}),
        ({"grouped_values": True}, {"dims": {**DIMS, "Hv": 8}}),
        ({}, {"gate_form": "key"}),
        ({"gates": frozenset()}, {"gate_form": None}),
        ({"gates": frozenset({"constant", "head"})}, {"gate_form": "head"}),
        ({"gradients": False}, {}),
        ({"gradients": True}, {"needs_grad": True}),
        ({"deterministic": False}, {}),
        ({"deterministic": True}, {"deterministic": True}),
        ({"cuda_graphs": False}, {}),
        ({"cuda_graphs": True}, {"capturing": True}),
    ],
)
def test_a_call_within_the_capabilities_is_accepted(capabilities, change):
    assert gla_backend(**capabilities).refusal(dataclasses.replace(CPU_CALL, **change)) is None


@pytest.mark.parametrize(
    ("have", "sentence"),
    [
        ((7, 5), "needs compute capability 8.6; cuda:0 has 7.5"),
        ((8, 0), "needs compute capability 8.6; cuda:0 has 8.0"),
        ((8, 6), None),
        ((9, 0), None),
        ((10, 0), None),  # tuples, not texts, are compared
    ],
)
def test_compute_capability(monkeypatch, have, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: have)
    assert gla_backend(min_compute_capability=(8, 6)).refusal(CUDA_CALL) == sentence


def test_compute_capability_is_not_asked_for_where_none_is_needed(monkeypatch):
    def no_device(device):
        raise AssertionError("the device was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", no_device)
    assert gla_backend().refusal(CUDA_CALL) is None


def test_a_cuda_call_is_refused_where_there_is_no_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for capabilities in ({}, {"min_compute_capability": (8, 0)}, {"devices": frozenset({"cuda"})}):
        refusal = gla_backend(**capabilities).refusal(CUDA_CALL)
        assert refusal == "PyTorch sees no CUDA device here; the call is for cuda:0"


def test_the_subject_of_online_softmax_is_x():
    backend = Backend("mine", "1.0", {"online_softmax": softmax}, Capabilities(devices=frozenset({"cuda"})))
    call = OpCall(op="online_softmax", device=torch.device("cpu"), dtype=torch.float32, dims={"rows": 2, "columns": 3})
    assert backend.refusal(call) == "needs a cuda device; x is on cpu"
    assert Backend("mine", "1.0", {"online_softmax": softmax}).refusal(call) is None


def test_an_op_it_does_not_implement_is_refused_naming_those_it_does():
    call = dataclasses.replace(CPU_CALL, op="chunk_gla_bwd")
    assert gla_backend().refusal(call) == "does not implement chunk_gla_bwd; it implements chunk_gla_fwd"
    assert Backend("empty", "1.0", {}).refusal(call) == "does not implement chunk_gla_bwd; it implements no op"


# supports


def test_supports_refuses_with_its_own_reason():
    backend = gla_backend(
        supports=lambda call: f"T must be even; it is {call.dims['T']}" if call.dims["T"] % 2 else None
    )
    assert backend.refusal(CPU_CALL) is None
    assert backend.refusal(dataclasses.replace(CPU_CALL, dims={**DIMS, "T": 3})) == "T must be even; it is 3"


def test_supports_is_asked_only_within_the_capabilities():
    asked = []
    backend = gla_backend(supports=lambda call: asked.append(call), dtypes=frozenset({torch.float16}))
    assert backend.refusal(CPU_CALL) == "computes float16; q is float32"
    assert asked == []
    half = dataclasses.replace(CPU_CALL, dtype=torch.float16)
    assert backend.refusal(half) is None
    assert asked == [half]


@pytest.mark.parametrize("error", [KeyError("no table for this device"), SystemExit("no licence")])
def test_supports_that_raises_is_a_refusal(error):
    def supports(call):
        raise error

    said = f"its supports() raised {type(error).__name__}: {error}"
    assert gla_backend(supports=supports).refusal(CPU_CALL) == said


@pytest.mark.parametrize("answer", [True, False, 0, ""])
def test_supports_that_returns_no_sentence_is_a_refusal_that_says_so(answer, spy, x):
    careless = spy("careless", supports=lambda call: answer)
    with pytest.raises(gla.NoBackendError, match=r"careless: .*supports\(\) returned"):
        gla.online_softmax(x, backend="careless")
    assert careless.calls == []


# cost


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf"), -1.0, "fast"])
def test_a_cost_that_is_no_time_is_no_prediction(answer):
    assert gla_backend(cost=lambda call: answer).predicted_seconds(CPU_CALL) is None


def test_a_cost_that_raises_is_no_prediction():
    def cost(call):
        raise ZeroDivisionError

    assert gla_backend(cost=cost).predicted_seconds(CPU_CALL) is None


def test_no_cost_is_no_prediction():
    assert gla_backend().predicted_seconds(CPU_CALL) is None


@pytest.mark.parametrize("answer", [0, 0.0, 1e-6, 3, torch.tensor(0.5)])
def test_a_cost_is_seconds(answer):
    seconds = gla_backend(cost=lambda call: answer).predicted_seconds(CPU_CALL)
    assert type(seconds) is float
    assert seconds == float(answer)


def test_a_cost_model_is_its_formula_of_the_constants():
    backend = gla_backend(cost=CostModel(lambda call, c: c["token"] * call.dims["T"]))
    assert backend.predicted_seconds(CPU_CALL, {"token": 0.5}) == 0.5 * CPU_CALL.dims["T"]
    assert backend.predicted_seconds(CPU_CALL) is None


BAD_COSTS = [
    (1.0, "cost is float; expected a CostModel or a function"),
    (CostModel("fast"), "the formula of cost is str, not a function"),
    (CostModel(len, [1]), "the constants are list; expected a mapping"),
    (CostModel(len, {"cpu": None}), "the constants of 'cpu' are NoneType; expected a mapping"),
    (CostModel(len, {"cpu": {"online_softmax": 1}}), "the constants of 'cpu', online_softmax are int"),
    (CostModel(len, {"cpu": {"online_softmax": {"a": "1"}}}), "the constant 'a' of online_softmax for 'cpu' is '1'"),
    (CostModel(len, {"cpu": {"online_softmax": {"a": 0}}}), "is 0; expected a positive number"),
    (CostModel(len, {"cpu": {"online_softmax": {"a": -1.0}}}), "is -1.0; expected a positive number"),
    (CostModel(len, {"cpu": {"online_softmax": {"a": float("nan")}}}), "is nan; expected a positive number"),
    (CostModel(len, {"cpu": {"online_softmax": {"a": float("inf")}}}), "is inf; expected a positive number"),
    (CostModel(len, {"cpu": {"online_softmax": {"a": True}}}), "is True; expected a positive number"),
    (CostModel(len, {"cpu": {"online_softmax": {"multiprocessors": 2.0}}}), "'multiprocessors' of online_softmax is"),
]


def test_shipped_constants_are_those_of_the_package(tmp_path, monkeypatch):
    package = tmp_path / "backend_with_constants"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "constants.json").write_text('{"cpu": {"online_softmax": {"a": 1.5}}}')
    monkeypatch.syspath_prepend(tmp_path)
    assert shipped_constants("backend_with_constants") == {"cpu": {"online_softmax": {"a": 1.5}}}


# registration


def test_every_parameter_list_is_that_of_the_reference():
    (reference,) = (b for b in gla.backends() if b.name == "reference")
    assert set(reference.ops) == set(OP_PARAMETERS)
    assert reference.error is None


def unscaled(q, k, v):
    return q, q


def step(q, k, v, g, state, scale, state_indexes, inplace):
    return q, state


def too_many(x, dim, eps=0.0):
    return x


@pytest.mark.parametrize(
    ("function", "name"), [(lambda x, axis: x, "axis"), (too_many, "eps"), (lambda *args: args[0], "args")]
)
def test_an_argument_that_the_op_does_not_have_is_an_error_that_names_both(function, name):
    with pytest.raises(gla.BackendError) as error:
        gla.register(Backend("mine", "1.0", {"online_softmax": function}))
    assert str(error.value) == f"backend 'mine': online_softmax takes {name!r} (the op has the arguments x, dim)"


REFUSED = [
    ({"ops": {"recurrent_gla_step": step}}, "takes 'state_indexes'; did you mean 'state_indices'? (the op has"),
    ({"ops": {"softmax_attention": unscaled}}, "softmax_attention does not take scale, which every call of it gives"),
    ({"ops": {"online_softmax": torch.softmax}}, "online_softmax"),  # its signature cannot be read
    ({"ops": {"online_softmax": "softmax"}}, "op 'online_softmax' is str; expected a function"),
    ({"ops": [softmax]}, ""),
    ({"ops": None}, ""),
    ({"ops": "online_softmax"}, ""),
    ({"capabilities": {"devices": {"cpu"}}}, "capabilities is dict"),
    ({"notes": ["slow"]}, "notes is list; expected a function or None"),
    ({"version": 1.0}, "version is 1.0; expected"),
    ({"version": None}, "version is None; expected"),
    ({"supports": None}, "supports is None; expected"),
    *(({"cost": cost}, message) for cost, message in BAD_COSTS),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_backend_that_breaks_the_contract_is_refused(fields, message):
    backend = dataclasses.replace(Backend("mine", "1.0", {"online_softmax": softmax}), **fields)
    with pytest.raises(gla.BackendError, match=r"backend 'mine': .*" + re.escape(message)):
        gla.register(backend).unregister()


def test_an_unknown_op_is_an_error_with_the_nearest_spelling():
    with pytest.raises(gla.UnknownOpError, match=r"'mine'.*'online_sofmax'.*did you mean 'online_softmax'"):
        gla.register(Backend("mine", "1.0", {"online_sofmax": softmax}))
    message = "constants of an unknown op 'softmax'; did you mean 'online_softmax'"
    with pytest.raises(gla.UnknownOpError, match=message):
        gla.register(gla_backend(cost=CostModel(len, {"cpu": {"softmax": {}}})))


def in_another_order(scale, v, *, q, k):
    return gla.softmax_attention(q, k, v, scale, backend="reference")


def prepared_in_another_order(call):
    assert call.dims["Tq"] == 3
    return lambda v, scale, k, q: in_another_order(scale, v, q=q, k=k)


@pytest.mark.parametrize(
    "op",
    [in_another_order, Prepared(prepared_in_another_order, ("v", "scale", "k", "q"))],
    ids=["function", "prepared"],
)
def test_an_op_takes_a_subset_of_the_arguments_by_name_in_any_order(op):
    q, k, v = torch.randn(1, 3, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 6)
    with gla.register(Backend("mine", "1.0", {"softmax_attention": op})):
        actual, lse = gla.softmax_attention(q, k, v, 0.3, backend="mine")
        expected, expected_lse = gla.softmax_attention(q, k, v, 0.3, backend="reference")
        assert torch.equal(actual, expected)
        assert torch.equal(lse, expected_lse)
        with pytest.raises(gla.NoBackendError, match="mine: takes no causal; call it without"):
            gla.softmax_attention(q, q, q, causal=True, backend="mine")
        assert gla.explain("softmax_attention", q, q, q, causal=True).winner != "mine"


def test_a_wrapper_takes_what_it_wraps_by_position():
    @functools.wraps(in_some_order)
    def wrapped(*args):
        return in_some_order(*args)

    q = torch.randn(1, 3, 2, 4)
    with gla.register(Backend("mine", "1.0", {"softmax_attention": wrapped})):
        actual = gla.softmax_attention(q, 2 * q, 3 * q, 0.3, backend="mine")[0]
    assert torch.equal(actual, gla.softmax_attention(q, 2 * q, 3 * q, 0.3, backend="reference")[0])


def in_some_order(scale, v, k, q):
    return gla.softmax_attention(q, k, v, scale, backend="reference")


def test_a_call_is_prepared_once_for_its_signature():
    calls = []

    def prepare(call):
        calls.append(call)
        return lambda x, dim: torch.softmax(x, dim)

    x = torch.randn(4, 6)
    with gla.register(Backend("mine", "1.0", {"online_softmax": Prepared(prepare, ("x", "dim"))})):
        for y in (x, 2 * x, x.T, x[:, ::2]):
            assert torch.equal(gla.online_softmax(y, backend="mine"), torch.softmax(y, -1))
    assert [call.layouts["x"].strides for call in calls] == [(6, 1), (4, 1), (3, 1)]  # x.T and x[:, ::2] as copies
    assert [call.layouts["x"].aligned for call in calls] == [True, True, True]


def test_the_alignment_of_a_tensor_is_a_part_of_its_signature():
    layouts = []

    def prepare(call):
        layouts.append(call.layouts["x"])
        return lambda x, dim: torch.softmax(x, dim)

    x = torch.randn(13)
    with gla.register(Backend("mine", "1.0", {"online_softmax": Prepared(prepare, ("x", "dim"))})):
        for start in (0, 1, 4, 5):
            gla.online_softmax(x[start : start + 8], backend="mine")
    assert layouts == [Layout((8,), (1,), torch.float32, aligned) for aligned in (True, False)]


@pytest.mark.parametrize("name", ["auto", "", "a b", "a-b", "a,b", "3d", "*", None, 7])
def test_a_name_that_a_request_could_not_hold_is_an_error(name):
    with pytest.raises(gla.BackendError, match="must be an identifier other than 'auto'"):
        gla.register(Backend(name, "1.0", {"online_softmax": softmax}))


def test_a_name_in_use_is_an_error():
    with pytest.raises(gla.BackendError, match="'reference' is already in use"):
        gla.register(Backend("reference", "1.0", {"online_softmax": softmax}))
    with (
        gla.register(Backend("mine", "1.0", {"online_softmax": softmax})),
        pytest.raises(gla.BackendError, match="'mine' is already in use"),
    ):
        gla.register(Backend("mine", "2.0", {"online_softmax": softmax}))


@pytest.mark.parametrize("value", [None, "reference", softmax, Backend])
def test_a_value_that_is_no_backend_is_an_error(value):
    with pytest.raises(gla.BackendError, match=r"expected a gla_core\.dispatch\.backend\.Backend; got"):
        gla.register(value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"devices": "cuda"}, "None or a set of device types"),  # would read as the letters c, u, d and a
        ({"devices": frozenset()}, "None or a set of device types such as 'cuda', not empty"),
        ({"devices": {torch.device("cpu")}}, "None or a set of device types"),
        ({"dtypes": torch.float32}, "a set of torch.dtype"),
        ({"dtypes": frozenset()}, "a set of torch.dtype, not empty"),
        ({"dtypes": {"float32"}}, "a set of torch.dtype"),
        ({"key_widths": 64}, "a range"),
        ({"key_widths": range(0)}, "a range, not empty"),
        ({"value_widths": {64, 128}}, "a range"),
        ({"min_compute_capability": 8.0}, r"two integers such as \(8, 0\)"),
        ({"min_compute_capability": (8,)}, "two integers"),
        ({"min_compute_capability": ("8", "0")}, "two integers"),
        ({"gradients": "no"}, "True or False"),
        ({"cuda_graphs": None}, "True or False"),
    ],
)
def test_a_capability_of_another_form_is_an_error_that_names_it(fields, expected):
    (field,) = fields
    with pytest.raises(gla.BackendError, match=f"backend 'mine': capability {field} is .*; expected {expected}"):
        gla.register(Backend("mine", "1.0", {"online_softmax": softmax}, Capabilities(**fields))).unregister()


def test_a_failed_registration_registers_nothing():
    before = [b.name for b in gla.backends()]
    with pytest.raises(gla.BackendError):
        gla.register(Backend("mine", "1.0", {"online_softmax": too_many}))
    assert [b.name for b in gla.backends()] == before


def test_a_launch_error_is_a_runtime_error():
    assert issubclass(LaunchError, RuntimeError)
