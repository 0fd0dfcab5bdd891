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

from gla_core.conformance.facts import facts, is_empty
from gla_core.conformance.facts import forms as forms_of
from gla_core.dispatch.backend import Backend, Capabilities, OpCall, supports_everything
from gla_core.ops import ABSTRACT_OPS, PUBLIC_OPS
from gla_core.ops.spec import CHECKPOINTS
from gla_core.workloads.inputs import describe
from gla_core.workloads.named import Workload, select

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL = frozenset({"ci", "odd", "packed", "extreme"})
AT_SIZE = frozenset({"train", "prefill", "decode", "long"})

EVERY_OP = tuple(ABSTRACT_OPS)
FORWARDS = tuple(spec.name for spec in PUBLIC_OPS.values())
"""The ops that public functions run."""
WRITING = tuple(name for name, spec in ABSTRACT_OPS.items() if any(result.written for result in spec.results))
"""The ops with an argument `inplace`."""


def differentiated(op: str) -> str:
    """Returns the op that the gradients of a public function are judged as: its backward, or the forward itself."""
    backward = ABSTRACT_OPS[op].backward
    is_its_own = backward is not None and ABSTRACT_OPS[backward].public == ABSTRACT_OPS[op].public
    return backward if backward is not None and is_its_own else op


DIFFERENTIATED = tuple(differentiated(op) for op in FORWARDS if ABSTRACT_OPS[op].differentiable)


def over(ops: str | tuple[str, ...], *names: str, **conditions: object) -> pytest.MarkDecorator:
    """Marks a test with an op, or several, and the cases of it that the test runs on, as `cases` takes them."""
    return pytest.mark.over(ops, *names, **conditions)


@dataclass(frozen=True, slots=True)
class Case:
    """One call: an abstract op on a workload, in a dtype, on a device."""

    op: str
    workload: Workload
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    deterministic: bool = False
    checkpoints: bool = False

    def __str__(self) -> str:
        return f"{self.workload.name}-{short(self.dtype)}"

    def facts(self) -> list[str]:
        """Returns what may tell this case from one with another outcome, in words: the most telling first."""
        return [f"in {short(self.dtype)}", *facts(self.describe(), self.workload.sizes)]

    def describe(self) -> OpCall:
        """What the core will know of the call."""
        place = torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")
        asked = {"needs_grad": self.needs_grad, "deterministic": self.deterministic, "checkpoints": self.checkpoints}
        return describe(self.op, {**self.workload.sizes, "dtype": self.dtype}, place, **asked)


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
    checkpoints: bool = False,
    forms: bool = False,
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
        cuda: on a CUDA device only. graphs: there, if the backend claims to be captured into CUDA graphs, and where
            there is something to compute.
        checkpoints: none for a backend that returns none.
        forms: as few as there must be for each optional argument to be given and to be left out.
    """
    can = backend.can(op)
    is_backward = any(spec.backward == op for spec in ABSTRACT_OPS.values())
    if op not in backend.ops or (also is not None and also not in backend.ops):
        return []
    if (deterministic and not can.deterministic) or ((gradients or is_backward) and not can.gradients):
        return []
    if checkpoints and not can.checkpoints:
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
    found = [case for case in found if excluded(backend, case) is None]
    if graphs or forms:
        found = [case for case in found if not is_empty(case.describe())]
    return _of_each_form(found) if forms else found


def _of_each_form(found: Iterable[Case]) -> list[Case]:
    """Returns the cases that give, or leave out, what none before them does."""
    seen: set[str] = set()
    kept = []
    for case in found:
        own = set(forms_of(case.describe(), case.workload.sizes))
        if not own <= seen:
            kept.append(case)
            seen |= own
    return kept


def refusals(backend: Backend, device: str) -> list[Case]:
    """Cases that the capabilities exclude: one for each way in which a call may lie beyond them."""
    return [case for op in ABSTRACT_OPS for case in _tried(backend, device, op) if excluded(backend, case)]


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
    wanted = [w for w in select(ABSTRACT_OPS[op].public) if (w.tags & SMALL if tag is None else tag in w.tags)]
    return [w for w in wanted if not names or w.name in names]


def _at_size(op: str) -> list[Workload]:
    return [w for w in select(ABSTRACT_OPS[op].public) if w.tags & AT_SIZE and not w.tags & SMALL]


def _tried(backend: Backend, device: str, op: str) -> list[Case]:
    can, spec = backend.can(op), ABSTRACT_OPS[op]
    dtype = dtypes_of(can)[0] if can.dtypes else torch.float32
    plain = Case(op, fitted(_small(op)[0], can), dtype, device)
    if op not in backend.ops:
        return [plain]
    other_devices = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    return [
        *(dataclasses.replace(plain, workload=w) for w in _small(op)),
        *(dataclasses.replace(plain, dtype=d) for d in DTYPES),
        *(dataclasses.replace(plain, device=d) for d in sorted(other_devices - {device})),
        *([dataclasses.replace(plain, needs_grad=True)] if spec.differentiable else []),
        dataclasses.replace(plain, deterministic=True),
        *([dataclasses.replace(plain, checkpoints=True)] if may_return_checkpoints(op) else []),
    ]


def may_return_checkpoints(op: str) -> bool:
    """Whether an op returns checkpoints if it is asked to."""
    return any(result.dtype is CHECKPOINTS for result in ABSTRACT_OPS[op].results)
