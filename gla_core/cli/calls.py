"""Calls and devices in the form that a command line gives them: sizes separated by commas, a dtype, a device."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

import gla_core as gla
from gla_core.dispatch.backend import KnownDevice, OpCall, any_of
from gla_core.dispatch.calibration import KNOWN_DEVICES
from gla_core.dispatch.errors import check_known
from gla_core.ops import ABSTRACT_OPS, RUNS
from gla_core.ops.spec import WIDTHS, Role

SHAPES = {op: spec.command_line_sizes for op, spec in ABSTRACT_OPS.items()}
"""The sizes that describe a call of each abstract op."""
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
GATE_FORMS = ("key", "head", "constant", "none")
"""The forms of gates that a command line names; none means no gate."""
_HEADS = {"Hq": "--query-heads", "Hv": "--value-heads"}


def public_op(op: str) -> str:
    """Returns the public op that an op's name stands for: `chunk_gla` for its forward and its backward."""
    return RUNS[op][0].public if op in RUNS else op


def abstract_ops(op: str) -> list[str]:
    """Returns the abstract ops that an op's name stands for: a forward and its backward for `chunk_gla`.

    Raises:
        UnknownOpError: no op has this name.
    """
    check_known("op", op, RUNS, gla.UnknownOpError)
    return [name for name, spec in ABSTRACT_OPS.items() if spec.public == op] or [RUNS[op][0].name]


def describe_call(
    op: str,
    shape: str,
    query_heads: int | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    varlen: int | None = None,
    max_seqlen: int | None = None,
    assume: str | None = None,
    value_heads: int | None = None,
    gate: str | None = None,
    gate_normalizer: int | None = None,
) -> OpCall:
    """Returns the call that the numbers of a command line describe; a public op stands for its forward.

    Args:
        assume: name of the CUDA device for which to describe the call, or a part of the name, such as H200. The device
            need not be on this machine.
        gate: a form of gates, one of `GATE_FORMS`; None means key.
        gate_normalizer: the number by which log sigma is divided if g holds logits, in the dtype of q; None if g holds
            log gates.

    Raises:
        ValueError, UnknownOpError: the numbers or names describe no call, or one that the op always refuses.
    """
    op, decided = abstract_ops(op)[0], RUNS[op][1]
    precision = dtype_of(dtype)
    sizes = _sizes(op, shape)
    heads = _heads(op, sizes, {"Hq": query_heads, "Hv": value_heads})
    if varlen is not None and ABSTRACT_OPS[op].has(Role.OFFSETS) is None:
        packing = ", ".join(name for name, spec in ABSTRACT_OPS.items() if spec.has(Role.OFFSETS) is not None)
        raise ValueError(f"--varlen does not go with {op}; these ops take packed sequences: {packing}")
    if ABSTRACT_OPS[op].requires(Role.OFFSETS) and sizes["B"] != 1:
        raise ValueError(f"--shape {shape!r}: {op} packs sequences along T: expected B = 1 and not B = {sizes['B']}")
    if varlen is not None and varlen < 0:
        raise ValueError(f"--varlen is {varlen}; expected the number of sequences, at least 0")
    if varlen is not None and sizes["B"] != 1:
        raise ValueError(f"--varlen {varlen} packs sequences along T: expected B = 1 and not B = {sizes['B']}")
    packed = varlen is not None or ABSTRACT_OPS[op].requires(Role.OFFSETS)
    if max_seqlen is not None and (not packed or max_seqlen < 0):
        raise ValueError(f"--max-seqlen {max_seqlen} bounds packed sequences: expected --varlen, and a length")
    if assume is not None and device not in ("auto", "cuda"):
        raise ValueError(f"--assume names a CUDA device; leave out --device {device}")
    sizes |= heads | ({} if varlen is None else {"N": varlen})
    if "S" in ABSTRACT_OPS[op].sizes:  # columns of slots: the tokens of a sequence
        sizes["S"] = max(1, math.ceil(sizes["B"] * sizes["T"] / max(1, sizes.get("N", sizes["B"]))))
    call = ABSTRACT_OPS[op].call(
        sizes,
        device_of(device) if assume is None else torch.device("cuda", 0),
        precision,
        assumed=None if assume is None else _assumed(assume),
        variable_length=packed,
        longest=max_seqlen,
        scalars=decided if gate_normalizer is None else {**decided, "gate_normalizer": gate_normalizer},
        **_gate(op, gate) | _logits(op, gate, gate_normalizer, precision),
    )
    ABSTRACT_OPS[op].limit(call.dims, packed)
    return call


