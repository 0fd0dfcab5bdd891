"""Error budgets. An error is the norm of out - ref over the norm of ref, the float64 result for the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor

FORWARD = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-3}
GRADIENT = {**FORWARD, torch.bfloat16: 5e-3}


SMALLEST = torch.finfo(torch.float32).tiny


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Returns the error of `out` against `ref` of the same shape; infinite if NaN or infinity is in only one of them.

    Numbers below the smallest normal number of float32, which devices flush to 0, count as 0.
    """
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {list(out.shape)}; expected {list(ref.shape)}, as ref")
    out, ref = (torch.where(x.abs() < SMALLEST, 0, x) for x in (out.detach().double(), ref.detach().double()))
    same = (out == ref) | (out.isnan() & ref.isnan())  # equal infinities, and NaN in both, are no error
    difference = torch.where(same, 0, out - ref)
    norm = torch.where(ref.isfinite(), ref, 0).norm()
    error = float(difference.norm() / norm) if norm > 0 else float(difference.norm())
    return error if error == error else float("inf")


def number(x: float, digits: int = 3) -> str:
    """Returns a number as a report shows it, such as 4.66 or 1e-5."""
    return f"{x:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")
