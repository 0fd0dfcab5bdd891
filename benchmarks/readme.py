"""Measures every row of the README's table and every point of the pictures in one run, for `evidence.py readme`.

Writes readme-<device>.json after every workload and every row of a model, the README's rows first. A second
run with the same folder goes on where the first one ended: steady rows without an error are kept if device, versions
and commit are the same, so that a file never holds rows of two commits.

Another process measures everything, one thing at a time. It is replaced after an error or a time-out. FLA tunes anew
for each workload and for its model: earlier choices are forgotten, and no choice is kept on disk. `prepare` fills the
caches of compiled kernels beforehand, in many processes.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import models
import torch
from models import Task
from times import BOTH, BY_NAME

from gla_core.bench import measure, results
from gla_core.bench.suite import Case, Row, make_call, measure_case, with_ratios
from gla_core.files import write_json

OURS = ("triton_fused", "parallel_scan")
CALLS = (  # op, workloads, directions, baseline
    ("chunk_gla", ("train_b8_t4096_h16", "long_b1_t65536_h8"), BOTH, "fla"),
    ("chunk_gla", ("prefill_b1_t8192_h16", "packed_64_t65536_h8"), BOTH, "fla"),
    ("recurrent_gla_step", ("decode_b64", "decode_b1024"), ("step_graph",), "fla"),
    ("online_softmax", ("rows_8192_columns_50257",), ("forward",), "torch"),
    ("softmax_attention", ("causal_b4_t4096_h16",), ("forward",), "torch"),
)
COLUMNS = ("columns_1024", "columns_4096", "columns_16384", "columns_65536")
MORE_CALLS = (  # only for the pictures
    ("recurrent_gla_step", ("decode_b1", "decode_b8", "decode_b256"), ("step_graph",), "fla"),
    ("online_softmax", (*(f"rows_8192_{columns}" for columns in COLUMNS), "rows_4_columns_16m"), ("forward",), "torch"),
    ("softmax_attention", ("one_query_131072_keys",), ("forward",), "torch"),
)
ON_A_CPU = (
    ("chunk_gla", ("one_chunk",), ("forward",), "loop"),
    ("online_softmax", ("small",), ("forward",), "torch"),
)
STEADY = 0.1
"""The spread above which a call is measured again: the distance between its quartiles, as a share of its median."""
LONGEST = 240.0
"""The longest time in seconds of a workload or a row of a model, including tuning."""
SHORT = 256
"""The number of tokens when FLA's kernels are compiled but not launched. Compiled kernels do not depend on T."""
SAME = ("device", "driver", "torch", "triton", "fla", "transformers", "gla_core", "commit")

Calls = Sequence[tuple[str, Sequence[str], Sequence[str], str]]
Job = list[Case] | Task


def jobs(device: torch.device) -> list[Job]:
    """Returns the measurements to make, the README's rows first: lists of cases of a workload, and rows of models."""
    if device.type == "cpu":
        return [*_workloads(ON_A_CPU, ("reference", "parallel_scan")), *models.tasks(device)]
    return [*_workloads(CALLS, OURS), *models.tasks(device), *_workloads(MORE_CALLS, OURS)]


def _workloads(calls: Calls, ours: Sequence[str]) -> Iterator[list[Case]]:
    for op, workloads, directions, baseline in calls:
        for workload in workloads:
            pairs = itertools.product(directions, (baseline, *ours))
            yield [Case(BY_NAME[op, workload], name, direction) for direction, name in pairs]


# ---- the file


