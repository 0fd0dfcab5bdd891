"""Calls of an op by the backend under test, the oracle's results, and the memory that the calls allocate."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.cases import Case
from gla_core.conformance.tolerances import FORWARD as BUDGETS
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.tensors import log_gates
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS, OpSpec
from gla_core.ops.spec import AS_INPUT, INPUT
from gla_core.workloads.inputs import (
    GlaInputs,
    arguments,
    attention_inputs,
    chunk_inputs,
    layer_step_inputs,
    normal,
    pool_inputs,
    replay_inputs,
    softmax_inputs,
    step_inputs,
    steps_inputs,
)

Named = dict[str, Tensor]
Loss = tuple[Tensor, Tensor]
"""The gradients do and dstate of the results, from which a backward starts."""

CHECKPOINT_EVERY = 64
CHUNK_LEAVES = ("q", "k", "v", "g", "initial_state")


# ---- chunk_gla


def chunk(case: Case, **changes: object) -> GlaInputs:
    return chunk_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def tokens(x: GlaInputs, start: int | None, stop: int | None, initial_state: Tensor | None = None) -> GlaInputs:
    """Returns the inputs of the tokens `start` to `stop`, with the given initial state and without cu_seqlens."""
    parts = {name: oracle.tokens_of(getattr(x, name), start, stop) for name in "qkvg"}
    return dataclasses.replace(x, **parts, initial_state=initial_state, cu_seqlens=None)


def in_two(x: GlaInputs, cut: int) -> tuple[tuple[Tensor, GlaInputs], tuple[Tensor, GlaInputs]]:
    """Cuts every sequence after `cut` tokens.

    Returns:
        The row numbers and the inputs of the tokens before the cuts, and the same for the tokens after them.
    """
    spans = [(0, x.q.shape[1])] if x.cu_seqlens is None else list(itertools.pairwise(x.cu_seqlens.tolist()))
    cuts = [min(start + cut, end) for start, end in spans]
    early = [(start, middle) for (start, _), middle in zip(spans, cuts, strict=True)]
    late = [(middle, end) for (_, end), middle in zip(spans, cuts, strict=True)]
    return _gathered(x, early), _gathered(x, late)


def _gathered(x: GlaInputs, spans: list[tuple[int, int]]) -> tuple[Tensor, GlaInputs]:
    rows = torch.cat([torch.arange(*span, device=x.q.device) for span in spans])
    parts = {name: y if (y := getattr(x, name)) is None or y.ndim == 1 else y[:, rows] for name in "qkvg"}
    if x.cu_seqlens is not None:
        lengths = [end - start for start, end in spans]
        parts["cu_seqlens"] = torch.tensor([0, *lengths], device=x.q.device).cumsum(0)
    return rows, dataclasses.replace(x, **parts)


def forward(x: GlaInputs, request: str, scale: float | None = None, **options: Any) -> Named:
    """Returns the output o and the final state; `options` are further arguments of `chunk_gla`."""
    o, state = gla.chunk_gla(x.q, x.k, x.v, x.g, scale, x.initial_state, True, x.cu_seqlens, backend=request, **options)
    assert state is not None
    return {"o": o, "state": state}


def training_request(backend: Backend, op: str = "chunk_gla_fwd") -> str:
    """Returns a request: the backend for an op and its backward if it implements them, the reference for all else."""
    spec = _public(op)
    own = [f"{name}={backend.name}" for name in (spec.name, spec.backward) if name in backend.ops]
    return ";".join([*own, "*=reference"])


def gradients(
    x: GlaInputs, request: str, wanted: tuple[str, ...] = CHUNK_LEAVES, loss: Loss | None = None, **options: Any
) -> Named:
    """Computes gradients by autograd for inputs in `wanted` that are not None; `loss` defaults to `loss_gradients`.

    `options` are further arguments of `chunk_gla`.
    """
    leaves = {name: getattr(x, name) for name in wanted if getattr(x, name) is not None}
    leaves = {name: y.detach().requires_grad_() for name, y in leaves.items()}
    y = dataclasses.replace(x, **leaves)
    o, state = gla.chunk_gla(y.q, y.k, y.v, y.g, None, y.initial_state, True, y.cu_seqlens, backend=request, **options)
    assert state is not None
    found = torch.autograd.grad((o, state), list(leaves.values()), loss or loss_gradients(x))
    return {f"d{name}": d for name, d in zip(leaves, found, strict=True)}


def checkpoints(x: GlaInputs, request: str, every: int, **options: Any) -> Named:
    """Returns the checkpoints, o and the final state; `options` are further arguments of `chunk_gla`."""
    o, state, found = gla.chunk_gla(
        *(x.q, x.k, x.v, x.g, None, x.initial_state, True, x.cu_seqlens),
        backend=request,
        checkpoint_every=every,
        **options,
    )
    assert state is not None
    return {"o": o, "state": state, "checkpoints": found}


def expected_checkpoints(x: GlaInputs, every: int) -> Tensor:
    """Returns the oracle's checkpoints, in float64."""
    return oracle.chunk_gla_checkpoints(x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens, every)


