"""The command `gla bench`: choose cases, measure them under a progress bar, print tables and who was refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from gla_core.bench import measure, plots, results, suite
from gla_core.bench.baselines import BASELINES
from gla_core.bench.suite import DIRECTIONS, TIMED, Case, Row
from gla_core.dispatch.errors import UnknownOpError, nearest
from gla_core.dispatch.request import check
from gla_core.files import check_writable
from gla_core.ops import PUBLIC_OPS
from gla_core.terminal import print_table
from gla_core.workloads import named as workloads
from gla_core.workloads.named import TAGS, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for.

    Attributes:
        backends: requests; every backend that implements the op if empty.
        tags: a workload must have all of them. names: of workloads, alone or as op/name. Both empty: small ones on a
            CPU, those of models on a CUDA device.
        seconds: of timed calls per case; by default 0.1 on a CPU and 0.5 on a CUDA device.
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
    """Measure, print tables, and write the files that were asked for; whether any backend could be timed.

    Raises:
        ValueError, LookupError: an op, tag, workload, direction or backend that does not exist; nothing to measure;
            a file that cannot be written; plots without matplotlib. Raised before anything is measured.
    """
    chosen = choose(options)
    if options.json is not None:
        check_writable("--json", options.json)
    if options.plot is not None:
        check_writable("--plot", options.plot, folder=True)
        plots.pyplot()
    bandwidth = measure.copy_bandwidth(options.device)
    found = results.describe_run(options.device, bandwidth)
    console.print(f"{found.device}: copies at {bandwidth / 1e9:.0f} GB/s; {len(chosen)} measurements", soft_wrap=True)
    budget = options.seconds or (0.5 if options.device.type == "cuda" else 0.1)
    rows: list[Row] = []
    for case in track(chosen, "measuring", console=console, transient=True):
        rows.append(suite.measure_case(case, options.device, bandwidth, budget))
        found = found.with_rows(rows)
        if options.json is not None:
            results.write(options.json, found)
    print_rows(found.rows, console)
    if options.plot is not None:
        for path in plots.plot(found, options.plot):
            console.print(f"wrote {path}", soft_wrap=True)
    return any(row.seconds is not None and row.backend not in BASELINES for row in rows)


def choose(options: Options) -> list[Case]:
    """The cases that the options ask for. Raises as `run_bench` does."""
    _known("tag", options.tags, TAGS)
    _known("direction", options.directions, DIRECTIONS)
    if options.op is not None and options.op not in PUBLIC_OPS:
        raise UnknownOpError(
            f"unknown op {options.op!r}{nearest(options.op, PUBLIC_OPS)} (there are {', '.join(PUBLIC_OPS)})"
        )
    for request in options.backends:
        check(request, "--backend")
    chosen = _workloads(options)
    found = suite.cases(
        chosen, options.device, options.backends or None, options.directions or TIMED, options.baselines
    )
    if not found:
        raise ValueError("there is nothing to measure: no workload of this op has these tags and directions")
    return found


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


def by_op(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Ops in the order of `PUBLIC_OPS`, each with its rows."""
    for op in PUBLIC_OPS:
        found = [row for row in rows if row.op == op]
        if found:
            yield op, found


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each op and direction, and below them, once each, what could not be measured and why."""
    timed = [row for row in rows if row.error is None]
    for op, of_op in by_op(timed):
        for direction in dict.fromkeys(row.direction for row in of_op):
            header, body = results.table([row for row in of_op if row.direction == direction])
            lines = [dict(zip(header, line, strict=True)) for line in body]
            for line in lines:
                del line["direction"]
            print_table(console, lines, f"{op}, {direction}", spare=header[4:], numbers=header[3:])
    for line in results.failures(rows):
        console.print(line, soft_wrap=True)
