"""Mamba-2's scan and its decoding step, at the sizes of published models, beside mamba_ssm's Triton kernels.

Both take the same arguments: x, dt, A, B, C, D and dt_bias, with a softplus of dt. A step decodes one token of 64
sequences in a CUDA graph. Rows for mamba_ssm need its package, or its folders ops/triton and utils alone, on the path.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from record import Job, attempt, counted
from torch import Tensor

from gla_core.bench import measure
from gla_core.compat import mamba_ssm as ours
from gla_core.workloads import model_inputs
from gla_core.workloads.models import SCAN, Model


class Scan(NamedTuple):
    """The sizes of a scan: B sequences of T tokens, G groups, H heads of P channels, and a state of N."""

    model: str
    B: int
    T: int
    G: int
    H: int
    N: int
    P: int


SCANS = (
    Scan("Granite-4-small", 1, 32768, 1, 128, 128, 64),
    Scan("Nemotron-H 8B", 2, 8192, 8, 128, 128, 64),
    Scan("Falcon-H1-7B", 4, 4096, 1, 24, 256, 128),
    Scan("Falcon-H1-34B", 2, 4096, 2, 32, 256, 128),
    Scan("Mamba-2 2.7B", 4, 4096, 1, 80, 128, 64),
    Scan("Zamba2-7B", 2, 4096, 2, 112, 64, 64),
)
STEPS = (
    Scan("Granite-4-small", 64, 1, 1, 128, 128, 64),
    Scan("Falcon-H1-0.5B", 64, 1, 1, 24, 128, 64),
    Scan("Mamba-2 2.7B", 64, 1, 1, 80, 128, 64),
    Scan("Zamba2-7B", 64, 1, 2, 112, 64, 64),
)
ON_A_CPU = (Scan("small", 1, 70, 1, 2, 8, 4),)
CHUNK = 256
"""The chunk of mamba_ssm's scan, as its models set it."""
DIRECTIONS = ("forward", "forward and backward")


def jobs(device: torch.device, seconds: float) -> list[Job]:
    """Returns a job for each model's scan, and for each model's step; `seconds` of timed calls for each row."""
    cuda, theirs = device.type == "cuda", has_mamba_ssm()
    scans, steps = (SCANS, STEPS) if cuda else (ON_A_CPU, ())
    kinds = [(scan, DIRECTIONS) for scan in scans] + [(step, ("step in a CUDA graph",)) for step in steps]
    return [
        Job(
            [(call_in_words(sizes, way), who, base) for way in ways for who, base in _ways(theirs)],
            functools.partial(_measure, sizes, ways, device, seconds, theirs),
        )
        for sizes, ways in kinds
    ]


def has_mamba_ssm() -> bool:
    """Returns whether mamba_ssm's Triton kernels are installed and a GPU runs them."""
    return torch.cuda.is_available() and importlib.util.find_spec("mamba_ssm") is not None


def _ways(theirs: bool) -> list[tuple[str, str | None]]:
    return [("mamba_ssm", None), ("gla-core", "mamba_ssm")] if theirs else [("gla-core", None)]


def call_in_words(sizes: Scan, way: str) -> str:
    """Returns the words of a call, such as "Mamba-2's scan forward: Zamba2-7B (2 x 4096 tokens, 2 groups, ...)"."""
    model, B, T, G, H, N, P = sizes
    tokens = f"{B} sequences" if T == 1 else f"{B} x {T} tokens"
    return f"Mamba-2's scan {way}: {model} ({tokens}, {counted(G, 'group')}, {H} heads, state {N} x {P})"


def _measure(
    sizes: Scan, ways: Sequence[str], device: torch.device, seconds: float, theirs: bool
) -> list[dict[str, Any]]:
    torch._dynamo.reset()  # in a user's process there is one model
    return [
        attempt(functools.partial(_time, who, way, sizes, device, seconds)) for way in ways for who, _ in _ways(theirs)
    ]


def _time(who: str, way: str, sizes: Scan, device: torch.device, seconds: float) -> dict[str, Any]:
    _, B, T, G, H, N, P = sizes
    size = 4 * B * H * N * P if T == 1 else 4 * B * T * (H * P + G * N)
    calls = [make_call(who, way, sizes, device, seed) for seed in range(measure.rotations(size, device))]
    timer = measure.time_graph if "graph" in way else measure.time_calls
    timing = timer(calls, device, seconds)
    return {"seconds": timing.seconds, "spread": timing.spread}


def make_call(who: str, way: str, sizes: Scan, device: torch.device, seed: int = 0) -> Callable[[], Any]:
    """Returns a function that runs a scan, its pair or a step once on tensors of its own."""
    if "step" in way:
        module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update") if who == "mamba_ssm" else ours
        return torch.no_grad()(functools.partial(module.selective_state_update, **step_inputs(sizes, device, seed)))
    module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined") if who == "mamba_ssm" else ours
    tensors = scan_inputs(sizes, device, seed)
    backward = way == "forward and backward"
    run = functools.partial(
        module.mamba_chunk_scan_combined,
        **{name: x.requires_grad_(backward) for name, x in tensors.items()},
        chunk_size=CHUNK,
        dt_softplus=True,
    )
    if not backward:
        return torch.no_grad()(run)
    do = torch.randn_like(tensors["x"])
    return lambda: torch.autograd.grad(run(), list(tensors.values()), do)


def scan_inputs(sizes: Scan, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Returns the inputs of a scan, with x, dt, B and C in bfloat16 (float32 on a CPU)."""
    return model_inputs.arguments(_model(sizes), device, _dtype(device), seed)


def step_inputs(sizes: Scan, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a step, expanded over channels and states as Mamba-2's layer expands them."""
    return model_inputs.step_arguments(_model(sizes), device, _dtype(device), seed, sizes.B)


def _model(sizes: Scan) -> Model:
    model, B, T, G, H, N, P = sizes
    return Model(model, SCAN, {"B": B, "T": T, "H": G, "R": H // G, "K": N, "V": P}, "")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# ---- compilation beforehand


def compile_share(share: int, shares: int, device: torch.device) -> None:
    """Runs a share of our calls once, and compiles a share of mamba_ssm's kernels without launching any."""
    everything = [(scan, way) for scan in SCANS for way in DIRECTIONS] + [(step, "step") for step in STEPS]
    for sizes, way in everything[share::shares]:
        attempt(functools.partial(_run, "gla-core", way, sizes, device))
    if has_mamba_ssm():
        importlib.import_module("gla_fla.tune").compile_only(share, shares)
        for sizes, way in everything:  # without launches, code that reads results may fail
            attempt(functools.partial(_run, "mamba_ssm", way, sizes, device))


def _run(who: str, way: str, sizes: Scan, device: torch.device) -> dict[str, Any]:
    make_call(who, way, sizes, device)()
    return {}
