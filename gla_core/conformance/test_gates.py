"""Ops with gates: float32 gates, logits, gates of -inf, and the gradient of gates of any strength."""

from __future__ import annotations

import itertools

import pytest
import torch

from gla_core.conformance.calls import (
    as_logits,
    call_arguments,
    check,
    compare,
    expected,
    gradients,
    inputs,
    oracle_gradients,
    public_op,
    random_logits,
    run,
    training_request,
)
from gla_core.conformance.cases import GATED_BACKWARDS, PAIRS, SEQUENCES, having, over

WITH_LOGITS = having("gate_normalizer")
DIVIDED_BY_4 = tuple(op for op in WITH_LOGITS if op in having("pool") or op in having("norm_eps"))
"""The ops that are given a normalizer in `test_gates_from_logits`; the others use the default, 16."""
EXTREME_LOGITS = (0.0, 1e-3, 10.0, 100.0, torch.inf, -1e-3, -10.0, -120.0, -500.0, -torch.inf)
NORMALIZERS = pytest.mark.parametrize("normalizer", [1, 16, 200])
"""Divided by 1, the log gates of extreme logits leave nothing of a state; divided by 200, they do."""


def one_of(values, like):
    """Returns a tensor like another one, whose elements are random elements of `values`."""
    generator = torch.Generator(like.device).manual_seed(0)
    at = torch.randint(len(values), like.shape, generator=generator, device=like.device)
    return torch.tensor(values, dtype=like.dtype, device=like.device)[at]


@over(SEQUENCES, "short", "packed", "extreme", functions=True)
def test_float32_gates(backend, case, measure):
    check(case.call, call_arguments(case, gate_dtype=torch.float32), backend.name, measure)


@over(GATED_BACKWARDS, "short", "packed", "extreme", "per_head", "constant")
def test_gradients_of_float32_gates(backend, case, measure):
    x = inputs(case, gate_dtype=torch.float32)
    out = gradients(case.op, x, training_request(backend, case.op))
    assert out["dg"].dtype == torch.float32
    compare(case.op, x, out, oracle_gradients(case.op, x), measure)


# ---- logits


@over(WITH_LOGITS, gated=True, dtypes="rotating")
def test_gates_from_logits(backend, case, measure):
    """Rings hold log gates, and not logits."""
    x = call_arguments(case)
    x = {**x, "g": random_logits(x["g"])}
    check(case.call, as_logits(case.op, x, 4 if case.op in DIVIDED_BY_4 else None), backend.name, measure)


@over(having("g", among=PAIRS), "last_chunk_partial", "per_head", dtypes="rotating")
@NORMALIZERS
def test_every_logit(backend, case, normalizer, measure):
    x = call_arguments(case)
    x["g"] = one_of(EXTREME_LOGITS, x["g"])
    check(case.call, as_logits(case.op, x, normalizer), backend.name, measure)


@over(GATED_BACKWARDS, gated=True, dtypes="rotating")
def test_gradients_of_logits(backend, case, measure):
    x = inputs(case)
    x = as_logits(public_op(case.op).name, {**x, "g": random_logits(x["g"])}, 16)
    compare(
        case.op, x, gradients(case.op, x, training_request(backend, case.op)), oracle_gradients(case.op, x), measure
    )


@over(GATED_BACKWARDS, "last_chunk_partial", "per_head", dtypes="rotating")
@NORMALIZERS
def test_gradients_of_every_logit(backend, case, normalizer, measure):
    x = inputs(case)
    x["g"] = one_of([y for y in EXTREME_LOGITS if y > -torch.inf], x["g"])  # autograd gives NaN at -inf
    x = as_logits(public_op(case.op).name, x, normalizer)
    compare(
        case.op, x, gradients(case.op, x, training_request(backend, case.op)), oracle_gradients(case.op, x), measure
    )


# ---- gates of -inf


