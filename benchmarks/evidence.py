"""Makes the files of benchmarks/results by measurements on this device.

    python3 benchmarks/evidence.py run --cache FOLDER --prepare 16    compiles the kernels of a run in 16 processes
    python3 benchmarks/evidence.py run --cache FOLDER [--parts op,models] [--calls "softmax|per head"]
    python3 benchmarks/evidence.py selection [--passes 3]
    python3 benchmarks/evidence.py selection --share 0/8    one of 8 processes that fill Triton's cache beforehand
    python3 benchmarks/evidence.py selection --picks FILE   after a change of constants: new picks for a file's times

A run measures these parts in this order, each into results/<device>/<part>.jsonl (the schema is in record.py):

    op               the ops at the sizes of models beside FLA and PyTorch: op_calls.py
    mamba2_scan      Mamba-2's scan and step beside mamba_ssm: mamba_scan.py
    models           training and decoding with whole models: models.py
    precision        errors beside FLA and mamba_ssm: precision.py
    model_calls      the calls of published models beside FLA and mamba_ssm: model_calls.py
    delta_models     training with whole models that have a delta rule: models.py
    odd_shapes, giants, batch_invariant    shapes that tuning did not use: shapes.py
    serving          the ops of a server beside functions of vLLM, SGLang and FlashInfer: serving.py
    delta_peers      `chunk_delta` beside FLA, attention-gym, cuDNN, FlashInfer and FlashQLA: delta_peers.py

The README is made of the first five; README_PARTS names them, and `--parts readme` measures them.
A second run resumes an earlier one with the same commit and versions. `gla conformance NAME --report` writes the
reports of the conformance kit; readme_tables.py makes pages and pictures from all these files.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import delta_peers
import lists
import mamba_scan
import model_calls
import models
import op_calls
import precision
import record
import selection
import serving
import shapes
import torch

from gla_core.bench import measure

README_PARTS = ("op", "mamba2_scan", "models", "precision", "model_calls")
PARTS = (*README_PARTS, "delta_models", *shapes.PARTS, "serving", "delta_peers")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and prints the results."""
    options = _parser().parse_args(arguments)
    options.run(options)


def run_parts(options: argparse.Namespace) -> None:
    """Measures the parts that are asked for, or compiles their kernels."""
    device, say = torch.device(options.device), functools.partial(print, flush=True)
    start = time.monotonic()
    record.use_cache(options.cache)
    if options.prepare is not None:
        share = functools.partial(compile_share, options.parts, device, options.calls)
        record.prepare(share, options.prepare, say, 60 * options.minutes)
        return
    apart = record.Apart()
    try:
        about = record.conditions(device, options.commit)
        bandwidth = apart(measure.copy_bandwidth, device)
        say(f"{about['device']}: copies at {bandwidth / 1e12:.3f} TB/s")
        for part in options.parts:
            rows = record.Record(record.path_of(options.out, about["device"], part), about)
            jobs = jobs_of(part, device, bandwidth, options.seconds)
            jobs = [job for job in jobs if any(re.search(options.calls, call) for call, _, _ in job.rows)]
            record.measure(rows, jobs, start + 60 * options.minutes, say, apart)
            say(f"{part}: {len(rows.rows)} rows, {time.monotonic() - start:.0f} s since the start")
    finally:
        apart.end()


def jobs_of(part: str, device: torch.device, bandwidth: float, seconds: float) -> Sequence[record.Job]:
    """Returns the jobs of a part.

    Args:
        bandwidth: bytes per second of a copy on the device.
        seconds: of timed calls for each row.
    """
    made: dict[str, Callable[[], Sequence[record.Job]]] = {
        "op": lambda: op_calls.jobs(device, bandwidth, seconds),
        "mamba2_scan": lambda: mamba_scan.jobs(device, seconds),
        "models": lambda: models.jobs(device),
        "delta_models": lambda: models.jobs(device, delta=True),
        "precision": lambda: precision.jobs(device),
        "model_calls": lambda: model_calls.jobs(device, bandwidth, seconds),
        "serving": lambda: serving.jobs(device, bandwidth),
        "delta_peers": lambda: delta_peers.jobs(device, bandwidth, seconds),
    }
    return made[part]() if part in made else shapes.jobs(part, device, bandwidth, seconds)


def compile_share(parts: Sequence[str], device: torch.device, pattern: str, share: int, shares: int) -> str:
    """Compiles a share of the kernels of parts, and returns the name of the share.

    Args:
        pattern: a regular expression; of `model_calls` only calls that match it are compiled.
    """
    if "models" in parts:
        models.compile_share(share, shares, device)
    if "delta_models" in parts:
        models.compile_share(share, shares, device, delta=True)
    if "op" in parts:
        op_calls.compile_share(share, shares, device)
    if "mamba2_scan" in parts:
        mamba_scan.compile_share(share, shares, device)
    if "model_calls" in parts:
        model_calls.compile_share(share, shares, device, pattern)
    if "odd_shapes" in parts:
        shapes.compile_share(share, shares, device)
    if "serving" in parts:
        serving.compile_share(share, shares, device)
    if "delta_peers" in parts:
        delta_peers.compile_share(share, shares, device)
    return f"share {share} of {shares}"


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
            options.out, device, options.seconds, options.minutes, options.commit, say, options.passes, options.again
        )
    for part, summed in json.loads(path.read_text())["summary"].items():
        say(selection.in_words(part, summed))


def parts_of(text: str) -> tuple[str, ...]:
    """Returns the parts that a command line names; "readme" stands for those of the README."""
    return README_PARTS if text == "readme" else tuple(lists.names(text, known=PARTS))


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    shared.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    shared.add_argument("--minutes", type=float, default=9.0, help="begin no measurement after this long")
    shared.add_argument("--commit", help="of the source, where it cannot be asked of git")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", parents=[shared])
    run.set_defaults(run=run_parts)
    run.add_argument(
        "--parts", type=parts_of, default=README_PARTS, help="separated by commas; by default the README's"
    )
    run.add_argument("--calls", default="", metavar="PATTERN", help="a regular expression; only calls that match it")
    run.add_argument("--seconds", type=float, default=0.5, help="of timed calls for each row")
    run.add_argument("--cache", type=Path, required=True, help="folder of compiled kernels, to share between runs")
    run.add_argument("--prepare", type=int, metavar="N", help="compile in N processes, and measure nothing")

    select = commands.add_parser("selection", parents=[shared])
    select.set_defaults(run=measure_selection)
    select.add_argument("--seconds", type=float, default=0.05, help="of timed calls for each backend and call")
    select.add_argument("--passes", type=int, default=1, help="over all calls; the quickest time counts")
    select.add_argument("--again", type=int, default=0, help="passes after these, over the picks that were slow")
    select.add_argument("--picks", type=Path, help="a file: what `auto` would pick now of its times; no device")
    select.add_argument("--share", help="i/n: run the i-th of n shares of the calls once, and measure nothing")
    return parser


if __name__ == "__main__":
    main()
