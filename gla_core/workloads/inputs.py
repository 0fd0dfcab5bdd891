"""Random arguments of the ops, from a seed: every dtype, gate strength and layout that a backend must serve.

A workload's sizes hold the dimensions of its op (B, T, H, K ..). They may also hold:

    G               number of query heads per key/value head
    R               number of value heads per key head
    gate_form       form of the gates, one of `gla_core.dispatch.backend.GATES`, by default "key"
    dtype           dtype of q (or x), by default float32
    gate_dtype      dtype of g, by default the dtype of q
    lengths         lengths of sequences that are packed along T; B and T then follow from them
    leading         number of rows before the first of these sequences
    padding         number of rows after the last of them
    gates           strength of the gates, one of `GATES`
    rows            rows of the pool that a decoding step reads and writes
    pool            number of states in the pool
    shape, dim      shape of x and dimension of the softmax, in online_softmax
    masked          whether whole tiles of x, and most of a row, are -inf
    without         names of the optional inputs that are left out: output_gate, norm_weight; D, dt_bias
    bonus           whether a step of recurrent_gla_step has a bonus
    weight_dtype    dtype of norm_weight, of the bonus, or of D and dt_bias, by default the dtype of q
    norm_eps, activation   the arguments of these names
    initial_state   whether there is an initial state

Of chunk_ssd, of which gate_dtype is the dtype of dt, they may also hold:

    rate            factor of A, by default 1/8
    D_form          "channel" for D [Hv, V]; by default D is [Hv]
    dt_softplus, dt_min, dt_max   the arguments of these names

Of the ops on a pool of slots they may also hold pool, and:

    pool_dtype      dtype of the pool, by default float32; float64 with float64 inputs
    page            unused numbers in memory after each slot of the pool, and of the rings
    L, ring_dtype   number of tokens of a ring, and dtype of the keys and values in it, by default the dtype of q
    read_slots, write_slots, has_state, checkpoint_offsets, checkpoint_slots, pad_slot, slots, num_accepted, ring_start
                    the arguments of these names, as tuples and a number
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.tensors import checkpoint_dtype, checkpoint_rows, wide
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS, OpSpec
from gla_core.ops.spec import Argument, Role, dtype_in_call
from gla_core.workloads.named import Workload

GATES = ("none", "mild", "strong", "extreme", "-inf")


@dataclass(frozen=True, slots=True)
class GlaInputs:
    """The arguments of `chunk_gla`, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


