"""Which cases a backend is put to: its ops, its dtypes, and the workloads that its capabilities allow.

What they do not allow becomes a refusal: the call is made all the same, and has to be refused with a reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities, OpCall, supports_everything
from gla_core.workloads.named import Workload, select

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DIFFERENTIABLE = ("chunk_gla_fwd", "online_softmax", "softmax_attention")
SMALL = frozenset({"ci", "odd", "packed", "extreme"})
AT_SIZE = frozenset({"train", "prefill", "decode", "long"})


def over(op: str, *names: str, **conditions: object) -> pytest.MarkDecorator:
    """Mark a test with the cases it runs on; the arguments are those of `cases`."""
    return pytest.mark.over(op, *names, **conditions)


@dataclass(frozen=True, slots=True)
class Case:
    """One call: an abstract op on a workload, in a dtype, on a device."""

    op: str
    workload: Workload
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        return f"{self.workload.name}-{short(self.dtype)}"

    def describe(self) -> OpCall:
        """What the core will know of the call."""
        sizes = self.workload.sizes
        return OpCall(
            op=self.op,
            device=torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu"),
            dtype=self.dtype,
            dims=_dims(self.op, sizes),
            gate_dtype=self._gate_dtype(),
            state_dtype=self._state_dtype(),
            variable_length=sizes.get("lengths") is not None,
            indexed=sizes.get("rows") is not None,
            needs_grad=self.needs_grad,
            deterministic=self.deterministic,
        )

    def _gate_dtype(self) -> torch.dtype | None:
        sizes = self.workload.sizes
        has_gate = "gla" in self.op and sizes.get("gates") != "none"
        return sizes.get("gate_dtype", self.dtype) if has_gate else None

    def _state_dtype(self) -> torch.dtype | None:
        if self.op != "recurrent_gla_step" and not self.workload.sizes.get("initial_state"):
            return None
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtypes_of(can: Capabilities) -> list[torch.dtype]:
    """The declared dtypes, float32 first: the most exact that every device has."""
    return sorted(can.dtypes, key=lambda d: (d != torch.float32, DTYPES.index(d)))


def cases(
    backend: Backend,
    device: str,
    op: str,
    *names: str,
    also: str | None = None,
    tag: str | None = None,
    one_dtype: bool = False,
    in_turn: bool = False,
    half: bool = False,
    no_float64: bool = False,
    gradients: bool = False,
    deterministic: bool = False,
    at_size: bool = False,
    cuda: bool = False,
    graphs: bool = False,
) -> list[Case]:
    """The cases of an op that the backend's capabilities allow.

    Args:
        names: only these workloads. tag: only those with this tag.
        also: another op that the backend must implement.
        one_dtype: one dtype only, for what does not depend on it.
        in_turn: one dtype for each workload, every dtype in turn; all of them on a CUDA device, which is quick.
        half: bfloat16, or else float16, alone. no_float64: all others.
        gradients: none for a backend without.
        deterministic: none for a backend that does not claim to be so.
        at_size: the large workloads, on a CUDA device only, each in its own dtype.
        cuda: on a CUDA device only. graphs: there, and if the backend claims to be captured into CUDA graphs.
    """
    can = backend.capabilities
    if op not in backend.ops or (also is not None and also not in backend.ops):
        return []
    if (deterministic and not can.deterministic) or ((gradients or op == "chunk_gla_bwd") and not can.gradients):
        return []
    if (graphs and not can.cuda_graphs) or (device != "cuda" and (cuda or graphs or at_size)):
        return []
    if at_size:
        found = [Case(op, w, w.sizes["dtype"], device) for w in _at_size(op)]
    else:
        workloads = [fitted(w, can) for w in _small(op, names, tag)]
        dtypes = [d for d in dtypes_of(can) if not (no_float64 and d == torch.float64)]
        if half:
            dtypes = [d for d in (torch.bfloat16, torch.float16) if d in dtypes]
        if one_dtype or half:
            dtypes = dtypes[:1]
        one_each = zip(workloads, itertools.cycle(dtypes), strict=False)
        pairs = one_each if in_turn and device != "cuda" else itertools.product(workloads, dtypes)
        found = [Case(op, w, d, device) for w, d in pairs]
    return [case for case in found if excluded(backend, case) is None]


def refusals(backend: Backend, device: str) -> list[Case]:
    """Cases that the capabilities exclude: one for each way in which a call may lie beyond them."""
    return [case for op in OP_PARAMETERS for case in _tried(backend, device, op) if excluded(backend, case)]


def excluded(backend: Backend, case: Case) -> str | None:
    """Why the backend's capabilities exclude the case; None if they do not. `supports` is not asked."""
    return dataclasses.replace(backend, supports=supports_everything).refusal(case.describe())


