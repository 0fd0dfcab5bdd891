"""Under autocast the arguments of an op are cast, and the backend computes as it does without autocast."""

import pytest
import torch

import gla_core as gla
from gla_core.workloads.inputs import gla_inputs

DTYPES = [torch.bfloat16, torch.float16]


def inputs(device, T=70, **changes):
    x = gla_inputs(**{"T": T, "G": 2, "K": 16, "V": 16, "initial_state": True, "device": device, **changes})
    return {name: getattr(x, name) for name in ("q", "k", "v", "g")}, x.initial_state


def to(dtype, x):
    return {name: y if name == "g" else y.to(dtype) for name, y in x.items()}


def chunk(x, state):
    return gla.chunk_gla(**x, initial_state=state, output_final_state=True)


def step(x, state):
    return gla.recurrent_gla_step(**{name: y[:, 0] for name, y in x.items()}, state=state)


def attention(x, state):
    return gla.softmax_attention(x["q"], x["k"], x["v"], causal=True)


def linear(x, state):
    return gla.linear_attention(x["q"], x["k"], x["v"], normalize=False)[:1]


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("op", [chunk, step, attention, linear])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_q_k_and_v_are_cast_and_nothing_else(op, dtype, T, device):
    x, state = inputs(device, T)
    with torch.no_grad():
        if op is linear:  # its feature map runs under autocast, which uses float32 here
            phi = {**x, "q": torch.nn.functional.elu(x["q"]) + 1, "k": torch.nn.functional.elu(x["k"]) + 1}
            y = to(dtype, phi)
            expected = gla.chunk_gla(y["q"], y["k"], y["v"], None, 1.0)[:1]
        else:
            expected = op(to(dtype, x), state)
        with torch.autocast(device, dtype):
            actual = op(x, state)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert actual[0].dtype == dtype


@pytest.mark.parametrize("form", ["constant", "head"])
def test_a_gate_of_any_form_is_not_cast(form, device):
    x, state = inputs(device, G=1, R=2, gate_form=form)
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    cast = {name: y.clone().requires_grad_() for name, y in to(torch.bfloat16, x).items()}
    expected = chunk(cast, state)
    with torch.autocast(device, torch.bfloat16):
        actual = chunk(leaves, state)
    assert torch.equal(actual.o, expected.o)
    assert torch.equal(actual.state, expected.state)
    dg, wanted = (torch.autograd.grad(y.o.float().sum(), z["g"])[0] for y, z in ((actual, leaves), (expected, cast)))
    assert (dg.dtype, dg.shape) == (torch.float32, x["g"].shape)
    assert torch.equal(dg, wanted)


@pytest.mark.parametrize("backend", ["reference", "parallel_scan,reference"])
def test_a_backend_computes_without_autocast(backend, device):
    """The state is float32, with the accuracy of float32 arithmetic on the cast inputs."""
    x, state = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        _, actual = gla.chunk_gla(**x, initial_state=state, output_final_state=True, backend=backend)
    cast = {name: y.double() for name, y in to(torch.bfloat16, x).items()}
    _, exact = gla.chunk_gla(**cast, initial_state=state.double(), output_final_state=True, backend="reference")
    assert actual.dtype == torch.float32
    assert (actual - exact).norm() / exact.norm() < (1e-5 if device == "cpu" else 4e-3)


def test_large_inputs_stay_finite_in_float16(device):
    x, state = inputs(device)
    with torch.autocast(device, torch.float16):
        _, actual = chunk({**x, "k": 300 * x["k"], "v": 300 * x["v"]}, state)
    assert actual.isfinite().all()


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("op", [chunk, attention])
def test_gradients_have_the_dtype_of_the_inputs(op, inside, device):
    x, state = inputs(device)
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    with torch.autocast(device, torch.bfloat16):
        loss = sum(y.float().square().sum() for y in op(leaves, state))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    cast = {name: y.detach().to(torch.bfloat16 if name != "g" else y.dtype).requires_grad_() for name, y in x.items()}
    sum(y.float().square().sum() for y in op(cast, state)).backward()
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            assert leaf.grad.dtype == torch.float32
            assert torch.equal(leaf.grad, cast[name].grad.float())


def test_gates_in_half_precision_become_float32_or_autocasts_dtype(device):
    x, state = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        a = chunk({**x, "g": x["g"].half()}, state)
        b = chunk({**x, "g": x["g"].half().float()}, state)
        chunk({**x, "g": x["g"].bfloat16()}, state)
    assert torch.equal(a[0], b[0])


def test_float64_is_left_alone(device):
    x, state = inputs(device, dtype=torch.float64)
    with torch.autocast(device, torch.bfloat16):
        o, _ = gla.chunk_gla(**x, initial_state=state, backend="reference")
    assert o.dtype == torch.float64


def test_softmax_is_float32(device):
    x = torch.randn(3, 50, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = gla.online_softmax(x.bfloat16())
    torch.testing.assert_close(y, x.bfloat16().float().softmax(-1))


@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_compiled(around, device):
    x, state = inputs(device)

    def inside(q, k, v, g):
        with torch.autocast(device, torch.bfloat16, enabled=True):
            return gla.chunk_gla(q, k, v, g, initial_state=state)[0] * 1.0

    def plain(q, k, v, g):
        return gla.chunk_gla(q, k, v, g, initial_state=state)[0] * 1.0

    torch._dynamo.reset()
    function = torch.compile(plain if around else inside, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16, enabled=around):
        actual = function(**x)
    with torch.autocast(device, torch.bfloat16):
        expected = plain(**x)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)
