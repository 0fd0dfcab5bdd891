"""The command that measures the committed results."""

from __future__ import annotations

import pytest
import torch

from gla_core.bench import results
from gla_core.dispatch.backend import OpCall


@pytest.fixture
def evidence(script):
    return script("evidence")


def test_it_measures_times(evidence, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "as before")
    monkeypatch.setattr(evidence.times.measure, "copy_bandwidth", lambda device, budget: 1e9)
    nothing = ["--workloads", "decode_b1", "--directions", "no_such"]
    evidence.main(["times", "--out", str(tmp_path), "--device", "cpu", "--cache", str(tmp_path / "cache"), *nothing])
    (path,) = tmp_path.glob("baseline-*.json")
    assert results.read(path).rows == ()
    assert "there is no backend 'gla_fla' here" in capsys.readouterr().out


def test_it_measures_what_auto_picks(evidence, tmp_path, capsys, monkeypatch):
    call = OpCall(op="online_softmax", device=torch.device("cpu"), dtype=torch.float32, dims={"rows": 2, "columns": 3})
    monkeypatch.setattr(evidence.selection, "calls", lambda device: iter([("grid", call)]))
    evidence.main(["selection", "--out", str(tmp_path), "--device", "cpu", "--seconds", "0.003"])
    assert (tmp_path / "selection-cpu.json").exists()
    assert "grid: 1 calls of 1 shapes; the pick is within 5% of the fastest on" in capsys.readouterr().out


def test_it_asks_what_to_measure(evidence, capsys):
    with pytest.raises(SystemExit):
        evidence.main([])
    assert "{times,selection,shapes,readme}" in capsys.readouterr().err


def test_it_measures_or_prepares_the_readme(evidence, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(evidence.readme, "prepare", lambda processes, cache, *rest: asked.append((processes, cache)))
    monkeypatch.setattr(evidence.readme, "run", lambda out, cache, *rest: asked.append((out, cache)))
    arguments = ["readme", "--device", "cpu", "--cache", str(tmp_path / "cache")]
    evidence.main([*arguments, "--prepare", "3"])
    evidence.main([*arguments, "--out", str(tmp_path)])
    assert asked == [(3, tmp_path / "cache"), (tmp_path, tmp_path / "cache")]
