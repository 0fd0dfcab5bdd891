"""The command `gla bench`: chooses cases, measures them under a progress bar, and prints tables and failures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from gla_core.bench import measure, plots, results, suite
from gla_core.bench.baselines import BASELINES
from gla_core.bench.suite import DIRECTIONS, TIMED, Case, Row
from gla_core.dispatch.errors import UnknownOpError, check_known, nearest
from gla_core.dispatch.request import check
from gla_core.files import check_writable
from gla_core.ops import PUBLIC_OPS
from gla_core.terminal import DOUBTFUL, GOOD, print_table, print_text, progress
from gla_core.workloads import named as workloads
from gla_core.workloads.named import TAGS, Workload

UNSTEADY = 0.25
"""The spread above which a time counts as unsteady."""
COLUMNS = {
    "time": "the median of the timed calls",
    "spread": "the distance between their quartiles, as a share of the median",
    "GB/s": "the least number of bytes that the op can move, divided by the time",
    "of floor": "GB/s as a share of a copy's on this device",
    "× loop": "how many times as fast as the recurrence in PyTorch, one token at a time",
    "× torch": "how many times as fast as PyTorch's own function",
    "× fla": "how many times as fast as flash-linear-attention's own function",
}
"""The meaning of each column of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line.

    Attributes:
        backends: requests; if empty, every backend that implements the op.
        tags: tags that a workload must have. names: names of workloads, alone or as op/name. If both are empty, a CPU
            runs small workloads and a CUDA device the workloads of models.
        seconds: seconds of timed calls per case; by default 0.1 on a CPU and 0.5 on a CUDA device.
    """

    device: torch.device
    op: str | None = None
    backends: Sequence[str] = ()
    tags: Sequence[str] = ()
    names: Sequence[str] = ()
    directions: Sequence[str] = ()
    baselines: bool = True
    seconds: float | None = None
    json: Path | None = None
    plot: Path | None = None


def run_bench(options: Options, console: Console) -> bool:
    """Measures, prints tables and writes the files that were asked for; returns whether any backend could be timed.

    Raises:
        ValueError, LookupError: an op, tag, workload, direction or backend does not exist; there is nothing to measure;
            a file cannot be written; plots need matplotlib. Raised before anything is measured.
    """
    chosen = choose(options)
    if options.json is not None:
        check_writable("--json", options.json)
    if options.plot is not None:
        check_writable("--plot", options.plot, folder=True)
        plots.pyplot()
    bandwidth = measure.copy_bandwidth(options.device)
    report = results.describe_run(options.device, bandwidth)
    print_text(console, f"{report.device}: copies at {bandwidth / 1e9:.0f} GB/s; {len(chosen)} measurements")
    busy = measure.how_busy()
    if busy is not None:
        print_text(console, busy, DOUBTFUL)
    budget = options.seconds or (0.5 if options.device.type == "cuda" else 0.1)
    rows: list[Row] = []
    for case in progress(console, chosen, lambda case: f"{case.workload.op} {case}"):
        rows.append(suite.measure_case(case, options.device, bandwidth, budget))
        report = report.with_rows(rows)
        if options.json is not None:
            results.write(options.json, report)
    print_rows(report.rows, console, options.device)
    if options.plot is not None:
        for path in plots.plot(report, options.plot):
            print_text(console, f"wrote {path}")
    return any(row.seconds is not None and row.backend not in BASELINES for row in rows)


def choose(options: Options) -> list[Case]:
    """Returns the cases that the options ask for. Raises the same errors as `run_bench`."""
    _known("tag", options.tags, TAGS)
    _known("direction", options.directions, DIRECTIONS)
    if options.op is not None:
        check_known("op", options.op, PUBLIC_OPS, UnknownOpError)
    for request in options.backends:
        check(request, "--backend")
    wanted = (options.backends or None, options.directions or TIMED, options.baselines)
    cases = suite.cases(_workloads(options), options.device, *wanted)
    if not cases:
        raise ValueError("there is nothing to measure: no workload of this op has these tags and directions")
    return cases


def _workloads(options: Options) -> list[Workload]:
    if not options.names:
        if not options.tags:
            return suite.default_workloads(options.op, options.device)
        return [w for w in workloads.select(options.op, options.tags) if not suite.is_empty(w)]
    known = {name: [w] for w in workloads.WORKLOADS for name in (f"{w.op}/{w.name}",)}
    for w in workloads.WORKLOADS:
        known.setdefault(w.name, []).append(w)
    _known("workload", options.names, known)
    named = dict.fromkeys(w.name + w.op for name in options.names for w in known[name])
    return [w for w in workloads.select(options.op, options.tags) if w.name + w.op in named and not suite.is_empty(w)]


def _known(what: str, wanted: Sequence[str], known: Sequence[str] | dict) -> None:
    for name in wanted:
        if name not in known:
            few = f" (there are {', '.join(known)})" if len(known) < 12 else ""
            raise ValueError(f"unknown {what} {name!r}{nearest(name, known)}{few}")


def print_rows(rows: Sequence[Row], console: Console, device: torch.device) -> None:
    """Prints a table for each op and direction, then the meaning of the columns, and what could not be measured."""
    timed = [row for row in rows if row.error is None]
    shown: dict[str, None] = {}
    tables = sorted(dict.fromkeys((row.op, row.direction) for row in timed), key=lambda x: list(PUBLIC_OPS).index(x[0]))
    for op, direction in tables:
        table = [row for row in timed if (row.op, row.direction) == (op, direction)]
        lines = _lines(table, device, repeat=not console.is_terminal)
        numbers = list(lines[0])[2:]
        styles = [GOOD if row in _fastest(table) else "" for row in table]
        spare = [name for name in numbers if name != "time"]
        print_table(console, lines, f"{op}, {direction}", spare=spare, numbers=numbers, styles=styles)
        shown |= dict.fromkeys(name for name in numbers if any(line[name] for line in lines))
    for name in filter(COLUMNS.__contains__, shown):
        print_text(console, f"{name}: {COLUMNS[name]}")
    unsteady = sum(row.spread is not None and row.spread > UNSTEADY for row in timed)
    if unsteady:
        why = "other programs kept this machine busy, or --seconds is too short"
        print_text(console, f"{unsteady} of {len(timed)} times have a spread above {UNSTEADY:.0%}: {why}", DOUBTFUL)
    for line in results.failures(rows):
        print_text(console, line)


def _lines(rows: Sequence[Row], device: torch.device, repeat: bool) -> list[dict[str, str]]:
    """Returns each row of one table as cells by column. On a CPU, caches make GB/s and the floor meaningless.

    Args:
        repeat: whether every row names its workload; otherwise only the first row of a workload does.
    """
    header, body = results.table(rows)
    left_out = {"direction"} | ({"GB/s", "of floor"} if device.type == "cpu" else set())
    lines = [{name: cell for name, cell in zip(header, cells, strict=True) if name not in left_out} for cells in body]
    for line, (before, row) in zip(lines[1:], itertools.pairwise(rows), strict=True):
        if not repeat and before.workload == row.workload:
            line["workload"] = ""
    return lines


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """Returns the fastest row of each workload that has several."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    return [min(group, key=lambda row: row.seconds or 0.0) for group in groups.values() if len(group) > 1]
