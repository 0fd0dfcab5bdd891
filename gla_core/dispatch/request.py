"""Requests: which backends a user allows. One grammar serves `backend=`, `use_backend` and GLA_BACKEND:

triton_fused                                    this backend, or an error that holds its refusal
triton_fused,parallel_scan                      the first that can run the call, or an error with every refusal
auto                                            the ranked choice
online_softmax=parallel_scan;*=auto             per op; a weaker request decides for ops that are not named
batch_invariant=4096                            a setting, which `batch_invariant` explains; 0 turns it off

The call's `backend=` is the strongest request, then the innermost `use_backend`, then GLA_BACKEND.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch

from gla_core.dispatch import registry
from gla_core.dispatch.backend import CHUNK, OP_PARAMETERS
from gla_core.dispatch.environment import environment
from gla_core.dispatch.errors import UnknownOpError, nearest
from gla_core.dispatch.registry import AUTO, INVARIANT
from gla_core.dispatch.steps import step

ANY_OP = "*"

_IN_GRAPH = "\x1f"  # separates a call's `backend=` from the blocks that a compiled graph contains; users cannot type it
_context: ContextVar[tuple[_Block, ...]] = ContextVar("gla_use_backend", default=())  # innermost first


@dataclass(frozen=True, slots=True)
class Choice:
    """The backends allowed for one op, in order; empty for `auto`. `source` says where the request comes from."""

    names: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        return ",".join(self.names) or AUTO


class Setting(NamedTuple):
    """The tokens of `batch_invariant`, 0 if it is turned off, and where the setting comes from."""

    tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class Request:
    """A choice for every op, and the setting `batch_invariant`.

    Attributes:
        choices: the choice for each op; `ANY_OP` stands for all ops without a choice of their own.
        spec: the text of the request in the grammar, each clause with its source after an @. The text travels from a
            forward to its backward, so that both run under the same request.
        batch_invariant: the value of `OpCall.batch_invariant`.
    """

    choices: dict[str, Choice]
    spec: str
    batch_invariant: int | None = None

    def choice(self, op: str) -> Choice:
        return self.choices.get(op) or self.choices[ANY_OP]

    def allowing(self, name: str, op: str) -> str:
        """Returns the text of this request with one more backend for an op, to be tried last."""
        texts = {each: str(choice) for each, choice in self.choices.items() if choice.source != "default"}
        texts[op if op in texts else ANY_OP] += f",{name}"
        return texts[ANY_OP] if len(texts) == 1 and ANY_OP in texts else ";".join(f"{o}={t}" for o, t in texts.items())


def request_of(request: str | Request | None) -> Request:
    """Returns a request that may be given as a text: a call's `backend=`, or the text of a request."""
    return request if isinstance(request, Request) else current_request(request)


def text_of(request: str | Request) -> str:
    """Returns the text of a request, which may be a text already."""
    return request if isinstance(request, str) else request.spec


@step
def current_request(argument: str | None = None) -> Request:
    """Returns the request in force: `argument` (a call's `backend=`), then `use_backend`, GLA_BACKEND, auto."""
    if argument is not None and not isinstance(argument, str):
        raise _not_a_string("backend=", argument)
    blocks = _context.get()
    requests = tuple(block.request for block in blocks if not block.ended) if blocks else ()
    settings = environment()
    return _combine(argument or "", requests, settings.backend, settings.batch_invariant)


def _not_a_string(source: str, value: object) -> TypeError:
    return TypeError(f"{source} is {type(value).__name__}; expected a string such as 'auto' or 'reference'")


@functools.lru_cache(maxsize=4096)
def _combine(argument: str, context: tuple[str, ...], variable: str, tokens: str) -> Request:
    choices, setting = {ANY_OP: Choice((), "default")}, _parse_tokens(tokens, "GLA_BATCH_INVARIANT") if tokens else None
    argument, *in_graph = argument.split(_IN_GRAPH)
    blocks = ((text, "use_backend") for text in reversed((*in_graph, *context)))
    for text, source in [(variable, "GLA_BACKEND"), *blocks, (argument, "backend=")]:
        if not text:
            continue
        stronger, said = parse(text, source)
        choices = stronger if ANY_OP in stronger else {**choices, **stronger}
        setting = said or setting
    length, source = setting or (0, "default")
    spec = [f"{op}={choice}@{choice.source}" for op, choice in choices.items()]
    # The text also says that batch_invariant is off: a block around the backward alone then changes nothing.
    return Request(choices, ";".join([*spec, f"{INVARIANT}={length}@{source}"]), length or None)