def fitted(workload: Workload, can: Capabilities) -> Workload:
    """The workload, or a copy with widths that the backend computes, the nearest below where there is one."""
    sizes = workload.sizes
    if "K" not in sizes:
        return workload
    K, V = _nearest(sizes["K"], can.key_widths), _nearest(sizes["V"], can.value_widths)
    if sizes["K"] == K and sizes["V"] == V:
        return workload
    return dataclasses.replace(workload, name=f"{workload.name}_k{K}_v{V}", sizes={**sizes, "K": K, "V": V})


def _nearest(width: int, widths: range) -> int:
    if width in widths or not len(widths):
        return width
    low, high = min(widths[0], widths[-1]), max(widths[0], widths[-1])
    step = abs(widths.step)
    return min(max(low, low + (width - low) // step * step), high)


def _small(op: str, names: Iterable[str] = (), tag: str | None = None) -> list[Workload]:
    wanted = [w for w in select(_public(op)) if (w.tags & SMALL if tag is None else tag in w.tags)]
    return [w for w in wanted if not names or w.name in names]


def _at_size(op: str) -> list[Workload]:
    return [w for w in select(_public(op)) if w.tags & AT_SIZE and not w.tags & SMALL]


def _tried(backend: Backend, device: str, op: str) -> list[Case]:
    can = backend.capabilities
    dtype = dtypes_of(can)[0] if can.dtypes else torch.float32
    plain = Case(op, fitted(_small(op)[0], can), dtype, device)
    if op not in backend.ops:
        return [plain]
    other_devices = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    return [
        *(dataclasses.replace(plain, workload=w) for w in _small(op)),
        *(dataclasses.replace(plain, dtype=d) for d in DTYPES),
        *(dataclasses.replace(plain, device=d) for d in sorted(other_devices - {device})),
        *([dataclasses.replace(plain, needs_grad=True)] if op in DIFFERENTIABLE else []),
        dataclasses.replace(plain, deterministic=True),
    ]


def _public(op: str) -> str:
    return op.removesuffix("_fwd").removesuffix("_bwd")


def _dims(op: str, sizes: dict) -> dict[str, int]:
    if op == "online_softmax":
        shape, dim = sizes["shape"], sizes.get("dim", -1)
        columns = shape[dim]
        rows = 1
        for size in (*shape[:dim], *shape[dim % len(shape) + 1 :]):
            rows *= size
        return {"rows": rows, "columns": columns}
    dims = {"H": sizes["H"], "Hq": sizes["H"] * sizes.get("G", 1), "K": sizes["K"], "V": sizes["V"]}
    if op == "softmax_attention":
        return {"B": sizes["B"], "Tq": sizes["Tq"], "Tk": sizes["Tk"], **dims}
    if op == "recurrent_gla_step":
        return {"B": sizes["B"], **dims, "P": sizes.get("pool", sizes["B"])}
    lengths = sizes.get("lengths")
    if lengths is not None:
        return {"B": 1, "T": sum(lengths) + sizes.get("padding", 0), **dims, "N": len(lengths)}
    return {"B": sizes["B"], "T": sizes["T"], **dims, "N": sizes["B"]}
