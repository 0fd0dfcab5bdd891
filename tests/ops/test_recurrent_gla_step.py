"""Values of recurrent_gla_step against the float64 oracle: batches, pools, skipped rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import oracle_results
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.registry import get
from gla_core.workloads.inputs import GATES, gla_inputs, token_of


def step_inputs(**shape):
    """Returns q, k, v, g of one token, and a state [B, H, K, V]."""
    x = gla_inputs(T=1, initial_state=True, **shape)
    return (*(None if y is None else y[:, 0] for y in (x.q, x.k, x.v, x.g)), x.initial_state)


def expected(q, k, v, g, state, scale=None):
    alpha = torch.ones_like(k).double() if g is None else g.double().exp()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return oracle.recurrent_gla_step(q.double(), k.double(), v.double(), alpha, state.double(), scale)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values(dtype, gates, inplace, device):
    q, k, v, g, state = step_inputs(B=3, H=2, G=2, K=24, V=40, dtype=dtype, gates=gates, device=device)
    ref_o, ref_state = expected(q, k, v, g, state)
    before = state.clone()
    o, new = gla.recurrent_gla_step(q, k, v, g, state, inplace=inplace)
    assert o.dtype == v.dtype
    assert relative_error(o, ref_o) <= FORWARD[dtype]
    assert relative_error(new, ref_state) <= FORWARD[state.dtype]
    assert new is state if inplace else torch.equal(state, before)


@settings(max_examples=60)
@given(
    B=st.integers(0, 4),
    H=st.integers(1, 3),
    G=st.integers(1, 3),
    K=st.integers(1, 70),
    V=st.integers(1, 70),
    gates=st.sampled_from(GATES),
    scale=st.sampled_from([None, 1.0, -0.5]),
    seed=st.integers(0, 2**31),
)
def test_any_shape(scale, **shape):
    q, k, v, g, state = step_inputs(**shape, dtype=torch.float64)
    o, new = gla.recurrent_gla_step(q, k, v, g, state, scale)
    ref_o, ref_state = expected(q, k, v, g, state, scale)
    assert relative_error(o, ref_o) <= 1e-12
    assert relative_error(new, ref_state) <= 1e-12


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_in_half_precision(dtype, state_dtype, device):
    q, k, v, g, state = step_inputs(B=4, K=64, V=64, dtype=dtype, device=device)
    ref_o, ref_state = expected(q, k, v, g, state.to(state_dtype))
    o, new = gla.recurrent_gla_step(q, k, v, g, state.to(state_dtype))
    assert new.dtype == state_dtype
    assert relative_error(o, ref_o) <= FORWARD[dtype]
    assert relative_error(new, ref_state) <= FORWARD[state_dtype]


def test_numbers_beyond_float16():
    """A number above 65504 is written as inf, and o is computed from the number itself."""
    q, k, v, g, state = step_inputs(B=2, K=4, V=3)
    k, v = k.sign() * 1e3, v.sign() * 1e3
    ref_o, ref_state = expected(q, k, v, g, state.half())
    o, new = gla.recurrent_gla_step(q, k, v, g, state.half())
    assert relative_error(o, ref_o) <= FORWARD[torch.float32]
    assert torch.equal(new, ref_state.half())
    assert new.isinf().all()


# ---- a bonus


def bonus_inputs(dtype=torch.float64, bonus_dtype=None, **shape):
    """Returns the arguments of a step with a bonus by name."""
    x = gla_inputs(T=1, initial_state=True, dtype=dtype, **shape)
    token = {name: token_of(getattr(x, name), 0) for name in "qkvg"}
    bonus = torch.randn(*x.k.shape[2:], dtype=torch.float64, device=x.q.device).to(bonus_dtype or dtype)
    return {**token, "state": x.initial_state, "bonus": bonus}


@settings(max_examples=60)
@given(
    B=st.integers(0, 4),
    H=st.integers(1, 3),
    groups=st.sampled_from([{"G": 1}, {"G": 3}, {"R": 3}]),
    K=st.integers(1, 70),
    V=st.integers(1, 70),
    gates=st.sampled_from(GATES),
    gate_form=st.sampled_from(["constant", "head", "key"]),
    scale=st.sampled_from([None, 1.0, -0.5]),
    backend=st.sampled_from(["reference", "parallel_scan"]),
    inplace=st.booleans(),
    state_v_first=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_bonus(groups, scale, backend, inplace, state_v_first, **shape):
    x = bonus_inputs(**shape, **groups)
    wanted = oracle_results("recurrent_gla_step", x, scale=scale)
    if state_v_first:
        x["state"] = x["state"].mT.contiguous()
    before = x["state"].clone()
    options = {"inplace": inplace, "state_v_first": state_v_first, "backend": backend}
    o, new = gla.recurrent_gla_step(**x, scale=scale, **options)
    assert relative_error(o, wanted["o"]) <= 1e-12
    assert relative_error(new.mT if state_v_first else new, wanted["state"]) <= 1e-12
    assert new is x["state"] if inplace else torch.equal(x["state"], before)


@pytest.mark.parametrize("bonus_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_of_a_bonus(dtype, bonus_dtype, device):
    x = bonus_inputs(dtype, bonus_dtype, B=3, H=2, G=2, K=24, V=40, device=device)
    wanted = oracle_results("recurrent_gla_step", x)
    o, new = gla.recurrent_gla_step(**x)
    assert o.dtype == dtype
    assert relative_error(o, wanted["o"]) <= FORWARD[dtype]
    assert relative_error(new, wanted["state"]) <= FORWARD[x["state"].dtype]


def test_the_oracle_of_a_bonus_is_the_definition():
    """One head: o = scale q (S + diag(u) k^T v), and S' as without a bonus."""
    x = bonus_inputs(B=1, H=1, K=3, V=2)
    q, k, v, g, S, u = (x[name].squeeze() for name in ("q", "k", "v", "g", "state", "bonus"))
    wanted = oracle_results("recurrent_gla_step", x, scale=0.3)
    torch.testing.assert_close(wanted["o"].squeeze(), 0.3 * q @ (S + torch.outer(u * k, v)))
    torch.testing.assert_close(wanted["state"].squeeze(), g.exp()[:, None] * S + torch.outer(k, v))


