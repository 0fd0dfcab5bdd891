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

from gla_core.dispatch.backend import OpCall, contiguous_layout
from gla_core.dispatch.tensors import wide
from gla_triton_kernels.delta.plan import has_key_gates
from gla_triton_kernels.delta.sm90 import backward_calls as sm90
from gla_triton_runtime.architecture import Gpu


def call_of_halves(call: OpCall, gpu: Gpu, cut: bool) -> OpCall | None:
    """Returns the call of the halves; None if Hopper's kernels do not compute it, or compute the call itself.

    Each half would need a copy of gates for each key.

    Args:
        cut: as in backward.py.
    """
    V = call.dims["V"]
    if not sm90.MOST_WIDTH < V <= 2 * sm90.MOST_WIDTH or V % 2 or has_key_gates(call):
        return None
    dims = {**call.dims, "Hv": 2 * call.dims["Hv"], "V": V // 2}
    gate_dtype = None if call.gate_dtype is None else torch.float32
    half = replace(call, dims=dims, gate_dtype=gate_dtype, layouts=_layouts(call))
    return half if sm90.refusal(half, gpu, cut) is None else None


def _layouts(call: OpCall) -> dict[str, Any]:
    """Returns the layouts of the tensors of the halves."""
    layouts = dict(call.layouts)
    for name in layouts.keys() & {"v", "do", "g", "beta", "initial_state", "checkpoints", "dstate"}:
        *outer, last = layouts[name].shape
        if name in ("v", "do"):
            shape, dtype = (*outer[:2], 2 * outer[2], last // 2), layouts[name].dtype
        elif name in ("g", "beta"):
            shape, dtype = (*outer, 2 * last), torch.float32
        else:
            shape, dtype = (*outer[:-2], 2 * outer[-2], outer[-1], last // 2), layouts[name].dtype
        layouts[name] = contiguous_layout(shape, dtype)
    return layouts


def joined(run: Callable[..., tuple], call: OpCall) -> Callable[..., tuple]:
    """Returns the function that computes a call by `run`, which computes the call of its halves."""
    Hv = call.dims["Hv"]

    def run_halves(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        checkpoints: Tensor | None,
        checkpoint_every: int | None,
        do: Tensor,
        dstate: Tensor | None,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        initial_state, checkpoints, dstate = map(_halves_of_states, (initial_state, checkpoints, dstate))
        tokens = (q, k, _halves_of_values(v), _for_both(g), _for_both(beta))
        states = (initial_state, cu_seqlens, checkpoints, checkpoint_every)
        dq, dk, dv, dg, dbeta, dinitial = run(*tokens, scale, *states, _halves_of_values(do), dstate, gate_normalizer)
        dbeta = dbeta.unflatten(2, (Hv, 2)).sum(3).to(beta.dtype)
        if g is not None:
            dg = dg.unflatten(2, (Hv, 2)).sum(3).to(g.dtype)
        if dinitial is not None:
            dinitial = dinitial.unflatten(1, (Hv, 2)).movedim(2, 3).flatten(3)
        return dq, dk, dv.view(v.shape), dg, dbeta, dinitial

    return run_halves


def _halves_of_values(x: Tensor) -> Tensor:
    """Returns x [B, T, Hv, V] as [B, T, 2 Hv, V / 2], which is a copy only if x is not contiguous."""
    return x.contiguous().unflatten(3, (2, -1)).flatten(2, 3)


def _halves_of_states(x: Tensor | None) -> Tensor | None:
    """Returns a copy of states [.., Hv, K, V] as [.., 2 Hv, K, V / 2]."""
    return None if x is None else x.unflatten(-1, (2, -1)).movedim(-2, -3).flatten(-4, -3).contiguous()


def _for_both(x: Tensor | None) -> Any:
    """Returns x [B, T, Hv] as float32 numbers [B, T, 2 Hv] of both halves."""
    return None if x is None else x.to(wide(x.dtype)).repeat_interleave(2, 2)
