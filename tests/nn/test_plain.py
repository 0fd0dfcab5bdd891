import pytest
import torch
from torch import nn

from gla_core.nn.plain import is_in_memory, is_plain
from tests.changes import CHANGES, parts_of


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_plain(name):
    model = nn.Sequential(nn.Linear(3, 4))
    assert is_plain(model[0], nn.Embedding, nn.Linear)
    with CHANGES[name].make(*parts_of(model, "0"), [], 1.5):
        assert not is_plain(model[0], nn.Linear)


def test_other_classes_and_compiled_calls():
    linear = nn.Linear(3, 4)
    assert not is_plain(linear, nn.Embedding)
    assert not is_plain(nn.modules.linear.NonDynamicallyQuantizableLinear(3, 4), nn.Linear)
    linear.compile(backend="eager")
    assert not is_plain(linear, nn.Linear)


def test_a_class_whose_forward_is_replaced(monkeypatch):
    linear, forward = nn.Linear(3, 4), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x))
    assert not is_plain(linear, nn.Linear)


@pytest.mark.parametrize("weight", [torch.empty(4, 3, device="meta"), torch.randn(4, 3)], ids=["meta", "tensor"])
def test_weights_of_other_kinds(weight):
    linear = nn.Linear(3, 4)
    linear._parameters["weight"] = weight
    assert not is_plain(linear, nn.Linear)


def test_memory():
    x = torch.randn(6)
    view = x[2:]
    assert is_in_memory(view)
    assert is_in_memory(torch.empty(0))
    x.untyped_storage().resize_(0)
    assert not is_in_memory(view)
