"""Requests: the grammar, who outweighs whom, and where `use_backend` reaches."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.dispatch.backend import OP_PARAMETERS, LaunchError
from gla_core.dispatch.request import current_request, parse

pytestmark = pytest.mark.usefixtures("only_reference")

SOURCES = ("argument", "inner", "outer", "variable")  # strongest first
PAIRS = list(itertools.combinations(SOURCES, 2))


@pytest.fixture
def spies(spy):
    return {name: spy(name) for name in "abcd"}


@pytest.fixture
def ran(spies, x):
    """`ran(call)` is the name of the spy that ran online_softmax during `call`, "reference" if none did."""

    def run(call=lambda: gla.online_softmax(x)):
        for each in spies.values():
            each.calls.clear()
        call()
        names = [name for name, each in spies.items() for _ in each.calls]
        assert len(names) <= 1
        return names[0] if names else "reference"

    return run


def variable(monkeypatch, request):
    monkeypatch.setenv("GLA_BACKEND", request)
    gla.reload_environment()


def ask(monkeypatch, source, request, call):
    """Make `call` under `request`, which comes from `source`."""
    if source == "argument":
        return call(backend=request)
    if source == "variable":
        variable(monkeypatch, request)
        return call()
    with gla.use_backend(request):
        return call()


# precedence


@pytest.mark.parametrize("stronger", SOURCES)
def test_each_source_outweighs_auto(monkeypatch, ran, stronger, x):
    # auto takes "a": it predicts no time, as all do, and comes first by name
    assert ran() == "a"
    assert ran(lambda: ask(monkeypatch, stronger, "d", lambda **kw: gla.online_softmax(x, **kw))) == "d"


@pytest.mark.parametrize(("stronger", "weaker"), PAIRS)
def test_of_two_sources_the_stronger_decides(monkeypatch, ran, stronger, weaker, x):
    requests = {stronger: "d", weaker: "c"}
    if "variable" in requests:
        variable(monkeypatch, requests["variable"])

    def call():
        return gla.online_softmax(x, backend=requests.get("argument"))

    for source in ("inner", "outer"):  # each wraps what is there already, so the outer comes last
        if source in requests:
            call = gla.use_backend(requests[source])(call)
    assert ran(call) == "d"


@pytest.mark.parametrize(("stronger", "weaker"), PAIRS)
def test_an_auto_from_the_stronger_source_outweighs_a_name_from_the_weaker(monkeypatch, ran, stronger, weaker, x):
    requests = {stronger: "auto", weaker: "d"}
    if "variable" in requests:
        variable(monkeypatch, requests["variable"])

    def call():
        return gla.online_softmax(x, backend=requests.get("argument"))

    for source in ("inner", "outer"):
        if source in requests:
            call = gla.use_backend(requests[source])(call)
    assert ran(call) == "a"


def test_explain_names_the_source(monkeypatch, spies, x):
    variable(monkeypatch, "d")
    assert gla.explain("online_softmax", x).source == "GLA_BACKEND"
    with gla.use_backend("c"):
        assert gla.explain("online_softmax", x).source == "use_backend"
        assert gla.explain("online_softmax", x, backend="b").source == "backend="
    monkeypatch.delenv("GLA_BACKEND")
    gla.reload_environment()
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
def test_a_strict_request_does_not_fall_back_when_the_backend_fails(monkeypatch, spy, source, fault, x):
    faulty, other = spy("faulty", error=fault), spy("other")
    with pytest.raises(type(fault), match=str(fault)):
        ask(monkeypatch, source, "faulty", lambda **kw: gla.online_softmax(x, **kw))
    with pytest.raises(type(fault), match=str(fault)):  # and is not remembered either
        ask(monkeypatch, source, "faulty", lambda **kw: gla.online_softmax(x, **kw))
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
def test_an_op_not_named_falls_to_the_next_weaker_request(monkeypatch, ran, stronger, x):
    variable(monkeypatch, "d")
    assert ran(lambda: ask(monkeypatch, stronger, "chunk_gla_fwd=b", lambda **kw: gla.online_softmax(x, **kw))) == "d"
    assert ran(lambda: ask(monkeypatch, stronger, "online_softmax=b", lambda **kw: gla.online_softmax(x, **kw))) == "b"


def test_an_op_not_named_anywhere_is_auto(ran, x):
    with gla.use_backend("chunk_gla_fwd=d"):
        assert ran() == "a"
        assert gla.explain("online_softmax", x).source == "default"


def test_every_level_adds_the_ops_it_names(monkeypatch, spies, x):
    variable(monkeypatch, "online_softmax=a;chunk_gla_fwd=a;softmax_attention=a;*=d")
    with gla.use_backend("chunk_gla_fwd=b;softmax_attention=b"), gla.use_backend("softmax_attention=c"):
        choices = {op: str(current_request().choice(op)) for op in OP_PARAMETERS}
    assert choices == {
        "online_softmax": "a",
        "chunk_gla_fwd": "b",
        "softmax_attention": "c",
        "chunk_gla_bwd": "d",
        "recurrent_gla_step": "d",
    }


def test_a_star_outweighs_the_ops_that_a_weaker_request_names(monkeypatch, ran):
    variable(monkeypatch, "online_softmax=d")
    assert ran() == "d"
    with gla.use_backend("c"):
        assert ran() == "c"
    with gla.use_backend("chunk_gla_fwd=b;*=c"):
        assert ran() == "c"


def test_a_name_alone_is_a_star():
    def names(text):
        return {op: choice.names for op, choice in parse(text, "test").items()}

    assert names("a,b") == names("*=a,b") == {"*": ("a", "b")}
    assert names("online_softmax=a;b") == names("online_softmax=a;*=b")


# typos and bad grammar, from all sources


@pytest.mark.parametrize("source", SOURCES)
def test_an_unknown_backend_is_an_error_with_the_nearest_spelling(monkeypatch, source, x):
    with pytest.raises(gla.UnknownBackendError, match=r"'refrence'; did you mean 'reference'\?.*installed: reference"):
        ask(monkeypatch, source, "refrence", lambda **kw: gla.online_softmax(x, **kw))


@pytest.mark.parametrize("source", SOURCES)
def test_an_unknown_op_is_an_error_with_the_nearest_spelling(monkeypatch, source, x):
    with pytest.raises(gla.UnknownOpError, match=r"unknown op 'chunk_gla_fw'; did you mean 'chunk_gla_fwd'\?"):
        ask(monkeypatch, source, "chunk_gla_fw=reference", lambda **kw: gla.online_softmax(x, **kw))


SAID = {"argument": "backend=", "inner": "use_backend", "outer": "use_backend", "variable": "GLA_BACKEND"}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("text", ["refrence", "chunk_gla_fw=reference", "a,,b", "auto,reference"])
def test_every_error_of_a_request_names_its_source(monkeypatch, source, text, x):
    with pytest.raises((LookupError, ValueError), match=SAID[source]):
        ask(monkeypatch, source, text, lambda **kw: gla.online_softmax(x, **kw))


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
def test_bad_grammar_is_a_value_error(monkeypatch, source, text, x):
    with pytest.raises(ValueError, match=SAID[source]):
        ask(monkeypatch, source, text, lambda **kw: gla.online_softmax(x, **kw))


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


# use_backend


def test_blocks_nest_and_end(ran):
    with gla.use_backend("b"):
        assert ran() == "b"
        with gla.use_backend("c"):
            assert ran() == "c"
        assert ran() == "b"
    assert ran() == "a"


def test_a_block_ends_with_an_exception(ran):
    with pytest.raises(KeyError), gla.use_backend("b"):
        raise KeyError
    assert ran() == "a"


def test_one_object_serves_again_and_inside_itself(ran):
    b = gla.use_backend("b")
    for _ in range(2):
        with b:
            with gla.use_backend("c"), b:
                assert ran() == "b"
            assert ran() == "b"
        assert ran() == "a"


def test_a_decorated_function_runs_under_the_request_at_each_call(ran, x):
    @gla.use_backend("b")
    def softmax(x, dim=-1, *, again=0):
        """Softmax by b."""
        return softmax(x, dim, again=again - 1) if again else gla.online_softmax(x, dim)

    assert softmax.__name__ == "softmax"
    assert softmax.__doc__ == "Softmax by b."
    assert ran(lambda: softmax(x)) == "b"
    assert ran() == "a"
    assert ran(lambda: softmax(x, dim=0, again=2)) == "b"
    with gla.use_backend("c"):
        assert ran(lambda: softmax(x)) == "b"
        assert ran() == "c"
    torch.testing.assert_close(softmax(x, 0), torch.softmax(x, 0))


def test_a_decorated_function_that_raises_ends_its_request(ran):
    @gla.use_backend("b")
    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ran() == "a"


def test_a_decorated_method_gets_its_self(ran, x):
    class Model:
        @gla.use_backend("b")
        def __call__(self):
            assert isinstance(self, Model)
            return gla.online_softmax(x)

    assert ran(Model()) == "b"


def test_a_decorated_coroutine_function_runs_under_the_request_across_its_awaits(ran, x):
    @gla.use_backend("b")
    async def softmax():
        await asyncio.sleep(0)
        return gla.online_softmax(x)

    async def main():
        result = await softmax()
        assert gla.explain("online_softmax", x).source == "default"
        return result

    assert asyncio.iscoroutinefunction(softmax)
    for _ in range(2):
        assert ran(lambda: asyncio.run(main())) == "b"


def test_a_generator_is_not_decorated_in_silence(spies):
    """Its steps run where its consumer stands: the decorator could only seem to work."""

    def steps():
        yield

    async def async_steps():
        yield

    for generator in (steps, async_steps):
        with pytest.raises(TypeError, match=f"cannot decorate the generator {generator.__name__}, .*pass backend="):
            gla.use_backend("b")(generator)


def tokens(block):
    with block:
        yield


def asked():
    """The request in force for online_softmax."""
    return str(current_request().choice("online_softmax"))


@pytest.fixture(params=["one object", "an object each"])
def b(request, spies):
    """Makes what a block under "b" is entered by."""
    shared = gla.use_backend("b")
    return (lambda: shared) if request.param == "one object" else lambda: gla.use_backend("b")


def test_a_generator_that_ends_inside_other_blocks_ends_only_its_own(b):
    steps = tokens(b())
    next(steps)
    assert asked() == "b"  # a block around a yield holds for the consumer too, until the generator goes on
    with b(), gla.use_backend("c"), b():
        assert next(steps, "ended") == "ended"
        assert asked() == "b"
    assert asked() == "auto"


def test_generators_end_in_any_order(b):
    first, second = tokens(b()), tokens(gla.use_backend("c"))
    next(first)
    with b():
        next(second)
        first.close()
        assert asked() == "c"
        second.close()
        assert asked() == "b"
    assert asked() == "auto"


def test_a_generator_closed_by_another_thread_ends_its_block_and_none_of_that_threads(b, in_time):
    steps = tokens(b())
    next(steps)

    def close():
        with b():
            steps.close()
            inside = asked()
        return inside, asked()

    assert in_time(close) == ("b", "auto")
    assert asked() == "auto"


def test_a_generator_closed_by_a_task_ends_its_block_and_none_of_that_task(b):
    async def main():
        steps = tokens(b())
        next(steps)

        async def close():  # in a copy of the context
            with b():
                steps.close()
                inside = asked()
            return inside, asked()

        return await asyncio.create_task(close()), asked()

    assert asyncio.run(main()) == (("b", "auto"), "auto")


def test_exit_stacks_of_one_object_end_in_any_order(spies):
    shared, outer, inner = gla.use_backend("b"), contextlib.ExitStack(), contextlib.ExitStack()
    outer.enter_context(shared)
    with gla.use_backend("c"):
        inner.enter_context(shared)
        inner.close()
        assert asked() == "c"
        outer.close()
        assert asked() == "c"
    assert asked() == "auto"


# threads and tasks


def test_a_thread_does_not_see_the_block_of_another(spies, x):
    seen = {}

    def look(name):
        seen[name] = gla.explain("online_softmax", x).winner

    with gla.use_backend("b"):
        thread = threading.Thread(target=look, args=("other",))
        thread.start()
        thread.join()
        look("own")
    assert seen == {"other": "a", "own": "b"}


def test_threads_with_blocks_at_the_same_time_do_not_mix(spies, x):
    together, seen = threading.Barrier(4), {}

    def work(name):
        with gla.use_backend(name):
            together.wait()
            inside = gla.explain("online_softmax", x).winner
            together.wait()
        seen[name] = (inside, gla.explain("online_softmax", x).winner)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {name: (name, "a") for name in "abcd"}


def test_a_thread_given_a_copy_of_the_context_keeps_the_request(spies, x):
    seen = []
    with gla.use_backend("b"):
        context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(lambda: seen.append(gla.explain("online_softmax", x).winner),))
    thread.start()
    thread.join()
    assert seen == ["b"]


def test_tasks_with_blocks_at_the_same_time_do_not_mix(spies, x):
    async def work(name):
        with gla.use_backend(name):
            await asyncio.sleep(0.001)
            inside = gla.explain("online_softmax", x).winner
            await asyncio.sleep(0.001)
        return name, inside, gla.explain("online_softmax", x).winner

    async def main():
        return await asyncio.gather(*(work(name) for name in "abcd"))

    assert asyncio.run(main()) == [(name, name, "a") for name in "abcd"]


def test_a_task_keeps_the_request_it_was_started_under(spies, x):
    async def look():
        await asyncio.sleep(0)
        return gla.explain("online_softmax", x).winner

    async def main():
        with gla.use_backend("b"):
            task = asyncio.create_task(look())
        return await task, await look()

    assert asyncio.run(main()) == ("b", "a")


# recomputation


def test_a_checkpoint_recomputes_under_the_block_it_is_given(spies, qkvg):
    def forward(*inputs):
        return gla.chunk_gla(*inputs)[0]

    def blocks():
        return gla.use_backend("b"), gla.use_backend("b")

    o = torch.utils.checkpoint.checkpoint(forward, *qkvg(grad=True), use_reentrant=False, context_fn=blocks)
    with gla.use_backend("c"):
        o.sum().backward()
    assert spies["b"].calls == ["chunk_gla_fwd", "chunk_gla_fwd", "chunk_gla_bwd"]
    assert spies["c"].calls == []


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


@settings(deadline=None)
@given(text=request_texts())
def test_the_text_of_a_request_says_the_same_as_the_request(text):
    request = current_request(text)
    again = current_request(request.spec)
    assert again.choices == request.choices
    assert again.spec == request.spec
    assert parse(request.spec, "another source") == request.choices
    parsed = parse(text, "backend=")
    assert {op: request.choices[op] for op in parsed} == parsed
    for op in OP_PARAMETERS:
        assert request.choice(op).names == (parsed.get(op) or parsed.get("*") or request.choices["*"]).names


@settings(deadline=None)
@given(outer=request_texts(), inner=request_texts())
def test_the_text_of_a_request_outweighs_all_others(outer, inner):
    spec = current_request(outer).spec
    assert current_request(spec).spec == spec
    with_names = {op: choice.names for op, choice in parse(inner, "backend=").items()}
    assert all(current_request(inner).choice(op).names == names for op, names in with_names.items())


def test_the_text_keeps_the_sources_apart(monkeypatch, spies):
    variable(monkeypatch, "chunk_gla_bwd=a;online_softmax=a")
    with gla.use_backend("chunk_gla_bwd=b,c"):
        request = current_request("chunk_gla_fwd=d")
    choices = current_request(request.spec).choices
    assert {op: (str(choice), choice.source) for op, choice in choices.items()} == {
        "*": ("auto", "default"),
        "online_softmax": ("a", "GLA_BACKEND"),
        "chunk_gla_bwd": ("b,c", "use_backend"),
        "chunk_gla_fwd": ("d", "backend="),
    }