@pytest.mark.parametrize("backend", ["reference", "parallel_scan"])
def test_a_bonus_in_a_pool_from_logits(backend):
    x = bonus_inputs(B=3, H=2, R=2, K=8, V=12) | {"slots": torch.tensor([4, -1, 0])}
    x["state"] = torch.randn(5, 4, 8, 12, dtype=torch.float64)
    wanted = oracle_results("recurrent_gla_step", x | {"g": torch.nn.functional.logsigmoid(x["g"]) / 4})
    o, new = gla.recurrent_gla_step(**x, gate="logsigmoid", gate_normalizer=4, backend=backend)
    assert relative_error(o, wanted["o"]) <= 1e-12
    assert relative_error(new, wanted["state"]) <= 1e-12


def test_a_backend_that_takes_no_bonus_is_refused():
    def step(q, k, v, g, state, scale, state_indices, inplace):
        return get("reference").ops["recurrent_gla_step"](q, k, v, g, state, scale, state_indices, None, None, inplace)

    x = bonus_inputs(B=1)
    with gla.register(Backend("mine", "1", {"recurrent_gla_step": step}, Capabilities(dtypes={torch.float64}))):
        with pytest.raises(gla.NoBackendError, match="mine: takes no bonus; call it without"):
            gla.recurrent_gla_step(**x, backend="mine")
        gla.recurrent_gla_step(**x | {"bonus": None}, backend="mine")
        wanted = oracle_results("recurrent_gla_step", x)["o"]
        assert relative_error(gla.recurrent_gla_step(**x)[0], wanted) <= 1e-12


def test_autocast_leaves_a_bonus_as_it_is():
    x = bonus_inputs(torch.float32, B=2)
    cast = {name: x[name].bfloat16() for name in "qkv"}
    with torch.autocast("cpu", torch.bfloat16):
        actual = gla.recurrent_gla_step(**x)
    assert all(torch.equal(a, b) for a, b in zip(actual, gla.recurrent_gla_step(**x | cast), strict=True))


