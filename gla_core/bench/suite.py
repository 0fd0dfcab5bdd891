"""Measures cases: a workload, an implementation and a direction. Each case gives a row. The directions are:

forward            for ops that have gradients, without computing them
forward+backward   with the gradients of every input, through autograd
step               for ops that have no gradients, writing in place
forward_graph, step_graph, forward+backward_graph
                   the same in a CUDA graph that is replayed: the time of the device, without the host
host               seconds of the host per eager call (forward or step), without waiting for the device
first_call         the first forward or step of a fresh process with an empty Triton cache, including imports,
                   compilation and tuning
first_backward     the first backward after the first call
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gla_core as gla
from gla_core.bench import measure
from gla_core.bench.baselines import BASELINES, READ_BY_A_LOSS, baselines
from gla_core.bench.first_call import first_call
from gla_core.bench.floor import floor_bytes
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS
from gla_core.workloads.inputs import arguments as arguments_of
from gla_core.workloads.named import Workload, select

Call = Callable[[], tuple[Tensor, ...]]

TIMED = ("forward", "forward+backward", "step", "step_graph")
DIRECTIONS = (*TIMED, "forward_graph", "forward+backward_graph", "host", "first_call", "first_backward")
CUDA_TAGS = ("train", "prefill", "decode", "long")


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement to make. `backend` is a request, such as a backend's name, or the name of a baseline."""

    workload: Workload
    backend: str
    direction: str

    def __str__(self) -> str:
        return f"{self.workload.name}-{self.backend}-{self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        workload, op, direction: what was measured.
        backend: the baseline, or the backend that ran; the request if no backend could run. If different backends ran
            forward and backward, both names, as in "parallel_scan+reference".
        seconds: median of `calls` calls; None if there is an error.
        spread: distance between the quartiles of these calls, divided by their median; None with fewer than two times.
        gigabytes_per_second: gigabytes of the memory floor divided by `seconds`.
        floor_fraction: seconds of the memory floor, at the copy bandwidth of the same run, divided by `seconds`.
        ratio_to: for each baseline of the same workload and direction, its seconds divided by `seconds`. Above 1, this
            row is faster.
        error: one line; None if there was no error.
    """

    workload: str
    op: str
    backend: str
    direction: str
    seconds: float | None = None
    calls: int = 0
    gigabytes_per_second: float | None = None
    floor_fraction: float | None = None
    ratio_to: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    spread: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the key that rows share if they are compared with each other."""
        return (self.op, self.workload, self.direction)


def default_workloads(op: str | None, device: torch.device) -> list[Workload]:
    """Returns the workloads tagged ci on a CPU, and the workloads of models on a CUDA device; none is empty."""
    workloads = select(op, ["ci"]) if device.type == "cpu" else select(op)
    return [
        w for w in workloads if not is_empty(w) and (device.type == "cpu" or w.tags.intersection(CUDA_TAGS) - {"ci"})
    ]


def is_empty(workload: Workload) -> bool:
    """Returns whether a workload holds no token or row; such a workload is for conformance, not for time."""
    sizes = workload.sizes
    tokens = sum(sizes["lengths"]) if "lengths" in sizes else sizes.get("T")
    return 0 in (*sizes.get("shape", ()), sizes.get("B"), tokens)


def cases(
    chosen: Iterable[Workload],
    device: torch.device,
    backends: Sequence[str] | None = None,
    directions: Sequence[str] = TIMED,
    with_baselines: bool = True,
) -> list[Case]:
    """Returns the cases to measure, baselines first, so that every later row can be compared.

    Args:
        backends: requests; by default every backend that implements the op.
    """
    cases = []
    for workload in chosen:
        names = baselines(workload.op, device) if with_baselines else []
        names += backends if backends is not None else implementing(workload.op)
        possible = _directions(workload.op, device, directions)
        cases += [Case(workload, name, direction) for direction in possible for name in names]
    return cases


