"""gla-core's conformance kit, on every op of this backend."""

import subprocess
import sys


def test_conformance():
    """Runs `gla conformance my_softmax`, whose report pytest shows if a case fails."""
    assert subprocess.run([sys.executable, "-m", "gla_core", "conformance", "my_softmax"]).returncode == 0
