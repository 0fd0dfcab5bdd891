"""The script that measures shapes that were not used for tuning, on small shapes."""

from __future__ import annotations

import dataclasses
import json
import statistics

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
def test_all_parts_are_measured_and_summed_up(shapes, monkeypatch, tmp_path):
    selection = shapes.selection
    monkeypatch.setattr(shapes, "odd_calls", lambda device: [selection.chunk_call(device, 1, 2, 40, 24, 40)])
    packed = dataclasses.replace(selection.chunk_call(CPU, 1, 2, 60, 16, 16, 3), longest=None)
    monkeypatch.setattr(shapes, "giant_calls", lambda device: [(packed, [5, 50, 5])])
    small = next(w for w in select("chunk_gla") if "ci" in w.tags)
    monkeypatch.setattr(shapes, "workloads", lambda: [(small, "forward+backward")])
    monkeypatch.setattr(shapes, "implementing", lambda op: ["auto", "reference", "gla_fla"])
    said = []
    path = shapes.run(tmp_path, CPU, 1e-3, 1.0, "0123456789", said.append)
    found = json.loads(path.read_text())
    odd, pair, giant, *invariant = found["rows"]
    assert odd["over"] == pytest.approx(odd["measured"][odd["pick"]] / odd["floor"], rel=1e-2)
    assert odd["floor"] == pytest.approx(2 * 40 * (3 * 24 + 2 * 40) * 4 / found["copy_bandwidth"], rel=1e-3)
    assert pair["part"] == "odd pairs"
    assert pair["over"] > 1
    assert giant["giant"] == 50
    assert giant["over"] == pytest.approx(giant["seconds"] / sum(giant["apart"]), rel=1e-2)
    assert found["summary"]["one giant"] == {"calls": 1, "median": giant["over"], "worst": giant["over"]}
    assert [row["part"] for row in invariant] == ["invariant, 4096 tokens", "invariant, 512 tokens"]
    for row in invariant:
        assert row["over"] == pytest.approx(row["seconds"] / row["without"], rel=1e-2)
    assert len(said) == 5


def test_workloads_of_models_in_both_directions(shapes):
    found = list(shapes.workloads())
    assert ("train_b8_t4096_h16", "forward+backward_graph") in [
        (workload.name, direction) for workload, direction in found
    ]
    assert len(found) == 2 * len({workload.name for workload, _ in found})


def test_the_summary(shapes):
    rows = [{"part": "odd widths", "over": over} for over in (1.0, 4.0, 2.0)]
    assert shapes.summary(rows) == {"odd widths": {"calls": 3, "median": statistics.median([1, 2, 4]), "worst": 4.0}}


def test_the_page_shows_every_odd_shape(shapes, script, tmp_path):
    tables = script("readme_tables")
    dims = {"B": 1, "T": 2, "H": 3, "K": 40, "V": 80}
    rows = [{"part": "odd widths", "dims": dims, "measured": {"a": 1e-3}, "pick": "a", "over": 1.5}]
    rows.append({"part": "odd pairs", "dims": dims, "seconds": 2e-3, "backend": "b", "over": 2.5})
    head = {"device": "D", "gla_core": "0", "commit": "0123456789ab", "torch": "2", "date": "2026-01-01T00"}
    shapes.selection.write(tmp_path / "shapes-d.json", head, rows, shapes.summary(rows))
    page = tables.render(tmp_path)
    assert "- odd widths: 1 calls, median 1.50, largest 1.50" in page
    assert "| 1 2 3 40 80 | forward | 1.00 ms | a | 1.50 |" in page
    assert "| 1 2 3 40 80 | pair | 2.00 ms | b | 2.50 |" in page
