"""The script that judges the picks of `auto`, on made-up backends, and its committed results."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend, CostModel, OpCall
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads import calibration as calibration_shapes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CPU = torch.device("cpu")
CALL = OpCall(op="online_softmax", device=CPU, dtype=torch.float32, dims={"rows": 2, "columns": 3})


@pytest.fixture
def selection(script):
    return script("selection")


@pytest.fixture(autouse=True)
def alone(only_reference, set_environment, tmp_path):
    """Leaves the reference as the only backend besides the backends that a test registers. Nothing is calibrated."""
    set_environment(GLA_CACHE_DIR=str(tmp_path / "cache"))


@pytest.fixture
def backend():
    """A function: `backend(name, takes, says)` registers a backend; its softmax takes `takes` s, predicted: `says`."""
    handles = []

    def make(name, takes, says=None):
        def softmax(x, dim):
            if takes is None:
                raise RuntimeError("no such kernel")
            time.sleep(takes)
            return torch.softmax(x, dim)

        model = CostModel(lambda call, c: c["seconds"], {"cpu": {"online_softmax": {"seconds": says}}})
        ops = {"online_softmax": softmax}
        handles.append(gla.register(Backend(name, "1.0", ops, cost=None if says is None else model)))

    yield make
    for handle in handles:
        handle.unregister()


class Explained:
    """The parts of an explanation that a row needs."""

    candidates = ()
    winner = "mine"


# ---- measuring


def test_a_row_says_who_was_picked_and_how_well(selection, backend):
    backend("slow", 2e-2, 1e-6)
    backend("fast", 1e-3, 2e-6)
    row = selection.measure_row("grid", CALL, 0.01)
    assert row["pick"] == "slow"
    assert row["predicted"]["slow"] == 1e-6
    assert row["measured"]["slow"] > row["measured"]["fast"]
    best = min(row["measured"].values())
    assert row["ratio"] == pytest.approx(row["measured"]["slow"] / best, rel=1e-2)
    assert row["fastest"] == min(row["measured"], key=row["measured"].get)
    assert (row["part"], row["op"], row["dims"]) == ("grid", "online_softmax", {"rows": 2, "columns": 3})


def test_who_is_predicted_to_be_hopeless_is_left_out(selection, backend):
    backend("mine", 0.0, 1e-6)
    backend("hopeless", 0.0, 1.0)
    row = selection.measure_row("grid", CALL, 0.003)
    assert "hopeless" not in row["measured"]
    assert row["left_out"] == {"hopeless": "predicted to take 1000000 times as long as the best"}


def test_a_pick_that_fails_is_no_success(selection, backend):
    backend("broken", None, 1e-6)
    row = selection.measure_row("grid", CALL, 0.003)
    assert row["pick"] == "broken"
    assert row["ratio"] is None
    assert row["left_out"]["broken"].startswith("RuntimeError: no such kernel")
    assert selection.summary([row])["grid"]["worst"] == math.inf


# ---- the file


@pytest.mark.thorough
def test_a_run_is_taken_up_where_it_ended(selection, backend, tmp_path, monkeypatch):
    backend("mine", 0.0, 1e-4)
    monkeypatch.setattr(selection, "calls", lambda device: [("grid", CALL), ("other ops", CALL)])
    said = []

    def run():
        said.clear()
        return selection.run(tmp_path, CPU, 0.003, 1.0, "abc", said.append)

    path = run()
    assert path == tmp_path / "selection-cpu.json"
    assert len(said) == 2
    first = json.loads(path.read_text())
    assert first["commit"] == "abc"
    assert first["constants"]["mine"]["online_softmax"]["seconds"] == 1e-4
    assert set(first["summary"]) == {"grid", "other ops"}
    lines = path.read_text().splitlines()
    assert sum(line.startswith('  {"part"') for line in lines) == 2
    run()
    assert said == []
    backend("another", 0.0, 1e-4)  # with other constants every pick may change
    run()
    assert len(said) == 2


def test_backends_that_predict_no_time_are_timed_where_none_does(selection, backend):
    backend("plain", 0.0)
    explanation = selection.explain(CALL)
    unranked = [c for c in explanation.candidates if c.seconds is None and c.refusal is None]
    assert "plain" in selection._worth_timing(dataclasses.replace(explanation, candidates=tuple(unranked)))[0]
    backend("mine", 0.0, 1e-4)
    names, left_out = selection._worth_timing(selection.explain(CALL))
    assert "mine" in names
    assert left_out["plain"] == "predicts no time, so others come first"


def test_of_several_passes_the_quickest_time_counts(selection, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "calls", lambda device: iter([("grid", CALL)]))
    monkeypatch.setattr(selection, "_worth_timing", lambda explanation: ([], {}))
    times = iter([{"mine": 2e-3, "theirs": 1e-3}, {"mine": 3e-3}, {"mine": 1e-3, "theirs": 4e-3}, {"mine": 3e-3}])
    monkeypatch.setattr(selection, "time_backends", lambda *_: (next(times), {}))
    monkeypatch.setattr(selection, "explain", lambda call: Explained())
    path = selection.run(tmp_path, CPU, 0.003, 1.0, None, lambda line: None, passes=3)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["measured"] == {"mine": 1e-3, "theirs": 1e-3}
    assert row["ratio"] == 1.0
    path = selection.run(tmp_path, CPU, 0.003, 1.0, None, lambda line: None, passes=2)  # the file has one pass already
    (row,) = json.loads(path.read_text())["rows"]
    assert row["measured"] == {"mine": 1e-3, "theirs": 1e-3}
    assert next(times, None) is None


def test_picks_that_were_slow_are_measured_again(selection, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "calls", lambda device: iter([("grid", CALL), ("other ops", CALL)]))
    monkeypatch.setattr(selection, "_worth_timing", lambda explanation: ([], {}))
    times = iter([{"mine": 2e-3, "theirs": 1e-3}, {"mine": 1e-3}, {"mine": 1e-3, "theirs": 1e-3}])
    monkeypatch.setattr(selection, "time_backends", lambda *_: (next(times), {}))
    monkeypatch.setattr(selection, "explain", lambda call: Explained())
    path = selection.run(tmp_path, CPU, 0.003, 1.0, None, lambda line: None, again=2)  # the second finds none
    assert [row["ratio"] for row in json.loads(path.read_text())["rows"]] == [1.0, 1.0]
    assert next(times, None) is None


def test_no_measurement_begins_out_of_time(selection, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "calls", lambda device: [("grid", CALL)])
    said = []
    selection.run(tmp_path, CPU, 0.003, -1.0, "abc", said.append)
    assert said == ["out of time"]


def test_picks_are_made_anew_of_times_that_a_file_holds(selection, set_environment, tmp_path):
    set_environment(GLA_BLOCK_PLUGINS=None)
    report = json.loads((RESULTS / "selection-h200.json").read_text())
    rows = [row for row in report["rows"] if row["part"] == "crossover"]
    wrong = [selection.judged({**row, "pick": "reference", "predicted": {}}) for row in rows]
    selection.write(path := tmp_path / "selection-h200.json", {**report, "constants": {}, "rows": []}, wrong)
    again = json.loads(selection.pick_again(path).read_text())
    assert [row["measured"] for row in again["rows"]] == [row["measured"] for row in rows]
    for row in again["rows"]:
        assert row["predicted"][row["pick"]] == min(row["predicted"].values())
        assert row["ratio"] == pytest.approx(row["measured"][row["pick"]] / min(row["measured"].values()), rel=1e-3)
    assert {row["pick"] for row in again["rows"]} == {"triton_fused", "parallel_scan"}
    assert again["summary"]["crossover"]["close"] >= 0.95
    assert again["constants"]["triton_fused"]["chunk_gla_fwd"]["multiprocessors"] == 132


def test_the_summary_counts_what_is_close(selection):
    def row(ratio, **dims):
        return {"part": "grid", "dims": dims, "ratio": ratio}

    actual = selection.summary([row(1.0, T=1), row(1.04, T=1), row(1.2, T=2), row(1.0, T=3)])
    assert actual == {"grid": {"shapes": 3, "calls": 4, "within": 1.05, "close": 0.75, "worst": 1.2}}


def test_a_row_of_a_file_without_value_heads_is_the_row_of_its_call(selection):
    call = selection.chunk_call(CPU, 2, 3, 5, 4, 4)
    row = {"part": "grid", **selection.as_json(call)}
    older = {**row, "dims": {name: size for name, size in row["dims"].items() if name != "Hv"}}
    assert (row["dims"]["Hv"], selection.key(older)) == (3, selection.key(row))


# ---- the grid


def test_the_grid_is_wide_and_always_the_same(selection):
    shapes = selection.shapes()
    assert shapes == selection.shapes()
    assert len(set(shapes)) >= 60
    assert sum(packed is not None for *_, packed in shapes) >= 10
    heads, lengths = ({B * H for B, H, *_ in shapes}, {T for _, _, T, *_ in shapes})
    assert (min(heads), min(lengths)) == (1, 1)
    assert {K for *_, K, _, _ in shapes} >= {64, 128, 256}
    assert (max(heads), max(lengths)) == (512, 131072)


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda")], ids=str)
def test_no_constant_is_fitted_to_the_grid(selection, device):
    def essence(call):
        return call.op, sorted(call.dims.items()), call.dtype, call.variable_length

    parts = [(part, essence(call)) for part, call in selection.calls(device)]
    fitted = [essence(call) for op in {c[0] for _, c in parts} for call in calibration_shapes.shapes(op, device)]
    assert not [call for part, call in parts if part != "crossover" and call in fitted]


@pytest.mark.parametrize("kind", ["equal", "uniform", "log-uniform", "one giant", "single tokens"])
@pytest.mark.parametrize(("T", "N"), [(1000, 2), (1000, 500), (70_000, 300), (512, 512)])
def test_lengths_of_packed_sequences(selection, kind, T, N):
    tokens = selection.lengths(kind, T, N)
    assert tokens == selection.lengths(kind, T, N)
    assert (len(tokens), sum(tokens), min(tokens) >= 1) == (N, T, True)
    mean = T / N
    if kind == "equal":
        assert max(tokens) - min(tokens) <= 1
    if mean > 100 and kind != "equal":
        assert max(tokens) > {"uniform": 1.2, "log-uniform": 1.2, "one giant": 1.3, "single tokens": 1.9}[kind] * mean
        assert (min(tokens) == 1) == (kind == "single tokens")


def test_the_lengths_that_a_part_names_are_timed(selection):
    for part, call in selection.packed_calls(torch.device("cpu")):
        kind = part.removeprefix("packed, ")
        assert call.longest is None
        if call.dims["T"] * call.dims["H"] * call.dims["K"] > 2**19:
            continue
        tokens = selection._lengths_of(part, call)
        assert tokens == selection.lengths(kind, call.dims["T"], call.dims["N"])
        arguments = selection.arguments_of(dataclasses.replace(call, dtype=torch.float32), tokens)
        assert arguments[ABSTRACT_OPS[call.op].parameters.index("cu_seqlens")].diff().tolist() == tokens


# ---- committed results


@pytest.mark.parametrize("path", sorted(RESULTS.glob("selection-*.json")), ids=lambda path: path.stem)
def test_auto_was_right(selection, path):
    report = json.loads(path.read_text())
    device = torch.device("cpu" if path.stem == "selection-cpu" else "cuda")
    assert report["summary"] == selection.summary(report["rows"])
    main = report["summary"]["grid" if device.type == "cuda" else "other ops"]
    assert main["shapes"] >= (60 if device.type == "cuda" else 10)
    assert main["close"] >= 0.95
    assert main["worst"] <= 1.3
    if device.type == "cuda":
        assert report["summary"]["backward"]["worst"] <= 1.3
    wanted = {selection.key({"part": part, **selection.as_json(call)}) for part, call in selection.calls(device)}
    assert {selection.key(row) for row in report["rows"]} == wanted


def test_auto_was_right_whatever_the_lengths(selection):
    rows = json.loads((RESULTS / "selection-h200.json").read_text())["rows"]
    packed = [row["ratio"] for row in rows if row["part"].startswith("packed")]
    assert len(packed) >= 100
    assert sum(ratio <= selection.CLOSE_UNKNOWN for ratio in packed) >= 0.95 * len(packed)
    assert max(packed) <= 1.4
