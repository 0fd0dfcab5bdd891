"""Checks the values of calls over sequences, `OpSpec.reads`, and clears rows that belong to no sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.ops import checks


def reads(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows of sequences, and the states of those with tokens; all states if final states are asked for."""
    cu_seqlens, T = args["cu_seqlens"], args["q"].shape[1]
    checks.offset_values(cu_seqlens, T, args["max_seqlen"])
    rows = {"B T": checks.rows_of(cu_seqlens), **({} if T else {"Hv": slice(0)})}  # of what tokens share, if any
    if args["output_final_state"]:
        return rows
    return rows | {"N": slice(None if T else 0) if cu_seqlens is None else cu_seqlens.diff() > 0}


def rows_of_sequences(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns x [B, T, ..] with 0 in the rows that belong to no sequence, whatever they hold."""
    if cu_seqlens is None:
        return x
    rows = torch.arange(x.shape[1], device=x.device)
    inside = (rows >= cu_seqlens[0]) & (rows < cu_seqlens[-1])
    return torch.where(inside.view(-1, *[1] * (x.ndim - 2)), x, 0)
