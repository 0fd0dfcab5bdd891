"""Plants bugs in ops of the reference: functions that return wrong results, each with the case that must name it."""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from gla_core.dispatch.backend import arguments_of
from gla_core.dispatch.registry import get
from tests.reference import function

REFERENCE = {op: function(op) for op in get("reference").ops}
LATE = 1000
"""Number of tokens, columns or keys before some bugs show."""


class Bug(NamedTuple):
    """A bug in an op of the reference.

    Attributes:
        function: the op with the bug.
        case: the beginning of the name of the case that must name the bug.
        over: the quantities that this case reports over its budget. None means that the test does not check them.
        claims: further capabilities of the backend.
    """

    name: str
    op: str
    function: Callable[..., Any]
    case: str
    over: set[str] | None
    claims: Mapping[str, Any]


BUGS: list[Bug] = []


class Op:
    """An op of the reference: it returns the right results for arguments x with changes, and bugs are planted in it.

    Several results are a namespace. Pools and rings are written.
    """

    def __init__(self, name, *results):
        self.name, self.results = name, results

    def __call__(self, x, **changes):
        computed = REFERENCE[self.name](**{**vars(x), **changes})
        return SimpleNamespace(**dict(zip(self.results, computed, strict=True))) if self.results else computed

    def bug(self, case, over=None, call=None, **claims):
        """Returns a decorator that plants a bug: a function that maps a namespace of the op's arguments to its results.

        A function with a second argument receives the right results there, and changes them in place.

        Args:
            case: the beginning of the name of the case that must name the bug, without the name of the call.
            call: the name of the call, by default that of the op.
        """
        case = case.replace("[", f"[{call or self.name}-", 1)

        def plant(wrong):
            changes_results = wrong.__code__.co_argcount == 2

            @functools.wraps(REFERENCE[self.name])
            def function(*args):
                x = SimpleNamespace(**dict(zip(arguments_of(REFERENCE[self.name]), args, strict=True)))
                if changes_results:
                    wrong(x, results := self(x))
                else:
                    results = wrong(x)
                return tuple(vars(results).values()) if isinstance(results, SimpleNamespace) else results

            BUGS.append(Bug(wrong.__name__, self.name, function, case, over, claims))
            return wrong

        return plant

    def bugs(self, case, over=None, **bugs):
        """Plants bugs that one case must name, each of one expression, by their names."""
        for name, wrong in bugs.items():
            wrong.__name__ = name
            self.bug(case, over)(wrong)


def as_if_dense(x):
    """Returns the elements at the addresses that a contiguous tensor of x's shape would have."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())
