"""Shapes that tuning did not use: odd widths, a giant among packed sequences, the cost of `batch_invariant`.

These are parts of `evidence.py run`:

    odd_shapes       40 dense calls, drawn at random once, forward and with the backward, in CUDA graphs. Keys are 40 to
                     120 wide and values 80 to 200, no powers of two; three in four widths are multiples of 8. Heads
                     times batch is a third of the multiprocessors, or just above their number. Each call moves 100 MB
                     or more.
    giants           the packed forward calls of selection.py with one giant. The baseline is the time of the giant
                     alone plus the time of the other sequences.
    batch_invariant  the workloads of models, forward and with the backward, with segments of 4096 and of 512 tokens, in
                     CUDA graphs. The baseline is the fastest backend without `batch_invariant`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import selection
import torch
from record import Job

import gla_core as gla
from gla_core.bench.floor import floor_seconds
from gla_core.bench.suite import Case, Row, implementing, measure_case
from gla_core.dispatch.backend import OpCall
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.gla import FORWARD
from gla_core.workloads.named import Workload, select

ODD = 40
BYTES = (100e6, 1e9)
MULTIPROCESSORS = 132
"""The number of multiprocessors of an H200 or H100; the shapes are the same on every GPU."""
SEGMENTS = (4096, 512)
"""The tokens of a segment under `batch_invariant`: the default, and a number that costs less for few sequences."""

PARTS = ("odd_shapes", "giants", "batch_invariant")
Fields = dict[str, Any]


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
        if part == "packed, one giant" and call.op == FORWARD.name:
            yield call, selection.lengths("one giant", call.dims["T"], call.dims["N"])


def workloads() -> Iterator[tuple[Workload, str]]:
    """Yields the workloads of models, in both directions, in CUDA graphs, so that only the device's time counts."""
    for workload in select("chunk_gla"):
        if workload.tags & {"train", "prefill"}:
            yield workload, "forward_graph"
            yield workload, "forward+backward_graph"


def odd_case(call: OpCall, direction: str) -> Case:
    """Returns a call of odd widths as a case, in a CUDA graph on a GPU."""
    sizes: dict[str, Any] = {name: call.dims[name] for name in ("B", "T", "H", "K", "V")}
    name = "odd_" + "_".join(f"{dim.lower()}{size}" for dim, size in sizes.items())
    workload = Workload(name, "chunk_gla", frozenset(), {**sizes, "dtype": call.dtype, "gate_dtype": call.gate_dtype})
    return Case(workload, "auto", direction + ("_graph" if call.device.type == "cuda" else ""))


def compile_share(share: int, shares: int, device: torch.device) -> None:
    """Runs a share of the odd calls once, to compile their kernels."""
    for call in itertools.islice(odd_calls(device), share, None, shares):
        measure_case(odd_case(call, "forward+backward"), device, math.inf, budget=1e-3)


# ---- jobs


def jobs(part: str, device: torch.device, bandwidth: float, seconds: float) -> list[Job]:
    """Returns the jobs of a part; `seconds` of timed calls for each row."""
    return list(
        {"odd_shapes": _odd, "giants": _giants, "batch_invariant": _invariant}[part](device, bandwidth, seconds)
    )


def _odd(device: torch.device, bandwidth: float, seconds: float) -> Iterator[Job]:
    for call in odd_calls(device):
        for direction in ("forward", "forward+backward"):
            case = odd_case(call, direction)
            words = "B{B} T{T} H{H} K{K} V{V}".format_map(call.dims) + f", {direction}"
            yield Job([(words, "gla-core", None)], functools.partial(_measure_odd, case, device, bandwidth, seconds))


def _giants(device: torch.device, bandwidth: float, seconds: float) -> Iterator[Job]:
    for call, lengths in giant_calls(device):
        words = f"{len(lengths)} sequences, {max(lengths)} of {sum(lengths)} tokens in one, " + "H{H} K{K} V{V}"
        words, apart = words.format_map(call.dims), "the giant and the others apart"
        rows = [(words, apart, None), (words, "gla-core", apart)]
        yield Job(rows, functools.partial(_measure_giant, call, lengths, seconds))


def _invariant(device: torch.device, bandwidth: float, seconds: float) -> Iterator[Job]:
    for tokens, (workload, direction) in itertools.product(SEGMENTS, workloads()):
        words = f"{workload.name}, {direction}, segments of {tokens}"
        rows = [(words, "without", None), (words, "batch_invariant", "without")]
        yield Job(rows, functools.partial(_measure_invariant, tokens, workload, direction, device, seconds))


def _measure_odd(case: Case, device: torch.device, bandwidth: float, seconds: float) -> list[Fields]:
    row = _measured(case, device, seconds)
    floor = floor_seconds("chunk_gla", case.workload.sizes, bandwidth, "backward" in case.direction)
    return [{**_times(row), "facts": {"backend": row.backend, "over the floor": (row.seconds or 0.0) / floor}}]


def _measure_giant(call: OpCall, lengths: Sequence[int], seconds: float) -> list[Fields]:
    giant = max(lengths)
    others = [tokens for i, tokens in enumerate(lengths) if i != lengths.index(giant)]
    alone = dataclasses.replace(call, dims={**call.dims, "T": giant, "N": 1}, variable_length=False, longest=None)
    rest = dataclasses.replace(call, dims={**call.dims, "T": sum(others), "N": len(others)})
    apart = _seconds_of_pick(alone, None, seconds) + _seconds_of_pick(rest, others, seconds)
    return [{"seconds": apart}, {"seconds": _seconds_of_pick(call, lengths, seconds)}]


def _seconds_of_pick(call: OpCall, lengths: Sequence[int] | None, seconds: float) -> float:
    """Returns the seconds of the backend that `auto` picks; `lengths` gives the lengths of packed sequences."""
    pick = selection.explain(call).winner or ""
    times, left_out = selection.time_backends(call, selection.arguments_of(call, lengths), [pick], {}, seconds)
    if left_out:
        raise RuntimeError(f"{pick} did not run {selection.describe(selection.as_json(call))}: {left_out[pick]}")
    return times[pick]


def _measure_invariant(
    tokens: int, workload: Workload, direction: str, device: torch.device, seconds: float
) -> list[Fields]:
    names = [backend for backend in implementing("chunk_gla") if backend not in ("reference", "gla_fla")]
    rows = [_measured(Case(workload, name, direction), device, seconds) for name in names]
    with gla.batch_invariant(tokens):
        invariant = _measured(Case(workload, "auto", direction), device, seconds)
    return [_times(min(rows, key=lambda row: row.seconds or math.inf)), _times(invariant)]


def _measured(case: Case, device: torch.device, seconds: float) -> Row:
    row = measure_case(case, device, budget=seconds)
    if row.seconds is None:
        raise RuntimeError(f"{case.backend} did not run {case}: {row.error}")
    return row


def _times(row: Row) -> Fields:
    return {"seconds": row.seconds, "spread": row.spread}
