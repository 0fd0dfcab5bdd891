"""`use_backend`: blocks, decorators, generators, threads and tasks, recomputation."""

import asyncio
import contextlib
import contextvars
import threading

import pytest
import torch
import torch.utils.checkpoint

import gla_core as gla
from gla_core.dispatch.request import current_request

pytestmark = pytest.mark.usefixtures("only_reference")


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
    """A generator's steps run in the context of its consumer, so the decorator would have no effect on them."""

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
    """Returns the request in force for online_softmax."""
    return str(current_request().choice("online_softmax"))


@pytest.fixture(params=["one object", "an object each"])
def b(request, spies):
    """Returns a function that makes context managers for blocks under "b"."""
    shared = gla.use_backend("b")
    return (lambda: shared) if request.param == "one object" else lambda: gla.use_backend("b")


def test_a_generator_that_ends_inside_other_blocks_ends_only_its_own(b):
    steps = tokens(b())
    next(steps)
    assert asked() == "b"  # a block around a yield applies to the consumer too, until the generator continues
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


def test_a_thread_does_not_see_the_block_of_another(spies, x, in_time):
    def winner():
        return gla.explain("online_softmax", x).winner

    with gla.use_backend("b"):
        assert (in_time(winner), winner()) == ("a", "b")


def test_threads_with_blocks_at_the_same_time_do_not_mix(spies, x, at_once):
    together, seen = threading.Barrier(4), {}

    def work(name):
        with gla.use_backend(name):
            together.wait()
            inside = gla.explain("online_softmax", x).winner
            together.wait()
        seen[name] = (inside, gla.explain("online_softmax", x).winner)

    at_once(work, "abcd")
    assert seen == {name: (name, "a") for name in "abcd"}


def test_a_thread_given_a_copy_of_the_context_keeps_the_request(spies, x, in_time):
    with gla.use_backend("b"):
        context = contextvars.copy_context()
    assert in_time(lambda: context.run(lambda: gla.explain("online_softmax", x).winner)) == "b"


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
