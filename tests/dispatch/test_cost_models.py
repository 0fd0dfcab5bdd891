"""The cost models that gla-core ships: formulas that hold for every legal call, and complete constants."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.dispatch import registry
from gla_core.dispatch.backend import GATES, CostModel, OpCall, parts_of, shipped_constants
from gla_core.dispatch.calibration import predict
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import Role

FACTS = {
    "cpu": {"multiprocessors": 1.0, "compute_capability": 0.0},
    "NVIDIA H200": {"multiprocessors": 132.0, "compute_capability": 9.0},
    "NVIDIA H100 80GB HBM3": {"multiprocessors": 132.0, "compute_capability": 9.0},
}
MEASURED = Path(__file__).parents[2] / "benchmarks/results/history/h200/online_softmax.jsonl"
BACKENDS = ("reference", "triton_fused", "parallel_scan")


MODEL = {"B": 1, "T": 1000, "H": 4, "Hq": 4, "Hv": 4, "K": 128, "V": 128, "P": 4, "N": None, "S": 4, "L": 8}
GATED = {"gate_dtype": torch.float32, "gate_form": "key"}


class Grid(NamedTuple):
    """The calls that are tried of ops with like sizes.

    Attributes:
        sizes, tensors: what differs from call to call, each with each.
        growing: the sizes that make a call longer.
        model: the sizes of a model, where they differ from `MODEL`.
    """

    sizes: list[Mapping[str, int]]
    tensors: list[Mapping[str, Any]]
    growing: tuple[str, ...]
    model: Mapping[str, int] = {}


CHUNK = Grid(
    sizes=[
        {"T": T, "H": H, "Hq": H, "Hv": H, "K": K, "V": V}
        for T in (1, 100, 10_000, 100_000)
        for H in (1, 64)
        for K, V in ((64, 64), (128, 128), (256, 128))
    ]
    + [{"T": 1000, "H": 4, "Hq": 8, "K": 100, "V": 100}],
    tensors=[
        {**GATED},
        {**GATED, "dtype": torch.float16},
        {**GATED, "dtype": torch.float32},
        {**GATED, "variable_length": True, "N": 7},
        {**GATED, "Hq": 256},
        {**GATED, "Hv": 256},
        {**GATED, "gate_form": "head"},
        {**GATED, "gate_form": "constant"},
    ],
    growing=("B", "T", "H"),
)
STEP = Grid(
    sizes=[{"B": 1}, {"B": 1000}, {"B": 4, "P": 9, "indexed": True}],
    tensors=[{"state_dtype": torch.float32}],
    growing=("B", "H", "V"),
    model={"P": 1},
)
DRAFTS = Grid(
    sizes=[{"B": B, "N": B, "T": T, "S": T, "L": 2 * T} for B in (1, 1000) for T in (1, 8)],
    tensors=[{"state_dtype": torch.float32}],
    growing=("N", "H", "V"),
    model={"T": 4, "N": 2, "P": 1},
)
SOFTMAX = Grid(
    sizes=[{"rows": rows, "columns": columns} for rows in (1, 10_000) for columns in (10, 100_000)],
    tensors=[{}],
    growing=("rows", "columns"),
    model={"rows": 10, "columns": 1000},
)
ATTENTION = Grid(
    sizes=[{"Tq": 1}, {"Tq": 1000, "Tk": 1000}, {"Tq": 1, "Tk": 1_000_000}, {"B": 100, "Tq": 1}],
    tensors=[{}, {"dtype": torch.float32}],
    growing=("B", "Tq", "Tk"),
    model={"Tq": 100, "Tk": 1000},
)


def grid_of(op):
    """Returns the grid of an op, told by its sizes."""
    grids = {"rows": SOFTMAX, "Tq": ATTENTION, "S": DRAFTS, "L": DRAFTS, "T": CHUNK}
    return next((grid for name, grid in grids.items() if name in ABSTRACT_OPS[op].sizes), STEP)


def call_of(op, kind, **changes):
    """Returns a call of an op with the sizes of a model, unless changed; sizes that the op lacks are left out."""
    device = torch.device("cpu" if kind == "cpu" else "cuda")
    dtype = changes.pop("dtype", torch.float32 if kind == "cpu" else torch.bfloat16)
    sizes = {name: changes.pop(name, size) for name, size in {**MODEL, **grid_of(op).model}.items()}
    sizes["N"] = sizes["B"] if sizes["N"] is None else sizes["N"]
    dims = {name: sizes[name] for name in ABSTRACT_OPS[op].sizes}
    return OpCall(op=op, device=device, dtype=dtype, dims=dims, **changes)


def measured(name, kind):
    """Returns the ops of a backend that have constants for a device. Other ops use the constants of an H200."""
    (backend,) = importlib.import_module(f"gla_{name}").gla_register_backends()
    # Ops with parts are predicted by what computes them.
    ops = {op for op, function in backend.ops.items() if not parts_of(function, call_of(op, kind))}
    if kind == "NVIDIA H100 80GB HBM3":
        return {"chunk_gla_fwd", "chunk_gla_bwd", "chunk_gla_summary"} if name != "reference" else set()
    if kind == "cpu" and name != "reference":
        return {op for op in ops if "cpu" in (backend.can(op).devices or ())}
    return ops


OPS = [(name, kind, op) for name in BACKENDS for kind in FACTS for op in sorted(measured(name, kind))]
OPS_ON_ONE_GPU = [
    pytest.param(*each, marks=pytest.mark.thorough) if each[1].startswith("NVIDIA H100") else each for each in OPS
]
"""The ops of each backend. Those on another GPU, whose constants alone differ, are thorough tests."""


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Turns interpretation off: with interpreted kernels, parallel_scan predicts nothing for a CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@functools.cache
def shipped(name):
    """Returns the shipped constants of a backend, read once."""
    return shipped_constants(f"gla_{name}")


def predicted(name, kind, call, changed=()):
    """Returns the seconds that a backend's formula predicts with its shipped constants."""
    formula = importlib.import_module(f"gla_{name}").predicted_seconds
    return formula(call, {**shipped(name)[kind][call.op], **FACTS[kind], **dict(changed)})


