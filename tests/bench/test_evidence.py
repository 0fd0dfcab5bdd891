"""The command that measures the committed results, and the parts that it measures."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from gla_core.bench import measure
from gla_core.dispatch.backend import OpCall

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def evidence(script, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLA_CACHE_RESULTS"):
        monkeypatch.setenv(name, "as before")
    return script("evidence")


def test_it_measures_parts_into_files_of_the_device(evidence, tmp_path, capsys, monkeypatch):
    class Here:
        def __call__(self, function, *arguments):
            return function(*arguments)

        def end(self):
            pass

    monkeypatch.setattr(evidence.record, "Apart", Here)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 4e12)
    options = [f"--out={tmp_path}", f"--cache={tmp_path}", "--device=cpu", "--seconds=0.002", "--commit=abc"]
    evidence.main(["run", *options, "--parts=op,mamba2_scan,precision"])
    rows = {path.stem: evidence.record.read(path) for path in tmp_path.glob("*/*.jsonl")}
    assert rows.keys() == {"op", "mamba2_scan", "precision"}
    assert not [row.error for part in rows.values() for row in part if row.error]
    assert {row.commit for part in rows.values() for row in part} == {"abc"}
    first, second = rows["op"][:2]
    assert (first.who, second.who, second.baseline) == ("loop", "gla-core", "loop")
    assert second.facts["backend"] in ("reference", "parallel_scan")
    assert first.call == second.call == "`chunk_gla` forward: 2 sequences of 64 tokens, 2 heads (K 32, V 32)"
    errors = [x for row in rows["precision"] for x in row.facts.values()]
    assert 0 < max(errors) < 1e-5
    assert "precision: " in capsys.readouterr().out
    evidence.main(["run", *options, f"--out={tmp_path / 'some'}", "--parts=op", "--calls=soft.*ward"])
    (path,) = (tmp_path / "some").glob("*/op.jsonl")
    assert {row.call for row in evidence.record.read(path)} == {"`online_softmax` forward: 5 rows of 33"}


def test_it_measures_calls_of_models(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 4e12)
    (job,) = (
        job for job in evidence.jobs_of("model_calls", CPU, 4e12, 0.002) if job.rows[0][0].startswith("GLA 1.3B: ")
    )
    assert job.rows == [(f"GLA 1.3B: {way}", "gla-core", None) for way in evidence.model_calls.models.WAYS]
    fields = job.measure()
    assert [row["error"] for row in fields] == [None] * 3
    assert all(row["seconds"] > 0 < row["facts"]["floors"] for row in fields)
    assert all(row["facts"]["backend"] for row in fields)
    assert all(row["facts"]["eager"] for row in fields)  # there are no CUDA graphs here


def test_it_measures_what_auto_picks(evidence, tmp_path, capsys, monkeypatch):
    call = OpCall(op="online_softmax", device=CPU, dtype=torch.float32, dims={"rows": 2, "columns": 3})
    monkeypatch.setattr(evidence.selection, "calls", lambda device: iter([("grid", call)]))
    evidence.main(["selection", "--out", str(tmp_path), "--device", "cpu", "--seconds", "0.003"])
    assert (tmp_path / "selection-cpu.json").exists()
    assert "grid: 1 calls of 1 shapes; the pick is within 5% of the fastest on" in capsys.readouterr().out


def test_it_asks_what_to_measure(evidence, capsys):
    with pytest.raises(SystemExit):
        evidence.main([])
    assert "{run,selection}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evidence.main(["run", "--cache=x", "--parts=op,no_such"])
    assert "unknown no_such" in capsys.readouterr().err


def test_it_prepares_the_parts_that_it_will_measure(evidence, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        evidence.record, "prepare", lambda share, processes, say, seconds: asked.append((share, processes))
    )
    evidence.main(["run", "--device=cpu", f"--cache={tmp_path}", "--parts=readme", "--prepare=3"])
    ((share, processes),) = asked
    assert (share.args, processes) == ((evidence.README_PARTS, CPU, ""), 3)


def test_every_call_of_the_headline_is_measured(evidence, script, monkeypatch):
    monkeypatch.setattr(evidence.mamba_scan, "has_mamba_ssm", lambda: True)
    planned = {
        (part, call)
        for part in evidence.README_PARTS
        for job in evidence.jobs_of(part, CUDA, 4e12, 1.0)
        for call, _, baseline in job.rows
        if baseline is not None
    }
    assert planned >= {(part, call) for part, call, _ in script("readme_tables").HEADLINE}


def test_rows_of_a_part_are_named_once_and_have_their_baseline(evidence, monkeypatch):
    monkeypatch.setattr(evidence.mamba_scan, "has_mamba_ssm", lambda: True)
    for part in evidence.PARTS:
        rows = [row for job in evidence.jobs_of(part, CUDA, 4e12, 1.0) for row in job.rows]
        names = [(call, who) for call, who, _ in rows]
        assert len(set(names)) == len(names) > 0
        assert {(call, baseline) for call, _, baseline in rows if baseline} <= set(names)


def test_shares_run_every_call_of_ours_once_and_compile_some_of_each_kernel_of_fla(evidence, monkeypatch):
    calls, ran = evidence.op_calls, []
    monkeypatch.setattr(calls, "run_once", lambda case, device: ran.append(case))
    monkeypatch.setitem(__import__("sys").modules, "gla_fla", SimpleNamespace())
    tune = SimpleNamespace(compile_only=lambda share, shares: None)
    monkeypatch.setitem(__import__("sys").modules, "gla_fla.tune", tune)
    for share in range(3):
        calls.compile_share(share, 3, CUDA)
    cases = [str(case) for call in calls.CALLS for case in calls._cases(call) if case.backend == "auto"]
    assert sorted(str(case) for case in ran if case.backend == "auto") == sorted(cases)
    theirs = [case for case in ran if case.backend == "fla"]
    assert len(theirs) % 3 == 0
    assert max(case.workload.sizes.get("T", 0) for case in theirs) == calls.SHORT
    widths = {(c.workload.sizes["K"], c.workload.sizes["V"]) for c in calls.CALLS if c.baseline == "fla"}
    assert {(case.workload.sizes["K"], case.workload.sizes["V"]) for case in theirs} == widths


def test_calls_of_models_have_a_row_for_the_peer_and_are_compiled_once(evidence, monkeypatch):
    calls, ran, launched = evidence.model_calls, [], []
    monkeypatch.setattr(
        calls.models, "peer_of", lambda model: "mamba_ssm" if model.function == "mamba_chunk_scan_combined" else "fla"
    )
    rows = [row for job in evidence.jobs_of("model_calls", CUDA, 4e12, 1.0) for row in job.rows]
    ours = {call for call, who, baseline in rows if who == "gla-core" and baseline in ("fla", "mamba_ssm")}
    assert len(ours) == len(rows) / 2 == 3 * len(calls.distinct())
    monkeypatch.setattr(calls, "attempt", lambda call: ran.append(call.args[:3]))
    tune = SimpleNamespace(compile_only=lambda share, shares: launched.append((share, shares)))
    monkeypatch.setitem(__import__("sys").modules, "gla_fla", SimpleNamespace())
    monkeypatch.setitem(__import__("sys").modules, "gla_fla.tune", tune)
    for share in range(3):
        calls.compile_share(share, 3, CUDA)
    assert launched == [(0, 3), (1, 3), (2, 3)]
    run_once = [(model.name, way) for model, way, who in ran if who == "gla-core"]
    assert len(set(run_once)) == len(run_once) == 2 * len(calls.distinct())
    assert {model.sizes["T"] for model, _, who in ran if who == "fla"} == {calls.SHORT}


def test_steps_of_mamba_ssm_are_ours(evidence):
    """Both take the arguments that the benchmark makes: one token of each sequence, as the layer expands them."""
    scan = evidence.mamba_scan
    sizes = scan.Scan("small", 3, 1, 1, 2, 8, 4)
    arguments = scan.step_inputs(sizes, CPU)
    state = arguments["state"].clone()
    out = scan.make_call("gla-core", "step in a CUDA graph", sizes, CPU)()
    assert out.shape == (3, 2, 4)
    assert arguments["A"].shape == (2, 4, 8)
    assert state.shape == (3, 2, 4, 8)
    made = [scan.make_call("gla-core", way, sizes._replace(T=5), CPU) for way in scan.DIRECTIONS]
    assert made[0]().shape == (3, 5, 2, 4)
    expected = scan.scan_inputs(sizes._replace(T=5), CPU).values()
    assert [tuple(x.shape) for x in made[1]()] == [tuple(x.shape) for x in expected]


def test_calls_in_words_differ(evidence):
    words = [
        evidence.op_calls.call_in_words(call, direction)
        for call, direction in itertools.chain.from_iterable(
            itertools.product([call], call.directions) for call in evidence.op_calls.CALLS
        )
    ]
    assert len(set(words)) == len(words)
