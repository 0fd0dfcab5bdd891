"""Requests: the grammar, and the precedence of their sources."""

import itertools

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st

import gla_core as gla
from gla_core.dispatch.backend import OP_PARAMETERS, LaunchError
from gla_core.dispatch.request import Setting, current_request, parse

pytestmark = pytest.mark.usefixtures("only_reference")


SOURCES = ("argument", "inner", "outer", "variable")  # strongest first
PAIRS = list(itertools.combinations(SOURCES, 2))


@pytest.fixture
def ask(set_environment, x):
    """`ask(source, request)` calls online_softmax under a request that comes from `source`."""

    def call(source, request):
        if source == "argument":
            return gla.online_softmax(x, backend=request)
        if source == "variable":
            set_environment(GLA_BACKEND=request)
            return gla.online_softmax(x)
        with gla.use_backend(request):
            return gla.online_softmax(x)

    return call


# precedence


@pytest.mark.parametrize("stronger", SOURCES)
def test_each_source_outweighs_auto(ask, ran, stronger):
    # auto takes "a": no backend here predicts a time, and "a" is first by name
    assert ran() == "a"
    assert ran(lambda: ask(stronger, "d")) == "d"


@pytest.mark.parametrize(("strong", "weak", "expected"), [("d", "c", "d"), ("auto", "d", "a")])
@pytest.mark.parametrize(("stronger", "weaker"), PAIRS)
def test_of_two_sources_the_stronger_decides(set_environment, ran, stronger, weaker, strong, weak, expected, x):
    requests = {stronger: strong, weaker: weak}
    if "variable" in requests:
        set_environment(GLA_BACKEND=requests["variable"])

    def call():
        return gla.online_softmax(x, backend=requests.get("argument"))

    for source in ("inner", "outer"):  # each wraps the call so far, so the outer block comes last
        if source in requests:
            call = gla.use_backend(requests[source])(call)
    assert ran(call) == expected


def test_explain_names_the_source(set_environment, spies, x):
    set_environment(GLA_BACKEND="d")
    assert gla.explain("online_softmax", x).source == "GLA_BACKEND"
    with gla.use_backend("c"):
        assert gla.explain("online_softmax", x).source == "use_backend"
        assert gla.explain("online_softmax", x, backend="b").source == "backend="
    set_environment(GLA_BACKEND=None)
    assert gla.explain("online_softmax", x).source == "default"


# one name: that backend or an error


def test_a_strict_request_that_cannot_be_met_is_an_error_with_the_refusal(spy, x):
    half = spy("half", dtypes=frozenset({torch.float16}))
    with pytest.raises(gla.NoBackendError) as error:
        gla.online_softmax(x, backend="half")
    assert str(error.value) == (
        "no backend can run online_softmax (request: half, from backend=); 'half,reference' would run it:\n"
        "  half: computes float16; x is float32"
    )
    assert half.calls == []
    gla.online_softmax(x.half(), backend="half")
    assert half.calls == ["online_softmax"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "fault", [LaunchError("too much shared memory"), ImportError("no triton"), ZeroDivisionError("a bug")]
)
def test_a_strict_request_does_not_fall_back_when_the_backend_fails(ask, spy, source, fault):
    faulty, other = spy("faulty", error=fault), spy("other")
    with pytest.raises(type(fault), match=str(fault)):
        ask(source, "faulty")
    with pytest.raises(type(fault), match=str(fault)):  # the failure is not remembered either
        ask(source, "faulty")
    assert (len(faulty.calls), len(other.calls)) == (2, 0)


def test_the_fault_of_a_strict_backend_is_the_same_where_a_gradient_is_needed(spy, x):
    spy("faulty", error=LaunchError("too much shared memory"))
    with pytest.raises(LaunchError, match="too much shared memory"):
        gla.online_softmax(x.requires_grad_(), backend="faulty")


# lists: the first that can run


def test_a_list_takes_the_first_that_can_run(spy, x):
    half = spy("half", dtypes=frozenset({torch.float16}))
    full = spy("full")
    gla.online_softmax(x, backend="half, full")
    gla.online_softmax(x.half(), backend="half,full")
    gla.online_softmax(x.half(), backend="full,half")
    assert (len(half.calls), len(full.calls)) == (1, 2)


def test_a_list_is_ordered_by_the_user_not_by_cost(spy, x):
    slow, fast = spy("slow", cost=lambda call: 2.0), spy("fast", cost=lambda call: 1.0)
    gla.online_softmax(x, backend="slow,fast")
    assert (len(slow.calls), len(fast.calls)) == (1, 0)


