"""chunk_delta: any call and its gradients, what layers project, exact zeros, summaries, and drafts of a server."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance.calls import oracle_gradients, oracle_results
from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import delta_inputs

DELTA = "chunk_delta_fwd"
NAMES = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")


def arguments(**sizes):
    """Returns the arguments of `chunk_delta` in float64, by name."""
    x = delta_inputs(**{"B": 1, "T": 20, "H": 1, "K": 5, "V": 3, "dtype": torch.float64, **sizes})
    return {name: getattr(x, name) for name in NAMES}


@st.composite
def calls(draw):
    lengths = draw(st.none() | st.lists(st.sampled_from([0, 1, 5, 63, 64, 65]), min_size=1, max_size=4).map(tuple))
    sizes = {"leading": draw(st.integers(0, 2)), "padding": draw(st.integers(0, 2))} if lengths else {}
    x = arguments(
        **sizes,
        lengths=lengths,
        B=draw(st.integers(1, 2)),
        T=draw(st.sampled_from([0, 1, 2, 17, 64, 65, 130])),
        H=draw(st.integers(1, 2)),
        R=draw(st.integers(1, 3)),
        K=draw(st.integers(1, 6)),
        V=draw(st.integers(1, 6)),
        gates=draw(st.sampled_from(["none", "mild", "strong", "extreme", "-inf"])),
        gate_form=draw(st.sampled_from(["key", "head", "constant"])),
        initial_state=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    x["beta"] *= draw(st.sampled_from([0.0, 1.0, 2.0]))
    return x


@settings(max_examples=25)
@given(calls())
def test_any_call(x):
    o, state = gla.chunk_delta(**x, output_final_state=True)
    ref = oracle_results(DELTA, x)
    assert relative_error(o, ref["o"]) <= 1e-12
    assert relative_error(state, ref["state"]) <= 1e-12


@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 70, "R": 2, "initial_state": True},
        {"T": 130, "gate_form": "head", "gates": "-inf", "initial_state": True},
        pytest.param({"T": 9, "H": 2, "gate_form": "constant"}, marks=pytest.mark.thorough),
        pytest.param({"T": 65, "gates": "none", "B": 2}, marks=pytest.mark.thorough),
        {"lengths": (0, 65, 3), "leading": 2, "padding": 1, "R": 3, "gates": "extreme"},
    ],
    ids=str,
)
def test_gradients_in_float64(sizes):
    x = arguments(**sizes) | {"output_final_state": True}
    x["beta"] = 2 * x["beta"]
    x["beta"][:, ::4] = 0
    leaves = {n: y.requires_grad_() for n, y in x.items() if isinstance(y, torch.Tensor) and y.is_floating_point()}
    o, state = gla.chunk_delta(**x)
    do, dstate = (torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)) for y in (o, state))
    ds = torch.autograd.grad((o, state), list(leaves.values()), (do, dstate))
    ref = oracle_gradients(DELTA, x, {"o": do, "state": dstate})
    errors = {n: relative_error(d, ref[f"d{n}"]) for n, d in zip(leaves, ds, strict=True)}
    assert max(errors.values()) <= 1e-12, errors


def test_a_closed_gate_and_a_beta_of_0_have_exact_gradients():
    x = arguments(T=70, initial_state=True)
    x["g"][:, 40] = -torch.inf
    x["beta"][:, :50] = 0
    leaves = {n: x[n].requires_grad_() for n in ("g", "beta", "initial_state", "v")}
    o, _ = gla.chunk_delta(**x)
    dg, dbeta, dinitial, dv = torch.autograd.grad(o[:, 41:].square().sum(), list(leaves.values()))
    assert not dg[:, :41].any()
    assert not dinitial.any()
    assert not dbeta[:, :40].any()
    assert not dv[:, :50].any()  # nothing is learnt
    assert dbeta[:, 41:50].all()  # but beta would matter


# ---- what layers project


def projected(seed=0, **sizes):
    """Returns projections in float64, and the parameters of gates."""
    x = arguments(R=2, seed=seed, **sizes)
    numbers = torch.Generator().manual_seed(seed)
    x["g"], x["beta"] = (torch.randn(x[n].shape, dtype=torch.float64, generator=numbers) for n in ("g", "beta"))
    x["q"], x["k"] = 3 * x["q"], 3 * x["k"]
    biases = x["g"].shape[2:] if x["g"].ndim > 1 else x["g"].shape
    A_log, dt_bias = (
        torch.randn(s, dtype=torch.float64, generator=numbers) for s in (x["g"].shape[2:3] or (2,), biases)
    )
    return x, A_log, dt_bias


@pytest.mark.parametrize("form", ["key", "head", "constant"])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_gradients_reach_what_layers_project(gate, form):
    x, A_log, dt_bias = projected(T=9, gate_form=form)
    names, fixed = ("q", "k", "v", "g", "beta"), ((-5.0,) if gate == "bounded" else ())

    def function(A_log, dt_bias, *tokens):
        tokens = dict(zip(names, tokens, strict=True))
        return gla.chunk_delta(**tokens, normalize=1e-6, gate=(gate, A_log, dt_bias, *fixed), beta_limit=2.0).o

    leaves = [y.requires_grad_() for y in (A_log, dt_bias, *(x[n] for n in names))]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_parameters_of_gates_may_be_left_out():
    x, *_ = projected()
    zeros = torch.zeros(2, dtype=torch.float64)
    for gate, *bound in (("softplus",), ("bounded", -3)):
        o = gla.chunk_delta(**x, gate=(gate, None, None, *bound)).o
        assert torch.equal(o, gla.chunk_delta(**x, gate=(gate, zeros, zeros, *bound)).o)


def test_rows_of_no_sequence_change_no_gradient():
    x, A_log, dt_bias = projected(lengths=(9, 3), leading=2, padding=1)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, [0, 1, -1]] = torch.nan
    leaves = [y.requires_grad_() for y in (A_log, dt_bias, x["q"], x["k"], x["g"], x["beta"])]
    o, _ = gla.chunk_delta(**x, normalize=1e-6, gate=("softplus", A_log, dt_bias), beta_limit=1.0)
    ds = torch.autograd.grad(o.square().sum(), leaves)
    assert all(d.isfinite().all() for d in ds)
    assert not any(d[:, [0, 1, -1]].any() for d in ds[2:])


def test_a_logit_of_infinity_closes_a_gate_and_has_gradients():
    x, A_log, dt_bias = projected()
    x["g"][:, 7] = torch.inf
    A_log.requires_grad_()
    o, _ = gla.chunk_delta(**x, gate=("softplus", A_log, dt_bias), normalize=1e-6, beta_limit=1.0)
    later = {n: y if y is None or n in ("initial_state", "cu_seqlens") else y[:, 7:] for n, y in x.items()}
    alone = gla.chunk_delta(**later, gate=("softplus", A_log, dt_bias), normalize=1e-6, beta_limit=1.0).o
    assert relative_error(o[:, 7:], alone) <= 1e-12
    assert torch.autograd.grad(o.sum(), A_log)[0].isfinite().all()


def test_a_logit_of_minus_infinity_opens_a_bounded_gate_and_has_gradients():
    x, A_log, dt_bias = projected()
    x["g"][:, 7] = -torch.inf
    leaves = [y.requires_grad_() for y in (A_log, dt_bias, x["g"])]
    o, _ = gla.chunk_delta(**x, gate=("bounded", A_log, dt_bias, -3.0), normalize=1e-6, beta_limit=1.0)
    assert all(d.isfinite().all() for d in torch.autograd.grad(o.sum(), leaves))


def test_autocast_casts_unit_vectors_and_not_projections():
    x, A_log, dt_bias = projected()
    x = {n: y if y is None else y.float() for n, y in x.items()}
    options = {"normalize": 1e-6, "gate": ("softplus", A_log, dt_bias), "beta_limit": 1.0}
    with torch.autocast("cpu", torch.bfloat16):
        o = gla.chunk_delta(**x, **options).o
    unit = {n: F.normalize(x[n], dim=-1, eps=1e-3).bfloat16() for n in ("q", "k")}
    plain = gla.chunk_delta(**{**x, **unit, "v": x["v"].bfloat16()}, **{**options, "normalize": None}).o
    assert o.dtype == torch.bfloat16
    assert relative_error(o, plain) <= 4e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": 0}, "normalize is 0; expected the eps of an l2 norm, a number above 0, or None"),
        ({"beta_limit": True}, "beta_limit is True; expected the largest beta, a number above 0, or None"),
        ({"gate": "softplus"}, "gate is 'softplus'; expected 'logsigmoid', or None if g holds log gates"),
        ({"gate": ("softplus", None)}, r"gate is \('softplus', '..'\); expected None, 'logsigmoid', "),
        ({"gate": 3}, "gate is 3; expected None, 'logsigmoid', "),
        ({"gate": ("bounded", None, None, 5)}, "the bound of the gates is 5; expected a number below 0"),
        ({"gate": ("softplus", None, None), "g": None}, "gate is 'softplus' and g is None; expected the logits"),
        ({"gate": ("softplus", torch.zeros(3), None)}, r"A_log has shape \[3\]; expected \[Hv\] with Hv=2"),
        (
            {"gate": ("softplus", None, torch.zeros(2, 4))},
            r"dt_bias has shape \[2, 4\]; expected \[Hv, K\] with Hv=2, K=5",
        ),
        ({"normalize": 1e-6, "beta": torch.zeros(1, 20, 3)}, r"beta has shape \[1, 20, 3\]; expected \[B, T, Hv\]"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, message):
    x = arguments(R=2)
    with pytest.raises(ValueError, match=message):
        gla.chunk_delta(**{**x, **options})


def test_a_sequence_has_the_same_bits_in_any_company():
    """Also what is computed of projections, such as the sums of an l2 norm."""
    x, A_log, dt_bias = projected(lengths=(150, 70), K=12)
    x = {n: y.float() if y is not None and y.is_floating_point() else y for n, y in x.items()}
    options = {"normalize": 1e-6, "gate": ("softplus", A_log, dt_bias), "beta_limit": 1.0}
    alone = {n: None if n == "cu_seqlens" or y is None else y[:, 150:] for n, y in x.items()}
    with gla.batch_invariant(64):
        both, one = (gla.chunk_delta(**y, **options).o for y in (x, alone))
    assert torch.equal(both[:, 150:], one)


# ---- summaries, and drafts of a server


@pytest.mark.parametrize("packed", [False, True])
def test_the_gradients_of_a_summary(packed):
    x = arguments(T=70, R=2, lengths=(66, 0, 3) if packed else None)
    x = {n: x[n] for n in ("k", "v", "g", "beta", "cu_seqlens")}
    leaves = {n: y.requires_grad_() for n, y in x.items() if y is not None and y.is_floating_point()}
    out, ref = gla.chunk_delta_summary(**x), oracle_results("chunk_delta_summary", x)
    seeds = [torch.randn_like(y) for y in out]
    ds = torch.autograd.grad(out, list(leaves.values()), seeds)
    refs = torch.autograd.grad([ref["transition"], ref["state"]], list(leaves.values()), seeds)
    assert max(relative_error(d, r) for d, r in zip(ds, refs, strict=True)) <= 1e-12


def test_a_server_with_drafts_equals_steps_over_the_accepted_tokens():
    (H, R, K, V), L, P = (1, 2, 4, 3), 6, 3
    pool = torch.randn(P, R, K, V, dtype=torch.float64)
    state, slot = pool[1:2].clone(), torch.tensor([1])
    shapes = ((H, K), (R, V), (R, K))
    rings = [torch.full((P, L, *shape), torch.nan, dtype=torch.float64) for shape in shapes]
    start, accepted = torch.tensor([0]), 0
    for seed, count in enumerate([3, 0, 2, 1, 3, 0]):
        x, A_log, dt_bias = projected(seed, T=3, K=K, V=V)
        options = {"normalize": 1e-6, "gate": ("softplus", A_log, dt_bias), "beta_limit": 2.0}
        tokens = [x[n] for n in NAMES[:5]]
        number = torch.tensor([accepted])
        o = gla.recurrent_delta_replay(*tokens, pool, *rings, slot, start, number, **options)
        start, accepted, states = (start + number) % L, count, [state]
        for t in range(3):
            step = gla.recurrent_delta_step(*(y[:, t] for y in tokens), states[-1], **options)
            assert relative_error(o[:, t], step.o) <= 1e-12
            states.append(step.state)
        state = states[count]
    tokens = [y[:, :0] for y in tokens]
    gla.recurrent_delta_replay(*tokens, pool, *rings, slot, start, torch.tensor([accepted]))
    assert relative_error(pool[slot], state) <= 1e-12


def test_states_with_values_first():
    x = arguments(T=130, initial_state=True)
    first = {**x, "initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
    outs = [gla.chunk_delta(**y, output_final_state=True, checkpoint_every=64) for y in (x, first)]
    for name, (a, b) in zip(("o", "state", "checkpoints"), zip(*outs, strict=True), strict=True):
        assert torch.equal(a, b if name == "o" else b.mT), name


def test_a_token_at_a_time_equals_a_prompt():
    x = arguments(T=5, R=2, initial_state=True)
    state, rows = x["initial_state"], []
    for t, inplace in zip(range(5), itertools.cycle([False, True])):
        o, state = gla.recurrent_delta_step(*(x[n][:, t] for n in NAMES[:5]), state.clone(), inplace=inplace)
        rows.append(o)
    whole = gla.chunk_delta(**x, output_final_state=True)
    assert relative_error(torch.stack(rows, 1), whole.o) <= 1e-12
    assert relative_error(state, whole.state) <= 1e-12
