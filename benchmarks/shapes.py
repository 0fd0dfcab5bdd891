"""Measures shapes that tuning did not use: odd widths, a giant among packed sequences, the cost of `batch_invariant`.

`evidence.py shapes` runs it, on a GPU. Forward calls are those of chunk_gla_fwd by the backend that `auto` picks:

    odd widths    40 dense forward calls, drawn at random once. Keys are 40 to 120 wide and values 80 to 200, no powers
                  of two; three in four widths are multiples of 8. Heads times batch is a third of the multiprocessors,
                  or just above their number. Each call moves 100 MB or more. The time is divided by the floor's.
    odd pairs     the same sizes, forward and backward, in CUDA graphs
    one giant     the packed forward calls of selection.py with one giant. The time is divided by the time of the giant
                  alone plus the time of the other sequences.
    invariant     the workloads of models, forward and with the backward, under `batch_invariant` with segments of 4096
                  and of 512 tokens, in CUDA graphs. The time is divided by the time of the fastest backend without it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import selection
import torch

import gla_core as gla
from gla_core.bench import measure, results
from gla_core.bench.floor import floor_seconds
from gla_core.bench.suite import Case, implementing, measure_case
from gla_core.dispatch.backend import OpCall
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.named import Workload, select

ODD = 40
BYTES = (100e6, 1e9)
MULTIPROCESSORS = 132
"""The number of multiprocessors of an H200 or H100; the shapes are the same on every GPU."""
SEGMENTS = (4096, 512)
"""The tokens of a segment under `batch_invariant`: the default, and a number that costs less for few sequences."""

Row = dict[str, Any]


def odd_calls(device: torch.device) -> Iterator[OpCall]:
    """Yields the calls of odd widths."""
    random = Random(8)
    for i in range(ODD):
        K, V = _width(random, 40, 120, i), _width(random, 80, 200, i)
        H = random.choice((1, 2, 3, 5, 7, 8, 11))
        blocks = MULTIPROCESSORS * (random.uniform(0.3, 0.37) if i % 2 else random.uniform(1.01, 1.15))
        B = max(1, round(blocks / H))
        one = floor_bytes(selection.chunk_call(device, B, H, 1, K, V))
        size = BYTES[0] * (BYTES[1] / BYTES[0]) ** random.random()
        yield selection.chunk_call(device, B, H, math.ceil(size / one), K, V)


def _width(random: Random, low: int, high: int, i: int) -> int:
    """Returns a width that is no power of two; three in four are multiples of 8."""
    step = 1 if i % 4 == 3 else 8
    return random.choice([width for width in range(low, high + 1, step) if width & (width - 1)])


def floor_bytes(call: OpCall) -> int:
    """Returns the number of bytes of a call's inputs and outputs."""
    return sum(ABSTRACT_OPS[call.op].floor_bytes(call))


def giant_calls(device: torch.device) -> Iterator[tuple[OpCall, list[int]]]:
    """Yields the packed forward calls with a giant, and the lengths of their sequences."""
    for part, call in selection.packed_calls(device):
        if part == "packed, one giant" and call.op == "chunk_gla_fwd":
            yield call, selection.lengths("one giant", call.dims["T"], call.dims["N"])


def workloads() -> Iterator[tuple[Workload, str]]:
    """Yields the workloads of models, in both directions, in CUDA graphs, so that only the device's time counts."""
    for workload in select("chunk_gla"):
        if workload.tags & {"train", "prefill"}:
            yield workload, "forward_graph"
            yield workload, "forward+backward_graph"


def odd_pair(call: OpCall) -> Case:
    """Returns the forward and backward of a call of odd widths, as a case."""
    sizes: dict[str, Any] = {name: call.dims[name] for name in ("B", "T", "H", "K", "V")}
    name = "odd_" + "_".join(f"{dim.lower()}{size}" for dim, size in sizes.items())
    direction = "forward+backward" + ("_graph" if call.device.type == "cuda" else "")
    return Case(
        Workload(name, "chunk_gla", frozenset(), {**sizes, "dtype": call.dtype, "gate_dtype": call.gate_dtype}),
        "auto",
        direction,
    )


def compile_share(device: torch.device, share: tuple[int, int]) -> None:
    """Runs a share of the odd pairs once, to compile their kernels."""
    first, step = share
    for call in itertools.islice(odd_calls(device), first, None, step):
        measure_case(odd_pair(call), device, math.inf, budget=1e-3)


PARTS = ("odd widths", "odd pairs", "one giant", "invariant")


