"""Calls of an op by the backend under test, the oracle's results, and the memory that the calls allocate.

A call is a name and arguments. The name is that of an abstract op or of a public function, as in `RUNS`, and the
arguments are those of the public function, by name. A backward op, which has no public function, also takes the
gradients of the results, such as do and dstate.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gla_core as gla
from gla_core.conformance.cases import Case, is_backward
from gla_core.conformance.oracle import ORACLES
from gla_core.conformance.tolerances import FORWARD, GRADIENT
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.tensors import log_gates, wide
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS, RUNS, OpSpec
from gla_core.ops.spec import AS_INPUT, INPUT, Argument, Role
from gla_core.workloads.inputs import GlaInputs, arguments, chunk_inputs, normal

Named = dict[str, Tensor]
Arguments = dict[str, Any]
Measure = Callable[..., None]

CHECKPOINT_EVERY = 64
RINGS = ("ring_k", "ring_v", "ring_g")
NOT_ASKED = ("out", "inplace", "output_final_state", "max_seqlen", "gate", "gate_normalizer")
"""The arguments that oracles do not take: their gates are log gates, and the others change no value of a result."""


class Expected(NamedTuple):
    """The results that the oracle expects of a call, in float64.

    Attributes:
        results: the results by name, and the tensors that the call writes.
        written: for a pool and its rings, the entries that the call writes, as an index.
    """

    results: Named
    written: dict[str, Any]


# ---- arguments


def call_arguments(case: Case, **changes: object) -> Arguments:
    """Returns the arguments of the call of a case; `changes` override sizes of its workload."""
    x = inputs(case, **changes)
    return with_loss(case.op, x) if is_backward(case.op) else x


def inputs(case: Case, **changes: object) -> Arguments:
    """Returns the arguments of the public function, with `output_final_state=True` if it has that."""
    changes = {"dtype": case.dtype, "device": case.device, **changes}
    if case.function == "chunk_gla_gradient_summary":
        x = chunk_inputs(case.workload, **changes)
        return {"q": x.q, "do": loss_gradients("chunk_gla", x)["o"], "g": x.g, "cu_seqlens": x.cu_seqlens}
    asked = {"output_final_state": True} if "output_final_state" in public_op(case.op).parameters else {}
    return arguments(case.workload, **changes) | asked


def by_name(x: Arguments | GlaInputs) -> Arguments:
    """Returns the arguments of a call by name; inputs of `chunk_gla` ask for the final state."""
    if not isinstance(x, GlaInputs):
        return x
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)} | {"output_final_state": True}


def public_op(name: str) -> OpSpec:
    """Returns the op that the public function runs; for a backward op, its forward."""
    return PUBLIC_OPS[RUNS[name][0].public]


def tensors(x: Arguments) -> Named:
    return {name: y for name, y in x.items() if isinstance(y, Tensor)}


def described(name: str) -> dict[str, Argument]:
    """Returns the descriptions of the arguments of a call."""
    spec, fixed = RUNS[name]
    if fixed:  # a function with fixed arguments has other names for the rest, in the same order
        return dict(zip(inspect.signature(getattr(gla, name)).parameters, spec.arguments, strict=False))
    return {a.public or a.name: a for a in spec.arguments}


def tokens(name: str, x: Arguments) -> Named:
    """Returns the arguments of a call with one row a token, [B, T, ...]; a constant gate has none."""
    places = RUNS[name][0].places
    rows = [n for n, a in described(name).items() if (a.shape or "").startswith("B T ") and a.name not in places]
    return {n: y for n in rows if (y := x.get(n)) is not None and y.ndim > 1}


def span(name: str, x: Arguments, start: int | None, stop: int | None, **changes: object) -> Arguments:
    """Returns a call on the tokens `start` to `stop` of every row, without offsets."""
    parts = {n: y[:, start:stop] for n, y in tokens(name, x).items()}
    return {**x, **parts, **({"cu_seqlens": None} if "cu_seqlens" in x else {}), **changes}


def alone(name: str, x: Arguments, n: int) -> Arguments:
    """Returns a call on sequence n alone: its tokens, and what the call holds for each row or sequence."""
    y = {**x, **sequence_share(name, x, tensors(x), n)}
    if x.get("cu_seqlens") is not None:
        needs_offsets = described(name)["cu_seqlens"].type == "Tensor"
        length = x["cu_seqlens"][n : n + 2].diff()
        y["cu_seqlens"] = torch.nn.functional.pad(length, (1, 0)) if needs_offsets else None
    return y


def sequence_share(name: str, x: Arguments, parts: Named, n: int) -> Named:
    """Returns the part that sequence n has of arguments or results, as far as these consist of such parts."""
    offsets, dims = x.get("cu_seqlens"), dims_of(name, parts)
    has_places = any(x.get(places) is not None for places in ("pool", "slots"))
    shares = {}
    for key, y in parts.items():
        first, *others = dims[key] or [""]
        if first == "B" and offsets is not None:
            shares[key] = y[:, offsets[n] : offsets[n + 1]] if others[:1] == ["T"] else y
        elif first in ("B", "N") or (first == "P" and not has_places):
            shares[key] = y[n : n + 1]
    return shares


def dims_of(name: str, parts: Named) -> dict[str, list[str]]:
    """Returns the names of the dimensions of arguments and results; none for a tensor of any shape."""
    known = described(name)
    results = {result.name: result for result in RUNS[name][0].results if result.name not in known}
    dims = {}
    for key, y in parts.items():
        like = results[key].like if key in results else key
        dims[key] = results[key].shape.split() if like is None else known[like].dims(y)
    return dims


def differentiable(name: str, x: Arguments) -> list[str]:
    """Returns the names of the differentiable arguments of the public function that are not None."""
    names = [a.public or a.name for a in public_op(name).arguments if a.differentiable]
    return [n for n in names if x.get(n) is not None]


def as_logits(name: str, x: Arguments, gate_normalizer: int | None = None) -> Arguments:
    """Returns a call whose gates are logits; with None, they are divided by the default of the public function."""
    options: Arguments = {} if is_backward(name) else {"gate": "logsigmoid"}
    return {**x, **options, **({} if gate_normalizer is None else {"gate_normalizer": gate_normalizer})}


def random_logits(g: Tensor) -> Tensor:
    """Returns random logits like gates g."""
    return 3 * normal(tuple(g.shape), g.dtype, torch.Generator(g.device).manual_seed(3))


def projected(dtype: torch.dtype, gate: str, x: Arguments) -> tuple[Arguments, Arguments]:
    """Returns x with random projections in the place of unit vectors, log gates and betas, and what they stand for.

    Returns:
        The arguments of the public function, and those of the oracle, computed in float64.
    """
    generator = torch.Generator(x["beta"].device).manual_seed(5)
    Hv = x["beta"].shape[-1]
    names = [name for name in ("q", "k") if name in x]
    raw = {**x, **{name: 3 * x[name] for name in names}, "beta": normal(x["beta"].shape, x["beta"].dtype, generator)}
    raw |= {"normalize": 1e-3, "beta_limit": 2.0}
    rows = {name: raw[name].double() for name in names}
    plain = {**x, **{name: y / (y.square().sum(-1, keepdim=True) + 1e-3).sqrt() for name, y in rows.items()}}
    plain["beta"] = 2 * raw["beta"].double().sigmoid()
    if x["g"] is None:
        return raw, plain
    raw["g"] = normal(x["g"].shape, x["g"].dtype, generator)
    by_key = x["g"].ndim == x["v"].ndim
    A_log = normal((Hv,), wide(dtype), generator)
    dt_bias = normal((Hv, x["g"].shape[-1]) if by_key else (Hv,), wide(dtype), generator)
    rate, logits = (A_log.double()[:, None] if by_key else A_log.double()).exp(), raw["g"].double() + dt_bias.double()
    if gate == "softplus":
        raw["gate"], plain["g"] = (gate, A_log, dt_bias), -rate * torch.nn.functional.softplus(logits, threshold=1000)
    else:
        raw["gate"], plain["g"] = (gate, A_log, dt_bias, -5.0), -5.0 * torch.sigmoid(rate * logits)
    return raw, plain


def with_loss(name: str, x: Arguments | GlaInputs) -> Arguments:
    """Returns the arguments of a backward op: those of its forward, and random gradients of the results.

    Results of the forward that the backward takes are those of the reference.
    """
    forward = public_op(name)
    backward = ABSTRACT_OPS[forward.backward or ""]
    kept = {n: y for n, y in by_name(x).items() if n in backward.parameters}
    if any(result.name in backward.parameters and result.role is Role.INPUT for result in forward.results):
        kept |= {n: y for n, y in results(forward.name, x, "reference").items() if n in backward.parameters}
    return kept | {f"d{n}": d for n, d in loss_gradients(name, x).items()}


def loss_gradients(name: str, x: Arguments | GlaInputs) -> Named:
    """Returns random gradients of the results by their names; equal shapes give equal numbers."""
    spec = public_op(name)
    values = spec.complete((), {n: y for n, y in by_name(x).items() if n in spec.names and n != "gate_normalizer"})
    generator = torch.Generator(values[0].device).manual_seed(1)
    results = [y for y in spec.expected(*spec.plain(values)) if y is not None]
    return {y.name: normal(y.shape, y.dtype, generator) for y in results}


def autocast_dtype(case: Case) -> torch.dtype:
    """Returns the dtype in which the op of a case computes under autocast with the dtype of the case."""
    return torch.float32 if public_op(case.op).autocast_in_float32 else case.dtype


def cast(name: str, x: Arguments, dtype: torch.dtype) -> Arguments:
    """Casts the arguments that autocast casts; gates and states stay as they are."""
    names = [a.public or a.name for a in public_op(name).arguments if a.dtype in (INPUT, AS_INPUT)]
    return {n: y.to(dtype) if n in names and y is not None else y for n, y in x.items()}


# ---- results of the backend under test


def run(name: str, x: Arguments | GlaInputs, request: str, **options: Any) -> Named:
    """Returns the results of a call by name, without those that are None, and the tensors of x that it writes.

    Args:
        options: further arguments, and arguments that replace those of x.
    """
    spec, fixed = RUNS[name]
    x = by_name(x)
    if is_backward(spec.name):
        values = dict(zip(spec.parameters, spec.complete((), {**x, **options}), strict=True))
        out = getattr(torch.ops.gla, spec.name).default(**values, backend=request)
    else:
        out = getattr(gla, name if fixed else spec.public)(**{**x, **options}, backend=request)
    out = out if isinstance(out, tuple | list) else (out,)
    asked = {y.name: z for y, z in zip(spec.results, out, strict=False) if z is not None}
    if is_backward(spec.name):
        asked = {y.name: asked[y.name] for y in spec.results if x.get(y.like or "") is not None}
    return asked | written_tensors(name, x)


def results(name: str, x: Arguments | GlaInputs, request: str, **options: Any) -> Named:
    """Returns the results of a call as `run` does, and leaves the tensors of x as they are."""
    x = by_name(x)
    return run(name, {**x, **{n: y.clone() for n, y in written_tensors(name, x).items()}}, request, **options)


def written_tensors(name: str, x: Arguments) -> Named:
    """Returns the arguments that every call writes, such as a pool."""
    spec = RUNS[name][0]
    return {n: x[n] for n in spec.written if n not in spec.places and x.get(n) is not None}


def training_request(backend: Backend, name: str) -> str:
    """Returns a request: `backend` for the op and its backward, the reference for other ops."""
    spec = public_op(name)
    implemented = [f"{op}={backend.name}" for op in (spec.name, spec.backward) if op in backend.ops]
    return ";".join([*implemented, "*=reference"])


def gradients(
    name: str,
    x: Arguments | GlaInputs,
    request: str,
    wanted: tuple[str, ...] = (),
    loss: Named | None = None,
    **options: Any,
) -> Named:
    """Computes gradients of the public function by autograd.

    Args:
        wanted: the arguments whose gradients are computed; by default all that are differentiable.
        loss: the gradients of the results; by default `loss_gradients`.
        options: further arguments of the function.
    """
    x = by_name(x)
    leaves = {n: x[n].detach().requires_grad_() for n in wanted or differentiable(name, x)}
    out = run(public_op(name).name, {**x, **leaves}, request, **options)
    loss = {n: d for n, d in (loss or loss_gradients(name, x)).items() if out[n].requires_grad}
    ds = torch.autograd.grad([out[n] for n in loss], list(leaves.values()), list(loss.values()))
    return {f"d{n}": d for n, d in zip(leaves, ds, strict=True)}


def with_gradients(name: str, x: Arguments, function: Callable[[Arguments], Named]) -> Named:
    """Returns the results of `function` on the arguments, and the gradients of a loss that depends on every result."""
    leaves = {n: x[n].detach().requires_grad_() for n in differentiable(name, x)}
    out = function(x | leaves)
    losses = [y.square().sum() for y in out.values() if y.requires_grad]
    ds = torch.autograd.grad(losses, list(leaves.values()))
    return {n: y.detach() for n, y in out.items()} | {f"d{n}": d for n, d in zip(leaves, ds, strict=True)}


# ---- results of the oracle, and of the reference for large calls


def expected(name: str, x: Arguments | GlaInputs) -> Expected:
    """Returns what the oracle expects of a call. The tensors that a call writes are only read."""
    spec, fixed = RUNS[name]
    x = by_name(x)
    if is_backward(spec.name):
        forward = public_op(name)
        loss = {y.name: d for y in forward.results if (d := x.get(f"d{y.name}")) is not None}
        kept = {n: y for n, y in x.items() if n in forward.parameters and n != "checkpoint_every"}
        return Expected(oracle_gradients(name, kept, loss), {})
    asked = {n: y for n, y in _with_log_gates(x).items() if n not in NOT_ASKED}
    out = ORACLES[name if fixed else spec.public](**asked)
    out = out if isinstance(out, tuple) else (out,)
    if "pool" in x:
        return _pool_results(x, *out)
    names = [*(y.name for y in spec.results), *written_tensors(name, x)]
    return Expected(dict(zip(names, out, strict=False)), {})


def oracle_results(name: str, x: Arguments | GlaInputs, **options: Any) -> Named:
    """Returns the oracle's results by name, and the tensors that the call writes; `options` are further arguments."""
    return expected(name, {**by_name(x), **options}).results


