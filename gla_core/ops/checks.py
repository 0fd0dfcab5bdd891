"""Checks shapes and dtypes without reading values, and checks values too under GLA_CHECK=1.

Every error message names the argument, its value, and the expected value.
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import checkpoint_rows, swapped

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
MOST_NORMALIZER = 2**31 - 1
"""The largest gate_normalizer, so that a backend may take it as an int32."""
MOST_STEPS = 8
"""The most tokens of a sequence in a call of several steps."""


def tensor(name: str, x: Any, shape: str, sizes: dict[str, Any]) -> None:
    """Checks that x is a tensor with the named dimensions, and binds the names that `sizes` does not hold yet.

    Example:
        >>> sizes = {}
        >>> tensor("q", torch.ones(2, 64, 4, 16), "B T Hq K", sizes)
        >>> tensor("k", torch.ones(2, 63, 4, 16), "B T H K", sizes)
        ValueError: k has shape [2, 63, 4, 16]; expected [B, T, H, K] with B=2, T=64, K=16
    """
    names = shape.split()
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; expected a tensor [{', '.join(names)}]")
    known = {n: sizes[n] for n in names if n in sizes}
    if x.ndim != len(names) or any(size != known.get(n, size) for n, size in zip(names, x.shape, strict=True)):
        bound = ", ".join(f"{n}={size}" for n, size in known.items())
        raise ValueError(
            f"{name} has shape {list(x.shape)}; expected [{', '.join(names)}]{f' with {bound}' if bound else ''}"
        )
    sizes.update(zip(names, x.shape, strict=True))


def tensor_of_any(name: str, x: Any, shapes: tuple[str, ...], sizes: dict[str, Any]) -> None:
    """Checks x as `tensor` does, against the one of several shapes that has its number of dimensions."""
    fitting = [shape for shape in shapes if not isinstance(x, Tensor) or len(shape.split()) == x.ndim]
    if fitting:
        return tensor(name, x, fitting[-1], sizes)
    expected = " or ".join(f"[{', '.join(shape.split())}]" for shape in shapes)
    raise ValueError(f"{name} has shape {list(x.shape)}; expected {expected}")


def dtype(name: str, x: Tensor, allowed: Iterable[torch.dtype], why: str = "") -> None:
    """Raises TypeError unless x has one of the allowed dtypes; `why` ends the message."""
    if x.dtype not in allowed:
        expected = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{name} is {str(x.dtype).removeprefix('torch.')}; expected {expected}{why}")


def device(name: str, x: Tensor, first: str, first_value: Tensor) -> None:
    """Raises ValueError unless x is on the device of another tensor, which is called `first`."""
    if x.device != first_value.device:
        raise ValueError(f"{name} is on {x.device} and {first} is on {first_value.device}; move them to one device")


_WHOLE: tuple[Callable[[Any], bool], str] = (lambda x: isinstance(x, int | torch.SymInt), "an integer")
_SCALARS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "float": (lambda x: isinstance(x, numbers.Real | torch.SymFloat | torch.SymInt), "a number"),
    "int": _WHOLE,
    "SymInt": _WHOLE,
    "bool": (lambda x: isinstance(x, bool), "True or False"),
    "str": (lambda x: isinstance(x, str), "a name"),
}


def scalar(name: str, type_in_schema: str, x: Any) -> None:
    """Raises TypeError unless x has the type of an argument that is no tensor, such as "int?"."""
    kind = type_in_schema.removesuffix("?")
    is_right, expected = _SCALARS[kind]
    optional = type_in_schema.endswith("?")
    if (x is None and optional) or (is_right(x) and (kind == "bool" or not isinstance(x, bool))):
        return
    raise TypeError(f"{name} is {type(x).__name__}; expected {expected}{' or None' if optional else ''}")


def as_backends_take(x: Tensor, swapped_states: bool) -> bool:
    """Returns whether a backend receives x itself and not a copy, because its last dimension is contiguous.

    Args:
        swapped_states: whether x is a state, and the backend takes states with their last two dimensions swapped.
    """
    return x.is_contiguous() or x.stride(-1) == 1 or (swapped_states and swapped(x))


def writable(name: str, x: Tensor, is_state: bool, is_ring: bool) -> None:
    """Raises ValueError unless a tensor that is written in place has elements of their own, in a layout for backends.

    One of the last two dimensions of a state has to be contiguous, and the last dimension of a ring; any other tensor
    has to be contiguous as a whole.
    """
    strides = tuple(x.stride())
    for i, (size, stride) in enumerate(zip(x.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{name} has stride 0 along dimension {i} of size {size} and is written in place; "
                "expected memory of its own for each element: call it with a clone()"
            )
    if is_state or is_ring:
        if not as_backends_take(x, swapped_states=is_state):
            which = "last dimension, or the one before," if is_state else "last dimension"
            raise ValueError(f"{name} has strides {strides} and is written in place; its {which} must be contiguous")
    elif not x.is_contiguous():
        raise ValueError(f"{name} has strides {strides} and is written in place; expected a contiguous tensor")


def transposed(states: Any) -> Any:
    """Returns a view [N, H, K, V] of states [N, H, V, K], or the reverse.

    Anything else is returned unchanged: None, and values that the checks of the op refuse.
    """
    return states.mT if isinstance(states, Tensor) and states.ndim > 1 else states


def packed(sizes: dict[str, Any], of: str) -> None:
    """Binds N, given N+1 offsets. Raises ValueError if there are no offsets, or the tensor named `of` has B != 1."""
    if sizes["N+1"] < 1:
        raise ValueError("cu_seqlens is empty; expected N+1 offsets")
    if sizes["B"] != 1:
        raise ValueError(f"cu_seqlens goes with B = 1; {of} has B = {sizes['B']}: pack the sequences along T")
    sizes["N"] = sizes["N+1"] - 1


def checkpoints(every: int | None, taken: Tensor | None, packed: bool, sizes: dict[str, Any]) -> None:
    """Binds the number n of checkpoints of a sequence, or of all packed sequences.

    Args:
        every: the number of tokens between checkpoints; None if there are none.
        taken: the checkpoints that the op takes, if it takes any.

    Raises:
        ValueError: `every` is None beside checkpoints, or no multiple of a chunk.
    """
    if every is None:
        if taken is not None:
            raise ValueError("checkpoint_every is None; expected the number of tokens between the checkpoints")
        return
    if every < 1 or every % CHUNK != 0:
        raise ValueError(f"checkpoint_every is {every}; expected a multiple of {CHUNK}, or None")
    sizes["n"] = checkpoint_rows(sizes["T"], sizes["N"], every, packed)


def integer(x: Any) -> Any:
    """Converts an integer of any library, such as NumPy, to an int; returns anything else unchanged.

    Neither True and False nor tensors count as integers, and a symbolic size stays one.
    """
    if type(x) is int or x is None or isinstance(x, bool | Tensor | torch.SymInt):
        return x
    try:
        return operator.index(x)
    except TypeError:
        return x


def longest(max_seqlen: int | None) -> None:
    """Raises ValueError for a negative bound on the lengths of sequences."""
    if max_seqlen is not None and max_seqlen < 0:
        raise ValueError(f"max_seqlen is {max_seqlen}; expected the tokens of the longest sequence, or None")


def normalizer(gate: str, number: int, g: Any) -> int:
    """Returns the number by which log sigma of the logits g is divided. Raises ValueError for anything else."""
    if gate != "logsigmoid":
        raise ValueError(f"gate is {gate!r}; expected 'logsigmoid', or None if g holds log gates")
    if g is None:
        raise ValueError("gate is 'logsigmoid' and g is None; expected the logits of the gates as g")
    is_number = isinstance(number, int | float | numbers.Real) and not isinstance(number, bool)
    if not is_number or not 1 <= number <= MOST_NORMALIZER or number % 1 != 0:
        raise ValueError(
            f"gate_normalizer is {number!r}; expected a whole number from 1 to {MOST_NORMALIZER}: for another one "
            "compute log gates"
        )
    return int(number)


def logits(g: Any, gate_normalizer: int | None) -> None:
    """Raises ValueError for a gate_normalizer out of range, or without logits."""
    if gate_normalizer is None:
        return
    if not 1 <= gate_normalizer <= MOST_NORMALIZER:
        raise ValueError(
            f"gate_normalizer is {gate_normalizer}; expected 1 to {MOST_NORMALIZER}, or None if g holds log gates"
        )
    if g is None:
        raise ValueError(f"gate_normalizer is {gate_normalizer} and g is None; expected the logits of the gates as g")


def gate_values(g: Tensor | None) -> None:
    """Raises ValueError for gates above 0. It reads values, and so it is only for GLA_CHECK=1."""
    if g is not None and bool((g > 0).any()):
        raise ValueError(f"g has values up to {float(g.max())}; expected the log of a forget gate, at most 0")


def offset_values(cu_seqlens: Tensor | None, T: int, max_seqlen: int | None) -> None:
    """Raises ValueError for offsets that descend or are not from 0 to T, and for a sequence above max_seqlen.

    It reads values, and so it is only for GLA_CHECK=1. Rows before the first offset and after the last one belong to no
    sequence.
    """
    if cu_seqlens is None:
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] < 0 or offsets[-1] > T or offsets != sorted(offsets):
        raise ValueError(f"cu_seqlens is {offsets}; expected offsets from 0 to T = {T} that do not descend")
    longest = max((end - start for start, end in itertools.pairwise(offsets)), default=0)
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen}; the longest sequence of cu_seqlens has {longest} tokens")


def lengths_of(cu_seqlens: Tensor | None, q: Tensor) -> Tensor:
    """Returns the number of tokens of each sequence [N] of q [B, T, ...], after the checks of `offset_values`."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return torch.full((B,), T, device=q.device)
    offset_values(cu_seqlens, T, None)
    return cu_seqlens.diff()


