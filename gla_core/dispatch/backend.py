"""The contract between the core and a backend. A backend imports this module and nothing else of the core.

A backend is a value: a name, a version, a mapping from abstract op names to functions, and data that says where these
functions work. A function names the arguments that it takes, as a hook of pluggy does: any of those that
`OP_PARAMETERS` lists for its op, in any order. It has to take the required ones (`OP_REQUIRED`). A call that gives
another argument a value other than its default is refused for this backend, so an op can gain an argument without a
change of any backend. In place of a function an op may be a `Prepared`, which plans a call once for its signature.

What arguments and results mean is documented in `gla_core/ops/<op>.py`. When a function is called, all arguments have
been checked. The last dimension of every tensor is contiguous; of a state it may be the one before it, where
`Capabilities.swapped_states` says so. `scale` is always a float, and autocast is off. Every tensor that is returned
must be contiguous and in memory of its own: no input, and no view of another tensor. The core checks the results once
for each signature.
"""

from __future__ import annotations

import functools
import importlib.resources
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pluggy
import torch

hookimpl = pluggy.HookimplMarker("gla_core")

_parameters: dict[str, tuple[str, ...]] = {}
_required: dict[str, frozenset[str]] = {}
OP_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(_parameters)
"""The parameters of each abstract op, in order; gla_core/ops declares them when it is imported."""
OP_REQUIRED: Mapping[str, frozenset[str]] = MappingProxyType(_required)
"""The parameters of each abstract op that every backend takes: those without a default, scale and dim."""

CHUNK = 64
"""Tokens: sequences are cut into segments, and checkpoints are taken, at multiples of this number."""


def declare_op(name: str, parameters: tuple[str, ...], required: frozenset[str]) -> None:
    """Makes an abstract op known to backends and requests."""
    _parameters[name], _required[name] = parameters, required


Reason = str
"""A refusal: a sentence a user can act on, such as 'needs a CUDA device; q is on cpu'."""


class LaunchError(RuntimeError):
    """Raised by a backend whose kernel cannot be launched here (too little shared memory, no compiler).

    Under an `auto` request the core then takes the next backend and remembers the failure. Raise it before anything
    has been written.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The calls that a backend can run, as data. The core derives refusals from it.

    Attributes:
        devices: torch device types, such as `{"cuda"}`; None for any.
        dtypes: dtypes of q (or x) that are computed.
        min_compute_capability: the least CUDA compute capability, such as (8, 0); not looked at on other devices.
        key_widths, value_widths: widths K and V of a head that are computed, such as `range(16, 257, 16)`.
        variable_length: packed sequences (`cu_seqlens`).
        grouped_queries: more query heads than key/value heads.
        gradients: the forward may be used where a gradient is needed, by this backend's backward or another's.
        checkpoints: `chunk_gla_fwd` returns checkpoints where `checkpoint_every` is given.
        swapped_states: states are taken as they are that lie in memory with their last two dimensions swapped, keys
            contiguous in place of values. The new state of `recurrent_gla_step` is then to lie so as well: see
            `new_state`; what other ops return is contiguous.
        deterministic: the same inputs give the same bits. A backend that says False is refused under
            `torch.use_deterministic_algorithms(True)`.
        cuda_graphs: may be captured into a CUDA graph.
        batch_invariant: device types on which chunk_gla_fwd, chunk_gla_bwd and recurrent_gla_step, each a `Prepared`,
            honour `OpCall.batch_invariant`. On other devices the core calls them for a segment of a sequence at a time.
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.float16, torch.bfloat16})
    min_compute_capability: tuple[int, int] = (0, 0)
    key_widths: range = range(1, 2**31)
    value_widths: range = range(1, 2**31)
    variable_length: bool = True
    grouped_queries: bool = True
    gradients: bool = True
    checkpoints: bool = False
    swapped_states: bool = False
    deterministic: bool = True
    cuda_graphs: bool = False
    batch_invariant: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A CUDA device for which a call can be explained without the device."""

    name: str
    multiprocessors: int
    compute_capability: tuple[int, int]


ALIGNMENT = 16
"""Bytes: kernels load wide words, and TMA addresses tensors, at multiples of this number."""