def run(
    out: Path,
    device: torch.device,
    seconds: float,
    minutes: float,
    commit: str | None,
    say: Callable,
    parts: Sequence[str] = PARTS,
) -> Path:
    """Measures parts and writes shapes-<device>.json; begins no measurement after `minutes`."""
    end = time.monotonic() + 60 * minutes
    bandwidth = measure.copy_bandwidth(device)
    head = {**results.conditions(device, commit), "copy_bandwidth": bandwidth}
    path, rows = out / results.file_name("shapes", device), []
    odd, invariant = list(odd_calls(device)), itertools.product(SEGMENTS, workloads())
    of_parts = {
        "odd widths": [functools.partial(_odd_row, call, bandwidth, seconds) for call in odd],
        "odd pairs": [functools.partial(_odd_pair_row, call, device, bandwidth, seconds) for call in odd],
        "one giant": [functools.partial(_giant_row, *each, seconds) for each in giant_calls(device)],
        "invariant": [functools.partial(_invariant_row, tokens, *each, device, seconds) for tokens, each in invariant],
    }
    for measurement in itertools.chain.from_iterable(of_parts[part] for part in parts):
        if time.monotonic() > end:
            say("out of time")
            break
        rows.append(measurement())
        say(json.dumps(rows[-1]))
        selection.write(path, head, rows, summary(rows))
    return path


def _odd_row(call: OpCall, bandwidth: float, seconds: float) -> Row:
    row = selection.measure_row("odd widths", call, seconds)
    floor = floor_bytes(call) / bandwidth
    return {**row, "floor": selection.rounded(floor), "over": selection.rounded(row["measured"][row["pick"]] / floor)}


def _odd_pair_row(call: OpCall, device: torch.device, bandwidth: float, seconds: float) -> Row:
    case = odd_pair(call)
    row = measure_case(case, device, bandwidth, budget=seconds)
    if row.seconds is None:
        raise RuntimeError(f"{case} was not measured: {row.error}")
    floor = floor_seconds("chunk_gla", case.workload.sizes, bandwidth, backward=True)
    about = {"part": "odd pairs", "dims": dict(call.dims), "backend": row.backend, "seconds": row.seconds}
    return {**about, "floor": selection.rounded(floor), "over": selection.rounded(row.seconds / floor)}


def _giant_row(call: OpCall, lengths: Sequence[int], seconds: float) -> Row:
    giant = max(lengths)
    others = [tokens for i, tokens in enumerate(lengths) if i != lengths.index(giant)]
    alone = dataclasses.replace(call, dims={**call.dims, "T": giant, "N": 1}, variable_length=False, longest=None)
    rest = dataclasses.replace(call, dims={**call.dims, "T": sum(others), "N": len(others)})
    both = ((call, lengths), (alone, None), (rest, others))
    together, first, then = (_seconds_of_pick(*each, seconds) for each in both)
    about = {"part": "one giant", **selection.as_json(call), "giant": giant, "seconds": together}
    return {**about, "apart": [first, then], "over": selection.rounded(together / (first + then))}


def _seconds_of_pick(call: OpCall, lengths: Sequence[int] | None, seconds: float) -> float:
    """Returns the seconds of the backend that `auto` picks; `lengths` gives the lengths of packed sequences."""
    pick = selection.explain(call).winner or ""
    times, left_out = selection.time_backends(call, selection.arguments_of(call, lengths), [pick], {}, seconds)
    if left_out:
        raise RuntimeError(f"{pick} did not run {selection.describe(selection.as_json(call))}: {left_out[pick]}")
    return times[pick]


def _invariant_row(tokens: int, workload: Workload, direction: str, device: torch.device, seconds: float) -> Row:
    def time_of(backend: str) -> float:
        row = measure_case(Case(workload, backend, direction), device, budget=seconds)
        if row.seconds is None:
            raise RuntimeError(f"{backend} did not run {workload.name} {direction}: {row.error}")
        return row.seconds

    times = [time_of(backend) for backend in implementing("chunk_gla") if backend not in ("reference", "gla_fla")]
    with gla.batch_invariant(tokens):
        kept = time_of("auto")
    about = {"part": f"invariant, {tokens} tokens", "workload": workload.name, "direction": direction}
    return {**about, "seconds": kept, "without": min(times), "over": selection.rounded(kept / min(times))}


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Returns, for each part, the number of calls, and the median and largest of the ratios `over`."""
    found = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        over = [row["over"] for row in rows if row["part"] == part]
        found[part] = {"calls": len(over), "median": statistics.median(over), "worst": max(over)}
    return found
