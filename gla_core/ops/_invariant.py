"""Makes a call batch-invariant by calling a backend for one segment of a sequence at a time.

A backend that does not honour `OpCall.batch_invariant` is called separately for each segment of `tokens` tokens. Such a
call always returns the same bits. A segment depends on the segments before it only through the state that enters it.
See `gla_core.batch_invariant`.

B batch   T tokens   H key heads   Hv value heads   N sequences   K, V key and value width   n rows of checkpoints
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.backend import Backend, OpCall, arguments_of
from gla_core.dispatch.composed import through_layer_step, through_pool, through_replay, through_steps
from gla_core.dispatch.errors import NoBackendError
from gla_core.dispatch.request import current_request
from gla_core.dispatch.tensors import new_checkpoints, new_state, number_of_sequences, wide

Compute = Callable[..., Any]
"""Takes the name of an abstract op and its arguments in order, and returns the results of the backend."""


class Segment(NamedTuple):
    """A segment of sequence n: tokens start to end of row b of the batch. Row `row` holds its first checkpoint."""

    n: int
    b: int
    start: int
    end: int
    row: int

    def of(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Returns these tokens of tensors [B, T, ...]; a constant gate [Hv] has none, and is returned itself."""
        rows = slice(self.b, self.b + 1), slice(self.start, self.end)
        return [x if x is None or x.ndim == 1 else x[rows].contiguous() for x in tensors]

    def write(self, x: Tensor | None, found: Tensor | None) -> None:
        """Writes `found` to these tokens of x [B, T, ...]; adds it to the gradient x of a constant gate [Hv]."""
        if x is None or found is None:
            return
        if x.ndim == 1:
            x += found
        else:
            x[self.b : self.b + 1, self.start : self.end] = found


def function_of(op: str, backend: Backend, call: OpCall) -> Callable[..., Any]:
    """Returns a function that computes a call by calling a backend once for each segment of a sequence.

    Raises:
        NotImplementedError: batch invariance is not defined for the op or for an argument of the call.
        NoBackendError: the backend lacks the op by which the parts of the call are computed.
    """
    if op not in _BY_SEGMENT:
        raise NotImplementedError(
            f"{op} is not batch-invariant; under batch_invariant call chunk_gla, chunk_gla_pool, recurrent_gla_step, "
            "recurrent_gla_layer_step, recurrent_gla_steps and recurrent_gla_replay alone, or put "
            "`gla.use_backend('batch_invariant=0')` around this call"
        )
    by = _COMPUTED_BY.get(op, op)
    if by not in backend.ops:
        raise NoBackendError(
            f"under batch_invariant {op} is computed part by part, by {by}, which the backend {backend.name!r} does "
            "not implement; request a backend that implements both"
        )

    def compute(each: str, *args: Any) -> Any:
        from gla_core.ops import ABSTRACT_OPS
        from gla_core.ops._run import run

        spec = ABSTRACT_OPS[each]
        request = current_request(f"{backend.name};batch_invariant=0")
        return run(spec, spec.complete(args, {}), request, is_part=True)

    function: Any = functools.partial(_BY_SEGMENT[op], compute, call.batch_invariant)
    function = _THROUGH[op](function) if op in _THROUGH else function
    lacking = sorted(call.given.difference(arguments_of(function)))
    if lacking:
        raise NotImplementedError(f"{op} takes no {' or '.join(lacking)} under batch_invariant; call it without")
    return function


