"""Calls that the capabilities exclude are refused with a reason and not computed; declared calls are not refused."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import torch_op
from gla_core.conformance.cases import cases, excluded


def test_refused(backend, case, record_property):
    """A call under a request for this backend alone raises NoBackendError with the reason."""
    reason = excluded(backend, case)
    record_property("refusal", reason)
    function, args = torch_op(case, backend.name)
    if case.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(gla.NoBackendError) as refusal:
            function(*args)
    finally:
        if case.deterministic:
            torch.use_deterministic_algorithms(False)
    assert reason in str(refusal.value)


def test_a_declared_op_is_not_always_refused(backend, device, declared_op):
    """Without this test, a backend whose supports() refuses every workload would pass without computing anything."""
    refusals = [backend.refusal(case.describe()) for case in cases(backend, device, declared_op)]
    assert None in refusals, f"every case of {declared_op} is refused: {refusals[:1]}"