@over(
    having("initial_state", "g"),
    "one_chunk",
    "last_chunk_partial",
    "odd_widths",
    "grouped",
    "per_head",
    dtypes="rotating",
)
@pytest.mark.parametrize("cut", [1, 41, 63])
def test_nothing_crosses_a_gate_of_minus_infinity(backend, case, cut, measure):
    """After alpha = 0 nothing depends on earlier tokens, not even the last bit."""
    x, y = call_arguments(case, initial_state=True), call_arguments(case, initial_state=True)
    x["g"][:, cut] = y["g"][:, cut] = -torch.inf
    y["k"][:, :cut].neg_()  # and no longer: a delta rule is stable for short keys alone
    for early in (y["v"][:, :cut], y["initial_state"]):
        early.mul_(900)
    outs = [run(case.op, z, backend.name) for z in (x, y)]
    assert not torch.equal(outs[0]["o"][:, :cut], outs[1]["o"][:, :cut]), "what came before the gate made no difference"
    late = [{"o": out["o"][:, cut:], "state": out["state"]} for out in outs]
    measure(late[1], late[0], 0)
    compare(case.op, x, outs[0], expected(case.op, x).results, measure)


@over(GATED_BACKWARDS, "one_chunk", "last_chunk_partial", "grouped", "per_head", dtypes="rotating")
@pytest.mark.parametrize("cut", [1, 41, 63])
def test_no_gradient_crosses_a_gate_of_minus_infinity(backend, case, cut, measure):
    x = call_arguments(case, initial_state=True)
    x["g"][:, cut] = -torch.inf
    x["do"][:, :cut] = 0
    out = run(case.op, {**x, "dstate": None}, backend.name)
    early = {"dk": out["dk"][:, :cut], "dv": out["dv"][:, :cut], "dinitial_state": out["dinitial_state"]}
    measure(early, {name: torch.zeros_like(d) for name, d in early.items()}, 0)


def first_tokens(x):
    """Returns the rows at which sequences begin."""
    if x["cu_seqlens"] is None:
        return [0]
    return [start for start, end in itertools.pairwise(x["cu_seqlens"].tolist()) if start < end]


@over(GATED_BACKWARDS, "short", "last_chunk_partial", "grouped", "packed", "padded", "per_head", dtypes="rotating")
def test_gradient_of_g_is_zero_where_nothing_passes(backend, case, measure):
    """The gradient of g is exactly 0 at a gate of -inf, and at the first token of a sequence that starts from zero."""
    x = call_arguments(case, gates="-inf", initial_state=False)
    closed = x["g"].isneginf()
    closed[:, first_tokens(x)] = True
    out = check(case.op, x, backend.name, measure)
    dg = out["dg"][closed]
    measure({"dg where nothing passes": dg}, {"dg where nothing passes": torch.zeros_like(dg)}, 0)


# ---- the gradient of gates of any strength

GATES = {
    "open": (0.0,),
    "strong": (-8.0,),
    "closed": (-torch.inf,),
    "any": (0.0, -1e-4, -0.1, -1.0, -30.0, -1e4, -torch.inf),
}


@over(GATED_BACKWARDS, "short", "last_chunk_partial", "grouped", "packed", "per_head", "constant", dtypes="rotating")
@pytest.mark.parametrize("gates", GATES)
def test_gradients_of_every_gate(backend, case, gates, measure):
    """Checks gates of one strength everywhere, and gates of mixed strengths.

    If all gates are strong, dg is small beside q * dq and k * dk, which consist mostly of a token's own key and value.
    """
    x = call_arguments(case)
    x["g"] = one_of(GATES[gates], x["g"])
    check(case.op, x, backend.name, measure)


@over(GATED_BACKWARDS, "last_chunk_partial", "per_head")
def test_gradient_of_strong_gates_before_open_ones(backend, case, measure):
    """The large q * dq and k * dk of the later tokens must leave no error in the small dg of the first tokens."""
    x = call_arguments(case, T=300)
    x["g"][:, :192], x["g"][:, 192:] = -8, 0
    x["do"] *= 2**10 if case.dtype == torch.float16 else 1  # which has no numbers as small as some of this dg
    out, ref = run(case.op, x, backend.name), expected(case.op, x).results
    first = ({"dg of the first tokens": y["dg"][:, :128]} for y in (out, ref))
    compare(case.op, x, *first, measure)