def checkpoint_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32


def backward(
    x: GlaInputs,
    backend: Backend,
    do: Tensor,
    dstate: Tensor | None,
    checkpoints: Tensor | None = None,
    every: int | None = None,
    gate_normalizer: int | None = None,
) -> Named:
    """Calls the op chunk_gla_bwd without autograd; returns the gradients of the inputs that are not None."""
    args = (x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens, checkpoints, every, do, dstate, gate_normalizer)
    found = zip(CHUNK_LEAVES, torch.ops.gla.chunk_gla_bwd.default(*args, backend=backend.name), strict=True)
    return {f"d{name}": d for name, d in found if getattr(x, name) is not None}


def loss_gradients(x: GlaInputs) -> Loss:
    """Returns random do and dstate; equal shapes give equal numbers."""
    generator = torch.Generator(x.q.device).manual_seed(1)
    N = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    state_dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    do = normal(output_shape(x.q, x.v), x.q.dtype, generator)
    return do, normal((N, x.v.shape[2], x.k.shape[3], x.v.shape[3]), state_dtype, generator)


def output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Returns the shape of o, [B, T, Ho, V]; [B, Ho, V] for one token."""
    return (*q.shape[:-2], max(q.shape[-2], v.shape[-2]), v.shape[-1])


@functools.lru_cache(maxsize=256)
def expected_forward(case: Case) -> Named:
    """Returns the oracle's o and final state."""
    return oracle_forward(chunk(case))


def oracle_forward(x: GlaInputs, scale: float | None = None) -> Named:
    o, state = oracle.chunk_gla(x.q, x.k, x.v, x.g, scale, x.initial_state, x.cu_seqlens)
    return {"o": o, "state": state}


@functools.lru_cache(maxsize=256)
def expected_gradients(case: Case) -> Named:
    """Returns the oracle's gradients, by autograd in float64."""
    return oracle_gradients(chunk(case))


def oracle_gradients(x: GlaInputs, loss: Loss | None = None, gate_normalizer: int | None = None) -> Named:
    """Returns the oracle's gradients for a loss; with gate_normalizer, x.g holds logits."""
    leaves = {name: getattr(x, name) for name in CHUNK_LEAVES if getattr(x, name) is not None}
    leaves = {name: y.detach().double().requires_grad_() for name, y in leaves.items()}
    y = with_log_gates(dataclasses.replace(x, **leaves), gate_normalizer)
    outs = oracle.chunk_gla(y.q, y.k, y.v, y.g, None, y.initial_state, y.cu_seqlens)
    # with T = 0 the results use no input, and autograd would raise an error
    outs = tuple(out + 0 * sum(leaf.sum() for leaf in leaves.values()) for out in outs)
    seeds = tuple(d.double() for d in loss or loss_gradients(x))
    found = torch.autograd.grad(outs, list(leaves.values()), seeds)
    return {f"d{name}": d for name, d in zip(leaves, found, strict=True)}


def with_logits(x: GlaInputs) -> GlaInputs:
    """Returns the inputs with random logits in place of log gates."""
    assert x.g is not None
    generator = torch.Generator(x.g.device).manual_seed(3)
    return dataclasses.replace(x, g=3 * normal(tuple(x.g.shape), x.g.dtype, generator))


def with_log_gates(x: GlaInputs, gate_normalizer: int | None) -> GlaInputs:
    """Returns the inputs with log gates, in float64, in place of logits."""
    return x if x.g is None else dataclasses.replace(x, g=log_gates(x.g, gate_normalizer, torch.float64))


