"""The selection of a backend for a call: refusals, ranking, and their explanation.

An explicit request never falls back. `auto` ranks the backends that can run a call by predicted seconds
(calibration.py). Backends without a prediction come last. Ties go to the backend that supports the fewest
types of devices, then to the first by name. The lengths of packed sequences are on the device, and no call waits for
them. Unless `max_seqlen` bounds the longest, two times are predicted: for the expected lengths, and for one sequence
that holds all tokens. The backends are then ranked by regret. Each of the two times is divided by the least such time
of all backends. The regret is the product of the two ratios, with the ratio for the expected lengths squared. Under
`batch_invariant` no time counts, because it depends on the batch: backends that support the setting come first.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from gla_core.dispatch import registry
from gla_core.dispatch.backend import (
    GATE_NAMES,
    Backend,
    LaunchError,
    OpCall,
    Prepared,
    Reason,
    as_received,
    sentences,
    worst_case,
)
from gla_core.dispatch.calibration import Prediction, predict
from gla_core.dispatch.errors import NoBackendError
from gla_core.dispatch.logger import logger
from gla_core.dispatch.request import Choice, Request, current_request
from gla_core.dispatch.steps import step

_cannot_launch: dict[Hashable, Reason] = {}
registry.on_change.append(_cannot_launch.clear)

_GROWING_DIMS = frozenset({"B", "T", "N", "P", "Tq", "Tk", "rows"})  # whether a launch fails does not depend on these


@dataclass(frozen=True, slots=True)
class Candidate:
    """The standing of one backend for a call.

    Attributes:
        seconds: the predicted seconds; None without a prediction.
        constants: where the constants of the cost model come from.
        worst: the predicted seconds if one packed sequence holds all tokens; None if that cannot be.
        refusal: why the backend cannot run the call; None if it can.
        measured: the measured seconds, if any. failure: why the time could not be measured.
        kernels: lines about the kernels that compute the call, if the backend names them.
    """

    name: str
    seconds: float | None
    refusal: Reason | None
    constants: str | None = None
    worst: float | None = None
    measured: float | None = None
    failure: str | None = None
    kernels: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.refusal is not None:
            return self.refusal
        of = f" (constants {self.constants})" if self.constants else ""
        worst = "" if self.worst is None else f", {_time(self.worst)} at worst"
        time = "no time" if self.seconds is None else f"{_time(self.seconds)}{worst}{of}"
        said = [f"can run; predicts {time}"]
        if self.measured is not None:
            said.append(f"measured {_time(self.measured)}")
        if self.failure is not None:
            said.append(f"not measured: {self.failure}")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The backend that would run a call, the others, and the reasons. str() makes it readable.

    Attributes:
        call: the call, without tensors.
        request: the request for this op, such as 'auto' or 'a,b'. source: where it came from.
        candidates: every backend that was considered, best first.
        winner: name of the backend that would run; None if none can.
        why: one sentence; without a winner, every refusal follows.
    """

    call: OpCall
    request: str
    source: str
    candidates: tuple[Candidate, ...]
    winner: str | None
    why: str

    @property
    def fastest(self) -> str | None:
        """Returns the name of the backend that was measured to be the fastest, None without measurements."""
        timed = [(c.measured, c.name) for c in self.candidates if c.measured is not None]
        return min(timed)[1] if timed else None

    @property
    def title(self) -> str:
        """Returns the op, its sizes, the dtype and the device in a line."""
        return _title(self.call)

    def __str__(self) -> str:
        lines = [self.title, f"request: {self.request} ({self.source})"]
        several = sum(candidate.refusal is None for candidate in self.candidates) > 1
        fastest_of_several = self.fastest if several else None
        for candidate in self.candidates:
            mark = "->" if candidate.name == self.winner else "  "
            fastest = "  <- the fastest" if candidate.name == fastest_of_several else ""
            lines.append(f" {mark} {candidate.name:<16} {candidate}{fastest}")
            lines += [f"{' ' * 21}{line}" for line in candidate.kernels]
        lines.append(self.why)
        if fastest_of_several is not None:
            lines.append(self._verdict())
        return "\n".join(lines)

    def _verdict(self) -> str:
        times = {c.name: c.measured for c in self.candidates}
        best, chosen = times[self.fastest or ""], times.get(self.winner or "")
        if self.fastest == self.winner:
            return f"measured: {self.winner} is the fastest"
        if best and chosen:
            return f"measured: {self.fastest} is faster, {self.winner} takes {chosen / best:.2f} times as long"
        return f"measured: {self.fastest} is the fastest of those that ran"


