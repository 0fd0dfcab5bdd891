"""gla bench."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from gla_command import app
from gla_core.bench import results


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--seconds", "0.002", *map(str, arguments)])


def test_one_workload(tmp_path):
    path = tmp_path / "bench.json"
    result = run("--workload", "chunk_gla/short", "--backend", "reference", "--json", path)
    assert result.exit_code == 0, result.output
    assert [(r.workload, r.backend, r.direction, r.error) for r in results.read(path).rows] == [
        ("short", "loop", "forward", None),
        ("short", "reference", "forward", None),
        ("short", "loop", "forward+backward", None),
        ("short", "reference", "forward+backward", None),
    ]
    assert [line.split()[:3] for line in result.output.splitlines() if line.strip().startswith("short")] == [
        ["short", direction, name] for direction in ("forward", "forward+backward") for name in ("loop", "reference")
    ]
    assert "× loop" in result.output
    assert "copies at" in result.output


def test_an_op_without_baselines(tmp_path):
    path = tmp_path / "bench.json"
    result = run("--op", "recurrent_gla_step", "--tag", "odd", "--no-baselines", "--json", path)
    assert result.exit_code == 0, result.output
    rows = results.read(path).rows
    assert {row.workload for row in rows} == {"odd_widths"}  # and not the one without a row
    assert "reference" in {row.backend for row in rows}
    assert "loop" not in {row.backend for row in rows}
    assert "× loop" not in result.output


@pytest.mark.usefixtures("only_reference")
def test_one_direction(tmp_path):
    path = tmp_path / "bench.json"
    result = run("--workload", "online_softmax/small", "--direction", "host", "--backend", "auto", "--json", path)
    assert result.exit_code == 0, result.output
    assert [(row.backend, row.direction) for row in results.read(path).rows] == [
        ("torch", "host"),
        ("reference", "host"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "chunk_glA"], "did you mean 'chunk_gla'"),
        (["--backend", "refrence"], "did you mean 'reference'"),
        (["--tag", "dekode"], "did you mean 'decode'"),
        (["--workload", "shrt"], "did you mean 'short'"),
        (["--direction", "forwards"], "did you mean 'forward'"),
        (["--op", "online_softmax", "--tag", "packed"], "nothing to measure"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_bad_usage(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--workload", "chunk_gla/short", "--plot", tmp_path)
    assert result.exit_code == 2
    assert "plots need matplotlib" in result.output
    assert "copies at" not in result.output
