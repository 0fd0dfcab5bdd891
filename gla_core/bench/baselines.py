"""The baselines that backends are compared with: functions that take the arguments of the public ops.

loop    the recurrence, one token at a time, in the dtype of the inputs
torch   PyTorch's own softmax and scaled_dot_product_attention
fla     flash-linear-attention's own public functions, if it is installed
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def loop_chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """Computes `gla_core.chunk_gla` as a loop over tokens, packed sequences one after the other."""
    T = q.shape[1]
    ends = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    q, k = _per_value_head(q, v), _per_value_head(k, v)
    alpha, scale = _alpha(g, v), q.shape[-1] ** -0.5
    outputs, states = [], []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if initial_state is None:
            state = k.new_zeros(q.shape[0], *k.shape[2:], v.shape[-1])
        else:
            state = initial_state if cu_seqlens is None else initial_state[i : i + 1]
        for t in range(start, end):
            o, state = _step(q[:, t], k[:, t], v[:, t], alpha[:, t], state, scale)
            outputs.append(o)
        states.append(state)
    o = torch.stack(outputs, dim=1) if outputs else v.new_empty(*q.shape[:3], v.shape[-1])
    return (o, torch.cat(states)) if output_final_state else (o,)


def _per_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Returns q or k [..., heads, K] with each head repeated for the value heads that read it."""
    repeats = v.shape[-2] // x.shape[-2]
    return x.repeat_interleave(repeats, dim=-2) if repeats > 1 else x


def _alpha(g: Tensor | None, v: Tensor) -> Tensor:
    """Returns the gates for values v [..., Hv, V] as [..., Hv, K], or as [..., Hv, 1] if the keys share a gate."""
    if g is None:
        return torch.ones_like(v[..., :1])
    return g.exp() if g.ndim == v.ndim else g.exp().expand(v.shape[:-1])[..., None]


def _step(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns o [B, Ho, V] and the new state for one token of q [B, Ho, K], k [B, Hv, K], v [B, Hv, V] and alpha."""
    state = alpha[..., :, None] * state + k[..., :, None] * v[..., None, :]  # [B, Hv, K, V]
    queries = q.unflatten(1, (k.shape[1], -1))  # [B, Hv, Ho/Hv, K]
    return scale * (queries @ state).flatten(1, 2), state


def loop_recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    inplace: bool,
    bonus: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Computes one step of the loop and writes `state`. Leaves out rows with a negative index."""
    q, k = _per_value_head(q, v), _per_value_head(k, v)
    alpha, scale = _alpha(g, v), q.shape[-1] ** -0.5
    bonus_keys = None if bonus is None else k * _per_value_head(bonus, v)  # with it, o reads the state before the token

    def step(rows: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        o, new = _step(q[rows], k[rows], v[rows], alpha[rows], state, scale)
        if bonus_keys is not None:
            o, _ = _step(q[rows], bonus_keys[rows], v[rows], torch.ones_like(alpha[rows]), state, scale)
        return o, new

    if slots is None:
        o, new = step(slice(None), state)
        return o, state.copy_(new)
    served = slots >= 0
    rows = slots[served]
    answer, new = step(served, state[rows])
    state[rows] = new
    o = v.new_zeros(*q.shape[:2], v.shape[-1])
    o[served] = answer
    return o, state


def torch_online_softmax(x: Tensor, dim: int) -> tuple[Tensor]:
    """Calls torch.softmax."""
    return (torch.softmax(x, dim),)


def torch_softmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor]:
    """Calls PyTorch's scaled_dot_product_attention, which returns no log-sum-exp."""
    Tq, Tk = q.shape[1], k.shape[1]
    # Torch aligns its causal mask with the first key and we with the last: they differ unless Tq = Tk.
    mask = None
    if causal and Tq not in (1, Tk):
        mask = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)
    o = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=mask,
        is_causal=causal and Tq == Tk and Tq > 1,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return (o.transpose(1, 2),)


def fla_chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """Calls FLA's chunk_gla, or chunk_simple_gla if the gate is one per head; each has its own backward."""
    function, gate = _fla("chunk", q, k, v, g)
    sequences = {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
    o, state = function(q=q, k=k, v=v, **{gate: g}, **sequences)
    return (o, state) if output_final_state else (o,)


def fla_recurrent_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    inplace: bool,
    bonus: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Calls FLA's fused_recurrent_gla or fused_recurrent_simple_gla on one token, which return a new state."""
    if slots is not None:
        raise ValueError("fla has no pool of states; slots is given")
    if bonus is not None:
        raise ValueError("fla's GLA has no bonus; bonus is given")
    function, gate = _fla("fused_recurrent", q, k, v, g)
    token = {
        name: x if x is None or x.ndim == 1 else x[:, None]
        for name, x in zip(("q", "k", "v", gate), (q, k, v, g), strict=True)
    }
    o, state = function(**token, initial_state=state, output_final_state=True)
    return o[:, 0], state


def _fla(kind: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Callable[..., Any], str]:
    """Returns FLA's function of a kind for the form of a gate, and the argument that takes the gate.

    FLA is optional, and slow to import.
    """
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"fla has no grouped queries; q has {q.shape[-2]} heads and k has {k.shape[-2]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"fla has no grouped values; v has {v.shape[-2]} heads and k has {k.shape[-2]}")
    if g is None:
        raise ValueError("fla's GLA needs a gate; g is None")
    name, gate = "simple_gla", "g_gamma" if g.ndim == 1 else "g"
    if g.shape == k.shape:
        name, gate = "gla", "g" if kind == "chunk" else "gk"
    return getattr(_fla_ops(name), f"{kind}_{name}"), gate


def _fla_ops(name: str) -> Any:
    return importlib.import_module(f"fla.ops.{name}")


BASELINES: Mapping[str, Mapping[str, Callable[..., tuple[Tensor, ...]]]] = {
    "loop": {"chunk_gla": loop_chunk_gla, "recurrent_gla_step": loop_recurrent_gla_step},
    "torch": {"online_softmax": torch_online_softmax, "softmax_attention": torch_softmax_attention},
    "fla": {"chunk_gla": fla_chunk_gla, "recurrent_gla_step": fla_recurrent_gla_step},
}
READ_BY_A_LOSS = {"softmax_attention": 1}
"""The number of results that gradients reach, if not all: PyTorch's attention returns o alone."""


def baselines(op: str, device: torch.device) -> list[str]:
    """Returns the baselines for a public op on a device: loop on a CPU, fla on a CUDA device, torch on both."""
    places = {"loop": device.type == "cpu", "torch": True, "fla": device.type == "cuda" and has_fla()}
    return [name for name, functions in BASELINES.items() if op in functions and places[name]]


def has_fla() -> bool:
    """Returns whether flash-linear-attention is installed, without importing it."""
    return importlib.util.find_spec("fla") is not None
