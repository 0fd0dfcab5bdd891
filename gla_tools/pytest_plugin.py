"""A pytest plugin with the options and the report of the conformance kit.

pytest loads plugins at the start of every run, so this module imports neither torch nor gla_core before a run asks for
the kit, which is `gla_core.conformance`. The report is registered here because with pytest-xdist (`-n`) only the
workers load the kit, and only the controller receives every outcome.
"""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("gla_core", "conformance of gla_core backends (pytest --pyargs gla_core.conformance)")
    group.addoption("--gla-backend", metavar="NAME", help="the backend to test")
    group.addoption(
        "--gla-device", metavar="DEVICE", help="cpu or cuda (default: cpu, or cuda if the backend cannot run on a CPU)"
    )
    group.addoption(
        "--gla-report", metavar="FILE", help="write a JSON summary; if it ends in .jsonl, a line for every case"
    )
    group.addoption("--gla-commit", metavar="ID", help="source revision to record in the report")


def pytest_configure(config: Any) -> None:
    """Checks the options before anything is collected, and starts the report."""
    asks = any("gla_core.conformance" in argument.replace("/", ".").replace("\\", ".") for argument in config.args)
    if not asks and not config.getoption("gla_backend"):
        return
    from gla_core.conformance.report import Report
    from gla_core.conformance.subject import subject

    backend, device = subject(config)
    if not hasattr(config, "workerinput"):
        path, commit = config.getoption("gla_report"), config.getoption("gla_commit")
        config.pluginmanager.register(Report(backend, device, path, commit))
