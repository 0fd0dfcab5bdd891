"""The contract between the core and a backend.

A backend imports this module and the helpers beside it, and nothing else of the core: `lowering` computes ops by other
ops, `slots` reads and writes states in a pool, and `tensors` has wide dtypes, gates from logits, and new memory.

A backend is a value: a name, a version, a mapping from abstract op names to functions, and data that says which calls
these functions can run. Like a pluggy hook, a function declares only the arguments that it takes: any of the arguments
that `OP_PARAMETERS` lists for its op, by their names and in any order. It must take the required ones (`OP_REQUIRED`).
The core refuses a call for a backend if an argument that the function does not take has a value other than its default.
An op can therefore gain an argument without a change of any backend. Arguments that say how inputs are computed are
never refused: for a function that does not take `gate_normalizer`, the core computes log gates from logits, and for a
function that lacks one of the `RawInputs.options` of its op, the core computes all inputs that they describe. An op may
also be a `Prepared` instead of a function. It plans a call once for its signature.

`gla_core/ops/<family>/<op>.py` documents the arguments and results. The core checks all arguments before it calls a
function. The last dimension of every tensor is contiguous. In a state, the last but one may be contiguous instead if
`Capabilities.swapped_states` is True. A tensor that an op always writes (`OP_WRITTEN`) is never a copy. `scale` is
always a float, and autocast is off. Every returned tensor must be contiguous and own its memory: it must not be an
input or a view of another tensor. A decoding step has two exceptions: a state written in place is returned itself, and
a new state may have swapped dimensions (`new_state`). The core checks the results once for each signature.
"""

from __future__ import annotations

import functools
import importlib.resources
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pluggy
import torch

from gla_core.dispatch.errors import BackendError, attempt, said
from gla_core.dispatch.tensors import swapped, wide

hookimpl = pluggy.HookimplMarker("gla_core")

_parameters: dict[str, tuple[str, ...]] = {}
_required: dict[str, frozenset[str]] = {}
_written: dict[str, tuple[str, ...]] = {}
_lowerings: dict[str, Lowering] = {}
_raw_inputs: dict[str, RawInputs] = {}
OP_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(_parameters)
"""The parameters of each abstract op, in order; gla_core/ops declares them when it is imported."""
OP_REQUIRED: Mapping[str, frozenset[str]] = MappingProxyType(_required)
"""The parameters of each abstract op that every backend takes: all without a default, and also scale and dim."""

OP_WRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(_written)
"""The parameters of each abstract op that a backend always writes if they are given, such as a pool of states."""
OP_LOWERINGS: Mapping[str, Lowering] = MappingProxyType(_lowerings)
"""The lowering of each op that has one: how the core computes it for a backend that lacks it."""
OP_RAW_INPUTS: Mapping[str, RawInputs] = MappingProxyType(_raw_inputs)
"""The inputs of each op that a call may pass as a layer projects them, for ops that have such inputs."""

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


def declare_op(
    name: str,
    parameters: tuple[str, ...],
    required: frozenset[str],
    written: tuple[str, ...] = (),
    lowering: Lowering | None = None,
    raw_inputs: RawInputs | None = None,
) -> None:
    """Makes an abstract op known to backends and requests."""
    _parameters[name], _required[name], _written[name] = parameters, required, written
    if lowering is not None:
        _lowerings[name] = lowering
    if raw_inputs is not None:
        _raw_inputs[name] = raw_inputs


Reason = str
"""A refusal: a sentence a user can act on, such as 'needs a CUDA device; q is on cpu'."""


class LaunchError(RuntimeError):
    """A backend cannot launch its kernel here (too little shared memory, no compiler).

    Under an `auto` request the core then takes the next backend and remembers the failure. A backend must raise this
    error before it has written anything.
    """


# ---- what a backend can run


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
        checkpoints: whether a forward returns checkpoints if `checkpoint_every` is given.
        swapped_states: whether it takes states whose last two dimensions are swapped in memory: keys are contiguous
            instead of values. The new state of a decoding step must then be swapped as well (see `new_state`).
            All other results are contiguous.
        deterministic: whether the same inputs give the same bits. A backend with False is refused under
            `torch.use_deterministic_algorithms(True)`.
        cuda_graphs: whether a call may be captured into a CUDA graph.
        batch_invariant: device types on which forwards, backwards and decoding steps, each a `Prepared`,
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


# ---- a call


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
    properties = torch.cuda.get_device_properties(device)
    vendor = "NVIDIA" if torch.version.hip is None else "AMD"
    version = (properties.major, properties.minor)
    return KnownDevice(properties.name, properties.multi_processor_count, version, vendor)


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
        dims: sizes by name, as gla_core/ops/<family>/<op>.py lists them, such as
            B, T, H, Hq, Hv, K, V and N, or rows and columns.
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


