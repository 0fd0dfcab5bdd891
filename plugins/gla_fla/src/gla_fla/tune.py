"""Tune FLA for named workloads: compile in parallel, then tune undisturbed.

FLA's first call of a kind tries some hundred kernels, one after another, each compiled first: minutes on one core.
Here many processes compile a share each, launching nothing, into Triton's cache on disk. Then one fresh process makes
the calls: everything is compiled already, so its autotuner only measures, alone on the device. Triton keeps what it
chose beside the kernels (FLA_CACHE_RESULTS=1, FLA's default), so later processes neither compile nor tune.

FLA's tuning keys hold widths, chunk length and dtypes, and in most kernels neither B nor T: of workloads that differ
in those alone, the first tuned decides for all. Set TRITON_CACHE_DIR to a folder of its own to tune one by itself.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import gla_core as gla
from gla_core.workloads.inputs import chunk_inputs, step_inputs
from gla_core.workloads.named import WORKLOADS, Workload
from gla_fla import native

TUNABLE = {w.name: w for w in WORKLOADS if w.op in ("chunk_gla", "recurrent_gla_step") and "ci" not in w.tags}

_SHORT = 256  # tokens, in the processes that only compile: no kernel of FLA is compiled for its T
_COMPILING = 0.75  # the part of the time limit after which compilers are stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 1 if a workload could not be tuned."""
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
    """Run commands in parallel for at most so many seconds; one that fails is reported and harms no other."""
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
    """Make the first calls of each workload, and print their seconds; 1 if one failed."""
    native.fla("ops.gla")  # imported before the clock starts
    failed = 0
    for workload in workloads:
        try:
            seconds = " ".join(f"{part} {took:.2f} s" for part, took in _first_calls(workload, backward))
        except Exception as error:
            failed, seconds = 1, f"failed: {type(error).__name__}: {error}"
        print(f"{workload.op} {workload.name}: {seconds}", flush=True)
    return failed


def compile_share(workloads: Sequence[Workload], backward: bool, share: int, shares: int) -> int:
    """Compile one share of what tuning would try; 1 if a workload failed."""
    compile_only(share, shares)
    failed = 0
    for workload in workloads:
        shorter = {"T": min(_SHORT, workload.sizes["T"])} if "T" in workload.sizes else {}
        try:
            list(_first_calls(workload, backward, **shorter))
        except Exception as error:
            failed = 1
            print(f"compiling {workload.name}: {type(error).__name__}: {error}", file=sys.stderr)
    return failed


def compile_only(share: int, shares: int) -> None:
    """Make Triton's autotuner, in this process, compile every `shares`-th configuration and launch none."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    turn = itertools.count()  # goes on from kernel to kernel, so that the shares are even

    def run(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(kwargs):
            if next(turn) % shares != share:
                continue
            try:
                tuner.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())
            except Exception:  # a configuration that does not compile is the autotuner's to pass over
                continue

    autotuner.run = run


def _first_calls(workload: Workload, backward: bool, **changes: object) -> Iterator[tuple[str, float]]:
    """Make them, and yield what each was and its seconds."""
    if workload.op == "recurrent_gla_step":
        inputs: dict[str, Any] = step_inputs(workload, device="cuda", **changes)
        yield "step", _seconds(lambda: gla.recurrent_gla_step(**inputs, backend="gla_fla"))
        return
    x = chunk_inputs(workload, device="cuda", **changes)
    leaves = [t.requires_grad_(backward) for t in (x.q, x.k, x.v, x.g, x.initial_state) if t is not None]
    outputs: list[Tensor] = []

    def forward() -> None:
        o, _ = gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, False, x.cu_seqlens, backend="gla_fla")
        outputs.append(o)

    yield "forward", _seconds(forward)
    if backward:
        yield "backward", _seconds(lambda: torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs]))


def _seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _environment() -> dict[str, str]:
    return {**os.environ, "FLA_CACHE_RESULTS": "1"}


if __name__ == "__main__":
    raise SystemExit(main())
