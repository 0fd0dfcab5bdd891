"""Measures times of FLA, PyTorch and the backends over the workloads of models; `evidence.py times` runs it.

Writes <name>-<device>.json after every row, the most important rows first, and those that FLA tunes last. A second run
with the same folder goes on where the first one ended: rows without an error are kept if device and versions are the
same.

The first measurement is FLA's first call, in an empty Triton cache that the rest of the run then shares. FLA's tuning
keys contain neither B nor T, so its choice for one workload would be used for all. Therefore each workload of FLA is
tuned and timed in a process of its own that stores no result (FLA_CACHE_RESULTS=0), alone on the device.
`python -m gla_fla.tune` compiles beforehand, in parallel. This file, run as a program, is such a process. Workloads in
float32 are measured under `torch.set_float32_matmul_precision("high")`, with which FLA computes as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from gla_core.bench import measure, results
from gla_core.bench.baselines import BASELINES, has_fla
from gla_core.bench.first_call import first_call
from gla_core.bench.suite import Case, Row, implementing, measure_case
from gla_core.workloads.named import WORKLOADS, Workload, select

BY_NAME = {(w.op, w.name): w for w in WORKLOADS}
HEADS_16 = ("train_b8_t4096_h16", "prefill_b1_t8192_h16")  # compared most; FLA's tuning keys are the same for both
HEADS_8 = ("long_b1_t65536_h8", "prefill_b2_t2048_h8")
SHORT = (  # calls whose time may depend on the host
    "train_b16_t1024_h8",
    "train_b4_t2048_h16_k64_v64",
    "prefill_b2_t2048_h8",
    "prefill_b1_t8192_h16",
)
FORMS = (  # forms of gates, and dtypes
    "train_b8_t4096_h16_per_head",
    "train_b8_t4096_h16_constant",
    "train_b8_t4096_h16_float16",
    "train_b8_t4096_h16_float32",
    "long_b1_t65536_h8_per_head",
    "packed_64_t65536_h8_per_head",
    "granite_4_small",
)
BOTH = ("forward", "forward+backward")
TUNED = ("fla", "gla_fla")  # autotuned by FLA
SECONDS = {"reference": 0.2}  # seconds of timed calls; other backends take the argument, by default 1


def plan(backends: list[str], device: torch.device) -> list[Case]:
    """Returns the cases to measure, the most important first."""
    others = [name for name in backends if name not in BASELINES]
    names = [*(["fla"] if device.type == "cuda" and has_fla() else []), *others]
    found = [
        *_cases("chunk_gla", HEADS_16, names, BOTH),
        *_cases("recurrent_gla_step", _tagged("recurrent_gla_step", "decode"), names, ("step", "step_graph")),
        *_cases("recurrent_gla_step", ["decode_b1"], names, ["host"]),
        *_cases("chunk_gla", HEADS_8, names, BOTH),
        *_cases("chunk_gla", FORMS, names, BOTH),
        *_cases("chunk_gla", ["prefill_b2_t2048_h8"], names, ["host"]),
        *(
            case
            for op in ("online_softmax", "softmax_attention")
            for case in _cases(op, _tagged(op, "train", "long"), ["torch", *others], BOTH)
        ),
        *_cases("chunk_gla", SHORT, names, ["forward_graph", "forward+backward_graph"]),
        *_cases("online_softmax", ["rows_8192_columns_1024"], ["torch", *others], ["forward_graph"]),
        *_cases("chunk_gla", _tagged("chunk_gla", "train", "prefill", "long"), names, BOTH),
        *_cases("recurrent_gla_step", ["decode_b64"], names, ["first_call"]),
        *_cases("chunk_gla", HEADS_16[:1], others, ("first_call", "first_backward")),
    ]
    return list({(case.workload.op, str(case)): case for case in found}.values())


def _cases(op: str, workloads: Sequence[str], names: Sequence[str], directions: Sequence[str]) -> Iterator[Case]:
    able = {*implementing(op), *(name for name in BASELINES if op in BASELINES[name])}
    for workload in workloads:
        for direction in directions:
            for name in names:
                if name in able:
                    yield Case(BY_NAME[op, workload], name, direction)


def _tagged(op: str, *tags: str) -> list[str]:
    return [w.name for w in select(op) if w.tags.intersection(tags) and "ci" not in w.tags]


class Record:
    """The rows so far; the file is written after each of them."""

    def __init__(self, path: Path, run: results.Results) -> None:
        self.path, self.run = path, run
        self.rows = [row for row in _earlier(path, run) if row.error is None]

    def add(self, *rows: Row) -> None:
        self.rows += rows
        self.run = self.run.with_rows(self.rows)
        results.write(self.path, self.run)

    def holds(self, workload: Workload, backend: str, direction: str) -> bool:
        key = (workload.op, workload.name, direction)
        return any(row.key == key and row.backend == backend for row in self.rows)


def _earlier(path: Path, run: results.Results) -> tuple[Row, ...]:
    """Returns the rows of an earlier run under the same conditions."""
    if not path.exists():
        return ()
    before = results.read(path)
    same = ("device", "driver", "torch", "triton", "fla", "gla_core", "commit")
    return before.rows if all(getattr(before, name) == getattr(run, name) for name in same) else ()


def first_call_rows(
    workload: Workload, backend: str, device: torch.device, cache: Path | None, timeout: float
) -> list[Row]:
    """Returns rows of the first forward and backward, from one process; its compiled kernels stay in `cache`."""
    row = Row(workload=workload.name, op=workload.op, backend=backend, direction="first_call", calls=1)
    try:
        seconds = first_call(workload, backend, device, cache, timeout)
    except Exception as error:
        return [dataclasses.replace(row, calls=0, error=f"{type(error).__name__}: {error}"[:300])]
    return [dataclasses.replace(row, direction=name, seconds=value) for name, value in seconds.items()]


def run(
    out: Path,
    cache: Path,
    minutes: float,
    backends: list[str],
    commit: str | None,
    device: torch.device,
    say: Callable[[str], None],
    name: str = "baseline",
    wanted: Callable[[Case], bool] = lambda case: True,
    seconds: float = 1.0,
) -> tuple[Path, results.Results]:
    """Measures the cases of the plan that are `wanted`; begins no measurement after `minutes`."""
    end = time.monotonic() + 60 * minutes
    cache.mkdir(parents=True, exist_ok=True)
    fresh = cache if not any(cache.iterdir()) else None
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    bandwidth = measure.copy_bandwidth(device, budget=2.0)
    described = results.describe_run(device, bandwidth, commit)
    path = out / f"{name}-{results.short_name(described.device)}.json"
    record = Record(path, described)
    record.add()
    say(f"{record.run.device}: copies at {bandwidth / 1e12:.3f} TB/s; writing {path}")
    planned = filter(wanted, plan(backends, device))
    todo = [c for c in planned if not record.holds(c.workload, c.backend, c.direction)]
    first = BY_NAME["chunk_gla", HEADS_16[0]]
    first_wanted = wanted(Case(first, "fla", "first_call"))
    if first_wanted and any(c.backend == "fla" for c in todo) and not record.holds(first, "fla", "first_backward"):
        record.add(*first_call_rows(first, "fla", device, fresh, 0.7 * 60 * minutes))
        told = [row.error or results.time_text(row.seconds) for row in record.rows if row.key[2].startswith("first_")]
        say(f"first call of FLA, then its backward: {', '.join(told)}")
    groups = sorted(in_processes(todo), key=lambda group: group[0].backend in TUNED)
    for i, group in enumerate(groups):
        if time.monotonic() > end:
            left = sum(map(len, groups[i:]))
            say(f"out of time: {left} measurements left out, from {group[0]} on")
            break
        start = time.monotonic()
        if group[0].backend in TUNED:
            rows = measure_apart(group, bandwidth, seconds)
        else:
            rows = measure_here(group, device, bandwidth, seconds)
        record.add(*rows)
        for row in rows:
            say(f"{row.workload}-{row.backend}-{row.direction}: {row.error or results.time_text(row.seconds)}")
        say(f"  {time.monotonic() - start:.1f} s")
    return path, record.run


def in_processes(todo: Sequence[Case]) -> list[list[Case]]:
    """Returns the cases in order. The cases of a workload that FLA tunes form a group; other cases are alone."""
    groups: dict[object, list[Case]] = {}
    for case in todo:
        apart = case.backend in TUNED and not case.direction.startswith("first_")
        key = (case.workload.op, case.workload.name if apart else str(case))
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def measure_here(cases: Sequence[Case], device: torch.device, bandwidth: float, seconds: float = 1.0) -> list[Row]:
    """Measures cases in this process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return [measure_case(case, device, bandwidth, SECONDS.get(case.backend, seconds)) for case in cases]
    finally:
        torch.set_float32_matmul_precision(before)


def measure_apart(cases: Sequence[Case], bandwidth: float, seconds: float = 1.0, timeout: float = 400.0) -> list[Row]:
    """Measures cases in a process of its own, which tunes FLA for these cases alone."""
    asked = [[case.workload.op, case.workload.name, case.backend, case.direction] for case in cases]
    command = [sys.executable, __file__, json.dumps([bandwidth, seconds, asked])]
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=True)
        return [Row(**fields) for fields in json.loads(done.stdout.strip().splitlines()[-1])]
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        return [Row(workload=name, op=op, backend=by, direction=way, error=reason) for op, name, by, way in asked]


def measure_asked(text: str) -> None:
    """Measures the cases in `text` and prints rows as JSON; `measure_apart` runs it."""
    bandwidth, seconds, asked = json.loads(text)
    found = [Case(BY_NAME[op, name], backend, direction) for op, name, backend, direction in asked]
    rows = measure_here(found, torch.device("cuda" if torch.cuda.is_available() else "cpu"), bandwidth, seconds)
    print(json.dumps([dataclasses.asdict(row) for row in rows]))


if __name__ == "__main__":
    measure_asked(sys.argv[1])
