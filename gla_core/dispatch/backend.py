"""The contract between the core and a backend. A backend imports this module and nothing else of the core.

A backend is a value: a name, a version, a mapping from abstract op names to functions, and data that says which calls
these functions can run. Like a pluggy hook, a function declares only the arguments that it takes: any of the arguments
that `OP_PARAMETERS` lists for its op, in any order. It must take the required ones (`OP_REQUIRED`). The core refuses a
call for a backend if an argument that the function does not take has a value other than its default. An op can
therefore gain an argument without a change of any backend. One argument is never refused: for a function that does not
take `gate_normalizer`, the core computes log gates from logits. An op may also be a `Prepared` instead of a function.
It plans a call once for its signature.

`gla_core/ops/<op>.py` documents the arguments and results. The core checks all arguments before it calls a function.
The last dimension of every tensor is contiguous. In a state, the last but one may be contiguous instead if
`Capabilities.swapped_states` is True. A tensor that an op always writes (`OP_WRITTEN`) is never a copy. `scale` is
always a float, and autocast is off. Every returned tensor must be contiguous and own its memory: it must not be an
input or a view of another tensor. `recurrent_gla_step` has two exceptions: a state written in place is returned itself,
and a new state may have swapped dimensions (`new_state`). The core checks the results once for each signature.
"""

from __future__ import annotations

import functools
import importlib.resources
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import pluggy
import torch

hookimpl = pluggy.HookimplMarker("gla_core")

_parameters: dict[str, tuple[str, ...]] = {}
_required: dict[str, frozenset[str]] = {}
_written: dict[str, tuple[str, ...]] = {}
OP_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(_parameters)
"""The parameters of each abstract op, in order; gla_core/ops declares them when it is imported."""
OP_REQUIRED: Mapping[str, frozenset[str]] = MappingProxyType(_required)
"""The parameters of each abstract op that every backend takes: all without a default, and also scale and dim."""

OP_WRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(_written)
"""The parameters of each abstract op that a backend always writes if they are given, such as a pool of states."""

CHUNK = 64
"""A number of tokens. Sequences are cut into segments, and checkpoints are taken, at multiples of it."""


GATES: Mapping[str, str] = MappingProxyType(
    {
        "constant": "for each head [Hv]",
        "head": "for each token and head [B, T, Hv]",
        "key": "for each key [B, T, Hv, K]",
    }
)
"""The forms of a gate g, in words. A decoding step has no T, and its gates per head are [B, Hv]."""
GATE_NAMES: Mapping[str, str] = MappingProxyType(
    {"constant": "constant gates", "head": "gates per head", "key": "gates per key"}
)
"""The names of these forms."""


def declare_op(name: str, parameters: tuple[str, ...], required: frozenset[str], written: tuple[str, ...] = ()) -> None:
    """Makes an abstract op known to backends and requests."""
    _parameters[name], _required[name], _written[name] = parameters, required, written


Reason = str
"""A refusal: a sentence a user can act on, such as 'needs a CUDA device; q is on cpu'."""


class LaunchError(RuntimeError):
    """A backend cannot launch its kernel here (too little shared memory, no compiler).

    Under an `auto` request the core then takes the next backend and remembers the failure. A backend must raise this
    error before it has written anything.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The calls that a backend can run, as data. The core derives refusals from it.

    Attributes:
        devices: the torch device types, such as `{"cuda"}`; None means any.
        dtypes: the dtypes of q (or x) that the backend computes.
        min_compute_capability: the least CUDA compute capability, such as (8, 0); ignored on other devices.
        key_widths, value_widths: the head widths K and V that the backend computes, such as `range(16, 257, 16)`.
        variable_length: whether it takes packed sequences (`cu_seqlens`).
        grouped_queries: whether there may be more query heads than key/value heads.
        grouped_values: whether there may be more value heads than key heads.
        gates: the forms of gates that it takes, from `GATES`; a call without a gate is always legal.
        gradients: whether the forward may run if a gradient is needed. This backend or another computes the backward.
        checkpoints: whether `chunk_gla_fwd` returns checkpoints if `checkpoint_every` is given.
        swapped_states: whether it takes states whose last two dimensions are swapped in memory: keys are contiguous
            instead of values. The new state of `recurrent_gla_step` must then be swapped as well (see `new_state`).
            All other results are contiguous.
        deterministic: whether the same inputs give the same bits. A backend with False is refused under
            `torch.use_deterministic_algorithms(True)`.
        cuda_graphs: whether a call may be captured into a CUDA graph.
        batch_invariant: device types on which chunk_gla_fwd, chunk_gla_bwd and recurrent_gla_step, each a `Prepared`,
            honour `OpCall.batch_invariant`. On other devices the core calls them for one segment at a time.
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.float16, torch.bfloat16})
    min_compute_capability: tuple[int, int] = (0, 0)
    key_widths: range = range(1, 2**31)
    value_widths: range = range(1, 2**31)
    variable_length: bool = True
    grouped_queries: bool = True
    grouped_values: bool = False
    gates: frozenset[str] = frozenset({"key"})
    gradients: bool = True
    checkpoints: bool = False
    swapped_states: bool = False
    deterministic: bool = True
    cuda_graphs: bool = False
    batch_invariant: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A CUDA device for which a call can be explained on a machine that does not have it.

    Attributes:
        name: the name that PyTorch gives it.
        multiprocessors: their number.
        compute_capability: as PyTorch reports it; for AMD GPUs, this is a version of their own.
        vendor: "NVIDIA" or "AMD". PyTorch calls GPUs of both CUDA devices.
    """

    name: str
    multiprocessors: int
    compute_capability: tuple[int, int]
    vendor: str = "NVIDIA"


