"""gla bench."""

import io
import re
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import gla_core as gla
from gla_core.bench import measure, results, suite
from gla_core.bench import run as bench_run
from gla_core.bench.suite import Row, is_empty
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend
from gla_core.workloads.named import select
from gla_tools.command import app


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fakes the bandwidth, which is not tested here and slow to measure, and the load of the machine."""
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


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
    odd = [w for w in select("recurrent_gla_step", ["odd"]) if not is_empty(w)]  # one without rows is left out
    assert "odd_widths" in {row.workload for row in rows} == {w.name for w in odd}
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
    """A backend that implements only chunk_gla_fwd, with a predicted time below all others."""
    forward = registry.get("reference").ops["chunk_gla_fwd"]
    backend = Backend("half", "1", {"chunk_gla_fwd": forward}, cost=lambda _: 0.0)
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
    refused = [line for line in result.output.splitlines() if line.startswith(("nobody", "half: does"))]
    assert refused == [
        "nobody: is out of order (chunk_gla forward, forward+backward; 2 workloads)",
        "half: does not implement chunk_gla_bwd; it implements chunk_gla_fwd, chunk_gla_pool, chunk_ssd_fwd "
        "(chunk_gla forward+backward; 2 workloads)",
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
        assert len(line) <= 60 or ": " in line  # without a terminal sentences are not wrapped
        assert not line.strip().startswith("one") or line.split()[0] == "one_more_than_a_chunk"
    header = [line.split() for line in result.output.splitlines() if "backend" in line]
    assert header == [["workload", "backend", "time", *more] for more in (("spread", "×", "loop"), ("×", "loop"))]


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
        ([*SHORT, "--seconds", "inf"], "inf is not a finite number"),
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


def test_the_columns_are_explained():
    result = run("--workload", "chunk_gla/short", "--backend", "reference", "--direction", "forward")
    explained = [line for line in result.output.splitlines() if ": " in line]
    assert "× loop: how many times as fast as the recurrence in PyTorch, one token at a time" in explained
    assert {line.split(":")[0] for line in explained} >= {"time", "spread", "× loop"}
    assert "GB/s:" not in result.output  # GB/s means nothing on a CPU
    assert "of floor" not in result.output


def test_a_busy_machine_is_named(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for load, busy in ((1.9, False), (2.1, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        said = "this machine was busy in the last minute: load average 2.1 on 4 cores; if other programs still run"
        assert (said in run(*SHORT, "--direction", "forward").output) == busy


def row(workload, backend, seconds, spread):
    gpu_fields = {"gigabytes_per_second": 1e-6 / seconds, "floor_fraction": 1e-4 / seconds}
    what = {"op": "chunk_gla", "direction": "forward", "workload": workload, "backend": backend}
    return Row(**what, **gpu_fields, seconds=seconds, spread=spread)


ROWS = [
    row("short", "fla", 2e-3, 0.01),
    row("short", "mine", 1e-3, 0.3),
    row("grouped", "mine", 3e-3, 0.02),
    row("grouped", "yours", 4e-3, None),
]


@pytest.fixture
def printed(monkeypatch):
    """A function: `printed(device, terminal)` returns the printed rows."""
    monkeypatch.delenv("NO_COLOR")

    def printed(device, terminal):
        colors = "standard" if terminal else None
        console = Console(file=io.StringIO(), force_terminal=terminal, color_system=colors, width=200)
        bench_run.print_rows(suite.with_ratios(ROWS), console, torch.device(device))
        return console.file.getvalue()

    return printed


def test_a_gpu_has_its_memory_floor(printed):
    assert "GB/s: the least number of bytes" in printed("cuda", False)
    assert "of floor" not in printed("cpu", False)


def test_piped_rows_name_their_workload_and_those_of_a_terminal_once(printed):
    names = {terminal: re.findall(r"(short|grouped)(?=.* ms)", printed("cpu", terminal)) for terminal in (False, True)}
    assert names == {False: ["short", "short", "grouped", "grouped"], True: ["short", "grouped"]}


def test_the_fastest_of_each_workload_is_green(printed):
    green = [line for line in printed("cpu", True).splitlines() if "\x1b[32m" in line]
    assert [re.search("1.00 ms|3.00 ms", line)[0] for line in green] == ["1.00 ms", "3.00 ms"]
    assert "\x1b" not in printed("cpu", False)


def test_unsteady_times_are_counted(printed):
    assert "1 of 4 times have a spread above 25%: other programs kept" in printed("cpu", False)
