"""Memory that an op writes belongs to one argument alone, and no two of its places are alike."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import gla_core as gla
from gla_core.ops import ABSTRACT_OPS
from tests.ops.every_op import CALLS, copied, ints, rings, states, tokens

NAMES = (
    "chunk_gla_pool pad",
    "recurrent_gla_step in place",
    "recurrent_gla_layer_step",
    "recurrent_ssd_step",
    "recurrent_gla_steps packed",
    "recurrent_gla_replay packed",
)


def call_of(name):
    """Returns the function of a call, its arguments, with `out` if there may be one, and the names of those written."""
    function, args = CALLS[name]
    spec = ABSTRACT_OPS[function.__name__]
    args = args | ({"out": torch.zeros(1, 10, 1, 2)} if "out" in spec.written else {})
    return function, args, spec.written or ("state",)


def computed(function, args):
    return function(**copied(args))


def side_by_side(x, y, shared):
    """Returns copies of two tensors in one memory, the second behind the first, or in its last 16 bytes if `shared`."""
    start = x.nbytes - 16 * shared
    memory = torch.zeros(x.nbytes + y.nbytes, dtype=torch.uint8)
    places = (memory[: x.nbytes], memory[start : start + y.nbytes])
    return [m.view(z.dtype).view(z.shape).copy_(z) for m, z in zip(places, (x, y), strict=True)]


@pytest.fixture
def check_or_not(monkeypatch):
    """`check_or_not(True)` makes the ops check values, and `check_or_not(False)` makes them not; both forget plans."""

    def set_to(checked):
        monkeypatch.setenv("GLA_CHECK", str(int(checked)))
        gla.reload_environment()

    set_to(False)
    yield set_to
    monkeypatch.undo()
    gla.reload_environment()


def test_every_op_that_writes_is_called():
    writing = {spec.public for spec in ABSTRACT_OPS.values() if spec.written or "inplace" in spec.parameters}
    assert writing == {CALLS[name][0].__name__ for name in NAMES}
    for name in NAMES:
        _, args, written = call_of(name)
        assert set(written) <= set(args)


@pytest.mark.parametrize("name", NAMES)
def test_written_memory_is_shared_with_no_other_argument(name, check_or_not):
    function, args, names = call_of(name)
    tensors = [other for other, x in args.items() if torch.is_tensor(x)]
    pairs = [(written, other) for written in names for other in tensors if other != written]
    assert len(pairs) >= 5
    expected = computed(function, args)

    def in_one_memory(pair, shared):
        return copied(args) | dict(zip(pair, side_by_side(*(args[each] for each in pair), shared), strict=True))

    def refused(pair):
        either = "|".join(pair)
        message = rf"^({either}) is written in place and shares memory with ({either}); expected memory of its own"
        with pytest.raises(ValueError, match=message):
            function(**in_one_memory(pair, True))

    check_or_not(False)
    for pair in pairs:
        refused(pair)
    for pair in pairs:
        torch.testing.assert_close(function(**in_one_memory(pair, False)), expected)
    check_or_not(True)
    computed(function, args)
    for pair in pairs:  # also where the plan of the call is known
        refused(pair)


@pytest.mark.parametrize("name", NAMES)
def test_places_of_written_memory_are_not_alike(name, check_or_not):
    function, args, names = call_of(name)
    for written in set(names) - {"out"}:
        x = args[written]
        narrow, wide = ((x.stride(0) + more, *x.stride()[1:]) for more in (-1, 1))
        message = f"{written} has shape {list(x.shape)} and strides {narrow}, so that its elements share memory, and is"
        with pytest.raises(ValueError, match=re.escape(message)):
            function(**copied(args) | {written: torch.zeros(x.numel()).as_strided(x.shape, narrow)})
        y = torch.zeros(x.numel() + len(x)).as_strided(x.shape, wide).copy_(x)
        torch.testing.assert_close(function(**copied(args) | {written: y}), computed(function, args))


def test_memory_of_pages_is_legal(check_or_not):
    """A page holds the state of a slot and its rings; one ring may hold keys beside values."""
    P, L = 6, 4
    args = {"pool": states(P), **rings(P, L)}
    sizes = [x[0].numel() for x in args.values()]
    starts = list(itertools.accumulate(sizes, initial=0))
    pages = torch.zeros(P, starts[-1] + 3)
    in_pages = {
        name: pages[:, start : start + size].unflatten(1, x.shape[1:]).copy_(x)
        for (name, x), start, size in zip(args.items(), starts, sizes, strict=False)
    }
    both = torch.zeros(P, L, 1, 4)
    beside = {"ring_k": both[..., :2].copy_(args["ring_k"]), "ring_v": both[..., 2:].copy_(args["ring_v"])}
    rest = tokens(2, 2) | {"slots": ints(1, 5), "ring_start": ints(3, 0), "num_accepted": ints(1, 2)}
    expected = gla.recurrent_gla_replay(**rest, **copied(args))
    for memory in (in_pages, copied(args) | beside):
        assert torch.equal(gla.recurrent_gla_replay(**rest, **memory), expected)
    one_too_far = in_pages | {"ring_v": pages[:, starts[2] - 1 : starts[3] - 1].unflatten(1, (L, 1, 2))}
    gla.reload_environment()
    with pytest.raises(ValueError, match="ring_k is written in place and shares memory with ring_v"):
        gla.recurrent_gla_replay(**rest, **one_too_far)


def test_a_bad_out_is_refused_where_pytorch_sees_the_call(check_or_not):
    function, args, _ = call_of("recurrent_gla_steps packed")
    args = copied(args)
    before = args["pool"].clone()
    out = args["pool"].flatten().view(torch.bfloat16)[:20].view(1, 10, 1, 2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="out is written in place and shares"):
        function(**args | {"out": out})
    assert torch.equal(args["pool"], before)


def test_a_step_that_writes_nothing_may_share_memory(check_or_not):
    function, args, _ = call_of("recurrent_gla_step in place")
    args = copied(args)
    q = args["state"][0].flatten()[:2].view(1, 1, 2).expand(3, 1, 2)
    function(**args | {"inplace": False, "q": q})
    with pytest.raises(ValueError, match="state is written in place and shares memory with q"):
        function(**args | {"q": q})