def rows_of(cu_seqlens: Tensor | None, served: Tensor | None = None) -> Any:
    """Returns an index of the tokens of sequences in tensors [B, T, ...]; it reads cu_seqlens.

    Args:
        served: which sequences [N]; None means all.
    """
    if cu_seqlens is None:
        return ... if served is None else served
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if served is None:
        return slice(None), slice(first, last)
    return slice(None), torch.arange(first, last, device=served.device)[served.repeat_interleave(cu_seqlens.diff())]


def slots_where(slots: Tensor, there: Tensor) -> list[int | None]:
    """Returns slots [N] with None in place of those whose flag `there` [N] is False."""
    return [slot if used else None for slot, used in zip(slots.tolist(), there.tolist(), strict=True)]


def slots(reads: list[int | None], writes: dict[str, list[int | None]], read_name: str = "read_slots[{n}]") -> None:
    """Raises ValueError for a slot that is written twice, or that one sequence writes and another one reads.

    Args:
        reads: the slot that each sequence reads; None means no slot.
        writes: the slots that each sequence writes, by the name of the argument.
        read_name: the name of the slot that sequence n reads.
    """
    writer: dict[int, tuple[str, int]] = {}
    for name, written in writes.items():
        for n, slot in enumerate(written):
            if slot is None:
                continue
            if slot in writer:
                other, m = writer[slot]
                raise ValueError(
                    f"{name}[{n}] is {slot}, which sequence {m} writes too, by {other}; expected no slot twice"
                )
            writer[slot] = name, n
    for n, slot in enumerate(reads):
        if slot in writer and writer[slot][1] != n:
            raise ValueError(
                f"{read_name.format(n=n)} is {slot}, which sequence {writer[slot][1]} writes; expected a slot that no "
                "other sequence of the call writes"
            )