# ---- constants


@pytest.mark.parametrize(("name", "kind", "op"), OPS)
def test_every_op_has_constants_for_its_devices(name, kind, op):
    constants = shipped(name)[kind][op]
    assert constants
    assert all(isinstance(value, float) and 0 < value < math.inf for value in constants.values())


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backend_carries_its_model(name):
    # The module is loaded again, because the tests of this folder remove the cost models of our backends.
    module = importlib.import_module(f"gla_{name}")
    spec = importlib.util.spec_from_file_location(f"fresh_{name}", module.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    (backend,) = fresh.gla_register_backends()
    assert isinstance(backend.cost, CostModel)
    assert backend.cost.constants == shipped(name)
    assert {kind: set(ops) for kind, ops in backend.cost.constants.items()} == {
        kind: measured(name, kind) & set(backend.ops) for kind in FACTS if measured(name, kind)
    }


@pytest.mark.parametrize(("name", "kind", "op"), OPS_ON_ONE_GPU)
def test_each_constant_counts_for_some_call(name, kind, op):
    """No constant is missing either: the formula raises KeyError for a name that is not there."""
    calls = [
        call_of(op, kind, capturing=capturing, **{**sizes, **tensors})
        for capturing in (False, True)
        for sizes in grid_of(op).sizes
        for tensors in grid_of(op).tensors
    ]
    constants = shipped(name)[kind][op]
    base = [predicted(name, kind, call) for call in calls]
    for constant, value in constants.items():
        assert any(
            predicted(name, kind, call, {constant: value * factor}) != seconds
            for factor in (1e3, 1e-3)
            for call, seconds in zip(calls, base, strict=True)
        ), constant


# ---- formulas

sizes = st.integers(0, 9) | st.integers(0, 200_000)
heads, widths = st.integers(0, 64), st.integers(1, 512)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), which=st.sampled_from(OPS))
def test_every_legal_call_has_a_finite_time(data, which):
    name, kind, op = which
    H = data.draw(heads)
    groups, value_groups = data.draw(st.integers(1, 8)), data.draw(st.booleans())
    grouped = {"Hq": 1 if value_groups else groups, "Hv": groups if value_groups else 1}
    limits = {"H": st.just(H), "K": widths, "V": widths} | {dim: st.just(H * n) for dim, n in grouped.items()}
    dims = {dim: data.draw(limits.get(dim, sizes), label=dim) for dim in call_of(op, kind).dims}
    chunked = grid_of(op) is CHUNK
    packed = chunked and (ABSTRACT_OPS[op].requires(Role.OFFSETS) or data.draw(st.booleans()))
    if chunked:
        dims |= {"B": 1} if packed else {"N": dims["B"]}
    form = data.draw(st.sampled_from((None, *GATES)))
    gate = None if form is None else torch.float32
    state = data.draw(st.sampled_from((None, torch.float32, torch.bfloat16)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64)))
    flags = {flag: data.draw(st.booleans()) for flag in ("capturing", "indexed")}
    tensors = {"dtype": dtype, "gate_dtype": gate, "gate_form": form, "state_dtype": state, "variable_length": packed}
    seconds = predicted(name, kind, call_of(op, kind, **dims, **tensors, **flags))
    assert 0 <= seconds < math.inf


