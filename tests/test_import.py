"""Importing gla_core is light: no plugin, no command line, no device."""

import subprocess
import sys

ADDED = "print(*(set(sys.modules) - before))"
STEPS = f"""
import sys, torch
before = set(sys.modules)
import gla_core
{ADDED}
gla_core.backends()
assert not torch.cuda.is_initialized()
{ADDED}
"""


def test_importing_and_listing_the_backends_import_little_and_touch_no_device(own_backends):
    """In a fresh process. The modules that torch imports do not count."""
    printed = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True).stdout
    added, listed = (set(line.split()) for line in printed.splitlines())
    assert "gla_core.ops.gla.chunk_gla" in added
    assert "gla_core.distributed" not in added
    assert not added & {f"gla_{name}" for name in own_backends}
    assert not added & {"einops", "typer", "rich", "triton", "hypothesis", "pytest"}
    assert listed >= {f"gla_{name}" for name in own_backends}
    assert "triton" not in listed


def test_the_public_names_exist():
    import gla_core

    assert all(hasattr(gla_core, name) for name in gla_core.__all__)