def known_device(device: torch.device) -> KnownDevice:
    """Returns the facts of a CUDA device of this machine."""
    found = torch.cuda.get_device_properties(device)
    vendor = "NVIDIA" if torch.version.hip is None else "AMD"
    return KnownDevice(found.name, found.multi_processor_count, (found.major, found.minor), vendor)


ALIGNMENT = 16
"""A number of bytes. Kernels load wide words, and TMA addresses tensors, at multiples of it."""


class Layout(NamedTuple):
    """The layout of a tensor in memory.

    Attributes:
        strides: the strides, in elements.
        aligned: whether its address is a multiple of `ALIGNMENT` bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True

    @property
    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    @property
    def is_swapped(self) -> bool:
        """Returns whether the last two dimensions are swapped in memory; see `swapped`."""
        return swapped(torch.empty_strided(self.shape, self.strides, device="meta"))


def contiguous_layout(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """Returns the layout of new, contiguous memory."""
    strides, elements = [], 1
    for size in reversed(shape):
        strides.append(elements)
        elements *= max(size, 1)
    return Layout(shape, tuple(reversed(strides)), dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """Describes a call before it runs: enough to refuse it, to plan it, or to predict its time. It holds no tensor.

    Attributes:
        op: name of the abstract op.
        device: device of every tensor of the call.
        dtype: dtype of q (or x).
        dims: sizes by name, as gla_core/ops/<op>.py lists them: B, T, H, Hq, Hv, K, V, N for `chunk_gla_fwd` and
            `chunk_gla_bwd`, rows and columns for `online_softmax`.
        gate_dtype, state_dtype: dtype of g and of the given state; None if there is none.
        gate_form: the form of g, from `GATES`; None if there is no g.
        variable_length: whether `cu_seqlens` is given.
        longest: an upper bound on the length of the longest packed sequence. The user gives it, or a prediction
            supposes it. None if there is no bound.
        indexed: whether `state_indices` are given.
        scalars: arguments that are neither tensors nor the scale, by name, such as causal or output_final_state.
        checkpoints: whether checkpoints are to be returned.
        needs_grad: whether a gradient will be asked for.
        deterministic: whether the user has asked PyTorch for deterministic algorithms.
        capturing: whether a CUDA graph is being captured.
        float32_matmul_precision: the value of `torch.get_float32_matmul_precision()`; 'highest' means no TF32.
        assumed: the GPU for which the call is explained; it need not be here. None in every call that is to run.
        batch_invariant: if not None, the bits of a sequence may depend only on the sequence, and a sequence may be cut
            into calls at multiples of this number of tokens without a change of its bits. The number of sequences in a
            batch and their lengths must then have no influence. See `gla_core.batch_invariant`.
        given: names of the arguments that a backend need not take and whose values differ from their defaults.
        layouts: the layout of every tensor that is given, by argument name; empty if only the sizes are known.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    dims: Mapping[str, int]
    gate_dtype: torch.dtype | None = None
    gate_form: str | None = None
    state_dtype: torch.dtype | None = None
    variable_length: bool = False
    longest: int | None = None
    indexed: bool = False
    scalars: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: bool = False
    needs_grad: bool = False
    deterministic: bool = False
    capturing: bool = False
    float32_matmul_precision: str = "highest"
    assumed: KnownDevice | None = None
    batch_invariant: int | None = None
    given: frozenset[str] = frozenset()
    layouts: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An op that plans a call once for its signature.

    Attributes:
        prepare: takes an `OpCall`, returns the function that computes calls of this signature, whatever values their
            tensors hold. It raises `LaunchError` if a kernel cannot be launched. The returned function takes the
            arguments `takes`, in this order.
        takes: names of the arguments that the returned function takes.
        kernels: takes an `OpCall`, returns lines for `explain`: the kernels that run the call, and why no others do.
            None if there are no such lines.

    Example:
        >>> def prepare(call):
        ...     block = 64 if call.dims["columns"] > 64 else 16
        ...     return lambda x, dim: my_softmax(x, dim, block)
        >>> Backend("mine", "1.0", {"online_softmax": Prepared(prepare, ("x", "dim"))})
    """

    prepare: Callable[[OpCall], Callable[..., Any]]
    takes: tuple[str, ...]
    kernels: Callable[[OpCall], list[str]] | None = None


Op = Callable[..., Any] | Prepared
"""An implementation of an abstract op."""


@functools.lru_cache(maxsize=256)
def arguments_of(op: Op) -> tuple[str, ...]:
    """Returns the names of the arguments that an implementation takes, in order.

    Raises:
        TypeError, ValueError: the signature of a function cannot be read.
    """
    return op.takes if isinstance(op, Prepared) else tuple(inspect.signature(op).parameters)


def by_keyword(function: Callable[..., Any]) -> bool:
    """Returns whether a function has a keyword-only argument."""
    return any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(function).parameters.values())


def as_received(op: Op, call: OpCall) -> OpCall:
    """Returns the call that an implementation receives.

    An implementation that takes no gate_normalizer receives log gates in place of logits. For any other one it is
    `call` itself.
    """
    if call.scalars.get("gate_normalizer") is None or "gate_normalizer" in arguments_of(op):
        return call
    return _of_log_gates(call)


def _of_log_gates(call: OpCall) -> OpCall:
    """Returns the call with log gates in a wide dtype in place of its gates or logits."""
    dtype, layouts = wide(call.dtype), dict(call.layouts)
    if "g" in layouts:
        layouts["g"] = contiguous_layout(layouts["g"].shape, dtype)
    scalars, given = {**call.scalars, "gate_normalizer": None}, call.given - {"gate_normalizer"}
    return replace(call, gate_dtype=dtype, scalars=scalars, given=given, layouts=layouts)


def worst_case(call: OpCall) -> OpCall | None:
    """Returns the call with one packed sequence of all tokens; None if it is not packed, or the longest is bounded."""
    if not call.variable_length or call.longest is not None:
        return None
    return replace(call, longest=call.dims["T"])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states and sums for inputs of this dtype: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_gates(g: torch.Tensor, gate_normalizer: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns log gates in `dtype`: g itself, or log sigma(g) / gate_normalizer if g holds logits."""
    g = g.to(dtype)
    return g if gate_normalizer is None else torch.nn.functional.logsigmoid(g) / gate_normalizer


