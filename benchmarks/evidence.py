"""The baseline table of one device, as a file: FLA and the backends over the workloads of models.

    python3 benchmarks/evidence.py --out DIR [--minutes 9] [--backends reference,gla_fla] [--commit HASH] [--cache DIR]

writes DIR/baseline-<device>.json after every row, the most important rows first. A second run with the same DIR goes on
where the first one ended: rows without an error are kept if device and versions are the same.

The first measurement is FLA's first call, in an empty Triton cache that the rest of the run then shares: what FLA tuned
there, alone on the device, is what is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

import gla_core as gla
from gla_core.bench import measure, plots, results
from gla_core.bench.baselines import BASELINES, has_fla
from gla_core.bench.first_call import first_call
from gla_core.bench.run import by_op, print_table
from gla_core.bench.suite import Case, Row, implementing, measure_case
from gla_core.conformance.workloads import WORKLOADS, Workload, select

BY_NAME = {(w.op, w.name): w for w in WORKLOADS}
HEADS_16 = ("train_b8_t4096_h16", "prefill_b1_t8192_h16")  # the shapes of DESIGN section 10, by what FLA tunes once for
HEADS_8 = ("long_b1_t65536_h8", "prefill_b2_t2048_h8")
BOTH = ("forward", "forward+backward")
SECONDS = {"reference": 0.2}  # of timed calls; 1 for all others


def plan(backends: list[str], device: torch.device) -> list[Case]:
    """What to measure, the most important first."""
    others = [name for name in backends if name not in BASELINES]
    names = [*(["fla"] if device.type == "cuda" and has_fla() else []), *others]
    found = [
        *_cases("chunk_gla", HEADS_16, names, BOTH),
        *_cases("recurrent_gla_step", _tagged("recurrent_gla_step", "decode"), names, ("step", "step_graph")),
        *_cases("recurrent_gla_step", ["decode_b1"], names, ["host"]),
        *_cases("chunk_gla", HEADS_8, names, BOTH),
        *_cases("chunk_gla", ["prefill_b2_t2048_h8"], names, ["host"]),
        *(
            case
            for op in ("online_softmax", "softmax_attention")
            for case in _cases(op, _tagged(op, "train", "long"), ["torch", *others], BOTH)
        ),
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
    """The rows so far, in the file after each of them."""

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
    """The rows of an earlier run like this one."""
    if not path.exists():
        return ()
    before = results.read(path)
    same = ("device", "driver", "torch", "triton", "fla", "gla_core", "commit")
    return before.rows if all(getattr(before, name) == getattr(run, name) for name in same) else ()


def first_call_rows(
    workload: Workload, backend: str, device: torch.device, cache: Path | None, timeout: float
) -> list[Row]:
    """Both first calls from one process; what it compiled stays in `cache`."""
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
) -> tuple[Path, results.Results]:
    """Measure what fits into `minutes`; no measurement begins after that."""
    end = time.monotonic() + 60 * minutes
    cache.mkdir(parents=True, exist_ok=True)
    fresh = cache if not any(cache.iterdir()) else None
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    bandwidth = measure.copy_bandwidth(device, budget=2.0)
    described = results.describe_run(device, bandwidth, commit)
    path = out / f"baseline-{described.device.lower().removeprefix('nvidia ').replace(' ', '-')}.json"
    record = Record(path, described)
    record.add()
    say(f"{record.run.device}: copies at {bandwidth / 1e12:.3f} TB/s; writing {path}")
    todo = [c for c in plan(backends, device) if not record.holds(c.workload, c.backend, c.direction)]
    first = BY_NAME["chunk_gla", HEADS_16[0]]
    if any(c.backend == "fla" for c in todo) and not record.holds(first, "fla", "first_backward"):
        record.add(*first_call_rows(first, "fla", device, fresh, 0.7 * 60 * minutes))
        told = [row.error or results.time_text(row.seconds) for row in record.rows if row.key[2].startswith("first_")]
        say(f"first call of FLA, then its backward: {', '.join(told)}")
    for i, case in enumerate(todo):
        if time.monotonic() > end:
            say(f"out of time: {len(todo) - i} measurements left out, from {case} on")
            break
        start = time.monotonic()
        record.add(measure_case(case, device, bandwidth, SECONDS.get(case.backend, 1.0)))
        row = record.rows[-1]
        say(f"{case}: {row.error or results.time_text(row.seconds)} ({time.monotonic() - start:.1f} s)")
    return path, record.run


def main() -> None:
    """Read the command line, measure, print the table, and draw where matplotlib is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results file")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no measurement after this long")
    parser.add_argument("--backends", default="reference,gla_fla", help="separated by commas; FLA itself comes anyway")
    parser.add_argument("--commit", help="of the source, where it cannot be asked of git")
    parser.add_argument("--cache", type=Path, help="Triton's cache, to share between runs; a new one by default")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(markup=False, highlight=False, width=150)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    backends = options.backends.split(",")
    for name in set(backends) - {info.name for info in gla.backends() if info.error is None}:
        say(f"there is no backend {name!r} here; it is left out")
    cache = options.cache or Path(tempfile.mkdtemp(prefix="triton-"))
    path, found = run(options.out, cache, options.minutes, backends, options.commit, device, say)
    for op, rows in by_op(found.rows):
        print_table(op, rows, console)
    try:
        plots.plot(found, path.with_suffix(""))
    except ValueError as error:
        say(str(error))


if __name__ == "__main__":
    main()
