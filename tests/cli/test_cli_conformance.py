"""gla conformance: its output. The results of the kit are tested in tests/conformance."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gla_core as gla
from gla_core.dispatch.backend import Backend

CHOSEN = ("-k", "(test_values[ or test_inputs) and [online_softmax-small-float32")


def conformance(run, *arguments):
    with gla.register(Backend("wrong", "0", {"online_softmax": lambda x, dim: 1.02 * x.softmax(dim)})):
        return run("conformance", *arguments)


def test_failures_are_a_line_each_and_the_verdict_comes_last(run, tmp_path):
    report = tmp_path / "new" / "report.json"
    result = conformance(run, "wrong", *CHOSEN, "--report", report)
    assert result.exit_code == 1
    assert json.loads(report.read_text())["counts"]["failed"] == 1
    lines = result.stdout.rstrip().splitlines()
    (failed,) = [line for line in lines if line.startswith("FAILED")]
    reason = "y: relative error 0.02, allowed 1e-5"
    assert failed == f"FAILED test_values.py::test_values[online_softmax-small-float32]: {reason}"
    command = 'gla conformance wrong -k "test_values.py and test_values[online_softmax-small-float32]" -- --tb=short'
    assert [line.split(maxsplit=1)[0] for line in lines[-4:-1]] == ["smallest", "factor", "to"]
    assert lines[-2].endswith(command)
    assert [line.split() for line in lines[-7:-4]] == [
        ["online_softmax", "cases", "failed", "open", "error/budget"],
        ["values", "1", "1", "-", "2000.00"],
        ["inputs", "unchanged", "1", "-", "-", "0.00"],
    ]
    assert lines[-1] == "wrong FAILED 1 of 2 cases"
    assert "Error" not in result.output
    assert "site-packages" not in result.output


def test_what_follows_two_dashes_is_pytests(run):
    result = conformance(run, "wrong", *CHOSEN, "--", "--tb=short", "-rf", "--maxfail=1")
    assert result.exit_code == 1
    assert "AssertionError: y: relative error 0.02" in result.output
    assert sum(line.startswith("FAILED") for line in result.output.splitlines()) == 1  # pytest's, and not ours too
    assert result.output.endswith("wrong FAILED 1 of 1 cases\n")


@pytest.mark.slow
def test_it_runs_in_any_folder_and_in_other_processes_and_leaves_nothing(tmp_path):
    """Neither tests/conftest.py of a project nor its settings of pytest have an effect."""
    project, report = tmp_path / "project", tmp_path / "report.json"
    (project / "tests").mkdir(parents=True)
    (project / "tests" / "conftest.py").write_text("import a_package_that_is_not_installed\n")
    (project / "pytest.ini").write_text("[pytest]\naddopts = --an-option-of-nobody\n")
    before = sorted(project.rglob("*"))
    gla_command = (sys.executable, "-c", "from gla_tools.command import main; main()")
    command = [*gla_command, "conformance", "reference", *CHOSEN, "--report", str(report), "--", "-n", "1"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("reference passed 2 of 2 cases\n")
    assert json.loads(report.read_text())["counts"]["passed"] == 2
    assert sorted(project.rglob("*")) == before


def test_what_its_options_need_comes_with_its_extra():
    """The command `gla conformance NAME -- -n 4`, which the documentation prints, needs pytest-xdist."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    required = project["optional-dependencies"]["conformance"]
    assert {requirement.split(">")[0] for requirement in required} == {"pytest", "pytest-xdist"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["refrence"], "gla conformance: unknown backend 'refrence'; did you mean 'reference'?"),
        (["reference", "--report", "/dev/null/report.json"], "--report /dev/null/report.json cannot be written: Not a"),
        (["reference", "--device", "tpu"], "the device is 'tpu'; expected cpu or cuda"),
        (["reference", "-k", "no_test_of_this_name"], " deselected"),
    ],
)
def test_bad_usage(run, arguments, message, capfd):
    result = run("conformance", *arguments)
    assert result.exit_code == 2
    assert message in result.output + "".join(capfd.readouterr())
