"""Deliberately wrong backends: each is the reference with one bug of the files in bugs/, which the kit must name."""

import json
from pathlib import Path

import pytest
import torch
from _pytest.runner import runtestprotocol

import gla_core as gla
from gla_core import conformance
from gla_core.conformance.diagnosis import diagnosis
from gla_core.conformance.run import run
from gla_core.dispatch.backend import GATES, Backend, Capabilities
from tests.conformance.bugs import chunk_gla, delta, pools, softmax, ssd, steps  # noqa: F401 -- they plant bugs
from tests.conformance.bugs.plant import BUGS, REFERENCE

FORMS = ("short", "last_chunk_partial", "grouped", "per_head", "per_head_grouped", "constant", "grouped_values")
"""Workloads with each form of gates, and with and without groups of heads."""
NAMING = ("AssertionError", "assert", "gla_core.dispatch.errors.BackendError")
"""Beginnings of the messages of a case that names a bug; the core itself refuses results of a wrong form."""


def planted(op, function, claims):
    dtypes = frozenset({torch.float32, torch.bfloat16})
    can = Capabilities(dtypes=dtypes, checkpoints=True, gates=frozenset(GATES), grouped_values=True, **claims)
    return Backend("planted", "0", {**REFERENCE, op: function}, can)


class Judge:
    """A pytest plugin that collects the kit once, and then runs a case on each wrong backend in turn."""

    def __init__(self, collected_on):
        self._collected_on = collected_on
        self.with_bug, self.without = {}, {}

    def pytest_runtestloop(self, session):
        self._collected_on.unregister()
        for bug in BUGS:
            item = _item(session, bug.op, bug.case)
            self.with_bug[bug.name] = self._run(item, planted(bug.op, bug.function, bug.claims))
        for op, case, swapped in {(bug.op, bug.case, bug.claims.get("swapped_states", False)) for bug in BUGS}:
            right = planted(op, REFERENCE[op], {"swapped_states": swapped})
            self.without[op, case] = self._run(_item(session, op, case), right)
        return True

    def _run(self, item, backend):
        item.user_properties.clear()
        with gla.register(backend):
            setup, call, teardown = runtestprotocol(item, log=False)
        assert (setup.outcome, teardown.outcome) == ("passed", "passed")
        return call


def _item(session, op, case):
    items = [item for item in session.items if item.name.startswith(case) and item.callspec.params["case"].op == op]
    return items[0]


def over_budget(report):
    errors = [value for name, value in report.user_properties if name == "error"]
    return {error["quantity"] for error in errors if not error["error"] <= error["budget"]}


def test_every_bug_is_named_and_without_it_the_same_cases_pass():
    judge = Judge(gla.register(planted("chunk_gla_fwd", REFERENCE["chunk_gla_fwd"], {})))
    settings = ("-c", str(Path(conformance.__file__).with_name("pytest.ini")))
    quick = ("--tb=native", "-p", "no:logging")  # other tracebacks show source, which takes longer than the cases
    pytest.main(["-q", *settings, *quick, "--pyargs", "gla_core.conformance", "--gla-backend", "planted"], [judge])
    assert judge.with_bug.keys() == {bug.name for bug in BUGS}
    messages = {name: report.longrepr and report.longrepr.reprcrash.message for name, report in judge.with_bug.items()}
    assert {name: text for name, text in messages.items() if not (text or "").startswith(NAMING)} == {}
    quantities = {bug.name: bug.over for bug in BUGS if bug.over is not None}
    assert {name: over_budget(judge.with_bug[name]) for name in quantities} == quantities
    assert {case: report.longreprtext for case, report in judge.without.items() if not report.passed} == {}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gate_of_the_head_before", "with gates per head"),
        ("constant_gate_once_a_chunk", "with constant gates"),
        ("value_heads_read_key_heads_in_turn", "with groups of value heads"),
        ("dk_of_a_head_by_one_of_its_value_heads", "with groups of value heads"),
        ("gradient_of_a_gate_per_head_by_one_key", "with gates per head"),
    ],
)
def test_the_diagnosis_names_the_form_that_is_wrong(name, form, tmp_path):
    (bug,) = [bug for bug in BUGS if bug.name == name]
    module = "test_values" if bug.op == "chunk_gla_fwd" else "test_gradients"
    cases = " or ".join(f"{module}[{bug.op}-{workload}-float32" for workload in FORMS)
    report = tmp_path / "cases.jsonl"
    with gla.register(planted(bug.op, bug.function, bug.claims)):
        run("planted", report=str(report), module=module, select=cases)
    lines = diagnosis([json.loads(line) for line in report.read_text().splitlines()], "gla conformance planted")
    (common,) = [line for line in lines if line.startswith("in common")]
    assert form in common


def test_a_backend_that_refuses_all_it_declares_does_not_pass(tmp_path):
    backend = Backend("planted", "0", REFERENCE, Capabilities(), supports=lambda call: "not today")
    with gla.register(backend):
        code = run("planted", report=str(tmp_path / "cases.jsonl"), module="test_refusals")
    assert code == 1
    rows = map(json.loads, (tmp_path / "cases.jsonl").read_text().splitlines())
    failed = {row["op"] for row in rows if row["outcome"] == "failed"}
    assert failed == set(REFERENCE)
