"""Finds the first wrong place of a result, and the factor by which it is wrong, for the diagnosis of a failed run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.conformance.cases import Case
from gla_core.conformance.tolerances import number
from gla_core.ops import ABSTRACT_OPS

CLEARLY = 10
"""An element counts as wrong if its error exceeds this number of budgets.

A budget is for the norm of a result. Rounding alone puts single elements above it.
"""
CONSTANT = 0.01
"""Largest spread of ratios that count as one constant ratio."""
WORDS = {"B": "batch row", "N": "sequence", "P": "state", "T": "token", "Tq": "query", "Tk": "key", "H": "head"}
WORDS |= {"Hq": "head", "Hv": "head", "Ho": "head", "K": "column of K", "V": "column of V", "n": "checkpoint"}


def divergence(quantity: str, out: Tensor, ref: Tensor, budget: float, case: Case | None) -> dict[str, Any]:
    """Describes a result that is over its budget, as JSON values.

    Returns:
        quantity: the name of the result. finite: whether it is finite wherever the expected result is.
        at, found, expected: the first wrong place and the numbers there.
        ratio: found / expected if it is constant and not 1, else None.
        hint: a question about the step of the op that would give this ratio, or None.
        everywhere: whether more than 90% of the numbers are wrong, not counting those expected to be 0 or not finite.
    """
    out, ref = out.detach().double(), ref.detach().double()
    wrong = _wrong(out, ref, budget)
    first = int(wrong.flatten().to(torch.uint8).argmax())
    index = tuple(first // math.prod(out.shape[i + 1 :]) % size for i, size in enumerate(out.shape))
    ratio = _ratio(out[wrong], ref[wrong])
    here = float(out.flatten()[first]), float(ref.flatten()[first])
    # with as many digits as show that they differ, at least three
    texts = (tuple(number(x, digits) for x in here) for digits in range(3, 18))
    numbers = next((pair for pair in texts if pair[0] != pair[1]), tuple(map(number, here)))
    counted = ref.isfinite() & (ref != 0)
    return {
        "quantity": quantity,
        "finite": bool((out.isfinite() | ~ref.isfinite()).all()),
        "at": _place(quantity, index, tuple(out.shape), case),
        "found": numbers[0],
        "expected": numbers[1],
        "ratio": ratio,
        "everywhere": bool(wrong[counted].float().mean() > 0.9) if counted.any() else True,
        "hint": _hint(ratio, case),
    }


def _wrong(out: Tensor, ref: Tensor, budget: float) -> Tensor:
    """Returns a mask of the elements that are clearly wrong, or of those with the largest error if none is."""
    same = (out == ref) | (out.isnan() & ref.isnan())
    difference = torch.where(same, 0, out - ref).abs().nan_to_num(math.inf, math.inf)
    finite = torch.where(ref.isfinite(), ref, 0)
    size = torch.maximum(finite.abs(), finite.square().mean().sqrt())
    wrong = difference > CLEARLY * budget * size
    return wrong if wrong.any() else difference == difference.max()


def _ratio(out: Tensor, ref: Tensor) -> float | None:
    """Returns the ratio of `out` to `ref` if it is the same for all of the larger numbers and not 1, else None."""
    large = ref.isfinite() & (ref.abs() > 0.1 * ref[ref.isfinite()].abs().mean())
    if large.sum() < 2 or not out[large].isfinite().all():
        return None
    ratios = out[large] / ref[large]
    middle = float(ratios.median())
    is_constant = float((ratios - middle).abs().max()) <= CONSTANT * max(abs(middle), CONSTANT)
    return middle if is_constant and abs(middle - 1) > CONSTANT else None


def _hint(ratio: float | None, case: Case | None) -> str | None:
    """Returns a question about the step of the op that would give this ratio, or None."""
    if ratio is None:
        return None
    dims = case.describe().dims if case is not None else {}
    known = {-1.0: "is a sign wrong?", math.log2(math.e): "is the base 2 or e?", math.log(2): "is the base 2 or e?"}
    if "K" in dims:
        known |= {dims["K"] ** 0.5: "is scale applied?", dims["K"] ** -0.5: "is scale applied twice?"}
    groups = max(dims.get("Hq", 0), dims.get("Hv", 0)) / max(dims.get("H", 1), 1)
    if groups > 1:
        known |= {groups: "are the heads of a group summed?", 1 / groups: "are the heads of a group summed?"}
    return next((hint for value, hint in known.items() if math.isclose(ratio, value, rel_tol=CONSTANT)), None)


def _place(quantity: str, index: tuple[int, ...], shape: tuple[int, ...], case: Case | None) -> str:
    """Returns an index in words, such as "sequence 3, token 0, head 1".

    Columns are left out unless the index has fewer than three numbers.
    """
    names = _dimensions(quantity, case)
    if case is None or len(names) != len(index):
        return f"index {list(index)}" if index else "the only number"
    place = dict(zip(names, index, strict=True))
    lengths = case.workload.sizes.get("lengths")
    if lengths is not None and "T" in place and shape[names.index("T")] >= sum(lengths):
        place.pop("B", None)
        offsets = list(itertools.accumulate(lengths, initial=case.workload.sizes.get("leading", 0)))
        place = _in_its_sequence(place.pop("T"), offsets) | {WORDS.get(n, n): i for n, i in place.items()}
    else:
        place = {WORDS.get(n, n): i for n, i in place.items()}
    shown = [f"{word} {i}" for word, i in place.items() if not word.startswith("column") or len(place) < 3]
    return ", ".join(shown)


def _in_its_sequence(row: int, offsets: list[int]) -> dict[str, int]:
    """Returns the sequence to which a row of packed sequences belongs, and the index of the token in it."""
    if row < offsets[0]:
        return {"row before the first sequence": row}
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start <= row < end:
            return {"sequence": i, "token": row - start}
    return {"row after the last sequence": row}


def _dimensions(quantity: str, case: Case | None) -> list[str]:
    """Returns the names of a quantity's dimensions from the op's description; empty for an unknown quantity."""
    spec = ABSTRACT_OPS[case.op] if case is not None else None
    if case is None or spec is None:
        return []
    form = case.describe().gate_form
    shapes: Mapping[str, str] = {a.name: (a.forms or {}).get(form or "", a.shape) or "" for a in spec.arguments}
    shapes = shapes | {f"d{name}": shape for name, shape in shapes.items()}
    shapes = shapes | {r.name: r.shape or shapes.get(r.like or "", "") for r in spec.results}
    return shapes.get(quantity, "").split()
