"""Computes gradients of value heads of 129 to 256 values on Hopper, each as two heads of half as many values.

Columns of a state depend on q, k, gates and betas, but not on each other. So the halves of a value head are value heads
that share these, and the gradients of gates and betas are sums over both. Imports no Triton.

B batch   T tokens   N sequences   n checkpoints   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gla_core.dispatch.backend import OP_PARAMETERS, Layout, OpCall, contiguous_layout
from gla_core.dispatch.tensors import wide
from gla_triton_kernels.delta.plan import has_key_gates
from gla_triton_kernels.delta.sm90 import backward_calls as sm90
from gla_triton_runtime.architecture import Gpu


def call_of_halves(call: OpCall, gpu: Gpu) -> OpCall | None:
    """Returns the call of the halves; None if Hopper's kernels do not compute it, or compute the call itself.

    Each half would need a copy of gates for each key.
    """
    V = call.dims["V"]
    if not sm90.MOST_WIDTH < V <= 2 * sm90.MOST_WIDTH or V % 2 or has_key_gates(call):
        return None
    dims = {**call.dims, "Hv": 2 * call.dims["Hv"], "V": V // 2}
    gate_dtype = None if call.gate_dtype is None else torch.float32
    half = replace(call, dims=dims, gate_dtype=gate_dtype, layouts=_layouts(call))
    return half if sm90.refusal(half, gpu) is None else None


def _layouts(call: OpCall) -> dict[str, Layout]:
    """Returns the layouts of the tensors of the halves."""
    layouts = dict(call.layouts)
    for name in TO_HALVES.keys() & layouts.keys():
        x = TO_HALVES[name](torch.empty(layouts[name].shape, dtype=layouts[name].dtype, device="meta"))
        layouts[name] = contiguous_layout(tuple(x.shape), x.dtype)
    return layouts


def joined(run: Callable[..., tuple], call: OpCall) -> Callable[..., tuple]:
    """Returns the function that computes a call by `run`, which computes the call of its halves."""
    Hv, names = call.dims["Hv"], OP_PARAMETERS[call.op]

    def summed(dx: Tensor, x: Tensor | None) -> Tensor | None:
        """Returns the gradient of x [.., Hv], from those of both halves [.., 2 Hv]."""
        return None if x is None else dx.unflatten(-1, (Hv, 2)).sum(-1).to(x.dtype)

    def run_halves(*arguments: Any) -> tuple[Tensor | None, ...]:
        whole = dict(zip(names, arguments, strict=True))
        halves = (TO_HALVES[name](x) if name in TO_HALVES and x is not None else x for name, x in whole.items())
        dq, dk, dv, dg, dbeta, dinitial = run(*halves)
        if dinitial is not None:
            by_rows = dinitial.unflatten(1, (Hv, 2)).movedim(2, 3)  # [N, Hv, K, 2, V / 2]
            dinitial = _in_shape(by_rows, (*by_rows.shape[:3], call.dims["V"]))
        return dq, dk, _in_shape(dv, whole["v"].shape), summed(dg, whole["g"]), summed(dbeta, whole["beta"]), dinitial

    return run_halves


def _in_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns x, which is not used afterwards, in another shape. PyTorch sees no view, which ops must not return."""
    return torch.ops.aten._unsafe_view(x.contiguous(), shape)


def _halve_values(x: Tensor) -> Tensor:
    """Returns x [B, T, Hv, V] as [B, T, 2 Hv, V / 2], which is a copy only if x is not contiguous."""
    return x.contiguous().unflatten(3, (2, -1)).flatten(2, 3)


def _halve_states(x: Tensor) -> Tensor:
    """Returns a copy of states [.., Hv, K, V] as [.., 2 Hv, K, V / 2]."""
    return x.unflatten(-1, (2, -1)).movedim(-2, -3).flatten(-4, -3).contiguous()


def _repeat(x: Tensor) -> Tensor:
    """Returns x [.., Hv] as float32 numbers [.., 2 Hv] of both halves."""
    return x.to(wide(x.dtype)).repeat_interleave(2, -1)


TO_HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("v", "do"), _halve_values),
    **dict.fromkeys(("g", "beta"), _repeat),
    **dict.fromkeys(("initial_state", "checkpoints", "dstate"), _halve_states),
}
"""For each argument that is another one in the call of the halves: the function that computes it."""
