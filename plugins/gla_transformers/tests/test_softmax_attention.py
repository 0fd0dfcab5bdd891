"""Layers of softmax attention among layers of gated linear attention: `attn` of the configuration."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from gla_transformers import GLACache

CONFIGURATIONS = [
    {"attn": {"layers": [1], "num_heads": 4}},
    {"attn": [{"layers": [0], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 500.0}]},
    {"attn": [{"layers": [0], "num_heads": 2}, {"layers": [1], "num_heads": 4, "window_size": 7}]},
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def theirs(theirs, monkeypatch):
    """FLA's model with plain PyTorch in place of flash-attn and of its rotation, which are for CUDA only."""
    from fla.layers import attn
    from fla.modules import rotary

    def flash(q, k, v, causal, window_size):
        q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        for i in range(scores.shape[2]):
            scores[:, :, i, i + 1 :] = -torch.inf
            if window_size[0] >= 0:
                scores[:, :, i, : max(0, i - window_size[0])] = -torch.inf
        return (scores.softmax(-1) @ v).transpose(1, 2).float()

    def rotate(self, q, k, **_):
        angles = torch.arange(q.shape[1]).double()[:, None] * self.base ** (-torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = angles.cos().float(), angles.sin().float()
        return tuple(rotary.ops.rotary_embedding_ref(x, cos, sin) for x in (q, k))

    monkeypatch.setattr(attn, "flash_attn_func", flash)
    monkeypatch.setattr(rotary.RotaryEmbedding, "forward", rotate)
    return theirs


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_state_dicts_and_values(theirs, ours, tokens, options):
    a, b = theirs(**options), ours(**options)
    b.load_state_dict(a.state_dict())
    a.load_state_dict(b.state_dict())
    results = []
    for model in (a, b):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append((loss, dict(zip(model.state_dict(), gradients, strict=True))))
    torch.testing.assert_close(*results, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_padding_packing_and_decoding(ours, tokens, options):
    model = ours(**options)
    alone = [model(tokens[:1, begin:end]).logits for begin, end in [(0, 25), (25, 80)]]
    packed = model(tokens[:1], cu_seqlens=torch.tensor([0, 25, 80]), use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), **CLOSE)
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    out = model(tokens[:, :70], attention_mask=mask[:, :70])
    torch.testing.assert_close(out.logits[:1, 25:], alone[1][:, :45], **CLOSE)
    for end in range(71, 81):
        out = model(tokens[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=out.past_key_values)
        torch.testing.assert_close(out.logits[0, 0], alone[1][0, end - 26], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_padding_anywhere_leaves_the_tokens_as_they_are_alone(ours, tokens, options):
    model, mask = ours(**options), torch.rand(tokens.shape) < 0.6
    logits = model(tokens, attention_mask=mask).logits
    for row, seen, actual in zip(tokens, mask, logits, strict=True):
        torch.testing.assert_close(actual[seen], model(row[seen][None]).logits[0], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("columns_of_before", [True, False])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_turns_with_padding_of_their_own_go_on_as_each_row_alone(ours, tokens, options, columns_of_before):
    """A row may have no token in a turn, not even in the first one."""
    model = ours(**options)
    mask, turns = torch.rand(tokens.shape) < 0.5, [(0, 4), (4, 30), (30, 31), (31, 33), (33, 60), (60, 80)]
    mask[0, :4], mask[1, 33:60] = False, False
    cache, results = GLACache(model.config), []
    for begin, end in turns:
        part = mask[:, 0 if columns_of_before else begin : end]
        results.append(model(tokens[:, begin:end], attention_mask=part, past_key_values=cache).logits)
    for row, seen, logits in zip(tokens, mask, torch.cat(results, 1), strict=True):
        torch.testing.assert_close(logits[seen], model(row[seen][None]).logits[0], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize(("padding", "turns"), [((10, 30), (40, 41, 80)), ((3, 4), (4, 8, 9, 80))])
def test_a_turn_without_a_mask_does_not_see_the_padding_before(ours, tokens, options, padding, turns):
    model, mask = ours(**options), torch.ones_like(tokens)
    mask[0, slice(*padding)] = 0
    cache = model(tokens[:, : turns[0]], attention_mask=mask[:, : turns[0]], use_cache=True).past_key_values
    results = [model(tokens[:, begin:end], past_key_values=cache).logits[0] for begin, end in pairwise(turns)]
    alone = model(tokens[:1, mask[0] == 1]).logits[0]
    torch.testing.assert_close(torch.cat(results), alone[turns[0] - 80 :], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_window_keeps_no_more_than_it_shows(ours, tokens, padded):
    model = ours(attn={"layers": [0], "num_heads": 4, "window_size": 7})
    mask = {"attention_mask": torch.ones_like(tokens)} if padded else {}
    cache = model(tokens, use_cache=True, **mask).past_key_values
    assert [x.shape[:3] for x in cache.layers[0].state] == [(2, 4, 6), (2, 4, 6), (2, 6)]
    cache.reset()
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits)


@torch.no_grad()
def test_packed_sequences_have_no_cache_unless_asked_for(ours, tokens):
    model = ours(**CONFIGURATIONS[0])
    offsets = torch.tensor([0, 25, 80], dtype=torch.int32)
    out = model(tokens[:1], cu_seqlens=offsets)
    assert out.past_key_values is None
    assert torch.equal(out.logits, model(tokens[:1], cu_seqlens=offsets.long(), use_cache=False).logits)
    for asked in ({"use_cache": True}, {"past_key_values": GLACache(model.config)}):
        with pytest.raises(ValueError, match="cu_seqlens is given with a cache; pass use_cache=False"):
            model(tokens[:1], cu_seqlens=offsets, **asked)


def test_refusals(ours, tokens):
    for options in CONFIGURATIONS:
        model = ours(**options)
        with pytest.raises(ValueError, match=r"attention_mask (is \[2, 2\]|has 2 columns); expected"):
            model(tokens[:, :3], attention_mask=torch.ones(2, 2))
        cache = model(tokens, use_cache=True).past_key_values
        with pytest.raises(NotImplementedError, match="cannot be taken back"):
            cache.crop(-1)
        torch.testing.assert_close(
            model(tokens[:, :1], past_key_values=cache).logits,
            model(torch.cat([tokens, tokens[:, :1]], 1)).logits[:, 80:],
            **CLOSE,
        )


def test_compiled_training(ours, tokens):
    model = ours(**CONFIGURATIONS[2]).train()
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for each in (model, compiled):
        logits = each(tokens, attention_mask=mask).logits
        loss = F.cross_entropy(logits[mask == 1], tokens[mask == 1])
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*results, **CLOSE)
    assert all(x.isfinite().all() for x in results[0][1])