def gradient_of_logits(dg: torch.Tensor, g: torch.Tensor, gate_normalizer: int | None) -> torch.Tensor:
    """Returns the gradient of g from that of the log gates, dg; see `log_gates`.

    It is 0 where dg is 0, because a logit that belongs to no sequence may be NaN.
    """
    if gate_normalizer is None:
        return dg
    return torch.where(dg == 0, 0, dg * torch.sigmoid(-g.to(dg.dtype)) / gate_normalizer)


def number_of_sequences(B: int, cu_seqlens: torch.Tensor | None) -> int:
    """Returns N: the number of rows of a batch, or of the packed sequences that `cu_seqlens` [N+1] delimits."""
    return B if cu_seqlens is None else len(cu_seqlens) - 1


def swapped(x: torch.Tensor) -> bool:
    """Returns whether the last two dimensions of a tensor [..., K, V] are swapped in memory: K is contiguous."""
    return x.ndim > 1 and x.stride(-1) != 1 and x.stride(-2) == 1 and not x.is_contiguous()


def new_state(state: torch.Tensor) -> torch.Tensor:
    """Returns dense memory for the state [P, H, K, V] after a step, with K and V swapped if they are in `state`."""
    if swapped(state):
        return torch.empty_like(state.mT, memory_format=torch.contiguous_format).mT
    return torch.empty_like(state, memory_format=torch.contiguous_format)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up; b is positive."""
    return -(-a // b)


def checkpoint_rows(T: int, N: int, every: int, packed: bool) -> int:
    """Returns n, the number of checkpoint rows, one per `every` of T tokens: in a batch row, or N packed sequences."""
    return N + T // every if packed else ceil_div(T, every)


def checkpoint_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of checkpoints for this dtype of q."""
    return dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


def new_checkpoints(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, every: int) -> torch.Tensor:
    """Returns memory for the checkpoints [B, n, Hv, K, V] of chunk_gla_fwd. For packed sequences it is filled with
    zeros, because they leave some rows unwritten.
    """
    B, T, Hv, V = v.shape
    N, allocate = number_of_sequences(B, cu_seqlens), v.new_empty if cu_seqlens is None else v.new_zeros
    n = checkpoint_rows(T, N, every, packed=cu_seqlens is not None)
    return allocate(B, n, Hv, k.shape[3], V, dtype=checkpoint_dtype(k.dtype))


# ---- states in a pool


def is_slot(pool: torch.Tensor, slots: torch.Tensor, pad_slot: int) -> torch.Tensor:
    """Returns which of `slots` [N] are used [N]: those inside the pool [P, Hv, K, V] that are not `pad_slot`."""
    return (slots >= 0) & (slots < len(pool)) & (slots != pad_slot)


def states_of_slots(
    pool: torch.Tensor, slots: torch.Tensor, has_state: torch.Tensor | None, dtype: torch.dtype, pad_slot: int
) -> torch.Tensor:
    """Returns the states that sequences start from [N, Hv, K, V]: a contiguous copy of the slots [N] of a pool.

    A state is 0 if its slot is not used (see `is_slot`), or if has_state [N] is False. It is then 0 even if the slot
    holds NaN. No value is read on the host.
    """
    if len(pool) == 0:
        return pool.new_zeros((len(slots), *pool.shape[1:]), dtype=dtype)
    there = is_slot(pool, slots, pad_slot)
    there = there if has_state is None else there & has_state
    states = pool[torch.where(there, slots, 0).long()]
    return torch.where(there[:, None, None, None], states, 0).to(dtype).contiguous()


def write_states(pool: torch.Tensor, slots: torch.Tensor, states: torch.Tensor, where: torch.Tensor) -> None:
    """Writes states [N, Hv, K, V] into the slots [N] of a pool where the flags `where` [N] are True.

    Each state is rounded once to the dtype of the pool. No value is read on the host.
    """
    _write_entries(pool, (slots,), states, where)


def _write_entries(
    memory: torch.Tensor, at: tuple[torch.Tensor, ...], values: torch.Tensor, where: torch.Tensor
) -> None:
    """Writes values [N, ...] to memory[at], by one or two indices [N], where the flags `where` [N] are True."""
    if len(memory) == 0 or len(where) == 0:
        return
    # An entry that is not written repeats the first one that is, and writes the same values to the same place. If none
    # is written, all write what the first place of the memory holds.
    rows = torch.arange(len(where), device=where.device)
    writer = torch.where(where, rows, where.int().argmax(keepdim=True))
    to = tuple(torch.where(where, index, 0)[writer].long() for index in at)
    memory.index_put_(to, torch.where(where.any(), values.to(memory.dtype)[writer], memory[to]))