def _assumed(name: str) -> KnownDevice:
    """Returns the known device whose name contains all of these words, in upper or lower case."""
    words = set(name.lower().split())
    matching = [device for known, device in KNOWN_DEVICES.items() if words <= set(known.lower().split())]
    if not words or len(matching) != 1:
        problem = "names several devices" if words and matching else "is not a known device"
        raise ValueError(
            f"--assume {name!r} {problem}; expected {' or '.join(KNOWN_DEVICES)}, or a part of such a name, as H200"
        )
    return matching[0]


def _sizes(op: str, shape: str) -> dict[str, int]:
    names, parts = SHAPES[op], [part.strip() for part in shape.split(",")]
    wrong = [f"{name} is {part!r}" for name, part in zip(names, parts, strict=False) if not part.isdecimal()]
    if len(parts) != len(names) or wrong:
        problem = f"has {len(parts)} values" if len(parts) != len(names) else wrong[0]
        expected = f"{op} expects {len(names)} whole numbers: {','.join(names)}"
        raise ValueError(f"--shape {shape!r}: {problem}; {expected}")
    sizes = dict(zip(names, map(int, parts), strict=True))
    for name in WIDTHS:
        if sizes.get(name) == 0:
            raise ValueError(f"--shape {shape!r}: {name} is 0; expected at least 1")
    return sizes


def _heads(op: str, sizes: dict[str, int], heads: dict[str, int | None]) -> dict[str, int]:
    """Returns the numbers of query heads and of value heads that are given, by the names Hq and Hv."""
    passed = {name: number for name, number in heads.items() if number is not None}
    for name, number in passed.items():
        option = _HEADS[name]
        if name not in ABSTRACT_OPS[op].sizes:
            grouped = "queries" if name == "Hq" else "values"
            lacks = "which has no heads" if "H" not in sizes else f"whose {grouped} have the heads of its keys"
            raise ValueError(f"{option} does not go with {op}, {lacks}")
        if number < 1 or number % sizes["H"] != 0:
            raise ValueError(f"{option} is {number}; expected a multiple of H = {sizes['H']}")
    if len(passed) == len(heads) and min(passed.values()) > sizes["H"]:
        raise ValueError(f"{' and '.join(_HEADS.values())} are both above H = {sizes['H']}; expected one of them")
    return passed


def _gate(op: str, gate: str | None) -> dict[str, Any]:
    """Returns the fields of the call that the form of its gates decides."""
    if gate is None:
        return {}
    taken = ABSTRACT_OPS[op].has(Role.GATE)
    if taken is None:
        raise ValueError(f"--gate does not go with {op}, which has no gates")
    check_known("form of gates", gate, GATE_FORMS)
    forms = [*(["none"] if taken.default is None else []), *(taken.forms or {})]
    if gate not in forms:
        raise ValueError(f"--gate {gate} does not go with {op}; expected {any_of(forms)}")
    return {"gate_dtype": None} if gate == "none" else {"gate_form": gate}


def _logits(op: str, gate: str | None, gate_normalizer: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the fields of the call that its logits decide; none if it has no logits."""
    if gate_normalizer is None:
        return {}
    if "gate_normalizer" not in ABSTRACT_OPS[op].scalars or gate == "none":
        raise ValueError(f"--gate-normalizer does not go with {op if gate != 'none' else '--gate none'}")
    if gate_normalizer < 1:
        raise ValueError(f"--gate-normalizer is {gate_normalizer}; expected at least 1")
    return {"gate_dtype": dtype}


def device_of(name: str) -> torch.device:
    """Returns the device that a command line names.

    On a machine without CUDA devices, it may name one. Raises ValueError for an unknown name or index.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch("cpu|cuda(:[0-9]{1,2})?", name) is None:
        raise ValueError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:1")
    if name == "cpu":
        return torch.device("cpu")
    index = int(name.removeprefix("cuda").removeprefix(":") or 0)
    if torch.cuda.is_available() and index >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name!r}; this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of this name, one of `DTYPES`."""
    check_known("dtype", name, DTYPES)
    return DTYPES[name]


def device_here(name: str) -> torch.device:
    """Returns the device that a command line names. Raises ValueError if this machine does not have it."""
    place = device_of(name)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no CUDA device here; leave out --device")
    return place
