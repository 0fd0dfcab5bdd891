"""What the user asked for. One grammar serves `backend=`, `use_backend` and GLA_BACKEND, strongest first:

triton_fused                                    this backend, or an error that holds its refusal
triton_fused,parallel_scan                      the first that can run, or an error with every refusal
auto                                            the ranked choice
chunk_gla_fwd=parallel_scan;*=auto              per op; ops that are not named fall to the next weaker request
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from gla_core.dispatch import registry
from gla_core.dispatch.backend import OP_PARAMETERS
from gla_core.dispatch.environment import environment
from gla_core.dispatch.errors import UnknownOpError, nearest

AUTO = "auto"
ANY_OP = "*"

_context: ContextVar[tuple[str, ...]] = ContextVar("gla_use_backend", default=())  # innermost first


@dataclass(frozen=True, slots=True)
class Choice:
    """The backends allowed for one op, in order; empty for `auto`. `source` says who asked."""

    names: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        return ",".join(self.names) or AUTO


@dataclass(frozen=True, slots=True)
class Request:
    """A choice for every op. `spec` is its text in the grammar, each clause with its source after an @.

    The text is what travels from a forward to its backward, so that both run under the same request.
    """

    choices: dict[str, Choice]
    spec: str

    def choice(self, op: str) -> Choice:
        return self.choices.get(op) or self.choices[ANY_OP]


def current_request(argument: str | None = None) -> Request:
    """The request in force here: `argument` (a call's `backend=`) over `use_backend` over GLA_BACKEND over auto."""
    if argument is not None and not isinstance(argument, str):
        raise _not_a_string("backend=", argument)
    return _combine(argument or "", _context.get(), environment().backend)


def _not_a_string(source: str, value: object) -> TypeError:
    return TypeError(f"{source} is {type(value).__name__}; expected a string such as 'auto' or 'reference'")


@functools.lru_cache(maxsize=4096)
def _combine(argument: str, context: tuple[str, ...], variable: str) -> Request:
    choices = {ANY_OP: Choice((), "default")}
    layers = [(variable, "GLA_BACKEND"), *((text, "use_backend") for text in reversed(context)), (argument, "backend=")]
    for text, source in layers:
        stronger = parse(text, source) if text else {}
        choices = stronger if ANY_OP in stronger else {**choices, **stronger}
    return Request(choices, ";".join(f"{op}={choice}@{choice.source}" for op, choice in choices.items()))


def check(request: str, source: str) -> None:
    """Raise unless a request can be read and every backend that it names is there; `source` is who asks.

    Raises:
        TypeError, ValueError: it is no string, or cannot be read.
        UnknownOpError, UnknownBackendError: it names what does not exist.
    """
    for choice in parse(request, source).values():
        for name in choice.names:
            registry.get(name, f"{choice.source}: ")


def parse(text: str, source: str) -> dict[str, Choice]:
    """Parse a request. Raises ValueError for bad grammar and UnknownOpError for an op that does not exist."""
    if not isinstance(text, str):
        raise _not_a_string(source, text)
    choices: dict[str, Choice] = {}
    for clause in filter(None, (part.strip() for part in text.split(";"))):
        op, names = (s.strip() for s in clause.split("=", 1)) if "=" in clause.split("@")[0] else (ANY_OP, clause)
        if op != ANY_OP and op not in OP_PARAMETERS:
            raise UnknownOpError(f"{source}: unknown op {op!r}{nearest(op, OP_PARAMETERS)}")
        if op in choices:
            raise ValueError(f"{source}: {text!r} names {op!r} twice")
        choices[op] = _parse_names(names, source, text)
    if not choices:
        raise ValueError(f"{source}: empty request {text!r}; expected a backend's name or 'auto'")
    return choices


def _parse_names(names: str, source: str, text: str) -> Choice:
    names, _, said_by = names.partition("@")
    listed = tuple(name.strip() for name in names.split(","))
    if listed == (AUTO,):
        return Choice((), said_by or source)
    if AUTO in listed or not all(name.isidentifier() for name in listed):
        raise ValueError(f"{source}: cannot read {names!r} in {text!r}; expected 'auto' or names such as 'a,b'")
    return Choice(listed, said_by or source)


class use_backend:
    """Run the ops inside a `with` block, or a decorated function, under a request.

    Blocks nest: the innermost that names an op decides it. Threads and asyncio tasks do not see each other's blocks.
    The decorator serves coroutine functions too, but no generators (TypeError), whose steps run at their caller's.

    Args:
        request: a request in the grammar of this module.

    Raises:
        ValueError, UnknownOpError, UnknownBackendError: on creation, for a request that cannot be read or met.

    Example:
        >>> with gla.use_backend("reference"):
        ...     o, _ = gla.chunk_gla(q, k, v, g)
        >>> @gla.use_backend("chunk_gla_fwd=reference")
        ... def evaluate(model): ...
    """

    def __init__(self, request: str) -> None:
        check(request, "use_backend")
        self._request = request

    def __enter__(self) -> None:
        _context.set((self._request, *_context.get()))

    def __exit__(self, *_: object) -> None:
        context = list(_context.get())
        if self._request in context:  # the innermost of ours: generators end their blocks in any order
            context.remove(self._request)
        _context.set(tuple(context))

    def __call__(self, function: Callable) -> Callable:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"use_backend cannot decorate the generator {function.__name__}; use a with block inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: object, **kwargs: object) -> object:
                with self:
                    return await function(*args, **kwargs)

            return run_async

        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            with self:
                return function(*args, **kwargs)

        return run
