"""The way of every call of chunk_gla, whichever kernels compute it: a call like an earlier one is replayed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall, invariant_tokens, new_checkpoints
from gla_triton_kernels.chunk_gla.padding import clear_padding
from gla_triton_kernels.chunk_gla.plan import AnyPlan
from gla_triton_kernels.chunk_gla.widths import widened
from gla_triton_kernels.runtime.architecture import Gpu, gpu_of
from gla_triton_kernels.runtime.launch import Launch, on_device_of, start
from gla_triton_kernels.runtime.replay import layouts, part, record, replay
from gla_triton_kernels.runtime.tma import UNIT, addressable


class Tensors(NamedTuple):
    """All tensors of a call of chunk_gla_fwd, the results allocated; for their shapes see gla_core/ops/chunk_gla.py.

    Where segments take the place of sequences, `entering` [I, H, K, V] holds the states that enter them, but for those
    that enter a sequence, which `initial_state` has.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    o: Tensor
    final_state: Tensor | None
    checkpoints: Tensor | None = None
    entering: Tensor | None = None


class BackwardTensors(NamedTuple):
    """All tensors of a call of chunk_gla_bwd, the results allocated; for their shapes see gla_core/ops/chunk_gla.py."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    checkpoints: Tensor | None
    do: Tensor
    dstate: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dinitial_state: Tensor | None

    @property
    def last_leave_none(self) -> bool:
        """Returns whether the last segments of packed sequences leave no gradient of a state."""
        return self.cu_seqlens is not None and self.dstate is None


AnyTensors = TypeVar("AnyTensors", Tensors, BackwardTensors)


def by_rows(plans: Sequence[tuple[OpCall, AnyPlan]], x: AnyTensors) -> list[tuple[AnyPlan, AnyTensors]]:
    """The plans, each with the rows of all tensors of a batch that it is for: the first ones, then the next."""
    if len(plans) == 1:
        return [(plans[0][1], x)]
    ends = itertools.accumulate((call.dims["B"] for call, _ in plans), initial=0)
    return [(plan, _rows(x, *bounds)) for (_, plan), bounds in zip(plans, itertools.pairwise(ends), strict=True)]


def _rows(x: AnyTensors, start: int, end: int) -> AnyTensors:
    return x._replace(**{name: part(y, start, end) for name, y in x._asdict().items() if y is not None})


Way = Callable[[OpCall, Gpu, bool, Tensors, float], list[Launch]]
"""Plans a call, and returns the launches that compute it; its arguments are those of a plan, tensors and scale."""
BackwardWay = Callable[[OpCall, Gpu, bool, BackwardTensors, float], list[Launch]]
"""The same for chunk_gla_bwd."""


def forward(
    way: Way,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    checkpoint_every: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """chunk_gla_fwd, computed as `way` does it; see gla_core/ops/chunk_gla.py."""
    B, T, Hq, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o = v.new_empty(B, T, Hq, V)
    final_state = v.new_empty(N, H, K, V, dtype=torch.float32) if output_final_state else None
    checkpoints = None if checkpoint_every is None else new_checkpoints(k, v, cu_seqlens, checkpoint_every)
    if N == 0 or (T == 0 and final_state is None):
        return o.zero_(), final_state, checkpoints  # any token there is belongs to no sequence
    precision, invariant = torch.get_float32_matmul_precision(), invariant_tokens()
    if invariant:
        q, k, v, g = map(_addressable, (q, k, v, g))
    given = (q, k, v, g, initial_state, cu_seqlens)
    key: Hashable = (way, q.device, layouts(*given), output_final_state, checkpoint_every, precision, invariant)
    tensors = (*given, o, final_state, checkpoints)
    if replay(key, tensors, scale):
        return o, final_state, checkpoints
    with on_device_of(q):
        gpu = gpu_of(q.device)
        x, before, after = widened(Tensors(*tensors), gpu)
        scalars = {"output_final_state": output_final_state, "checkpoint_every": checkpoint_every}
        call = _described("chunk_gla_fwd", x, N, precision, scalars, checkpoint_every is not None)
        computed = way(call, gpu, all_aligned(gpu, x.q, x.k, x.v, x.g, x.o), x, scale)
        launches = [*before, *computed, *after]
        start(launches)
        record(key, tensors, launches)
    return o, final_state, checkpoints


def backward(
    way: BackwardWay,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    do: Tensor,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """chunk_gla_bwd, computed as `way` does it; see gla_core/ops/chunk_gla.py."""
    B, T, _, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    dq, dk, dv, dg = _like(q), _like(k), _like(v), None if g is None else _like(g)
    dinitial = None if initial_state is None else v.new_empty(N, H, K, V, dtype=torch.float32)
    results = dq, dk, dv, dg, dinitial
    if N == 0 or T == 0:
        for y in results[:4]:
            if y is not None:
                y.zero_()  # any token there is belongs to no sequence
        if dinitial is not None:
            dinitial.zero_() if dstate is None else dinitial.copy_(dstate)
        return results
    precision, invariant = torch.get_float32_matmul_precision(), invariant_tokens()
    if invariant:
        q, k, v, g, do = map(_addressable, (q, k, v, g, do))
    usable = checkpoints is not None and checkpoints.is_contiguous() and checkpoints.data_ptr() % UNIT == 0
    every = checkpoint_every if usable else None
    given = (q, k, v, g, initial_state, cu_seqlens, checkpoints, do, dstate)
    key: Hashable = (way, q.device, layouts(*given), every, precision, invariant)
    tensors = (*given, *results)
    if replay(key, tensors, scale):
        return results
    with on_device_of(q):
        gpu = gpu_of(q.device)
        x, before, after = widened(BackwardTensors(*tensors), gpu)
        call = _described("chunk_gla_bwd", x, N, precision, {"checkpoint_every": every})
        computed = way(call, gpu, all_aligned(gpu, x.q, x.k, x.v, x.g, x.do), x, scale)
        launches = [*before, *computed, *after]
        if cu_seqlens is not None:
            launches += clear_padding([y for y in results[:4] if y is not None], cu_seqlens)
        start(launches)
        record(key, tensors, launches)
    return results


def _like(x: Tensor) -> Tensor:
    """New, contiguous memory for the gradient of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # half of the time of torch.empty


def _described(
    op: str,
    x: Tensors | BackwardTensors,
    N: int,
    precision: str,
    scalars: dict[str, Any],
    checkpoints: bool = False,
) -> OpCall:
    """Returns the facts of a call that plans ask for; the arguments are as in `OpCall`."""
    B, T, Hq, K = x.q.shape
    H, V = x.v.shape[2:]
    return OpCall(
        op=op,
        device=x.q.device,
        dtype=x.q.dtype,
        dims={"B": B, "T": T, "H": H, "Hq": Hq, "K": K, "V": V, "N": N},
        gate_dtype=None if x.g is None else x.g.dtype,
        state_dtype=None if x.initial_state is None else x.initial_state.dtype,
        variable_length=x.cu_seqlens is not None,
        scalars=scalars,
        checkpoints=checkpoints,
        float32_matmul_precision=precision,
        batch_invariant=invariant_tokens(),
    )


def _addressable(x: Any) -> Any:
    """A copy of a tensor that TMA cannot address where it lies: kernels are not to depend on that."""
    return x if x is None or addressable(x) else x.clone(memory_format=torch.contiguous_format)


def all_aligned(gpu: Gpu, *tensors: Tensor | None) -> bool:
    """Returns whether TMA can address all of these tensors that there are."""
    return gpu.architecture.has_tma and all(x is None or addressable(x) for x in tensors)
