"""Rows with padding, given by a mask: a layer's results for the tokens do not depend on the padding."""

import pytest
import torch

from gla_core.nn.padding import padding

MASK = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
B, T = MASK.shape


@pytest.mark.thorough
def test_in_a_compiled_graph(make_layer):
    layer = make_layer("conv")
    x = torch.randn(B, T, 16, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, _ = compiled(x, attention_mask=MASK)
    torch.testing.assert_close(y, layer(x, attention_mask=MASK)[0])


def test_what_is_no_mask_of_x(make_layer):
    layer, x = make_layer("plain"), torch.randn(1, T, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 8, 8\]; expected \[B, columns\]"):
        layer(x, attention_mask=torch.ones(1, T, T))
    with pytest.raises(ValueError, match="has 7 columns; expected one for each of 8 tokens"):
        layer(x, attention_mask=torch.ones(1, T - 1))
    with pytest.raises(ValueError, match="both cu_seqlens and attention_mask"):
        layer(x, cu_seqlens=torch.tensor([0, T]), attention_mask=torch.ones(1, T))


def test_there_and_back():
    actual, x = padding(MASK, T), torch.randn(B, T, 3)
    assert actual.lengths.tolist() == MASK.sum(1).tolist()
    front = actual.front(x)
    for i in range(B):
        assert torch.equal(front[i, : actual.lengths[i]], x[i, MASK[i].bool()])
        assert not front[i, actual.lengths[i] :].any()
    assert torch.equal(actual.back(front), x * MASK[..., None])