def worst_case(call: OpCall) -> OpCall | None:
    """Returns the call with one packed sequence of all tokens; None if it is not packed, or the longest is bounded."""
    if not call.variable_length or call.longest is not None:
        return None
    return replace(call, longest=call.dims["T"])


# ---- an implementation of an op


Parts = Sequence[tuple[OpCall, int]]
"""Calls of other ops, each with the number of times that it is made."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An op that plans a call once for its signature.

    Attributes:
        prepare: takes an `OpCall`, returns the function that computes calls of this signature, whatever values their
            tensors hold. It raises `LaunchError` if a kernel cannot be launched. The returned function takes the
            arguments `takes`, in this order.
        takes: names of the arguments that the returned function takes, each of them once.
        kernels: takes an `OpCall`, returns lines for `explain`: the kernels that run the call, and why no others do.
            None if there are no such lines.
        parts: takes an `OpCall`, returns the calls of other ops of the backend by which this one is computed, each with
            the number of times that it is made. The backend refuses a call if it refuses one of its parts, and predicts
            the sum of their times. None, or an empty list, means that the backend computes the call itself.

    `gla explain --path` shows the steps of a call, and its launches. The steps of a backend are `prepare`, the function
    that it returns, and all functions of modules whose names begin with the word prepare, plan, launches or start. The
    launches are the argument `launches` of a function `start`, a list of values with a kernel of triton.jit, a grid and
    options as attributes `kernel`, `grid` and `options`. Nothing is launched, because the call ends there.

    Example:
        >>> def prepare(call):
        ...     block = 64 if call.dims["columns"] > 64 else 16
        ...     return lambda x, dim: my_softmax(x, dim, block)
        >>> ops = {"online_softmax": Prepared(prepare, ("x", "dim"))}
        >>> Backend("mine", "1.0", ops)
    """

    prepare: Callable[[OpCall], Callable[..., Any]]
    takes: tuple[str, ...]
    kernels: Callable[[OpCall], list[str]] | None = None
    parts: Callable[[OpCall], Parts] | None = None


Op = Callable[..., Any] | Prepared
"""An implementation of an abstract op."""


def parts_of(op: Op, call: OpCall) -> Parts:
    """Returns the calls of other ops by which an implementation computes a call; see `Prepared.parts`."""
    return op.parts(call) if isinstance(op, Prepared) and op.parts is not None else ()


def prepared(op: Prepared, call: OpCall) -> Callable[..., Any]:
    """Returns the function that `prepare` returns for a call.

    Raises:
        BackendError: `prepare` returned no function, or raised what is no `Exception`. The message does not name the
            backend. Other exceptions of `prepare` are raised as they are.
    """
    function, error = attempt(op.prepare, call)
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise BackendError(f"prepare of {call.op} raised {said(error)}") from error
    if not callable(function):
        expected = f"expected a function of {', '.join(op.takes)}"
        raise BackendError(f"prepare of {call.op} returned {type(function).__name__}; {expected}")
    return function