def oracle_gradients(name: str, x: Arguments | GlaInputs, loss: Named | None = None, **options: Any) -> Named:
    """Returns the oracle's gradients, by autograd in float64; the arguments are those of `gradients`."""
    x = {**by_name(x), **options}
    leaves = {n: x[n].detach().double().requires_grad_() for n in differentiable(name, x)}
    loss = loss or loss_gradients(name, x)
    out = expected(public_op(name).name, {**x, **leaves}).results
    # without tokens, or without gates, a result may depend on no input, and autograd would raise an error
    nothing = 0 * sum(leaf.sum() for leaf in leaves.values())
    outs, seeds = [out[n] + nothing for n in loss], [d.double() for d in loss.values()]
    ds = torch.autograd.grad(outs, list(leaves.values()), seeds)
    return {f"d{n}": d for n, d in zip(leaves, ds, strict=True)}


def reference_results(name: str, x: Arguments | GlaInputs) -> Named:
    """Returns the results of the reference in float64, computed one row of the batch at a time to save memory."""
    x = by_name(x)
    B = len(next(iter(x.values())))
    if B == 1 or "pool" in x:
        return results(name, _in_float64(x), "reference")
    rows = [results(name, _in_float64(alone(name, x, b)), "reference") for b in range(B)]
    joined = {n: torch.cat([row[n] for row in rows]) for n in rows[0]}
    for n, dims in dims_of(name, joined).items():
        if dims[0] not in ("B", "N"):  # all rows share the argument, such as a constant gate, and its gradient is a sum
            joined[n] = torch.stack([row[n] for row in rows]).sum(0)
    return joined