@pytest.mark.parametrize("capturing", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("name", "kind", "op"), OPS_ON_ONE_GPU)
def test_much_more_work_is_never_predicted_to_be_faster(name, kind, op, capturing):
    # Only twice as much work may be predicted to be faster, if another kernel computes the larger call.
    nearly = 0.9 if op == "chunk_gla_bwd" else 1  # two chunks uncut may take a little longer than twelve chunks cut
    # Plans cut sequences if this saves time on the device. A cut has up to three more launches.
    launches = 0 if capturing else 3 * shipped(name)[kind][op].get("host_launch", 0.0)
    for dim in grid_of(op).growing:
        grown = [name for name in call_of(op, kind).dims if name == dim or (dim == "H" and name in ("Hq", "Hv"))]
        others = {tuple((k, v) for k, v in sizes.items() if k not in grown) for sizes in grid_of(op).sizes}
        for size, fixed in itertools.product((1, 3, 20, 100, 700, 5000), others):
            small, large = (
                call_of(op, kind, capturing=capturing, **dict(fixed), **dict.fromkeys(grown, n))
                for n in (size, 8 * size)
            )
            least = nearly * predicted(name, kind, small) - launches
            assert predicted(name, kind, large) >= least, (dim, size, fixed)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind, op in OPS if op == "chunk_gla_pool"])
def test_checkpoints_in_a_pool_cost_their_bytes(name, kind):
    facts = {**GATED, "variable_length": True, "T": 8192, "N": 4}
    once, twice = (
        predicted(name, kind, call_of("chunk_gla_pool", kind, **facts, given=frozenset(passed)))
        for passed in ((), ("checkpoint_offsets", "checkpoint_slots"))
    )
    assert once < twice < 1.1 * once


@pytest.mark.parametrize(
    ("name", "op"), [(name, op) for name, kind, op in OPS if kind == "NVIDIA H200" and grid_of(op) is CHUNK]
)
def test_a_graph_spares_the_host(name, op):
    eager, captured = (
        predicted(name, "NVIDIA H200", call_of(op, "NVIDIA H200", T=64, capturing=c)) for c in (False, True)
    )
    assert captured < eager


@pytest.mark.parametrize("name", ["triton_fused", "parallel_scan"])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpoints_cost_the_forward_their_bytes_and_spare_the_backward_a_pass(name, packed):
    tensors = {**GATED, "variable_length": packed, "N": 1, "T": 65536, "H": 128, "Hq": 128, "Hv": 128}
    every = {"checkpoint_every": 64}

    def seconds(op, **facts):
        return predicted(name, "NVIDIA H200", call_of(op, "NVIDIA H200", **tensors, **facts), {"bandwidth": 1e10})

    bytes_of_checkpoints = 65536 // 64 * 128 * 128 * 128 * 2
    more = seconds("chunk_gla_fwd", scalars=every, checkpoints=True) - seconds("chunk_gla_fwd")
    assert more == pytest.approx(bytes_of_checkpoints / 1e10)
    less = seconds("chunk_gla_bwd") - seconds("chunk_gla_bwd", scalars=every)
    assert less > 3 * more  # a backward without them builds states in float32, scans and writes them


@pytest.mark.parametrize("op", ["chunk_gla_fwd", "chunk_gla_bwd", "chunk_gla_summary"])
def test_few_heads_and_many_tokens_are_for_the_scan(op):
    def both(**sizes):
        call = call_of(op, "NVIDIA H200", **GATED, **sizes)
        return predicted("triton_fused", "NVIDIA H200", call), predicted("parallel_scan", "NVIDIA H200", call)

    fused, scan = both(B=1, T=65536, H=8, Hq=8, Hv=8)
    assert scan < fused / 3
    fused, scan = both(B=8, T=4096, H=16, Hq=16, Hv=16)
    assert fused <= 1.05 * scan


