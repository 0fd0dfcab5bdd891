"""The command `gla calibrate`: measures the times that cost models predict, and fits their constants to these times.

From a script: `plan` returns the measurements to make, `measure_task` makes one of them, `fit_samples` fits the
constants of each op, and `gla_core.dispatch.calibration.store` or `write_constants` keeps them.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gla_core.bench.calls import time_call
from gla_core.bench.fit import error, fit
from gla_core.bench.measure import how_busy
from gla_core.dispatch import calibration, registry
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Constants, CostModel, OpCall
from gla_core.dispatch.errors import UnknownOpError, attempt, check_known
from gla_core.files import check_writable, write_json
from gla_core.terminal import DOUBTFUL, print_table, print_text, progress
from gla_core.workloads.calibration import shapes

_MOST_BUDGETS = 10  # largest predicted time of a call that is measured, in budgets
_PASSES = 2  # number of passes over all tasks, far apart in time


Timed = tuple[tuple[Backend, OpCall], float]
"""A call with its backend, and the measured seconds."""


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement to make: a call by a backend."""

    backend: str
    call: OpCall


@dataclass(frozen=True, slots=True)
class Sample:
    """A task with its median seconds, or the error that kept it from being measured."""

    backend: str
    call: OpCall
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """The constants fitted to the samples of one op of a backend.

    Attributes:
        samples: number of samples.
        median, worst: the median and the largest factor between predicted and measured times; a factor is at least 1.
        before: the median factor with the constants from which the fit began.
        worst_call: the call with the worst factor.
    """

    backend: str
    op: str
    constants: dict[str, float]
    samples: int
    before: float
    median: float
    worst: float
    worst_call: OpCall


def plan(device: torch.device, backends: Sequence[str] = (), ops: Sequence[str] = ()) -> list[Task]:
    """Returns the measurements to make: the calibration shapes of each op, by each backend with a cost model.

    Args:
        backends, ops: names of backends and ops; all by default.

    Raises:
        UnknownBackendError, UnknownOpError: a name does not exist. ValueError: a backend has no `CostModel`.
    """
    for op in ops:
        check_known("op", op, OP_PARAMETERS, UnknownOpError)
    for name in backends:
        if not isinstance(registry.get(name).cost, CostModel):
            raise ValueError(f"backend {name!r} has no cost model whose constants could be measured")
    chosen = [registry.get(name) for name in dict.fromkeys(backends)] or registry.installed().values()
    return [
        Task(backend.name, call)
        for op in OP_PARAMETERS
        if not ops or op in ops
        for call in shapes(op, device)
        for backend in chosen
        if isinstance(backend.cost, CostModel) and calibration.start_constants(backend, op, device)
        if backend.refusal(call) is None
    ]


def measure_task(task: Task, budget: float = 0.1) -> Sample:
    """Measures one call. If it fails, or would take too long, the sample holds the error.

    Args:
        budget: seconds of timed calls, without compilation.
    """
    longest = _MOST_BUDGETS * budget
    if (_predicted_by_start(task) or 0.0) > longest:
        return Sample(task.backend, task.call, error=f"predicted to take over {longest:.2g} s a call")
    timing, problem = attempt(time_call, task.backend, task.call, budget)
    if timing is not None:
        return Sample(task.backend, task.call, timing.seconds)
    first_line = str(problem).strip().split("\n")[0]  # out of memory, or a kernel that cannot be built
    failed = Sample(task.backend, task.call, error=f"{type(problem).__name__}: {first_line[:300]}")
    del problem
    gc.collect()  # frees tensors that the error still held
    return failed


def quickest(samples: Sequence[Sample]) -> Sample:
    """Returns the fastest of several samples of one task: other work on a machine makes times longer, never shorter."""
    return min(samples, key=lambda sample: math.inf if sample.seconds is None else sample.seconds)


def _predicted_by_start(task: Task) -> float | None:
    backend, call = registry.get(task.backend), task.call
    if not isinstance(backend.cost, CostModel):
        return backend.predicted_seconds(call)
    start = calibration.start_constants(backend, call.op, call.device) or {}
    return backend.predicted_seconds(call, {**start, **calibration.device_facts(call.device)})


