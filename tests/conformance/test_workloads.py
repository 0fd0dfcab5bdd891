"""The workloads of the kit: which arguments their calls give together, and whether the calls are legal."""

import itertools

import pytest

import gla_core as gla
from gla_core.conformance.calls import call_arguments, results
from gla_core.conformance.cases import FORWARDS, cases
from gla_core.conformance.facts import forms, is_empty
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import Role

ALTERNATIVES = (
    {"with gates per key", "with gates per head", "with constant gates", "without g"},
    {"with grouped queries", "with groups of value heads"},
)
"""Forms of which a call has one at most."""


def cases_of(op):
    return [case for case in cases(get("reference"), "cpu", op, dtypes="one") if not is_empty(case.describe())]


def combined(case):
    """Returns what a call gives: optional arguments, groups of heads, and gates of a form, or none."""
    each = forms(case.describe(), case.workload.sizes)
    return {form for form in each if form == "without g" or (form.startswith("with ") and form != "with g")}


@pytest.mark.parametrize("op", FORWARDS)
def test_every_optional_argument_is_given_together_with_every_other(op):
    """A kernel that is right for each argument alone may be wrong for two of them."""
    together = [combined(case) for case in cases_of(op)]
    each = sorted(set().union(*together))
    # The parameters of gates are given by test_projected_inputs, which takes a call with all other arguments, too.
    arguments = [a for a in ABSTRACT_OPS[op].arguments if a.type == "Tensor?" and a.role is not Role.GATE_PARAMETER]
    assert {f"with {a.name}" for a in arguments if a.name != "g"} <= set(each)
    pairs = (set(pair) for pair in itertools.combinations(each, 2))
    possible = [pair for pair in pairs if not any(pair <= forms for forms in ALTERNATIVES)]
    assert [pair for pair in possible if not any(pair <= forms for forms in together)] == []


@pytest.mark.parametrize("op", [op for op in FORWARDS if ABSTRACT_OPS[op].has(Role.OFFSETS)])
def test_packed_sequences_are_many_and_begin_anywhere(op):
    facts = {fact for case in cases_of(op) for fact in case.facts()}
    assert facts >= {f"with {what}" for what in ("rows before the first sequence", "more than 16 sequences")}


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("op", FORWARDS)
def test_every_call_is_legal(op, monkeypatch):
    """GLA_CHECK=1 raises, for example, for a checkpoint that is no multiple of 64 tokens, and a slot written twice."""
    monkeypatch.setenv("GLA_CHECK", "1")
    gla.reload_environment()
    for case in cases_of(op):
        results(op, call_arguments(case), "reference")
