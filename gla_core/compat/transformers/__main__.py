"""`python -m gla_core.compat.transformers script.py`: a program whose models of transformers compute here."""

import sys

from gla_core.compat.program import run
from gla_core.compat.transformers import accelerate

if __name__ == "__main__":
    run("gla_core.compat.transformers", accelerate, {}, sys.argv[1:])
