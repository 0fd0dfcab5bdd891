"""Constants of a formula from measured times, by the logs of predicted / measured.

Least squares, but a log beyond `FAR` counts in proportion (Huber, "Robust estimation of a location parameter", 1964):
a few calls that a formula does not describe then spoil no others. The search is that of Levenberg and Marquardt ("An
algorithm for least-squares estimation of nonlinear parameters", 1963) over the logs of the constants, which stay
positive. A formula with max() has valleys besides the deepest, so it begins at several places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from gla_core.dispatch.backend import Constants, OpCall, seconds_or_none

Formula = Callable[[OpCall, Constants], float | None]
Errors = Callable[[Tensor], Tensor]
"""From the logs of constant / start, [constants], to those of predicted / measured, [samples]."""

FAR = 0.1
_PULL = 1e-3  # towards the start: what no sample depends on stays there, and nothing vanishes
_STEP = 1e-5  # of a derivative
_ROUNDS = 60  # steps of a search, at most
_HELPS = 1e-6  # relative decrease of the loss below which a step is the last
_DAMPING = (1e-6, 1e6)
_LEAPS = (-2.0, -1.0, -0.4, 0.4, 1.0, 2.0)
_GUESSES = 60  # random places, of which so many are searched as well
_SEARCHED = 3


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

    def errors(x: Tensor) -> Tensor:
        constants = {**_shifted(start, x), **(fixed or {})}
        return torch.tensor([error(formula, constants, s) for s in samples], dtype=torch.float64)

    random = Random(0)
    places = [torch.tensor([random.uniform(-2, 2) for _ in start], dtype=torch.float64) for _ in range(_GUESSES)]
    places.sort(key=lambda x: _loss(errors(x), x))
    found = [_valleys(errors, x) for x in (torch.zeros(len(start), dtype=torch.float64), *places[:_SEARCHED])]
    return _shifted(start, min(found, key=lambda x: _loss(errors(x), x)))


def error(formula: Formula, constants: Constants, sample: tuple[OpCall, float]) -> float:
    """log(predicted / measured); infinite where the formula predicts no time."""
    call, seconds = sample
    predicted = seconds_or_none(formula, call, constants)
    return math.log(predicted / seconds) if predicted else math.inf


def _loss(e: Tensor, x: Tensor) -> float:
    far = e.abs()
    return float(torch.where(far < FAR, e * e, FAR * (2 * far - FAR)).sum() + _PULL * (x * x).sum())


def _valleys(errors: Errors, x: Tensor) -> Tensor:
    """The bottom of a valley from which no leap of one constant leads into a deeper one."""
    while True:
        x = _search(errors, x)
        e = errors(x)
        leaps = [x + leap * way for way in torch.eye(len(x), dtype=x.dtype) for leap in _LEAPS]
        best = min(leaps, key=lambda y: _loss(errors(y), y), default=x)
        if not _loss(errors(best), best) < _loss(e, x) * (1 - _HELPS):
            return x
        x = best


def _search(errors: Errors, x: Tensor) -> Tensor:
    """The bottom of the valley that x lies in."""
    e, damping = errors(x), 1e-2
    loss = _loss(e, x)
    for _ in range(_ROUNDS):
        slopes = torch.stack([(errors(y) - e) / _STEP for y in x + _STEP * torch.eye(len(x), dtype=x.dtype)], 1)
        weights = (FAR / e.abs().clamp(min=FAR))[:, None]  # [samples, 1]
        curvature = slopes.T @ (weights * slopes) + _PULL * torch.eye(len(x), dtype=x.dtype)
        gradient = (slopes.T @ (weights * e[:, None]))[:, 0] + _PULL * x
        before = loss
        while damping < _DAMPING[1]:
            # No step is longer than to twice or half: far away, the slopes are others.
            step = torch.linalg.solve(curvature + damping * curvature.diagonal().diag(), -gradient).clamp(-0.7, 0.7)
            e_there = errors(x + step)
            loss_there = _loss(e_there, x + step)
            if loss_there < loss:
                x, e, loss = x + step, e_there, loss_there
                damping = max(_DAMPING[0], damping / 5)
                break
            damping *= 4
        if not loss < before * (1 - _HELPS):
            break
    return x


def _shifted(start: Constants, x: Tensor) -> dict[str, float]:
    return {name: value * math.exp(shift) for (name, value), shift in zip(start.items(), x.tolist(), strict=True)}