class Record:
    """The rows so far; the file is written after each job.

    Attributes:
        calls: rows of calls, as in `gla_core.bench`.
        of_models: rows of models.py by task.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.calls, self.of_models = read(path) if _is_like(path, about) else ([], [])
        self.calls = [row for row in self.calls if is_steady(row)]
        self.of_models = [row for row in self.of_models if "error" not in row]

    def missing(self, job: Job) -> Job | None:
        """Returns the part of a job that is not in the file yet; None if nothing is missing."""
        if isinstance(job, Task):
            return None if any(_task(row) == job for row in self.of_models) else job
        there = {(row.op, row.workload, row.backend, row.direction) for row in self.calls}
        left = [c for c in job if (c.workload.op, c.workload.name, c.backend, c.direction) not in there]
        return left or None

    def add(self, calls: Sequence[Row] = (), of_models: Sequence[dict[str, Any]] = ()) -> None:
        """Adds rows, and writes the file."""
        self.calls += calls
        self.of_models += of_models
        rows = [{"what": "call", **dataclasses.asdict(row)} for row in with_ratios(self.calls)]
        write_json(self.path, {**self.about, "rows": [*rows, *self.of_models]})


def about_run(device: torch.device, bandwidth: float, commit: str | None) -> dict[str, Any]:
    """Returns the facts about a run that begins now, as the file holds them."""
    found = dataclasses.asdict(results.describe_run(device, bandwidth, commit))
    del found["rows"]
    transformers = importlib.metadata.version("transformers") if importlib.util.find_spec("transformers") else None
    return {**found, "transformers": transformers, "model": models.sizes(device)}


def read(path: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """Returns the rows of calls, and the rows of models, of a file."""
    rows = json.loads(path.read_text())["rows"]
    calls = [{name: value for name, value in row.items() if name != "what"} for row in rows if row["what"] == "call"]
    return [Row(**row) for row in calls], [row for row in rows if row["what"] != "call"]


def is_steady(row: Row) -> bool:
    """Returns whether the times of a call are close enough together to be shown."""
    return row.error is None and (row.spread or 0.0) <= STEADY


def _is_like(path: Path, about: dict[str, Any]) -> bool:
    return path.exists() and all(json.loads(path.read_text()).get(name) == about[name] for name in SAME)


def _task(row: dict[str, Any]) -> Task:
    return Task(row["what"], row["way"], row["size"])


# ---- measuring


class Apart:
    """Calls functions in another process, and starts a new process after a call that failed or took too long."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the function's result. Raises its exception, and TimeoutError after `LONGEST` seconds."""
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(1)
        try:
            return self._pool.apply_async(function, arguments).get(LONGEST)
        except multiprocessing.TimeoutError:
            self.end()
            raise TimeoutError(f"took longer than {LONGEST:.0f} s") from None
        except Exception:
            self.end()
            raise

    def end(self) -> None:
        """Ends the process if there is one."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None


def run(
    out: Path,
    cache: Path,
    minutes: float,
    seconds: float,
    commit: str | None,
    device: torch.device,
    say: Callable[[str], None],
    apart: Apart,
) -> Path:
    """Measures the rows that an earlier run like this one left out; begins no measurement after `minutes`.

    Args:
        out: folder of the file. cache: folder of compiled kernels, as `prepare` left it.
        seconds: seconds of timed calls for each row of a call.
        apart: the process that measures.

    Returns:
        The file.
    """
    start = time.monotonic()
    use_cache(cache)
    bandwidth = apart(measure.copy_bandwidth, device)
    about = about_run(device, bandwidth, commit)
    record = Record(out / results.file_name("readme", device), about)
    record.add()
    say(f"{about['device']}: copies at {bandwidth / 1e12:.3f} TB/s; writing {record.path}")
    todo = [job for job in map(record.missing, jobs(device)) if job is not None]
    for i, job in enumerate(todo):
        began = time.monotonic()
        if began - start > 60 * minutes:
            say(f"out of time: {len(todo) - i} of {len(todo)} left out; run it again to measure them")
            break
        if isinstance(job, Task):
            found = _of_model(job, device, apart)
            record.add(of_models=[found])
            said = [f"{job.what} {job.way} {job.size}: {_told(found)}"]
        else:
            rows = _of_workload(job, device, bandwidth, seconds, apart)
            record.add(calls=rows)
            said = [f"{r.op} {r.workload} {r.direction} {r.backend}: {_told(dataclasses.asdict(r))}" for r in rows]
        for line in said:
            say(line)
        say(f"  {time.monotonic() - began:.1f} s, {time.monotonic() - start:.0f} s since the start")
    return record.path


def use_cache(cache: Path) -> None:
    """Makes this process and its children keep compiled kernels in a folder, but not FLA's tuning."""
    os.environ["TRITON_CACHE_DIR"] = str(cache.absolute() / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.absolute() / "inductor")
    os.environ["FLA_CACHE_RESULTS"] = "0"


