"""Tunes FLA for named workloads: first compiles in parallel, then tunes undisturbed.

FLA's first call with a new tuning key tries about a hundred kernels one after another and compiles each of them. On one
core this takes minutes. Here many processes each compile a share into Triton's cache on disk, without launching
anything. Then one fresh process makes the calls; its autotuner only measures, alone on the device. Triton stores the
choices beside the kernels (FLA_CACHE_RESULTS=1, FLA's default), so later processes neither compile nor tune.

FLA's tuning keys contain widths, chunk length and dtypes, and in most kernels neither B nor T. Among workloads that
differ only in B and T, the first one that is tuned decides for all. To tune one by itself, set TRITON_CACHE_DIR to a
new folder.

    python -m gla_fla.tune --workload train_b8_t4096_h16 --backward
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gla_core.extension import WORKLOADS, Workload, first_calls
from gla_fla import native

CUDA = torch.device("cuda")
TUNABLE = {w.name: w for w in WORKLOADS if w.op in ("chunk_gla", "recurrent_gla_step") and "ci" not in w.tags}

_SHORT = 256  # number of tokens in processes that only compile; FLA's compiled kernels do not depend on T
_COMPILING = 0.75  # fraction of the time limit after which compilers are stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 1 if a workload could not be tuned."""
    parser = argparse.ArgumentParser(prog="python -m gla_fla.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", nargs="+", metavar="NAME", choices=TUNABLE, default=list(TUNABLE))
    parser.add_argument("--processes", type=int, default=16, help="that compile; 0 tunes without compiling first")
    parser.add_argument("--backward", action="store_true", help="tune the backward too")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit for everything (%(default)s)")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # I/N: this process compiles share I of N
    options = parser.parse_args(arguments)
    if options.share:
        share, shares = map(int, options.share.split("/"))
        return compile_share([TUNABLE[name] for name in options.workload], options.backward, share, shares)
    if options.processes == 0:
        return tune([TUNABLE[name] for name in options.workload], options.backward)

    if not torch.cuda.is_available() or importlib.util.find_spec("fla") is None:
        parser.error("needs a CUDA device and flash-linear-attention==0.6.0; one of them is missing here")
    start = time.monotonic()
    again = [sys.executable, "-m", "gla_fla.tune", "--workload", *options.workload]
    again += ["--backward"] if options.backward else []
    compilers = [[*again, "--share", f"{i}/{options.processes}"] for i in range(options.processes)]
    run_all(compilers, _COMPILING * options.seconds)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    try:
        left = options.seconds - (time.monotonic() - start)
        return subprocess.run([*again, "--processes", "0"], env=_environment(), timeout=left, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"stopped after {options.seconds:.0f} s; what was tuned is kept", file=sys.stderr)
        return 1


def run_all(commands: Sequence[Sequence[str]], seconds: float) -> None:
    """Runs commands in parallel for at most `seconds`. Reports each command that fails, and lets the others go on."""
    end = time.monotonic() + seconds
    running = [subprocess.Popen(command, env=_environment()) for command in commands]
    try:
        for i, process in enumerate(running):
            try:
                code = process.wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = "the time limit"
            if code:
                print(f"process {i} of {len(running)} ended by {code}; tuning compiles the rest", file=sys.stderr)
    finally:
        for process in running:
            process.kill()
            process.wait()


def tune(workloads: Sequence[Workload], backward: bool) -> int:
    """Makes the first calls of each workload and prints their seconds; returns 1 if one failed."""
    native.fla("ops.gla")  # imported before the clock starts
    failed = 0
    for workload in workloads:
        try:
            measured = first_calls(workload, "gla_fla", CUDA, backward)
            seconds = " ".join(f"{part} {took:.2f} s" for part, took in measured.items())
        except Exception as error:
            failed, seconds = 1, f"failed: {type(error).__name__}: {error}"
        print(f"{workload.op} {workload.name}: {seconds}", flush=True)
    return failed


def compile_share(workloads: Sequence[Workload], backward: bool, share: int, shares: int) -> int:
    """Compiles one share of the configurations that tuning tries; returns 1 if a workload failed."""
    compile_only(share, shares)
    failed = 0
    for workload in workloads:
        shorter = {"T": min(_SHORT, workload.sizes["T"])} if "T" in workload.sizes else {}
        try:
            first_calls(replace(workload, sizes={**workload.sizes, **shorter}), "gla_fla", CUDA, backward)
        except Exception as error:
            failed = 1
            print(f"compiling {workload.name}: {type(error).__name__}: {error}", file=sys.stderr)
    return failed


def compile_only(share: int, shares: int) -> None:
    """Makes Triton's autotuner, in this process, compile every `shares`-th configuration and launch none."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    counter = itertools.count()  # continues from kernel to kernel, so that the shares are even

    def run(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        configs = tuner.prune_configs(kwargs)
        tuner.best_config = configs[0]  # mamba_ssm reads it after a launch
        for config in configs:
            if next(counter) % shares != share:
                continue
            try:
                tuner.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())
            except Exception:  # the autotuner skips configurations that do not compile
                continue

    autotuner.run = run


def _environment() -> dict[str, str]:
    return {**os.environ, "FLA_CACHE_RESULTS": "1"}


if __name__ == "__main__":
    raise SystemExit(main())