# ---- large chunk_gla: the reference in float64 gives the expected results, one row of the batch at a time to save
# memory


def reference_forward(x: GlaInputs) -> Named:
    """Returns the reference's o and final state."""
    return _joined([forward(_wide_row(x, row), "reference") for row in _rows(x)])


def reference_gradients(x: GlaInputs) -> Named:
    """Returns the reference's gradients for the loss of `loss_gradients`."""
    reference = registry.get("reference")
    do, dstate = (d.double() for d in loss_gradients(x))
    rows = [backward(_wide_row(x, row), reference, do[row], dstate[row]) for row in _rows(x)]
    found = _joined(rows)
    if x.g is not None and x.g.ndim == 1:  # all rows share a constant gate, and its gradient is a sum
        found["dg"] = torch.stack([row["dg"] for row in rows]).sum(0)
    return found


def _rows(x: GlaInputs) -> list[slice]:
    """Returns a slice for each row of the batch and its state. Packed sequences are one row with all their states."""
    B = len(x.q)
    return [slice(None)] if B == 1 else [slice(b, b + 1) for b in range(B)]


def _wide_row(x: GlaInputs, row: slice) -> GlaInputs:
    given = {name: y for name in CHUNK_LEAVES if (y := getattr(x, name)) is not None}
    return dataclasses.replace(x, **{name: (y if y.ndim == 1 else y[row]).double() for name, y in given.items()})


def _joined(rows: list[Named]) -> Named:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


# ---- the other ops


def summary(case: Case, backwards: bool = False, **changes: object) -> dict[str, Any]:
    """Returns the arguments of the op chunk_gla_summary: left and right are k and v, or q and do if `backwards`."""
    x = chunk(case, **changes)
    left, right = (x.q, loss_gradients(x)[0]) if backwards else (x.k, x.v)
    return {"left": left, "right": right, "g": x.g, "cu_seqlens": x.cu_seqlens, "backwards": backwards}


def run_summary(x: dict[str, Any], request: str) -> Named:
    function = gla.chunk_gla_gradient_summary if x["backwards"] else gla.chunk_gla_summary
    found = function(x["left"], x["right"], x["g"], x["cu_seqlens"], backend=request)
    return dict(zip(("decay", "state"), found, strict=True))


def expected_summary(x: dict[str, Any]) -> Named:
    return dict(zip(("decay", "state"), oracle.chunk_gla_summary(**x), strict=True))


def pool(case: Case, **changes: object) -> dict[str, Any]:
    """Returns the arguments of `chunk_gla_pool` by name."""
    return pool_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def run_pool(x: dict[str, Any], request: str, **options: Any) -> Named:
    """Returns the output o and the pool x["pool"], which is written; `options` are further arguments."""
    o = gla.chunk_gla_pool(**ABSTRACT_OPS["chunk_gla_pool"].as_public(x), backend=request, **options)
    return {"o": o, "pool": x["pool"]}


def expected_pool(x: dict[str, Any], scale: float | None = None, gate_normalizer: int | None = None) -> Named:
    """Returns the oracle's o and pool, in float64; with gate_normalizer, x["g"] holds logits.

    States that are not written are those of x["pool"], which is left unchanged.
    """
    g = None if x["g"] is None else log_gates(x["g"], gate_normalizer, torch.float64)
    return _with_states(x, *oracle.chunk_gla_pool(**{**x, "g": g}, scale=scale))


def _with_states(x: dict[str, Any], o: Tensor, written: dict[int, Tensor]) -> Named:
    """Returns o, and the pool in float64 with the states that were written, by slot."""
    states = x["pool"].double().clone()
    for slot, state in written.items():
        states[slot] = state
    return {"o": o, "pool": states}


def steps(case: Case, **changes: object) -> dict[str, Any]:
    """Returns the arguments of `recurrent_gla_steps` by name."""
    return steps_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def run_steps(x: dict[str, Any], request: str, **options: Any) -> Named:
    """Returns the output o and the pool x["pool"], which is written; `options` are further arguments."""
    o = gla.recurrent_gla_steps(**x, backend=request, **options)
    return {"o": o, "pool": x["pool"]}