def implementing(op: str) -> list[str]:
    """Returns the names of the backends that implement a public op."""
    return [info.name for info in gla.backends() if PUBLIC_OPS[op].name in info.ops]


def has_backward(op: str, backend: str) -> bool:
    """Returns whether a baseline or backend differentiates an op. If no backward op exists, the core does it itself."""
    spec = PUBLIC_OPS[op]
    if spec.backward is None or backend in BASELINES:
        return spec.differentiable
    return any(info.name == backend and spec.backward in info.ops for info in gla.backends())


def _directions(op: str, device: torch.device, wanted: Sequence[str]) -> list[str]:
    if PUBLIC_OPS[op].differentiable:
        both = ("forward+backward", "forward+backward_graph")
        possible = ("forward", "forward_graph", *both, "host", "first_call", "first_backward")
    else:
        possible = ("step", "step_graph", "host", "first_call")
    return [d for d in possible if d in wanted and (not d.endswith("_graph") or device.type == "cuda")]


def measure_case(case: Case, device: torch.device, bandwidth: float | None = None, budget: float = 0.5) -> Row:
    """Measures one case. If it fails, the row holds the error.

    Args:
        bandwidth: bytes per second of a copy on the device, for the fraction of the floor.
        budget: seconds of timed calls, without compilation.
    """
    row = Row(workload=case.workload.name, op=case.workload.op, backend=case.backend, direction=case.direction)
    try:
        row = dataclasses.replace(row, backend=resolve(case, device))
        # A graph names its backend, so that its eager warm-up runs the same one; other cases are timed as requested.
        captured = case.direction.endswith("_graph") and "+" not in row.backend
        timed = dataclasses.replace(case, backend=row.backend) if captured else case
        timing = _time(timed, device, budget)
    except gla.NoBackendError as error:  # it lists refusals, as "name: reason"
        first, *reasons = (line.strip() for line in str(error).splitlines())
        return dataclasses.replace(row, error="; ".join(reasons) or first)
    except Exception as error:  # out of memory, a kernel that cannot be built, or a baseline that cannot run this case
        lines = str(error).strip().splitlines() or [""]
        row = dataclasses.replace(row, error=f"{type(error).__name__}: {' '.join(lines)[:300]}")
        gc.collect()  # frees tensors that the error still held
        return row
    finally:
        if device.type == "cuda":  # so that one case does not starve the next
            gc.collect()
            torch.cuda.empty_cache()
    row = dataclasses.replace(row, seconds=timing.seconds, calls=timing.calls, spread=timing.spread)
    return row if case.direction not in TIMED else _against_the_floor(row, case, bandwidth)


def _against_the_floor(row: Row, case: Case, bandwidth: float | None) -> Row:
    assert row.seconds is not None
    rate = floor_bytes(case.workload.op, case.workload.sizes, case.direction == "forward+backward") / row.seconds
    fraction = None if bandwidth is None else rate / bandwidth
    return dataclasses.replace(row, gigabytes_per_second=rate / 1e9, floor_fraction=fraction)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows, each with its ratio to every baseline of the same workload and direction."""
    references = {(row.key, row.backend): row.seconds for row in rows if row.backend in BASELINES and row.seconds}

    def compared(row: Row) -> Row:
        if row.seconds is None:
            return row
        others = [name for name in BASELINES if name != row.backend and (row.key, name) in references]
        return dataclasses.replace(row, ratio_to={name: references[row.key, name] / row.seconds for name in others})

    return list(map(compared, rows))


def resolve(case: Case, device: torch.device) -> str:
    """Returns the name of the baseline of a case, or of the backends that its request selects, joined by "+".

    Raises:
        NoBackendError, UnknownBackendError: no backend can run it; the message has the reasons.
    """
    if case.backend in BASELINES:
        return case.backend
    backward = "backward" in case.direction
    arguments = make_arguments(case.workload, device, backward)
    arguments["capturing"] = case.direction.endswith("_graph")
    spec = PUBLIC_OPS[case.workload.op]
    ops = [spec.name, *([spec.backward] if backward and spec.backward is not None else [])]
    return "+".join(dict.fromkeys(_winner(op, arguments, case.backend) for op in ops))


def _winner(op: str, arguments: dict[str, Any], request: str) -> str:
    taken = (*ABSTRACT_OPS[op].names, "capturing")
    arguments = {name: value for name, value in arguments.items() if name in taken}
    explanation = gla.explain(op, **arguments, backend=request)
    if explanation.winner is None:
        raise gla.NoBackendError(explanation.why)
    return explanation.winner


def make_arguments(workload: Workload, device: torch.device, gradients: bool = False, seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of the public op by name, without `backend`; with `gradients`, floats require them."""
    arguments = arguments_of(workload, device=device, seed=seed)
    if "inplace" in PUBLIC_OPS[workload.op].parameters:
        arguments["inplace"] = True
    for x in leaves(arguments) if gradients else ():
        x.requires_grad_()
    return arguments


