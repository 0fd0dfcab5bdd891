"""Importing gla_core is light: no plugin, no command line, no device."""

from __future__ import annotations

import subprocess
import sys

import pytest


def modules_after(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["gla_reference", "einops", "typer", "rich", "triton", "hypothesis", "pytest"])
def test_importing_does_not_import(module):
    assert module not in modules_after("import gla_core") - modules_after("import torch")


def test_listing_the_backends_imports_no_triton_and_touches_no_device():
    modules = modules_after("import gla_core, torch; gla_core.backends(); assert not torch.cuda.is_initialized()")
    assert "triton" not in modules - modules_after("import torch")


def test_the_public_names_exist():
    import gla_core

    assert all(hasattr(gla_core, name) for name in gla_core.__all__)
