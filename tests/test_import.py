"""Importing gla_core is light: no plugin, no command line, no device."""

from __future__ import annotations

import subprocess
import sys


def modules_added(statement):
    """Returns the modules that a statement imports in a fresh process, without torch's modules."""
    code = f"import sys, torch; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_does_not_import_what_only_some_need(own_backends):
    added = modules_added("import gla_core")
    assert "gla_core.ops.chunk_gla" in added
    assert "gla_core.distributed" not in added
    assert not added & {f"gla_{name}" for name in own_backends}
    assert not added & {"einops", "typer", "rich", "triton", "hypothesis", "pytest"}


def test_listing_the_backends_imports_no_triton_and_touches_no_device(own_backends):
    added = modules_added("import gla_core; gla_core.backends(); assert not torch.cuda.is_initialized()")
    assert added >= {f"gla_{name}" for name in own_backends}
    assert "triton" not in added


def test_the_public_names_exist():
    import gla_core

    assert all(hasattr(gla_core, name) for name in gla_core.__all__)
