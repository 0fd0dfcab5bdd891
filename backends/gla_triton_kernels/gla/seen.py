"""Computes the call that kernels see: the widths of heads and the layouts of tensors. Imports no Triton.

TMA moves only rows of a multiple of 16 bytes. If the kernels of a GPU need TMA and the rows of a head are not such a
multiple, chunks/widths.py copies tensors to wider heads, with zeros after the keys and values.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   K, V key and value width
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gla_core.dispatch.backend import OP_LOWERINGS, OP_PARAMETERS, OpCall, contiguous_layout
from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import Gpu
from gla_triton_runtime.tma import addressable

KEY_WIDTH = frozenset({"q", "k", "g", "dq", "dk", "dg"})
GATES = frozenset({"g", "dg"})
VALUE_WIDTH = frozenset({"v", "o", "do", "dv"})
BOTH_WIDTHS = frozenset({"initial_state", "final_state", "checkpoints", "dstate", "dinitial_state"})
WIDTH_UNIT = 8
"""Kernels for SM90 see widths that are multiples of this number, so rows have a multiple of 16 bytes."""


def form_of(shape: tuple[int, ...]) -> str:
    """Returns the form of gates: "key" for a shape [B, T, Hv, K], "head" for [B, T, Hv], "constant" for [Hv]."""
    return {4: "key", 3: "head", 1: "constant"}[len(shape)]


def seen_width(width: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """Returns the key or value width that kernels see."""
    specialised = gpu.facts.has_wgmma and dtype in (torch.bfloat16, torch.float16)
    return ceil_div(width, WIDTH_UNIT) * WIDTH_UNIT if specialised else width


def seen_shape(name: str, shape: tuple[int, ...], K: int, V: int) -> tuple[int, ...]:
    """Returns the shape of the tensor `name` with the key width K and the value width V.

    If the keys of a head share a gate, the shape of g has no key axis and stays as it is.
    """
    if name in BOTH_WIDTHS:
        return (*shape[:-2], K, V)
    if name in GATES and form_of(shape) != "key":
        return shape
    width = K if name in KEY_WIDTH else V if name in VALUE_WIDTH else shape[-1]
    return (*shape[:-1], width)


def takes(call: OpCall, name: str) -> bool:
    """Returns whether the op of a call has the argument `name`: "do" in a backward, "left" in a summary."""
    return name in OP_PARAMETERS[call.op]


def forward_of_pool(call: OpCall) -> OpCall:
    """Returns the forward between a read and a write of the pool, of a call whose states are in a pool."""
    forward, _ = OP_LOWERINGS[call.op].parts(call)[0]
    return replace(forward, given=forward.given | {"pool"})


def written_apart(call: OpCall) -> bool:
    """Returns whether the outputs of a call are copied into `out`, because TMA cannot address this tensor."""
    return "out" in call.layouts and not addressable(call.layouts["out"])


def seen_by_kernels(call: OpCall, gpu: Gpu) -> OpCall:
    """Returns the call with the widths and the layouts that kernels see."""
    if takes(call, "left"):  # the kernels of a summary read tensors as they are
        return call
    K, V = (seen_width(call.dims[name], call.dtype, gpu) for name in ("K", "V"))
    if (call.dims["K"], call.dims["V"]) == (K, V) and call.batch_invariant is None:
        return call
    layouts, clones = {}, copied_for_invariance(call)
    for name, layout in call.layouts.items():
        shape = seen_shape(name, layout.shape, K, V)
        copied = shape != layout.shape or name in clones
        layouts[name] = contiguous_layout(shape, layout.dtype) if copied else layout
    return replace(call, dims={**call.dims, "K": K, "V": V}, layouts=layouts)


def copied_for_invariance(call: OpCall) -> frozenset[str]:
    """Returns the names of tensors that are copied so that TMA can address them, under batch invariance.

    The results of a sequence would otherwise depend on the addresses of tensors.
    """
    if call.batch_invariant is None:
        return frozenset()
    layouts = {name: layout for name, layout in call.layouts.items() if name in KEY_WIDTH | VALUE_WIDTH}
    return frozenset(name for name, layout in layouts.items() if len(layout.shape) == 4 and not addressable(layout))


def not_addressable(call: OpCall) -> str | None:
    """Returns the name of a tensor with a token axis that TMA cannot address; None if TMA can address all of them.

    The tensors are q, k, v, g, and o or do; in a summary they are left, right and g. TMA moves gates only if
    each key has its own. A tensor whose layout is not known counts as contiguous.
    """
    B, T, H, Hq, Hv, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "Hv", "K", "V"))
    shapes = {"q": (B, T, Hq, K), "k": (B, T, H, K), "v": (B, T, Hv, V), "o": (B, T, max(Hq, Hv), V)}
    if takes(call, "do"):
        shapes["do"] = shapes.pop("o")
    if takes(call, "left"):
        shapes = {"left": (B, T, Hq, K), "right": (B, T, max(Hq, Hv) if call.scalars.get("backwards") else Hv, V)}
    layouts = {name: call.layouts.get(name) or contiguous_layout(shape, call.dtype) for name, shape in shapes.items()}
    if call.gate_dtype is not None and call.gate_form in (None, "key"):
        layouts["g"] = call.layouts.get("g") or contiguous_layout((B, T, Hv, K), call.gate_dtype)
    return next((name for name, layout in layouts.items() if not addressable(layout)), None)
