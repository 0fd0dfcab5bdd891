"""A decoding step of a layer: the op that computes its norm and its output gate too, and when it does not."""

import dataclasses

import pytest
import torch
from torch import nn

import gla_core as gla
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.registry import get
from gla_core.nn.gated_linear_attention import Projections

OPTIONS = {"hidden_size": 32, "num_heads": 2}
FUSED = {
    "gla": (gla.nn.GatedLinearAttention, {"num_kv_heads": 1, "use_short_conv": True}),
    "sigmoid": (gla.nn.GatedLinearAttention, {"gate_fn": "sigmoid", "clamp_min": -0.1, "elementwise_affine": False}),
    "no_output_gate": (gla.nn.GatedLinearAttention, {"use_output_gate": False, "gate_fn": "gelu"}),
    "simple_gla": (gla.nn.SimpleGatedLinearAttention, {}),
    "retention": (gla.nn.Retention, {}),
}
NOT_FUSED = {"gelu": (gla.nn.GatedLinearAttention, {"gate_fn": "gelu"}), "hgrn2": (gla.nn.HGRN2, {})}


@pytest.fixture
def ran(monkeypatch):
    """Returns the names of the ops that decoding steps have run, in order."""
    names = []

    def noted(op):
        return lambda *args, **options: (names.append(op.__name__), op(*args, **options))[1]

    ops = gla.nn.GatedLinearAttention.ops
    ops = dataclasses.replace(ops, step=noted(ops.step), layer_step=noted(ops.layer_step))
    for layer in (gla.nn.GatedLinearAttention, gla.nn.HGRN2):
        monkeypatch.setattr(layer, "ops", ops)
    return names


def steps(layer, x, **options):
    """Returns y of the tokens of x [B, T, ..], computed one by one, and of the whole sequence."""
    state, outs = layer.initial_state(len(x)), []
    with torch.no_grad():
        for token in x.unbind(1):
            y, state = layer.step(token, state, **options)
            outs.append(y)
        return torch.stack(outs, 1), layer(x)[0]


@pytest.mark.parametrize("name", [*FUSED, *NOT_FUSED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_steps_equal_the_sequence(name, dtype, ran):
    make, options = {**FUSED, **NOT_FUSED}[name]
    layer = make(**OPTIONS, **options, dtype=dtype)
    actual, expected = steps(layer, torch.randn(3, 5, 32, dtype=dtype))
    assert relative_error(actual, expected) <= {torch.float64: 1e-12}.get(dtype, 3 * FORWARD[dtype])
    assert set(ran) == {"recurrent_gla_layer_step" if name in FUSED else "recurrent_gla_step"}


def test_a_norm_of_another_kind_runs_itself(ran):
    class Norm(nn.RMSNorm):
        def forward(self, o, gate=None):
            return super().forward(o)

    layer = gla.nn.GatedLinearAttention(**OPTIONS, use_output_gate=False)
    layer.g_norm = Norm(16)
    assert relative_error(*steps(layer, torch.randn(3, 2, 32))) <= FORWARD[torch.float32]
    assert set(ran) == {"recurrent_gla_step"}


@pytest.mark.parametrize("inplace", [False, True])
def test_the_given_state_is_written_only_in_place(inplace):
    layer = gla.nn.GatedLinearAttention(**OPTIONS)
    state = layer.initial_state(3)
    before = state.recurrent.clone()
    _, after = layer.step(torch.randn(3, 32), state, inplace=inplace)
    assert (after.recurrent is state.recurrent) == inplace
    assert torch.equal(state.recurrent, before) != inplace


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"use_short_conv": True}, {"use_output_gate": False}], ids=str)
def test_a_step_from_projections(options):
    layer, x = gla.nn.GatedLinearAttention(**OPTIONS, **options), torch.randn(3, 32)
    state = layer.initial_state(3)
    parts = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj, "logits": layer.gk_proj}
    if layer.use_output_gate:
        parts["gate"] = layer.g_proj
    made = Projections(**{name: part(x[:, None]) for name, part in parts.items()})
    indices = torch.tensor([0, -1, 2])
    o, after = layer.step_from_projections(x, made, state, slots=indices)
    expected, wanted = layer.step(x, state, slots=indices)
    assert relative_error(layer.o_proj(o), expected) <= FORWARD[torch.float32]
    assert relative_error(after.recurrent, wanted.recurrent) <= FORWARD[torch.float32]
    assert torch.equal(o[1], torch.zeros_like(o[1]))


def test_a_backend_that_has_only_a_step_serves_layers():
    ops = {name: get("reference").ops[name] for name in ("chunk_gla_fwd", "recurrent_gla_step")}
    with gla.register(Backend("mine", "1", ops, Capabilities())):
        layer = gla.nn.GatedLinearAttention(**OPTIONS, backend="mine")
        assert relative_error(*steps(layer, torch.randn(3, 5, 32))) <= FORWARD[torch.float32]