def check(request: str, source: str) -> dict[str, Choice]:
    """Returns the choices of a request after checking that every backend it names is installed.

    Args:
        source: where the request comes from, for the messages.

    Raises:
        TypeError, ValueError: the request is not a string, or cannot be read.
        UnknownOpError, UnknownBackendError: the request names an op or a backend that does not exist.
    """
    choices, _ = parse(request, source)
    for choice in choices.values():
        for name in choice.names:
            registry.get(name, f"{choice.source}: ")
    return choices


def parse(text: str, source: str) -> tuple[dict[str, Choice], Setting | None]:
    """Returns the choices and the setting that a text names.

    Raises:
        ValueError: the text does not follow the grammar. UnknownOpError: it names an op that does not exist.
    """
    if not isinstance(text, str):
        raise _not_a_string(source, text)
    choices: dict[str, Choice] = {}
    setting: Setting | None = None
    for clause in filter(None, (part.strip() for part in text.split(";"))):
        op, said = (s.strip() for s in clause.split("=", 1)) if "=" in clause.split("@")[0] else (ANY_OP, clause)
        if op in choices or (op == INVARIANT and setting is not None):
            raise ValueError(f"{source}: {text!r} names {op!r} twice")
        if op == INVARIANT:
            setting = _parse_tokens(said, source, text)
        elif op == ANY_OP or op in OP_PARAMETERS:
            choices[op] = _parse_names(said, source, text)
        else:
            raise UnknownOpError(f"{source}: unknown op {op!r}{nearest(op, OP_PARAMETERS)}")
    if not choices and setting is None:
        raise ValueError(f"{source}: empty request {text!r}; expected a backend's name or 'auto'")
    return choices, setting


def _parse_names(names: str, source: str, text: str) -> Choice:
    names, _, origin = names.partition("@")
    listed = tuple(name.strip() for name in names.split(","))
    if listed == (AUTO,):
        return Choice((), origin or source)
    if AUTO in listed or not all(name.isidentifier() for name in listed):
        raise ValueError(f"{source}: cannot read {names!r} in {text!r}; expected 'auto' or names such as 'a,b'")
    return Choice(listed, origin or source)


def _parse_tokens(tokens: str, source: str, text: str = "") -> Setting:
    tokens, _, origin = tokens.partition("@")
    if not tokens.isdecimal() or int(tokens) % CHUNK != 0:
        what = f"batch_invariant is {tokens!r} in {text!r}" if text else f"tokens is {tokens}"
        raise ValueError(f"{source}: {what}; expected a multiple of {CHUNK}, or 0")
    return Setting(int(tokens), origin or source)


class _Block:
    """A request in force from one entry to its exit.

    A block in a generator exits wherever the generator is closed, perhaps in another context.
    """

    def __init__(self, request: str, frame: int = 0) -> None:
        self.request, self.frame, self.ended = request, frame, False

    def __enter__(self) -> None:
        global _traced
        if torch.compiler.is_compiling():
            _traced = (self.request, *_traced)
        else:
            self._token = _context.set((self, *_context.get()))

    def __exit__(self, *_: object) -> None:
        global _traced
        if torch.compiler.is_compiling():
            _traced = _traced[1:]
            return
        others = tuple(block for block in _context.get() if block is not self)
        try:
            _context.reset(self._token)
        except ValueError:  # entered in another context, which cannot be changed from here
            self.ended = True
        else:
            _context.set(others)


_traced: tuple[str, ...] = ()
"""The requests of the blocks around the code that torch.compile is tracing, innermost first; otherwise empty."""


def request_in_graph(argument: str | None) -> str:
    """Returns the request that a compiled graph contains: the call's `backend=`, and the blocks in the same graph."""
    return _IN_GRAPH.join((argument or "", *_traced))


_P = ParamSpec("_P")
_R = TypeVar("_R")


