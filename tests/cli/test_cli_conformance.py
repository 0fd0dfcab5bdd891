"""gla conformance: its output. The results of the kit are tested in tests/conformance."""

from __future__ import annotations

import json

import pytest

import gla_core as gla
from gla_core.dispatch.backend import Backend

CHOSEN = ("-k", "test_online_softmax and (test_values or test_inputs) and small and float32")


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
    assert failed == "FAILED test_online_softmax.py::test_values[small-float32]: y: relative error 0.02, allowed 1e-5"
    command = 'gla conformance wrong -k "test_online_softmax.py and test_values[small-float32]" -- --tb=short'
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["refrence"], "gla conformance: unknown backend 'refrence'; did you mean 'reference'?"),
        (["reference", "--report", "/dev/null/report.json"], "--report /dev/null/report.json cannot be written: Not a"),
    ],
)
def test_bad_usage(run, arguments, message, capfd):
    result = run("conformance", *arguments)
    assert result.exit_code == 2
    assert message in result.output + "".join(capfd.readouterr())
