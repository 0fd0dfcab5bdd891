"""Constants of a formula from measured times: least squares of log(predicted / measured).

The search is that of Hooke and Jeeves ("Direct search" solution of numerical and statistical problems, 1961): each
constant in turn is multiplied or divided by a factor while that helps, a sweep that helped is taken again as one step,
and the factor shrinks. It needs no derivative, which a formula with max() and ceil() does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from gla_core.dispatch.backend import Constants, OpCall, seconds_or_none

Formula = Callable[[OpCall, Constants], float | None]
Logs = list[float]

_STEPS = [math.log(2) * 2.0**-n for n in range(-1, 9)]  # factors 4, 2, 1.41, ... 1.003
_SWEEPS = 100  # at one factor, at most
_HELPS = 1e-7  # relative decrease of the loss below which a step is not worth taking
_GUESSES = 100  # the search ends in the nearest valley: it also begins at the best of some random places ...
_SEARCHED = 3  # ... and this many of them are worth it
_PULL = 1e-3  # towards the start: what no sample depends on stays there, and nothing vanishes


def fit(
    formula: Formula, start: Constants, samples: Sequence[tuple[OpCall, float]], fixed: Constants | None = None
) -> dict[str, float]:
    """Constants that make the formula predict the samples best; one that no sample depends on stays as it is.

    Args:
        start: a guess of every constant to fit, positive.
        samples: calls with their measured seconds. The formula must predict a time for each.
        fixed: what else the formula receives, such as multiprocessors.

    Example:
        >>> fit(lambda call, c: c["launch"] + call.dims["rows"] / c["rate"], {"launch": 1e-5, "rate": 1e9}, samples)
    """

    def loss(shift: Logs) -> float:
        constants = {**_shifted(start, shift), **(fixed or {})}
        return sum(error(formula, constants, s) ** 2 for s in samples) + _PULL * sum(x * x for x in shift)

    random = Random(0)
    guesses = sorted(([random.uniform(-2, 2) for _ in start] for _ in range(_GUESSES)), key=loss)
    found = [_search(loss, shift) for shift in ([0.0] * len(start), *guesses[:_SEARCHED])]
    return _shifted(start, min(found, key=loss))


def error(formula: Formula, constants: Constants, sample: tuple[OpCall, float]) -> float:
    """log(predicted / measured); infinite where the formula predicts no time."""
    call, seconds = sample
    predicted = seconds_or_none(formula, call, constants)
    return math.log(predicted / seconds) if predicted else math.inf


def _search(loss: Callable[[Logs], float], best: Logs) -> Logs:
    least = loss(best)
    for step in _STEPS:
        for _ in range(_SWEEPS):
            found, value = _sweep(loss, best, least, step)
            if not value < least * (1 - _HELPS):
                break
            move = [b - a for a, b in zip(best, found, strict=True)]
            while value < least:  # the whole sweep once more
                best, least = found, value
                found = [a + b for a, b in zip(best, move, strict=True)]
                value = loss(found)
    return best


def _sweep(loss: Callable[[Logs], float], best: Logs, least: float, step: float) -> tuple[Logs, float]:
    """Each constant in turn one step up or down, if that helps."""
    best = list(best)
    for i, middle in enumerate(best):
        for tried in (middle + step, middle - step):
            best[i] = tried
            value = loss(best)
            if value < least * (1 - _HELPS):
                least = value
                break
            best[i] = middle
    return best, least


def _shifted(start: Constants, shift: Logs) -> dict[str, float]:
    return {name: value * math.exp(x) for (name, value), x in zip(start.items(), shift, strict=True)}