def test_a_row_with_a_bonus_alone_has_the_same_bits():
    x = bonus_inputs(torch.float32, B=3, H=2, G=2)
    with gla.batch_invariant():
        whole = gla.recurrent_gla_step(**x)
        alone = gla.recurrent_gla_step(**{name: y if name == "bonus" else y[1:2] for name, y in x.items()})
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("shared", [True, False])
def test_vmap_over_calls_with_a_bonus(shared):
    """A bonus has no batch, which vmap could extend, so the heads are extended."""
    x = bonus_inputs(B=2, H=2, R=2, K=4, V=3)
    q, u = (torch.randn(3, *y.shape, dtype=y.dtype) for y in (x["q"], x["bonus"]))
    rows = [x["bonus"]] * 3 if shared else u
    each = [gla.recurrent_gla_step(**x | {"q": a, "bonus": b}) for a, b in zip(q, rows, strict=True)]
    call = torch.vmap(
        lambda q, u: tuple(gla.recurrent_gla_step(**x | {"q": q, "bonus": u})), (0, None if shared else 0)
    )
    together = call(q, x["bonus"] if shared else u)
    torch.testing.assert_close(together, tuple(torch.stack(y) for y in zip(*each, strict=True)))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_compiled_step_with_a_bonus(inplace):
    def step(q, k, v, g, state, bonus):
        return gla.recurrent_gla_step(q, k, v, g, state, bonus=bonus, inplace=inplace)

    x = bonus_inputs(B=2)
    wanted = oracle_results("recurrent_gla_step", x)
    torch._dynamo.reset()
    o, state = torch.compile(step, fullgraph=True, backend="aot_eager")(**x)
    assert relative_error(o, wanted["o"]) <= 1e-12
    assert relative_error(state, wanted["state"]) <= 1e-12


# ---- pools, and several steps


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "indices", [[2, 0, 5], [-1, 0, 5], [0, -1, 5], [3, -7, -1], [-1, -1, -1], [0, 6, 1], [99, -1, 4]], ids=str
)
def test_a_pool(indices, inplace, index_dtype, device):
    """Rows read and write their own state; rows outside the pool give 0 and write nothing."""
    q, k, v, g, _ = step_inputs(B=3, H=2, G=2, K=8, V=12, dtype=torch.float64, gates="-inf", device=device)
    pool = torch.randn(6, 2, 8, 12, dtype=torch.float64, device=device)
    ref_pool, ref_o = pool.clone(), torch.zeros(3, 4, 12, dtype=torch.float64, device=device)
    for b, i in enumerate(indices):
        if 0 <= i < 6:
            row = slice(b, b + 1)
            ref_o[row], ref_pool[i : i + 1] = expected(q[row], k[row], v[row], g[row], pool[i : i + 1])
    before = pool.clone()
    rows = torch.tensor(indices, dtype=index_dtype, device=device)
    o, new = gla.recurrent_gla_step(q, k, v, g, pool, slots=rows, inplace=inplace)
    assert relative_error(o, ref_o) <= 1e-12
    assert relative_error(new, ref_pool) <= 1e-12
    assert new is pool if inplace else torch.equal(pool, before)


def test_an_empty_batch_leaves_the_pool_alone():
    q, k, v, g, _ = step_inputs(B=0, H=2, K=8, V=12)
    pool = torch.randn(6, 2, 8, 12)
    o, new = gla.recurrent_gla_step(q, k, v, g, pool, slots=torch.zeros(0, dtype=torch.int64))
    assert o.shape == (0, 2, 12)
    assert torch.equal(new, pool)


def test_steps_equal_a_chunk(device):
    x = gla_inputs(T=70, G=2, dtype=torch.float64, gates="-inf", initial_state=True, device=device)
    o, final = gla.chunk_gla(x.q, x.k, x.v, x.g, initial_state=x.initial_state, output_final_state=True)
    state, steps = x.initial_state.clone(), []
    for t in range(70):
        o_t, state = gla.recurrent_gla_step(x.q[:, t], x.k[:, t], x.v[:, t], x.g[:, t], state, inplace=t % 2 == 0)
        steps.append(o_t)
    assert relative_error(torch.stack(steps, dim=1), o) < 1e-12
    assert relative_error(state, final) < 1e-12


def test_an_inplace_step_is_seen_by_autograd():
    """A backward that needs the old state must fail, and not use the state that the step wrote."""
    x = gla_inputs(T=4, initial_state=True)
    o, _ = gla.chunk_gla(x.q.requires_grad_(), x.k, x.v, x.g, initial_state=x.initial_state)
    with torch.no_grad():
        gla.recurrent_gla_step(x.q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0], x.initial_state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_runs_in_inference_mode():
    with torch.inference_mode():
        q, k, v, g, state = step_inputs(B=2)
        o, _ = gla.recurrent_gla_step(q, k, v, g, state.clone(), inplace=True)
        assert relative_error(o, expected(q, k, v, g, state)[0]) < 1e-5
