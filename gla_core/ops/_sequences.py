"""Checks calls over sequences, for the descriptions of ops: `OpSpec.bind` and `OpSpec.reads`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gla_core.dispatch.backend import CHUNK
from gla_core.dispatch.tensors import checkpoint_rows
from gla_core.ops import checks


def bind(args: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """Binds the number of sequences and of checkpoints."""
    sizes["N"] = sizes["B"]
    checks.logits(args.get("g"), args.get("gate_normalizer"))
    packed, L = args["cu_seqlens"] is not None, args.get("checkpoint_every")
    checks.longest(args["max_seqlen"])
    if packed:
        checks.packed(sizes, of="q")
    if L is None:
        if args.get("checkpoints") is not None:
            raise ValueError("checkpoint_every is None; expected the number of tokens between the checkpoints")
        return
    if L < 1 or L % CHUNK != 0:
        raise ValueError(f"checkpoint_every is {L}; expected a multiple of {CHUNK}, or None")
    sizes["n"] = checkpoint_rows(sizes["T"], sizes["N"], L, packed)


def reads(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows of sequences, and the states of those with tokens; all states if final states are asked for."""
    cu_seqlens, T = args["cu_seqlens"], args["q"].shape[1]
    checks.offset_values(cu_seqlens, T, args["max_seqlen"])
    rows = {"B T": checks.rows_of(cu_seqlens)}
    if args["output_final_state"]:
        return rows
    return rows | {"N": slice(None if T else 0) if cu_seqlens is None else cu_seqlens.diff() > 0}
