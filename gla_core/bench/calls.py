"""Calls of abstract ops by one backend: tensors for them, and their times.

An `OpCall` says the sizes and what else counts; `capturing` stands for a call in a CUDA graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_core.bench import measure
from gla_core.dispatch.backend import OP_PARAMETERS, OpCall
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import gate, normal

Arguments = tuple[Any, ...]
"""What a backend's function receives, in the order of `OP_PARAMETERS`."""


def arguments_for(call: OpCall, seed: int = 0) -> Arguments:
    """Random arguments of the sizes and dtypes of `call`, the same for the same seed.

    Gates are mild; packed sequences are of different lengths, half to one and a half times their mean; attention is
    causal unless there is one query; a decoding step works in place.
    """
    generator = torch.Generator(call.device).manual_seed(seed)
    given = _ARGUMENTS[call.op](call, call.dims, generator)
    return complete(call, (), given)


def complete(call: OpCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Arguments that describe `call`, with what was left out filled in."""
    signature = inspect.signature(ABSTRACT_OPS[call.op].describe).bind(*args, **kwargs)
    signature.apply_defaults()
    given = signature.arguments
    if "scale" in given and given["scale"] is None:
        given["scale"] = call.dims["K"] ** -0.5
    if "dim" in given:
        given["dim"] %= given["x"].ndim
    if "do" in given and given["do"] is None:
        given["do"] = torch.randn_like(given["v"][:, :, :1].expand(-1, -1, call.dims["Hq"], -1).contiguous())
    return tuple(given[name] for name in OP_PARAMETERS[call.op])


def run_once(backend: str, call: OpCall) -> None:
    """Run a call once, for what is compiled at first use."""
    _run(call.op, backend, arguments_for(call))
    measure.synchronize(call.device)


def time_call(backend: str, call: OpCall, budget: float = 0.2) -> measure.Timing:
    """Time of a call on random arguments; see `time_arguments`."""
    return time_arguments(backend, call, arguments_for(call), budget)


def time_arguments(backend: str, call: OpCall, arguments: Arguments, budget: float = 0.2) -> measure.Timing:
    """Time of a call on copies of these arguments: in a CUDA graph if `call.capturing`, otherwise eagerly.

    Args:
        budget: seconds of timed calls.

    Raises:
        NoBackendError, UnknownBackendError: the backend cannot run it; and whatever the backend raises.
    """
    calls = calls_for(backend, call, arguments)
    return (measure.time_graph if call.capturing else measure.time_calls)(calls, call.device, budget)


def calls_for(backend: str, call: OpCall, arguments: Arguments) -> list[measure.Call]:
    """The call on copies of its arguments, as many as keep the device's cache from holding the next ones."""
    size = sum(x.numel() * x.element_size() for x in arguments if isinstance(x, Tensor))
    sets = (tuple(map(_copy, arguments)) for _ in range(measure.rotations(size, call.device)))
    return [functools.partial(_run, call.op, backend, each) for each in sets]


@torch.no_grad()
def _run(op: str, backend: str, arguments: Arguments) -> Any:
    return ABSTRACT_OPS[op].run(arguments, backend=backend)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


# ---- arguments of each op


def _chunk_gla(call: OpCall, dims: Mapping[str, int], generator: torch.Generator) -> dict[str, Any]:
    B, T, H, Hq, K, V, N = (dims[name] for name in ("B", "T", "H", "Hq", "K", "V", "N"))
    given = _tokens(call, (B, T), H, Hq, K, V, generator)
    if call.state_dtype is not None:
        given["initial_state"] = normal((N, H, K, V), call.state_dtype, generator)
    if call.variable_length:
        given["cu_seqlens"] = _offsets(T, N, generator)
    return given


def _chunk_gla_bwd(call: OpCall, dims: Mapping[str, int], generator: torch.Generator) -> dict[str, Any]:
    do = normal((dims["B"], dims["T"], dims["Hq"], dims["V"]), call.dtype, generator)
    return {**_chunk_gla(call, dims, generator), "do": do}


def _recurrent_gla_step(call: OpCall, dims: Mapping[str, int], generator: torch.Generator) -> dict[str, Any]:
    B, H, Hq, K, V, P = (dims[name] for name in ("B", "H", "Hq", "K", "V", "P"))
    given = _tokens(call, (B,), H, Hq, K, V, generator)
    given["state"] = normal((P, H, K, V), call.state_dtype or torch.float32, generator)
    if call.indexed:
        rows = torch.randperm(P, generator=generator, device=generator.device)[:B]
        given["state_indices"] = torch.nn.functional.pad(rows, (0, B - len(rows)), value=-1)
    return {**given, "inplace": True}


def _online_softmax(call: OpCall, dims: Mapping[str, int], generator: torch.Generator) -> dict[str, Any]:
    return {"x": normal((dims["rows"], dims["columns"]), call.dtype, generator)}


def _softmax_attention(call: OpCall, dims: Mapping[str, int], generator: torch.Generator) -> dict[str, Any]:
    B, Tq, Tk, H, Hq, K, V = (dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "K", "V"))
    shapes = {"q": (B, Tq, Hq, K), "k": (B, Tk, H, K), "v": (B, Tk, H, V)}
    return {**{name: normal(shape, call.dtype, generator) for name, shape in shapes.items()}, "causal": Tq > 1}


_ARGUMENTS = {
    "chunk_gla_fwd": _chunk_gla,
    "chunk_gla_bwd": _chunk_gla_bwd,
    "recurrent_gla_step": _recurrent_gla_step,
    "online_softmax": _online_softmax,
    "softmax_attention": _softmax_attention,
}


def _tokens(
    call: OpCall, tokens: tuple[int, ...], H: int, Hq: int, K: int, V: int, generator: torch.Generator
) -> dict[str, Any]:
    q, k, v = (normal((*tokens, *head), call.dtype, generator) for head in ((Hq, K), (H, K), (H, V)))
    g = None if call.gate_dtype is None else gate((*tokens, H, K), "mild", call.gate_dtype, generator)
    return {"q": q, "k": k, "v": v, "g": g}


def _offsets(T: int, N: int, generator: torch.Generator) -> Tensor:
    shares = torch.rand(N, generator=generator, device=generator.device, dtype=torch.float64) + 0.5
    ends = (shares.cumsum(0) * (T / shares.sum())).round().int()
    return torch.nn.functional.pad(ends, (1, 0))
