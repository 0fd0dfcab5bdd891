"""`python -m gla_core.compat.fla script.py`: a program whose models of flash-linear-attention compute here."""

import sys

from gla_core.compat.fla import accelerate
from gla_core.compat.program import run

if __name__ == "__main__":
    flags = {"cpu": "compute in PyTorch, on a CPU, what flash-linear-attention has only in Triton"}
    run("gla_core.compat.fla", accelerate, flags, sys.argv[1:])
