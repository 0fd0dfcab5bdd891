"""Layers under torch.jit.trace, which tensorboard's add_graph calls, and torch.export, for any number of tokens."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import gla_core as gla
from gla_core.nn import GLAState

D = 16


class Whole(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y, state = self.layer(x, output_final_state=True)
        return y, *tensors(state)


class Masked(Whole):
    def forward(self, x, mask):
        return self.layer(x, attention_mask=mask)[0]


class Packed(Whole):
    def forward(self, x, cu_seqlens):
        return self.layer(x, cu_seqlens=cu_seqlens)[0]


class Step(Whole):
    def forward(self, x, recurrent, *others):
        conv = others[: len(self.layer.convolutions)]
        position = None if self.layer.rotary_base is None else others[-1]
        y, state = self.layer.step(x, GLAState(recurrent, conv or None, position))
        return y, *tensors(state)


def tensors(state):
    """Returns the tensors of a state, in order."""
    return [x for x in (state.recurrent, *(state.conv or ()), state.position) if x is not None]


THOROUGH = ("KimiDeltaAttention", "GatedDeltaNet", "DeltaNet")
LAYERS = sorted(set(gla.nn.__all__) - {"GLAState"})


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in LAYERS])
def layer(request):
    """A layer of every kind, with convolutions."""
    sizes = {"d_state": 4, "headdim": 8} if request.param == "Mamba2" else {"num_heads": 2, "use_short_conv": True}
    sizes |= {"head_dim": 8} if request.param in ("KimiDeltaAttention", "GatedDeltaNet") else {}
    return getattr(gla.nn, request.param)(D, **sizes).double()


def randn(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


def whole(B, T):
    return (randn(B, T, D),)


def masked(B, T):
    return randn(B, T, D), torch.arange(T).expand(B, T) >= torch.arange(B)[:, None] % T


def packed(B, T):
    return randn(1, T, D), torch.tensor([0, T // 3, T // 3, T])


CALLS = {"whole": (Whole, whole), "masked": (Masked, masked), "packed": (Packed, packed)}
KINDS = ["whole", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("masked", "packed"))]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_computes_other_sizes(layer, kind, grad):
    wrap, inputs = CALLS[kind]
    module = wrap(layer)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(module, inputs(2, 9))
        for B, T in ((1, 1), (3, 70)):
            x = inputs(B, T)
            actual, expected = traced(*x), module(*x)
            torch.testing.assert_close(actual, expected)
    if grad:
        sums = [y[0].square().sum() for y in (actual, expected)]
        gradients = [torch.autograd.grad(total, list(layer.parameters())) for total in sums]
        torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_traced_step(layer):
    module, x = Step(layer), randn(5, 7, D)
    traced = torch.jit.trace(module, (randn(2, D), *tensors(layer.initial_state(2))))
    _, state = layer(x, output_final_state=True)
    torch.testing.assert_close(traced(x[:, 0], *tensors(state)), module(x[:, 0], *tensors(state)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_computes_two_tokens_and_more(layer, kind):
    wrap, inputs = CALLS[kind]
    module, tokens = wrap(layer), {1: Dim("T", min=2)}
    others = {"whole": (), "masked": (tokens,), "packed": (None,)}[kind]
    exported = torch.export.export(module, inputs(2, 9), dynamic_shapes=(tokens, *others)).module()
    for T in (2, 70):
        x = inputs(2, T)
        torch.testing.assert_close(exported(*x), module(*x))