def measure_workload(cases: Sequence[Case], device: torch.device, bandwidth: float, seconds: float) -> list[Row]:
    """Measures the cases of a workload one after the other; FLA tunes for this workload."""
    forget_tuning()
    return [measure_case(case, device, bandwidth, seconds) for case in cases]


def measure_model(task: Task, device: torch.device) -> dict[str, Any]:
    """Measures a row of a model. FLA tunes at the first training step, and other rows use the same choices."""
    if task.what == "train" and task.way == "fla":
        forget_tuning()
    return models.measure(task, device)


def forget_tuning() -> None:
    """Makes every autotuner of Triton in this process tune again."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    for thing in gc.get_objects():
        if issubclass(type(thing), autotuner):
            thing.cache.clear()


def _of_workload(
    cases: Sequence[Case], device: torch.device, bandwidth: float, seconds: float, apart: Apart
) -> list[Row]:
    try:
        rows = apart(measure_workload, cases, device, bandwidth, seconds)
        if any(row.error for row in rows):
            apart.end()  # a failed kernel may leave the process broken
        return rows
    except Exception as error:
        reason = _reason(error)
        return [
            Row(workload=c.workload.name, op=c.workload.op, backend=c.backend, direction=c.direction, error=reason)
            for c in cases
        ]


def _of_model(task: Task, device: torch.device, apart: Apart) -> dict[str, Any]:
    try:
        return apart(measure_model, task, device)
    except Exception as error:
        return {**task._asdict(), "error": _reason(error)}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _told(row: dict[str, Any]) -> str:
    if row.get("error"):
        return row["error"]
    device = f", {results.time_text(row['device_seconds'])} on the device" if "device_seconds" in row else ""
    return f"{results.time_text(row['seconds'])}, spread {row.get('spread') or 0:.1%}{device}"


# ---- compilation beforehand


def prepare(processes: int, cache: Path, device: torch.device, say: Callable[[str], None], seconds: float) -> None:
    """Fills the caches of compiled kernels in many processes, for at most `seconds`.

    Raises:
        ValueError: there are fewer processes than compiled models plus one.
    """
    fewest = 1 + sum(task.way == "compiled" for task in models.tasks(device))
    if processes < fewest:
        raise ValueError(f"--prepare is {processes}; expected at least {fewest} processes, one for each compiled model")
    use_cache(cache)
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        shares = [pool.apply_async(compile_share, (i, processes, device)) for i in range(processes)]
        for i, share in enumerate(shares):
            try:
                what = share.get(max(0.0, seconds - (time.monotonic() - start)))
            except Exception as error:
                what = _reason(error)
            say(f"{i} of {processes}: {what}, {time.monotonic() - start:.0f} s since the start")


def compile_share(share: int, shares: int, device: torch.device) -> str:
    """Compiles a share of the kernels and returns its name: a compiled model, or some of our kernels and of FLA's."""
    compiled = [task for task in models.tasks(device) if task.way == "compiled"]
    if share < len(compiled):
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"  # other processes compile at the same time
        models.first_step(compiled[share], device)
        return "{} {} {}".format(*compiled[share])
    share, shares = share - len(compiled), shares - len(compiled)
    cases = [case for job in jobs(device) if isinstance(job, list) for case in job]
    ours = [case for case in cases if case.backend not in ("fla", "torch")]
    failed = sum(not _runs_once(case, device) for case in ours[share::shares])
    importlib.import_module("gla_fla.tune").compile_only(share, shares)
    for case in (case for case in cases if case.backend == "fla"):
        _runs_once(_shortened(case), device)  # without launches, code that reads results may fail
    models.run_fla_once(device)
    return f"share {share} of {shares} of FLA's kernels and ours" + (f", {failed} failed" if failed else "")


def _shortened(case: Case) -> Case:
    sizes = case.workload.sizes
    shorter = {"T": min(SHORT, sizes["T"])} if "T" in sizes else {}
    return dataclasses.replace(case, workload=dataclasses.replace(case.workload, sizes={**sizes, **shorter}))


def _runs_once(case: Case, device: torch.device) -> bool:
    try:
        make_call(case.workload, case.backend, case.direction.removesuffix("_graph"), device)()
    except Exception:
        return False
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return True
