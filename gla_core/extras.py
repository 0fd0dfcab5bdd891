"""Finds the missing packages of the extras of gla-core (`cli`, `bench`, ...), and says how to install them."""

from __future__ import annotations

import importlib.metadata
import re

from gla_core.installed import version_of


def extras() -> dict[str, list[str]]:
    """Returns the requirements of every extra for users, such as {"conformance": ["pytest>=8"]}."""
    try:
        lines = importlib.metadata.requires("gla-core") or ()
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        lines = ()
    requirements: dict[str, list[str]] = {}
    for line in lines:
        requirement, _, condition = line.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", condition)
        if extra is not None and extra[1] not in ("dev", "docs"):
            requirements.setdefault(extra[1], []).append(requirement.strip())
    return requirements


def missing(extra: str) -> list[str]:
    """Returns the requirements of an extra whose packages are not installed; their versions are not compared."""
    needed = {requirement: re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in extras().get(extra, ())}
    return [requirement for requirement, name in needed.items() if name is None or version_of(name[0]) is None]


def how_to_install(extra: str) -> str:
    """Returns the commands that install an extra: in a clone of gla-core, and in any other folder."""
    anywhere = " ".join(f"'{requirement}'" for requirement in extras().get(extra, ()))
    return f"pip install '.[{extra}]' in a clone of gla-core, or pip install {anywhere}"