class Layout(NamedTuple):
    """The layout of a tensor in memory.

    Attributes:
        strides: in elements.
        aligned: whether its address is a multiple of `ALIGNMENT` bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True

    @property
    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()


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
        op: abstract op name.
        device: device of every tensor of the call.
        dtype: dtype of q (or x).
        dims: sizes by name, as gla_core/ops/<op>.py lists them: B, T, H, Hq, K, V, N for `chunk_gla_fwd` and
            `chunk_gla_bwd`, rows and columns for `online_softmax`.
        gate_dtype, state_dtype: dtype of g and of the state given, None where there is none.
        variable_length: whether `cu_seqlens` is given.
        longest: tokens of the longest packed sequence at most, as far as is said or supposed; None where nothing is.
        indexed: whether `state_indices` are given.
        scalars: arguments that are neither tensors nor the scale, by name, such as causal or output_final_state.
        checkpoints: whether checkpoints are to be returned.
        needs_grad: whether a gradient will be asked for.
        deterministic: whether the user has asked PyTorch for deterministic algorithms.
        capturing: whether a CUDA graph is being captured.
        float32_matmul_precision: what `torch.get_float32_matmul_precision()` says; 'highest' means no TF32.
        assumed: the device that `device` is taken to be, whatever is here; None in every call that is to run.
        batch_invariant: if not None, the bits of a sequence may depend on nothing but the sequence, and a sequence may
            be cut into calls at multiples of this number of tokens without a change of its bits. The number of
            sequences in a batch, and their lengths, then decide nothing. See `gla_core.batch_invariant`.
        given: names of the arguments that a backend need not take and whose values are not their defaults.
        layouts: the layout of every tensor that is given, by argument name; empty if a call is known by its sizes.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    dims: Mapping[str, int]
    gate_dtype: torch.dtype | None = None
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
        prepare: takes an `OpCall`, returns the function that computes calls of this signature, whatever their values.
            It raises `LaunchError` if a kernel cannot be launched. The returned function takes the arguments `takes`,
            in this order.
        takes: names of the arguments that the returned function takes.
        kernels: optionally, lines for `explain`: the kernels that a call takes, and why it takes no others.

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
    """Returns the names of the arguments that an implementation takes, in its order.

    Raises:
        TypeError, ValueError: the signature of a function cannot be read.
    """
    return op.takes if isinstance(op, Prepared) else tuple(inspect.signature(op).parameters)


def by_keyword(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes an argument by keyword only."""
    return any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(function).parameters.values())


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states, and of sums: float32, or float64 with float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def number_of_sequences(B: int, cu_seqlens: torch.Tensor | None) -> int:
    """Returns N: the rows of a batch, or the packed sequences that `cu_seqlens` [N+1] delimits."""
    return B if cu_seqlens is None else len(cu_seqlens) - 1


def swapped(x: torch.Tensor) -> bool:
    """Returns whether the last two dimensions of a tensor [..., K, V] are swapped in memory: K is contiguous."""
    return x.ndim > 1 and x.stride(-1) != 1 and x.stride(-2) == 1 and not x.is_contiguous()


def new_state(state: torch.Tensor) -> torch.Tensor:
    """Returns memory for the state after a step [P, H, K, V]: dense, with K and V swapped if the state's are."""
    if swapped(state):
        return torch.empty_like(state.mT, memory_format=torch.contiguous_format).mT
    return torch.empty_like(state, memory_format=torch.contiguous_format)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up; b is positive."""
    return -(-a // b)


def checkpoint_rows(T: int, N: int, every: int, packed: bool) -> int:
    """Returns n, the rows of checkpoints every `every` of T tokens: of one row of a batch, or of N packed sequences."""
    return N + T // every if packed else ceil_div(T, every)


def checkpoint_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of checkpoints for this dtype of q."""
    return dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


def new_checkpoints(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, every: int) -> torch.Tensor:
    """Returns memory for the checkpoints [B, n, H, K, V] of chunk_gla_fwd; zeros for packed sequences, which leave some
    rows unwritten.
    """
    B, T, H, K = k.shape
    N, allocate = number_of_sequences(B, cu_seqlens), v.new_empty if cu_seqlens is None else v.new_zeros
    n = checkpoint_rows(T, N, every, packed=cu_seqlens is not None)
    return allocate(B, n, H, K, v.shape[3], dtype=checkpoint_dtype(k.dtype))


def supports_everything(call: OpCall) -> Reason | None:
    """Accepts every call: the default `Backend.supports`."""
    return None