def forward_of_pool(call: OpCall, parts: int = 1) -> OpCall:
    """Returns the call of chunk_gla_fwd that computes a call of chunk_gla_pool between two copies of states.

    Args:
        parts: the number of parts that each sequence is cut into.
    """
    taken, N = OP_PARAMETERS["chunk_gla_fwd"], parts * call.dims["N"]
    dims = {**{name: size for name, size in call.dims.items() if name != "P"}, "N": N}
    layouts = {name: layout for name, layout in call.layouts.items() if name in taken}
    if layouts:
        shape = (N, *(dims[name] for name in ("Hv", "K", "V")))
        layouts["initial_state"] = contiguous_layout(shape, wide(call.dtype))
    if layouts and parts > 1:
        layouts["cu_seqlens"] = contiguous_layout((N + 1,), layouts["cu_seqlens"].dtype)
    every = {"output_final_state": True, "checkpoint_every": None}
    return replace(
        call,
        op="chunk_gla_fwd",
        dims=dims,
        state_dtype=wide(call.dtype),
        indexed=False,
        scalars={**every, "gate_normalizer": call.scalars.get("gate_normalizer")},
        given=call.given.intersection(taken) | {"initial_state", "output_final_state", "cu_seqlens"},
        layouts=layouts,
    )


def forwards_of_pool(call: OpCall) -> list[OpCall]:
    """Returns the calls of chunk_gla_fwd by which `through_pool` computes a call of chunk_gla_pool.

    The second one, if there is one, cuts each sequence in two at its checkpoint.
    """
    return [forward_of_pool(call, parts) for parts in ((1, 2) if "checkpoint_offsets" in call.given else (1,))]


@overload
def through_pool(forward: Prepared) -> Prepared: ...
@overload
def through_pool(forward: Callable[..., Any]) -> Callable[..., Any]: ...
def through_pool(forward: Op) -> Op:
    """Returns an implementation of chunk_gla_pool that computes by one of chunk_gla_fwd.

    It copies states out of the pool, runs `forward`, and copies the final states into the pool. Checkpoints take a
    second run of `forward`, with each sequence cut in two at its checkpoint.

    Args:
        forward: a function or a `Prepared` that takes initial_state, output_final_state and cu_seqlens.

    Raises:
        TypeError: `forward` does not take one of these.

    Example:
        >>> Backend("mine", "1.0", {"chunk_gla_fwd": forward, "chunk_gla_pool": through_pool(forward)})
    """
    takes = arguments_of(forward)
    lacking = [name for name in ("initial_state", "output_final_state", "cu_seqlens") if name not in takes]
    if lacking:
        raise TypeError(f"chunk_gla_fwd takes no {_any_of(lacking)}; through_pool needs it")
    if not isinstance(forward, Prepared):
        run = _by_name(forward, takes, by_keyword(forward))
        return _through_pool(run, run)

    def prepare(call: OpCall) -> Callable[..., Any]:
        calls = [as_received(forward, each) for each in forwards_of_pool(call)]
        runs = [_by_name(forward.prepare(each), takes, False) for each in calls]
        return _through_pool(runs[0], runs[-1])

    def lines(call: OpCall) -> list[str]:
        (first, *_) = forwards_of_pool(call)
        return forward.kernels(as_received(forward, first)) if forward.kernels is not None else []

    return Prepared(prepare, OP_PARAMETERS["chunk_gla_pool"], lines)


def _by_name(forward: Callable[..., Any], takes: tuple[str, ...], keywords: bool) -> Callable[..., Any]:
    """Returns a function that takes all arguments of an op by name, and gives `forward` those that it takes."""

    def run(**x: Any) -> Any:
        if "gate_normalizer" not in takes and x["gate_normalizer"] is not None:
            x["g"] = log_gates(x["g"], x["gate_normalizer"], wide(x["q"].dtype)).contiguous()
        return forward(**{name: x[name] for name in takes}) if keywords else forward(*(x[name] for name in takes))

    return run


