"""gla bench."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

import gla_core as gla
from gla_command import app
from gla_core.bench import measure, results, suite
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The bandwidth is no part of what is tested here, and takes longest."""
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--seconds", "0.001", *map(str, arguments)])


@pytest.mark.parametrize("op", ["chunk_gla", "chunk_gla_fwd"])
def test_one_workload(tmp_path, op):
    path = tmp_path / "bench.json"
    result = run("--op", op, "--workload", "short", "--backend", "reference", "--json", path)
    assert result.exit_code == 0, result.output
    assert [(r.workload, r.backend, r.direction, r.error) for r in results.read(path).rows] == [
        ("short", "loop", "forward", None),
        ("short", "reference", "forward", None),
        ("short", "loop", "forward+backward", None),
        ("short", "reference", "forward+backward", None),
    ]
    lines = [line.split() for line in result.output.splitlines()]
    assert ["chunk_gla,", "forward"] in lines
    assert ["chunk_gla,", "forward+backward"] in lines
    assert [line[:2] for line in lines if line and line[0] == "short"] == [
        ["short", "loop"],
        ["short", "reference"],
    ] * 2
    assert "× loop" in result.output
    assert "copies at 10 GB/s; 4 measurements" in result.output


def test_an_op_without_baselines(tmp_path):
    path = tmp_path / "bench.json"
    wanted = ("--op", "recurrent_gla_step", "--tag", "odd", "--backend", "reference")
    result = run(*wanted, "--no-baselines", "--json", path)
    assert result.exit_code == 0, result.output
    rows = results.read(path).rows
    assert {row.workload for row in rows} == {"odd_widths"}  # and not the one without a row
    assert {row.backend for row in rows} == {"reference"}
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


SHORT = ("--workload", "chunk_gla/short", "--no-baselines")


@pytest.fixture
def half():
    """A backend that implements chunk_gla_fwd alone, and is predicted to be quicker than any other."""
    backend = Backend(
        "half", "1", {"chunk_gla_fwd": registry.get("reference").ops["chunk_gla_fwd"]}, cost=lambda _: 0.0
    )
    with gla.register(backend):
        yield


@pytest.mark.parametrize("request_", ["auto", "half,reference", "chunk_gla_fwd=half;*=reference"])
def test_a_row_names_the_backends_that_ran(half, request_):
    result = run(*SHORT, "--backend", request_)
    assert result.exit_code == 0, result.output
    named = [line.split()[1] for line in result.output.splitlines() if line.strip().startswith("short")]
    assert named == ["half", "half+reference"]


def test_a_refusal_stands_once_below_the_tables(half):
    nobody = Backend("nobody", "1", registry.get("reference").ops, supports=lambda call: "is out of order")
    with gla.register(nobody):
        wanted = ("--op", "chunk_gla", "--workload", "short", "--workload", "one_token", "--no-baselines")
        result = run(*wanted, "--backend", "half", "--backend", "nobody")
    assert result.exit_code == 0
    assert result.output.splitlines()[-2:] == [
        "nobody: is out of order (chunk_gla forward, forward+backward; 2 workloads)",
        "half: does not implement chunk_gla_bwd; it implements chunk_gla_fwd (chunk_gla forward+backward; 2 workloads)",
    ]


def test_nobody_could_be_timed(half):
    assert run(*SHORT, "--backend", "half", "--direction", "forward+backward").exit_code == 1


def test_an_interrupt_is_no_traceback(monkeypatch):
    def measure_case(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "measure_case", measure_case)
    result = run(*SHORT)
    assert (result.exit_code, result.stderr) == (130, "gla bench: interrupted\n")


def test_a_narrow_terminal_shows_names_and_times(monkeypatch, half):
    monkeypatch.setenv("COLUMNS", "60")
    result = run("--workload", "chunk_gla/one_more_than_a_chunk", "--backend", "half,reference")
    for line in result.output.splitlines():
        assert len(line) <= 60
        assert not line.strip().startswith("one") or line.split()[0] == "one_more_than_a_chunk"
    header = [line.split() for line in result.output.splitlines() if "workload" in line]
    assert header == [["workload", "backend", "time", *more] for more in (("of", "floor", "×", "loop"), ("×", "loop"))]


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
        ([*SHORT, "--json", "/"], "--json / is a folder; name a file"),
        ([*SHORT, "--plot", "/dev/null"], "--plot /dev/null is no folder; name another path"),
        ([*SHORT, "--seconds", "inf"], "inf is no finite number"),
    ],
)
def test_bad_usage(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--workload", "chunk_gla/short", "--plot", tmp_path)
    assert result.exit_code == 2
    assert "plots need matplotlib" in result.output
    assert "copies at" not in result.output