def _title(call: OpCall) -> str:
    dims = " ".join(f"{name}={size}" for name, size in call.dims.items())
    dtype = str(call.dtype).removeprefix("torch.")
    place = call.device if call.assumed is None else f"{call.assumed.name} (assumed)"
    packed = ", packed" if call.variable_length else ""
    gates = "" if call.gate_form in (None, "key") else f", {GATE_NAMES[call.gate_form]}"
    gates += "" if call.scalars.get("gate_normalizer") is None else ", gates from logits"
    return f"{call.op}  {dims}  {dtype} on {place}{packed}{gates}"


@step
def select(call: OpCall, request: Request) -> Backend:
    """Returns the backend that runs `call`. Raises NoBackendError with all refusals, UnknownBackendError for a typo."""
    choice = request.choice(call.op)
    candidates = _candidates(call, choice, predicted=not choice.names)
    if not candidates or candidates[0][1].refusal is not None:
        raise NoBackendError(_nobody(call, request, [c for _, c in candidates]))
    return candidates[0][0]


@functools.lru_cache(maxsize=4096)
def makes_checkpoints(op: str, request: str) -> bool:
    """Returns whether all backends that a request names return checkpoints; if it names none, whether one does.

    Args:
        request: the text of the whole request, as in `Request.spec`.
    """
    choice = current_request(request).choice(op)
    named = [registry.get(name, f"{choice.source}: ") for name in choice.names]
    able = (backend.can(op).checkpoints for backend in named or registry.installed().values())
    return all(able) if named else any(able)


registry.on_change.append(makes_checkpoints.cache_clear)


def explain_call(call: OpCall, request: Request) -> Explanation:
    """Explains what `select` would do; runs nothing."""
    choice = request.choice(call.op)
    ranked = _candidates(call, choice, predicted=True)
    candidates = tuple(
        c if c.refusal is not None else dataclasses.replace(c, kernels=_kernels(backend, call)) for backend, c in ranked
    )
    able = [c for c in candidates if c.refusal is None]
    winner = able[0].name if able else None
    why = _why(able, choice, call) if able else _nobody(call, request, candidates)
    return Explanation(call, str(choice), choice.source, candidates, winner, why)


