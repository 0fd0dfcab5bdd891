"""The calls of published models beside FLA's and mamba_ssm's functions: each a forward, a pair and a step.

The models, their sizes and the sources of these are in gla_core/workloads/models.py. Calls are replayed from CUDA
graphs, or eager where the fact "eager" says so. The fact "floors" is the time divided by that of `floor_seconds` in
gla_core/bench/models.py. Rows for mamba_ssm need its package, or its folders ops/triton and utils alone, on the path.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import torch
from record import Job, attempt, free_memory, tune_anew

from gla_core.bench import models
from gla_core.bench.models import WAYS
from gla_core.workloads.models import MODELS, Model, distinct

SHORT = 256
"""The number of tokens when FLA's kernels are compiled but not launched. Compiled kernels do not depend on T."""


def jobs(device: torch.device, bandwidth: float, seconds: float) -> list[Job]:
    """Returns a job for each call that differs, with a row for the peer and one for ours in each of `WAYS`.

    Args:
        bandwidth: bytes per second of a copy on the device.
        seconds: of timed calls for each row.
    """
    return [_job(model, device, bandwidth, seconds) for model in models.chosen((), device)]


def _job(model: Model, device: torch.device, bandwidth: float, seconds: float) -> Job:
    peer = models.peer_of(model)
    whos = [(peer, None), ("gla-core", peer)] if peer else [("gla-core", None)]
    rows = [(call_in_words(model, way), who, baseline) for way in WAYS for who, baseline in whos]
    return Job(rows, functools.partial(_measure, model, [who for who, _ in whos], device, bandwidth, seconds))


def call_in_words(model: Model, way: str) -> str:
    """Returns the words of a call, such as "Falcon-H1 7B: forward and backward"."""
    return f"{model.name}: {way}"


def _measure(
    model: Model, whos: list[str], device: torch.device, bandwidth: float, seconds: float
) -> list[dict[str, Any]]:
    torch._dynamo.reset()  # in a user's process there is one model
    tune_anew()
    return [_fields(model, way, who, device, bandwidth, seconds) for way in WAYS for who in whos]


def _fields(model: Model, way: str, who: str, device: torch.device, bandwidth: float, seconds: float) -> dict[str, Any]:
    timed = models.time_call(model, way, who, device, seconds)
    free_memory()
    facts: dict[str, Any] = {"eager": True} if timed.eager else {}
    if timed.seconds is not None:
        facts["floors"] = timed.seconds / models.floor_seconds(model, way, bandwidth)
    if who == "gla-core":
        facts["backend"] = models.backends_of(model, way, device)
    return {"seconds": timed.seconds, "spread": timed.spread, "error": timed.error, "facts": facts}


# ---- compilation beforehand


def compile_share(share: int, shares: int, device: torch.device, pattern: str = "") -> None:
    """Runs a share of our calls once, and compiles a share of the peers' kernels without launching any.

    Args:
        pattern: a regular expression; only calls that match it.
    """
    calls = [(model, way) for model in distinct(MODELS) for way in WAYS[1:]]  # the pair includes the forward
    calls = [(model, way) for model, way in calls if re.search(pattern, call_in_words(model, way))]
    for model, way in calls[share::shares]:
        attempt(functools.partial(_run, model, way, "gla-core", device))
    importlib.import_module("gla_fla.tune").compile_only(share, shares)
    for model, way in calls:  # without launches, code that reads results may fail
        peer = models.peer_of(model)
        if peer is not None:
            called = model.resized(T=SHORT) if peer == "fla" else model
            attempt(functools.partial(_run, called, way, peer, device))


def _run(model: Model, way: str, who: str, device: torch.device) -> dict[str, Any]:
    models.make_call(model, way, who, device)()
    return {}
