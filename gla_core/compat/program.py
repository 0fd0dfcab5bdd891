"""Runs a program as `python` does, with functions of a library replaced: for programs that one does not change."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from gla_core.compat.replace import Acceleration


def run(name: str, accelerate: Callable[..., Acceleration], flags: dict[str, str], arguments: list[str]) -> None:
    """Replaces functions and runs a script or a module as `__main__`; at its end prints the replacements and calls.

    The first of several processes that torchrun started prints to stderr; the others print nothing.

    Args:
        name: the name of the module that the user runs.
        accelerate: makes the replacements.
        flags: keyword arguments of `accelerate` that become options, and their help.
        arguments: the options, then the path of the script, or -m and the name of the module, then its own arguments.
    """
    parser = argparse.ArgumentParser(f"python -m {name}", description=__doc__, allow_abbrev=False)
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", help="the path of a script, or the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the program")
    options = parser.parse_args(arguments)
    sys.argv = [options.program, *options.arguments]
    acceleration = accelerate(**{flag: True for flag in flags if getattr(options, flag)})
    try:
        if options.is_module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.program).resolve().parent)
            runpy.run_path(options.program, run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            print(acceleration, file=sys.stderr)