def expected_steps(x: dict[str, Any], scale: float | None = None, gate_normalizer: int | None = None) -> Named:
    """Returns the oracle's o and pool, in float64, as `expected_pool` does."""
    g = None if x["g"] is None else log_gates(x["g"], gate_normalizer, torch.float64)
    return _with_states(x, *oracle.recurrent_gla_steps(**{**x, "g": g}, scale=scale))


def replay(case: Case, **changes: object) -> dict[str, Any]:
    """Returns the arguments of `recurrent_gla_replay` by name."""
    return replay_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def run_replay(x: dict[str, Any], request: str, **options: Any) -> Named:
    """Returns the output o, and the pool and the rings of x, which are written; `options` are further arguments."""
    o = gla.recurrent_gla_replay(**x, backend=request, **options)
    return {"o": o, "pool": x["pool"], **rings_of(x)}


def expected_replay(x: dict[str, Any], scale: float | None = None, gate_normalizer: int | None = None) -> Named:
    """Returns the oracle's o, pool and rings, as `expected_pool` does."""
    g = None if x["g"] is None else log_gates(x["g"], gate_normalizer, torch.float64)
    o, states, entries = oracle.recurrent_gla_replay(**{**x, "g": g}, scale=scale)
    rings = {name: ring.double().clone() for name, ring in rings_of(x).items()}
    for place, of_token in entries.items():
        for name, kept in zip(("ring_k", "ring_v", "ring_g"), of_token, strict=True):
            if kept is not None:
                rings[name][place] = kept.double()
    return {**_with_states(x, o, states), **rings}


def rings_of(x: dict[str, Any]) -> Named:
    """Returns the rings that a call of `recurrent_gla_replay` is given, by name."""
    return {name: x[name] for name in ("ring_k", "ring_v", "ring_g") if x[name] is not None}


def pool_budget(x: dict[str, Any]) -> float:
    """Returns the error that is allowed for a call: that of its inputs, or of its pool if that has fewer bits."""
    return max(BUDGETS[x["q"].dtype], BUDGETS[x["pool"].dtype])


def step(case: Case, **changes: object) -> dict[str, Tensor | None]:
    return step_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def run_step(x: dict, request: str, scale: float | None = None, inplace: bool = False, **options: Any) -> Named:
    """Returns the output o and the new state; `options` are further arguments of `recurrent_gla_step`."""
    o, state = gla.recurrent_gla_step(
        **ABSTRACT_OPS["recurrent_gla_step"].as_public(x), scale=scale, inplace=inplace, backend=request, **options
    )
    return {"o": o, "state": state}


def expected_step(x: dict, scale: float | None = None) -> Named:
    """Returns the oracle's o and state; rows whose index lies outside the pool are skipped."""
    q, k, v, g, state, indices = (x[name] for name in ("q", "k", "v", "g", "state", "state_indices"))
    rows = torch.arange(len(q), device=q.device) if indices is None else indices.long()
    used = (rows >= 0) & (rows < len(state))
    before, new = state.double()[rows[used]], state.double().clone()
    q1, k1, v1 = (y[used][:, None] for y in (q, k, v))
    g1 = g if g is None or g.ndim == 1 else g[used][:, None]
    o = torch.zeros(output_shape(q, v), dtype=torch.float64, device=q.device)
    o1, new[rows[used]] = oracle.chunk_gla(q1, k1, v1, g1, scale, before)
    o[used] = o1[:, 0]
    return {"o": o, "state": new}


def layer_step(case: Case, **changes: object) -> dict[str, Any]:
    """Returns the arguments of `recurrent_gla_layer_step` by name."""
    return layer_step_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def run_layer_step(x: dict[str, Any], request: str, **options: Any) -> Named:
    """Returns the output o and the state x["state"], which is written; `options` are further arguments."""
    o = gla.recurrent_gla_layer_step(
        **ABSTRACT_OPS["recurrent_gla_layer_step"].as_public(x), backend=request, **options
    )
    return {"o": o, "state": x["state"]}


def expected_layer_step(x: dict[str, Any], scale: float | None = None, gate_normalizer: int | None = None) -> Named:
    """Returns the oracle's o and state, in float64; with gate_normalizer, x["g"] holds logits.

    A row whose index lies outside the pool is skipped: its o is 0, whatever its output gate holds.
    """
    g = None if x["g"] is None else log_gates(x["g"], gate_normalizer, torch.float64)
    found, indices = expected_step({**x, "g": g}, scale), x["state_indices"]
    options = {name: x[name] for name in ("norm_eps", "activation") if name in x}
    o = oracle.normed(found["o"], x["output_gate"], x["norm_weight"], **options)
    used = o.new_ones(len(o), dtype=torch.bool) if indices is None else (indices >= 0) & (indices < len(x["state"]))
    return {"o": torch.where(used.to(o.device)[:, None, None], o, 0), "state": found["state"]}


