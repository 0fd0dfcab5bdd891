"""Gates of every form, and groups of queries and of values, against the float64 oracle and against expanded gates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import gla_core as gla
from gla_core import ops
from gla_core.conformance import oracle
from gla_core.conformance.calls import oracle_results, output_shape
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.workloads.inputs import gla_inputs, token_of

WIDE = torch.float64
FORMS = ("none", "constant", "head", "key")
LEAVES = ("q", "k", "v", "g", "initial_state")
GROUPS = ((2, 1, 1), (2, 2, 1), (1, 3, 1), (2, 1, 3), (1, 1, 4))
"""Numbers of key heads, and of the query and value heads of each of them."""


def inputs_of(form, groups=(2, 1, 1), gates="strong", **changes):
    """Returns float64 arguments of chunk_gla with gates of a form, and an initial state."""
    H, G, R = groups
    gate = {"gates": "none"} if form == "none" else {"gates": gates, "gate_form": form}
    sizes = {"H": H, "G": G, "R": R, "K": 5, "V": 3, "dtype": WIDE, "initial_state": True}
    return gla_inputs(**sizes | gate | changes)


def leaves_of(x):
    return {name: y.detach().clone().requires_grad_() for name in LEAVES if (y := getattr(x, name)) is not None}


def results(function, x, **more):
    """Returns o, the final state, and the gradients of a loss that depends on both."""
    leaves = leaves_of(x)
    o, state = function(**{"g": None, **leaves}, cu_seqlens=x.cu_seqlens, **more)
    generator = torch.Generator().manual_seed(1)
    loss = sum((y * torch.randn(y.shape, generator=generator, dtype=WIDE)).sum() for y in (o, state))
    loss = loss + 0 * sum(y.sum() for y in leaves.values())  # without tokens the oracle uses no input
    actual = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "state": state} | {f"d{name}": d for name, d in zip(leaves, actual, strict=True)}


def check(x):
    actual = results(gla.chunk_gla, x, output_final_state=True, backend="reference")
    expected = results(oracle.chunk_gla, x)
    assert actual["o"].shape == output_shape(x.q, x.v)
    for name, ref in expected.items():
        assert actual[name].shape == ref.shape, name
        assert actual[name].isfinite().all(), name
        assert relative_error(actual[name], ref) <= (FORWARD if name in ("o", "state") else GRADIENT)[WIDE], name


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, groups):
    check(inputs_of(form, groups, T=100))


@pytest.mark.parametrize("groups", [(2, 2, 1), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_some_of_them_empty(form, groups):
    check(inputs_of(form, groups, lengths=(0, 20, 0, 65, 1, 0), padding=7))


@pytest.mark.parametrize("gates", ["mild", "extreme", "-inf"])
@pytest.mark.parametrize("form", FORMS[1:])
def test_gates_of_every_strength(form, gates):
    check(inputs_of(form, (1, 1, 2), gates, T=130))


@pytest.mark.parametrize("form", ["constant", "head"])
def test_a_closed_gate(form):
    x = inputs_of(form, (2, 1, 2), T=70)
    x.g[..., 1] = -torch.inf
    check(x)


groups_of_heads = st.tuples(st.integers(1, 3), st.integers(1, 3), st.just(1)) | st.tuples(
    st.integers(1, 3), st.just(1), st.integers(1, 3)
)


@settings(max_examples=60)
@given(
    form=st.sampled_from(FORMS),
    groups=groups_of_heads,
    gates=st.sampled_from(("mild", "strong", "extreme", "-inf")),
    sizes=st.fixed_dictionaries({"B": st.integers(0, 3), "T": st.integers(0, 140)})
    | st.fixed_dictionaries(
        {"lengths": st.lists(st.integers(0, 70), max_size=4).map(tuple), "padding": st.integers(0, 3)}
    ),
    widths=st.fixed_dictionaries({"K": st.integers(1, 20), "V": st.integers(1, 20)}),
    initial_state=st.booleans(),
    seed=st.integers(0, 99),
)
def test_odd_shapes(form, groups, gates, sizes, widths, initial_state, seed):
    check(inputs_of(form, groups, gates, **sizes, **widths, initial_state=initial_state, seed=seed))


# ---- a form is a short way to write an expanded gate


def expanded(g, B, T, K):
    """Returns the same gates in the form per key [B, T, Hv, K]."""
    g = g.expand(B, T, -1) if g.ndim == 1 else g
    return g[..., None].expand(-1, -1, -1, K)


@pytest.mark.parametrize("form", ["constant", "head"])
def test_a_form_equals_its_expansion(form):
    x = inputs_of(form, (2, 1, 2), T=90)
    B, T, _, K = x.k.shape
    by_form, by_key = leaves_of(x), leaves_of(x)
    outs = [
        gla.chunk_gla(**{**leaves, "g": g}, output_final_state=True)
        for leaves, g in ((by_form, by_form["g"]), (by_key, expanded(by_key["g"], B, T, K)))
    ]
    grads = [
        torch.autograd.grad((o.sin().sum(), state.sin().sum()), list(leaves.values()))
        for (o, state), leaves in zip(outs, (by_form, by_key), strict=True)
    ]
    torch.testing.assert_close((*outs[0], *grads[0]), (*outs[1], *grads[1]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_has_the_shape_and_dtype_of_g(form, dtype):
    x = inputs_of(form, (1, 1, 2), T=70, dtype=torch.bfloat16, gate_dtype=dtype)
    g = x.g.requires_grad_()
    (dg,) = torch.autograd.grad(gla.chunk_gla(x.q, x.k, x.v, g).o.float().sum(), g)
    assert (dg.shape, dg.dtype) == (g.shape, dtype)


@pytest.mark.parametrize("groups", [(2, 1, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS[1:])
def test_gradcheck(form, groups):
    x = inputs_of(form, groups, "mild", B=1, T=3, K=3, V=2)
    call = lambda *leaves: tuple(gla.chunk_gla(*leaves[:4], None, leaves[4], True, backend="reference"))  # noqa: E731
    assert torch.autograd.gradcheck(call, tuple(leaves_of(x).values()))


def in_segments(loss, g):
    with gla.batch_invariant(64):
        return torch.autograd.grad(loss(g), g)[0]


def over_samples(loss, g):
    return torch.func.vmap(torch.func.grad(loss))(g[None])[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", [in_segments, over_samples])
def test_the_gradient_of_a_constant_gate_is_rounded_once(way, dtype):
    """Its parts are beyond the range of float16, and almost cancel."""
    torch.manual_seed(0)
    q, k, v, do = ((8 * torch.randn(1, 128, 1, 8)).to(dtype) for _ in range(4))
    g = torch.tensor([-0.01], dtype=dtype)
    first = torch.arange(128)[:, None, None] < 64

    def gradient(do, dtype, way=lambda loss, g: torch.autograd.grad(loss(g), g)[0]):
        def loss(g):
            return (do.to(dtype) * gla.chunk_gla(*(x.to(dtype) for x in (q, k, v)), g, scale=1.0).o).sum()

        return way(loss, g.to(dtype).requires_grad_())

    halves = [gradient(torch.where(first == half, do, 0), WIDE) for half in (True, False)]
    do = torch.where(first, do * (-0.99 * halves[1] / halves[0]).to(dtype), do)
    assert min(abs(half) for half in halves) > 2 * torch.finfo(torch.float16).max
    expected = gradient(do, WIDE)
    assert abs(expected) < abs(halves[1]) / 9
    torch.testing.assert_close(gradient(do, dtype, way), expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("form", FORMS[1:])
def test_the_gradient_of_a_summary_is_rounded_once(form):
    """It is the sum of those of the decay and of the state."""
    x = inputs_of(form, T=40, gates="mild", dtype=torch.bfloat16)
    ddecay, dstate = torch.randn(2, 2, 5), torch.randn(2, 2, 5, 3)

    def gradient(dtype):
        g = x.g.to(dtype).requires_grad_()
        decay, state = gla.chunk_gla_summary(x.k.to(dtype), x.v.to(dtype), g)
        return torch.autograd.grad((ddecay * decay).sum() + (dstate * state).sum(), g)[0]

    actual, expected = gradient(torch.bfloat16), gradient(WIDE)
    torch.testing.assert_close(actual, expected.to(torch.bfloat16), rtol=2**-8, atol=1e-6)


def test_the_form_of_a_call_is_told():
    for form in FORMS:
        x = inputs_of(form, (1, 1, 2), T=9)
        call = gla.explain("chunk_gla", x.q, x.k, x.v, x.g).call
        assert (call.gate_form, call.dims["Hv"]) == (None if form == "none" else form, 2)


# ---- checkpoints, steps and summaries


@pytest.mark.parametrize("groups", [(2, 2, 1), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, (0, 70, 130, 0)], ids=str)
def test_checkpoints_are_states_of_value_heads(form, groups, lengths):
    x = inputs_of(form, groups, T=150, lengths=lengths)
    arguments = (x.q, x.k, x.v, x.g, None, x.initial_state, False, x.cu_seqlens)
    actual = gla.chunk_gla(*arguments, backend="reference", checkpoint_every=64).checkpoints
    *_, expected = oracle.chunk_gla_with_checkpoints(x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens, 64)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= FORWARD[WIDE]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_step(form, groups, inplace):
    x = inputs_of(form, groups, B=3, T=1)
    token = {name: token_of(getattr(x, name), 0) for name in "qkvg"}
    pool = torch.randn(5, *x.initial_state.shape[1:], dtype=WIDE)
    slots = torch.tensor([4, -1, 0])
    expected = oracle_results("recurrent_gla_step", {**token, "state": pool.clone(), "slots": slots})
    o, state = gla.recurrent_gla_step(**token, state=pool, slots=slots, inplace=inplace, backend="reference")
    assert (state is pool) == inplace
    assert relative_error(o, expected["o"]) <= FORWARD[WIDE]
    assert relative_error(state, expected["state"]) <= FORWARD[WIDE]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_summaries_of_both_directions(form, groups, packed):
    x = inputs_of(form, groups, T=100, lengths=(0, 30, 65, 0) if packed else None, padding=5)
    do = torch.randn(output_shape(x.q, x.v), dtype=WIDE)
    states_per_query = groups[1] > 1 and x.g is None  # without g, each query head has a state of its own
    actual = [gla.chunk_gla_gradient_summary(x.q, do, x.g, x.cu_seqlens, backend="reference")]
    expected = [oracle.chunk_gla_summary(x.q, do, x.g, x.cu_seqlens, True)]
    actual.append(gla.chunk_gla_summary(x.k, x.v, x.g, x.cu_seqlens, backend="reference"))
    expected.append(oracle.chunk_gla_summary(x.k, x.v, x.g, x.cu_seqlens))
    assert actual[0][1].shape[1] == (do.shape[2] if states_per_query else x.v.shape[2])
    for (decay, state), (ref_decay, ref_state) in zip(actual, expected, strict=True):
        assert decay.shape == ref_decay.shape
        assert relative_error(decay, ref_decay) <= FORWARD[WIDE]
        assert relative_error(state, ref_state) <= FORWARD[WIDE]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, (0, 30, 65, 0)], ids=str)
def test_gradients_of_a_summary(form, lengths):
    x = inputs_of(form, (2, 1, 2), T=100, lengths=lengths)
    leaves = {name: y for name, y in leaves_of(x).items() if name in ("k", "v", "g")}
    g = leaves.get("g")
    actual = gla.chunk_gla_summary(leaves["k"], leaves["v"], g, x.cu_seqlens, backend="reference")
    expected = oracle.chunk_gla_summary(leaves["k"], leaves["v"], g, x.cu_seqlens)
    at = slice(1 if g is None else 0, None)  # without gates the decay depends on no input
    seeds = [torch.randn(y.shape, dtype=WIDE) for y in actual]
    grads = [torch.autograd.grad(out[at], list(leaves.values()), seeds[at]) for out in (actual, expected)]
    for name, d, ref in zip(leaves, *grads, strict=True):
        assert d.shape == ref.shape, name
        assert relative_error(d, ref) <= GRADIENT[WIDE], name


@pytest.mark.parametrize("form", FORMS[1:])
def test_float32_gates_of_half_precision_keep_their_dtype_under_autocast(form):
    x = inputs_of(form, (1, 1, 2), T=70, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o, state = gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, True)
        call = gla.explain("chunk_gla", x.q, x.k, x.v, x.g).call
    assert (o.dtype, state.dtype, call.gate_dtype) == (torch.bfloat16, torch.float32, torch.float32)


# ---- what a call costs


@pytest.mark.parametrize(("form", "gates"), [("none", 0), ("constant", 6), ("head", 60), ("key", 480)])
def test_the_bytes_and_operations_of_a_form(form, gates):
    x = inputs_of(form, (2, 1, 3), B=1, T=10, K=8, V=4, initial_state=False)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "g": x.g}
    with FlopCounterMode(display=False) as counter:
        o, _ = gla.chunk_gla(**tensors)
    assert counter.get_total_flops() == 2 * 10 * (6 + 6) * 8 * 4
    call = gla.explain("chunk_gla", **tensors).call
    inputs, outputs = ops.ABSTRACT_OPS["chunk_gla_fwd"].floor_bytes(call)
    assert inputs == 8 * (x.q.numel() + x.k.numel() + x.v.numel() + gates)
    assert outputs == 8 * o.numel()
