"""The ops at the sizes of models beside flash-linear-attention (fla) and PyTorch (torch).

A call of `auto` stands beside each baseline, with the name of the backend that ran. Steps, and calls whose time the
host may limit, are replayed from CUDA graphs. Float32 is multiplied in TF32 by both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from record import Job, attempt, tune_anew

from gla_core.bench import measure
from gla_core.bench.plots import workload_in_words
from gla_core.bench.suite import Case, Row, make_call, measure_case
from gla_core.workloads.named import WORKLOADS, Workload
from gla_core.workloads.rows import IN_BFLOAT16

BY_NAME = {(w.op, w.name): w for w in WORKLOADS}
DIRECTIONS = {
    "forward": "forward",
    "forward_graph": "forward in a CUDA graph",
    "forward+backward": "forward and backward",
    "forward+backward_graph": "forward and backward in a CUDA graph",
    "step_graph": "in a CUDA graph",
    "step": "eager",
}
BOTH = ("forward", "forward+backward")
IN_GRAPHS = ("forward_graph", "forward+backward_graph")


class Call(NamedTuple):
    """A workload with its directions, its baseline (None if none computes it) and words that say what is special."""

    workload: Workload
    directions: Sequence[str]
    baseline: str | None
    words: str = ""


def _published(name: str, **sizes: Any) -> Workload:
    return Workload(name, "chunk_gla", frozenset(), {**sizes, **IN_BFLOAT16})


def _named(op: str, baseline: str, directions: Sequence[str], **words: str) -> Iterator[Call]:
    """Yields calls of named workloads, each with its words."""
    return (Call(BY_NAME[op, name], directions, baseline, said) for name, said in words.items())


CALLS = (
    *_named("chunk_gla", "fla", BOTH, train_b8_t4096_h16="", long_b1_t65536_h8="", packed_64_t65536_h8=""),
    *_named("recurrent_gla_step", "fla", ("step_graph",), decode_b1="", decode_b64="", decode_b1024=""),
    *_named("chunk_gla", "fla", IN_GRAPHS, prefill_b1_t8192_h16="", train_b4_t2048_h16_k64_v64=""),
    *_named(
        "chunk_gla",
        "fla",
        BOTH,
        train_b8_t4096_h16_per_head="a gate per head",
        train_b8_t4096_h16_constant="a constant gate",
        train_b8_t4096_h16_float16="float16",
        train_b8_t4096_h16_float32="float32",
        long_b1_t65536_h8_per_head="a gate per head",
        packed_64_t65536_h8_per_head="packed, a gate per head",
    ),
    Call(_published("gla_1.3b", B=4, T=4096, H=4, K=256, V=512), BOTH, "fla", "GLA 1.3B"),
    Call(_published("gla_2.7b", B=2, T=4096, H=4, K=320, V=640), BOTH, "fla", "GLA 2.7B"),
    Call(
        _published("simple_gla_1.3b", B=4, T=4096, H=4, K=512, V=512, gate_form="head"),
        BOTH,
        "fla",
        "simple GLA 1.3B, a gate per head",
    ),
    Call(
        _published("retnet_1.3b", B=4, T=4096, H=8, K=256, V=512, gate_form="constant"),
        BOTH,
        "fla",
        "RetNet 1.3B, a constant gate",
    ),
    Call(_published("value_groups", B=4, T=4096, H=4, R=4, K=128, V=128), BOTH, None, "16 value heads"),
    *_named("online_softmax", "torch", BOTH, rows_8192_columns_4096="", rows_8192_columns_50257=""),
    *_named("softmax_attention", "torch", BOTH, causal_b4_t4096_h16=""),
    *_named("softmax_attention", "torch", ("forward",), one_query_131072_keys=""),
)
ON_A_CPU = (
    Call(BY_NAME["chunk_gla", "one_chunk"], BOTH, "loop"),
    Call(BY_NAME["online_softmax", "small"], ("forward",), "torch"),
)
SHORT = 256
"""The number of tokens when FLA's kernels are compiled but not launched. Compiled kernels do not depend on T."""


def calls(device: torch.device) -> Sequence[Call]:
    """Returns the calls to measure on a device."""
    return ON_A_CPU if device.type == "cpu" else CALLS


def jobs(device: torch.device, bandwidth: float, seconds: float) -> list[Job]:
    """Returns a job for each call, with a row for the baseline and one for `auto` in each direction.

    Args:
        bandwidth: bytes per second of a copy on the device.
        seconds: of timed calls for each row.
    """
    return [Job(_rows(call), functools.partial(_measure, call, device, bandwidth, seconds)) for call in calls(device)]


def call_in_words(call: Call, direction: str) -> str:
    """Returns the words of a call, such as "chunk_gla forward: 8 sequences of 4096 tokens, 16 heads"."""
    special = f", {call.words}" if call.words else ""
    return f"`{call.workload.op}` {DIRECTIONS[direction]}: {workload_in_words(call.workload)}{special}"


def _rows(call: Call) -> list[tuple[str, str, str | None]]:
    rows: list[tuple[str, str, str | None]] = []
    for direction in call.directions:
        words = call_in_words(call, direction)
        rows += [(words, call.baseline, None)] if call.baseline else []
        rows.append((words, "gla-core", call.baseline))
    return rows


def _cases(call: Call) -> list[Case]:
    names = [*([call.baseline] if call.baseline else []), "auto"]
    return [Case(call.workload, name, direction) for direction in call.directions for name in names]


def _measure(call: Call, device: torch.device, bandwidth: float, seconds: float) -> list[dict[str, Any]]:
    tune_anew()
    with tf32():
        return [_fields(case, measure_case(case, device, bandwidth, seconds)) for case in _cases(call)]


def _fields(case: Case, row: Row) -> dict[str, Any]:
    facts: dict[str, Any] = {} if case.backend != "auto" else {"backend": row.backend}
    if row.floor_fraction is not None:
        facts["of floor"] = row.floor_fraction
    return {"seconds": row.seconds, "spread": row.spread, "error": row.error, "facts": facts}


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Allows TF32 in products of float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- compilation beforehand


def compile_share(share: int, shares: int, device: torch.device) -> None:
    """Compiles a share of our kernels by running them, and a share of FLA's without launching any."""
    cases = [case for call in calls(device) for case in _cases(call)]
    with tf32():
        for case in [case for case in cases if case.backend == "auto"][share::shares]:
            run_once(case, device)
    from gla_fla.tune import compile_only

    compile_only(share, shares)
    with tf32():
        for case in {_kernels(case): case for case in cases if case.backend == "fla"}.values():
            run_once(_shortened(case), device)  # without launches, code that reads results may fail


def _kernels(case: Case) -> tuple[object, ...]:
    """Returns what FLA's compiled kernels depend on, for the last direction of a call, which includes the others."""
    sizes = case.workload.sizes
    names = ("H", "K", "V", "dtype", "gate_dtype", "gate_form")
    return case.workload.op, "lengths" in sizes, *(sizes.get(name) for name in names)


def _shortened(case: Case) -> Case:
    sizes = case.workload.sizes
    shorter = {"T": min(SHORT, sizes["T"])} if "T" in sizes else {}
    return dataclasses.replace(case, workload=dataclasses.replace(case.workload, sizes={**sizes, **shorter}))


def run_once(case: Case, device: torch.device) -> None:
    """Runs a case once without a graph, and goes on if it fails."""

    def run() -> dict[str, Any]:
        make_call(case.workload, case.backend, case.direction.removesuffix("_graph"), device)()
        measure.synchronize(device)
        return {}

    attempt(run)
