"""The contract between the core and a backend. A backend imports this module and nothing else of the core.

A backend is a value: a name, a version, a mapping from abstract op names to plain functions, and data that says
where those functions work. The functions take exactly the parameters listed in `OP_PARAMETERS`, positionally; what
they mean, and what is returned, is documented in `gla_core/ops/<op>.py`. All arguments have been checked when a
function is called, the last dimension of every tensor is contiguous (of a state it may be the one before it, where
`Capabilities.swapped_states` says so), `scale` is always a float, and autocast is off. Every tensor returned must be
contiguous and in memory of its own: no input, and no view of another tensor. The core checks what comes back, once for
each signature.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pluggy
import torch

hookimpl = pluggy.HookimplMarker("gla_core")

_parameters: dict[str, tuple[str, ...]] = {}
OP_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(_parameters)
"""The parameters of each abstract op, in order; gla_core/ops declares them when it is imported."""


def declare_op(name: str, parameters: tuple[str, ...]) -> None:
    """Make an abstract op known to backends and requests."""
    _parameters[name] = parameters


Reason = str
"""A refusal: a sentence a user can act on, such as 'needs a CUDA device; q is on cpu'."""


class LaunchError(RuntimeError):
    """Raised by a backend whose kernel cannot be launched here (too little shared memory, no compiler).

    Under an `auto` request the core then takes the next backend and remembers the failure. Raise it before anything
    has been written.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Where a backend works, as data; the core turns whatever a call asks beyond it into a refusal.

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
        batch_invariant: device types on which chunk_gla_fwd, chunk_gla_bwd and recurrent_gla_step keep what
            `invariant_tokens` asks of them. On others the core calls them for a segment of a sequence at a time.
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
    """A CUDA device that need not be here for a call on it to be explained: what is known of it by its name."""

    name: str
    multiprocessors: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """What is known of a call before it runs: enough to refuse it or to predict its time, and no tensor.

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
        batch_invariant: as `invariant_tokens` says it.
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


_invariant: ContextVar[int | None] = ContextVar("gla_batch_invariant", default=None)


def invariant_tokens() -> int | None:
    """Tokens at whose multiples a sequence may be cut into calls without a change of bits; None where nobody asks it.

    Asked by a backend inside its functions. Where it is not None the results for a sequence depend on nothing else
    either: sequences are packed, and how many there are, of which lengths, decides nothing. See `batch_invariant`.
    """
    return _invariant.get()


@contextmanager
def asking_for_invariance(tokens: int) -> Iterator[None]:
    """Have `invariant_tokens` return this inside the block."""
    before = _invariant.set(tokens)
    try:
        yield
    finally:
        _invariant.reset(before)


def swapped(x: torch.Tensor) -> bool:
    """Whether a tensor [..., K, V] lies in memory with these two dimensions swapped: K is contiguous, and V is not."""
    return x.ndim > 1 and x.stride(-1) != 1 and x.stride(-2) == 1 and not x.is_contiguous()


def new_state(state: torch.Tensor) -> torch.Tensor:
    """Memory for what a step makes of a state [P, H, K, V]: dense, with K and V swapped where the state's are."""
    if swapped(state):
        return torch.empty_like(state.mT, memory_format=torch.contiguous_format).mT
    return torch.empty_like(state, memory_format=torch.contiguous_format)


def checkpoint_rows(T: int, N: int, every: int, packed: bool) -> int:
    """n, of checkpoints every so many of the T tokens of a row of a batch; packed, it holds N sequences."""
    return N + T // every if packed else -(-T // every)


def checkpoint_dtype(dtype: torch.dtype) -> torch.dtype:
    """What checkpoints hold where q has this dtype."""
    return dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


def new_checkpoints(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, every: int) -> torch.Tensor:
    """Memory for the checkpoints [B, n, H, K, V] of chunk_gla_fwd; of packed sequences 0, since some rows stay so."""
    B, T, H, K = k.shape
    N, allocate = (B, v.new_empty) if cu_seqlens is None else (len(cu_seqlens) - 1, v.new_zeros)
    n = checkpoint_rows(T, N, every, packed=cu_seqlens is not None)
    return allocate(B, n, H, K, v.shape[3], dtype=checkpoint_dtype(k.dtype))


def supports_everything(call: OpCall) -> Reason | None:
    """The default `Backend.supports`: the capabilities say it all."""
    return None


Constants = Mapping[str, float]
"""Constants of a cost model by name; all positive and finite."""

DEVICE_FACTS = ("multiprocessors", "compute_capability")
"""What the core adds to the constants: known of the device and never fitted; see `CostModel`."""


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
    """What the file constants.json of a backend's package holds, for its `CostModel`."""
    return json.loads((importlib.resources.files(package) / "constants.json").read_text())


def is_constant(value: object) -> bool:
    """Whether a value may be a constant of a cost model: a positive, finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def seconds_or_none(formula: Callable[..., float | None], *args: object) -> float | None:
    """What a formula says of its arguments; None where it raises or its answer is no time."""
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
        ops: abstract op name to function; any subset of `OP_PARAMETERS`.
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
    ops: Mapping[str, Callable]
    capabilities: Capabilities = field(default_factory=Capabilities)
    supports: Callable[[OpCall], Reason | None] = supports_everything
    cost: CostModel | Callable[[OpCall], float | None] | None = None
    op_capabilities: Mapping[str, Capabilities] = field(default_factory=dict)
    notes: Callable[[], list[str]] | None = None

    def can(self, op: str) -> Capabilities:
        """Where the function of an op works."""
        return self.op_capabilities.get(op, self.capabilities)

    def refusal(self, call: OpCall) -> Reason | None:
        """Why this backend cannot run `call`, or None if it can."""
        if call.op not in self.ops:
            return f"does not implement {call.op}; it implements {', '.join(self.ops) or 'no op'}"
        reason = _capability_refusal(self.can(call.op), call)
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
        """The backend's own prediction, or None where it has none (or one that is no time).

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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _any_of(names: list[str]) -> str:
    *others, last = names or ["none"]
    return f"{', '.join(others)} or {last}" if others else last


def _span(widths: range) -> str:
    steps = f" in steps of {widths.step}" if widths.step != 1 else ""
    return f"from {widths[0]} to {widths[-1]}{steps}"
