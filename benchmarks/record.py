"""The schema of benchmarks/results, and the runs that write it.

A file results/<device>/<part>.jsonl holds a row on each line. Every row says by itself what was measured, by whom, and
where: no file has two commits, two devices or two sets of versions unless its rows say so.

A part is a list of jobs. `measure` runs them one after the other in another process, which is replaced after an error
or a time-out, and writes the file after each job. A second run under the same conditions keeps the steady rows and
measures the others.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gla_core.bench import results
from gla_core.installed import version_of

STEADY = 0.1
"""The spread above which a time is measured again, and is compared with nothing."""
LONGEST = 240.0
"""The longest time in seconds of a job, including tuning."""
REFUSALS = ("ImportError", "ModuleNotFoundError", "NotImplementedError", "ValueError")
"""The beginnings of errors after which a process is whole: what was asked for is not there, or was refused."""
PEERS = {
    "fla": "flash-linear-attention",
    "transformers": "transformers",
    "mamba_ssm": "mamba_ssm",
    "vllm": "vllm",
    "sglang": "sglang",
    "flashinfer": "flashinfer-python",
    "flash_qla": "flash_qla",
    "cudnn frontend": "nvidia-cudnn-frontend",
    "attn_gym": "attn_gym",
}
"""The distributions of peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        call: what was measured, in words. Rows of a file with the same call are comparable.
        who: the implementation, such as a backend or "fla".
        baseline: `who` of the row of the same call with which this row is compared; None for a baseline itself.
        seconds: the median time; None if there is an error, or if the row is about something else than time.
        spread: the distance between the quartiles of the times, divided by the median; None for a single time.
        facts: other numbers by name, such as "GiB" or the error of a gradient.
        error: one line; None if there was no error.
        commit, date: of gla_core's source, and of the run (ISO 8601, UTC).
        device, driver: the name of the device, and the NVIDIA driver's version.
        versions: versions of Python, gla_core, PyTorch, Triton and the peers that are installed.
    """

    call: str
    who: str
    baseline: str | None = None
    seconds: float | None = None
    spread: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    commit: str | None = None
    date: str = ""
    device: str = ""
    driver: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def steady(self) -> bool:
        """Returns whether the row can be compared: it has no error, and its times are close together."""
        return self.error is None and (self.spread or 0.0) <= STEADY


class Job(NamedTuple):
    """Measurements that belong together, such as a call by every implementation.

    Attributes:
        rows: call, `who` and baseline of each row.
        measure: returns for each row its seconds, spread, facts and error, as keyword arguments of `Row`. Another
            process calls it, so it can be pickled.
    """

    rows: Sequence[tuple[str, str, str | None]]
    measure: Callable[[], Sequence[dict[str, Any]]]


# ---- files


def conditions(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Returns the commit, date, device, driver and versions of a run that begins now, as fields of `Row`."""
    about = results.conditions(device, commit)
    versions = {name: about[name] for name in ("python", "gla_core", "torch", "triton")}
    versions |= {name: version_of(distribution) for name, distribution in PEERS.items()}
    return {
        **{name: about[name] for name in ("commit", "date", "device", "driver")},
        "versions": {name: version for name, version in versions.items() if version is not None},
    }


def path_of(folder: Path, device: str, part: str) -> Path:
    """Returns the file of a part that was measured on a device."""
    return folder / results.short_name(device) / f"{part}.jsonl"


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    # the fields that are set
    set_fields = [{name: x for name, x in dataclasses.asdict(row).items() if x not in (None, {}, "")} for row in rows]
    unfinished.write_text("".join(json.dumps(_short(fields)) + "\n" for fields in set_fields))
    unfinished.replace(path)


def _short(value: Any) -> Any:
    """Returns a value with five digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {name: _short(x) for name, x in value.items()} if isinstance(value, dict) else value


def ratio(row: Row, rows: Iterable[Row]) -> float | None:
    """Returns how many times as fast a row is as its baseline; None without a baseline, or if one is not steady."""
    baseline = next((x for x in rows if (x.call, x.who, x.device) == (row.call, row.baseline, row.device)), None)
    if baseline is None or not (row.steady and baseline.steady and row.seconds and baseline.seconds):
        return None
    return baseline.seconds / row.seconds


# ---- runs


class Record:
    """The rows of a part so far; the file is written after each job."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        same = ("commit", "device", "driver", "versions")
        self.rows = [row for row in read(path) if all(getattr(row, name) == about[name] for name in same)]

    def holds(self, job: Job) -> bool:
        """Returns whether the file has a steady row for every row of a job."""
        return {(call, who) for call, who, _ in job.rows} <= {(row.call, row.who) for row in self.rows if row.steady}

    def add(self, job: Job, measured: Sequence[dict[str, Any]]) -> list[Row]:
        """Adds the rows of a job, in place of earlier ones, writes the file, and returns the rows."""
        rows = [
            Row(call=call, who=who, baseline=baseline, **fields, **self.about)
            for (call, who, baseline), fields in zip(job.rows, measured, strict=True)
        ]
        new = {(row.call, row.who) for row in rows}
        self.rows = [row for row in self.rows if (row.call, row.who) not in new] + rows
        write(self.path, self.rows)
        return rows