def fit_samples(samples: Iterable[Sample], device: torch.device) -> list[Fit]:
    """Fits the constants of every op of every backend to the samples that have a time.

    Backends that run the same kernels (`CostModel.kernels`) are fitted together. An op has no fit if its
    formula predicts a time for none of the samples.
    """
    groups: dict[tuple[str, str], list[Timed]] = {}
    for sample in samples:
        if sample.seconds is not None:
            backend, op = registry.get(sample.backend), sample.call.op
            assert isinstance(backend.cost, CostModel)
            key = (backend.cost.kernels.get(op, backend.name), op)
            groups.setdefault(key, []).append(((backend, sample.call), sample.seconds))
    return [each for group in groups.values() for each in _fits(group, device)]


def _fits(samples: list[Timed], device: torch.device) -> Iterator[Fit]:
    """Yields a fit of one op for each backend that computed it. The backends share one value of each constant."""
    op, facts = samples[0][0][1].op, calibration.device_facts(device)
    backends = {backend.name: backend for (backend, _), _ in samples}.values()
    starts = {backend.name: calibration.start_constants(backend, op, device) or {} for backend in backends}
    start = {name: value for constants in starts.values() for name, value in constants.items()}
    samples = [s for s in samples if math.isfinite(error(_formula, {**start, **facts}, s))]
    if not samples:
        return
    fitted = fit(_formula, start, samples, facts)
    for backend in {backend.name: backend for (backend, _), _ in samples}.values():
        mine = [s for s in samples if s[0][0] is backend]
        constants = {name: fitted[name] for name in starts[backend.name]}
        before, after = (
            [math.exp(abs(error(_formula, {**c, **facts}, s))) for s in mine] for c in (starts[backend.name], constants)
        )
        worst, worst_call = max(zip(after, (call for (_, call), _ in mine), strict=True), key=lambda pair: pair[0])
        medians = statistics.median(before), statistics.median(after)
        yield Fit(backend.name, op, constants, len(mine), *medians, worst, worst_call)


def _formula(work: tuple[Backend, OpCall], constants: Constants) -> float | None:
    backend, call = work
    assert isinstance(backend.cost, CostModel)
    return backend.cost.formula(call, constants)


# ---- files


def write_constants(fits: Sequence[Fit], device: torch.device, target: Path) -> list[Path]:
    """Writes constants in the format in which backends ship them, with the constants of other ops and kinds of device.

    Args:
        target: a file that ends in .json, for the fits of one backend; otherwise a folder, for one file per backend.
    """
    written = []
    for name in dict.fromkeys(each.backend for each in fits):
        cost = registry.get(name).cost
        assert isinstance(cost, CostModel)
        content = {kind: dict(ops) for kind, ops in cost.constants.items()}
        constants_here = content.setdefault(calibration.device_kind(device), {})
        for f in fits:
            if f.backend == name:
                constants_here[f.op] = {constant: float(f"{x:.4g}") for constant, x in f.constants.items()}
        written.append(target if target.suffix == ".json" else target / f"{name}.json")
        write_json(written[-1], content)
    return written