@dataclass(frozen=True, slots=True)
class Lowering:
    """A way to compute an op by another op, for a backend that implements only the other one.

    Attributes:
        by: the name of the other op.
        parts: takes a call of the op, returns the calls of the other op by which it is computed, each with the number
            of times that it is made.
        function: takes a function for each of these calls, or one for all of them, and returns the function that
            computes the op, with the arguments of its contract in order. The functions that it takes have the arguments
            of the other op, by name.
    """

    by: str
    parts: Callable[[OpCall], Parts]
    function: Callable[..., Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class RawInputs:
    """Inputs that a call may pass as a layer projects them, with arguments that say what to compute of them.

    Attributes:
        options: the names of these arguments. They are None by default.
        plain_call: takes a call, returns the call with computed inputs and without options.
        plain: takes the arguments of a call by name, returns them with computed inputs and without options.
    """

    options: tuple[str, ...]
    plain_call: Callable[[OpCall], OpCall]
    plain: Callable[[Mapping[str, Any]], dict[str, Any]]


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

    An implementation that takes no gate_normalizer receives log gates in place of logits, and one that lacks an option
    of `RawInputs` receives computed inputs. For any other one it is `call` itself.
    """
    if has_raw_inputs(call) and not takes_raw_inputs(op, call.op):
        call = OP_RAW_INPUTS[call.op].plain_call(call)
    if call.scalars.get("gate_normalizer") is None or "gate_normalizer" in arguments_of(op):
        return call
    return call_with_log_gates(call)


def has_raw_inputs(call: OpCall) -> bool:
    """Returns whether a call passes inputs as a layer projects them; see `RawInputs`."""
    return call.op in OP_RAW_INPUTS and not call.given.isdisjoint(OP_RAW_INPUTS[call.op].options)


def takes_raw_inputs(op: Op, name: str) -> bool:
    """Returns whether an implementation of the op `name` takes inputs as a layer projects them."""
    return name in OP_RAW_INPUTS and set(OP_RAW_INPUTS[name].options).issubset(arguments_of(op))


def call_with_log_gates(call: OpCall) -> OpCall:
    """Returns the call with log gates in a wide dtype in place of its gates or logits."""
    dtype, layouts = wide(call.dtype), dict(call.layouts)
    if "g" in layouts:
        layouts["g"] = contiguous_layout(layouts["g"].shape, dtype)
    scalars, passed = {**call.scalars, "gate_normalizer": None}, call.given - {"gate_normalizer"}
    return replace(call, gate_dtype=dtype, scalars=scalars, given=passed, layouts=layouts)


# ---- a predicted time


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
        ...     values = call.dims["rows"] * call.dims["columns"]
        ...     bytes = values * call.dtype.itemsize
        ...     return c["launch"] + bytes / c["bandwidth"]
        >>> constants = {"launch": 2e-5, "bandwidth": 5e9}
        >>> CostModel(seconds, {"cpu": {"online_softmax": constants}})
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


def seconds_or_none(formula: Callable[..., Any], *args: object) -> float | None:
    """Returns the seconds that a formula predicts, or None if it raises or returns no valid time."""
    seconds, _ = attempt(lambda: float(formula(*args)))  # float(None) raises
    return seconds if seconds is not None and math.isfinite(seconds) and seconds >= 0 else None


def sentences(what: str, function: Callable[..., list[str]], *args: object) -> list[str]:
    """Returns the sentences that a backend's function `what` returns; if it is at fault, one that says how."""
    lines, error = attempt(function, *args)
    if error is not None:
        return [f"its {what}() raised {said(error)}"]
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        return [f"its {what}() returned {type(lines).__name__}; expected a list of strings"]
    return list(lines)


# ---- a backend


def supports_everything(call: OpCall) -> Reason | None:
    """Accepts every call: the default `Backend.supports`."""
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of implementations of abstract ops.

    Attributes:
        name: the name that users write in `backend=`; letters, digits and underscores. "auto" and "batch_invariant" are
            words of a request, and no names.
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
        >>> ops = {"online_softmax": my_softmax}
        >>> facts = Capabilities(devices=frozenset({"cpu"}))
        >>> backend = Backend("mine", "1.0", ops, facts)
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
        op = self.ops[call.op]
        call = as_received(op, call)
        reason = _capability_refusal(self.can(call.op), call) or _argument_refusal(op, call)
        if reason is not None:
            return reason
        if parts := parts_of(op, call):
            return next(filter(None, (self.refusal(part) for part, _ in parts)), None)
        reason, error = attempt(self.supports, call)
        if error is not None:
            return f"its supports() raised {said(error)}"
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


# ---- refusals by data


def _capability_refusal(can: Capabilities, call: OpCall) -> Reason | None:
    subject = OP_PARAMETERS[call.op][0]
    if can.devices is not None and call.device.type not in can.devices:
        return f"needs a {any_of(sorted(can.devices))} device; {subject} is on {call.device}"
    if call.dtype not in can.dtypes:
        return f"computes {any_of(sorted(map(_short, can.dtypes)))}; {subject} is {_short(call.dtype)}"
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
    if call.dims.get("Hq", call.dims.get("H")) != call.dims.get("H") and not can.grouped_queries:
        return f"has no grouped queries; q has {call.dims['Hq']} heads and k has {call.dims['H']}"
    if call.dims.get("Hv", 0) > call.dims.get("H", 0) and not can.grouped_values:
        return f"has no groups of value heads; v has {call.dims['Hv']} heads and k has {call.dims['H']}"
    if call.gate_form is not None and call.gate_form not in can.gates:
        taken = any_of([words for form, words in GATES.items() if form in can.gates])
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
    return f"takes no {any_of(lacking)}; call it without" if lacking else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def any_of(names: list[str]) -> str:
    """Returns names as words: 'a, b or c'."""
    *others, last = names or ["none"]
    return f"{', '.join(others)} or {last}" if others else last


def _span(widths: range) -> str:
    steps = f" in steps of {widths.step}" if widths.step != 1 else ""
    return f"from {widths[0]} to {widths[-1]}{steps}"
