"""Errors of outputs, states and gradients beside fla's and mamba_ssm's, on the same inputs.

An error is the norm of the difference from the result in float64, divided by the norm of that result. The inputs are
rounded to the dtype first, so the error is that of the computation and of rounding its results. "in float32" casts q,
k and v to float32 before the call, which then multiplies in TF32, and casts o back: smaller errors for more time. FLA
does not tune here: its kernels run in their first configurations, which changes no error by much.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mamba_scan
import torch
from op_calls import tf32
from record import Job, attempt
from torch import Tensor

import gla_core as gla
from gla_core.bench.baselines import fla_chunk_gla, has_fla
from gla_core.compat import mamba_ssm
from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import gla_inputs

SIZES: dict[str, Any] = {"B": 2, "T": 2048, "H": 4, "K": 128, "V": 128}
SMALL: dict[str, Any] = {"B": 1, "T": 70, "H": 2, "K": 16, "V": 16}
GATES = {"mild": "log sigma(x) / 16", "strong": "log sigma(x)", "extreme": "0 to -100"}
FORMS = {"key": "a gate per key", "head": "a gate per head"}
CASES = (
    *itertools.product(("key",), GATES, (torch.bfloat16, torch.float16)),
    *itertools.product(("head",), ("mild", "strong"), (torch.bfloat16,)),
)
SMALL_CASES = (("key", "mild", torch.float32), ("head", "strong", torch.float32))
SCAN = mamba_scan.Scan("2 x 2048 tokens", 2, 2048, 1, 8, 128, 64)
SMALL_SCAN = mamba_scan.Scan("small", 1, 70, 1, 2, 8, 4)
NAMES = ("o", "state", "dq", "dk", "dv", "dg")


def jobs(device: torch.device) -> list[Job]:
    """Returns a job for each of CASES, and one for Mamba-2's scan."""
    ways = [*(("fla",) if has_fla() and device.type == "cuda" else ()), "gla-core", "gla-core in float32"]
    made = []
    for form, gates, dtype in CASES if device.type == "cuda" else SMALL_CASES:
        call = f"`chunk_gla`, {FORMS[form]}, {GATES[gates]}, {str(dtype).removeprefix('torch.')}"
        measured = functools.partial(_errors_of_gla, ways, form, gates, dtype, device)
        rows = [(call, who, "fla" if "fla" in ways and who != "fla" else None) for who in ways]
        made.append(Job(rows, measured))
    theirs = mamba_scan.has_mamba_ssm()
    scan, peer = "Mamba-2's scan, bfloat16", "mamba_ssm" if theirs else None
    rows = [*([(scan, peer, None)] if peer else []), (scan, "gla-core", peer)]
    return [*made, Job(rows, functools.partial(_errors_of_scan, theirs, device))]


# ---- chunk_gla


def _errors_of_gla(
    ways: Sequence[str], form: str, gates: str, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    sizes = SIZES if device.type == "cuda" else SMALL
    made = gla_inputs(
        **sizes, dtype=dtype, gate_dtype=torch.float32, gates=gates, gate_form=form, device=device, seed=3
    )
    inputs = [made.q, made.k, made.v, made.g]
    do = torch.randn_like(made.v)
    reference = functools.partial(gla.chunk_gla, backend="reference")
    exact = _results(reference, [x.double() for x in inputs if x is not None], do.double())

    def errors(who: str) -> dict[str, Any]:
        with tf32(), first_configurations():
            results = _results(FUNCTIONS[who], [x for x in inputs if x is not None], do)
        return {"facts": dict(zip(NAMES, map(relative_error, results, exact), strict=True))}

    return [attempt(functools.partial(errors, who)) for who in ways]


@contextlib.contextmanager
def first_configurations() -> Iterator[None]:
    """Makes Triton's autotuners take the first configuration of a kernel."""
    if not torch.cuda.is_available():
        yield
        return
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs
    autotuner.prune_configs = lambda tuner, arguments: prune(tuner, arguments)[:1]
    try:
        yield
    finally:
        autotuner.prune_configs = prune


def _results(function: Callable[..., Any], inputs: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    """Returns o, the final state, dq, dk, dv and dg."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, state = function(*leaves, initial_state=None, output_final_state=True, cu_seqlens=None)
    return [o.detach(), state.detach(), *torch.autograd.grad(o, leaves, do)]


def _in_float32(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    o, state = gla.chunk_gla(q.float(), k.float(), v.float(), g, **options)
    return o.to(v.dtype), state


FUNCTIONS = {"fla": fla_chunk_gla, "gla-core": gla.chunk_gla, "gla-core in float32": _in_float32}


# ---- Mamba-2's scan


def _errors_of_scan(theirs: bool, device: torch.device) -> list[dict[str, Any]]:
    sizes = SCAN if device.type == "cuda" else SMALL_SCAN
    tensors = mamba_scan.scan_inputs(sizes, device, 3)
    do = torch.randn_like(tensors["x"])
    with gla.use_backend("reference"):
        exact = _results_of_scan(mamba_ssm, {name: x.double() for name, x in tensors.items()}, do.double())
    modules = [importlib.import_module("mamba_ssm.ops.triton.ssd_combined")] if theirs else []
    names = ("out", *(f"d{name}" for name in tensors))
    return [
        {"facts": dict(zip(names, map(relative_error, _results_of_scan(module, tensors, do), exact), strict=True))}
        for module in (*modules, mamba_ssm)
    ]


def _results_of_scan(module: Any, tensors: dict[str, Tensor], do: Tensor) -> list[Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = module.mamba_chunk_scan_combined(**leaves, chunk_size=mamba_scan.CHUNK, dt_softplus=True)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), do)]
