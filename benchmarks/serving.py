"""The ops of a server beside what vLLM, SGLang and FlashInfer run, for the layers of serving_layers.py.

    decode     one token of each sequence, in a CUDA graph, as engines decode
    verify     four drafts of each sequence, in a CUDA graph; the state after each draft goes to a slot of its own
    replay     the same with one state for each sequence, and a ring of the last tokens, of which two are accepted
    prefill    sequences of equal lengths, eager, so the time includes waits of the host
    mixed      decodes first, then prefills; one call of `chunk_gla_pool` for lightning attention, else two functions

Every engine has a row, with the reason if it is not there or refuses. The fact "apart" is the norm of the difference of
its outputs from those of gla_core on equal batches, divided by their norm; factors of all outputs do not count, as
vLLM's lightning attention has another scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import serving_layers as layers
import torch
from record import Job, attempt, counted
from serving_layers import DRAFTS, Batch
from torch import Tensor

from gla_core.bench import measure
from gla_core.conformance.tolerances import relative_error

DECODES = (1, 8, 64, 256, 512)
PREFILLS = ((1, 512), (1, 4096), (1, 16384), (4, 4096), (16, 512), (16, 2048))
MIXED = ((64, 1, 4096), (256, 4, 1024))
OURS = "gla-core"
Fields = dict[str, Any]


class Layer(NamedTuple):
    """A function that makes batches of a layer, and the classes of its engines, the baseline first."""

    batch: Callable[..., Batch]
    engines: dict[str, Callable[[], Any]]


LAYERS = {
    "lightning": Layer(
        layers.lightning_batch,
        {"vllm": layers.VllmLightning, "sglang": layers.SglangLightning, OURS: layers.OurLightning},
    ),
    "Mamba-2": Layer(
        layers.mamba2_batch,
        {"vllm": layers.VllmMamba2, "flashinfer": layers.FlashinferMamba2, OURS: layers.OurMamba2},
    ),
    "GDN": Layer(
        layers.gdn_batch,
        {"vllm": layers.VllmGdn, "flashinfer": layers.FlashinferGdn, OURS: layers.OurGdn},
    ),
}


def batches(layer: str, device: torch.device) -> Iterator[tuple[str, str, Callable[[], Batch]]]:
    """Yields the method to measure, its batch in words, and a function that makes the batch."""
    make = functools.partial(LAYERS[layer].batch, device)
    for N in DECODES:
        yield "decode", counted(N, "sequence"), functools.partial(make, N)
    for N in DECODES if layer == "lightning" else ():
        yield "verify", counted(N, "sequence"), functools.partial(make, DRAFTS * N)
    for N in DECODES if layer == "lightning" else ():
        yield "replay", counted(N, "sequence"), functools.partial(layers.drafts, device, N)
    for N, T in PREFILLS:
        yield "prefill", f"{counted(N, 'sequence')}, {T} tokens", functools.partial(make, 0, N, T)
    for N, prefills, T in MIXED:
        words = f"{N} decodes, {counted(prefills, 'sequence')}, {T} tokens"
        yield "mixed", words, functools.partial(make, N, prefills, T)


def jobs(device: torch.device, bandwidth: float) -> list[Job]:
    """Returns a job for each batch of each layer and each engine that has the method; others cannot break it.

    Args:
        bandwidth: bytes per second of a copy on the device.
    """
    made = []
    for layer, (_, engines) in LAYERS.items():
        for what, words, make in batches(layer, device):
            whos = [who for who, engine in engines.items() if hasattr(engine, what)]
            for who in whos:
                row = f"{layer}, {what}: {words}", who, None if who == whos[0] else whos[0]
                made.append(Job([row], functools.partial(_measure, layer, what, make, who, device, bandwidth)))
    return made


def _measure(
    layer: str, what: str, make: Callable[[], Batch], who: str, device: torch.device, bandwidth: float
) -> list[Fields]:
    def time() -> Fields:
        engine, ours = (LAYERS[layer].engines[name] for name in (who, OURS))
        run, facts = getattr(engine(), what), {}
        if who != OURS:
            facts["apart"] = relative_error(_outputs(make, run), _outputs(make, getattr(ours(), what)))
        timing = measured(what, make, run, device)
        facts["of floor"] = floor_bytes(what, make()) / timing.seconds / bandwidth
        return {"seconds": timing.seconds, "spread": timing.spread, "facts": facts}

    return [attempt(time)]  # another engine may not run here


def _outputs(make: Callable[[], Batch], run: Callable[[Batch], Tensor]) -> Tensor:
    """Returns the outputs of a call on a batch that is the same for every engine, as a vector of length 1."""
    torch.manual_seed(0)
    return torch.nn.functional.normalize(run(make()).float().flatten(), dim=0)


def floor_bytes(what: str, x: Batch) -> int:
    """Returns the bytes of tokens, outputs, states that are read and states that are written, each counted once."""
    tokens = sum(y.nbytes for y in (x.q, x.k, x.v, x.v))
    states = x.pool[1:].nbytes
    return tokens + states + (states // DRAFTS if what == "verify" else states)


def measured(
    what: str, make: Callable[[], Batch], run: Callable[[Batch], Tensor], device: torch.device
) -> measure.Timing:
    """Measures a call, which cycles through batches that together exceed the device's cache."""
    first = make()
    number = min(8, measure.rotations(first.pool.nbytes + first.q.nbytes, device))
    made = [first, *(make() for _ in range(number - 1))]
    in_graph = device.type == "cuda" and what in ("decode", "verify", "replay")
    timer = measure.time_graph if in_graph else measure.time_calls
    return timer([functools.partial(run, x) for x in made], device, 0.3)


def compile_share(share: int, shares: int, device: torch.device) -> None:
    """Runs a share of the calls of all engines once. Batches that share kernels differ in the number of tokens."""
    calls = [(layer, what, make) for layer in LAYERS for what, _, make in batches(layer, device)]
    for layer, what, make in calls[share::shares]:
        for engine in LAYERS[layer].engines.values():
            attempt(functools.partial(_run, engine, what, make, device))


def _run(engine: Callable[[], Any], what: str, make: Callable[[], Batch], device: torch.device) -> Fields:
    if hasattr(engine, what):
        getattr(engine(), what)(make())
        measure.synchronize(device)
    return {}
