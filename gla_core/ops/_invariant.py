"""Makes a call batch-invariant by calling a backend for one segment of a sequence at a time.

A backend that does not honour `OpCall.batch_invariant` is called separately for each segment of `tokens` tokens. Such a
call always returns the same bits. A segment depends on the segments before it only through the state that enters it.
See `gla_core.batch_invariant`. `OpSpec.by_segments` is one of the functions `forward`, `backward` and `step`. They take
the arguments x by name, cut those that `OpSpec.tokens` names, and carry the state.

B batch   T tokens   H key heads   Hv value heads   N sequences   K, V key and value width   n rows of checkpoints
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.backend import Backend, OpCall
from gla_core.dispatch.errors import NoBackendError
from gla_core.dispatch.request import current_request
from gla_core.dispatch.tensors import new_state, number_of_sequences, wide
from gla_core.ops.spec import OpSpec, Role, batch_invariant_ops, part_of, spec_of

Compute = Callable[..., Any]
"""Takes a spec and the arguments of its op by name, and returns the results of the backend."""


class Segment(NamedTuple):
    """A segment of sequence n: tokens start to end of row b of the batch. Row `row` holds its first checkpoint."""

    n: int
    b: int
    start: int
    end: int
    row: int

    def part(self, x: Tensor | None) -> Tensor | None:
        """Returns these tokens of x [B, T, ...]; one without tokens, such as a constant gate, is returned itself."""
        rows = slice(self.b, self.b + 1), slice(self.start, self.end)
        return x if x is None or is_shared(x) else x[rows].contiguous()

    def write(self, x: Tensor | None, part: Tensor | None) -> None:
        """Writes `part` to these tokens of x [B, T, ...]; adds it to the gradient x of a tensor without tokens."""
        if x is None or part is None:
            return
        if is_shared(x):
            x += part
        else:
            x[self.b : self.b + 1, self.start : self.end] = part


def is_shared(x: Tensor) -> bool:
    """Returns whether all tokens share a tensor, such as a constant gate [Hv], or a skip [Hv, V]."""
    return x.ndim < 3


_inside: ContextVar[bool] = ContextVar("inside", default=False)


def is_invariant(backend: str | None = None) -> bool:
    """Returns whether `batch_invariant` is in force: here, for the op that is computed, or by a call's `backend=`."""
    return _inside.get() or current_request(backend).batch_invariant is not None


def needs_equal_bits(backend: str | None = None) -> bool:
    """Returns whether rows need the same bits whatever rows are beside them: under batch invariance, and, because
    `torch.compile` cannot ask for it, in a caller's compiled code.
    """
    return torch.compiler.is_compiling() or is_invariant(backend)


def inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `function`, in which `is_invariant` is true."""

    def run(*args: Any) -> Any:
        token = _inside.set(True)
        try:
            return function(*args)
        finally:
            _inside.reset(token)

    return run


def function_of(spec: OpSpec, backend: Backend, call: OpCall, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes a call by calling a backend once for each segment of a sequence.

    The function takes the arguments of the contract in order.

    Args:
        run: runs an op with a request, as `_run.run` does.

    Raises:
        NotImplementedError: batch invariance is not defined for the op.
        NoBackendError: the backend lacks the op by which the parts of the call are computed.
    """
    part = part_of(spec) if spec.by_segments is None else spec
    by_segments = part.by_segments
    if by_segments is None:
        raise NotImplementedError(
            f"{spec.name} is not batch-invariant; under batch_invariant call {batch_invariant_ops()} alone, or put "
            "`gla.use_backend('batch_invariant=0')` around this call"
        )
    by = part.forward or part.name
    if by not in backend.ops:
        raise NoBackendError(
            f"under batch_invariant {spec.name} is computed part by part, by {by}, which the backend {backend.name!r} "
            "does not implement; request a backend that implements both"
        )
    tokens = call.batch_invariant

    def compute(each: OpSpec, **x: Any) -> Any:
        request = current_request(f"{backend.name};batch_invariant=0")
        return run(each, each.complete((), x), request, is_part=True)

    def function(**x: Any) -> Any:
        return by_segments(compute, part, tokens, x)

    if spec.lowering is not None and part is not spec:
        return spec.lowering.function(function)
    return lambda *args: function(**dict(zip(spec.contract, args, strict=True)))