def make_call(workload: Workload, backend: str, direction: str, device: torch.device, seed: int = 0) -> Call:
    """Returns a function that runs the case once on tensors of its own.

    Args:
        backend: a resolved name.
        direction: forward, step or forward+backward; the last returns the gradients.
    """
    backward = direction == "forward+backward"
    arguments = make_arguments(workload, device, backward, seed)
    function = bound(workload.op, backend, arguments)
    if not backward:
        return torch.no_grad()(function)
    differentiated = leaves(arguments)
    with torch.no_grad():
        incoming = [torch.randn_like(x) for x in function()[: READ_BY_A_LOSS.get(workload.op)]]

    def forward_and_backward() -> tuple[Tensor, ...]:
        return gradients_of(function(), differentiated, incoming, backend)

    return forward_and_backward


def gradients_of(
    outputs: Sequence[Tensor], differentiated: Sequence[Tensor], incoming: Sequence[Tensor], backend: str
) -> tuple[Tensor, ...]:
    """Returns the gradients that `backend` computes. A baseline may leave some out: FLA those of constant gates.

    Args:
        incoming: the gradients of the first outputs; the others have none.
    """
    outputs = outputs[: len(incoming)]
    gradients = torch.autograd.grad(outputs, differentiated, incoming, allow_unused=backend in BASELINES)
    return tuple(x for x in gradients if x is not None)


def bound(op: str, backend: str, arguments: dict[str, Any]) -> Call:
    """Returns a call of the implementation `backend` with these arguments, which returns a tuple of tensors."""
    if backend in BASELINES:
        if op not in BASELINES[backend]:
            raise ValueError(f"the baseline {backend!r} has no {op}")
        return functools.partial(BASELINES[backend][op], **arguments)
    public = functools.partial(getattr(gla, op), **arguments, backend=backend)

    def tensors() -> tuple[Tensor, ...]:
        results = public()
        return tuple(x for x in (results if isinstance(results, tuple) else (results,)) if x is not None)

    return tensors


def _time(case: Case, device: torch.device, budget: float) -> measure.Timing:
    if case.direction.startswith("first_"):
        return measure.Timing(first_call(case.workload, case.backend, device)[case.direction], 1)
    plain = "forward+backward" if "backward" in case.direction else "forward"
    sets = measure.rotations(floor_bytes(case.workload.op, case.workload.sizes), device)
    calls = [make_call(case.workload, case.backend, plain, device, seed) for seed in range(sets)]
    if case.direction.endswith("_graph"):
        return measure.time_graph(calls, device, budget)
    return (measure.time_host if case.direction == "host" else measure.time_calls)(calls, device, budget)


def leaves(arguments: dict[str, Any]) -> list[Tensor]:
    """Returns the floating-point tensors among the arguments, in order."""
    return [x for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point()]