def samples_to_json(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Returns samples as JSON values, from which constants can be fitted elsewhere."""
    return [dataclasses.asdict(s) | {"call": _call_to_json(s.call)} for s in samples]


def samples_from_json(rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """Returns the samples from which `samples_to_json` made these values."""
    return [Sample(**{**row, "call": _call_from_json(row["call"])}) for row in rows]


_DTYPES = ("dtype", "gate_dtype", "state_dtype")


def _call_to_json(call: OpCall) -> dict[str, Any]:
    fields = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    dtypes = {name: fields[name] and str(fields[name]).removeprefix("torch.") for name in _DTYPES}
    passed = sorted(call.given)
    del fields["layouts"]  # empty: calls of calibration are described by their sizes
    return {**fields, **dtypes, "device": str(call.device), "dims": dict(call.dims), "given": passed}


def _call_from_json(fields: dict[str, Any]) -> OpCall:
    dtypes = {name: fields[name] and getattr(torch, fields[name]) for name in _DTYPES}
    passed = frozenset(fields.get("given", ()))
    return OpCall(**{**fields, **dtypes, "device": torch.device(fields["device"]), "given": passed})


# ---- the command


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line: `seconds` is for each measurement, `json` is the target of `write_constants`."""

    device: torch.device
    backends: Sequence[str] = ()
    ops: Sequence[str] = ()
    seconds: float | None = None
    json: Path | None = None
    dry_run: bool = False


def run_calibrate(options: Options, console: Console) -> bool:
    """Measures, fits, prints and stores; returns whether every op that was measured has constants now.

    Raises:
        ValueError, LookupError: a name does not exist, or there is nothing to measure. Raised before any measurement.
        OSError: a file cannot be written. KeyboardInterrupt: nothing is stored.
    """
    tasks = plan(options.device, options.backends, options.ops)
    if not tasks:
        raise ValueError(f"there is nothing to measure on {options.device}: no backend with a cost model runs there")
    names = dict.fromkeys(task.backend for task in tasks)
    if options.json is not None and options.json.suffix == ".json" and len(names) > 1:
        raise ValueError(f"{options.json} is one file for {', '.join(names)}; name a folder, or one --backend")
    if options.json is not None:
        check_writable("--json", options.json, folder=options.json.suffix != ".json")
    if not options.dry_run:
        check_writable("the cache", calibration.path())
    kind = calibration.device_kind(options.device)
    print_text(console, f"{kind}: {len(tasks)} measurements of {', '.join(names)}")
    busy = how_busy()
    if busy is not None:
        print_text(console, busy, DOUBTFUL)
    passes = []
    for i in range(1, _PASSES + 1):
        bar = progress(console, tasks, functools.partial(_in_progress, i))
        passes.append([measure_task(task, (options.seconds or 0.1) / _PASSES) for task in bar])
    samples = [quickest(times) for times in zip(*passes, strict=True)]
    fits = fit_samples(samples, options.device)
    _print(fits, samples, console)
    if fits and options.json is not None:
        for path in write_constants(fits, options.device, options.json):
            print_text(console, f"wrote {path}")
    if fits and not options.dry_run:
        fitted: dict[str, dict[str, dict[str, float]]] = {}
        for each in fits:
            fitted.setdefault(each.backend, {})[each.op] = each.constants
        print_text(console, f"stored in {calibration.store(fitted, options.device)}")
    wanted = {(task.backend, task.call.op) for task in tasks}
    return wanted == {(each.backend, each.op) for each in fits}


def _print(fits: Sequence[Fit], samples: Sequence[Sample], console: Console) -> None:
    rows = [
        {
            "op": each.op,
            "backend": each.backend,
            "shapes": each.samples,
            "before": f"{each.before:.2f}",
            "median": f"{each.median:.2f}",
            "worst": f"{each.worst:.2f}",
            "worst at": describe(each.worst_call),
            "constants": "\n".join(f"{name} {value:.3g}" for name, value in each.constants.items()),
        }
        for each in fits
    ]
    title = "predicted against measured times, as factors"
    print_table(console, rows, title, spare=("shapes", "before", "worst at"), prose=("worst at",))
    left_out: dict[tuple[str, str, str], list[OpCall]] = {}
    for sample in samples:
        if sample.error is not None:
            left_out.setdefault((sample.call.op, sample.backend, sample.error), []).append(sample.call)
    for (op, backend, why), calls in left_out.items():
        which = "; ".join(describe(call) for call in calls) if len(calls) < 4 else f"{len(calls)} shapes"
        print_text(console, f"left out: {op} by {backend} at {which}: {why}")


def _in_progress(number: int, task: Task) -> str:
    return f"pass {number} of {_PASSES}: {task.call.op} by {task.backend}, {describe(task.call)}"


def describe(call: OpCall) -> str:
    """Returns a short description of a call."""
    dims = " ".join(f"{name}={size}" for name, size in call.dims.items() if name not in ("Hq", "Hv", "P", "N"))
    packed = f" in {call.dims['N']} sequences" if call.variable_length else ""
    return f"{dims}{packed}{' in a graph' if call.capturing else ''}"