def _in_float64(x: Arguments) -> Arguments:
    return x | {n: y.double() for n, y in tensors(x).items() if y.is_floating_point()}


def _with_log_gates(x: Arguments) -> Arguments:
    """Returns the arguments with log gates in float64 in place of logits."""
    if x.get("g") is None or (x.get("gate") is None and x.get("gate_normalizer") is None):
        return x
    return {**x, "g": log_gates(x["g"], x.get("gate_normalizer", 16), torch.float64)}


def _pool_results(x: Arguments, o: Tensor, states: dict[int, Tensor], *rings: Mapping[Any, Any]) -> Expected:
    """Returns the results of a call on a pool, from the states and the entries of rings that it writes."""
    (entries,) = rings or ({},)
    results = {"o": o, "pool": x["pool"].double().clone()}
    written: dict[str, Any] = {"pool": list(states)}
    for slot, state in states.items():
        results["pool"][slot] = state
    for i, ring in enumerate(ring for ring in RINGS if x.get(ring) is not None):
        results[ring] = x[ring].double().clone()
        written[ring] = tuple([place[j] for place in entries] for j in range(2))
        for place, entry in entries.items():
            results[ring][place] = entry[i].double()
    return Expected(results, written)


# ---- comparison


def check(
    name: str,
    x: Arguments,
    request: str,
    measure: Measure,
    ref: Expected | None = None,
    budgets: Mapping[torch.dtype, float] | None = None,
    **options: Any,
) -> Named:
    """Runs a call, compares its results with the oracle's, and checks that all other memory is unchanged.

    Args:
        ref: what is expected, if it is not what the oracle says of x.
        budgets: as in `compare`. options: as in `run`.

    Returns:
        The results, as `run` does.
    """
    ref = expected(name, x) if ref is None else ref
    before = {n: _pages(x[n]).clone() for n in ref.written}
    out = run(name, x, request, **options)
    dtypes = {n: y.dtype for n, y in out.items()}
    assert dtypes == {n: result_dtype(n, x) for n in out}
    compare(name, x, out, {n: y for n, y in ref.results.items() if n not in ref.written}, measure, budgets)
    for n, at in ref.written.items():
        label = "states" if n == "pool" else n
        # rings keep tokens as they are; that of a delta rule keeps u in place of v
        is_computed = n == "pool" or (n == "ring_v" and "beta" in x)
        budget = _budget(name, x, n, budgets) if is_computed else 0.0
        if n == "ring_g" and "gate" in x:
            budget = FORWARD[torch.float32]
        entries = ref.results[n][at]
        measure({label: x[n][at]}, {label: entries if n == "pool" else entries.to(x[n].dtype)}, budget)
        memory = [before[n], _pages(x[n]).clone()]
        for pages in memory:
            pages[:, : x[n][0].numel()].unflatten(1, (x[n].shape[1], -1))[at] = 0
        assert torch.equal(*memory), f"memory of {n} was changed that the call does not write"
    return out


