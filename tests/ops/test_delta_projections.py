"""Steps of a delta rule with what a layer projects: the core computes the inputs of functions that do not."""

import inspect

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import gla_core as gla
from gla_core.conformance.calls import projected, run
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, Prepared
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import arguments
from gla_core.workloads.named import Workload

STEP, STEPS, REPLAY = "recurrent_delta_step", "recurrent_delta_steps", "recurrent_delta_replay"
TOKEN = {"B": 2, "H": 1, "R": 2, "K": 5, "V": 3, "pool": 6, "dtype": torch.bfloat16}
SIZES = {
    STEP: {**TOKEN, "rows": (4, 1)},
    STEPS: {**TOKEN, "T": 2, "slots": ((4, 1), (3, 2))},
    REPLAY: {**TOKEN, "T": 2, "L": 4, "slots": (4, 1), "ring_start": (3, 0), "num_accepted": (2, 1)},
}
OPTIONS = ABSTRACT_OPS[STEP].raw_inputs.options


def inputs(op, gate="softplus", **sizes):
    """Returns the arguments of a call with what a layer projects, by their public names."""
    return projected(torch.bfloat16, gate, arguments(Workload("", op, frozenset(), {**SIZES[op], **sizes})))[0]


def recorded(received, taken, prepared):
    """Returns the reference's step, which takes further arguments and records what it receives of calls and tokens."""
    reference = registry.get("reference").ops[STEP]
    names = (*inspect.signature(reference).parameters, *taken)

    def step(*args):
        x = dict(zip(names, args, strict=True))
        received.append({name: x[name] for name in ("q", "g", "beta", *taken)})
        plain = ABSTRACT_OPS[STEP].raw_inputs.plain({**dict.fromkeys(OPTIONS), **x})
        return reference(**{name: plain[name] for name in names if name not in OPTIONS})

    def prepare(call):
        received.append((call.gate_dtype, call.layouts["g"].dtype, call.given.intersection(OPTIONS)))
        return step

    step.__signature__ = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    )
    return Prepared(prepare, names) if prepared else step


@pytest.mark.parametrize("op", [STEP, STEPS, REPLAY])
@pytest.mark.parametrize("taken", [(), OPTIONS[:-1], OPTIONS], ids=["no option", "all but one", "all"])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_function_that_lacks_an_option_receives_computed_inputs(op, taken, prepared):
    received, x = [], inputs(op)
    is_raw = op == STEP and taken == OPTIONS
    with gla.register(
        Backend("mine", "1", {STEP: recorded(received, taken, prepared)}, registry.get("reference").capabilities)
    ):
        y = {n: z.clone() if isinstance(z, torch.Tensor) else z for n, z in x.items()}
        out, ref = run(op, y, "mine"), run(op, x, "reference")
    for name, expected in ref.items():
        assert torch.equal(out[name], expected), name
    if prepared:
        dtype = torch.bfloat16 if is_raw else torch.float32
        assert received.pop(0) == (
            dtype,
            dtype,
            {"normalize", "beta_limit", "gate_activation", "A_log", "dt_bias"} if is_raw else set(),
        )
    for each in received:
        assert (each["g"].dtype == torch.bfloat16) == (each["beta"].dtype == torch.bfloat16) == is_raw
        assert each["g"].is_contiguous()
        assert all(each[name] is None for name in taken) or is_raw


def test_a_tracer_sees_the_operations():
    x = inputs(STEP)
    graph = make_fx(lambda q: gla.recurrent_delta_step(**{**x, "q": q}).o)(x["q"])
    assert "gla.recurrent_delta_step" in graph.code
    assert "aten.rsqrt" in graph.code
    assert relative_error(graph(x["q"]), gla.recurrent_delta_step(**x).o) <= FORWARD[torch.bfloat16]


def test_a_parameter_that_requires_a_gradient_is_refused_as_ever():
    x = inputs(STEP)
    x["gate"][1].requires_grad_()
    with pytest.raises(RuntimeError, match="recurrent_delta_step has no backward and an input requires a gradient"):
        gla.recurrent_delta_step(**x)
    with torch.no_grad():
        gla.recurrent_delta_step(**x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_activation": "tanh"}, "gate_activation is 'tanh'; expected None, 'softplus' or 'bounded'"),
        ({"gate_activation": None}, "A_log or dt_bias is given and gate_activation is None"),
        ({"g": None}, "gate_activation is 'softplus' and g is None; expected the logits"),
        ({"gate_normalizer": 3}, "gate_activation is 'softplus' and gate_normalizer is given"),
        ({"bound": -1.0}, r"gate_activation is 'softplus' and bound is -1\.0; 'bounded' takes a bound"),
        ({"g": torch.zeros(2, 2)}, r"dt_bias has shape \[2, 5\]; expected \[Hv\]"),
        ({"A_log": torch.zeros(3)}, r"A_log has shape \[3\]; expected \[Hv\] with Hv=2"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_together(change, message):
    x = inputs(STEP)
    (name, A_log, dt_bias), names = x.pop("gate"), ABSTRACT_OPS[STEP].names
    x = {names[n]: y for n, y in x.items()} | {"gate_activation": name, "A_log": A_log, "dt_bias": dt_bias} | change
    with pytest.raises(ValueError, match=message):
        gla.explain(STEP, **x)


def test_errors_of_projections_name_the_argument():
    x = inputs(STEP)
    for change, message in (
        ({"normalize": 0}, "normalize is 0; expected the eps"),
        ({"gate": ("bounded", None, None, 1)}, "the bound of the gates is 1; expected a number below 0"),
        (
            {"gate": ("softplus", None, torch.zeros(2, 4))},
            r"dt_bias has shape \[2, 4\]; expected \[Hv, K\] with Hv=2, K=5",
        ),
        ({"beta": torch.zeros(2, 3)}, r"beta has shape \[2, 3\]; expected \[B, Hv\]"),
    ):
        with pytest.raises(ValueError, match=message):
            gla.recurrent_delta_step(**{**x, **change})


def test_a_row_has_the_same_bits_in_any_company():
    x = inputs(STEP, dtype=torch.float32)
    alone = {n: y[1:] if n in ("q", "k", "v", "g", "beta", "slots") else y for n, y in x.items()}
    with gla.batch_invariant(64):
        both, one = (gla.recurrent_delta_step(**y).o for y in (x, alone))
    assert torch.equal(both[1:], one)


@pytest.mark.parametrize("op", [STEP, STEPS, REPLAY])
def test_checks_of_values_know_logits(op, check_values):
    """A logit may be above 0, and NaN in a parameter of the gates is refused."""
    x = inputs(op)
    assert (x["g"] > 0).any()
    getattr(gla, op)(**x)
    x["gate"][1][0] = torch.nan
    with pytest.raises(ValueError, match="A_log holds NaN in 1 of 2 places"):
        getattr(gla, op)(**x)
