"""Weights that lie behind one another: one product where they do, the layers' own products where they do not."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gla_core.nn import (
    HGRN2,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    SimpleGatedLinearAttention,
)
from gla_core.nn.merged import _ALLOCATIONS, added, matrix_of, products

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.number += op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return GatedLinearAttention(16, num_heads=2, gate_low_rank_dim=4)


@torch.no_grad()
def computed(layer):
    """Returns the number of products of a step, its y and its state."""
    x = torch.linspace(-1, 1, 32).view(2, 16).to(next(layer.parameters()).dtype)
    with Products() as products:
        y, state = layer.step(x, layer.initial_state(2))
    return products.number, y, state


def apart(layer):
    """Returns a copy whose weights lie apart."""
    return copy.deepcopy(layer)


def lora(layer):
    layer.k_proj = nn.Sequential(layer.k_proj)


def hook(layer):
    layer.v_proj.register_forward_hook(lambda *_: None)


def replace(layer):
    layer.q_proj.weight = nn.Parameter(layer.q_proj.weight.detach().clone())


def assign(layer):
    layer.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()}, assign=True)


def tie(layer):
    layer.k_proj.weight = layer.q_proj.weight
    layer.merge()


def patch(layer):
    layer.g_proj.forward = lambda x: nn.functional.linear(x, layer.g_proj.weight)


def parametrize(layer):
    nn.utils.parametrizations.weight_norm(layer.q_proj)


CHANGES = [lora, hook, replace, assign, tie, patch, parametrize]


@pytest.mark.parametrize("change", [None, *CHANGES], ids=lambda change: change and change.__name__)
def test_a_step_is_three_products_or_falls_back(layer, change):
    other = apart(layer)
    if change is not None:
        change(layer)
        change(other)
    (merged, y, state), (separate, expected, after) = computed(layer), computed(other)
    assert (merged, separate) == (3 if change is None else 7, 7)
    torch.testing.assert_close(y, expected, **CLOSE)
    torch.testing.assert_close(state.recurrent, after.recurrent, **CLOSE)


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.double(),
        lambda layer: GatedLinearAttention(16, num_heads=2, device="meta").to_empty(device="cpu"),
        lambda layer: layer.requires_grad_(False),
        lambda layer: layer.load_state_dict(apart(layer).state_dict()) and layer,
        lambda layer: pickle.loads(pickle.dumps(layer)).to(torch.float64),
        lambda layer: copy.deepcopy(layer).bfloat16(),
        lambda layer: nn.Sequential(layer).half()[0],
    ],
)
def test_weights_stay_together(layer, move):
    layer = move(layer)
    with torch.no_grad():
        assert products(*layer.merged_layers(), torch.zeros(1, 16, dtype=layer.q_proj.weight.dtype)) is not None


def test_memory_that_another_owns_is_left_alone(layer):
    other = apart(layer)
    layer.load_state_dict(other.state_dict(), assign=True)
    for model in (layer.to(torch.float32), other):
        assert model.q_proj.weight.data_ptr() == other.q_proj.weight.data_ptr()
    flat = torch.cat([x.detach().flatten() for x in layer.parameters()])
    places = [part.data_ptr() for part in flat.split([x.numel() for x in layer.parameters()])]
    for x, part in zip(layer.parameters(), flat.split([x.numel() for x in layer.parameters()]), strict=True):
        x.data = part.view_as(x)
    layer.merge()
    assert [x.data_ptr() for x in layer.parameters()] == places


def test_each_weight_has_its_own_storage_and_none_keeps_the_memory(layer):
    weights = [module.weight for module in layer.merged_layers()[0]]
    storages = [weight.untyped_storage() for weight in weights]
    assert [x.nbytes() for x in storages] == [weight.nbytes for weight in weights]
    assert len({x.data_ptr() for x in storages}) == len(weights)
    allocation = _ALLOCATIONS[layer.q_proj]
    del storages
    for weight in weights[:-1]:
        weight.data = weight.clone()
    assert not allocation.expired()
    weights[-1].data = torch.zeros(1)  # as sharding does
    assert allocation.expired()
    with torch.no_grad():
        assert products(*layer.merged_layers(), torch.zeros(1, 16)) is None


def test_saved_and_trained(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert len(file.getvalue()) < 4 * sum(x.numel() for x in layer.parameters()) + 5000
    file.seek(0)
    other = GatedLinearAttention(16, num_heads=2, gate_low_rank_dim=4)
    other.load_state_dict(torch.load(file))
    x = torch.randn(2, 5, 16)
    for model in (layer, other := apart(layer)):
        optimizer = torch.optim.AdamW(model.parameters())
        model(x)[0].square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(dict(layer.named_parameters()), dict(other.named_parameters()), rtol=0, atol=0)
    assert computed(layer)[0] == 3
    torch.testing.assert_close(computed(layer)[1], computed(other)[1], **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_a_residual(layer, padded):
    x, residual = torch.randn(2, 2, 5, 16)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]) if padded else None
    expected = residual + layer(x, attention_mask=mask)[0]
    with torch.no_grad():
        actual = layer(x, attention_mask=mask, residual=residual.clone())[0]
        torch.testing.assert_close(actual, expected, **CLOSE)
        indices = torch.tensor([1, -1]) if padded else None
        expected = residual[:, 0] + layer.step(x[:, 0], layer.initial_state(2), slots=indices)[0]
        actual, _ = layer.step(x[:, 0], layer.initial_state(2), slots=indices, residual=residual[:, 0])
        torch.testing.assert_close(actual, expected, **CLOSE)


def test_added():
    linear, x, residual = nn.Linear(3, 4, bias=False), torch.randn(2, 3), torch.randn(2, 4)
    expected, before = residual + linear(x), residual.clone()
    assert torch.equal(added(residual, linear, x), expected)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert added(residual, linear, x).dtype == torch.float32
        assert torch.equal(residual, before)
        assert added(residual, linear, x) is residual
    torch.testing.assert_close(residual, expected)


@pytest.mark.parametrize(
    ("layer", "number"),
    [
        (SimpleGatedLinearAttention(16, num_heads=2, use_short_conv=False), 3),
        (HGRN2(16, num_heads=2), 2),
        (KimiDeltaAttention(16, head_dim=4, num_heads=4), 4),
        (GatedDeltaNet(16, head_dim=4, num_heads=4), 2),
        (DeltaNet(16), 2),
    ],
)
def test_other_layers(layer, number):
    x = torch.randn(1, 3, 16)
    expected = layer(x)[0]
    with torch.no_grad(), Products() as products:
        torch.testing.assert_close(layer(x)[0], expected, **CLOSE)
    assert products.number == number


@torch.no_grad()
def test_the_matrix_of_layers(layer):
    x = torch.randn(2, 16)
    (layers,) = layer.merged_layers()
    matrix = matrix_of(layers, x)
    assert torch.equal(matrix, torch.cat([each.weight for each in layers]))
    assert matrix_of([layer.o_proj], x).data_ptr() == layer.o_proj.weight.data_ptr()
    half = layer.gk_proj[1]
    assert matrix_of([half], x) is None, "it has a bias"
    assert torch.equal(matrix_of([half], x, biased=True), half.weight)
    with torch.enable_grad():
        assert matrix_of(layers, x) is None
    hook(layer)
    assert matrix_of(layers, x) is None