class use_backend:
    """Runs the ops inside a `with` block, or a decorated function, under a request.

    Blocks nest: for each op, the innermost block that names it decides. Threads and asyncio tasks do not see each
    other's blocks. The decorator works on functions and coroutine functions. It raises TypeError for a generator,
    because the steps of a generator run in its caller. A block around a `yield` is in force in the consumer too, until
    the generator continues.

    A backward runs under the request of its forward, wherever it is called. `torch.utils.checkpoint` runs the forward
    again, perhaps after the block has ended: give it the block as well, by
    `context_fn=lambda: (gla.use_backend("a"), gla.use_backend("a"))` with `use_reentrant=False`.

    A graph compiled by `torch.compile` contains the `backend=` of its calls and the blocks written in the compiled
    function, as below (a block around a `yield`, or an object created outside, is not contained). Otherwise the request
    in force when the graph runs decides. On a GPU, the graph's backward runs in autograd's own threads. It sees
    GLA_BACKEND and what the graph contains, but not the blocks around the call.

    Args:
        request: a request in the grammar of this module.

    Raises:
        TypeError, ValueError, UnknownOpError, UnknownBackendError: the request cannot be read, or names an op or a
            backend that does not exist. Raised on creation; in a compiled function, when the op runs.

    Example:
        >>> with gla.use_backend("reference"):
        ...     o, _ = gla.chunk_gla(q, k, v, g)
        >>> @gla.use_backend("online_softmax=reference")
        ... def evaluate(model): ...
    """

    def __init__(self, request: str) -> None:
        if not torch.compiler.is_compiling():
            check(request, "use_backend")
        self._request = request
        self._entered: list[_Block] = []  # of nested blocks, threads and tasks, which may share this object

    def __enter__(self) -> None:
        # The frame of the `with` tells the entries of one object apart, wherever that frame continues.
        frame = 0 if torch.compiler.is_compiling() else id(sys._getframe(1))
        block = _Block(self._request, frame)
        self._entered.append(block)
        block.__enter__()

    def __exit__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            self._entered.pop().__exit__()
            return
        frame = id(sys._getframe(1))
        mine = [block for block in self._entered.copy() if block.frame == frame]
        if not mine:  # an ExitStack leaves in another frame
            mine = [block for block in reversed(_context.get()) if block in self._entered]
        for block in mine[-1:]:
            self._entered.remove(block)
            block.__exit__()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"use_backend cannot decorate the generator {function.__name__}, because its steps run in its caller; "
                "pass backend= to the calls inside it, or put the block around the loop that consumes it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                with _Block(self._request):
                    return await function(*args, **kwargs)

            return cast("Callable[_P, _R]", run_async)

        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with _Block(self._request):
                return function(*args, **kwargs)

        return run


def batch_invariant(tokens: int = 4096) -> use_backend:
    """Makes results independent of the batch (batch invariance), inside a `with` block or a decorated function.

    The results of the ops of gated linear attention for a sequence, and its gradients, then have the same bits in every
    batch. They depend neither on the number of sequences, nor on whether these are packed or rows of a batch. They do
    not depend either on how a prompt is cut into calls, as long as it is cut at multiples of `tokens` and each call
    continues from the final state of the one before.
    Padding behind a sequence in its row of a batch counts as a part of it: pack sequences of unequal length, or give a
    layer an attention mask, which packs them. Other ops raise NotImplementedError. PyTorch's own matrix products are
    not covered.

    On a GPU, kernels are planned for segments of `tokens` tokens, whatever the batch. On a CPU, and with backends that
    do not support the setting, each segment is a call of its own, one after the other, and the host reads cu_seqlens.

    GLA_BATCH_INVARIANT=4096 does the same for a whole process, and is weaker than a block. Like a request of
    `use_backend`, the setting of a forward also holds for its backward.

    Args:
        tokens: length of a segment, a multiple of 64. With shorter segments, prompts may be cut more finely, and more
            states pass through memory.

    Raises:
        ValueError: tokens is not a multiple of 64.

    Example:
        >>> with gla.batch_invariant():
        ...     o, _ = gla.chunk_gla(q, k, v, g)
    """
    if not torch.compiler.is_compiling():
        _parse_tokens(str(tokens), "batch_invariant")
    return use_backend(f"{INVARIANT}={tokens}")
