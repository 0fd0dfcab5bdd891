"""Fits the constants of a formula to measured times, by the logs of predicted / measured.

The loss is the sum of the squared logs, but a log beyond `FAR` counts linearly (Huber, "Robust estimation of a location
parameter", 1964). A few calls that the formula does not describe then do not spoil the fit of the others. The search is
the method of Levenberg and Marquardt ("An algorithm for least-squares estimation of nonlinear parameters", 1963) over
the logs of the constants, so the constants stay positive. A formula with max() has several local minima, so the search
begins at several places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

from gla_core.dispatch.backend import Constants, seconds_or_none

Work = TypeVar("Work")
"""The argument of a formula: an `OpCall`, or a backend and an `OpCall`."""
Formula = Callable[[Work, Constants], float | None]
Errors = Callable[[Tensor], Tensor]
"""Maps log(constant / start) [constants] to log(predicted / measured) [samples]."""

FAR = 0.1
_REGULARISATION = 1e-3  # weight of the squared distance from the start, for constants that no sample depends on
_DIFFERENCE = 1e-5  # step of finite differences
_MOST_STEPS = 60  # maximum number of steps of one search
_TOLERANCE = 1e-6  # relative decrease of the loss below which a search has converged
_DAMPING = (1e-6, 1e6)  # minimum and maximum
_RESTARTS = (-2.0, -1.0, -0.4, 0.4, 1.0, 2.0)  # changes of one constant after which to search again
_RANDOM_STARTS = 60  # number of random starts, of which the best few are searched
_SEARCHED = 3


def fit(
    formula: Formula[Work], start: Constants, samples: Sequence[tuple[Work, float]], fixed: Constants | None = None
) -> dict[str, float]:
    """Returns the constants with which the formula predicts the samples best. Constants without influence are kept.

    Args:
        start: a guess of every constant to fit, positive.
        samples: work with its measured seconds. The formula must predict a time for each.
        fixed: further arguments of the formula, such as multiprocessors.

    Example:
        >>> def seconds(call, c):
        ...     return c["launch"] + call.dims["rows"] / c["rate"]
        >>> fit(seconds, {"launch": 1e-5, "rate": 1e9}, samples)
    """

    def errors(x: Tensor) -> Tensor:
        constants = {**_shifted(start, x), **(fixed or {})}
        return torch.tensor([error(formula, constants, s) for s in samples], dtype=torch.float64, device="cpu")

    random = Random(0)
    zero = torch.zeros(len(start), dtype=torch.float64, device="cpu")
    starts = [zero.new_tensor([random.uniform(-2, 2) for _ in start]) for _ in range(_RANDOM_STARTS)]
    starts.sort(key=lambda x: _loss(errors(x), x))
    minima = [_minimum(errors, x) for x in (zero, *starts[:_SEARCHED])]
    return _shifted(start, min(minima, key=lambda x: _loss(errors(x), x)))


def error(formula: Formula[Work], constants: Constants, sample: tuple[Work, float]) -> float:
    """Returns log(predicted / measured); it is infinite if the formula predicts no time."""
    work, seconds = sample
    predicted = seconds_or_none(formula, work, constants)
    return math.log(predicted / seconds) if predicted else math.inf


def _loss(e: Tensor, x: Tensor) -> float:
    far = e.abs()
    return float(torch.where(far < FAR, e * e, FAR * (2 * far - FAR)).sum() + _REGULARISATION * (x * x).sum())


def _minimum(errors: Errors, x: Tensor) -> Tensor:
    """Returns a local minimum that no change of one constant by one of `_RESTARTS` improves."""
    while True:
        x = _local_minimum(errors, x)
        changed = [x + change * axis for axis in torch.ones_like(x).diag() for change in _RESTARTS]
        best = min(changed, key=lambda y: _loss(errors(y), y), default=x)
        if not _loss(errors(best), best) < _loss(errors(x), x) * (1 - _TOLERANCE):
            return x
        x = best


def _local_minimum(errors: Errors, x: Tensor) -> Tensor:
    """Returns the minimum that damped least-squares steps from x lead to."""
    e, damping = errors(x), 1e-2
    loss = _loss(e, x)
    for _ in range(_MOST_STEPS):
        near = x + _DIFFERENCE * torch.ones_like(x).diag()
        slopes = torch.stack([(errors(y) - e) / _DIFFERENCE for y in near], 1)  # [samples, constants]
        weights = (FAR / e.abs().clamp(min=FAR))[:, None]  # [samples, 1]
        curvature = slopes.T @ (weights * slopes) + _REGULARISATION * torch.ones_like(x).diag()
        gradient = (slopes.T @ (weights * e[:, None]))[:, 0] + _REGULARISATION * x
        before = loss
        while damping < _DAMPING[1]:
            # A step changes a constant by at most about a factor of two, because the slopes hold only nearby.
            step = torch.linalg.solve(curvature + damping * curvature.diagonal().diag(), -gradient).clamp(-0.7, 0.7)
            e_there = errors(x + step)
            loss_there = _loss(e_there, x + step)
            if loss_there < loss:
                x, e, loss = x + step, e_there, loss_there
                damping = max(_DAMPING[0], damping / 5)
                break
            damping *= 4
        if not loss < before * (1 - _TOLERANCE):
            break
    return x


def _shifted(start: Constants, x: Tensor) -> dict[str, float]:
    return {name: value * math.exp(shift) for (name, value), shift in zip(start.items(), x.tolist(), strict=True)}