def test_a_summary_of_odd_widths_is_priced_without_copies():
    """Its kernels read tensors as they are; a forward of these widths copies them to wider heads for Hopper."""
    odd, padded = (call_of("chunk_gla_summary", "NVIDIA H200", K=K, **GATED) for K in (77, 80))
    by_copies = {"bandwidth": 1e6}
    seconds, least = (predicted("triton_fused", "NVIDIA H200", call, by_copies) for call in (odd, padded))
    assert seconds < 1.1 * least
    odd, padded = (call_of("chunk_gla_fwd", "NVIDIA H200", K=K, **GATED) for K in (77, 80))
    seconds, least = (predicted("triton_fused", "NVIDIA H200", call, by_copies) for call in (odd, padded))
    assert seconds > 1.5 * least


@pytest.mark.parametrize("columns", [1024, 4096, 16384, 50257, 65536, 2**24])
def test_long_rows_go_to_whom_an_h200_found_faster(columns):
    """Compares with measured times: two sweeps read from the cache, and few rows are split."""
    rows = 4 if columns == 2**24 else 8192
    call = call_of("online_softmax", "NVIDIA H200", rows=rows, columns=columns)
    fused, scan = (predicted(name, "NVIDIA H200", call) for name in ("triton_fused", "parallel_scan"))
    workload = "rows_4_columns_16m" if columns == 2**24 else f"rows_8192_columns_{columns}"
    rows_of_file = map(json.loads, MEASURED.read_text().splitlines())
    times = {row["who"]: row["seconds"] for row in rows_of_file if row["call"] == workload}
    assert (fused < scan) == (times["triton_fused"] < times["parallel_scan"])
    assert fused == pytest.approx(times["triton_fused"], rel=0.4)


@pytest.mark.parametrize("op", ["chunk_gla_fwd", "chunk_gla_bwd"])
def test_another_gpu_has_no_kernels_for_hopper(op, monkeypatch):
    from gla_triton_kernels.gla.sm90 import kernels

    call = call_of(op, "NVIDIA H200", T=8192, **GATED)
    monkeypatch.setattr(kernels, "FORWARD_STEP", 1.0)
    monkeypatch.setattr(kernels, "GRADIENT_STEP", 1.0)
    assert predicted("triton_fused", "NVIDIA H200", call, {"compute_capability": 8.0}) < 1
    assert predicted("triton_fused", "NVIDIA H200", call) > 1


@pytest.mark.parametrize("name", ["triton_fused", "parallel_scan"])
def test_nothing_is_predicted_for_interpreted_kernels(name, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    formula = importlib.import_module(f"gla_{name}").predicted_seconds
    assert formula(call_of("chunk_gla_fwd", "cpu"), FACTS["cpu"]) is None


def test_what_formulas_say_of_the_kernels_is_so():
    from gla_reference import chunk_gla, online_softmax, softmax_attention
    from gla_reference import cost as reference_cost

    assert reference_cost.CHUNK == chunk_gla.CHUNK
    assert reference_cost.TILE == online_softmax.TILE
    assert reference_cost.KEY_BLOCK == softmax_attention.KEY_BLOCK


def test_a_call_that_is_computed_by_others_takes_their_time():
    """Several tokens take the time of as many steps, and a pool with checkpoints that of two forwards."""
    cost = CostModel(importlib.import_module("gla_reference").predicted_seconds, shipped_constants("gla_reference"))
    reference = dataclasses.replace(registry.get("reference"), cost=cost)  # this folder's tests remove cost models
    steps = predict(reference, call_of("recurrent_gla_steps", "cpu", T=3, S=4, **GATED))
    token = call_of("recurrent_gla_step", "cpu", B=2, P=2, **GATED, state_dtype=torch.float32)
    assert steps.seconds == pytest.approx(3 * predict(reference, token).seconds)
    facts = {**GATED, "variable_length": True, "N": 4}
    once, twice = (
        predict(reference, call_of("chunk_gla_pool", "cpu", **facts, given=frozenset(passed))).seconds
        for passed in ((), ("checkpoint_offsets", "checkpoint_slots"))
    )
    assert once == pytest.approx(predict(reference, call_of("chunk_gla_fwd", "cpu", **facts)).seconds)
    assert once < twice < 3 * once