class Apart:
    """Calls functions in another process, and starts a new process after a call that failed or took too long.

    Peers tune in it at their first call with other widths or dtypes, as they do in a user's process.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the function's result. Raises its exception, and TimeoutError after `LONGEST` seconds."""
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(
                1, tune_quickly if torch.cuda.is_available() else None
            )
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


def measure(record: Record, jobs: Sequence[Job], until: float, say: Callable[[str], None], apart: Apart) -> bool:
    """Measures the jobs that a file lacks; returns whether all were begun.

    Args:
        until: the value of time.monotonic() after which no job begins.
        apart: calls a function in another process.
    """
    todo = [job for job in jobs if not record.holds(job)]
    for i, job in enumerate(todo):
        began = time.monotonic()
        if began > until:
            say(f"out of time: {len(todo) - i} of {len(todo)} jobs left out; run it again to measure them")
            return False
        try:
            measured = apart(job.measure)
        except Exception as error:
            measured = [{"error": reason(error)}] * len(job.rows)
        rows = record.add(job, measured)
        for row in rows:
            say(f"{row.call}, {row.who}: {_told(row)}")
        if any(row.error and not row.error.startswith(REFUSALS) for row in rows):
            apart.end()  # a failed kernel may leave the process broken
        say(f"  {time.monotonic() - began:.1f} s")
    return True


def _told(row: Row) -> str:
    facts = ", ".join(f"{name} {value:.4g}" for name, value in row.facts.items() if isinstance(value, float | int))
    if row.error or row.seconds is None:
        return row.error or facts
    return f"{results.time_text(row.seconds)}, spread {row.spread or 0:.1%}" + (f"; {facts}" if facts else "")


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `measure` returns, or its error as the fields of a row."""
    try:
        return measure()
    except Exception as error:
        return {"error": reason(error)}
    finally:
        free_memory()


def imported(module: str, name: str) -> Any:
    """Returns what a module has under a name. Raises ImportError or AttributeError if there is no such thing."""
    return getattr(importlib.import_module(module), name)


def free_memory() -> None:
    """Returns the memory of tensors that are no longer used to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def counted(number: int, thing: str) -> str:
    """Returns the number of things in words, such as "1 sequence" or "8 sequences"."""
    return f"{number} {thing}" + ("s" if number > 1 else "")


def reason(error: Exception) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


# ---- compiled kernels


def use_cache(cache: Path) -> None:
    """Makes this process and its children keep compiled kernels in a folder, but not FLA's tuning."""
    os.environ["TRITON_CACHE_DIR"] = str(cache.absolute() / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.absolute() / "inductor")
    os.environ["FLA_CACHE_RESULTS"] = "0"


def tune_quickly() -> None:
    """Makes the autotuners of Triton in this process take about 30 ms for each configuration."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    bench = functools.partial(importlib.import_module("triton.testing").do_bench, warmup=5, rep=25)
    autotuner.do_bench = property(lambda _: bench)


def tune_anew() -> None:
    """Makes the autotuners of Triton in this process forget their choices, which do not depend on all sizes."""
    for thing in gc.get_objects() if torch.cuda.is_available() else ():
        if type(thing).__name__.endswith("Autotuner") and isinstance(getattr(thing, "cache", None), dict):
            thing.cache.clear()  # torch.compile's kernels have no such choices


def prepare(
    compile_share: Callable[[int, int], str], processes: int, say: Callable[[str], None], seconds: float
) -> None:
    """Fills the caches of compiled kernels in many processes, for at most `seconds`.

    Args:
        compile_share: compiles the i-th of n shares of the kernels, and returns the name of the share.
    """
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        shares = [pool.apply_async(compile_share, (i, processes)) for i in range(processes)]
        for i, share in enumerate(shares):
            try:
                what = share.get(max(0.0, seconds - (time.monotonic() - start)))
            except Exception as error:
                what = reason(error)
            say(f"{i} of {processes}: {what}, {time.monotonic() - start:.0f} s since the start")
