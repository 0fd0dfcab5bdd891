"""softmax_attention: values with the log-sum-exp, queries without keys, merging, gradients, layouts, memory."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    attention,
    expected_attention,
    heads_first,
    poisoned,
    run_attention,
    three_runs,
)
from gla_core.conformance.cases import over
from gla_core.conformance.tolerances import FORWARD, GRADIENT
from gla_core.workloads.inputs import normal

ATTENTION = "softmax_attention"


@over(ATTENTION)
def test_values(backend, case, measure, layout):
    q, k, v, causal = attention(case)
    out = run_attention(q, k, v, causal, backend.name)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    measure(out, expected_attention(q, k, v, causal), FORWARD[case.dtype])
    like = {"o": ((*q.shape[:3], v.shape[-1]), case.dtype), "lse": (q.shape[:3], lse_dtype)}
    layout(out, like, case.device, {"q": q, "k": k, "v": v})


@over(ATTENTION, "small", "grouped", dtypes="one", requires="gradients")
def test_results_can_be_changed_in_place(backend, case):
    """In-place changes work with autograd, too."""
    q, k, v, causal = attention(case)
    for y in run_attention(q.requires_grad_(), k, v, causal, backend.name).values():
        y.mul_(2)


@over(ATTENTION, at_size=True)
def test_values_at_size(backend, case, measure):
    """The oracle computes one row of the batch and one query head at a time, so that the scores fit into memory."""
    q, k, v, causal = attention(case)
    groups = q.shape[2] // k.shape[2]
    out = run_attention(q, k, v, causal, backend.name)
    ref = {name: torch.empty(x.shape, dtype=torch.float64, device=x.device) for name, x in out.items()}
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            keys = (slice(b, b + 1), slice(None), slice(h // groups, h // groups + 1))
            one = (slice(b, b + 1), slice(None), slice(h, h + 1))
            for name, x in expected_attention(q[one], k[keys], v[keys], causal).items():
                ref[name][one] = x
    measure(out, ref, FORWARD[case.dtype])


@over(ATTENTION, "small", "odd", dtypes="in_turn")
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_scale(backend, case, scale, measure):
    q, k, v, causal = attention(case)
    out = run_attention(q, k, v, causal, backend.name, scale)
    measure(out, expected_attention(q, k, v, causal, scale), FORWARD[case.dtype])


@over(ATTENTION, "small", "grouped")
def test_a_query_without_keys(backend, case, measure):
    """With more queries than keys the first queries see no key: their o is NaN and their lse is -inf."""
    q, k, v, _ = attention(case)
    k, v = k[:, :-7], v[:, :-7]
    out = run_attention(q, k, v, True, backend.name)
    assert bool(out["o"][:, :7].isnan().all())
    assert bool(out["lse"][:, :7].isneginf().all())
    measure(out, expected_attention(q, k, v, True), FORWARD[case.dtype])


@over(ATTENTION, "small", "not_causal")
def test_large_scores(backend, case, measure):
    """Checks scores of several hundred, whose exponentials overflow unless the maximum is subtracted."""
    q, k, v, causal = attention(case)
    q = 100 * q
    measure(run_attention(q, k, v, causal, backend.name), expected_attention(q, k, v, causal), FORWARD[case.dtype])


@over(ATTENTION, "not_causal", "one_query", dtypes="in_turn")
@pytest.mark.parametrize("cut", [1, 40])
def test_merged_parts_equal_the_whole(backend, case, cut, measure):
    q, k, v, _ = attention(case)
    parts = [run_attention(q, *(y[:, s] for y in (k, v)), False, backend.name) for s in (slice(cut), slice(cut, None))]
    o, lse = gla.merge_attention(*parts[0].values(), *parts[1].values())
    measure({"o": o, "lse": lse}, expected_attention(q, k, v, False), 2 * FORWARD[case.dtype])


@over(ATTENTION, dtypes="in_turn")
def test_strided_views(backend, case, measure):
    q, k, v, causal = attention(case)
    out = run_attention(*map(heads_first, (q, k, v)), causal, backend.name)
    measure(out, expected_attention(q, k, v, causal), FORWARD[case.dtype])


@over(ATTENTION, requires="gradients")
def test_gradients(backend, case, measure):
    q, k, v, causal = attention(case)
    generator = torch.Generator(case.device).manual_seed(1)
    do = normal((*q.shape[:3], v.shape[-1]), q.dtype, generator)
    dlse = normal(q.shape[:3], torch.float64 if q.dtype == torch.float64 else torch.float32, generator)
    leaves = [y.clone().requires_grad_() for y in (q, k, v)]
    wide = [y.double().requires_grad_() for y in (q, k, v)]
    found = torch.autograd.grad(gla.softmax_attention(*leaves, None, causal, backend=backend.name), leaves, (do, dlse))
    ref = torch.autograd.grad(oracle.softmax_attention(*wide, None, causal), wide, (do.double(), dlse.double()))
    names = ("dq", "dk", "dv")
    measure(dict(zip(names, found, strict=True)), dict(zip(names, ref, strict=True)), GRADIENT[case.dtype])


@over(ATTENTION, dtypes="in_turn")
def test_no_uninitialised_output(backend, case, measure):
    q, k, v, causal = attention(case)
    with poisoned(backend.can(case.op), case.device):
        out = run_attention(q, k, v, causal, backend.name)
    measure(out, expected_attention(q, k, v, causal), FORWARD[case.dtype])


@over(ATTENTION, dtypes="in_turn", requires="deterministic")
def test_same_bits(backend, case, measure):
    q, k, v, causal = attention(case)
    first, *again = three_runs(lambda: run_attention(q, k, v, causal, backend.name), case.device)
    for out in again:
        measure(out, first, 0)


@over(ATTENTION, dtypes="in_turn")
def test_inputs_unchanged(backend, case, measure):
    x, before = attention(case)[:3], attention(case)[:3]
    run_attention(*x, attention(case)[3], backend.name)
    measure(dict(zip("qkv", x, strict=True)), dict(zip("qkv", before, strict=True)), 0)