def softmax(case: Case, **changes: object) -> tuple[Tensor, int]:
    return softmax_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def attention(case: Case, **changes: object) -> tuple[Tensor, Tensor, Tensor, bool]:
    return attention_inputs(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})


def run_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, request: str, scale: float | None = None) -> Named:
    o, lse = gla.softmax_attention(q, k, v, scale, causal, backend=request)
    return {"o": o, "lse": lse}


def expected_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Named:
    o, lse = oracle.softmax_attention(q, k, v, scale, causal)
    return {"o": o, "lse": lse}


# ---- any op, as a torch op


def torch_op(case: Case, request: str, inplace: bool = False) -> tuple[Any, tuple]:
    """Returns the torch op of a case and its arguments, which require gradients if the case needs them."""
    spec, op = ABSTRACT_OPS[case.op], getattr(torch.ops.gla, case.op + "_" * inplace).default
    given = arguments(case.workload, dtype=case.dtype, device=case.device)
    given |= {"output_final_state": True, "checkpoint_every": CHECKPOINT_EVERY if case.checkpoints else None}
    if "do" in spec.parameters:
        given |= dict(zip(("do", "dstate"), loss_gradients(chunk(case)), strict=True))
    given = {spec.names.get(name, name): x for name, x in given.items()}
    for argument in spec.arguments if case.needs_grad else ():
        if argument.differentiable and given[argument.name] is not None:
            given[argument.name].requires_grad_()
    taken = spec.complete((), {name: x for name, x in given.items() if name in spec.parameters})
    given = {**dict(zip(spec.parameters, taken, strict=True)), "needs_grad": case.needs_grad, "backend": request}
    return op, tuple(given[argument.name] for argument in op._schema.arguments)


# ---- any op, as its public function


def given(case: Case, **changes: object) -> dict[str, Any]:
    """Returns the arguments of the public function by name, with `output_final_state=True` if it has that."""
    found = arguments(case.workload, **{"dtype": case.dtype, "device": case.device, **changes})
    return found | ({"output_final_state": True} if "output_final_state" in _public(case.op).parameters else {})


def results(op: str, given: dict[str, Any], request: str) -> Named:
    """Returns the results of the public function by name, without those that are None.

    Tensors that the op always writes are results too. They are copies of the given ones, so that another call with the
    same arguments begins with the same values.
    """
    spec = _public(op)
    written = {name: x.clone() for name in spec.written if (x := given.get(name)) is not None}
    found = getattr(gla, spec.public)(**given | written, backend=request)
    found = found if isinstance(found, tuple) else (found,)
    return {y.name: x for y, x in zip(spec.results, found, strict=False) if x is not None} | written


def with_gradients(op: str, given: dict[str, Any], run: Callable[[dict[str, Any]], Named]) -> Named:
    """Returns the results of `run` on the arguments, and the gradients of a loss that depends on every result."""
    leaves = {name: given[name].detach().requires_grad_() for name in differentiable(op, given)}
    out = run(given | leaves)
    losses = [x.square().sum() for x in out.values() if x.requires_grad]
    found = torch.autograd.grad(losses, list(leaves.values()))
    return {name: x.detach() for name, x in out.items()} | {
        f"d{name}": d for name, d in zip(leaves, found, strict=True)
    }


def differentiable(op: str, given: dict[str, Any]) -> list[str]:
    """Returns the names of the differentiable arguments of the public function that are not None."""
    names = [a.public or a.name for a in _public(op).arguments if a.differentiable]
    return [name for name in names if given.get(name) is not None]


def autocast_dtype(case: Case) -> torch.dtype:
    """Returns the dtype in which the op of a case computes under autocast with the dtype of the case."""
    return torch.float32 if _public(case.op).autocast_in_float32 else case.dtype


