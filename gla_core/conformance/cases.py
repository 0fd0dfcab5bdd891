"""The cases of a backend: its ops, its dtypes, and the workloads that its capabilities allow.

A workload that they exclude becomes a refusal: the call is still made, and has to be refused with a reason.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from gla_core.conformance.facts import facts, is_empty
from gla_core.conformance.facts import forms as forms_of
from gla_core.dispatch.backend import Backend, Capabilities, OpCall, supports_everything
from gla_core.ops import ABSTRACT_OPS, FAMILIES, PUBLIC_OPS, RUNS
from gla_core.ops.spec import Role
from gla_core.workloads.inputs import describe
from gla_core.workloads.named import Workload, select

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL = frozenset({"ci", "odd", "packed", "extreme"})
AT_SIZE = frozenset({"train", "prefill", "decode", "long"})

Dtypes = Literal["every", "one", "rotating", "half", "no_float64"]
"""The declared dtypes in which a test runs a workload.

every: all of them. one: a single dtype, for properties that do not depend on it. rotating: one dtype per workload, the
next one for the next workload; a CUDA device is fast and uses all of them. half: only bfloat16, or float16 if bfloat16
is not declared. no_float64: every dtype but float64.
"""

EVERY_OP = tuple(ABSTRACT_OPS)
FORWARDS = tuple(spec.name for spec in PUBLIC_OPS.values())
"""The ops that public functions run."""
BACKWARDS = tuple(name for name in EVERY_OP if name not in FORWARDS)
"""The ops that compute the gradients of another op."""
WRITING = tuple(name for name, spec in ABSTRACT_OPS.items() if any(result.written for result in spec.results))
"""The ops with an argument `inplace`."""


def having(*names: str, among: tuple[str, ...] = FORWARDS) -> tuple[str, ...]:
    """Returns the ops among some, by default those that public functions run, that have all of these arguments."""
    return tuple(op for op in among if set(names) <= set(ABSTRACT_OPS[op].parameters))


SERVING = having("pool")
"""The ops on a pool of slots."""
SEQUENCES = tuple(op for op in FORWARDS if "T" in ABSTRACT_OPS[op].sizes and op not in SERVING)
"""The ops on whole sequences, without a pool."""


WITH_STATES = having("initial_state")
"""The ops on whole sequences that begin with a state."""
STEPS = tuple(op for op in having("state") if ABSTRACT_OPS[op].lowering is None)
"""The ops of single tokens, without what a layer adds."""
PROMPTS = having("checkpoint_slots")
"""The ops on prompts whose states are in a pool."""
DRAFTS = having("slots", "read_slots")
"""The ops of several tokens that keep the state after each in a pool."""
REPLAYS = having("ring_k")
"""The ops of several tokens that keep these in rings."""


def relative(op: str, name: str) -> str:
    """Returns the op of the same family with an argument of this name that the core computes by no other op."""
    family = next(specs for specs in FAMILIES if op in (spec.name for spec in specs))
    return next(spec.name for spec in family if spec.name in having(name) and spec.lowering is None)


def is_backward(op: str) -> bool:
    """Returns whether an op computes the gradients of another one."""
    return op in BACKWARDS


def differentiated(op: str) -> str:
    """Returns the op whose cases judge the gradients of `op`: its backward if it has the same public op, else `op`."""
    backward = ABSTRACT_OPS[op].backward
    is_its_own = backward is not None and ABSTRACT_OPS[backward].public == ABSTRACT_OPS[op].public
    return backward if backward is not None and is_its_own else op


PAIRS = tuple(op for op in WITH_STATES if differentiated(op) != op)
"""The ops on sequences that begin with a state, with a backward op of their own."""
GRADIENTS_OF_STATES = tuple(differentiated(op) for op in PAIRS)
"""The backward ops of `PAIRS`."""
GATED_BACKWARDS = having("g", among=BACKWARDS)
"""The ops that compute the gradients of a gate."""
DIFFERENTIATED = tuple(differentiated(op) for op in FORWARDS if ABSTRACT_OPS[op].differentiable)


def over(ops: str | tuple[str, ...], *names: str, **conditions: object) -> pytest.MarkDecorator:
    """Marks a test with one or several ops, and with the arguments of `cases` that select its cases."""
    return pytest.mark.over((ops,) if isinstance(ops, str) else ops, *names, **conditions)


@dataclass(frozen=True, slots=True)
class Case:
    """A call: an abstract op on a workload, in a dtype, on a device.

    `function` names a public function that fixes arguments of the op, such as `chunk_gla_gradient_summary`.
    """

    op: str
    workload: Workload
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    deterministic: bool = False
    checkpoints: bool = False
    function: str = ""

    @property
    def call(self) -> str:
        """Returns the name of the call: that of the op, or of a further public function of the op."""
        return self.function or self.op

    def __str__(self) -> str:
        return f"{self.call}-{self.workload.name}-{short(self.dtype)}"

    def facts(self) -> list[str]:
        """Returns facts, in words, that may tell this case from one with another outcome; the most telling first."""
        function = [f"by {self.function}"] if self.function else []
        return [f"in {short(self.dtype)}", *function, *facts(self.describe(), self.workload.sizes)]

    def describe(self) -> OpCall:
        """Returns the `OpCall` by which the core would describe the case."""
        return _described(self)


@functools.cache  # many tests run on the same case
def _described(case: Case) -> OpCall:
    place = torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")
    asked = {"needs_grad": case.needs_grad, "deterministic": case.deterministic, "checkpoints": case.checkpoints}
    return describe(case.op, {**case.workload.sizes, "dtype": case.dtype}, place, **asked)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtypes_of(can: Capabilities) -> list[torch.dtype]:
    """Returns the declared dtypes. float32 comes first: it is the most exact dtype that every device has."""
    return sorted(can.dtypes, key=lambda d: (d != torch.float32, DTYPES.index(d)))


def cases(
    backend: Backend,
    device: str,
    op: str,
    *names: str,
    few: Mapping[str | tuple[str, ...], str] | None = None,
    functions: bool = False,
    also: str | None = None,
    tag: str | None = None,
    dtypes: Dtypes = "every",
    requires: str | None = None,
    at_size: bool = False,
    cuda: bool = False,
    forms: bool = False,
    gated: bool = False,
) -> list[Case]:
    """Returns the cases of an op that the backend's capabilities allow.

    Args:
        names: names of workloads; without names, every workload.
        few: for some ops, or groups of ops, the names of the only workloads of the op, separated by blanks.
        functions: whether to return the cases of every public function of the op.
        tag: a tag that the workloads must have; None selects the small workloads.
        also: an argument of another op that the backend must implement, see `relative`.
        dtypes: the dtypes of each workload, see `Dtypes`.
        requires: a capability, such as deterministic; a backend that does not declare it has no case. cuda_graphs
            excludes workloads with nothing to compute, because an empty graph cannot be captured.
        at_size: whether to return only the large workloads, each in its own dtype, and only on a CUDA device.
        cuda: whether there are cases only on a CUDA device.
        forms: whether to keep only a few cases, which together give each optional argument and leave it out.
        gated: whether to leave out workloads without gates.
    """
    can = backend.can(op)
    for ops, chosen_names in (few or {}).items():
        if op in ((ops,) if isinstance(ops, str) else ops):
            names = tuple(chosen_names.split())
    if op not in backend.ops or (also is not None and relative(op, also) not in backend.ops):
        return []
    if (is_backward(op) and not can.gradients) or (requires is not None and not getattr(can, requires)):
        return []
    if (cuda or at_size) and device != "cuda":
        return []
    if at_size:
        large = [w for w in select(ABSTRACT_OPS[op].public) if w.tags & AT_SIZE and not w.tags & SMALL]
        chosen = [Case(op, w, w.sizes["dtype"], device) for w in large]
    else:
        workloads = [fitted(w, can) for w in _small(op, names, tag) if not gated or w.sizes.get("gates") != "none"]
        chosen = [Case(op, w, d, device) for w, d in _with_dtypes(workloads, dtypes_of(can), dtypes, device)]
    declared = _supporting_everything(backend)
    chosen = [case for case in chosen if declared.refusal(case.describe()) is None]
    if forms or requires == "cuda_graphs":
        chosen = [case for case in chosen if not is_empty(case.describe())]
    if functions:
        fixing = [name for name, (spec, fixed) in RUNS.items() if spec.name == op and fixed]
        chosen = [dataclasses.replace(case, function=name) for name in ("", *fixing) for case in chosen]
    return _one_of_each_form(chosen) if forms else chosen


def _with_dtypes(
    workloads: list[Workload], declared: list[torch.dtype], which: Dtypes, device: str
) -> Iterable[tuple[Workload, torch.dtype]]:
    """Returns the pairs of a workload and a dtype that `which` selects."""
    if which == "rotating" and device != "cuda":
        return zip(workloads, itertools.cycle(declared), strict=False)
    chosen = {
        "one": declared[:1],
        "half": [d for d in (torch.bfloat16, torch.float16) if d in declared][:1],
        "no_float64": [d for d in declared if d != torch.float64],
    }
    return itertools.product(workloads, chosen.get(which, declared))


def _one_of_each_form(cases: list[Case]) -> list[Case]:
    """Returns a few cases that have every form of all cases, see `facts.forms`."""
    forms = {case: set(forms_of(case.describe(), case.workload.sizes)) for case in cases}
    missing = set().union(*forms.values())
    kept = []
    while missing:
        most = max(cases, key=lambda case: len(missing & forms[case]))
        kept.append(most)
        missing -= forms[most]
    return kept


def refusals(backend: Backend, device: str) -> list[Case]:
    """Returns the calls that the capabilities exclude, among calls that differ in workload, dtype, device or a flag."""
    declared = _supporting_everything(backend)
    return [case for op in ABSTRACT_OPS for case in _tried(backend, device, op) if declared.refusal(case.describe())]


def excluded(backend: Backend, case: Case) -> str | None:
    """Returns the reason why the backend's capabilities exclude the case, or None. `supports` is not called."""
    return _supporting_everything(backend).refusal(case.describe())


def _supporting_everything(backend: Backend) -> Backend:
    return dataclasses.replace(backend, supports=supports_everything)


def fitted(workload: Workload, can: Capabilities) -> Workload:
    """Returns the workload, or a copy with declared widths.

    A width that is not declared becomes the next smaller one, or the smallest if none is smaller.
    """
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
    """Returns whether an op can return checkpoints."""
    return any(result.role is Role.CHECKPOINTS for result in ABSTRACT_OPS[op].results)