def _segments(
    tokens: int, q: Tensor, cu_seqlens: Tensor | None, checkpoint_every: int | None = None
) -> Iterator[Segment]:
    """Yields the segments in order, sequence by sequence. The host reads cu_seqlens."""
    every = checkpoint_every or tokens
    if tokens % every != 0:
        raise ValueError(f"checkpoint_every is {every}; expected a divisor of the {tokens} tokens of batch_invariant")
    B, T = q.shape[:2]
    sequences = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        sequences = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]
    for n, (b, first, end) in enumerate(sequences):
        row = 0 if cu_seqlens is None else n + first // every
        for start in range(first, end, tokens):
            yield Segment(n, b, start, min(start + tokens, end), row + (start - first) // every)


def _states(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, given: Tensor | None) -> Tensor:
    """Returns a copy of the given states [N, Hv, K, V], or zeros if None is given.

    They are the states that enter the sequences, or the gradients of the final states.
    """
    if given is not None:
        return given.clone(memory_format=torch.contiguous_format)
    N = number_of_sequences(len(k), cu_seqlens)
    return k.new_zeros(N, v.shape[2], k.shape[3], v.shape[3], dtype=wide(k.dtype))


def _forwards(
    compute: Compute,
    parts: Iterable[Segment],
    inputs: Sequence[Tensor | None],
    scale: float,
    states: Tensor,
    checkpoint_every: int | None,
    gate_normalizer: int | None,
) -> Iterator[tuple[Segment, Tensor, Tensor, Any]]:
    """Yields each segment, the state that enters it, its o and its checkpoints.

    At the end `states` holds the final states.
    """
    for part in parts:
        state = states[part.n : part.n + 1]
        entering = state.clone()
        given = (*part.of(*inputs), scale, entering, True, None, checkpoint_every, gate_normalizer)
        o, leaving, checkpoints = compute("chunk_gla_fwd", *given)
        state.copy_(leaving)
        yield part, entering, o, checkpoints


def _forward(
    compute: Compute,
    tokens: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    checkpoint_every: int | None,
    gate_normalizer: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes chunk_gla_fwd, segment by segment."""
    o = v.new_zeros(*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3])
    states = _states(k, v, cu_seqlens, initial_state)
    checkpoints = None if checkpoint_every is None else new_checkpoints(k, v, cu_seqlens, checkpoint_every)
    parts = _segments(tokens, q, cu_seqlens, checkpoint_every)
    given = ((q, k, v, g), scale, states, checkpoint_every, gate_normalizer)
    for part, _, found, kept in _forwards(compute, parts, *given):
        part.write(o, found)
        if checkpoints is not None:
            checkpoints[part.b, part.row : part.row + kept.shape[1]] = kept[0]
    return o, states if output_final_state else None, checkpoints


def _backward(
    compute: Compute,
    tokens: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    do: Tensor,
    dstate: Tensor | None,
    gate_normalizer: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes chunk_gla_bwd, segment by segment. The forward computes the entering states again.

    A constant gate is given to the segments in a wide dtype, so that only the sum of their gradients is rounded.
    """
    dtype = None if g is None else g.dtype
    g = g.to(wide(q.dtype)) if g is not None and g.ndim == 1 else g
    states = _states(k, v, cu_seqlens, initial_state)
    given = ((q, k, v, g), scale, states, None, gate_normalizer)
    computed = _forwards(compute, _segments(tokens, q, cu_seqlens), *given)
    entered = [(part, state) for part, state, *_ in computed]
    gradients = [
        None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g)
    ]
    dstates = _states(k, v, cu_seqlens, dstate)
    for part, state in reversed(entered):
        leaving = dstates[part.n : part.n + 1]
        inputs = (*part.of(q, k, v, g), scale, state, None, None, None, *part.of(do), leaving.clone(), gate_normalizer)
        *found, dentering = compute("chunk_gla_bwd", *inputs)
        for x, of_part in zip(gradients, found, strict=True):
            part.write(x, of_part)
        leaving.copy_(dentering)
    dq, dk, dv, dg = gradients
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return dq, dk, dv, None if dg is None else dg.to(dtype), None if initial_state is None else dstates


def _step(
    compute: Compute,
    tokens: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    state_indices: Tensor | None,
    gate_normalizer: int | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Computes recurrent_gla_step, row by row."""
    o = v.new_zeros(len(q), max(q.shape[1], v.shape[1]), v.shape[2])
    new = state if inplace else new_state(state).copy_(state)
    for b in range(len(q)):
        row = slice(b, b + 1)
        own = new[row] if state_indices is None else new
        indices = None if state_indices is None else state_indices[row]
        inputs = [x if x is None or x.ndim == 1 else x[row].contiguous() for x in (q, k, v, g)]
        o[row], _ = compute("recurrent_gla_step", *inputs, own, scale, indices, gate_normalizer, True)
    return o, new


_BY_SEGMENT = {
    "chunk_gla_fwd": _forward,
    "chunk_gla_bwd": _backward,
    "chunk_gla_pool": _forward,  # between a read and a write of the pool
    "recurrent_gla_step": _step,
    "recurrent_gla_layer_step": _step,  # before the norm
    "recurrent_gla_steps": _step,  # between a read and writes of the pool
    "recurrent_gla_replay": _step,  # between a read and writes of the pool and the rings
}
_COMPUTED_BY = {
    "chunk_gla_bwd": "chunk_gla_fwd",
    "chunk_gla_pool": "chunk_gla_fwd",
    "recurrent_gla_layer_step": "recurrent_gla_step",
    "recurrent_gla_steps": "recurrent_gla_step",
    "recurrent_gla_replay": "recurrent_gla_step",
}
_THROUGH: dict[str, Callable[..., Any]] = {
    "chunk_gla_pool": through_pool,
    "recurrent_gla_layer_step": through_layer_step,
    "recurrent_gla_steps": through_steps,
    "recurrent_gla_replay": through_replay,
}
