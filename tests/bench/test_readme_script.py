"""`evidence.py readme` on tiny workloads, and on models that are never made."""

from __future__ import annotations

import dataclasses
import json
import operator
import time
from types import SimpleNamespace

import pytest
import torch

from gla_core.bench import measure, suite

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Here:
    """Calls functions in this process."""

    def __init__(self):
        self.ended = 0

    def __call__(self, function, *arguments):
        return function(*arguments)

    def end(self):
        self.ended += 1


@pytest.fixture
def readme(script, monkeypatch):
    module = script("readme")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLA_CACHE_RESULTS"):
        monkeypatch.setenv(name, "as before")
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(module, "forget_tuning", lambda: None)
    tasks = [module.Task("train", "fla", 2), module.Task("graph", "ours", 2)]
    monkeypatch.setattr(module.models, "tasks", lambda device: tasks)
    measured = []

    def measure_model(task, device):
        measured.append(" ".join(map(str, task)))
        return {**task._asdict(), "seconds": 0.25, "spread": 0.01, "device_seconds": 0.2}

    def measure_case(case, device, bandwidth, budget):
        measured.append(str(case))
        return dataclasses.replace(suite.measure_case(case, device, bandwidth, 0.002), spread=0.01)

    monkeypatch.setattr(module.models, "measure", measure_model)
    monkeypatch.setattr(module, "measure_case", measure_case)
    module.measured = measured
    return module


CALLED = [f"one_chunk-{name}-forward" for name in ("loop", "reference", "parallel_scan")]
CALLED += [f"small-{name}-forward" for name in ("torch", "reference", "parallel_scan")]


def run(readme, folder, apart=None, minutes=1.0, commit="abc"):
    said = []
    path = readme.run(folder, folder / "cache", minutes, 0.002, commit, CPU, said.append, apart or Here())
    return path, said


def test_calls_and_models_come_into_one_file(readme, tmp_path):
    path, said = run(readme, tmp_path)
    assert readme.measured == [*CALLED, "train fla 2", "graph ours 2"]
    assert path == tmp_path / "readme-cpu.json"
    calls, of_models = readme.read(path)
    assert [f"{row.workload}-{row.backend}-{row.direction}" for row in calls] == CALLED
    assert calls[1].ratio_to["loop"] == pytest.approx(calls[0].seconds / calls[1].seconds)
    assert [row["way"] for row in of_models] == ["fla", "ours"]
    found = json.loads(path.read_text())
    assert (found["commit"], found["copy_bandwidth"]) == ("abc", 4e12)
    assert "train fla 2: 250 ms, spread 1.0%, 200 ms on the device" in said


def test_a_second_run_measures_what_failed(readme, tmp_path):
    class Broken(Here):
        def __call__(self, function, *arguments):
            if function is readme.measure_model and arguments[0].way == "fla":
                raise RuntimeError("CUDA error:\n  all is lost")
            return super().__call__(function, *arguments)

    path, _ = run(readme, tmp_path, Broken())
    assert readme.read(path)[1][0] == {
        "what": "train",
        "way": "fla",
        "size": 2,
        "error": "RuntimeError: CUDA error: all is lost",
    }
    assert readme.measured[-1] == "graph ours 2"  # the run went on
    readme.measured.clear()
    assert readme.read(run(readme, tmp_path)[0])[1][-1]["seconds"] == 0.25
    assert readme.measured == ["train fla 2"]


def test_a_case_that_fails_ends_the_process_and_is_measured_again(readme, tmp_path, monkeypatch):
    def fails_once(case, *rest, measured=readme.measure_case):
        row = measured(case, *rest)
        return row if case.backend != "torch" else suite.Row(**{**base(row), "error": "RuntimeError: no"})

    def base(row):
        return {"workload": row.workload, "op": row.op, "backend": row.backend, "direction": row.direction}

    apart = Here()
    with monkeypatch.context() as patch:
        patch.setattr(readme, "measure_case", fails_once)
        path, said = run(readme, tmp_path, apart)
    assert apart.ended == 1
    assert "online_softmax small forward torch: RuntimeError: no" in said
    readme.measured.clear()
    run(readme, tmp_path)
    assert readme.measured == ["small-torch-forward"]
    assert all(row.error is None for row in readme.read(path)[0])