def _through_pool(whole: Callable[..., Any], cut: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes chunk_gla_pool.

    Args:
        whole, cut: compute chunk_gla_fwd for N sequences, and for 2 N parts of them.
    """

    def chunk_gla_pool(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        pool: torch.Tensor,
        cu_seqlens: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor | None,
        scale: float,
        has_state: torch.Tensor | None,
        checkpoint_offsets: torch.Tensor | None,
        checkpoint_slots: torch.Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        always = {"output_final_state": True, "checkpoint_every": None, "gate_normalizer": gate_normalizer}
        tokens = {"q": q, "k": k, "v": v, "g": g, "scale": scale, **always}
        before = states_of_slots(pool, read_slots, has_state, wide(q.dtype), pad_slot)  # [N, Hv, K, V]
        o, after, *_ = whole(**tokens, initial_state=before, cu_seqlens=cu_seqlens)
        to = read_slots if write_slots is None else write_slots
        write_states(pool, to, after, is_slot(pool, to, pad_slot))
        if checkpoint_offsets is not None and checkpoint_slots is not None:
            is_inside = (checkpoint_offsets > 0) & (checkpoint_offsets < cu_seqlens.diff())
            where = is_inside & is_slot(pool, checkpoint_slots, pad_slot)
            parts = _cut_in_two(cu_seqlens, torch.where(where, checkpoint_offsets, 0))
            halves = torch.stack([before, torch.zeros_like(before)], 1).flatten(0, 1)  # [2 N, Hv, K, V]
            _, ends, *_ = cut(**tokens, initial_state=halves, cu_seqlens=parts)
            write_states(pool, checkpoint_slots, ends[::2], where)
        return o if out is None else out.copy_(o)

    return chunk_gla_pool


def _cut_in_two(cu_seqlens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns the offsets [2 N + 1] of packed sequences that are each cut after `offsets` [N] tokens."""
    starts = cu_seqlens[:-1]
    parts = torch.stack([starts, (starts + offsets).to(starts.dtype)], 1).flatten()
    return torch.cat([parts, cu_seqlens[-1:]])


def step_of_steps(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which `through_steps` computes each token of recurrent_gla_steps."""
    N, dims = call.dims["N"], call.dims
    sizes = {"B": N, **{name: dims[name] for name in ("H", "Hq", "Hv", "K", "V")}, "P": N}
    shapes = {name: (N, dims[heads], dims[width]) for name, heads, width in (("q", "Hq", "K"), ("k", "H", "K"))}
    shapes["v"] = (N, dims["Hv"], dims["V"])
    layouts = {name: contiguous_layout(shape, call.dtype) for name, shape in shapes.items()}
    layouts["state"] = contiguous_layout((N, dims["Hv"], dims["K"], dims["V"]), wide(call.dtype))
    if call.gate_dtype is not None and call.gate_form is not None:
        of_gate = {"constant": (dims["Hv"],), "head": (N, dims["Hv"]), "key": (N, dims["Hv"], dims["K"])}
        layouts["g"] = contiguous_layout(of_gate[call.gate_form], call.gate_dtype)
    return replace(
        call,
        op="recurrent_gla_step",
        dims=sizes,
        state_dtype=wide(call.dtype),
        variable_length=False,
        indexed=False,
        scalars={"gate_normalizer": call.scalars.get("gate_normalizer"), "inplace": False},
        given=call.given.intersection(("g", "gate_normalizer")),
        layouts=layouts if call.layouts else {},
    )


@overload
def through_steps(step: Prepared) -> Prepared: ...
@overload
def through_steps(step: Callable[..., Any]) -> Callable[..., Any]: ...
def through_steps(step: Op) -> Op:
    """Returns an implementation of recurrent_gla_steps that computes by one of recurrent_gla_step.

    It copies states out of the pool, runs `step` once for each of the S tokens of a sequence, and copies each new state
    into the pool.

    Example:
        >>> Backend("mine", "1.0", {"recurrent_gla_step": step, "recurrent_gla_steps": through_steps(step)})
    """
    takes = arguments_of(step)
    if not isinstance(step, Prepared):
        return _through_steps(_by_name(step, takes, by_keyword(step)))

    def prepare(call: OpCall) -> Callable[..., Any]:
        return _through_steps(_by_name(step.prepare(as_received(step, step_of_steps(call))), takes, False))

    return Prepared(prepare, OP_PARAMETERS["recurrent_gla_steps"], None)


def _through_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_steps by one that takes the arguments of recurrent_gla_step."""

    def recurrent_gla_steps(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        pool: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
        cu_seqlens: torch.Tensor | None,
        num_accepted: torch.Tensor | None,
        read_slots: torch.Tensor | None,
        has_state: torch.Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        read = slots[:, 0] if read_slots is None else read_slots
        if read_slots is None and num_accepted is not None:
            read = slots.gather(1, num_accepted.long().clamp(1, slots.shape[1])[:, None] - 1)[:, 0]
        served = is_slot(pool, read, pad_slot)  # [N]
        if has_state is not None:
            served = torch.where(has_state, served, is_slot(pool, slots[:, 0], pad_slot))
        state = states_of_slots(pool, read, has_state, wide(q.dtype), pad_slot)  # [N, Hv, K, V]
        tokens, options = {"q": q, "k": k, "v": v, "g": g}, {"scale": scale, "gate_normalizer": gate_normalizer}
        o = _rows_of_outputs(q, v)
        computed = _token_by_token(step, tokens, cu_seqlens, slots.shape[1], served, state, o, **options)
        for j, (here, _, new) in enumerate(computed):
            write_states(pool, slots[:, j], new, here & is_slot(pool, slots[:, j], pad_slot))
        return _outputs(o, q, out)

    return recurrent_gla_steps


def _rows_of_outputs(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns zeros [B T + 1, Ho, V] for the outputs of all tokens; the last row is that of no token."""
    return v.new_zeros(q.shape[0] * q.shape[1] + 1, max(q.shape[2], v.shape[2]), v.shape[3])


def _outputs(o: torch.Tensor, q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows of outputs as o [B, T, Ho, V], in `out` if it is given."""
    o = o[:-1].unflatten(0, q.shape[:2])
    return o.clone() if out is None else out.copy_(o)


def _token_by_token(
    step: Callable[..., Any],
    tokens: Mapping[str, Any],
    cu_seqlens: torch.Tensor | None,
    most: int,
    served: torch.Tensor,
    state: torch.Tensor,
    o: torch.Tensor,
    **options: Any,
) -> Iterator[tuple[torch.Tensor, dict[str, Any], torch.Tensor]]:
    """Computes the tokens of sequences, one of each sequence at a time, and writes their outputs into rows of o.

    Args:
        step: computes recurrent_gla_step; takes its arguments by name.
        tokens: q, k, v and g of the tokens of all sequences.
        most: the most tokens of a sequence that are computed.
        served: which sequences are computed [N].
        state: the states from which they start [N, Hv, K, V].
        o: see `_rows_of_outputs`.
        options: further arguments of `step`.

    Yields:
        which sequences have the token [N], the arguments of `step` that depend on it, and the states after it.
    """
    (B, T), N = tokens["q"].shape[:2], len(served)
    if cu_seqlens is None:
        starts = T * torch.arange(N, device=served.device)
        ends, most = starts + T, min(most, T)
    else:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    for j in range(most if N * B * T else 0):
        here = served & (starts + j < ends)
        rows = torch.where(here, starts + j, 0)
        token = {name: x if x is None or x.ndim == 1 else x.flatten(0, 1)[rows] for name, x in tokens.items()}
        o_j, new = step(**token, state=state, state_indices=None, inplace=False, **options)
        o.index_copy_(0, torch.where(here, starts + j, B * T), o_j)
        state = torch.where(here[:, None, None, None], new, state)
        yield here, token, state


def step_of_replay(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which `through_replay` computes each token, old or new.

    Gates are log gates in a wide dtype, as rings hold them.
    """
    step = step_of_steps(call)
    return step if step.gate_dtype is None else _of_log_gates(step)


@overload
def through_replay(step: Prepared) -> Prepared: ...
@overload
def through_replay(step: Callable[..., Any]) -> Callable[..., Any]: ...
def through_replay(step: Op) -> Op:
    """Returns an implementation of recurrent_gla_replay that computes by one of recurrent_gla_step.

    It copies states out of the pool, runs `step` once for each token of half a ring and once for each new token, and
    copies the states after the accepted tokens into the pool and the new tokens into the rings.

    Example:
        >>> Backend("mine", "1.0", {"recurrent_gla_step": step, "recurrent_gla_replay": through_replay(step)})
    """
    takes = arguments_of(step)
    if not isinstance(step, Prepared):
        return _through_replay(_by_name(step, takes, by_keyword(step)))

    def prepare(call: OpCall) -> Callable[..., Any]:
        return _through_replay(_by_name(step.prepare(step_of_replay(call)), takes, False))

    return Prepared(prepare, OP_PARAMETERS["recurrent_gla_replay"], None)


def _through_replay(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_replay by one that takes the arguments of recurrent_gla_step."""

    def recurrent_gla_replay(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        pool: torch.Tensor,
        ring_k: torch.Tensor,
        ring_v: torch.Tensor,
        ring_g: torch.Tensor | None,
        slots: torch.Tensor,
        ring_start: torch.Tensor,
        num_accepted: torch.Tensor,
        scale: float,
        cu_seqlens: torch.Tensor | None,
        has_state: torch.Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        (N, L), dtype = (len(slots), ring_k.shape[1]), wide(q.dtype)
        g = None if g is None else log_gates(g, gate_normalizer, dtype).contiguous()
        options = {"scale": scale, "gate_normalizer": None}
        served = is_slot(pool, slots, pad_slot)  # [N]
        accepted = num_accepted.clamp(0, L // 2).long()
        state = states_of_slots(pool, slots, has_state, dtype, pad_slot)  # [N, Hv, K, V]
        is_new = False if has_state is None else ~has_state

        def at(i: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Returns the slots and the positions in the rings [N] of token i, counted from the ring's start."""
            return torch.where(served, slots, 0).long(), (ring_start.long() + i) % L

        no_query = q.new_zeros(N, *q.shape[2:])
        for i in range(L // 2 if N * len(pool) else 0):
            k_i, v_i = ring_k[at(i)].to(k.dtype), ring_v[at(i)].to(v.dtype)
            token = {"q": no_query, "k": k_i, "v": v_i, "g": g if ring_g is None else ring_g[at(i)]}
            _, new = step(**token, state=state, state_indices=None, inplace=False, **options)
            state = torch.where((i < accepted)[:, None, None, None], new, state)
        write_states(pool, slots, state, served & ((accepted > 0) | is_new))

        o, tokens = _rows_of_outputs(q, v), {"q": q, "k": k, "v": v, "g": g}
        computed = _token_by_token(step, tokens, cu_seqlens, L // 2, served, state, o, **options)
        for j, (here, token, _) in enumerate(computed):
            for ring, name in ((ring_k, "k"), (ring_v, "v"), (ring_g, "g")):
                if ring is not None:
                    _write_entries(ring, at(accepted + j), token[name], here)
        return _outputs(o, q, out)

    return recurrent_gla_replay


OUTPUT_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
)
"""The activations of the output gate of recurrent_gla_layer_step, by name."""


def step_of_layer_step(call: OpCall) -> OpCall:
    """Returns the call of recurrent_gla_step by which `through_layer_step` computes recurrent_gla_layer_step."""
    taken = OP_PARAMETERS["recurrent_gla_step"]
    return replace(
        call,
        op="recurrent_gla_step",
        scalars={"gate_normalizer": call.scalars.get("gate_normalizer"), "inplace": True},
        given=call.given.intersection(taken) | {"inplace"},
        layouts={name: layout for name, layout in call.layouts.items() if name in taken},
    )


@overload
def through_layer_step(step: Prepared) -> Prepared: ...
@overload
def through_layer_step(step: Callable[..., Any]) -> Callable[..., Any]: ...
def through_layer_step(step: Op) -> Op:
    """Returns an implementation of recurrent_gla_layer_step that computes by one of recurrent_gla_step.

    It runs `step` in place, and PyTorch's operations for the norm and the output gate.

    Example:
        >>> Backend("mine", "1.0", {"recurrent_gla_step": step, "recurrent_gla_layer_step": through_layer_step(step)})
    """
    takes = arguments_of(step)
    if not isinstance(step, Prepared):
        return _through_layer_step(_by_name(step, takes, by_keyword(step)))

    def prepare(call: OpCall) -> Callable[..., Any]:
        return _through_layer_step(_by_name(step.prepare(as_received(step, step_of_layer_step(call))), takes, False))

    return Prepared(prepare, OP_PARAMETERS["recurrent_gla_layer_step"], None)


def _through_layer_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes recurrent_gla_layer_step by one with the arguments of recurrent_gla_step."""

    def recurrent_gla_layer_step(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        state: torch.Tensor,
        output_gate: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        scale: float,
        norm_eps: float,
        activation: str,
        state_indices: torch.Tensor | None,
        gate_normalizer: int | None,
    ) -> torch.Tensor:
        token = {"q": q, "k": k, "v": v, "g": g, "scale": scale, "gate_normalizer": gate_normalizer}
        o, _ = step(**token, state=state, state_indices=state_indices, inplace=True)
        y = _normed(o, output_gate, norm_weight, norm_eps, activation)
        if state_indices is None:
            return y
        is_used = (state_indices >= 0) & (state_indices < len(state))  # elsewhere the output gate may be NaN
        return torch.where(is_used[:, None, None], y, 0)

    return recurrent_gla_layer_step


def _normed(
    o: torch.Tensor,
    output_gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    activation: str,
) -> torch.Tensor:
    """Returns the RMS norm of each head of o [B, Ho, V] times the activation of its gate, in the dtype of o."""
    dtype = wide(o.dtype)
    weight = None if norm_weight is None else norm_weight.to(dtype)
    y = torch.nn.functional.rms_norm(o.to(dtype), o.shape[-1:], weight, eps)
    y = y if output_gate is None else y * OUTPUT_ACTIVATIONS[activation](output_gate.to(dtype))
    return y.to(o.dtype).contiguous()


# ---- predicted times, and the backend


def supports_everything(call: OpCall) -> Reason | None:
    """Accepts every call: the default `Backend.supports`."""
    return None


Constants = Mapping[str, float]
"""The constants of a cost model by name; all positive and finite."""

DEVICE_FACTS = ("multiprocessors", "compute_capability")
"""Facts about the device that the core adds to the constants, and that are never fitted; see `CostModel`."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """A formula that predicts the seconds of a call from a few constants, measured once per kind of device.

    The formula is plain arithmetic: bytes over bandwidth, serial steps times step time, waves over multiprocessors,
    launches. It receives the call and the constants of the call's op on its device. These are the constants that
    `gla calibrate` has measured on this machine. If there are none, they are the constants shipped for that kind of
    device. On a CUDA device that nobody has measured, they are the constants shipped for an NVIDIA H200. The core adds
    `multiprocessors` (1 on a CPU) and `compute_capability` (9.0 for (9, 0); 0.0 on a CPU and on AMD GPUs) to them. In a
    CUDA graph (`call.capturing`) the host's time does not count. There is no prediction if a formula raises, or returns
    None or a number that is negative or not finite.

    Attributes:
        formula: takes an `OpCall` and the constants, returns seconds.
        constants: the shipped constants, a nested mapping: kind of device ("cpu", or the result of
            `torch.cuda.get_device_name()`) to op to name to value. An op has the same names on every kind;
            `gla calibrate` starts from these values.
        kernels: maps an op to a name. Backends that run the same kernels for the op have the same name here.
            `gla calibrate` fits their constants together, and a constant that both have gets one value: work that they
            share then costs the same.

    Example:
        >>> def seconds(call, c):
        ...     return c["launch"] + call.dims["rows"] * call.dims["columns"] * call.dtype.itemsize / c["bandwidth"]
        >>> CostModel(seconds, {"cpu": {"online_softmax": {"launch": 2e-5, "bandwidth": 5e9}}})
    """

    formula: Callable[[OpCall, Constants], float | None]
    constants: Mapping[str, Mapping[str, Constants]] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)


def shipped_constants(package: str) -> Mapping[str, Mapping[str, Constants]]:
    """Returns the content of the file constants.json in a backend's package, for its `CostModel`."""
    return json.loads((importlib.resources.files(package) / "constants.json").read_text())


def is_constant(value: object) -> bool:
    """Returns whether a value may be a constant of a cost model: a positive, finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def seconds_or_none(formula: Callable[..., float | None], *args: object) -> float | None:
    """Returns the seconds that a formula predicts, or None if it raises or returns no valid time."""
    try:
        predicted = formula(*args)
        seconds = math.nan if predicted is None else float(predicted)
    except (Exception, SystemExit):  # a formula may make no prediction
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of implementations of abstract ops.

    Attributes:
        name: the name that users write in `backend=`; letters, digits and underscores.
        version: version of the implementation, shown to users.
        ops: maps the name of an abstract op to a function or a `Prepared`, for any subset of `OP_PARAMETERS`.
        capabilities: the calls that the functions can run.
        supports: takes an `OpCall` that the capabilities allow; returns a `Reason` to refuse it, None to accept it.
        cost: predicts the seconds of an `OpCall`, by which `auto` ranks: a `CostModel`, whose constants can be
            calibrated, or a function that takes the call. None means no prediction.
        op_capabilities: the capabilities of ops for which `capabilities` does not hold, by abstract op name.
        notes: returns sentences that `gla doctor` prints about this backend on this machine, such as what slows it
            down; it may be slow. None means no notes.

    Example:
        >>> backend = Backend("mine", "1.0", {"online_softmax": my_softmax}, Capabilities(devices=frozenset({"cpu"})))
    """

    name: str
    version: str
    ops: Mapping[str, Op]
    capabilities: Capabilities = field(default_factory=Capabilities)
    supports: Callable[[OpCall], Reason | None] = supports_everything
    cost: CostModel | Callable[[OpCall], float | None] | None = None
    op_capabilities: Mapping[str, Capabilities] = field(default_factory=dict)
    notes: Callable[[], list[str]] | None = None

    def can(self, op: str) -> Capabilities:
        """Returns the capabilities of an op."""
        return self.op_capabilities.get(self._part_of(op) or op, self.capabilities)

    def implementation(self, op: str) -> Op:
        """Returns the implementation of an op that this backend serves: its own, or `through_layer_step` of a step."""
        part = self._part_of(op)
        return self.ops[op] if part is None else through_layer_step(self.ops[part])

    def _part_of(self, op: str) -> str | None:
        """Returns recurrent_gla_step if the backend computes recurrent_gla_layer_step by it, None for all else."""
        is_composed = op == "recurrent_gla_layer_step" and op not in self.ops
        return "recurrent_gla_step" if is_composed and "recurrent_gla_step" in self.ops else None

    def refusal(self, call: OpCall) -> Reason | None:
        """Returns why this backend cannot run `call`, or None if it can."""
        if self._part_of(call.op) is not None:
            return self.refusal(step_of_layer_step(call))
        if call.op not in self.ops:
            return f"does not implement {call.op}; it implements {', '.join(self.ops) or 'no op'}"
        call = as_received(self.ops[call.op], call)
        reason = _capability_refusal(self.can(call.op), call) or _argument_refusal(self.ops[call.op], call)
        if reason is not None:
            return reason
        try:
            reason = self.supports(call)
        except (Exception, SystemExit) as error:  # a fault in one backend must not take the others down
            return f"its supports() raised {type(error).__name__}: {error}"
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        return f"its supports() returned {reason!r}; expected a reason or None"

    def predicted_seconds(self, call: OpCall, constants: Constants = MappingProxyType({})) -> float | None:
        """Returns the seconds that the backend predicts, or None if it predicts no valid time.

        Args:
            constants: the constants for a `CostModel`; `gla_core.dispatch.calibration.predict` finds the right ones.
        """
        if self.cost is None:
            return None
        call = as_received(self.ops[call.op], call) if call.op in self.ops else call
        if isinstance(self.cost, CostModel):
            return seconds_or_none(self.cost.formula, call, constants)
        return seconds_or_none(self.cost, call)


def _capability_refusal(can: Capabilities, call: OpCall) -> Reason | None:
    subject = OP_PARAMETERS[call.op][0]
    if can.devices is not None and call.device.type not in can.devices:
        return f"needs a {_any_of(sorted(can.devices))} device; {subject} is on {call.device}"
    if call.dtype not in can.dtypes:
        return f"computes {_any_of(sorted(map(_short, can.dtypes)))}; {subject} is {_short(call.dtype)}"
    if call.device.type == "cuda" and call.assumed is None and not torch.cuda.is_available():
        return f"PyTorch sees no CUDA device here; the call is for {call.device}"
    if call.device.type == "cuda" and can.min_compute_capability > (0, 0):
        place = call.device if call.assumed is None else f"the assumed {call.assumed.name}"
        have = call.assumed.compute_capability if call.assumed else torch.cuda.get_device_capability(call.device)
        if have < can.min_compute_capability:
            need = can.min_compute_capability
            return f"needs compute capability {need[0]}.{need[1]}; {place} has {have[0]}.{have[1]}"
    for name, widths in (("K", can.key_widths), ("V", can.value_widths)):
        if name in call.dims and call.dims[name] not in widths:
            return f"computes {name} {_span(widths)}; {name} is {call.dims[name]}"
    if call.variable_length and not can.variable_length:
        return "has no packed sequences; call it per sequence, without cu_seqlens"
    if call.dims.get("Hq", 0) != call.dims.get("H", 0) and not can.grouped_queries:
        return f"has no grouped queries; q has {call.dims['Hq']} heads and k has {call.dims['H']}"
    if call.dims.get("Hv", 0) > call.dims.get("H", 0) and not can.grouped_values:
        return f"has no groups of value heads; v has {call.dims['Hv']} heads and k has {call.dims['H']}"
    if call.gate_form is not None and call.gate_form not in can.gates:
        taken = _any_of([words for form, words in GATES.items() if form in can.gates])
        return f"takes a gate {taken}; g has one {GATES[call.gate_form]}: expand it, or request another backend"
    if call.needs_grad and not can.gradients:
        return "has no gradients; call it under torch.no_grad()"
    if call.checkpoints and not can.checkpoints:
        return "returns no checkpoints; call it without checkpoint_every"
    if call.deterministic and not can.deterministic:
        return "is not deterministic; torch.use_deterministic_algorithms is on"
    if call.capturing and not can.cuda_graphs:
        return "cannot be captured into a CUDA graph"
    return _layout_refusal(can, call)


def _layout_refusal(can: Capabilities, call: OpCall) -> Reason | None:
    """Returns why a backend cannot write a tensor of a call in place. It must not receive a copy of such a tensor."""
    for name in () if can.swapped_states else OP_WRITTEN[call.op]:
        if name in call.layouts and call.layouts[name].is_swapped:
            return f"takes states whose values are contiguous; {name} has keys contiguous: request another backend"
    return None


def _argument_refusal(op: Op, call: OpCall) -> Reason | None:
    """Returns why an implementation cannot take the arguments of a call, or None if it can."""
    lacking = [name for name in OP_PARAMETERS[call.op] if name in call.given.difference(arguments_of(op))]
    return f"takes no {_any_of(lacking)}; call it without" if lacking else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _any_of(names: list[str]) -> str:
    *others, last = names or ["none"]
    return f"{', '.join(others)} or {last}" if others else last


def _span(widths: range) -> str:
    steps = f" in steps of {widths.step}" if widths.step != 1 else ""
    return f"from {widths[0]} to {widths[-1]}{steps}"
