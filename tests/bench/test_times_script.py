"""`evidence.py times` on tiny cases: the cases that it measures."""

from __future__ import annotations

import itertools
import subprocess

import pytest
import torch

from gla_core.bench import measure, results, suite
from gla_core.bench.suite import Case
from gla_core.workloads.named import select

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def times(script, monkeypatch):
    module = script("times")
    monkeypatch.setenv("TRITON_CACHE_DIR", "as before")
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device, budget: 4e12)
    return module


@pytest.fixture
def tiny(times, monkeypatch):
    """Makes a plan of three cases, of which the second fails, and records the cases that are measured."""
    steps = {w.name: w for w in select("recurrent_gla_step", ["ci"])}
    plan = [Case(steps["small"], "reference", "step"), Case(steps["pool"], "fla", "step")]
    plan += [Case(steps["grouped"], "reference", "step")]
    measured = []

    def measure_case(case, device, bandwidth, budget):
        measured.append(str(case))
        return suite.measure_case(case, device, bandwidth, 0.002)

    monkeypatch.setattr(times, "plan", lambda backends, device: plan)
    monkeypatch.setattr(times, "first_call", lambda *_: {"first_call": 80.0, "first_backward": 160.0})
    monkeypatch.setattr(times, "measure_case", measure_case)
    # Measures in this process; `measure_apart` has a test of its own below.
    monkeypatch.setattr(times, "measure_apart", lambda cases, *rest: times.measure_here(cases, CPU, *rest))
    return measured


def run(times, tmp_path, minutes=1.0, commit="abc"):
    said = []
    path, found = times.run(tmp_path / "out", tmp_path / "cache", minutes, ["reference"], commit, CPU, said.append)
    assert results.read(path) == found
    return found, said


def test_what_is_not_wanted_is_not_measured(times, tiny, tmp_path):
    def wanted(case):
        return case.workload.op == "recurrent_gla_step" and case.backend == "reference"

    arguments = (tmp_path, tmp_path / "cache", 1.0, ["reference"], "abc", CPU, lambda line: None)
    path, found = times.run(*arguments, name="steps", wanted=wanted)
    assert path.name.startswith("steps-")
    assert found.rows
    assert {(row.op, row.backend) for row in found.rows} == {("recurrent_gla_step", "reference")}


def test_every_row_is_in_the_file(times, tiny, tmp_path):
    found, said = run(times, tmp_path)
    assert found.copy_bandwidth == 4e12
    assert [(row.op, row.workload, row.backend, row.direction) for row in found.rows] == [
        ("chunk_gla", "train_b8_t4096_h16", "fla", "first_call"),
        ("chunk_gla", "train_b8_t4096_h16", "fla", "first_backward"),
        ("recurrent_gla_step", "small", "reference", "step"),
        ("recurrent_gla_step", "grouped", "reference", "step"),
        ("recurrent_gla_step", "pool", "fla", "step"),
    ]
    assert [row.seconds is None for row in found.rows] == [False, False, False, False, True]
    assert "fla has no pool of states" in found.rows[4].error
    assert "first call of FLA, then its backward: 80.0 s, 160 s" in said


def test_the_file_is_there_after_every_row(times, tiny, tmp_path, monkeypatch):
    written = []
    real = results.write

    def write(path, found):
        written.append(len(found.rows))
        real(path, found)

    monkeypatch.setattr(results, "write", write)
    run(times, tmp_path)
    assert written == [0, 2, 3, 4, 5]


def test_a_second_run_repeats_only_what_failed(times, tiny, tmp_path):
    first, _ = run(times, tmp_path)
    tiny.clear()
    second, _ = run(times, tmp_path)
    assert tiny == ["pool-fla-step"]
    assert len(second.rows) == len(first.rows)


def test_rows_of_another_commit_are_not_kept(times, tiny, tmp_path):
    run(times, tmp_path)
    tiny.clear()
    found, _ = run(times, tmp_path, commit="def")
    assert len(tiny) == 3
    assert found.commit == "def"