def test_a_list_that_none_can_serve_is_an_error_with_every_refusal(spy, x):
    spy("half", dtypes=frozenset({torch.float16}))
    spy("gpu", devices=frozenset({"cuda"}))
    with pytest.raises(gla.NoBackendError) as error:
        gla.online_softmax(x, backend="half,gpu")
    assert str(error.value) == (
        "no backend can run online_softmax (request: half,gpu, from backend=); 'half,gpu,reference' would run it:\n"
        "  half: computes float16; x is float32\n"
        "  gpu: needs a cuda device; x is on cpu"
    )


def test_a_list_does_not_fall_back_when_its_first_fails(spy, x):
    faulty, other = spy("faulty", error=LaunchError("too much shared memory")), spy("other")
    with pytest.raises(LaunchError):
        gla.online_softmax(x, backend="faulty,other")
    assert (len(faulty.calls), len(other.calls)) == (1, 0)


def test_an_unknown_name_anywhere_in_a_list_is_an_error(spies, x):
    with pytest.raises(gla.UnknownBackendError, match="'zzz'"):
        gla.online_softmax(x, backend="a,zzz")
    assert spies["a"].calls == []


# per op


def test_each_op_has_its_own_choice(spies, x, qkvg):
    with gla.use_backend("online_softmax=b; softmax_attention = c ;*=d"):
        gla.online_softmax(x)
        gla.softmax_attention(*qkvg()[:3])
        gla.chunk_gla(*qkvg())
    assert {name: each.calls for name, each in spies.items()} == {
        "a": [],
        "b": ["online_softmax"],
        "c": ["softmax_attention"],
        "d": ["chunk_gla_fwd"],
    }


def test_an_op_may_have_a_list_or_auto(spies, x, qkvg, spy):
    half = spy("half", dtypes=frozenset({torch.float16}))
    with gla.use_backend("online_softmax=half,c;chunk_gla_fwd=auto;*=d"):
        gla.online_softmax(x)
        gla.chunk_gla(*qkvg())
    assert (spies["c"].calls, spies["a"].calls, half.calls) == (["online_softmax"], ["chunk_gla_fwd"], [])


@pytest.mark.parametrize("stronger", ["argument", "inner", "outer"])
def test_an_op_not_named_falls_to_the_next_weaker_request(ask, set_environment, ran, stronger):
    set_environment(GLA_BACKEND="d")
    assert ran(lambda: ask(stronger, "chunk_gla_fwd=b")) == "d"
    assert ran(lambda: ask(stronger, "online_softmax=b")) == "b"


def test_an_op_not_named_anywhere_is_auto(ran, x):
    with gla.use_backend("chunk_gla_fwd=d"):
        assert ran() == "a"
        assert gla.explain("online_softmax", x).source == "default"


def test_every_level_adds_the_ops_it_names(set_environment, spies, x):
    set_environment(GLA_BACKEND="online_softmax=a;chunk_gla_fwd=a;softmax_attention=a;*=d")
    with gla.use_backend("chunk_gla_fwd=b;softmax_attention=b"), gla.use_backend("softmax_attention=c"):
        choices = {op: str(current_request().choice(op)) for op in OP_PARAMETERS}
    named = {"online_softmax": "a", "chunk_gla_fwd": "b", "softmax_attention": "c"}
    assert choices == {**dict.fromkeys(OP_PARAMETERS, "d"), **named}


def test_a_star_outweighs_the_ops_that_a_weaker_request_names(set_environment, ran):
    set_environment(GLA_BACKEND="online_softmax=d")
    assert ran() == "d"
    with gla.use_backend("c"):
        assert ran() == "c"
    with gla.use_backend("chunk_gla_fwd=b;*=c"):
        assert ran() == "c"


def test_a_name_alone_is_a_star():
    def names(text):
        return {op: choice.names for op, choice in parse(text, "test")[0].items()}

    assert names("a,b") == names("*=a,b") == {"*": ("a", "b")}
    assert names("online_softmax=a;b") == names("online_softmax=a;*=b")


# typos and bad grammar, from all sources


@pytest.mark.parametrize("source", SOURCES)
def test_an_unknown_backend_is_an_error_with_the_nearest_spelling(ask, source):
    with pytest.raises(gla.UnknownBackendError, match=r"'refrence'; did you mean 'reference'\?.*installed: reference"):
        ask(source, "refrence")


@pytest.mark.parametrize("source", SOURCES)
def test_an_unknown_op_is_an_error_with_the_nearest_spelling(ask, source):
    with pytest.raises(gla.UnknownOpError, match=r"unknown op 'chunk_gla_fw'; did you mean 'chunk_gla_fwd'\?"):
        ask(source, "chunk_gla_fw=reference")


SAID = {"argument": "backend=", "inner": "use_backend", "outer": "use_backend", "variable": "GLA_BACKEND"}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("text", ["refrence", "chunk_gla_fw=reference", "a,,b", "auto,reference"])
def test_every_error_of_a_request_names_its_source(ask, source, text):
    with pytest.raises((LookupError, ValueError), match=SAID[source]):
        ask(source, text)


