"""Times the calls of published models beside the functions of the libraries whose models they are.

A call is the layer's own: Mamba-2's is `mamba_chunk_scan_combined` with the softplus of dt, dt_bias and D; GLA's is
`chunk_gla`; Kimi Linear's is `chunk_kda` with the norms of q and k. Ours is the function of the same name in
`gla_core.compat`. A floor is defined in `floor_seconds`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from gla_core.bench import measure
from gla_core.bench.results import time_text
from gla_core.compat import fla, mamba_ssm
from gla_core.dispatch.backend import CHUNK, OpCall
from gla_core.dispatch.errors import nearest
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.dispatch.tensors import wide
from gla_core.terminal import print_table, print_text, progress
from gla_core.workloads import model_inputs
from gla_core.workloads.inputs import describe
from gla_core.workloads.models import FUNCTIONS, MODELS, SCAN, SEQUENCES, Model, distinct, reduced

WAYS = ("forward", "forward and backward", "step")
PRODUCTS = 700e12
"""Floating-point operations a second of products of bfloat16 on a GPU, by which floors count."""
OURS = {"fla": fla, "mamba_ssm": mamba_ssm}


# ---- floors


def floor_seconds(model: Model, way: str, bandwidth: float, dtype: torch.dtype = torch.bfloat16) -> float:
    """Returns the floor of a call: the larger of two times.

    One is the time to move each input and output once, at the speed of a copy. The other is the time of the products
    of the chunked form, with chunks of 64 tokens, at `PRODUCTS`. Per token, these are for each state two products with
    the state (K V each), for each head of the output the scores times the values (64 V), and the scores (64 K), which
    heads share that share q, k and the gates of keys. A delta rule has a third product with the state, and twice the
    others: of k and k, and of the matrix that solves for what is written. A backward reads the inputs and the gradient
    of the output, writes the gradients of the inputs, and has two products for each of the forward. "forward and
    backward" is the sum of both floors. A step also reads and writes its states.

    Args:
        way: one of `WAYS`, or "backward".
        bandwidth: bytes a second of a copy, read and written together.
    """
    if way == "forward and backward":
        return sum(floor_seconds(model, each, bandwidth, dtype) for each in ("forward", "backward"))
    called = model.resized(B=SEQUENCES, T=1) if way == "step" else model
    moved, operations = _bytes(called, way, dtype), _products(called) * (2 if way == "backward" else 1)
    return max(moved / bandwidth, operations / PRODUCTS)


def _bytes(model: Model, way: str, dtype: torch.dtype) -> int:
    precise = {"g", "g_gamma", "w", "A", "D", "dt_bias", "u"}
    sizes = {
        name: torch.Size(shape).numel() * (wide(dtype) if name in precise else dtype).itemsize
        for name, shape in model_inputs.shapes(model).items()
    }
    outputs, inputs = sizes.pop("out"), sum(sizes.values())
    if way == "step":
        states = sum(torch.Size(shape).numel() for shape in model_inputs.state_shapes(model))
        return inputs + outputs + 2 * states * wide(dtype).itemsize
    return inputs + outputs + (inputs if way == "backward" else 0)


def _products(model: Model) -> float:
    """Returns the floating-point operations of the products of a forward."""
    dims, function = model.dims, FUNCTIONS[model.function]
    if "M" not in dims:
        return products(dims, function.gate_form, function.is_delta_rule)
    # q P, the scores q k^T times s, and the same for p S
    C, slots = min(dims["T"], CHUNK), dims["M"]
    H, Hq, K, V = (dims[name] for name in ("H", "Hq", "K", "V"))
    per_state, per_head = H * slots * (K + V), Hq * (slots * (K + V) + C * (K + slots + slots + V))
    return 2 * dims["B"] * dims["T"] * (per_state + per_head)


def products(dims: Mapping[str, float], gate_form: str | None, is_delta_rule: bool = False) -> float:
    """Returns the floating-point operations of the products of a forward of GLA, or of a delta rule.

    Args:
        dims: sizes of the call, of B sequences of T tokens each.
        gate_form: the form of its gates.
    """
    B, T, H, Hv, Hq, K, V = (dims[name] for name in ("B", "T", "H", "Hv", "Hq", "K", "V"))
    C, heads = min(T, CHUNK), max(Hv, Hq)
    scores = heads if gate_form == "key" else max(H, Hq)
    if is_delta_rule:
        return 2 * B * T * (Hv * (3 * K * V + 2 * C * V) + scores * 2 * C * K)
    return 2 * B * T * (Hv * K * V + heads * (K * V + C * V) + scores * C * K)


# ---- predictions


def op_calls(model: Model, way: str, device: torch.device, **facts: Any) -> list[OpCall]:
    """Returns the calls of abstract ops that compute a model's call, in bfloat16 with float32 gates.

    Args:
        way: "forward", "backward" or "step".
        facts: further fields of `OpCall`, such as `assumed`.
    """
    called = model.resized(B=SEQUENCES, T=1) if way == "step" else model
    return [describe(op, sizes, device, **facts) for op, sizes in _calls(called, way)]


def _calls(model: Model, way: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the op and the sizes of each call of GLA, or of a delta rule, that computes a model's call.

    A backward computes the states of chunks again where FLA's does.
    """
    family = "delta" if FUNCTIONS[model.function].is_delta_rule else "gla"
    forward, backward = f"chunk_{family}_fwd", f"chunk_{family}_bwd"
    op = {"forward": forward, "backward": backward, "step": f"recurrent_{family}_step"}[way]
    form = FUNCTIONS[model.function].gate_form
    gates = {"gates": "none"} if form == "none" else {"gate_form": form}
    scalars = {"inplace": True, "state_v_first": model.function == SCAN, "checkpoint_every": None}
    kept = {"checkpoint_every": CHUNK} if way == "backward" and model.function == SCAN else {}
    sizes = {**model.sizes, "dtype": torch.bfloat16, "gate_dtype": torch.float32, **gates, **scalars}
    if "M" in sizes:  # the keys of both passes are slots: see gla_core/compat/fla/slots.py
        M = sizes.pop("M")
        ops = {"forward": (backward,), "backward": (forward, backward), "step": (op,)}[way]
        for each in ops:
            yield each, {**sizes, "K": M, "V": sizes["K"]}
        sizes["K"] = M
    yield op, {**sizes, **kept}


