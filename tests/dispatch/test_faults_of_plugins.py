"""Whatever a plugin raises, wherever the core calls it, takes nothing else down; KeyboardInterrupt passes."""

import pytest
import torch

import gla_core as gla
from gla_core.cli import doctor
from gla_core.dispatch.backend import Backend, CostModel, Prepared


class PanicException(BaseException):
    """Stands for a panic of Rust, as pyo3 raises it."""


FAULTS = [
    ValueError("no device"),
    SystemExit("no device"),
    PanicException("no device"),
    pytest.skip.Exception("no device"),
]
PASSING = [KeyboardInterrupt("stop"), GeneratorExit("stop")]
TAKES = ("x", "dim")


def softmax(x, dim):
    return torch.softmax(x, dim)


def registered(error, place):
    """Registers a backend that raises the error at one place."""

    def fault(*_):
        raise error

    op = softmax
    if place in ("prepare", "kernels"):
        op = Prepared(fault, TAKES) if place == "prepare" else Prepared(lambda call: softmax, TAKES, kernels=fault)
    cost = {"cost": fault, "formula": CostModel(fault)}.get(place)
    others = {place: fault} if place in ("supports", "notes") else {}
    return gla.register(Backend("mine", "1.0", {"online_softmax": op}, cost=cost, **others))


def explained(x, name="mine"):
    return next(c for c in gla.explain("online_softmax", x).candidates if c.name == name)


def name_of(error):
    return type(error).__name__


@pytest.mark.parametrize("error", FAULTS, ids=name_of)
def test_a_fault_at_any_place_is_that_of_one_backend(error, x):
    said = f"raised {name_of(error)}: no device"
    with registered(error, "supports"):
        assert explained(x).refusal == f"its supports() {said}"
    for place in ("cost", "formula"):
        with registered(error, place):
            assert (explained(x).refusal, explained(x).seconds) == (None, None)
    with registered(error, "kernels"):
        assert explained(x).kernels == (f"its kernels() {said}",)
    with registered(error, "notes"):
        assert {"backend": "mine", "note": f"its notes() {said}"} in doctor._notes()
    for place in ("supports", "cost", "formula", "kernels", "notes"):
        with registered(error, place):
            assert torch.equal(gla.online_softmax(x, backend="mine,reference"), torch.softmax(x, -1))
    with registered(error, "prepare"), pytest.raises(Exception, match="no device") as raised:
        gla.online_softmax(x, backend="mine")
    if isinstance(error, Exception):
        assert raised.value is error
    else:  # a test of its user must not be skipped, nor a program end
        assert str(raised.value) == f"backend 'mine': prepare of online_softmax {said}"
        assert raised.value.__cause__ is error


@pytest.mark.parametrize("place", ["import", "hook"])
@pytest.mark.parametrize("error", ["pytest.skip.Exception('no device')", "Panic('no device')"])
def test_a_fault_of_a_plugin_as_a_whole_is_quarantine(error, place, install, x, info):
    code = f"import pytest\nclass Panic(BaseException): ...\ndef fault(): raise {error}\n"
    hook = "from gla_core.dispatch.backend import hookimpl\n@hookimpl\ndef gla_register_backends(): fault()\n"
    install("broken", code + (hook if place == "hook" else "fault()"))
    torch.testing.assert_close(gla.online_softmax(x), torch.softmax(x, -1))
    assert info("broken").error.rstrip().endswith(": no device")


@pytest.mark.parametrize("error", PASSING, ids=name_of)
def test_what_stops_the_program_passes_and_the_next_call_works(error, install, tmp_path, x):
    calls = {
        "notes": doctor._notes,
        "prepare": lambda: gla.online_softmax(x, backend="mine"),
        **dict.fromkeys(("supports", "cost", "formula", "kernels"), lambda: gla.explain("online_softmax", x)),
    }
    for place, call in calls.items():
        with registered(error, place), pytest.raises(type(error), match="stop"):
            call()
        gla.online_softmax(x)
    module = install("stops", f"raise {error!r}")
    with pytest.raises(type(error), match="stop"):
        gla.backends()
    (tmp_path / f"{module}.py").write_text("")
    assert gla.backends()


def test_the_other_backends_are_measured_where_one_panics(x):
    def panic(x, dim):
        raise PanicException("no device")

    with gla.register(Backend("mine", "1.0", {"online_softmax": panic})):
        candidates = {c.name: c for c in gla.explain("online_softmax", x, measure=True).candidates}
    assert candidates["mine"].failure == "PanicException: no device"
    assert candidates["reference"].measured is not None