Constants = Mapping[str, float]
"""Constants of a cost model by name; all positive and finite."""

DEVICE_FACTS = ("multiprocessors", "compute_capability")
"""Facts about the device that the core adds to the constants, and that are never fitted; see `CostModel`."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicted seconds: a formula over a few constants, which are measured once per kind of device.

    The formula is plain arithmetic: bytes over bandwidth, serial steps times step time, waves over multiprocessors,
    launches. It receives the call and the constants of the call's op on its device: those that `gla calibrate` has
    measured on this machine, else those shipped for that kind of device, else, on a CUDA device that nobody has
    measured, those shipped for an NVIDIA H200. Beside them stand `multiprocessors` (1 on a CPU) and
    `compute_capability` (9.0 for (9, 0), 0.0 on a CPU). In a CUDA graph (`call.capturing`) the host's time does not
    count. A formula that raises, or returns None or no time, makes no prediction.

    Attributes:
        formula: takes an `OpCall` and the constants, returns seconds.
        constants: shipped constants: kind of device ("cpu", or what `torch.cuda.get_device_name()` says) to op to name
            to value. An op has the same names on every kind; `gla calibrate` starts from these values.
        kernels: op to a name that backends have in common which run the same kernels for it. `gla calibrate` fits their
            constants together, those of a name that both have as one: what they compute alike then costs the same.

    Example:
        >>> def seconds(call, c):
        ...     return c["launch"] + call.dims["rows"] * call.dims["columns"] * call.dtype.itemsize / c["bandwidth"]
        >>> CostModel(seconds, {"cpu": {"online_softmax": {"launch": 2e-5, "bandwidth": 5e9}}})
    """

    formula: Callable[[OpCall, Constants], float | None]
    constants: Mapping[str, Mapping[str, Constants]] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)


def shipped_constants(package: str) -> Mapping[str, Mapping[str, Constants]]:
    """Returns the content of the file constants.json of a backend's package, for its `CostModel`."""
    return json.loads((importlib.resources.files(package) / "constants.json").read_text())


def is_constant(value: object) -> bool:
    """Returns whether a value may be a constant of a cost model: a positive, finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def seconds_or_none(formula: Callable[..., float | None], *args: object) -> float | None:
    """Returns the seconds that a formula predicts, or None if it raises or its answer is no time."""
    try:
        predicted = formula(*args)
        seconds = math.nan if predicted is None else float(predicted)
    except (Exception, SystemExit):  # no prediction is always legal
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of implementations of abstract ops.

    Attributes:
        name: what users write in `backend=`; letters, digits and underscores.
        version: version of the implementation, shown to users.
        ops: abstract op name to a function or a `Prepared`; any subset of `OP_PARAMETERS`.
        capabilities: where the functions work.
        supports: called with an `OpCall` that the capabilities allow; a `Reason` refuses it, None accepts it.
        cost: optionally predicts the time of an `OpCall` in seconds, by which `auto` ranks: a `CostModel`, whose
            constants can be calibrated, or a function that takes the call.
        op_capabilities: the capabilities of ops that differ from the others, by abstract op name.
        notes: optionally what `gla doctor` says of this backend here, such as what slows it down; may take its time.

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
        return self.op_capabilities.get(op, self.capabilities)

    def refusal(self, call: OpCall) -> Reason | None:
        """Returns why this backend cannot run `call`, or None if it can."""
        if call.op not in self.ops:
            return f"does not implement {call.op}; it implements {', '.join(self.ops) or 'no op'}"
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
        """Returns the backend's own prediction, or None if it has none, or one that is no time.

        Args:
            constants: of a `CostModel`; `gla_core.dispatch.calibration.predict` finds the right ones.
        """
        if self.cost is None:
            return None
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
    if call.needs_grad and not can.gradients:
        return "has no gradients; call it under torch.no_grad()"
    if call.checkpoints and not can.checkpoints:
        return "returns no checkpoints; call it without checkpoint_every"
    if call.deterministic and not can.deterministic:
        return "is not deterministic; torch.use_deterministic_algorithms is on"
    if call.capturing and not can.cuda_graphs:
        return "cannot be captured into a CUDA graph"
    return None


def _argument_refusal(op: Op, call: OpCall) -> Reason | None:
    """Returns why an implementation cannot be given the arguments of a call."""
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