def test_a_misspelled_auto_is_pointed_out(x):
    with pytest.raises(gla.UnknownBackendError, match="did you mean 'auto'"):
        gla.online_softmax(x, backend="atuo")


def test_a_name_like_no_other_gets_no_suggestion(x):
    with pytest.raises(gla.UnknownBackendError, match=r"unknown backend 'zzzzzz' \(installed: reference; "):
        gla.online_softmax(x, backend="zzzzzz")


BAD = [
    "auto,reference",
    "reference,auto",
    "auto,auto",
    "reference,",
    ",reference",
    "reference,,reference",
    "two words",
    "kebab-case",
    "online_softmax=",
    "online_softmax=reference=reference",
    "reference;reference",
    "*=reference;reference",
    "online_softmax=reference;online_softmax=auto",
    ";",
    " ; ; ",
]


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("source", SOURCES)
def test_bad_grammar_is_a_value_error(ask, source, text):
    with pytest.raises(ValueError, match=SAID[source]):
        ask(source, text)


@pytest.mark.parametrize("text", ["a=b=c", "=reference"])
def test_what_stands_before_an_equals_sign_must_be_an_op(text, x):
    with pytest.raises(gla.UnknownOpError):
        gla.online_softmax(x, backend=text)


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_use_backend_is_an_error(text):
    with pytest.raises(ValueError, match="use_backend: empty request"):
        gla.use_backend(text)


@pytest.mark.parametrize("request_", [3, 0, False, ["reference"], [], ("reference",), {"online_softmax": "a"}, b"a"])
def test_a_request_that_is_no_string_is_an_error_that_says_so(request_, x):
    kind = type(request_).__name__
    with pytest.raises(TypeError, match=f"backend= is {kind}; expected a string"):
        gla.online_softmax(x, backend=request_)
    with pytest.raises(TypeError, match=f"use_backend is {kind}; expected a string"):
        gla.use_backend(request_)
    with pytest.raises(TypeError, match=f"backend= is {kind}; expected a string"):
        gla.online_softmax(x.requires_grad_(), backend=request_)


def test_use_backend_is_checked_when_it_is_made():
    with pytest.raises(gla.UnknownBackendError, match="did you mean 'reference'"):

        @gla.use_backend("chunk_gla_fwd=refrence")
        def never():
            raise AssertionError


# the text of a request

NAMES = st.builds("".join, st.tuples(st.sampled_from("aZ_"), st.text("aZ_09", max_size=5)))  # never "auto"
SPACE = st.sampled_from(["", " ", "  "])


@st.composite
def request_texts(draw):
    clauses = []
    for op in draw(st.lists(st.sampled_from(["*", *OP_PARAMETERS]), unique=True, min_size=1)):
        names = draw(st.just(["auto"]) | st.lists(NAMES, min_size=1, max_size=4))
        listed = ",".join(f"{draw(SPACE)}{name}{draw(SPACE)}" for name in names)
        bare = op == "*" and draw(st.booleans())
        clauses.append(listed if bare else f"{draw(SPACE)}{op}{draw(SPACE)}={listed}")
    return ";".join(clauses) + draw(st.sampled_from(["", ";", " ; "]))


@given(text=request_texts())
def test_the_text_of_a_request_says_the_same_as_the_request(text):
    request = current_request(text)
    again = current_request(request.spec)
    assert again.choices == request.choices
    assert again.spec == request.spec
    assert parse(request.spec, "another source") == (request.choices, Setting(0, "default"))
    parsed, _ = parse(text, "backend=")
    assert {op: request.choices[op] for op in parsed} == parsed
    for op in OP_PARAMETERS:
        assert request.choice(op).names == (parsed.get(op) or parsed.get("*") or request.choices["*"]).names


@given(outer=request_texts(), inner=request_texts())
def test_the_text_of_a_request_outweighs_all_others(outer, inner):
    spec = current_request(outer).spec
    assert current_request(spec).spec == spec
    with_names = {op: choice.names for op, choice in parse(inner, "backend=")[0].items()}
    assert all(current_request(inner).choice(op).names == names for op, names in with_names.items())


def test_the_text_keeps_the_sources_apart(set_environment, spies):
    set_environment(GLA_BACKEND="chunk_gla_bwd=a;online_softmax=a")
    with gla.use_backend("chunk_gla_bwd=b,c"):
        request = current_request("chunk_gla_fwd=d")
    choices = current_request(request.spec).choices
    assert {op: (str(choice), choice.source) for op, choice in choices.items()} == {
        "*": ("auto", "default"),
        "online_softmax": ("a", "GLA_BACKEND"),
        "chunk_gla_bwd": ("b,c", "use_backend"),
        "chunk_gla_fwd": ("d", "backend="),
    }
