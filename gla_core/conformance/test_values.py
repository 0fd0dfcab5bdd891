"""Every op: values, shapes, dtypes and layouts of results, at small and large sizes, with any scale and state dtype."""

from __future__ import annotations

import pytest
import torch

from gla_core.conformance import calls
from gla_core.conformance.calls import Arguments, Named
from gla_core.conformance.cases import DRAFTS, FORWARDS, PROMPTS, REPLAYS, STEPS, WITH_STATES, WRITING, having, over
from gla_core.ops import RUNS


@over(FORWARDS, functions=True)
def test_values(backend, case, measure, layout):
    x = calls.call_arguments(case)
    ref = calls.expected(case.call, x)
    out = calls.check(case.call, x, backend.name, measure, ref)
    new = [name for name in out if name not in calls.written_tensors(case.call, x)]
    like = {name: (ref.results[name].shape, calls.result_dtype(name, x)) for name in new}
    layout(out, like, case.device, calls.tensors(x))


@over(FORWARDS, functions=True, at_size=True)
def test_values_at_size(backend, case, measure):
    """The reference in float64 gives the expected values of ops on many tokens; for other ops the oracle does."""
    x = calls.call_arguments(case)
    ref = results_at_size(case.call, x)
    calls.compare(case.call, x, calls.run(case.call, x, backend.name), ref, measure)


def results_at_size(name: str, x: Arguments) -> Named:
    if name == "softmax_attention":
        return attention_by_heads(x)
    return calls.reference_results(name, x) if "T" in RUNS[name][0].sizes else calls.oracle_results(name, x)


def attention_by_heads(x: Arguments) -> Named:
    """Returns the oracle's results, one row of the batch and one query head at a time: all scores take much memory."""
    groups = x["q"].shape[2] // x["k"].shape[2]
    rows = []
    for b in range(len(x["q"])):
        row = calls.alone("softmax_attention", x, b)
        heads = []
        for h in range(x["q"].shape[2]):
            at = {"q": h, "k": h // groups, "v": h // groups}
            heads.append(
                calls.oracle_results("softmax_attention", {**row, **{n: row[n][:, :, [i]] for n, i in at.items()}})
            )
        rows.append({n: torch.cat([head[n] for head in heads], 2) for n in heads[0]})
    return {n: torch.cat([row[n] for row in rows]) for n in rows[0]}


@over(
    tuple(op for op in having("scale") if op not in having("norm_eps")),  # a norm removes the scale
    few={
        WITH_STATES: "short strong packed",
        PROMPTS: "small odd_widths checkpoints",
        STEPS: "small odd_widths pool",
        DRAFTS: "small odd_widths",
        REPLAYS: "small odd_widths",
        "softmax_attention": "small odd",
    },
    dtypes="rotating",
)
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_scale(backend, case, scale, measure):
    calls.check(case.call, {**calls.call_arguments(case), "scale": scale}, backend.name, measure)


@over(having("state"), few={"recurrent_gla_layer_step": "small pool"}, dtypes="no_float64")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_state_dtypes(backend, case, state_dtype, measure):
    """The state is rounded where it is written, and not before the output."""
    for options in ({}, {"inplace": True}) if case.op in WRITING else ({},):
        x = calls.call_arguments(case)
        x["state"] = x["state"].to(state_dtype)
        calls.check(case.call, x, backend.name, measure, **options)