# what a plugin returns


@pytest.mark.parametrize("answer", [None, 3, "softmax"])
def test_prepare_that_returns_no_function_is_an_error_that_names_the_backend(answer, x, qkvg):
    op = Prepared(lambda call: answer, TAKES)
    with gla.register(Backend("mine", "1.0", {"online_softmax": op})), pytest.raises(gla.BackendError) as error:
        gla.online_softmax(x, backend="mine")
    said = f"returned {type(answer).__name__}; expected a function of"
    assert str(error.value) == f"backend 'mine': prepare of online_softmax {said} x, dim"
    step = Prepared(lambda call: answer, ("q", "k", "v", "g", "state", "scale", "inplace"))
    token = [y[:, 0] for y in qkvg()]
    backend = Backend("mine", "1.0", {"recurrent_gla_step": step})
    with gla.register(backend), pytest.raises(gla.BackendError, match=f"'mine': prepare of recurrent_gla_step {said}"):
        gla.recurrent_gla_layer_step(*token, torch.zeros(1, 2, 4, 3), backend="mine")


@pytest.mark.parametrize("answer", [None, "a sentence", 3, [3], lambda: ["a sentence"]])
def test_sentences_are_a_list_of_strings(answer, x):
    said = f"() returned {type(answer).__name__}; expected a list of strings"
    op = Prepared(lambda call: softmax, TAKES, kernels=lambda call: answer)
    with gla.register(Backend("mine", "1.0", {"online_softmax": op}, notes=lambda: answer)):
        assert explained(x).kernels == (f"its kernels{said}",)
        assert {"backend": "mine", "note": f"its notes{said}"} in doctor._notes()


@pytest.mark.parametrize("answer", [torch.ones(3), torch.tensor(torch.nan), -torch.ones(()), object(), [1.0], 1j])
def test_a_cost_that_is_no_number_of_seconds_is_no_prediction(answer, x):
    with gla.register(Backend("mine", "1.0", {"online_softmax": softmax}, cost=lambda call: answer)):
        assert (explained(x).seconds, explained(x).refusal) == (None, None)


@pytest.mark.parametrize("answer", [torch.tensor(True), object(), [], ["no"], b"no"])
def test_supports_that_returns_no_sentence_is_a_refusal(answer, x):
    with gla.register(Backend("mine", "1.0", {"online_softmax": softmax}, supports=lambda call: answer)):
        assert explained(x).refusal == f"its supports() returned {answer!r}; expected a reason or None"


# what cannot be called as the contract says


def positional_x(x, /, *, dim): ...
def positional(x, dim, /): ...
def variadic(*x, dim): ...
def keywords(x, **dim): ...


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (positional_x, "online_softmax takes 'x' as a positional-only argument; expected one that can be given by its"),
        (positional, "online_softmax takes 'x' as a positional-only argument; expected one that can be given by its"),
        (variadic, "online_softmax takes 'x' as a variadic positional argument; expected one"),
        (keywords, "online_softmax takes 'dim' as a variadic keyword argument; expected one"),
        (Prepared(len, ("x", "x", "dim")), "online_softmax takes 'x' twice"),
        (Prepared(len, ("x", "dim", "x")), "online_softmax takes 'x' twice"),
        (Prepared(len, "x"), "takes of online_softmax is 'x'; expected a tuple of the names of arguments"),
        (Prepared(len, ["x", "dim"]), "takes of online_softmax is ['x', 'dim']; expected a tuple of the names"),
        (Prepared(len, ("x", 1)), "takes of online_softmax is ('x', 1); expected a tuple of the names"),
        (Prepared(None, TAKES), "prepare of online_softmax is NoneType; expected a function"),
        (Prepared(len, TAKES, ["a kernel"]), "kernels of online_softmax is list; expected a function or None"),
        (Prepared, "online_softmax takes 'prepare' (the op has the arguments x, dim)"),
        (None, "op 'online_softmax' is NoneType; expected a function"),
        ([softmax], "op 'online_softmax' is list; expected a function"),
    ],
)
def test_an_op_that_cannot_be_called_is_refused_at_registration(op, message):
    with pytest.raises(gla.BackendError) as error:
        gla.register(Backend("mine", "1.0", {"online_softmax": op}))
    assert str(error.value).startswith(f"backend 'mine': {message}")


def test_a_word_of_requests_is_no_name():
    with pytest.raises(gla.BackendError, match="identifier other than 'auto' or 'batch_invariant'"):
        gla.register(Backend("batch_invariant", "1.0", {"online_softmax": softmax}))
