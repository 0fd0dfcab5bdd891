"""linear_attention against its defining sums in float64."""

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import relative_error
from gla_core.dispatch.backend import GATES
from gla_core.dispatch.tensors import log_gates
from gla_core.workloads.inputs import gla_inputs


def direct(q, k, v, feature_map, normalize, scale):
    """Computes equations (1) to (3) of the source, all pairs at once."""
    groups = q.shape[2] // k.shape[2]
    q, k = feature_map(q), feature_map(k)
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    o = torch.einsum("bhts,bshv->bthv", scores, v)
    return o / scores.sum(-1).mT[..., None] if normalize else scale * o


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("feature_map", "meaning"),
    [(None, lambda x: x), (torch.exp, torch.exp), (lambda x: torch.cat([x.exp(), (-x).exp()], -1),) * 2],
    ids=["identity", "exp", "hedgehog"],
)
def test_values_and_gradients(feature_map, meaning, normalize):
    x = gla_inputs(T=90, G=2, K=8, V=5, dtype=torch.float64)
    leaves = [y.abs().requires_grad_() for y in (x.q, x.k, x.v)]  # positive: the identity's normaliser is far from 0
    o, _ = gla.linear_attention(*leaves, feature_map=feature_map, normalize=normalize, scale=0.4)
    ref = direct(*leaves, meaning, normalize, 0.4)
    assert relative_error(o, ref) < 1e-12
    do = torch.randn_like(o)
    for grad, expected in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(ref, leaves, do), strict=True):
        assert relative_error(grad, expected) < 1e-11


def test_the_default_is_elu_plus_one_normalised():
    x = gla_inputs(T=40, dtype=torch.float64)
    expected = direct(x.q, x.k, x.v, lambda y: torch.nn.functional.elu(y) + 1, True, 1.0)
    assert relative_error(gla.linear_attention(x.q, x.k, x.v)[0], expected) < 1e-12


@pytest.mark.parametrize("normalize", [True, False])
def test_one_call_equals_two_joined(normalize):
    x = gla_inputs(T=100, dtype=torch.float64)
    whole, _ = gla.linear_attention(x.q, x.k, x.v, normalize=normalize)
    begin = (y[:, :30] for y in (x.q, x.k, x.v))
    first, state = gla.linear_attention(*begin, normalize=normalize, output_final_state=True)
    rest, _ = gla.linear_attention(*(y[:, 30:] for y in (x.q, x.k, x.v)), normalize=normalize, initial_state=state)
    assert relative_error(torch.cat([first, rest], dim=1), whole) < 1e-13


@pytest.mark.parametrize("normalize", [True, False])
def test_states_with_values_first(normalize):
    x = gla_inputs(T=30, K=4, V=3, dtype=torch.float64)
    tokens, options = (x.q, x.k, x.v), {"normalize": normalize, "output_final_state": True}
    o, state = gla.linear_attention(*tokens, **options)
    first = gla.linear_attention(*tokens, **options, state_v_first=True)
    assert torch.equal(first.o, o)
    assert torch.equal(first.state, state.mT)
    again = gla.linear_attention(*tokens, **options, initial_state=state)
    swapped = gla.linear_attention(*tokens, **options, initial_state=first.state, state_v_first=True)
    assert torch.equal(swapped.o, again.o)
    assert torch.equal(swapped.state, again.state.mT)
    assert gla.linear_attention(*tokens, state_v_first=True).state is None


def test_packed_sequences():
    x = gla_inputs(lengths=(20, 0, 33), dtype=torch.float64)
    packed, _ = gla.linear_attention(x.q, x.k, x.v, cu_seqlens=x.cu_seqlens)
    alone = [gla.linear_attention(*(y[:, a:b] for y in (x.q, x.k, x.v)))[0] for a, b in ((0, 20), (20, 53))]
    assert relative_error(packed, torch.cat(alone, dim=1)) < 1e-13


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("number", [None, 4])
@pytest.mark.parametrize("form", GATES)
def test_gates(form, number, normalize):
    """The gates decay the state and the normaliser; logits have gradients of their own."""
    x = gla_inputs(T=90, G=2, K=8, V=5, dtype=torch.float64, gate_form=form)
    leaves = [y.requires_grad_() for y in (x.q.abs(), x.k.abs(), x.v, x.g if number is None else 3 * x.g + 1)]
    q, k, v, g = leaves
    options = {} if number is None else {"gate": "logsigmoid", "gate_normalizer": number}
    o, state = gla.linear_attention(q, k, v, None, normalize, 0.4, None, True, g=g, **options)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1) if normalize else v
    ref, final = oracle.chunk_gla(q, k, values, log_gates(g, number, torch.float64), 1.0 if normalize else 0.4)
    ref = ref[..., :-1] / ref[..., -1:] if normalize else ref
    assert relative_error(o, ref) < 1e-12
    assert relative_error(state, final) < 1e-12
    do = torch.randn_like(o)
    for grad, expected in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(ref, leaves, do), strict=True):
        assert relative_error(grad, expected) < 1e-11