def compare(
    name: str,
    x: Arguments,
    out: Named,
    ref: Named,
    measure: Measure,
    budgets: Mapping[torch.dtype, float] | None = None,
) -> None:
    """Compares the results in `out` whose names are in `ref`.

    Decays and transitions are factors of states, so their absolute error counts. No matrix product computes decays, so
    their budget is at most that of float32.

    Args:
        budgets: the budget of each dtype, by default that of results or of gradients. A result may have the error that
            its own dtype allows, if that is more.
    """
    by_budget: dict[float, list[str]] = defaultdict(list)
    for n in ref:
        by_budget[_budget(name, x, n, budgets)].append(n)
    for budget, names in by_budget.items():
        measure(*({n: _beside_one(n, y[n]) for n in names} for y in (out, ref)), budget)


def _beside_one(name: str, y: Tensor) -> Tensor:
    """Returns a decay plus 1, a transition beside the identity, and any other result as it is."""
    if name == "transition":
        unit = torch.eye(y.shape[-1], dtype=torch.float64, device=y.device)
        return torch.cat([y.double(), unit.expand_as(y)], -1)
    return 1 + y.double() if name == "decay" else y


def twice(budgets: Mapping[torch.dtype, float]) -> dict[torch.dtype, float]:
    """Returns the budgets for the difference of two results of a backend."""
    return {dtype: 2 * budget for dtype, budget in budgets.items()}