def cast(op: str, given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Casts the arguments that autocast casts; gates and states stay as they are."""
    names = [a.public or a.name for a in _public(op).arguments if a.dtype in (INPUT, AS_INPUT)]
    return {name: x.to(dtype) if name in names and x is not None else x for name, x in given.items()}


def _public(op: str) -> OpSpec:
    """Returns the op that the public function of `op` runs."""
    return PUBLIC_OPS[ABSTRACT_OPS[op].public]


# ---- rows, views and memory


def rows_of_no_sequence(cu_seqlens: Tensor, T: int) -> Tensor:
    """Returns a mask [T] of the rows before the first packed sequence and after the last one."""
    rows = torch.arange(T, device=cu_seqlens.device)
    return (rows < cu_seqlens[0]) | (rows >= cu_seqlens[-1])


def heads_first(x: Tensor) -> Tensor:
    """Returns the values of x [B, T, H, ...] with the memory layout [B, H, T, ...]; a constant gate [H] as it is."""
    return x if x.ndim == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def with_room(x: Tensor) -> Tensor:
    """Returns the values of states x [N, H, K, V] with unused memory between the heads of a state."""
    return torch.nn.functional.pad(x, (0, 0, 1, 2))[:, :, 1:-2]


def last_two_swapped(x: Tensor) -> Tensor:
    """Returns the values of x with its last two dimensions swapped in memory: states [N, H, K, V] as [N, H, V, K]."""
    return x.mT.contiguous().mT


def repeated(x: Tensor, *dimensions: int) -> Tensor:
    """Returns the first entry of x along `dimensions`, expanded to the shape of x with stride 0."""
    shape = x.shape
    for dimension in dimensions:
        x = x.narrow(dimension, 0, 1)
    return x.expand(shape)


@contextmanager
def poisoned(can: Capabilities, device: str) -> Iterator[None]:
    """Fills uninitialised memory with NaN, so that a result that is not fully written shows it.

    For a deterministic backend, PyTorch fills every new tensor. For other backends, only freed memory that is used
    again holds NaN.
    """
    fill_freed_memory(float("nan"), device)
    if not can.deterministic:  # refused under use_deterministic_algorithms
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill


def fill_freed_memory(value: float, device: str) -> None:
    """Fills memory blocks of many sizes with `value`, and frees them."""
    held = [torch.full((1 << size,), value, device=device) for size in range(4, 19) for _ in range(2)]
    del held


def three_runs(function: Callable[[], Named], device: str) -> list[Named]:
    """Returns the results of three runs, each with a different value in freed memory."""
    results = []
    for value in (float("nan"), 0.0, 1e30):
        fill_freed_memory(value, device)
        results.append(function())
    return results


def pages_of(states: Tensor) -> Tensor:
    """Returns the whole memory of a pool as integers, a row for each page, so that NaN equals itself."""
    pages = states.as_strided((len(states), states.stride(0)), (states.stride(0), 1), 0)
    return pages.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[states.element_size()])


def beyond_float16(x: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call on a pool, changed so that each token writes states above the range of float16.

    These are the first columns of V, which reach 2^17 and more; o stays within the range.
    """
    large = {name: 2**7 * (1 + y.abs()) for name in ("k", "ring_k") if (y := x.get(name)) is not None}
    for name in ("v", "ring_v"):
        if name in x:
            large[name] = x[name].clone()
            large[name][..., 0] = 2**10
    return {**x, **large, "q": x["q"] * 2**-10}


def rounded_states(expected: Named, dtype: torch.dtype) -> Named:
    """Returns expected results with states as a pool of this dtype holds them, above the range of float16 as inf."""
    return {**expected, "pool": expected["pool"].to(dtype).double()}


def check_served(
    x: dict[str, Any], run: Callable[[], Named], expected: Named, written: list[int], measure: Callable[..., None]
) -> Named:
    """Runs a call on a pool. Compares o and the slots `written` with `expected`, and all other memory by its bits."""
    before = pages_of(x["pool"]).clone()
    out = run()
    assert out["o"].dtype == x["v"].dtype
    measure({"o": out["o"]}, {"o": expected["o"]}, BUDGETS[x["q"].dtype])
    measure({"states": out["pool"][written]}, {"states": expected["pool"][written]}, pool_budget(x))
    after, size = pages_of(x["pool"]).clone(), x["pool"][0].numel()
    for memory in (before, after):
        memory[written, :size] = 0
    assert torch.equal(after, before), "memory of the pool that belongs to no written slot was changed"
    return out
