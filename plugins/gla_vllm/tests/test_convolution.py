"""Convolutions over a batch as vLLM describes it: prompts in parts, checkpoints, drafts, and padding."""

import pytest
import torch
from test_recurrence import metadata
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata

from gla_core.nn.short_convolution import ShortConvolution
from gla_vllm import convolution
from gla_vllm.convolution import Filter, convolve

D, W, DRAFTS = 8, 4, 3
ROOM = W - 1 + DRAFTS


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return ShortConvolution(D, W, bias=True).requires_grad_(False)


@pytest.fixture(params=["SD", "DS"])
def pool(request, monkeypatch):
    """Histories in vLLM's two layouts; NaN, so that a row that is read before it is written is seen."""
    monkeypatch.setattr(convolution, "is_conv_state_dim_first", lambda: request.param == "DS")
    return torch.full((9, ROOM, D) if request.param == "SD" else (9, D, ROOM), torch.nan)


def call(layer, x, pool, batch):
    out = torch.full_like(x, torch.nan)
    convolve(x, Filter(layer.weight[:, 0], layer.bias, True), pool, batch, out)
    return out


def verified(lengths, slots, accepted):
    """Describes decodes of `lengths` tokens, after as many accepted tokens of the call before as `accepted` says."""
    batch = metadata(slots, {}, [])
    batch.num_decode_tokens = sum(lengths)
    batch.query_start_loc_d = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    batch.num_accepted_tokens = torch.tensor(accepted, dtype=torch.int32)
    return batch


def test_parts_of_prompts_and_drafts(layer, pool):
    """Two sequences are read in parts, with a token and a prompt in one batch, and with rejected drafts."""
    a, b = torch.randn(80, D), torch.randn(2, D)
    (y, _), (z, _) = layer(a[None]), layer(b[None])
    close = {"rtol": 1e-6, "atol": 1e-6}
    first = call(layer, torch.cat([a[:70], b[:1]]), pool, metadata([], {5: 70, 2: 1}, [False, False]))
    torch.testing.assert_close(first, torch.cat([y[0, :70], z[0, :1]]), **close)
    mixed = metadata([2], {5: 1}, [True])
    torch.testing.assert_close(
        call(layer, torch.cat([b[1:], a[70:71]]), pool, mixed), torch.cat([z[0, 1:], y[0, 70:71]])
    )
    wrong = torch.randn(2, D)
    drafts = call(layer, torch.cat([a[71:73], wrong]), pool, verified([4, 0], [5, 0], [1, 1]))
    torch.testing.assert_close(drafts[:2], y[0, 71:73], **close)
    for begin, end, accepted in ((73, 77, 2), (77, 78, 4), (78, 80, 1)):
        out = call(layer, a[begin:end], pool, verified([end - begin], [5], [accepted]))
        torch.testing.assert_close(out, y[0, begin:end], **close)


def test_a_checkpoint_inside_a_prompt(layer, pool):
    x = torch.randn(75, D)
    batch = metadata([], {5: 5, 3: 70}, [False, False])
    batch.checkpoint = MambaPrefillCheckpointMetadata(torch.tensor([0, 64]), torch.tensor([0, 7]))
    call(layer, x, pool, batch)
    out = call(layer, x[69:70], pool, metadata([], {7: 1}, [True]))
    torch.testing.assert_close(out, layer(x[None, 5:70])[0][0, -1:], rtol=1e-6, atol=1e-6)
    assert pool[[1, 2, 4, 6, 8]].isnan().all()