def log_selection(backend: Backend, call: OpCall) -> None:
    """Logs a line, of level DEBUG, with a call, the backend that runs it, and its kernels if the backend names them."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s", _title(call), "; ".join((backend.name, *_kernels(backend, call))))


def _kernels(backend: Backend, call: OpCall) -> tuple[str, ...]:
    """Returns lines about the kernels of a backend that can run a call; none if the backend does not name them."""
    op = backend.ops[call.op]
    if not isinstance(op, Prepared) or op.kernels is None:
        return ()
    return tuple(sentences("kernels", op.kernels, as_received(op, call)))


def _candidates(call: OpCall, choice: Choice, predicted: bool) -> list[tuple[Backend, Candidate]]:
    """Returns the candidates in the order of the choice or by rank. Backends that can run the call come first.

    Args:
        predicted: whether to predict their times, which the rank requires.
    """
    asked = [registry.get(name, f"{choice.source}: ") for name in choice.names] or registry.installed().values()
    at_worst = worst_case(call) if predicted else None
    candidates = []
    for backend in asked:
        refusal, prediction, worst = backend.refusal(call), Prediction(None), None
        if refusal is None and not choice.names:  # a named backend is tried again, and shows its own error
            refusal = _cannot_launch.get(_launch_class(backend, call))
        if refusal is None and predicted and call.batch_invariant is None:
            prediction = predict(backend, call)
            worst = None if at_worst is None else predict(backend, at_worst).seconds
        candidates.append((backend, Candidate(backend.name, prediction.seconds, refusal, prediction.source, worst)))
    candidates.sort(key=lambda pair: pair[1].refusal is not None)
    return candidates if choice.names else _ranked(candidates, call)


def _ranked(candidates: list[tuple[Backend, Candidate]], call: OpCall) -> list[tuple[Backend, Candidate]]:
    """Returns the backends by rank: those that can run the call first, by least regret."""
    seconds = [c.seconds for _, c in candidates if c.seconds is not None]
    worst = [c.worst for _, c in candidates if c.worst is not None]

    def rank(pair: tuple[Backend, Candidate]) -> tuple:
        backend, c = pair
        regret = _times(c.seconds, seconds) ** 2 * _times(c.worst, worst)
        can = backend.can(call.op)
        by_parts = call.batch_invariant is not None and call.device.type not in can.batch_invariant
        devices = math.inf if can.devices is None else len(can.devices)  # of equals, the most specialised comes first
        return (c.refusal is not None, by_parts, c.seconds is None, regret, c.seconds or 0.0, devices, backend.name)

    return sorted(candidates, key=rank)


def _times(seconds: float | None, all_seconds: Sequence[float]) -> float:
    """Returns the ratio to the least of all seconds; 1 if there is nothing to compare."""
    if seconds is None or not min(all_seconds):
        return 1.0
    return seconds / min(all_seconds)


def remember_launch_failure(backend: Backend, call: OpCall, error: Exception) -> None:
    """Makes `auto` skip the backend for calls like this one, until the set of backends changes."""
    _cannot_launch[_launch_class(backend, call)] = f"could not launch: {type(error).__name__}: {error}"


def is_launch_failure(error: Exception) -> bool:
    """Returns whether a kernel could not be launched at all, as opposed to a kernel that ran and went wrong."""
    return isinstance(error, LaunchError | ImportError)


def _launch_class(backend: Backend, call: OpCall) -> Hashable:
    fixed = tuple((name, size) for name, size in call.dims.items() if name not in _GROWING_DIMS)
    return (backend.name, call.op, call.device, call.dtype, call.gate_form, call.variable_length, fixed)


def _nobody(call: OpCall, request: Request, candidates: Iterable[Candidate]) -> str:
    choice = request.choice(call.op)
    listed = "".join(f"\n  {c.name}: {c.refusal}" for c in candidates) or "\n  no backend is installed"
    able = _first_able(call) if choice.names else None
    proposal = f"; {request.allowing(able, call.op)!r} would run it" if able else ""
    return f"no backend can run {call.op} (request: {choice}, from {choice.source}){proposal}:{listed}"


def _first_able(call: OpCall) -> str | None:
    """Returns the name of the backend that `auto` would take, None if no backend can run the call."""
    candidates = _candidates(call, Choice((), ""), predicted=True)
    return candidates[0][0].name if candidates and candidates[0][1].refusal is None else None


_TIE = "the one written for the fewest types of device is first, then the first by name"


def _why(able: list[Candidate], choice: Choice, call: OpCall) -> str:
    winner = able[0].name
    if choice.names:
        first = "the first of the list that can run" if len(choice.names) > 1 else "the one asked for"
        return f"{winner}: {first}, by {choice.source}"
    if len(able) == 1:
        return f"{winner}: the only backend that can run this"
    if call.batch_invariant is not None:
        return f"{winner}: under batch_invariant backends that support it come first, and no time counts"
    if able[0].seconds is not None:
        equal = [c.name for c in able[1:] if (c.seconds, c.worst) == (able[0].seconds, able[0].worst)]
        if equal:
            same = f"{' and '.join(equal)} predict{'s' if len(equal) == 1 else ''} the same time"
            return f"{winner}: {same}; {_TIE}"
        if able[0].worst is not None:
            return f"{winner}: the least regret over the possible lengths; max_seqlen would bound them"
        return f"{winner}: the least predicted time"
    return f"{winner}: no backend predicts its time; {_TIE}"


def _time(seconds: float) -> str:
    unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * factor:.{1 if unit == 'us' else 2}f} {unit}"