def _segments(tokens: int, x: Mapping[str, Any], checkpoint_every: int | None = None) -> Iterator[Segment]:
    """Yields the segments in order, sequence by sequence. The host reads cu_seqlens."""
    every, cu_seqlens = checkpoint_every or tokens, x["cu_seqlens"]
    if tokens % every != 0:
        raise ValueError(f"checkpoint_every is {every}; expected a divisor of the {tokens} tokens of batch_invariant")
    B, T = x["q"].shape[:2]
    sequences = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        sequences = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]
    for n, (b, first, end) in enumerate(sequences):
        row = 0 if cu_seqlens is None else n + first // every
        for start in range(first, end, tokens):
            yield Segment(n, b, start, min(start + tokens, end), row + (start - first) // every)


def _states(x: Mapping[str, Any], name: str) -> Tensor:
    """Returns a copy of the states [N, Hv, K, V] of this name, or zeros if they are None.

    They are the states that enter the sequences, or the gradients of the final states.
    """
    if x[name] is not None:
        return x[name].clone(memory_format=torch.contiguous_format)
    k, v = x["k"], x["v"] if "v" in x else x["x"]
    N = number_of_sequences(len(k), x["cu_seqlens"])
    return k.new_zeros(N, v.shape[2], k.shape[3], v.shape[3], dtype=wide(k.dtype))


_PER_CALL = ("output_final_state", "checkpoint_every", "inplace")
"""The scalars that the segments of a call do not take from it."""


def _options(spec: OpSpec, x: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call that every segment has too: scalars, and tensors that all tokens share."""
    taken = (a.name for a in spec.arguments if a.name in x and a.role in (Role.INPUT, Role.GATE_PARAMETER))
    return {name: x[name] for name in taken if name not in spec.tokens and name not in _PER_CALL}


def _zeros(spec: OpSpec, x: Mapping[str, Any]) -> list[Tensor | None]:
    """Returns the results of a call, filled with 0; None for each that is not asked for."""
    expected = spec.expected(*spec.complete((), x))
    return [None if each is None else each.empty(x["q"]).zero_() for each in expected]


def _forwards(
    compute: Compute,
    spec: OpSpec,
    segments: Iterable[Segment],
    x: Mapping[str, Any],
    states: Tensor,
    checkpoint_every: int | None,
) -> Iterator[tuple[Segment, Tensor, Tensor, list[Any]]]:
    """Yields each segment, the state that enters it, its o, and its checkpoints if the op may return them.

    At the end `states` holds the final states.
    """
    options = _options(spec, x)
    options = options if checkpoint_every is None else {**options, "checkpoint_every": checkpoint_every}
    for segment in segments:
        state = states[segment.n : segment.n + 1]
        # the forward of a backward may have tokens that the backward lacks, such as an output gate
        entering, parts = state.clone(), {name: segment.part(x.get(name)) for name in spec.tokens}
        o, leaving, *kept = compute(spec, **parts, initial_state=entering, output_final_state=True, **options)
        state.copy_(leaving)
        yield segment, entering, o, kept


def forward(compute: Compute, spec: OpSpec, tokens: int, x: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
    """Computes a forward over sequences, segment by segment."""
    o, _, *checkpoints = _zeros(spec, x)
    states, every = _states(x, "initial_state"), x.get("checkpoint_every")
    for segment, _, part, kept in _forwards(compute, spec, _segments(tokens, x, every), x, states, every):
        segment.write(o, part)
        for all_rows, rows in zip(checkpoints, kept, strict=True):
            if all_rows is not None:
                all_rows[segment.b, segment.row : segment.row + rows.shape[1]] = rows[0]
    return o, states if x["output_final_state"] else None, *checkpoints


def backward(compute: Compute, spec: OpSpec, tokens: int, x: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
    """Computes a backward over sequences, segment by segment. The forward computes the entering states again.

    Tensors that all tokens share, such as a constant gate, are passed to the segments in a wide dtype, so that only the
    sums of their gradients are rounded.
    """
    dtypes = {name: y.dtype for name, y in x.items() if isinstance(y, Tensor)}
    shared = [name for result in spec.results if (name := result.like) in dtypes and is_shared(x[name])]
    x = {**x, **{name: x[name].to(wide(x["q"].dtype)) for name in shared}}
    *gradients, _ = _zeros(spec, x)
    segments, states = _segments(tokens, x), _states(x, "initial_state")
    computed = _forwards(compute, spec_of(spec.forward), segments, x, states, None)
    entered = [(segment, state) for segment, state, *_ in computed]
    dstates, options = _states(x, "dstate"), _options(spec, x)
    for segment, state in reversed(entered):
        leaving = dstates[segment.n : segment.n + 1]
        inputs = {name: segment.part(x[name]) for name in spec.tokens}
        *parts, entering = compute(spec, **inputs, initial_state=state, dstate=leaving.clone(), **options)
        for gradient, part in zip(gradients, parts, strict=True):
            segment.write(gradient, part)
        leaving.copy_(entering)
    names = (result.like or "" for result in spec.results)
    rounded = (y if y is None else y.to(dtypes[name]) for name, y in zip(names, gradients, strict=False))
    return *rounded, None if x["initial_state"] is None else dstates


def step(compute: Compute, spec: OpSpec, tokens: int, x: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Computes a step, row by row."""
    state, indices, options = x["state"], x["state_indices"], _options(spec, x)
    o = _zeros(spec, x)[0]
    assert o is not None
    new = state if x["inplace"] else new_state(state).copy_(state)
    for b in range(len(o)):
        row = slice(b, b + 1)
        at = (new[row], None) if indices is None else (new, indices[row])
        parts = {name: y if (y := x[name]) is None or y.ndim == 1 else y[row].contiguous() for name in spec.tokens}
        o[row], _ = compute(spec, **parts, state=at[0], state_indices=at[1], inplace=True, **options)
    return o, new
