"""benchmarks/record.py: the schema of results, runs that resume, and the process that measures."""

import dataclasses
import functools
import json
import math
import operator
import time

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def record(script, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLA_CACHE_RESULTS"):
        monkeypatch.setenv(name, "as before")
    return script("record")


class Here:
    """Calls functions in this process, and counts how often it was ended."""

    ended = 0

    def __call__(self, function, *arguments):
        return function(*arguments)

    def end(self):
        Here.ended += 1


@pytest.fixture
def job(record):
    """Returns a function that makes a job with a baseline and a row of ours, which counts its calls."""

    def make(call, spread=0.01, error=None):
        def measure():
            job.measured.append(call)
            ours = {"seconds": 1e-3, "spread": spread} if error is None else {"error": error}
            return [{"seconds": 2e-3, "spread": 0.0}, {**ours, "facts": {"of floor": 0.5}}]

        return record.Job([(call, "fla", None), (call, "gla-core", "fla")], measure)

    job.measured = []
    return functools.wraps(job)(make)


def run(record, folder, jobs, commit="abc", until=math.inf):
    said = []
    about = record.conditions(CPU, commit)
    rows = record.Record(record.path_of(folder, about["device"], "part"), about)
    ended = record.measure(rows, jobs, until, said.append, Here())
    return record.read(rows.path), said, ended


def test_a_row_says_everything_by_itself(record, tmp_path, job):
    rows, said, ended = run(record, tmp_path, [job("one")])
    (path,) = tmp_path.glob("*/part.jsonl")
    line = json.loads(path.read_text().splitlines()[1])
    assert line.keys() >= {"call", "who", "baseline", "seconds", "spread", "commit", "date", "device", "versions"}
    assert line["versions"].keys() >= {"python", "gla_core", "torch"}
    assert rows[1] == record.Row(**line)
    assert "error" not in line
    assert "one, gla-core: 1.00 ms, spread 1.0%; of floor 0.5" in said
    assert ended


def test_a_second_run_measures_what_is_missing_unsteady_or_failed(record, tmp_path, job):
    run(record, tmp_path, [job("fine"), job("unsteady", spread=0.4), job("failed", error="RuntimeError: no")])
    job.__wrapped__.measured.clear()
    rows, _, _ = run(record, tmp_path, [job(name) for name in ("fine", "unsteady", "failed", "new")])
    assert job.__wrapped__.measured == ["unsteady", "failed", "new"]
    assert len(rows) == 8
    assert all(row.steady for row in rows)


def test_a_run_of_other_calls_keeps_failed_rows(record, tmp_path, job):
    run(record, tmp_path, [job("failed", error="RuntimeError: no")])
    rows, _, _ = run(record, tmp_path, [job("other")])
    assert [row.error for row in rows] == [None, "RuntimeError: no", None, None]


def test_a_file_holds_one_commit(record, tmp_path, job):
    run(record, tmp_path, [job("one"), job("two")])
    rows, _, _ = run(record, tmp_path, [job("one")], commit="def")
    assert [row.commit for row in rows] == ["def"] * 2


def test_an_error_is_a_row_and_the_run_goes_on(record, tmp_path, job):
    def fails():
        raise RuntimeError("CUDA error:\n  all is lost")

    broken = record.Job([("broken", "fla", None), ("broken", "gla-core", "fla")], fails)
    before = Here.ended
    rows, said, _ = run(record, tmp_path, [broken, job("one")])
    assert Here.ended == before + 1  # the kernel may have left the process broken
    assert [row.error for row in rows] == ["RuntimeError: CUDA error: all is lost"] * 2 + [None] * 2
    assert "broken, fla: RuntimeError: CUDA error: all is lost" in said
    refused = record.Job([("refused", "vllm", None)], lambda: [{"error": "ModuleNotFoundError: no vllm"}])
    rows, _, _ = run(record, tmp_path, [refused])
    assert rows[-1].error == "ModuleNotFoundError: no vllm"
    assert Here.ended == before + 1  # a peer that is not there breaks nothing


def test_nothing_begins_when_the_time_is_over(record, tmp_path, job):
    rows, said, ended = run(record, tmp_path, [job("one")], until=-math.inf)
    assert (rows, ended, job.__wrapped__.measured) == ([], False, [])
    assert said == ["out of time: 1 of 1 jobs left out; run it again to measure them"]


def test_unsteady_times_have_no_ratio(record):
    fla = record.Row(call="a", who="fla", seconds=3.0, spread=0.02, device="D")
    ours = record.Row(call="a", who="gla-core", baseline="fla", seconds=1.5, spread=0.02, device="D")
    assert record.ratio(ours, [fla, ours]) == 2
    for changed in ({"spread": 0.11}, {"error": "no"}, {"seconds": None}, {"device": "another"}):
        assert record.ratio(ours, [dataclasses.replace(fla, **changed), ours]) is None
        assert record.ratio(dataclasses.replace(ours, **changed), [fla]) is None
    assert record.ratio(fla, [fla, ours]) is None


def test_another_process_gives_results_errors_and_a_limit(record, monkeypatch):
    apart = record.Apart()
    try:
        assert apart(operator.truediv, 6, 3) == 2
        with pytest.raises(ZeroDivisionError):
            apart(operator.truediv, 1, 0)
        monkeypatch.setattr(record, "LONGEST", 0.05)
        with pytest.raises(TimeoutError, match=r"took longer than 0 s"):
            apart(time.sleep, 30)
        monkeypatch.setattr(record, "LONGEST", 60)
        assert apart(operator.truediv, 6, 3) == 2
    finally:
        apart.end()


def test_tuning_is_short(record, monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "do_bench", autotuner.do_bench)
    record.tune_quickly()
    assert autotuner.__new__(autotuner).do_bench.keywords == {"warmup": 5, "rep": 25}
