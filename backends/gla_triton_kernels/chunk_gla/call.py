"""What every call of chunk_gla goes through, whichever kernels compute it: a call like an earlier one is replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunk_gla.padding import clear_padding
from gla_triton_kernels.runtime.architecture import Gpu, gpu_of
from gla_triton_kernels.runtime.launch import Launch, on_device_of
from gla_triton_kernels.runtime.replay import layouts, record, replay
from gla_triton_kernels.runtime.tma import addressable


class Tensors(NamedTuple):
    """All tensors of a call of chunk_gla_fwd, the results allocated; for their shapes see gla_core/ops/chunk_gla.py."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    o: Tensor
    final_state: Tensor | None


Way = Callable[[OpCall, Gpu, bool, Tensors, float], list[Launch]]
"""Plans a call, launches its kernels and returns the launches; its arguments are those of a plan, tensors and scale."""


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
) -> tuple[Tensor, Tensor | None]:
    """chunk_gla_fwd, computed as `way` does it; see gla_core/ops/chunk_gla.py."""
    B, T, Hq, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o = torch.empty(B, T, Hq, V, dtype=v.dtype, device=v.device)
    final_state = torch.empty(N, H, K, V, dtype=torch.float32, device=v.device) if output_final_state else None
    if N == 0 or (T == 0 and final_state is None):
        return o.zero_(), final_state  # any token there is belongs to no sequence
    precision = torch.get_float32_matmul_precision()
    key: Hashable = (way, q.device, layouts(q, k, v, g, initial_state, cu_seqlens), output_final_state, precision)
    tensors = (q, k, v, g, initial_state, cu_seqlens, o, final_state)
    if replay(key, tensors, scale):
        return o, final_state
    with on_device_of(q):
        call = OpCall(
            op="chunk_gla_fwd",
            device=q.device,
            dtype=q.dtype,
            dims={"B": B, "T": T, "H": H, "Hq": Hq, "K": K, "V": V, "N": N},
            gate_dtype=None if g is None else g.dtype,
            state_dtype=None if initial_state is None else initial_state.dtype,
            variable_length=cu_seqlens is not None,
            scalars={"output_final_state": output_final_state},
            float32_matmul_precision=precision,
        )
        gpu = gpu_of(q.device)
        aligned = gpu.architecture.has_tma and all(x is None or addressable(x) for x in (q, k, v, g, o))
        launches = way(call, gpu, aligned, Tensors(*tensors), scale)
        if cu_seqlens is not None and T > 0:
            launches += clear_padding(o, cu_seqlens)
        record(key, tensors, launches)
    return o, final_state