def test_no_row_begins_when_the_time_is_over(times, tiny, tmp_path, monkeypatch):
    clock = itertools.count(step=61.0)
    monkeypatch.setattr(times.time, "monotonic", lambda: next(clock))
    found, said = run(times, tmp_path, minutes=3.1)  # the clock is read once, then three times per case
    assert tiny == ["small-reference-step"]
    assert len(found.rows) == 3
    assert said[-1] == "out of time: 2 measurements left out, from grouped-reference-step on"


def test_a_first_call_that_takes_too_long_is_an_error(times, tiny, tmp_path, monkeypatch):
    def too_long(workload, backend, device, cache, timeout):
        assert (cache, timeout) == (tmp_path / "cache", pytest.approx(42))
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(times, "first_call", too_long)
    found, _ = run(times, tmp_path)
    assert found.rows[0].error.startswith("TimeoutExpired")
    assert len(found.rows) == 4


def test_a_cache_in_use_is_not_taken_for_a_fresh_one(times, tiny, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernel").touch()
    caches = []
    monkeypatch.setattr(times, "first_call", lambda *args: caches.append(args[3]) or {"first_call": 1.0})
    run(times, tmp_path)
    assert caches == [None]


def test_the_plan(times, monkeypatch):
    monkeypatch.setattr(times, "has_fla", lambda: True)
    plan = [(c.workload.op, c.workload.name, c.backend, c.direction) for c in times.plan(["reference"], CUDA)]
    assert len(plan) == len(set(plan))
    assert plan[0] == ("chunk_gla", "train_b8_t4096_h16", "fla", "forward")
    chunks = [p[1:] for p in plan if p[0] == "chunk_gla"]
    four = ("train_b8_t4096_h16", "prefill_b1_t8192_h16", "long_b1_t65536_h8", "prefill_b2_t2048_h8")
    for workload, name, direction in itertools.product(four, ("fla", "reference"), ("forward", "forward+backward")):
        assert chunks.index((workload, name, direction)) < 17
    for B, direction in itertools.product((1, 8, 64, 256, 1024), ("step", "step_graph")):
        assert ("recurrent_gla_step", f"decode_b{B}", "fla", direction) in plan
    assert ("softmax_attention", "causal_b4_t4096_h16", "torch", "forward") in plan
    assert ("chunk_gla", "train_b8_t4096_h16", "reference", "first_backward") in plan
    assert ("recurrent_gla_step", "decode_b1", "fla", "host") in plan
    assert {name for _, name, _, _ in plan} >= {w.name for w in select("chunk_gla", ["train"])}


def test_a_backend_that_is_not_installed_is_left_out_of_the_plan(times, monkeypatch):
    monkeypatch.setattr(times, "has_fla", lambda: False)
    assert {c.backend for c in times.plan(["reference", "missing"], CUDA)} == {"torch", "reference"}


def test_what_fla_tunes_for_is_measured_in_one_process_for_each_workload(times, monkeypatch):
    monkeypatch.setattr(times, "has_fla", lambda: True)
    grouped = times.in_processes(times.plan(["reference", "gla_fla"], CUDA))
    for group in grouped:
        assert len({(case.workload.op, case.workload.name) for case in group}) == 1
        assert len(group) == 1 or {case.backend for case in group} <= {"fla", "gla_fla"}
    (large,) = [g for g in grouped if g[0].workload.name == "train_b8_t4096_h16" and len(g) > 1]
    assert {(case.backend, case.direction) for case in large} >= {("fla", "forward"), ("fla", "forward+backward")}


def test_a_process_of_its_own_gives_rows(times):
    steps = {w.name: w for w in select("recurrent_gla_step", ["ci"])}
    cases = [Case(steps["small"], "reference", "step"), Case(steps["pool"], "fla", "step")]
    good, bad = times.measure_apart(cases, 4e12)
    assert (good.workload, good.backend, good.error) == ("small", "reference", None)
    assert good.seconds > 0
    assert "fla has no pool of states" in bad.error


def test_a_process_that_fails_gives_a_reason(times):
    case = Case(select("recurrent_gla_step", ["ci"])[0], "reference", "step")
    (row,) = times.measure_apart([case], 4e12, timeout=0.01)
    assert row.error.startswith("TimeoutExpired")