def result_dtype(result: str, x: Arguments) -> torch.dtype:
    """Returns the dtype that a result must have: that of its argument, of o that of the inputs, else that of states."""
    dtype = input_dtype(x)
    like = x.get(result, x.get(result.removeprefix("d")))
    if isinstance(like, Tensor):
        return like.dtype
    if result == "checkpoints":
        return checkpoint_dtype(dtype)
    return dtype if result in ("o", "y") else wide(dtype)


def input_dtype(x: Arguments) -> torch.dtype:
    """Returns the dtype of the first argument of a call."""
    return next(iter(tensors(x).values())).dtype


def checkpoint_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32


def output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Returns the shape of o, [B, T, Ho, V]; [B, Ho, V] for one token."""
    return (*q.shape[:-2], max(q.shape[-2], v.shape[-2]), v.shape[-1])


def _budget(name: str, x: Arguments, result: str, budgets: Mapping[torch.dtype, float] | None) -> float:
    budgets = budgets or (GRADIENT if is_backward(name) else FORWARD)
    if result == "decay":
        return min(budgets[input_dtype(x)], FORWARD[torch.float32])
    return max(budgets[dtype] for dtype in (input_dtype(x), result_dtype(result, x)))


def _pages(states: Tensor) -> Tensor:
    """Returns the whole memory of a pool as integers, a row for each page, so that NaN equals itself."""
    pages = states.as_strided((len(states), states.stride(0)), (states.stride(0), 1), 0)
    return pages.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[states.element_size()])


# ---- any op, as a torch op


def torch_op(case: Case, request: str, inplace: bool = False) -> tuple[Any, tuple]:
    """Returns the torch op of a case and its arguments, which require gradients if the case needs them."""
    spec, op = ABSTRACT_OPS[case.op], getattr(torch.ops.gla, case.op + "_" * inplace).default
    x: Arguments = {spec.names.get(n, n): y for n, y in call_arguments(case).items()}
    x["checkpoint_every"] = CHECKPOINT_EVERY if case.checkpoints else None
    for argument in spec.arguments if case.needs_grad else ():
        if argument.differentiable and x[argument.name] is not None:
            x[argument.name].requires_grad_()
    taken = spec.complete((), {n: y for n, y in x.items() if n in spec.parameters})
    x = {**dict(zip(spec.parameters, taken, strict=True)), "needs_grad": case.needs_grad, "backend": request}
    return op, tuple(x[argument.name] for argument in op._schema.arguments)


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