def backends_of(model: Model, way: str, device: torch.device) -> str:
    """Returns the names of the backends that `auto` picks for a model's call, joined by "+"."""
    ways = way.split(" and ")
    winners = [
        explain_call(call, current_request(None)).winner for each in ways for call in op_calls(model, each, device)
    ]
    return "+".join(dict.fromkeys(winner or "none" for winner in winners))


# ---- calls


def peer_of(model: Model) -> str | None:
    """Returns the library whose function a model calls; None if it is not installed, or there is no GPU."""
    peer = FUNCTIONS[model.function].peer
    return peer if torch.cuda.is_available() and importlib.util.find_spec(peer) is not None else None


def make_call(
    model: Model, way: str, who: str, device: torch.device, seed: int = 0, dtype: torch.dtype | None = None
) -> measure.Call:
    """Returns a function that runs a model's call, its pair or its step once on tensors of its own.

    Args:
        way: one of `WAYS`; the pair returns the gradients.
        who: "gla-core", or the library whose function it is. A library has no grouped queries: its layers repeat keys
            and values, so its function receives as many heads of them as of queries.
        dtype: bfloat16 on a GPU and float32 elsewhere by default.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if who != "gla-core":
        model = model.resized(H=model.dims["Hq"], G=1)
    function = _function(model, who, step=way == "step")
    if way == "step":
        return torch.no_grad()(functools.partial(function, **model_inputs.step_arguments(model, device, dtype, seed)))
    tensors = model_inputs.arguments(model, device, dtype, seed)
    run = functools.partial(function, **tensors, **model_inputs.OPTIONS.get(model.function, {}))
    if way == "forward":
        return torch.no_grad()(run)
    leaves = [x.requires_grad_() for name, x in tensors.items() if name not in model_inputs.CONSTANTS]
    do = torch.randn(model_inputs.shapes(model)["out"], dtype=dtype, device=device)
    return lambda: torch.autograd.grad(output_of(run()), leaves, do)


def output_of(result: Any) -> Tensor:
    """Returns the output of a function that may return states beside it."""
    return result[0] if isinstance(result, tuple) else result


def _function(model: Model, who: str, step: bool) -> Callable[..., Any]:
    described = FUNCTIONS[model.function]
    name = described.step if step else model.function.partition(",")[0]
    if who == "gla-core":
        return getattr(OURS[described.peer], name)
    module = described.step_module if step and described.step_module else described.module
    return getattr(importlib.import_module(module), name)


# ---- measurements


@dataclass(frozen=True, slots=True)
class Timed:
    """The time of a call by one implementation, or its error in one line; neither if it was not measured.

    Attributes:
        seconds, spread: as in `measure.Timing`.
        eager: whether the call was launched by the host each time, and not by a CUDA graph.
    """

    seconds: float | None = None
    spread: float | None = None
    eager: bool = False
    error: str | None = None


def time_call(model: Model, way: str, who: str, device: torch.device, budget: float) -> Timed:
    """Measures a call: on a GPU in a CUDA graph, or eagerly if it cannot be captured."""
    failed = Timed()
    sets = measure.rotations(_bytes(model, "step" if way == "step" else "forward", torch.bfloat16), device)
    for eager in (False, True) if device.type == "cuda" else (True,):
        try:
            calls = [make_call(model, way, who, device, seed) for seed in range(sets)]
            timing = (measure.time_calls if eager else measure.time_graph)(calls, device, budget)
            return Timed(timing.seconds, timing.spread, eager)
        except Exception as error:  # out of memory, no such sizes, or no capture
            failed = Timed(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    return failed


def chosen(names: Sequence[str], device: torch.device) -> tuple[Model, ...]:
    """Returns the models of these names, all by default, at sizes for a device. Raises ValueError for other names."""
    for name in names:
        if name not in (known := [model.name for model in MODELS]):
            raise ValueError(f"unknown model {name!r}{nearest(name, known)}; docs/models.md lists them")
    models = distinct([model for model in MODELS if not names or model.name in names])
    return models if device.type == "cuda" else tuple(map(reduced, models))


def run_models(
    device: torch.device, names: Sequence[str], peers: bool, seconds: float | None, console: Console
) -> bool:
    """Measures calls of models, and prints a table; returns whether any could be timed.

    Args:
        names: names of models; all by default. On a CPU, they are reduced.
        peers: whether to time the peers too.
        seconds: of timed calls for each; 0.1 on a CPU and 0.5 on a CUDA device by default.

    Raises:
        ValueError: a model does not exist.
    """
    models = chosen(names, device)
    bandwidth = measure.copy_bandwidth(device)
    budget = seconds or (0.5 if device.type == "cuda" else 0.1)
    print_text(console, f"{device}: copies at {bandwidth / 1e9:.0f} GB/s; {len(models)} models")
    lines, failures = [], []
    for model in progress(console, models, lambda model: model.name):
        torch._dynamo.reset()  # in a user's process there is one model
        peer = peer_of(model) if peers else None
        for way in WAYS:
            theirs = time_call(model, way, peer, device, budget) if peer else Timed()
            ours = time_call(model, way, "gla-core", device, budget)
            on_gpu = device.type == "cuda"  # the caches of a CPU make a floor meaningless
            floor = floor_seconds(model, way, bandwidth) if on_gpu else None
            lines.append(_line(model, way, ours, theirs, floor))
            for who, timed in (("gla-core", ours), (peer, theirs)):
                failures += [f"{model.name}, {way}, {who}: {timed.error}"] if timed.error else []
    print_table(console, lines, "calls of models", spare=("function",), prose=("model",), numbers=list(lines[0])[3:])
    if device.type == "cuda":
        print_text(console, "floors: the time divided by the larger of two, that of the bytes and that of the products")
    for failure in failures:
        print_text(console, failure)
    return any(line["ours"] != "-" for line in lines)


def _line(model: Model, way: str, ours: Timed, theirs: Timed, floor: float | None) -> dict[str, str]:
    """Returns a line of the table."""
    return {
        "model": model.name,
        "call": way,
        "function": model.function,
        "ours": time_text(ours.seconds),
        "peer": time_text(theirs.seconds) if theirs.seconds else "",
        "times as fast": f"{theirs.seconds / ours.seconds:.2f}" if ours.seconds and theirs.seconds else "",
        "floors": f"{ours.seconds / floor:.1f}" if ours.seconds and floor else "",
    }
