"""`gla conformance`: run the kit on a backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gla_core.dispatch import registry

PASSED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def run(
    name: str,
    device: str | None = None,
    report: str | None = None,
    select: str | None = None,
    commit: str | None = None,
    module: str | None = None,
    verbose: bool = False,
    options: Sequence[str] = (),
) -> int:
    """Judge a backend, printing as pytest does, and then the failures, a line each, a table and the verdict.

    Args:
        name: a backend. device: cpu or cuda; cpu by default, unless the backend does not run there.
        report: file for the JSON report. commit: source revision to note in it.
        select: an expression over names of tests, workloads and dtypes, as pytest's -k.
        module: one of the kit's, such as "test_chunk_gla". verbose: a line per case.
        options: further ones of pytest, such as ("-n", "6").

    Returns:
        0 every case passed or is open, 1 some failed, 2 the device does not fit or nothing was selected, 130
        interrupted.

    Raises:
        UnknownBackendError: no such backend.
    """
    registry.get(name)
    asked = {
        "--gla-backend": name,
        "--gla-device": device,
        "--gla-report": report,
        "--gla-commit": commit,
        "-k": select,
    }
    arguments = [text for option, value in asked.items() if value for text in (option, value)]
    # The kit's own settings, so that those of the folder it is run in do not change it.
    settings = str(Path(__file__).with_name("pytest.ini"))
    how = ["-v" if verbose else "-q", "--tb=no", "-rN", "--disable-warnings", "-p", "pytest_gla_core", "-c", settings]
    tests = "gla_core.conformance" + (f".{module}" if module else "")
    code = pytest.main([*how, "--pyargs", tests, *arguments, *options])
    known = {pytest.ExitCode.OK: PASSED, pytest.ExitCode.TESTS_FAILED: FAILED, pytest.ExitCode.INTERRUPTED: INTERRUPTED}
    return known.get(pytest.ExitCode(code), USAGE)
