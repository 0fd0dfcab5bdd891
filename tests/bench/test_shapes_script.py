"""The script that measures shapes that were not used for tuning, on small shapes."""

import dataclasses

import pytest
import torch

from gla_core.workloads.named import select

CPU = torch.device("cpu")


@pytest.fixture
def shapes(script):
    return script("shapes")


def test_odd_calls(shapes):
    """The calls are the same each time, have the described widths and numbers of heads, and move enough bytes."""
    calls = list(shapes.odd_calls(CPU))
    assert calls == list(shapes.odd_calls(CPU))
    assert len(calls) == 40
    for call in calls:
        B, H, K, V = (call.dims[name] for name in ("B", "H", "K", "V"))
        assert 40 <= K <= 120
        assert 80 <= V <= 200
        assert K & (K - 1)
        assert V & (V - 1)
        assert 100e6 <= shapes.floor_bytes(call) <= 1.1e9
        assert 0.25 <= B * H / 132 <= 0.42 or 0.95 <= B * H / 132 <= 1.2
    assert sum(call.dims["K"] % 8 == call.dims["V"] % 8 == 0 for call in calls) >= 30


@pytest.mark.thorough
def test_all_parts_are_measured(shapes, monkeypatch):
    selection = shapes.selection
    monkeypatch.setattr(shapes, "odd_calls", lambda device: [selection.chunk_call(device, 1, 2, 40, 24, 40)])
    packed = dataclasses.replace(selection.chunk_call(CPU, 1, 2, 60, 16, 16, 3), longest=None)
    monkeypatch.setattr(shapes, "giant_calls", lambda device: [(packed, [5, 50, 5])])
    small = next(w for w in select("chunk_gla") if "ci" in w.tags)
    monkeypatch.setattr(shapes, "workloads", lambda: [(small, "forward+backward")])
    monkeypatch.setattr(shapes, "implementing", lambda op: ["auto", "reference", "gla_fla"])
    jobs = {part: shapes.jobs(part, CPU, 4e9, 1e-3) for part in shapes.PARTS}
    rows = {part: [(job.rows, job.measure()) for job in jobs[part]] for part in jobs}
    floor = 2 * 40 * (3 * 24 + 2 * 40) * 4 / 4e9
    (_, (forward,)), (_, (pair,)) = rows["odd_shapes"]
    assert forward["facts"]["over the floor"] == pytest.approx(forward["seconds"] / floor)
    assert pair["facts"]["over the floor"] > 1
    assert [job.rows[0][0] for job in jobs["odd_shapes"]] == [
        "B1 T40 H2 K24 V40, forward",
        "B1 T40 H2 K24 V40, forward+backward",
    ]
    ((_, giants),) = rows["giants"]
    assert jobs["giants"][0].rows[0][0] == "3 sequences, 50 of 60 tokens in one, H2 K16 V16"
    assert min(row["seconds"] for row in giants) > 0
    assert [names[1][1:] for names, _ in rows["batch_invariant"]] == [("batch_invariant", "without")] * 2
    assert all(row["seconds"] > 0 for _, pair in rows["batch_invariant"] for row in pair)


def test_workloads_of_models_in_both_directions(shapes):
    workloads = [(workload.name, direction) for workload, direction in shapes.workloads()]
    assert ("train_b8_t4096_h16", "forward+backward_graph") in workloads
    assert len(workloads) == 2 * len({name for name, _ in workloads})
