"""Runs the kit on a backend, for the command `gla conformance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gla_core.dispatch import registry

PASSED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_HERE = Path(__file__).parent


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
    """Runs the kit on a backend; prints pytest's output, the failures (a line each), a table and the verdict.

    Args:
        name: name of a backend. device: cpu or cuda. None means cpu, or cuda if the backend does not run on cpu.
        report: path of the JSON report. commit: source revision to note in it.
        select: an expression over names of tests, workloads and dtypes, like pytest's -k.
        module: a module of the kit, such as "test_values". verbose: whether to print a line per case.
        options: further options for pytest, such as ("-n", "6").

    Returns:
        0 if every case passed or is open, 1 if a case failed, 2 if the device does not fit or nothing was selected, 130
        if interrupted.

    Raises:
        UnknownBackendError: no backend has this name.
    """
    registry.get(name)
    asked = {"--gla-backend": name, "--gla-device": device, "--gla-report": report}
    asked |= {"--gla-commit": commit, "-k": select}
    arguments = [text for option, value in asked.items() if value for text in (option, value)]
    # The kit's own settings and its path: settings and a conftest.py of the current folder have no effect. If pytest is
    # given the name of a package, it loads test*/conftest.py of the current folder.
    how = [
        "-v" if verbose else "-q",
        "--tb=no",
        "-rN",
        "--disable-warnings",
        "-p",
        "no:logging",  # it takes a tenth of the time, and tracebacks are not shown
        "-p",
        "no:unraisableexception",  # it collects garbage twice, for warnings that are not shown
        "-p",
        "no:benchmark",  # pytest-benchmark makes a folder .benchmarks
        "-p",
        "gla_tools.pytest_plugin",
        "-c",
        str(_HERE / "pytest.ini"),
    ]
    tests = _HERE if module is None else _HERE / f"{module}.py"
    code = pytest.main([*how, str(tests), *arguments, *options])
    known = {pytest.ExitCode.OK: PASSED, pytest.ExitCode.TESTS_FAILED: FAILED, pytest.ExitCode.INTERRUPTED: INTERRUPTED}
    return known.get(pytest.ExitCode(code), USAGE)