def random_gate(shape: tuple[int, ...], kind: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    """Returns log forget gates on the generator's device.

    Args:
        shape: the shape of the gates in any form.
        kind: 'none' (None), 'mild' (logsigmoid / 16, as in the layer), 'strong' (logsigmoid), 'extreme' (0 to -100),
            or '-inf' (2 % of the gates are -inf, the rest from mild to extreme).
    """
    if kind == "none":
        return None
    log_sigmoid = torch.nn.functional.logsigmoid(normal(shape, dtype, generator))
    if kind == "mild":
        return log_sigmoid / 16
    if kind == "strong":
        return log_sigmoid
    uniform = torch.rand(shape, generator=generator, dtype=dtype, device=generator.device)
    if kind == "extreme":
        return -100 * uniform
    if kind != "-inf":
        raise ValueError(f"gate kind is {kind!r}; expected one of {GATES}")
    return torch.where(uniform < 0.02, -torch.inf, torch.where(uniform < 0.1, -100 * uniform, log_sigmoid / 16))


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns standard normal numbers on the generator's device, drawn in at least float32."""
    computed = torch.promote_types(dtype, torch.float32)
    return torch.randn(shape, generator=generator, dtype=computed, device=generator.device).to(dtype)


def gla_inputs(
    *,
    B: int = 2,
    T: int = 100,
    H: int = 2,
    G: int = 1,
    R: int = 1,
    K: int = 16,
    V: int = 16,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    gates: str = "mild",
    gate_form: str = "key",
    lengths: tuple[int, ...] | None = None,
    leading: int = 0,
    padding: int = 0,
    initial_state: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> GlaInputs:
    """Returns random arguments of `chunk_gla`; equal parameters give equal arguments.

    Args:
        G: number of query heads per key/value head. R: number of value heads per key head.
        gate_dtype: dtype of g, by default the dtype of q. gates, gate_form: strength and form of the gates.
        lengths: lengths of packed sequences; B and T then follow from them.
        leading, padding: number of rows before the first sequence, and after the last one.
        initial_state: whether there is an initial state.
    """
    generator = torch.Generator(device).manual_seed(seed)
    B, T, N = (B, T, B) if lengths is None else (1, leading + sum(lengths) + padding, len(lengths))
    Hv = H * R
    q, k, v = (normal(shape, dtype, generator) for shape in ((B, T, H * G, K), (B, T, H, K), (B, T, Hv, V)))
    shape = {"constant": (Hv,), "head": (B, T, Hv), "key": (B, T, Hv, K)}[gate_form]
    g = random_gate(shape, gates, gate_dtype or dtype, generator)
    state = normal((N, Hv, K, V), wide(dtype), generator) if initial_state else None
    offsets = None if lengths is None else torch.tensor([leading, *lengths], device=device).cumsum(0)
    return GlaInputs(q, k, v, g, state, offsets)


@dataclass(frozen=True, slots=True)
class DeltaInputs(GlaInputs):
    """The arguments of `chunk_delta`."""

    beta: Tensor


def delta_inputs(**sizes: Any) -> DeltaInputs:
    """Returns random arguments of `chunk_delta`, with the parameters of `gla_inputs`.

    Queries and keys have length 1, as in models. beta is between 0 and 1, and has the dtype of gates.
    """
    x = gla_inputs(**sizes)
    generator = _generator({**sizes, "seed": sizes.get("seed", 0) + 2})
    beta = normal(tuple(x.v.shape[:3]), sizes.get("gate_dtype") or x.q.dtype, generator).sigmoid()
    return DeltaInputs(_unit(x.q), _unit(x.k), x.v, x.g, x.initial_state, x.cu_seqlens, beta)


def _unit(x: Tensor) -> Tensor:
    """Returns rows of length 1."""
    return torch.nn.functional.normalize(x.to(wide(x.dtype)), dim=-1).to(x.dtype)


def token_of(x: Tensor | None, t: int) -> Tensor | None:
    """Returns token t of x [B, T, ..], an argument of `chunk_gla`; None and a constant gate [Hv] have no tokens."""
    return x if x is None or x.ndim == 1 else x[:, t]


# ---- arguments of workloads


def chunk_inputs(workload: Workload, **changes: object) -> GlaInputs:
    """Returns the arguments of `chunk_gla`; `changes` override sizes, as in dtype=torch.float16 or seed=1."""
    return gla_inputs(**{**workload.sizes, **changes})


def step_inputs(
    workload: Workload, inputs: Callable[..., Any] = gla_inputs, **changes: object
) -> dict[str, Tensor | None]:
    """Returns the arguments of a step by name: its tokens, state and slots, and the bonus if the workload has one.

    Args:
        inputs: takes sizes, returns random arguments of the op over sequences, as `gla_inputs` does.
    """
    asked = {**workload.sizes, **changes}
    sizes = {name: size for name, size in asked.items() if name not in _LAYER_SIZES}
    rows, pool, has_bonus = sizes.pop("rows", None), sizes.pop("pool", None), sizes.pop("bonus", False)
    x = inputs(**{**sizes, "T": 1, "initial_state": True})
    token = {name: token_of(getattr(x, name), 0) for name in PUBLIC_OPS[workload.op].tokens}
    state = x.initial_state
    assert state is not None
    if pool is not None:
        state = normal((pool, *state.shape[1:]), state.dtype, _generator(sizes))
    indices = None if rows is None else torch.tensor(rows, device=state.device)
    step = {**token, "state": state, "slots": indices}
    if not has_bonus:
        return step
    dtype = x.q.dtype if x.q.dtype == torch.float64 else asked.get("weight_dtype") or x.q.dtype
    bonus = normal((x.k.shape[2], x.k.shape[3]), dtype, _generator({**sizes, "seed": sizes.get("seed", 0) + 1}))
    return {**step, "bonus": bonus}


def layer_step_inputs(workload: Workload, **changes: object) -> dict[str, Any]:
    """Returns the arguments of `recurrent_gla_layer_step` by name, without the scale."""
    sizes = {**workload.sizes, **changes}
    without, weight_dtype = sizes.pop("without", ()), sizes.pop("weight_dtype", None)
    options = {name: sizes.pop(name) for name in ("norm_eps", "activation") if name in sizes}
    x, generator = step_inputs(workload, gla_inputs, **changes), _generator({**sizes, "seed": sizes.get("seed", 0) + 1})
    q, v = x["q"], x["v"]
    assert q is not None
    assert v is not None
    gates = normal((len(v), max(q.shape[1], v.shape[1]), v.shape[2]), q.dtype, generator)
    weight = 1 + 0.3 * normal(tuple(v.shape[2:]), wide(q.dtype), generator)
    weight = weight if q.dtype == torch.float64 else weight.to(weight_dtype or q.dtype)
    norm = {"output_gate": gates, "norm_weight": weight}
    return {**x, **{name: None if name in without else y for name, y in norm.items()}, **options}


def ssd_inputs(workload: Workload, **changes: object) -> dict[str, Any]:
    """Returns the arguments of `chunk_ssd` by name."""
    sizes = {**workload.sizes, **changes}
    without, weight_dtype = sizes.pop("without", ()), sizes.pop("weight_dtype", None)
    rate, per_channel = sizes.pop("rate", 1 / 8), sizes.pop("D_form", None) == "channel"
    options = {name: sizes.pop(name) for name in ("dt_softplus", "dt_min", "dt_max") if name in sizes}
    x, generator = gla_inputs(**sizes), _generator({**sizes, "seed": sizes.get("seed", 0) + 1})
    B, T, Hv, V = x.v.shape
    weight_dtype = weight_dtype or x.q.dtype
    optional = {
        "D": normal((Hv, V) if per_channel else (Hv,), weight_dtype, generator),
        "dt_bias": normal((Hv,), weight_dtype, generator),
    }
    others = {
        "dt": normal((B, T, Hv), sizes.get("gate_dtype") or x.q.dtype, generator),
        "A": -rate * normal((Hv,), wide(x.q.dtype), generator).exp(),
    }
    optional["z"] = normal((B, T, Hv, V), x.q.dtype, generator)
    return {
        "q": x.q,
        "k": x.k,
        "x": x.v,
        **others,
        **{name: None if name in without else y for name, y in optional.items()},
        "initial_state": x.initial_state,
        "cu_seqlens": x.cu_seqlens,
        "output_final_state": x.initial_state is not None,
        **options,
    }


def ssd_step_inputs(workload: Workload, **changes: object) -> dict[str, Any]:
    """Returns the arguments of `recurrent_ssd_step` by name, without the scale."""
    sizes = {**workload.sizes, **changes}
    without, other_dtype = sizes.pop("without", ()), sizes.pop("other_dtype", None)
    options = {name: sizes.pop(name) for name in ("dt_softplus", "A_is_log") if name in sizes}
    x, generator = step_inputs(workload, gla_inputs, **changes), _generator({**sizes, "seed": sizes.get("seed", 0) + 1})
    q, v = x["q"], x["v"]
    assert q is not None
    assert v is not None
    (B, Hv, V), dtype = v.shape, q.dtype if q.dtype == torch.float64 else other_dtype or q.dtype
    dt, A, dt_bias, D, z = (normal(s, dtype, generator) for s in ((B, Hv), (Hv,), (Hv,), (Hv,), (B, Hv, V)))
    if not options.get("dt_softplus"):
        dt, dt_bias = dt.abs(), dt_bias.abs()
    optional = {"dt_bias": dt_bias, "D": D, "z": z.to(q.dtype)}
    others = {"dt": dt, "A": A if options.get("A_is_log") else -A.exp(), **optional}
    return {**x, **{name: None if name in without else y for name, y in others.items()}, **options}


def pool_inputs(workload: Workload, inputs: Callable[..., Any] = gla_inputs, **changes: object) -> dict[str, Any]:
    """Returns the arguments of prompts in a pool by name, without the scale and `out`; `inputs` as in `step_inputs`."""
    names = ("read_slots", "write_slots", "has_state", "checkpoint_offsets", "checkpoint_slots")
    return _served_inputs(workload, names, {**workload.sizes, **changes}, inputs)


def steps_inputs(workload: Workload, inputs: Callable[..., Any] = gla_inputs, **changes: object) -> dict[str, Any]:
    """Returns the arguments of several steps by name, without the scale and `out`; `inputs` as in `step_inputs`."""
    names = ("slots", "num_accepted", "read_slots", "has_state")
    x = _served_inputs(workload, names, {**workload.sizes, **changes}, inputs)
    return {**x, "slots": x["slots"].reshape(len(x["slots"]), -1 if len(x["slots"]) else 1)}


def replay_inputs(workload: Workload, inputs: Callable[..., Any] = gla_inputs, **changes: object) -> dict[str, Any]:
    """Returns the arguments of a replay by name, without the scale and `out`; `inputs` as in `step_inputs`."""
    sizes = {**workload.sizes, **changes}
    L, ring_dtype, page = sizes.pop("L"), sizes.pop("ring_dtype", None), sizes.get("page", 0)
    x = _served_inputs(workload, ("slots", "ring_start", "num_accepted", "has_state"), sizes, inputs)
    generator, dtype = _generator({**sizes, "seed": sizes.get("seed", 0) + 1}), x["q"].dtype

    def ring(of: str, new: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        return _pages(new, len(x["pool"]), (L, *x[of].shape[2:]), page, dtype, generator)

    def kept(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return normal(shape, x["q"].dtype, generator).to(dtype)

    ring_dtype = dtype if dtype == torch.float64 else ring_dtype or dtype
    gates = functools.partial(random_gate, kind=sizes.get("gates", "mild"))
    rings: dict[str, Tensor | None] = {"ring_k": ring("k", kept, ring_dtype), "ring_v": ring("v", kept, ring_dtype)}
    differs = x["g"] is not None and x["g"].ndim > 1
    rings["ring_g"] = ring("g", gates, wide(dtype)) if differs else None
    return {**x, **rings}


def _served_inputs(
    workload: Workload, names: tuple[str, ...], sizes: dict[str, Any], inputs: Callable[..., Any]
) -> dict[str, Any]:
    """Returns tokens, a pool, and the arguments of these names, which hold numbers for each sequence."""
    served = {name: sizes.pop(name, default) for name, default in (*_POOL_SIZES.items(), *dict.fromkeys(names).items())}
    x = inputs(**{**sizes, "initial_state": True})
    assert x.initial_state is not None
    dtype = _pool_dtype(x.q.dtype, served["pool_dtype"])
    pool = _pages(normal, served["pool"], tuple(x.initial_state.shape[1:]), served["page"], dtype, _generator(sizes))
    integers = {name: None if served[name] is None else _integers(served[name], x.q.device) for name in names}
    tokens = {name: getattr(x, name) for name in PUBLIC_OPS[workload.op].tokens}
    return {**tokens, "pool": pool, "cu_seqlens": x.cu_seqlens, **integers, "pad_slot": served["pad_slot"]}


_LAYER_SIZES = ("without", "weight_dtype", "norm_eps", "activation", "other_dtype", "dt_softplus", "A_is_log")
"""The sizes of a workload that only recurrent_gla_layer_step or recurrent_ssd_step has."""


def _integers(numbers: tuple, device: torch.device) -> Tensor:
    """Returns numbers, none or more, as int64; flags as bool."""
    return torch.tensor(numbers, dtype=None if numbers else torch.int64, device=device)


def _pages(
    new: Callable[..., Any],
    count: int,
    shape: tuple[int, ...],
    page: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Returns random numbers [count, *shape], with `page` unused numbers in memory after each of the `count`."""
    size = math.prod(shape)
    return new((count, size + page), dtype=dtype, generator=generator)[:, :size].unflatten(1, shape)


_POOL_SIZES: Mapping[str, Any] = {"pool": 1, "pool_dtype": torch.float32, "page": 0, "pad_slot": -1}
"""The sizes of a workload that only ops with a pool have, with their defaults."""


def _pool_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a pool with q of this dtype."""
    return torch.float64 if dtype == torch.float64 else asked or torch.float32


def beyond_float16(x: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call in a pool, changed so that each token writes states above the range of float16.

    These are the first columns of V, which reach 2^17 and more; o stays within the range. A delta rule bounds states by
    v / |k|, so its new keys are short, and its beta is about 1 / |k|^2.
    """
    large = {name: 2**7 * (1 + y.abs()) for name in ("k", "ring_k") if (y := x.get(name)) is not None}
    columns = {"v": 2**10, "ring_v": 2**10}
    if "beta" in x:
        large |= {"k": x["k"].abs() * 2**-5, "beta": x["beta"] * 2**10}
        columns["v"] = 2**15
    for name in columns.keys() & x.keys():
        large[name] = x[name].clone()
        large[name][..., 0] = columns[name]
    return {**x, **large, "q": x["q"] * 2**-10}


def softmax_inputs(workload: Workload, **changes: object) -> tuple[Tensor, int]:
    """Returns the arguments x and dim of `online_softmax`."""
    sizes = {"dim": -1, "dtype": torch.float32, "masked": False, **workload.sizes, **changes}
    x = normal(sizes["shape"], sizes["dtype"], _generator(sizes))
    if sizes["masked"]:
        x[0, : x.shape[1] // 2], x[1, 1:], x[2, -5:] = -torch.inf, -torch.inf, -torch.inf
    return x, sizes["dim"]


def attention_inputs(workload: Workload, **changes: object) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Returns the arguments q, k, v and causal of `softmax_attention`."""
    sizes = {"G": 1, "causal": False, "dtype": torch.float32, **workload.sizes, **changes}
    B, Tq, Tk, H, K, V = (sizes[name] for name in ("B", "Tq", "Tk", "H", "K", "V"))
    generator = _generator(sizes)
    shapes = ((B, Tq, H * sizes["G"], K), (B, Tk, H, K), (B, Tk, H, V))
    q, k, v = (normal(shape, sizes["dtype"], generator) for shape in shapes)
    return q, k, v, sizes["causal"]


def _generator(sizes: dict) -> torch.Generator:
    return torch.Generator(sizes.get("device", "cpu")).manual_seed(sizes.get("seed", 0))


def _chunk_arguments(workload: Workload, inputs: Callable[..., Any] = gla_inputs, **changes: object) -> dict[str, Any]:
    x = inputs(**{**workload.sizes, **changes})
    names = (*PUBLIC_OPS[workload.op].tokens, "initial_state", "cu_seqlens")
    return {**{name: getattr(x, name) for name in names}, "output_final_state": x.initial_state is not None}


def _summary_arguments(
    workload: Workload, inputs: Callable[..., Any] = gla_inputs, **changes: object
) -> dict[str, Any]:
    x, spec = inputs(**{**workload.sizes, **changes}), PUBLIC_OPS[workload.op]
    named = {"left": x.k, "right": x.v, "do": x.v}
    tokens = {name: named[name] if name in named else getattr(x, name) for name in spec.tokens}
    return {**tokens, "cu_seqlens": x.cu_seqlens}


_ARGUMENTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "chunk_gla": _chunk_arguments,
    "chunk_gla_pool": pool_inputs,
    "chunk_ssd": ssd_inputs,
    "chunk_gla_summary": _summary_arguments,
    "recurrent_gla_step": step_inputs,
    "recurrent_gla_layer_step": layer_step_inputs,
    "recurrent_ssd_step": ssd_step_inputs,
    "recurrent_gla_steps": steps_inputs,
    "recurrent_gla_replay": replay_inputs,
    "chunk_delta": functools.partial(_chunk_arguments, inputs=delta_inputs),
    "chunk_delta_pool": functools.partial(pool_inputs, inputs=delta_inputs),
    "chunk_delta_summary": functools.partial(_summary_arguments, inputs=delta_inputs),
    "chunk_delta_gradient_summary": functools.partial(_summary_arguments, inputs=delta_inputs),
    "recurrent_delta_step": functools.partial(step_inputs, inputs=delta_inputs),
    "recurrent_delta_steps": functools.partial(steps_inputs, inputs=delta_inputs),
    "recurrent_delta_replay": functools.partial(replay_inputs, inputs=delta_inputs),
    "online_softmax": lambda workload, **changes: dict(
        zip(("x", "dim"), softmax_inputs(workload, **changes), strict=True)
    ),
    "softmax_attention": lambda workload, **changes: dict(
        zip(("q", "k", "v", "causal"), attention_inputs(workload, **changes), strict=True)
    ),
}


def arguments(workload: Workload, **changes: object) -> dict[str, Any]:
    """Returns the arguments of the public op by name, without `backend`; `changes` as in `chunk_inputs`."""
    return PUBLIC_OPS[workload.op].as_public(_ARGUMENTS[workload.op](workload, **changes))


def describe(op: str, sizes: Mapping[str, Any], device: torch.device, **facts: Any) -> OpCall:
    """Returns the call of an abstract op with a workload's sizes, without its tensors.

    Args:
        facts: further fields of `OpCall`, by name.
    """
    spec, dtype = ABSTRACT_OPS[op], sizes.get("dtype", torch.float32)
    gated = spec.has(Role.GATE) is not None and sizes.get("gates") != "none"
    fields = {
        "gate_dtype": (sizes.get("gate_dtype") or dtype) if gated else None,
        "gate_form": sizes.get("gate_form", "key") if gated else None,
        "variable_length": sizes.get("lengths") is not None,
        "indexed": sizes.get("rows") is not None,
        "scalars": {a.name: sizes[a.name] for a in spec.arguments if a.dtype is None and a.name in sizes},
    }
    if spec.requires(Role.STATE):
        fields["state_dtype"] = _pool_dtype(dtype, sizes.get("pool_dtype"))
    elif spec.has(Role.STATE) is not None:
        fields["state_dtype"] = wide(dtype) if sizes.get("initial_state") else None
    call = spec.call(_dims(sizes), device, dtype, **{**fields, **facts})
    # An `OpCall` has no field for these arguments.
    optional = {a.name for a in spec.arguments if a.role is Role.MARKS and sizes.get(a.name) is not None}
    inputs = {a.name for a in spec.arguments if a.is_optional_input}.difference(left_out(sizes))
    return dataclasses.replace(call, given=call.given | optional | inputs)


def left_out(sizes: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the optional inputs that the call of a workload leaves out."""
    return (*sizes.get("without", ()), *(() if sizes.get("bonus") else ("bonus",)))


def _dims(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of a workload under their names in `OpCall.dims`."""
    if "shape" in sizes:
        others = list(sizes["shape"])
        columns = others.pop(sizes.get("dim", -1))
        return {"rows": math.prod(others), "columns": columns}
    H = sizes["H"]
    heads = {"Hq": H * sizes.get("G", 1), "Hv": H * sizes.get("R", 1)}
    dims = {**sizes, **heads, "P": sizes.get("pool", sizes.get("B", 1))}
    lengths = sizes.get("lengths")
    if lengths is not None:
        rows_of_none = sizes.get("leading", 0) + sizes.get("padding", 0)
        dims |= {"B": 1, "T": sum(lengths) + rows_of_none, "N": len(lengths)}
    slots = sizes.get("slots")
    if slots and isinstance(slots[0], tuple):
        dims["S"] = len(slots[0])
    return dims


# ---- arguments of described calls


def random_arguments(call: OpCall, seed: int = 0) -> tuple[Any, ...]:
    """Returns random arguments with the sizes and dtypes of `call`, in order; equal calls and seeds give equal
    arguments.

    Gates are mild. Packed sequences have different lengths, from half to one and a half times their mean. The keys of a
    delta rule have length 1, and its betas are between 0 and 1.
    """
    spec, generator = ABSTRACT_OPS[call.op], torch.Generator(call.device).manual_seed(seed)
    x = {argument.name: _random(argument, spec, call, generator) for argument in spec.arguments}
    if "beta" in x:
        x |= {"beta": x["beta"].sigmoid(), **{name: _unit(x[name]) for name in ("k", "ring_k") if name in x}}
    return spec.prepared(tuple(x.values()))


def _random(argument: Argument, spec: OpSpec, call: OpCall, generator: torch.Generator) -> Any:
    if argument.hint:
        return call.longest
    if argument.name in spec.places or (argument.is_optional_input and argument.name not in call.given):
        return None
    if argument.dtype is None:
        return call.scalars.get(argument.name, argument.default)
    if argument.role is Role.OFFSETS:
        return _offsets(call.dims["T"], call.dims["N"], generator) if call.variable_length else None
    if argument.role is Role.SLOTS:
        shape = spec.shape(argument, call)
        return _pool_rows(math.prod(shape), call.dims["P"], generator).reshape(shape) if call.indexed else None
    if argument.role is Role.CHECKPOINTS:
        return _checkpoints(call, generator)
    dtype = dtype_in_call(argument, call)
    if dtype is None:
        return None
    shape = spec.shape(argument, call)
    is_gate = argument.role in (Role.GATE, Role.GATE_RING)
    return random_gate(shape, "mild", dtype, generator) if is_gate else normal(shape, dtype, generator)


def _checkpoints(call: OpCall, generator: torch.Generator) -> Tensor | None:
    every = call.scalars["checkpoint_every"]
    if every is None:
        return None
    B, T, Hv, K, V, N = (call.dims[name] for name in ("B", "T", "Hv", "K", "V", "N"))
    n = checkpoint_rows(T, N, every, call.variable_length)
    return normal((B, n, Hv, K, V), checkpoint_dtype(call.dtype), generator)


def _offsets(T: int, N: int, generator: torch.Generator) -> Tensor:
    shares = torch.rand(N, generator=generator, device=generator.device, dtype=torch.float64) + 0.5
    ends = (shares.cumsum(0) * (T / shares.sum())).round().int()
    return torch.nn.functional.pad(ends, (1, 0))


def _pool_rows(B: int, P: int, generator: torch.Generator) -> Tensor:
    """Returns B distinct rows of a pool; if the pool has fewer, the last entries are -1, and skipped."""
    rows = torch.randperm(P, generator=generator, device=generator.device)[:B]
    return torch.nn.functional.pad(rows, (0, B - len(rows)), value=-1)
