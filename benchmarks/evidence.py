"""Makes the files of benchmarks/results by measurements on this device.

    python3 benchmarks/evidence.py times [--name baseline] [--backends reference,gla_fla] [--workloads NAME,..] ...
    python3 benchmarks/evidence.py selection [--passes 3]
    python3 benchmarks/evidence.py selection --share 0/8    one of 8 processes that fill Triton's cache beforehand
    python3 benchmarks/evidence.py selection --picks FILE   after a change of constants: new picks for a file's times
    python3 benchmarks/evidence.py shapes [--parts "odd pairs,invariant"]
    python3 benchmarks/evidence.py readme --cache FOLDER --prepare 16    fills the caches of compiled kernels first
    python3 benchmarks/evidence.py readme --cache FOLDER

times       FLA, PyTorch and the backends over the workloads of models: see times.py
selection   whether the backend that `auto` picks is the fastest: see selection.py
shapes      odd widths beside the memory floor, a giant among packed sequences beside the giant alone, and
            `batch_invariant` beside calls without it: see shapes.py
readme      every row of the README's table and of the pictures, including whole models: see readme.py

Each writes its file after every measurement. `times`, `selection` and `readme` resume an earlier run that had
the same conditions. `gla conformance NAME --report` writes the reports of the conformance kit; readme_tables.py makes
pages and pictures from all these files.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import lists
import readme
import selection
import shapes
import times
import torch
from rich.console import Console

import gla_core as gla
from gla_core.bench.run import print_rows
from gla_core.bench.suite import Case


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and prints the results."""
    options = _parser().parse_args(arguments)
    options.run(options)


def measure_times(options: argparse.Namespace) -> None:
    """Measures with times.py, and prints the table."""
    console = Console(markup=False, highlight=False, width=150)
    say = functools.partial(console.print, soft_wrap=True)
    for name in set(options.backends) - {info.name for info in gla.backends() if info.error is None}:
        say(f"there is no backend {name!r} here; it is left out")

    def wanted(case: Case) -> bool:
        named = options.workloads is None or case.workload.name in options.workloads
        return named and (options.directions is None or case.direction in options.directions)

    _, found = times.run(
        options.out,
        options.cache or Path(tempfile.mkdtemp(prefix="triton-")),
        options.minutes,
        options.backends,
        options.commit,
        torch.device(options.device),
        say,
        options.name,
        wanted,
        options.seconds,
    )
    print_rows(found.rows, console, torch.device(options.device))


def measure_selection(options: argparse.Namespace) -> None:
    """Measures with selection.py and prints its summary, or compiles a share of the kernels that it runs."""
    device, say = torch.device(options.device), functools.partial(print, flush=True)
    if options.share is not None:
        first, step = map(int, options.share.split("/"))
        selection.compile_share(device, (first, step), say)
        return
    if options.picks is not None:
        path = selection.pick_again(options.picks)
    else:
        path = selection.run(
            options.out,
            device,
            options.seconds,
            options.minutes,
            options.commit,
            say,
            options.passes,
            options.again,
        )
    for part, found in json.loads(path.read_text())["summary"].items():
        say(selection.in_words(part, found))


def measure_shapes(options: argparse.Namespace) -> None:
    """Measures with shapes.py, and prints its summary."""
    device, say = torch.device(options.device), functools.partial(print, flush=True)
    if options.share is not None:
        first, step = map(int, options.share.split("/"))
        shapes.compile_share(device, (first, step))
        return
    path = shapes.run(options.out, device, options.seconds, options.minutes, options.commit, say, options.parts)
    for part, found in json.loads(path.read_text())["summary"].items():
        say(f"{part}: {found['calls']} calls, {found['median']:.2f} in the median, {found['worst']:.2f} at worst")


def measure_readme(options: argparse.Namespace) -> None:
    """Measures with readme.py, or compiles the kernels that it runs."""
    device, say = torch.device(options.device), functools.partial(print, flush=True)
    cache = options.cache or Path(tempfile.mkdtemp(prefix="kernels-"))
    if options.prepare is not None:
        readme.prepare(options.prepare, cache, device, say, 60 * options.minutes)
        return
    apart = readme.Apart()
    try:
        readme.run(options.out, cache, options.minutes, options.seconds, options.commit, device, say, apart)
    finally:
        apart.end()


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results file")
    shared.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    shared.add_argument("--minutes", type=float, default=9.0, help="begin no measurement after this long")
    shared.add_argument("--commit", help="of the source, where it cannot be asked of git")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    of_times = commands.add_parser("times", parents=[shared])
    of_times.set_defaults(run=measure_times)
    of_times.add_argument("--seconds", type=float, default=1.0, help="of timed calls per row")
    of_times.add_argument("--name", default="baseline", help="first part of the file's name")
    of_times.add_argument(
        "--backends", type=lists.names, default=["reference", "gla_fla"], help="FLA itself comes anyway"
    )
    of_times.add_argument("--workloads", type=lists.names, help="these alone, separated by commas")
    of_times.add_argument("--directions", type=lists.names, help="these alone, such as forward,step_graph")
    of_times.add_argument("--cache", type=Path, help="Triton's cache, to share between runs; a new one by default")

    of_selection = commands.add_parser("selection", parents=[shared])
    of_selection.set_defaults(run=measure_selection)
    of_selection.add_argument("--seconds", type=float, default=0.05, help="of timed calls for each backend and call")
    of_selection.add_argument("--passes", type=int, default=1, help="over all calls; the quickest time counts")
    of_selection.add_argument("--again", type=int, default=0, help="passes after these, over the picks that were slow")
    of_selection.add_argument("--picks", type=Path, help="a file: what `auto` would pick now of its times; no device")
    of_selection.add_argument("--share", help="i/n: run the i-th of n shares of the calls once, and measure nothing")

    of_shapes = commands.add_parser("shapes", parents=[shared])
    of_shapes.set_defaults(run=measure_shapes)
    of_shapes.add_argument("--seconds", type=float, default=0.05, help="of timed calls for each backend and call")
    of_shapes.add_argument("--parts", type=lists.names, default=shapes.PARTS, help="these alone, separated by commas")
    of_shapes.add_argument("--share", help="i/n: run the i-th of n shares of the odd pairs once, and measure nothing")

    of_readme = commands.add_parser("readme", parents=[shared])
    of_readme.set_defaults(run=measure_readme)
    of_readme.add_argument("--seconds", type=float, default=0.5, help="of timed calls for each backend and call")
    of_readme.add_argument("--cache", type=Path, help="folder of compiled kernels, to share between runs")
    of_readme.add_argument("--prepare", type=int, metavar="N", help="compile in N processes, and measure nothing")
    return parser


if __name__ == "__main__":
    main()
