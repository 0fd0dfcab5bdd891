"""chunk_gla_summary and chunk_gla_gradient_summary: their purpose, gradient, refusals, torch.func, compiled graphs."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import gla_inputs


def inputs(**sizes):
    return gla_inputs(**{"dtype": torch.float64, "T": 40, "K": 6, "V": 5, **sizes})


@pytest.mark.parametrize("sizes", [{}, {"lengths": (3, 0, 70)}, {"gates": "none"}, {"gates": "-inf"}], ids=str)
def test_it_gives_the_final_state_of_any_initial_one(sizes):
    x = inputs(**sizes, initial_state=True)
    decay, state = gla.chunk_gla_summary(x.k, x.v, x.g, x.cu_seqlens)
    _, final = gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, True, x.cu_seqlens)
    assert relative_error(decay[..., None] * x.initial_state + state, final) < 1e-13


@pytest.mark.parametrize("sizes", [{"G": 3}, {"lengths": (3, 0, 70)}, {"gates": "-inf"}], ids=str)
def test_the_gradient_summary_gives_the_gradient_of_the_initial_state(sizes):
    x = inputs(**sizes, initial_state=True)
    x.initial_state.requires_grad_()
    o, final = gla.chunk_gla(x.q, x.k, x.v, x.g, 0.3, x.initial_state, True, x.cu_seqlens)
    do, dfinal = torch.randn_like(o), torch.randn_like(final)
    (expected,) = torch.autograd.grad((o, final), x.initial_state, (do, dfinal))
    with torch.no_grad():
        decay, dstate = gla.chunk_gla_gradient_summary(x.q, do, x.g, x.cu_seqlens)
    assert relative_error(decay[..., None] * dfinal + 0.3 * dstate, expected) < 1e-13


@pytest.mark.parametrize("function", [gla.chunk_gla_summary, gla.chunk_gla_gradient_summary])
def test_states_with_values_first(function):
    x = inputs()
    decay, state = function(x.k, x.v, x.g)
    swapped = function(x.k, x.v, x.g, state_v_first=True)
    assert torch.equal(swapped[0], decay)
    assert torch.equal(swapped[1], state.mT)


@pytest.mark.parametrize("function", [gla.chunk_gla_summary, gla.chunk_gla_gradient_summary])
def test_compiled_equals_eager(function):
    x = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.k, x.v, x.g), function(x.k, x.v, x.g))


@pytest.mark.parametrize("which", [0, 1])
def test_the_gradient_of_one_result(which):
    x = inputs(lengths=(3, 0, 30), padding=4)
    leaves = [y.requires_grad_() for y in (x.k, x.v, x.g)]
    functions = (gla.chunk_gla_summary, oracle.chunk_gla_summary)
    actual, expected = (f(*leaves, x.cu_seqlens)[which].square().sum() for f in functions)
    actual = torch.autograd.grad(actual, leaves, allow_unused=True)
    expected = torch.autograd.grad(expected, leaves, allow_unused=True)
    for name, d, ref in zip("kvg", actual, expected, strict=True):
        assert (d is None or not d.any()) == (ref is None or not ref.any()), name
        if ref is not None:
            assert relative_error(d, ref) < 1e-12, name


def test_torch_func():
    x = inputs(B=3)

    def loss(k, v, g):
        decay, state = gla.chunk_gla_summary(k[None], v[None], g[None])
        return decay.sum() + state.square().sum()

    actual = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(x.k, x.v, x.g)
    leaves = [y.clone().requires_grad_() for y in (x.k, x.v, x.g)]
    torch.stack([loss(*(y[b] for y in leaves)) for b in range(3)]).sum().backward()
    for d, y in zip(actual, leaves, strict=True):
        assert relative_error(d, y.grad) < 1e-13


def test_what_it_refuses():
    x = inputs(G=2)
    with pytest.raises(ValueError, match="k has 4 heads; expected 2, as g"):
        gla.chunk_gla_summary(x.q, x.v.repeat_interleave(2, 2), x.g)
    with pytest.raises(ValueError, match="q has 4 heads and g has 3; expected a multiple of one another"):
        gla.chunk_gla_gradient_summary(x.q, x.v.repeat_interleave(2, 2), x.g.repeat(1, 1, 2, 1)[:, :, :3])
    with pytest.raises(ValueError, match=r"do has shape \[2, 39, 2, 5\]; expected \[B, T, Ho, V\] with B=2, T=40"):
        gla.chunk_gla_gradient_summary(x.k, x.v[:, 1:], x.g)
    with pytest.raises(TypeError, match="do is float32; expected float64, as q"):
        gla.chunk_gla_gradient_summary(x.k, x.v.float(), x.g)
    with pytest.raises(ValueError, match=r"v has shape \[2, 39, 2, 5\]; expected \[B, T, Ho, V\] with B=2, T=40"):
        gla.chunk_gla_summary(x.k, x.v[:, 1:], x.g)
    with pytest.raises(ValueError, match="cu_seqlens goes with B = 1; k has B = 2"):
        gla.chunk_gla_summary(x.k, x.v, x.g, torch.tensor([0, 40]))
    with pytest.raises(TypeError, match="v is float32; expected float64, as k"):
        gla.chunk_gla_summary(x.k.requires_grad_(), x.v.float(), x.g)
    with pytest.raises(NotImplementedError, match="chunk_gla_gradient_summary has no gradient"):
        gla.chunk_gla_gradient_summary(x.k.requires_grad_(), x.v, x.g)


def test_check_values(fresh_registry, monkeypatch):
    monkeypatch.setenv("GLA_CHECK", "1")
    gla.reload_environment()
    x = inputs(lengths=(3, 4))
    for changes, message in (
        ({"k": x.k * torch.nan}, "k holds NaN"),
        ({"g": 1 - x.g}, "g has values up to"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "expected offsets from 0 to T = 7 that do not descend"),
    ):
        y = dataclasses.replace(x, **changes)
        with pytest.raises(ValueError, match=message):
            gla.chunk_gla_summary(y.k, y.v, y.g, y.cu_seqlens)


def test_flops():
    x = inputs(B=2, T=10, H=3)
    with FlopCounterMode(display=False) as counter:
        gla.chunk_gla_summary(x.k, x.v, x.g)
    assert counter.get_total_flops() == 2 * 2 * 10 * 3 * 6 * 5
