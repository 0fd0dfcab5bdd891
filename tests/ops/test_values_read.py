"""GLA_CHECK=1 reads what an op reads, and nothing else.

Whether an op reads a place is seen in its results: a NaN there spreads to other places, or changes what is written.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import gla_core as gla
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS
from gla_core.ops.spec import WIDTHS, part_of
from tests.ops.every_op import CALLS, copied

INVARIANT = [name for name, (function, _) in CALLS.items() if part_of(PUBLIC_OPS[function.__name__]).by_segments]


@pytest.fixture
def values(monkeypatch):
    """`values(True)` makes the ops check values, and `values(False)` makes them not."""

    def set_to(checked):
        monkeypatch.setenv("GLA_CHECK", str(int(checked)))
        gla.reload_environment()

    yield set_to
    monkeypatch.undo()
    gla.reload_environment()


def computed(function, args):
    """Returns the results of a call and the tensors that it was given, which it may have written, by name."""
    args = copied(args)
    actual = function(**args, backend="reference")
    actual = actual if isinstance(actual, tuple) else (actual,)
    return {f"result {i}": x for i, x in enumerate(actual) if x is not None} | {
        name: x for name, x in args.items() if isinstance(x, torch.Tensor)
    }


def places(function, name, x):
    """Yields the places of a tensor: tokens, rows, slots, or tokens of rings; or the whole tensor."""
    (argument,) = [a for a in PUBLIC_OPS[function.__name__].arguments if a.shown == name]
    dims = argument.dims(x) or ["rows"]
    depth = sum(1 for _ in itertools.takewhile(lambda dim: dim not in (*WIDTHS, "Ho"), dims))
    yield from itertools.product(*map(range, x.shape[:depth]))


def poisoned(args, where, value=torch.nan):
    changed = copied(args)
    for name, place in where:
        changed[name][place] = value
    return changed


def is_read(function, args, expected, name, place):
    """Returns whether a NaN at this place spreads to others, or what is written to this place depends on it.

    Args:
        expected: the results without it.
    """
    actual = computed(function, poisoned(args, [(name, place)]))
    for other, x in actual.items():
        nan = x.isnan()
        if other == name or (name == "state" and x.shape == args[name].shape):  # a step copies the states of others
            nan[place] = False
        if nan.any():
            return True
    actual = computed(function, poisoned(args, [(name, place)], 3.0))[name][place]
    return not (actual == 3.0).all() and not torch.equal(actual, expected[name][place])


def test_every_op_that_checks_values_is_called():
    public = {spec.public for spec in ABSTRACT_OPS.values() if spec.reads is not None}
    assert public == {function.__name__ for function, _ in CALLS.values()}
    gradients = ["chunk_gla_bwd", "chunk_ssd_bwd", "chunk_delta_bwd", "online_softmax_bwd", "softmax_attention_bwd"]
    assert [name for name, spec in ABSTRACT_OPS.items() if spec.reads is None] == gradients


# Delta rules have the `OpSpec.reads` of the like ops of GLA, so one call of each is quick.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough if "delta" in n and " " in n else ()) for n in CALLS]
)
def test_what_is_read_is_checked_and_nothing_else(name, values):
    function, args = CALLS[name]
    floats = {argument: x for argument, x in args.items() if torch.is_tensor(x) and x.is_floating_point()}
    every = [(argument, place) for argument, x in floats.items() for place in places(function, argument, x)]
    values(False)
    expected = computed(function, args)
    read = [where for where in every if is_read(function, args, expected, *where)]
    unread = [where for where in every if where not in read]
    assert len(read) >= (0 if "without" in name else 3)

    values(True)
    for argument, place in read:
        with pytest.raises(ValueError, match=rf"^{argument} holds NaN in \d+ of \d+ places"):
            computed(function, poisoned(args, [(argument, place)]))
    for value in (torch.nan, 7.0):
        actual = computed(function, poisoned(args, unread, value))
        assert torch.equal(actual["result 0"], expected["result 0"])
    for where in read:
        if where[0] == "g" and "gate" not in args:
            with pytest.raises(ValueError, match=re.escape("g has values up to 7.0")):
                computed(function, poisoned(args, [where], 7.0))

    if name not in INVARIANT:
        return
    with gla.batch_invariant(64):  # a call is computed by parts, which are not checked again
        computed(function, poisoned(args, unread))
        for argument, place in {argument: (argument, place) for argument, place in read}.values():
            with pytest.raises(ValueError, match=f"^{argument} holds NaN"):
                computed(function, poisoned(args, [(argument, place)]))