def test_a_time_that_varies_is_measured_again(readme, tmp_path, monkeypatch):
    def varies(case, *rest, measured=readme.measure_case):
        return dataclasses.replace(measured(case, *rest), spread=0.4 if case.backend == "torch" else 0.01)

    with monkeypatch.context() as patch:
        patch.setattr(readme, "measure_case", varies)
        path, _ = run(readme, tmp_path)
    assert [readme.is_steady(row) for row in readme.read(path)[0]] == [True] * 3 + [False] + [True] * 2
    readme.measured.clear()
    run(readme, tmp_path)
    assert readme.measured == ["small-torch-forward"]
    assert all(readme.is_steady(row) for row in readme.read(path)[0])


def test_a_file_holds_one_commit(readme, tmp_path):
    run(readme, tmp_path)
    readme.measured.clear()
    run(readme, tmp_path, commit="def")
    assert len(readme.measured) == 8


def test_nothing_begins_when_the_time_is_over(readme, tmp_path):
    path, said = run(readme, tmp_path, minutes=-1)
    assert readme.measured == []
    assert said[-1] == "out of time: 4 of 4 left out; run it again to measure them"
    assert readme.read(path) == ([], [])


def test_every_call_on_a_gpu_has_a_baseline_and_both_of_ours(readme):
    cases = [job for job in readme.jobs(CUDA) if isinstance(job, list)]
    for group in cases:
        assert len({case.workload.name for case in group}) == 1
        for direction in {case.direction for case in group}:
            names = [case.backend for case in group if case.direction == direction]
            assert names[0] in ("fla", "torch")
            assert names[1:] == list(readme.OURS)
    assert len({(case.workload.op, str(case)) for group in cases for case in group}) == sum(map(len, cases))


def test_shares_run_every_case_of_ours_once(readme, monkeypatch):
    compiled, ran = [], []
    tasks = [
        readme.Task("train", "compiled", 8),
        readme.Task("length", "compiled", 2048),
        readme.Task("train", "fla", 8),
    ]
    monkeypatch.setattr(readme.models, "tasks", lambda device: tasks)
    monkeypatch.setattr(readme.models, "first_step", lambda task, device: compiled.append(task))
    monkeypatch.setattr(readme.models, "run_fla_once", lambda device: None)
    monkeypatch.setattr(readme, "_runs_once", lambda case, device: ran.append(case) or True)
    tune = SimpleNamespace(compile_only=lambda share, shares: None)
    monkeypatch.setattr(readme.importlib, "import_module", lambda name: tune)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "as before")
    for share in range(5):
        readme.compile_share(share, 5, CUDA)
    assert compiled == tasks[:2]
    cases = [case for job in readme.jobs(CUDA) if isinstance(job, list) for case in job]
    ours = [str(case) for case in ran if case.backend in readme.OURS]
    assert sorted(ours) == sorted(str(case) for case in cases if case.backend in readme.OURS)
    theirs = [case for case in ran if case.backend == "fla"]
    assert len(theirs) == 3 * sum(case.backend == "fla" for case in cases)  # each share compiles some of each
    assert max(case.workload.sizes.get("T", 0) for case in theirs) == readme.SHORT


def test_too_few_processes_to_prepare(readme, tmp_path, monkeypatch):
    monkeypatch.setattr(readme.models, "tasks", lambda device: [readme.Task("train", "compiled", 8)])
    with pytest.raises(ValueError, match="--prepare is 1; expected at least 2 processes"):
        readme.prepare(1, tmp_path, CUDA, print, 1.0)


def test_another_process_gives_results_errors_and_a_limit(readme, monkeypatch):
    apart = readme.Apart()
    try:
        assert apart(operator.truediv, 6, 3) == 2
        with pytest.raises(ZeroDivisionError):
            apart(operator.truediv, 1, 0)
        monkeypatch.setattr(readme, "LONGEST", 0.05)
        with pytest.raises(TimeoutError, match=r"took longer than 0 s"):
            apart(time.sleep, 30)
        monkeypatch.setattr(readme, "LONGEST", 60)
        assert apart(operator.truediv, 6, 3) == 2
    finally:
        apart.end()


def test_tuning_is_forgotten(script):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    tuned = autotuner.__new__(autotuner)
    tuned.cache = {"key": "config"}
    script("readme").forget_tuning()
    assert tuned.cache == {}
