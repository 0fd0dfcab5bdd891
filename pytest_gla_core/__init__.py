"""The options of the conformance kit, as a pytest plugin.

They live in a package of their own because pytest loads plugins at the start of every run, and this one must then
import neither torch nor gla_core. The kit itself is `gla_core.conformance`.
"""

from __future__ import annotations

from typing import Any


def pytest_configure(config: Any) -> None:
    """Refuse a wrong question before anything is collected."""
    if any("gla_core.conformance" in argument.replace("/", ".").replace("\\", ".") for argument in config.args):
        from gla_core.conformance.subject import subject

        subject(config)


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("gla_core", "conformance of gla_core backends (pytest --pyargs gla_core.conformance)")
    group.addoption("--gla-backend", metavar="NAME", help="the backend to judge")
    group.addoption("--gla-device", metavar="DEVICE", help="cpu or cuda; cpu unless the backend does not run there")
    group.addoption("--gla-report", metavar="FILE", help="write a JSON report")
    group.addoption("--gla-commit", metavar="ID", help="source revision to note in the report")
